// The C ABI: validate, ask the backend, run. Every function is a few lines; the rules are in validate.cpp, the work in the
// backends.
#include <algorithm>
#include <cstring>
#include <string>
#include <type_traits>

#include "api/guard.hpp"
#include "api/planned_call.hpp"
#include "api/structs.hpp"
#include "api/validate.hpp"
#include "core/backend.hpp"
#include "core/dtype.hpp"
#include "core/env.hpp"
#include "qla/qla.h"

namespace qla::api {
namespace {

// A call whose arguments hold together, on the backend that serves it: every entry point below begins here.
template <typename Args>
struct Call {
  const Args& args;
  const Problem problem;
  const bool cuda;

  Call(const Args* pointer, Stage stage)
      : args(checked(pointer, "args")),
        problem(validate(args, stage)),
        cuda(resolve_backend(args.backend, args.device, args.stream) == QLA_BACKEND_CUDA) {
    check_backend(args);
    if (stage == Stage::Run && cuda && args.saved.data != nullptr) validate_saved(args.saved, saved_bytes());
  }

  size_t saved_bytes() const { return cuda ? cuda::forward_saved(problem) : 0; }  // the CPU recomputes

 private:
  void check_backend(const qla_gdn_forward_args&) const {
    cuda ? cuda::forward_check(args, problem) : cpu::forward_check(args, problem);
  }
  void check_backend(const qla_gdn_backward_args&) const {
    cuda ? cuda::backward_check(args, problem) : cpu::backward_check(args, problem);
  }
};
using ForwardCall = Call<qla_gdn_forward_args>;
using BackwardCall = Call<qla_gdn_backward_args>;

struct Range {
  size_t least = 0, best = 0;
};
Range workspace_of(const ForwardCall& call) {
  Range range;
  if (call.cuda)
    cuda::forward_workspace(call.args, call.problem, &range.least, &range.best);
  else
    range.least = range.best = cpu::forward_workspace(call.args, call.problem);
  return range;
}
Range workspace_of(const BackwardCall& call) {
  Range range;
  call.cuda ? cuda::backward_workspace(call.args, call.problem, &range.least, &range.best)
            : cpu::backward_workspace(call.args, call.problem, &range.least, &range.best);
  return range;
}

// What the host knows of the cut: lengths and gates decide where the call runs.
std::string rule_text(const plan::CutRule& rule) {
  if (rule.segment_chunks == 0) return "not cut";
  return concat("segments of at most ", counted(rule.segment_chunks, "chunk"), " if a sequence has more than ",
                rule.longest_whole(), rule.join ? ", longer where gates do not forget" : "");
}

// QLA_LOG=config: what ran; QLA_LOG=plan: how it may be cut.
template <typename Args>
void log_call(const Call<Args>& call, const char* direction) {
  const Problem& p = call.problem;
  if (log_enabled("config"))
    log_line("config", concat(direction, call.cuda ? concat(" on cuda:", call.args.device) : std::string(" on the CPU"),
                              ": B=", p.batch, " T=", p.tokens, " N=", p.num_seqs, " H=", p.num_k_heads, " HV=", p.num_v_heads,
                              " K=", p.k_dim, " V=", p.v_dim, " ", dtype_name(p.dtype), p.varlen ? " packed" : "",
                              " flags=", call.args.flags, " workspace=", call.args.workspace_bytes));
  if constexpr (std::is_same_v<Args, qla_gdn_forward_args>) {
    if (!log_enabled("plan")) return;
    const PlannedCall planned = planned_call(call.args, p, call.cuda);
    log_line("plan", concat(planned.why, "; ", rule_text(planned.choice.rule), "; V in ",
                            counted(planned.choice.value_splits, "part"), planned.choice.fused ? ", fused" : ""));
  }
}

}  // namespace
}  // namespace qla::api

using namespace qla::api;

