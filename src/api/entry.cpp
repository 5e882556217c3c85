// The C ABI: validate, ask the backend, run. Every function is a few lines; the rules are in validate.cpp, the work in the
// backends.
#include <cstring>

#include "api/guard.hpp"
#include "api/structs.hpp"
#include "api/validate.hpp"
#include "core/backend.hpp"
#include "qla/qla.h"

namespace qla::api {
namespace {

template <typename Args>
bool on_cuda(const Args& args) {
  return resolve_backend(args.backend, args.device, args.stream) == QLA_BACKEND_CUDA;
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

qla_status qla_gdn_forward_check(const qla_gdn_forward_args* pointer) {
  return guarded([&] {
    const auto& args = checked(pointer, "args");
    const qla::Problem problem = validate(args, Stage::Query);
    on_cuda(args) ? qla::cuda::forward_check(args, problem) : qla::cpu::forward_check(args, problem);
  });
}

qla_status qla_gdn_backward_check(const qla_gdn_backward_args* pointer) {
  return guarded([&] {
    const auto& args = checked(pointer, "args");
    const qla::Problem problem = validate(args, Stage::Query);
    on_cuda(args) ? qla::cuda::backward_check(args, problem) : qla::cpu::backward_check(args, problem);
  });
}

qla_status qla_gdn_forward_workspace(const qla_gdn_forward_args* pointer, size_t* bytes) {
  return guarded([&] {
    const auto& args = checked(pointer, "args");
    size_t& answer = required(bytes, "bytes");
    const qla::Problem problem = validate(args, Stage::Query);
    answer = on_cuda(args) ? qla::cuda::forward_workspace(args, problem) : qla::cpu::forward_workspace(args, problem);
  });
}

qla_status qla_gdn_forward_saved(const qla_gdn_forward_args* pointer, size_t* bytes) {
  return guarded([&] {
    const auto& args = checked(pointer, "args");
    size_t& answer = required(bytes, "bytes");
    const qla::Problem problem = validate(args, Stage::Query);
    answer = on_cuda(args) ? qla::cuda::forward_saved(args, problem) : 0;  // the CPU recomputes
  });
}

qla_status qla_gdn_backward_workspace(const qla_gdn_backward_args* pointer, size_t* least, size_t* best) {
  return guarded([&] {
    const auto& args = checked(pointer, "args");
    size_t least_bytes = 0, best_bytes = 0;
    required(least, "least"), required(best, "best");
    const qla::Problem problem = validate(args, Stage::Query);
    on_cuda(args) ? qla::cuda::backward_workspace(args, problem, &least_bytes, &best_bytes)
                  : qla::cpu::backward_workspace(args, problem, &least_bytes, &best_bytes);
    *least = least_bytes;
    *best = best_bytes;
  });
}

qla_status qla_gdn_forward(const qla_gdn_forward_args* pointer) {
  return guarded([&] {
    const auto& args = checked(pointer, "args");
    const qla::Problem problem = validate(args, Stage::Run);
    const bool cuda = on_cuda(args);
    validate_workspace(args.workspace, args.workspace_bytes,
                       cuda ? qla::cuda::forward_workspace(args, problem) : qla::cpu::forward_workspace(args, problem));
    cuda ? qla::cuda::forward(args, problem) : qla::cpu::forward(args, problem);
  });
}

qla_status qla_gdn_backward(const qla_gdn_backward_args* pointer) {
  return guarded([&] {
    const auto& args = checked(pointer, "args");
    const qla::Problem problem = validate(args, Stage::Run);
    const bool cuda = on_cuda(args);
    size_t least = 0, best = 0;
    cuda ? qla::cuda::backward_workspace(args, problem, &least, &best)
         : qla::cpu::backward_workspace(args, problem, &least, &best);
    validate_workspace(args.workspace, args.workspace_bytes, least);
    cuda ? qla::cuda::backward(args, problem) : qla::cpu::backward(args, problem);
  });
}

}  // extern "C"
