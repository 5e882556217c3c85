// The CUDA backward: not here yet; says so before anything is launched.
#include "core/backend.hpp"
#include "core/status.hpp"

namespace qla::cuda {
namespace {
[[noreturn]] void refuse() {
  throw Error(QLA_NOT_SUPPORTED, "backward: this build has no CUDA kernels for it yet; use CPU tensors");
}
}  // namespace
void backward_check(const qla_gdn_backward_args&, const Problem&) { refuse(); }
void backward_workspace(const qla_gdn_backward_args&, const Problem&, size_t*, size_t*) { refuse(); }
void backward(const qla_gdn_backward_args&, const Problem&) { refuse(); }
}  // namespace qla::cuda
