// Every rule on arguments, in one place: what passes here is consistent, in range and free of overlap, and the backends rely on
// it.
#pragma once

#include <cstddef>

#include "api/tensor_rules.hpp"
#include "core/problem.hpp"
#include "qla/qla.h"

namespace qla::api {

int32_t resolve_backend(int32_t backend, int32_t device, const void* stream);  // QLA_BACKEND_CPU or QLA_BACKEND_CUDA

// Throw qla::Error naming argument, expected, got, remedy.
Problem validate(const qla_gdn_forward_args& args, Stage stage);
Problem validate(const qla_gdn_backward_args& args, Stage stage);

// The workspace as passed, against what the backend asked for.
void validate_workspace(const void* workspace, size_t given, size_t needed);

// `saved` against what the backend's forward keeps for these shapes.
void validate_saved(const qla_tensor& saved, size_t needed);

}  // namespace qla::api
