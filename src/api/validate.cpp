#include "api/validate.hpp"

#include <cmath>

#include "core/status.hpp"

namespace qla::api {

int32_t resolve_backend(int32_t backend, int32_t device, const void* stream) {
  if (backend != QLA_BACKEND_AUTO) return backend;
  return device >= 0 ? QLA_BACKEND_CUDA : QLA_BACKEND_CPU;
}

namespace {
template <typename Args>
Problem read_problem(const Args& args) {
  Problem p;
  p.batch = args.q.shape[0];
  p.tokens = args.q.shape[1];
  p.num_k_heads = args.q.shape[2];
  p.k_dim = args.q.shape[3];
  p.num_v_heads = args.v.shape[2];
  p.v_dim = args.v.shape[3];
  p.dtype = args.q.dtype;
  p.varlen = args.cu_seqlens.data != nullptr;
  p.num_seqs = p.varlen ? args.cu_seqlens.shape[0] - 1 : p.batch;
  p.scale = std::isnan(args.scale) ? 1.0 / std::sqrt(static_cast<double>(p.k_dim)) : args.scale;
  return p;
}
}  // namespace

Problem validate(const qla_gdn_forward_args& args, Stage) { return read_problem(args); }
Problem validate(const qla_gdn_backward_args& args, Stage) { return read_problem(args); }

void validate_workspace(const void* workspace, size_t given, size_t needed) {
  if (given < needed)
    throw Error(QLA_OUT_OF_MEMORY, concat("workspace_bytes: expected at least ", needed, ", got ", given,
                                          "; ask the workspace query with the same arguments"));
  QLA_CHECK(needed == 0 || workspace != nullptr, "workspace: expected ", needed, " bytes, got NULL; allocate what the workspace query says");
  QLA_CHECK(reinterpret_cast<uintptr_t>(workspace) % 256 == 0, "workspace: expected an address that is a multiple of 256, got ", workspace,
            "; allocate it aligned");
}

}  // namespace qla::api
