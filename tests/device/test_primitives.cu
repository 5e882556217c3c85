// Each primitive of src/cuda/{ptx,tile,sync,math} by itself, one warpgroup each, against a loop on the host.
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cmath>
#include <cstring>
#include <random>

#include "cuda/kernels/forward_fused/role_intra.cuh"
#include "cuda/math/exp.cuh"
#include "cuda/math/tril_inverse.cuh"
#include "cuda/math/warp.cuh"
#include "cuda/ptx/bulk.cuh"
#include "cuda/ptx/control.cuh"
#include "cuda/ptx/shared.cuh"
#include "cuda/ptx/wgmma.cuh"
#include "cuda/sync/ring.cuh"
#include "cuda/tensor_map.hpp"
#include "cuda/tile/fragment.cuh"
#include "device/harness.hpp"

using namespace qla::cuda;
using namespace qla::test;

namespace {

std::mt19937 rng(7);
template <typename T>
std::vector<T> random_values(size_t n, double size = 1) {
  std::uniform_real_distribution<float> d(-float(size), float(size));
  std::vector<T> x(n);
  for (auto& v : x) v = T(d(rng));
  return x;
}
template <typename T>
double value(T x) {
  return double(float(x));
}

// ---- wgmma: D[64][N] = A[64][16 Steps] B, B given as [N][k] (K-major) or [k][N] (MN-major); A by registers or from shared
// memory
template <typename T, int N, int TransB, bool FromShared>
__global__ void __launch_bounds__(128) product(const T* a, const T* b, float* d) {
  constexpr int K = 64;
  __shared__ __align__(1024) uint8_t s_a[64 * 128], s_b[128 * 128 * 2];
  const int tid = threadIdx.x, lane = tid % 32, warp = tid / 32;
  for (int i = tid; i < 64 * K; i += 128) *reinterpret_cast<T*>(s_a + swizzle_128(i / K * 128 + i % K * 2)) = a[i];
  for (int i = tid; i < N * K; i += 128) {
    if (TransB)
      *reinterpret_cast<T*>(s_b + panel_address(i / N, i % N, K)) = b[i];  // [k][N]
    else
      *reinterpret_cast<T*>(s_b + swizzle_128(i / K * 128 + i % K * 2)) = b[i];  // [N][k]
  }
  ptx::proxy_fence();
  __syncthreads();
  const uint32_t sa = ptx::shared_address(s_a), sb = ptx::shared_address(s_b);
  float acc[N / 2];
  uint32_t fa[16];
  for (int k = 0; k < 4; k++)
    ptx::ldmatrix_x4(sa + swizzle_128((16 * warp + lane % 16) * 128 + (16 * k + lane / 16 * 8) * 2), fa[4 * k], fa[4 * k + 1],
                     fa[4 * k + 2], fa[4 * k + 3]);
  ptx::wgmma_fence();
#pragma unroll
  for (int k = 0; k < 4; k++) {
    const uint64_t right = TransB ? descriptor_mn_major(sb + 2048 * k, K * 128) : descriptor_k_major(sb + 32 * k);
    if constexpr (FromShared)
      ptx::wgmma_ss<T, TransB>(acc, descriptor_k_major(sa + 32 * k), right, k > 0);
    else
      ptx::wgmma_rs<T, TransB>(acc, fa + 4 * k, right, k > 0);
  }
  ptx::wgmma_commit();
  ptx::wgmma_wait();
  for (int i = 0; i < N / 2; i++)
    d[(fragment_row(warp, lane) + i / 2 % 2 * 8) * N + i / 4 * 8 + fragment_col(lane) + i % 2] = acc[i];
}
template <typename T, int N, int TransB, bool FromShared>
void test_product(const char* type) {
  const auto a = random_values<T>(64 * 64), b = random_values<T>(N * 64);
  Device<T> da(a), db(b);
  Device<float> dd(64 * N);
  product<T, N, TransB, FromShared><<<1, 128>>>(da.get(), db.get(), dd.get());
  cuda_ok(cudaDeviceSynchronize(), "product");
  const auto d = dd.download();
  double worst = 0;
  for (int i = 0; i < 64; i++)
    for (int j = 0; j < N; j++) {
      double s = 0;
      for (int k = 0; k < 64; k++) s += value(a[i * 64 + k]) * value(TransB ? b[k * N + j] : b[j * 64 + k]);
      worst = std::max(worst, std::abs(s - d[i * N + j]));
    }
  check(worst < 2e-5, std::string("wgmma ") + (FromShared ? "ss " : "rs ") + type + " n" + std::to_string(N) +
                          (TransB ? " MN-major" : " K-major") + " error " + std::to_string(worst));
}
template <typename T>
void test_products(const char* type) {
  test_product<T, 16, 0, false>(type);
  test_product<T, 32, 0, false>(type);
  test_product<T, 64, 0, false>(type);
  test_product<T, 128, 0, false>(type);
  test_product<T, 64, 1, false>(type);
  test_product<T, 128, 1, false>(type);
  test_product<T, 16, 0, true>(type);
  test_product<T, 32, 0, true>(type);
  test_product<T, 64, 0, true>(type);
  test_product<T, 128, 0, true>(type);
  test_product<T, 128, 1, true>(type);
}

// ---- a product's result as the next one's left operand: (A B) C with everything in registers between; and mma.sync for the same
template <typename T>
__global__ void __launch_bounds__(128) chained(const T* a, const T* b, const T* c, float* d) {
  __shared__ __align__(1024) uint8_t s[3 * 8192];
  const int tid = threadIdx.x, lane = tid % 32, warp = tid / 32;
  for (int i = tid; i < 4096; i += 128) {
    *reinterpret_cast<T*>(s + swizzle_128(i / 64 * 128 + i % 64 * 2)) = a[i];
    *reinterpret_cast<T*>(s + 8192 + swizzle_128(i / 64 * 128 + i % 64 * 2)) = b[i];
    *reinterpret_cast<T*>(s + 16384 + swizzle_128(i / 64 * 128 + i % 64 * 2)) = c[i];
  }
  ptx::proxy_fence();
  __syncthreads();
  const uint32_t base = ptx::shared_address(s);
  float first[32], second[32];
  ptx::wgmma_fence();
#pragma unroll
  for (int k = 0; k < 4; k++)
    ptx::wgmma_ss<T, 0>(first, descriptor_k_major(base + 32 * k), descriptor_k_major(base + 8192 + 32 * k), k > 0);
  ptx::wgmma_commit();
  ptx::wgmma_wait();
  uint32_t operand[16];
  pack_operand<T>(operand, first);
  ptx::wgmma_fence();
#pragma unroll
  for (int k = 0; k < 4; k++) ptx::wgmma_rs<T, 0>(second, operand + 4 * k, descriptor_k_major(base + 16384 + 32 * k), k > 0);
  ptx::wgmma_commit();
  ptx::wgmma_wait();
  for (int i = 0; i < 32; i++)
    d[(fragment_row(warp, lane) + i / 2 % 2 * 8) * 64 + i / 4 * 8 + fragment_col(lane) + i % 2] = second[i];
  for (int n = 0; n < 8; n++) {  // the same by mma.sync, from the same fragments
    float m[4] = {};
    for (int k = 0; k < 4; k++) {
      uint32_t b0, b1, b2, b3;
      ptx::ldmatrix_x4(base + 16384 + swizzle_128((8 * n + lane % 8) * 128 + (16 * k + lane / 8 % 2 * 8) * 2), b0, b1, b2, b3);
      ptx::mma_m16n8k16<T>(m, operand[4 * k], operand[4 * k + 1], operand[4 * k + 2], operand[4 * k + 3], b0, b1);
    }
    for (int i = 0; i < 4; i++) d[4096 + (fragment_row(warp, lane) + i / 2 * 8) * 64 + 8 * n + fragment_col(lane) + i % 2] = m[i];
  }
}
template <typename T>
void test_chained(const char* type) {
  const auto a = random_values<T>(4096, 0.3), b = random_values<T>(4096, 0.3), c = random_values<T>(4096, 0.3);
  Device<T> da(a), db(b), dc(c);
  Device<float> dd(8192);
  chained<T><<<1, 128>>>(da.get(), db.get(), dc.get(), dd.get());
  cuda_ok(cudaDeviceSynchronize(), "chained");
  const auto d = dd.download();
  double worst[2] = {0, 0};
  for (int i = 0; i < 64; i++) {
    double ab[64];
    for (int j = 0; j < 64; j++) {
      double s = 0;
      for (int k = 0; k < 64; k++) s += value(a[i * 64 + k]) * value(b[j * 64 + k]);
      ab[j] = value(T(float(s)));
    }
    for (int j = 0; j < 64; j++) {
      double s = 0;
      for (int k = 0; k < 64; k++) s += ab[k] * value(c[j * 64 + k]);
      for (int w = 0; w < 2; w++) worst[w] = std::max(worst[w], std::abs(s - d[w * 4096 + i * 64 + j]));
    }
  }
  check(worst[0] < 4e-3, std::string("wgmma chained through registers, ") + type + " error " + std::to_string(worst[0]));
  check(worst[1] < 4e-3, std::string("mma.sync from the same fragments, ") + type + " error " + std::to_string(worst[1]));
}

// ---- transposed fragments: a token-major tile in, its transpose as fragments
__global__ void __launch_bounds__(128) transpose(const __half* in, __half* fragments) {
  __shared__ __align__(1024) uint8_t s_in[16384];
  const int tid = threadIdx.x, lane = tid % 32, warp = tid / 32;
  for (int i = tid; i < 64 * 128; i += 128) *reinterpret_cast<__half*>(s_in + panel_address(i / 128, i % 128, 64)) = in[i];
  __syncthreads();
  for (int half = 0; half < 2; half++)
    for (int j = 0; j < 4; j++) {
      uint32_t f[4];
      load_transposed(f, ptx::shared_address(s_in), 16 * j, 64 * half + 16 * warp, 64, lane);
      for (int r = 0; r < 4; r++) {  // f[2 m + h]: value column 16 w + lane / 4 + 8 h, tokens 16 j + 8 m + 2 (lane % 4) + c
        const float2 x = unpack<__half>(f[r]);
        __half* to = fragments + (64 * half + 16 * warp + lane / 4 + r % 2 * 8) * 64 + 16 * j + r / 2 * 8 + fragment_col(lane);
        to[0] = __float2half(x.x);
        to[1] = __float2half(x.y);
      }
    }
}
void test_transpose() {
  const auto in = random_values<__half>(8192);
  Device<__half> din(in), df(8192);
  transpose<<<1, 128>>>(din.get(), df.get());
  cuda_ok(cudaDeviceSynchronize(), "transpose");
  const auto f = df.download();
  bool turned = true;
  for (int t = 0; t < 64; t++)
    for (int v = 0; v < 128; v++) turned &= value(in[t * 128 + v]) == value(f[v * 64 + t]);
  check(turned, "load_transposed gives the transpose's fragments");
}

// ---- a ring of bulk loads and stores between two warps: 50 blocks of 1 KiB through 3 stages, each doubled on the way
__global__ void __launch_bounds__(64) ring_copy(const float* in, float* out, int blocks) {
  __shared__ __align__(128) float s[3][256];
  __shared__ __align__(8) uint64_t bars[6];
  const Edge<3> edge{ptx::shared_address(bars)};
  if (threadIdx.x == 0) {
    edge.init(1, 1);
    ptx::mbarrier_init_fence();
  }
  __syncthreads();
  Ring<3> ring;
  if (threadIdx.x == 0) {
    for (int i = 0; i < blocks; i++) {
      edge.producer_wait(ring);
      ptx::mbarrier_arrive_expect(edge.full(ring.stage), 1024);
      ptx::bulk_load(ptx::shared_address(s[ring.stage]), in + 256 * i, 1024, edge.full(ring.stage));
      ring.advance();
    }
  } else if (threadIdx.x >= 32) {
    for (int i = 0; i < blocks; i++) {
      edge.consumer_wait(ring);
      for (int j = threadIdx.x - 32; j < 256; j += 32) s[ring.stage][j] *= 2.f;
      ptx::proxy_fence();
      __syncwarp();
      if (threadIdx.x == 32) {
        ptx::bulk_store(out + 256 * i, ptx::shared_address(s[ring.stage]), 1024);
        ptx::bulk_commit();
        ptx::bulk_wait_read();
        edge.release(ring);
      }
      __syncwarp();
      ring.advance();
    }
    ptx::bulk_wait();
  }
}
void test_ring() {
  const auto in = random_values<float>(256 * 50);
  Device<float> din(in), dout(in.size());
  ring_copy<<<1, 64>>>(din.get(), dout.get(), 50);
  cuda_ok(cudaDeviceSynchronize(), "ring");
  const auto out = dout.download();
  bool good = dout.guards_intact();
  for (size_t i = 0; i < in.size(); i++) good &= out[i] == 2 * in[i];
  check(good, "ring of bulk loads and stores");
}

// ---- tensor loads: strided heads, batch rows, rows past T read as zeros; tensor store leaves them alone
__global__ void tensor_copy(const __grid_constant__ CUtensorMap from, const __grid_constant__ CUtensorMap to, __half* seen,
                            int head, int token, int batch) {
  __shared__ __align__(1024) uint8_t s[8192];
  __shared__ __align__(8) uint64_t bar_[1];
  const uint32_t bar = ptx::shared_address(bar_);
  if (threadIdx.x == 0) {
    ptx::mbarrier_init(bar, 1);
    ptx::mbarrier_init_fence();
    ptx::mbarrier_arrive_expect(bar, 8192);
    ptx::tensor_load_4d(ptx::shared_address(s), &from, 64, head, token, batch, bar);
    ptx::mbarrier_wait(bar, 0);
    ptx::tensor_store_4d(&to, 64, head, token, batch, ptx::shared_address(s));
    ptx::bulk_commit();
    ptx::bulk_wait();
    for (int i = 0; i < 4096; i++) seen[i] = *reinterpret_cast<__half*>(s + swizzle_128(i / 64 * 128 + i % 64 * 2));
  }
}
void test_tensor() {
  const int B = 2, T = 100, H = 3, pitch = 5;  // heads 3 of 5 in memory
  const auto in = random_values<__half>(size_t(B) * T * pitch * 128);
  Device<__half> din(in), dout(in.size()), dseen(4096);
  TokenMapShape shape{din.get(), int64_t(T) * pitch * 128, pitch * 128, 128, B, T, H};
  const CUtensorMap from = make_token_map(shape, false, "from");
  shape.data = dout.get();
  const CUtensorMap to = make_token_map(shape, false, "to");
  tensor_copy<<<1, 32>>>(from, to, dseen.get(), 2, 64, 1);
  cuda_ok(cudaDeviceSynchronize(), "tensor");
  const auto seen = dseen.download(), out = dout.download();
  bool loaded = true, stored = dout.guards_intact();
  for (int r = 0; r < 64; r++)
    for (int c = 0; c < 64; c++)
      loaded &= value(seen[r * 64 + c]) == (64 + r < T ? value(in[((size_t(T) + 64 + r) * pitch + 2) * 128 + 64 + c]) : 0.0);
  for (size_t i = 0; i < out.size(); i++) {
    const size_t col = i % 128, head = i / 128 % pitch, row = i / 128 / pitch;
    const bool inside = col >= 64 && head == 2 && row >= size_t(T) + 64;
    stored &= inside ? value(out[i]) == value(in[i]) : std::isnan(value(out[i]));
  }
  check(loaded, "tensor load: strides, batch row, zeros past T");
  check(stored, "tensor store writes its box inside T and nothing else");
  TokenMapShape odd{din.get(), 0, 128 * 3 + 4, 128, 1, 8, 3};
  check(*token_map_obstacle(odd) != '\0', "a token stride that is not a multiple of 16 bytes is refused");
  odd.stride_t = 128 * 3;
  check(*token_map_obstacle(odd) == '\0', "a multiple of 16 bytes is taken");
  odd.data = reinterpret_cast<const char*>(din.get()) + 2;
  check(*token_map_obstacle(odd) != '\0', "a base that is not 16-byte aligned is refused");
}

// ---- sums, exp2, cp.async
__global__ void warp_math(const float* x, float* out) {
  const int lane = threadIdx.x;
  __shared__ float s[32];
  ptx::cp_async<4>(ptx::shared_address(s + lane), x + lane);
  ptx::cp_async_wait_all();
  __syncwarp();
  const float v = s[lane];
  out[lane] = warp_inclusive_sum(v, lane);
  out[32 + lane] = warp_suffix_sum(v, lane);
  out[64 + lane] = warp_sum(v);
  out[96 + lane] = exp2_approx(v * 20);
  out[128 + lane] = max_keep_nan(lane == 3 ? NAN : lane == 4 ? -INFINITY : v, -0.25f);
}
void test_warp() {
  const auto x = random_values<float>(32);
  Device<float> dx(x), dout(160);
  warp_math<<<1, 32>>>(dx.get(), dout.get());
  cuda_ok(cudaDeviceSynchronize(), "warp");
  const auto out = dout.download();
  double all = 0, worst[4] = {};
  for (float v : x) all += v;
  double through = 0;
  bool kept = true;
  for (int i = 0; i < 32; i++) {
    const double before = through;
    through += x[i];
    worst[0] = std::max(worst[0], std::abs(through - out[i]));
    worst[1] = std::max(worst[1], std::abs(all - before - out[32 + i]));
    worst[2] = std::max(worst[2], std::abs(all - out[64 + i]));
    worst[3] = std::max(worst[3], std::abs(out[96 + i] / std::exp2(double(x[i] * 20)) - 1));
    kept &= i == 3 ? std::isnan(out[128 + i]) : out[128 + i] == (i == 4 ? -0.25f : std::max(x[i], -0.25f));
  }
  check(worst[0] < 2e-6 && worst[1] < 2e-6 && worst[2] < 2e-6, "warp sums");
  check(worst[3] < 1e-6, "exp2");
  check(kept, "max_keep_nan");
}

// ---- the exact inverse, ordinary and guarded, of a given strictly lower L (U = -L^T), as the fused form has it: with the next
// chunk's first scores between its products
constexpr int kInverseBytes = kTileSmemBytes + FusedConfig::kExchangeBytes + 2 * FusedConfig::kPanelBytes;
template <typename T, bool Guarded>
__global__ void __launch_bounds__(128) inverse(const float* l, const T* keys, float* out, float* scores, int* overflow) {
  extern __shared__ __align__(1024) uint8_t s[];
  __shared__ uint64_t all_issued;  // what the second state waits for
  const uint32_t tile = ptx::shared_address(s), ex = tile + kTileSmemBytes, issued = ptx::shared_address(&all_issued);
  const uint32_t stage = ex + FusedConfig::kExchangeBytes;
  const int tid = threadIdx.x, lane = tid % 32, warp = tid / 32;
  if (tid == 0) {
    ptx::mbarrier_init(issued, 4);
    ptx::mbarrier_init_fence();
  }
  for (int i = tid; i < 1024; i += 128) ptx::sts4u(tile + 16 * i, 0, 0, 0, 0);  // the tile and the exchange memory
  for (int i = tid; i < 64 * 128; i += 128)
    *reinterpret_cast<T*>(s + (stage - tile) + i % 128 / 64 * FusedConfig::kPanelBytes + FusedConfig::kOffK +
                          swizzle_128(i / 128 * 128 + i % 64 * 2)) = keys[i];
  __syncthreads();
  const IntraChunk x{0, tile, ex, 1.f, lane, tril::Lane(lane)};
  for (int b = warp; b < 4; b++) {
    float u[8];  // the accumulators' block [j][i]
    for (int n = 0; n < 8; n++) {
      const int i = n / 4 * 8 + fragment_col(lane) + n % 2, j = lane / 4 + n / 2 % 2 * 8;
      const int row = 16 * b + i, col = 16 * warp + j;
      u[n] = row > col ? -l[row * 64 + col] : 0.f;
      if (Guarded)
        ptx::sts(ex + tril::guarded_block(b, warp) + (i * 16 + j) * 4, u[n]);
      else if (b == warp)
        ptx::sts(x.u() + warp * intra::kBlockU + intra::place_u(j, i), u[n]);
    }
    if (Guarded || b == warp) continue;
    if (b == 1)
      put_u_block<1>(x, u, warp);
    else if (b == 2)
      put_u_block<2>(x, u, warp);
    else
      put_u_block<3>(x, u, warp);
  }
  __syncthreads();
  bool poison = false;
  if (Guarded) {
    tril::guarded_inverse<T>(tile, ex, tid);
  } else {
    if (warp == 3) invert_diagonals<T>(x, InvertedPlaces(x));
    ptx::proxy_fence();
    ptx::named_sync(kIntraBarrier + 1, 128);
    float acc[48];
    poison = blocks_and_scores<T, false>(acc, x, uniform(stage), warp, x.at, kIntraBarrier + 2, issued);
    ptx::mbarrier_wait(issued, 0);
    ptx::wgmma_wait();  // the second scores' product is still under way
    for (int i = 0; i < 16; i++)
      scores[(16 * warp + lane / 4 + i / 2 % 2 * 8) * 64 + 32 + i / 4 * 8 + fragment_col(lane) + i % 2] = acc[i];
  }
  if (__syncthreads_or(poison) && tid == 0) *overflow = 1;
  for (int i = tid; i < 4096; i += 128) {
    const int row = i / 64, col = i % 64, w = col / 16;
    T x = from_float<T>(0.f);
    if (w <= row / 16)
      x = *reinterpret_cast<T*>(s + tril::tile_block<true>(row / 16, w) + swizzle_32(row % 16 * 32 + col % 16 * 2));
    out[i] = to_float<T>(x);
  }
}
template <typename T, bool Guarded>
void test_inverse(const char* name, double size, double limit, bool want_overflow, double least = 0) {
  std::vector<float> l(4096, 0.f);
  std::uniform_real_distribution<float> d{static_cast<float>(least), static_cast<float>(size)};
  for (int i = 0; i < 64; i++)
    for (int j = 0; j < i; j++) l[i * 64 + j] = d(rng);
  const auto keys = random_values<T>(64 * 128);
  Device<float> dl(l), dout(4096), dscores(4096);
  Device<T> dkeys(keys);
  Device<int> dover(std::vector<int>{0});
  cuda_ok(cudaFuncSetAttribute(inverse<T, Guarded>, cudaFuncAttributeMaxDynamicSharedMemorySize, kInverseBytes), "attribute");
  inverse<T, Guarded><<<1, 128, kInverseBytes>>>(dl.get(), dkeys.get(), dout.get(), dscores.get(), dover.get());
  cuda_ok(cudaDeviceSynchronize(), name);
  const auto out = dout.download();
  std::vector<double> x(4096, 0.0);
  double largest = 1, worst = 0;
  for (int j = 0; j < 64; j++) {
    x[j * 65] = 1;
    for (int i = j + 1; i < 64; i++) {
      for (int m = j; m < i; m++) x[i * 64 + j] -= double(l[i * 64 + m]) * x[m * 64 + j];
      largest = std::max(largest, std::abs(x[i * 64 + j]));
    }
  }
  const bool overflow = dover.download()[0] != 0;
  if (!overflow)
    for (int i = 0; i < 4096; i++) worst = std::max(worst, std::isfinite(out[i]) ? std::abs(out[i] - x[i]) / largest : INFINITY);
  check(worst <= limit && overflow == want_overflow,
        std::string(name) + " error " + std::to_string(worst) + " largest " + std::to_string(largest));
  if (Guarded) return;
  const auto scores = dscores.download();
  double off = 0;
  for (int j = 0; j < 64; j++)
    for (int i = 32; i < 64; i++) {
      double exact = 0;
      for (int d = 0; d < 128; d++) exact += value(keys[j * 128 + d]) * value(keys[i * 128 + d]);
      off = std::max(off, std::abs(exact - double(scores[j * 64 + i])));
    }
  check(off < 1e-4, std::string(name) + ": K K^T of the later half between its products");
}

}  // namespace

int main() {
  test_products<__nv_bfloat16>("bf16");
  test_products<__half>("fp16");
  test_chained<__nv_bfloat16>("bf16");
  test_chained<__half>("fp16");
  test_transpose();
  test_ring();
  test_tensor();
  test_warp();
  test_inverse<__nv_bfloat16, false>("inverse, small entries, bf16", 0.2, 4e-3, false);
  test_inverse<__half, false>("inverse, small entries, fp16", 0.2, 1.5e-3, false);
  test_inverse<__half, false>("inverse, nearly equal keys, fp16", 1.0, 2e-3, false, 0.95);
  test_inverse<__nv_bfloat16, true>("guarded inverse, bf16", 0.2, 4e-3, false);
  test_inverse<__nv_bfloat16, true>("guarded inverse, large entries", 3, 4e-3, false);
  test_inverse<__nv_bfloat16, false>("a growing inverse is reported", 3, 4e-3, true);
  return summary("primitives");
}
