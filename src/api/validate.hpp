// Every rule on arguments, in one place: what passes here is consistent, in range and free of overlap, and the backends rely on it.
#pragma once

#include <cstddef>

#include "core/problem.hpp"
#include "qla/qla.h"

namespace qla::api {

// What a call is about to do with the arguments decides what they must hold.
enum class Stage {
  Query,  // check, workspace, plan: shapes only; data pointers are tested for NULL and nothing else
  Run     // values the CPU can read (boundaries, indices), overlap, alignment, too
};

int32_t resolve_backend(int32_t backend, int32_t device, const void* stream);  // QLA_BACKEND_CPU or QLA_BACKEND_CUDA

Problem validate(const qla_gdn_forward_args& args, Stage stage);
Problem validate(const qla_gdn_backward_args& args, Stage stage);

// Workspace as passed against what the backend asked for.
void validate_workspace(const void* workspace, size_t given, size_t needed);

}  // namespace qla::api
