// What a backend offers src/api. Arguments are validated (shapes, dtypes, combinations) before any of these is called; a backend
// throws qla::Error for what it does not serve. `check` functions launch and read nothing.
#pragma once

#include <cstddef>

#include "core/problem.hpp"
#include "qla/qla.h"

namespace qla::cpu {
void forward_check(const qla_gdn_forward_args& args, const Problem& problem);
void backward_check(const qla_gdn_backward_args& args, const Problem& problem);
size_t forward_workspace(const qla_gdn_forward_args& args, const Problem& problem);
void backward_workspace(const qla_gdn_backward_args& args, const Problem& problem, size_t* least, size_t* best);
void forward(const qla_gdn_forward_args& args, const Problem& problem);
void backward(const qla_gdn_backward_args& args, const Problem& problem);
const char* level();  // "x86-64-v3" ..
}  // namespace qla::cpu

namespace qla::cuda {  // src/cuda/, or src/cuda/none.cpp in a build without CUDA: every call then says so
void device_count(int* count);
void device_info(int device, qla_device_info_t* info);
void prepare(int device);
void forward_check(const qla_gdn_forward_args& args, const Problem& problem);
void backward_check(const qla_gdn_backward_args& args, const Problem& problem);
void forward_workspace(const qla_gdn_forward_args& args, const Problem& problem, size_t* least, size_t* best);
size_t forward_saved(const Problem& problem);  // of what forward keeps for backward
void backward_workspace(const qla_gdn_backward_args& args, const Problem& problem, size_t* least, size_t* best);
void forward(const qla_gdn_forward_args& args, const Problem& problem);
void backward(const qla_gdn_backward_args& args, const Problem& problem);
const char* targets();  // "sm_90a", "no CUDA"
}  // namespace qla::cuda
