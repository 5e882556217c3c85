// What is known of each device, asked for once; and the caller's current device, put back.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "core/status.hpp"

namespace qla::cuda {

struct Device {
  int ordinal = 0;
  int multiprocessors = 0;
  int major = 0, minor = 0;
  bool served() const { return major == 9 && minor == 0; }
};

// The first call for a device queries it; later ones only read. Throws qla::Error when there is no such device.
const Device& device_of(int ordinal);
// Loads the kernels and sets their attributes: once a device, the current one.
void prepare_kernels(const Device& device);

// Makes `ordinal` current; the destructor restores what was.
class CurrentDevice {
 public:
  explicit CurrentDevice(int ordinal);
  ~CurrentDevice();
  CurrentDevice(const CurrentDevice&) = delete;
  CurrentDevice& operator=(const CurrentDevice&) = delete;

 private:
  int before_ = -1;
};

inline void check_cuda(cudaError_t status, const char* call) {
  if (status != cudaSuccess) throw Error(QLA_CUDA_ERROR, concat(call, ": ", cudaGetErrorString(status)));
}

}  // namespace qla::cuda
