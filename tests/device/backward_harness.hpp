// Device buffers, tiles of a packed problem as the backward kernels read them, and the comparison with the truth. For one program
// alone.
#pragma once

#include <cuda.h>
#include <cudaTypedefs.h>
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <vector>

#include "backward_reference.hpp"
#include "cuda/kernels/backward_passes/launch.hpp"
#include "cuda/kernels/chunk_grads/launch.hpp"
#include "cuda/math/exp.cuh"
#include "cuda/tile/pack.cuh"
#include "cuda/tile/swizzle.cuh"
#include "qla/qla.h"

using namespace qla;
using namespace qla::test;
namespace cg = qla::cuda::chunk_grads;
namespace bp = qla::cuda::backward_passes;

#define CK(x)                                                                        \
  do {                                                                               \
    const cudaError_t e_ = (x);                                                      \
    if (e_ != cudaSuccess) {                                                         \
      std::printf("%s:%d %s: %s\n", __FILE__, __LINE__, #x, cudaGetErrorString(e_)); \
      std::exit(2);                                                                  \
    }                                                                                \
  } while (0)

namespace {

int passes = 0, failures = 0;

template <typename U>
struct Buffer {  // device memory, poisoned with NaN
  U* data = nullptr;
  size_t count;
  explicit Buffer(size_t n) : count(n) {
    CK(cudaMalloc(&data, (n + 64) * sizeof(U)));
    CK(cudaMemset(data, 0xff, (n + 64) * sizeof(U)));
  }
  explicit Buffer(const std::vector<U>& x) : Buffer(x.size()) {
    CK(cudaMemcpy(data, x.data(), x.size() * sizeof(U), cudaMemcpyHostToDevice));
  }
  std::vector<U> pull() const {
    std::vector<U> x(count);
    CK(cudaMemcpy(x.data(), data, count * sizeof(U), cudaMemcpyDeviceToHost));
    return x;
  }
  ~Buffer() { cudaFree(data); }
  Buffer(const Buffer&) = delete;
};

template <typename T>
double round_to(double x) {
  return double(float(T(float(x))));
}
template <typename T>
std::vector<T> cast(const std::vector<double>& x) {
  std::vector<T> r(x.size());
  for (size_t i = 0; i < x.size(); i++) r[i] = T(float(x[i]));
  return r;
}
template <typename T>
std::vector<double> widen(const std::vector<T>& x) {
  std::vector<double> r(x.size());
  for (size_t i = 0; i < x.size(); i++) r[i] = double(float(x[i]));
  return r;
}

// a token map as src/cuda/tensor_map.hpp makes it, of a contiguous [tokens, heads, 128] tensor
CUtensorMap token_map(const void* data, bool bf16, int heads, int tokens) {
  static PFN_cuTensorMapEncodeTiled_v12000 encode = nullptr;
  if (!encode) {
    cudaDriverEntryPointQueryResult found;
    void* f = nullptr;
    CK(cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &f, 12000, cudaEnableDefault, &found));
    encode = reinterpret_cast<PFN_cuTensorMapEncodeTiled_v12000>(f);
  }
  CUtensorMap m;
  const cuuint64_t dims[4] = {128, cuuint64_t(heads), cuuint64_t(tokens), 1},
                   strides[3] = {256, cuuint64_t(heads) * 256, cuuint64_t(heads) * 256 * tokens};
  const cuuint32_t box[4] = {64, 1, 64, 1}, ones[4] = {1, 1, 1, 1};
  const CUresult r = encode(&m, bf16 ? CU_TENSOR_MAP_DATA_TYPE_BFLOAT16 : CU_TENSOR_MAP_DATA_TYPE_FLOAT16, 4,
                            const_cast<void*>(data), dims, strides, box, ones, CU_TENSOR_MAP_INTERLEAVE_NONE,
                            CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  if (r != CUDA_SUCCESS) {
    std::printf("tensor map: %d\n", int(r));
    std::exit(2);
  }
  return m;
}

void compare(const std::string& name, const char* what, const std::vector<double>& got, const std::vector<double>& want,
             double limit, bool whole = false) {
  double num = 0, den = 0;
  size_t bad = size_t(-1);
  for (size_t i = 0; i < want.size(); i++) {
    if (!std::isfinite(got[i]) && bad == size_t(-1)) bad = i;
    num += (got[i] - want[i]) * (got[i] - want[i]);
    den += want[i] * want[i];
  }
  const double error = den > 0 ? std::sqrt(num / den) : std::sqrt(num);
  const bool good = error <= limit;
  passes += good;
  failures += !good;
  std::printf("%s %-28s %-9s %.2e%s", good ? "ok   " : "WRONG", name.c_str(), what, error, good ? "\n" : "");
  if (!good)
    std::printf("  (limit %.1e, |want| %.3e, first not finite %lld of %zu)\n", limit, std::sqrt(den), (long long)bad,
                want.size());
  (void)whole;
}

std::vector<cuda::ChunkRecord> chunk_table(const Problem& p) {
  std::vector<cuda::ChunkRecord> r(num_slots(p), cuda::ChunkRecord{0, 0, 0});
  for (int n = 0; n < int(p.c.lens.size()); n++)
    for (int i = 0; i * kRows < p.c.lens[n]; i++)
      r[slot_of(p, n, i)] = {p.bos[n] + i * kRows, std::min(kRows, p.c.lens[n] - i * kRows), n};
  return r;
}
std::vector<float> gate_vectors(const Problem& p, const std::vector<cuda::ChunkRecord>& chunks) {
  std::vector<float> r(chunks.size() * p.c.hv * cuda::kVecFloats, std::nanf(""));
  for (size_t s = 0; s < chunks.size(); s++)
    for (int h = 0; h < p.c.hv && chunks[s].rows; h++) {
      float* x = r.data() + (s * p.c.hv + h) * cuda::kVecFloats;
      double sum = 0;
      for (int i = 0; i < kRows; i++) {
        Gates g = i < chunks[s].rows ? gates_of(p, int(chunks[s].token) + i, h) : Gates{0, 0, 1, 1};
        sum += g.g;
        x[cuda::kVecG + i] = float(sum * cuda::kLog2e);
        x[cuda::kVecBeta + i] = g.beta;
        x[cuda::kVecRk + i] = g.rk;
        x[cuda::kVecRq + i] = g.rq;
      }
      for (int i = 0; i < kRows; i++) {
        const double log2_gamma = x[cuda::kVecG + i], gamma = std::exp2(log2_gamma),
                     tail = std::exp2(sum * cuda::kLog2e - log2_gamma);
        x[cuda::kVecK + i] = gamma * x[cuda::kVecRk + i];
        x[cuda::kVecQ + i] = p.c.scale * gamma * x[cuda::kVecRq + i];
        x[cuda::kVecE + i] = tail * x[cuda::kVecBeta + i] * x[cuda::kVecRk + i];
        x[cuda::kVecGamma + i] = gamma;
      }
    }
  return r;
}
// [slot][HV][K][V] -> half tiles of the snapshots (formats.hpp); and token rows -> Delta tiles
template <typename T>
std::vector<T> state_tiles(const Problem& p, const std::vector<double>& x) {
  std::vector<T> r(x.size());
  const int64_t count = x.size() / (kDim * kDim);
  for (int64_t i = 0; i < count; i++)
    for (int f = 0; f < kDim; f++)
      for (int v = 0; v < kDim; v++)
        r[i * kDim * kDim + v / 64 * 8192 + cuda::panel_address(v % 64, f, kRows) / 2] = T(float(x[(i * kDim + f) * kDim + v]));
  return r;
}
template <typename T>
std::vector<T> token_tiles(const Problem& p, const std::vector<cuda::ChunkRecord>& chunks, const std::vector<double>& x) {
  std::vector<T> r(chunks.size() * p.c.hv * 8192, T(0.f));
  for (size_t s = 0; s < chunks.size(); s++)
    for (int h = 0; h < p.c.hv; h++)
      for (int i = 0; i < chunks[s].rows; i++)
        for (int v = 0; v < kDim; v++)
          r[(s * p.c.hv + h) * 8192 + cuda::panel_address(i, v, kRows) / 2] =
              T(float(x[p.v_at(int(chunks[s].token) + i, h) + v]));
  return r;
}

// Abar (F3) of every chunk and head, compact tiles
template <typename T>
void abar_tiles(const Problem& p, const std::vector<cuda::ChunkRecord>& chunks, std::vector<T>& abar) {
  constexpr int kElements = cuda::kTileBytes / 2;
  abar.assign(chunks.size() * p.c.hv * kElements, T(0.f));
  std::vector<double> M(kRows * kRows), A(kRows * kRows);
  for (size_t s = 0; s < chunks.size(); s++)
    for (int h = 0; h < p.c.hv && chunks[s].rows; h++) {
      const int rows = chunks[s].rows, t0 = int(chunks[s].token), hk = h / (p.c.hv / p.c.hk);
      Gates g[kRows];
      double cum[kRows], sum = 0;
      for (int i = 0; i < kRows; i++) {
        g[i] = i < rows ? gates_of(p, t0 + i, h) : Gates{0, 0, 0, 0};
        cum[i] = sum += g[i].g;
      }
      auto put = [&](int i, int j, double x) {
        const int panel = j / 16, row = i - 16 * panel;
        const uint32_t at = cuda::panel_offset(panel) + cuda::swizzle_32(row * 32 + j % 16 * 2);
        abar[(s * p.c.hv + h) * kElements + at / 2] = T(float(x));
      };
      for (int i = 0; i < kRows; i++)
        for (int j = 0; j <= i; j++) {
          double kk = 0;
          if (i < rows)
            for (int f = 0; f < kDim; f++) kk += p.k[p.qk_at(t0 + i, hk) + f] * p.k[p.qk_at(t0 + j, hk) + f];
          const double G = std::exp(cum[i] - cum[j]), w = G * g[j].beta * g[j].rk;
          M[i * kRows + j] = i == j ? 1 : w * g[i].rk * kk;
        }
      for (int j = 0; j < kRows; j++)
        for (int i = j; i < kRows; i++) {
          double x = i == j;
          for (int m = j; m < i; m++) x -= M[i * kRows + m] * A[m * kRows + j];
          A[i * kRows + j] = x;
          put(i, j, x);
        }
    }
}

template <typename T, typename Out>
cg::GradView view(const Buffer<Out>& b, int dtype, int heads, int width, int tokens) {
  const int bulk = width == 128 && dtype != QLA_FLOAT32;
  return {b.data, dtype, 1, bulk, int64_t(tokens) * heads * width, int64_t(heads) * width, width};
}

}  // namespace
