// NaN in all of the shared memory of every multiprocessor. A test that repeats a call finds there what the call before left, at
// the same place and often with the right numbers in it: what a kernel reads without having written it, or before, is seen only
// when something else lies there. In the tests of the C ABI (support/device_memory.cpp) and, as a library, in those of Python
// (conftest.py).
#include <cuda_runtime.h>

#include <cstdint>

namespace {

constexpr int kThreads = 1024, kMostDevices = 64;

__global__ void __launch_bounds__(kThreads) poison_shared(int words) {
  extern __shared__ uint4 all[];
  const uint4 nan = make_uint4(~0u, ~0u, ~0u, ~0u);
  for (int i = threadIdx.x; i < words / 4; i += kThreads) {
    const uint32_t to = uint32_t(__cvta_generic_to_shared(all + i));
    asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(to), "r"(nan.x), "r"(nan.y), "r"(nan.z), "r"(nan.w) : "memory");
  }
}

struct Limits {
  int multiprocessors, bytes;
};

cudaError_t limits_of(int device, Limits& limits) {
  static Limits known[kMostDevices];
  if (device < 0 || device >= kMostDevices) return cudaErrorInvalidDevice;
  Limits& found = known[device];
  if (found.multiprocessors == 0) {
    Limits asked{};
    if (cudaError_t e = cudaDeviceGetAttribute(&asked.bytes, cudaDevAttrMaxSharedMemoryPerBlockOptin, device)) return e;
    if (cudaError_t e = cudaDeviceGetAttribute(&asked.multiprocessors, cudaDevAttrMultiProcessorCount, device)) return e;
    if (cudaError_t e = cudaFuncSetAttribute(poison_shared, cudaFuncAttributeMaxDynamicSharedMemorySize, asked.bytes)) return e;
    found = asked;
  }
  limits = found;
  return cudaSuccess;
}

}  // namespace

// On the current device, which is `device`; a CTA takes a whole multiprocessor. Returns a cudaError_t.
extern "C" __attribute__((visibility("default"))) int qla_poison_shared(int device, void* stream) {
  Limits limits{};
  if (cudaError_t e = limits_of(device, limits)) return int(e);
  poison_shared<<<limits.multiprocessors, kThreads, limits.bytes, static_cast<cudaStream_t>(stream)>>>(limits.bytes / 4);
  return int(cudaGetLastError());
}
