// The CUDA backend of the tests: device buffers and copies. Only compiled against the toolkit where there is one.
#include <stdexcept>

#include "support/backend.hpp"

#ifdef QLA_TEST_CUDA
#include <cuda_runtime_api.h>

extern "C" int qla_poison_shared(int device, void* stream);  // tests/device/poison_shared.cu

namespace qla::test {
namespace {

void must(cudaError_t error, const char* call) {
  if (error != cudaSuccess) throw std::runtime_error(std::string(call) + ": " + cudaGetErrorString(error));
}

const qla_device_info_t& info() {
  static const qla_device_info_t of_first = [] {
    qla_device_info_t answer = {};
    answer.struct_size = sizeof answer;
    if (qla_device_info(0, &answer) != QLA_OK) answer.served = answer.served_backward = 0;
    return answer;
  }();
  return of_first;
}

class Cuda : public Backend {
 public:
  bool serves_backward() const override { return info().served_backward; }
  std::string name() const override { return "cuda"; }
  bool on_device() const override { return true; }
  int32_t id() const override { return QLA_BACKEND_CUDA; }
  int32_t device() const override { return 0; }
  void* allocate(size_t bytes) const override {
    void* pointer = nullptr;
    must(cudaMalloc(&pointer, bytes + 1), "cudaMalloc");
    return pointer;
  }
  void release(void* pointer) const override { must(cudaFree(pointer), "cudaFree"); }
  void upload(void* to, const void* from, size_t bytes) const override {
    must(cudaMemcpy(to, from, bytes, cudaMemcpyHostToDevice), "cudaMemcpy");
  }
  void download(void* to, const void* from, size_t bytes) const override {
    must(cudaMemcpy(to, from, bytes, cudaMemcpyDeviceToHost), "cudaMemcpy");
  }
  void synchronize() const override { must(cudaDeviceSynchronize(), "cudaDeviceSynchronize"); }
  // NaN lies in shared memory when a call begins
  qla_status forward(const qla_gdn_forward_args& args) const override {
    poison(args.stream);
    return Backend::forward(args);
  }
  qla_status backward(const qla_gdn_backward_args& args) const override {
    poison(args.stream);
    return Backend::backward(args);
  }

 private:
  void poison(void* stream) const { must(cudaError_t(qla_poison_shared(device(), stream)), "qla_poison_shared"); }
};

}  // namespace

const Backend* cuda_backend() {
  static const Cuda cuda;
  int32_t count = 0;
  if (qla_device_count(&count) != QLA_OK || count == 0 || !info().served) return nullptr;
  return &cuda;
}

}  // namespace qla::test

#else

namespace qla::test {
const Backend* cuda_backend() { return nullptr; }
}  // namespace qla::test

#endif
