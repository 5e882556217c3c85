// The CUDA backend of a build without nvcc: loads anywhere and says what is missing.
#include <cstring>

#include "core/backend.hpp"
#include "core/status.hpp"

namespace qla::cuda {
namespace {
[[noreturn]] void refuse() {
  throw Error(QLA_NOT_SUPPORTED,
              "backend: this libqla was built without CUDA; use CPU tensors, or a build made where nvcc is installed");
}
}  // namespace
void device_count(int* count) { *count = 0; }
void device_info(int, qla_device_info_t*) { refuse(); }
void prepare(int) { refuse(); }
void forward_check(const qla_gdn_forward_args&, const Problem&) { refuse(); }
void backward_check(const qla_gdn_backward_args&, const Problem&) { refuse(); }
void forward_workspace(const qla_gdn_forward_args&, const Problem&, size_t*, size_t*) { refuse(); }
size_t forward_saved(const Problem&) { refuse(); }
void backward_workspace(const qla_gdn_backward_args&, const Problem&, size_t*, size_t*) { refuse(); }
void forward(const qla_gdn_forward_args&, const Problem&) { refuse(); }
void backward(const qla_gdn_backward_args&, const Problem&) { refuse(); }
const char* targets() { return "no CUDA"; }
}  // namespace qla::cuda
