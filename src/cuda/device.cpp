#include "cuda/device.hpp"

#include <atomic>
#include <cstdio>
#include <cstring>
#include <mutex>

#include "core/backend.hpp"
#include "cuda/kernels/backward_passes/launch.hpp"
#include "cuda/kernels/chunk_grads/launch.hpp"
#include "cuda/kernels/chunk_intra/launch.hpp"
#include "cuda/kernels/cp_merge/launch.hpp"
#include "cuda/kernels/forward/launch.hpp"
#include "cuda/kernels/pass_merge/launch.hpp"
#include "cuda/kernels/plan_segments/launch.hpp"

namespace qla::cuda {
namespace {

constexpr int kMaxDevices = 64;

struct Entry {
  std::mutex lock;
  std::atomic<bool> known{false}, prepared{false};
  Device device;
};
Entry& entry(int ordinal) {
  static Entry entries[kMaxDevices];
  return entries[ordinal];
}

int count_devices() {
  int count = 0;
  if (cudaGetDeviceCount(&count) != cudaSuccess) {  // no driver, or none that this runtime can use
    cudaGetLastError();
    return 0;
  }
  return count;
}

}  // namespace

const Device& device_of(int ordinal) {
  QLA_CHECK(ordinal >= 0 && ordinal < kMaxDevices, "device: expected a CUDA ordinal from 0 to ", kMaxDevices - 1, ", got ",
            ordinal, "; pass the tensors' device");
  Entry& e = entry(ordinal);
  if (e.known.load(std::memory_order_acquire)) return e.device;
  const std::lock_guard hold(e.lock);
  if (e.known.load(std::memory_order_relaxed)) return e.device;
  const int count = count_devices();
  QLA_CHECK(ordinal < count, "device: expected an ordinal below the number of CUDA devices, ", count, ", got ", ordinal,
            count == 0 ? "; no device or no driver is visible (CUDA_VISIBLE_DEVICES)" : "; pass the tensors' device");
  Device d;
  d.ordinal = ordinal;
  check_cuda(cudaDeviceGetAttribute(&d.multiprocessors, cudaDevAttrMultiProcessorCount, ordinal), "cudaDeviceGetAttribute");
  check_cuda(cudaDeviceGetAttribute(&d.major, cudaDevAttrComputeCapabilityMajor, ordinal), "cudaDeviceGetAttribute");
  check_cuda(cudaDeviceGetAttribute(&d.minor, cudaDevAttrComputeCapabilityMinor, ordinal), "cudaDeviceGetAttribute");
  e.device = d;
  e.known.store(true, std::memory_order_release);
  return e.device;
}

CurrentDevice::CurrentDevice(int ordinal) {
  int current = 0;
  check_cuda(cudaGetDevice(&current), "cudaGetDevice");
  if (current == ordinal) return;
  check_cuda(cudaSetDevice(ordinal), "cudaSetDevice");
  before_ = current;
}
CurrentDevice::~CurrentDevice() {
  if (before_ >= 0) cudaSetDevice(before_);
}

void prepare_kernels(const Device& device) {
  Entry& e = entry(device.ordinal);
  if (e.prepared.load(std::memory_order_acquire)) return;
  const std::lock_guard hold(e.lock);
  if (e.prepared.load(std::memory_order_relaxed)) return;
  check_cuda(intra::prepare(), "chunk_intra: cudaFuncSetAttribute");
  check_cuda(segments::prepare(), "plan_segments: cudaFuncSetAttribute");
  check_cuda(cp_merge::prepare(), "cp_merge: cudaFuncSetAttribute");
  prepare_forward();
  check_cuda(backward_passes::prepare(), "backward_passes: cudaFuncSetAttribute");
  check_cuda(pass_merge::prepare(), "pass_merge: cudaFuncSetAttribute");
  check_cuda(chunk_grads::prepare(), "chunk_grads: cudaFuncSetAttribute");
  e.prepared.store(true, std::memory_order_release);
}

void device_count(int* count) { *count = count_devices(); }

void device_info(int device, qla_device_info_t* info) {
  const Device& d = device_of(device);
  cudaDeviceProp properties;
  check_cuda(cudaGetDeviceProperties(&properties, device), "cudaGetDeviceProperties");
  std::snprintf(info->name, sizeof info->name, "%.127s", properties.name);
  info->multiprocessors = d.multiprocessors;
  info->capability_major = d.major;
  info->capability_minor = d.minor;
  info->served = d.served();
  info->served_backward = d.served();
  std::snprintf(info->kernels, sizeof info->kernels, "%s", d.served() ? "sm90 wgmma" : "");
  info->reason[0] = '\0';
  if (!d.served())
    std::snprintf(info->reason, sizeof info->reason,
                  "the kernels are built for compute capability 9.0 (H100, H200, GH200); this device has %d.%d", d.major,
                  d.minor);
}

void prepare(int device) {
  const Device& d = device_of(device);
  QLA_SUPPORTED(d.served(), "device ", device, ": expected compute capability 9.0, got ", d.major, ".", d.minor,
                "; use CPU tensors or a Hopper GPU");
  const CurrentDevice current(device);
  prepare_kernels(d);
}

const char* targets() { return "sm_90a"; }

}  // namespace qla::cuda
