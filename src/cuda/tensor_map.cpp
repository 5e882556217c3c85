#include "cuda/tensor_map.hpp"

#include <cuda_runtime_api.h>

#include "core/status.hpp"

namespace qla::cuda {
namespace {

using Encode = CUresult (*)(CUtensorMap*, CUtensorMapDataType, cuuint32_t, void*, const cuuint64_t*, const cuuint64_t*,
                            const cuuint32_t*, const cuuint32_t*, CUtensorMapInterleave, CUtensorMapSwizzle,
                            CUtensorMapL2promotion, CUtensorMapFloatOOBfill);

// libcuda is not linked: the library must load where there is no driver
Encode encode_function() {
  static const Encode f = [] {
    void* p = nullptr;
    cudaDriverEntryPointQueryResult found{};
    const cudaError_t e = cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &p, 12000, cudaEnableDefault, &found);
    return e == cudaSuccess && found == cudaDriverEntryPointSuccess ? reinterpret_cast<Encode>(p) : nullptr;
  }();
  return f;
}

}  // namespace

const char* token_map_obstacle(const TokenMapShape& s) {
  if (reinterpret_cast<uintptr_t>(s.data) % 16 != 0) return "base address is not a multiple of 16 bytes";
  // a dimension of one element may have any stride
  auto bad = [](int64_t extent, int64_t stride) {
    return extent > 1 && (stride <= 0 || stride % 8 != 0 || stride >= int64_t(1) << 39);
  };
  if (bad(s.heads, s.stride_h)) return "head stride is not a positive multiple of 16 bytes";
  if (bad(s.tokens, s.stride_t)) return "token stride is not a positive multiple of 16 bytes";
  if (bad(s.batch, s.stride_b)) return "batch stride is not a positive multiple of 16 bytes";
  return "";
}

namespace {

bool same(const TokenMapShape& a, const TokenMapShape& b) {
  return a.data == b.data && a.stride_b == b.stride_b && a.stride_t == b.stride_t && a.stride_h == b.stride_h &&
         a.batch == b.batch && a.tokens == b.tokens && a.heads == b.heads && a.box_tokens == b.box_tokens;
}
bool same(const StateMapShape& a, const StateMapShape& b) {
  return a.data == b.data && a.stride_n == b.stride_n && a.stride_h == b.stride_h && a.states == b.states && a.heads == b.heads &&
         a.pitch == b.pitch;
}

// The maps this thread made last: q and k serve three kernels of one call, and a training step or a captured loop repeats its
// tensors.
template <typename Shape, int Entries>
struct MapCache {
  struct Entry {
    Shape shape;
    bool bf16 = false, used = false;
    CUtensorMap map;
  };
  Entry entries[Entries];
  int oldest = 0;

  template <typename EncodeMap>
  CUtensorMap get(const Shape& s, bool bf16, const EncodeMap& encode_map) {
    for (const Entry& e : entries)
      if (e.used && e.bf16 == bf16 && same(e.shape, s)) return e.map;
    Entry& e = entries[oldest];
    e.used = false;  // encoding may throw
    e.map = encode_map();
    e.shape = s;
    e.bf16 = bf16;
    e.used = true;
    oldest = (oldest + 1) % Entries;
    return e.map;
  }
};

using Sizes = cuuint64_t[4];
using Strides = cuuint64_t[3];
using Box = cuuint32_t[4];
CUtensorMap encode_map(const void* data, CUtensorMapDataType type, const Sizes& dims, const Strides& strides, const Box& box,
                       CUtensorMapSwizzle swizzle, const char* name) {
  const Encode encode = encode_function();
  if (!encode)
    throw Error(QLA_CUDA_ERROR, concat(name, ": cuTensorMapEncodeTiled not found in the driver; expected CUDA 12 or later"));
  CUtensorMap map;
  const cuuint32_t element[4] = {1, 1, 1, 1};
  const auto attempt = [&] {
    return encode(&map, type, 4, const_cast<void*>(data), dims, strides, box, element, CU_TENSOR_MAP_INTERLEAVE_NONE, swizzle,
                  CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  };
  CUresult r = attempt();
  // A thread whose first CUDA call this is (autograd's, say) has no context yet: the driver makes none, the runtime does.
  int device = -1;
  if (r == CUDA_ERROR_INVALID_CONTEXT && cudaGetDevice(&device) == cudaSuccess && cudaSetDevice(device) == cudaSuccess)
    r = attempt();
  if (r != CUDA_SUCCESS)
    throw Error(QLA_CUDA_ERROR,
                concat(name, ": cuTensorMapEncodeTiled gave ", int(r), " for base ", data, ", dims 128 x ", dims[1], " x ",
                       dims[2], " x ", dims[3], ", strides in bytes ", strides[0], ", ", strides[1], ", ", strides[2]));
  return map;
}

}  // namespace

CUtensorMap make_token_map(const TokenMapShape& s, bool bf16, const char* name) {
  static thread_local MapCache<TokenMapShape, 16> cache;
  return cache.get(s, bf16, [&] {
    const auto stride = [](int64_t extent, int64_t elements) { return cuuint64_t(extent > 1 ? elements * 2 : 256); };
    return encode_map(s.data, bf16 ? CU_TENSOR_MAP_DATA_TYPE_BFLOAT16 : CU_TENSOR_MAP_DATA_TYPE_FLOAT16,
                      {128, cuuint64_t(s.heads), cuuint64_t(s.tokens), cuuint64_t(s.batch)},
                      {stride(s.heads, s.stride_h), stride(s.tokens, s.stride_t), stride(s.batch, s.stride_b)},
                      {64, 1, cuuint32_t(s.box_tokens), 1}, CU_TENSOR_MAP_SWIZZLE_128B, name);
  });
}

bool has_state_map(const StateMapShape& s) {
  const auto good = [](int64_t extent, int64_t stride) {
    return extent == 1 || (extent > 1 && stride > 0 && stride % 4 == 0 && stride < int64_t(1) << 38);
  };
  return s.data && reinterpret_cast<uintptr_t>(s.data) % 16 == 0 && good(s.heads, s.stride_h) && good(s.states, s.stride_n) &&
         s.states <= INT32_MAX;
}

CUtensorMap make_state_map(const StateMapShape& s, const char* name) {
  static thread_local MapCache<StateMapShape, 4> cache;
  return cache.get(s, false, [&] {
    const auto stride = [](int64_t extent, int64_t elements) { return cuuint64_t(extent > 1 ? elements * 4 : 65536); };
    return encode_map(s.data, CU_TENSOR_MAP_DATA_TYPE_FLOAT32, {128, 128, cuuint64_t(s.heads), cuuint64_t(s.states)},
                      {512, stride(s.heads, s.stride_h), stride(s.states, s.stride_n)}, {cuuint32_t(s.pitch), 64, 1, 1},
                      CU_TENSOR_MAP_SWIZZLE_NONE, name);
  });
}

}  // namespace qla::cuda
