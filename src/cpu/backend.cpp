// Placeholder of the CPU backend: it serves nothing yet and says so.
#include "core/backend.hpp"
#include "core/status.hpp"

namespace qla::cpu {
namespace {
[[noreturn]] void not_there() { throw Error(QLA_NOT_SUPPORTED, "backend: the CPU backend is not in this build yet"); }
}  // namespace
void forward_check(const qla_gdn_forward_args&, const Problem&) { not_there(); }
void backward_check(const qla_gdn_backward_args&, const Problem&) { not_there(); }
size_t forward_workspace(const qla_gdn_forward_args&, const Problem&) { not_there(); }
void backward_workspace(const qla_gdn_backward_args&, const Problem&, size_t*, size_t*) { not_there(); }
void forward(const qla_gdn_forward_args&, const Problem&) { not_there(); }
void backward(const qla_gdn_backward_args&, const Problem&) { not_there(); }
const char* level() { return "none"; }
}  // namespace qla::cpu