extern "C" {

const char* qla_version(void) { return QLA_VERSION_TEXT; }

const char* qla_last_error(void) { return qla::last_error(); }

const char* qla_status_name(qla_status status) {
  switch (status) {
    case QLA_OK:
      return "QLA_OK";
    case QLA_INVALID_ARGUMENT:
      return "QLA_INVALID_ARGUMENT";
    case QLA_NOT_SUPPORTED:
      return "QLA_NOT_SUPPORTED";
    case QLA_CUDA_ERROR:
      return "QLA_CUDA_ERROR";
    case QLA_OUT_OF_MEMORY:
      return "QLA_OUT_OF_MEMORY";
    case QLA_INTERNAL_ERROR:
      return "QLA_INTERNAL_ERROR";
    default:
      return "unknown qla_status";
  }
}

const char* qla_cpu_level(void) { return qla::cpu::level(); }

const char* qla_build_info(void) {
  static char text[256];
  [[maybe_unused]] static const bool filled = [] {
    const char* parts[] = {
      "qla " QLA_VERSION_TEXT ", ",
#if defined(__clang__)
      "clang " __clang_version__,
#elif defined(__GNUC__)
      "g++ " __VERSION__,
#else
      "unknown compiler",
#endif
      ", CUDA: ",
      qla::cuda::targets(),
      ", CPU: ",
      qla::cpu::level()
    };
    for (const char* part : parts) std::strncat(text, part, sizeof(text) - std::strlen(text) - 1);
    return true;
  }();
  return text;
}

qla_status qla_device_count(int32_t* count) {
  return guarded([&] {
    int found = 0;
    required(count, "count") = 0;
    qla::cuda::device_count(&found);
    *count = found;
  });
}

qla_status qla_device_info(int32_t device, qla_device_info_t* info) {
  return guarded([&] { qla::cuda::device_info(device, &checked(info, "info")); });
}

qla_status qla_prepare(int32_t device) {
  return guarded([&] { qla::cuda::prepare(device); });
}

qla_status qla_gdn_forward_check(const qla_gdn_forward_args* args) {
  return guarded([&] { ForwardCall(args, Stage::Query); });
}

qla_status qla_gdn_backward_check(const qla_gdn_backward_args* args) {
  return guarded([&] { BackwardCall(args, Stage::Query); });
}

qla_status qla_gdn_forward_workspace(const qla_gdn_forward_args* args, size_t* bytes) {
  return guarded([&] {
    required(bytes, "bytes");
    const Range range = workspace_of(ForwardCall(args, Stage::Query));
    *bytes = std::clamp(qla::forward_workspace_limit(), range.least, range.best);
  });
}

qla_status qla_gdn_forward_workspace_range(const qla_gdn_forward_args* args, size_t* least, size_t* best) {
  return guarded([&] {
    required(least, "least"), required(best, "best");
    const Range range = workspace_of(ForwardCall(args, Stage::Query));
    *least = range.least;
    *best = range.best;
  });
}

qla_status qla_gdn_forward_saved(const qla_gdn_forward_args* args, size_t* bytes) {
  return guarded([&] { required(bytes, "bytes") = ForwardCall(args, Stage::Query).saved_bytes(); });
}

qla_status qla_gdn_backward_workspace(const qla_gdn_backward_args* args, size_t* least, size_t* best) {
  return guarded([&] {
    required(least, "least"), required(best, "best");
    const Range range = workspace_of(BackwardCall(args, Stage::Query));
    *least = range.least;
    *best = range.best;
  });
}

qla_status qla_gdn_forward(const qla_gdn_forward_args* args) {
  return guarded([&] {
    const ForwardCall call(args, Stage::Run);
    validate_workspace(call.args.workspace, call.args.workspace_bytes, workspace_of(call).least);
    log_call(call, "forward");
    call.cuda ? qla::cuda::forward(call.args, call.problem) : qla::cpu::forward(call.args, call.problem);
  });
}

qla_status qla_gdn_backward(const qla_gdn_backward_args* args) {
  return guarded([&] {
    const BackwardCall call(args, Stage::Run);
    validate_workspace(call.args.workspace, call.args.workspace_bytes, workspace_of(call).least);
    log_call(call, "backward");
    call.cuda ? qla::cuda::backward(call.args, call.problem) : qla::cpu::backward(call.args, call.problem);
  });
}

}  // extern "C"
