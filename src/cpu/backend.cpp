// The CPU behind core/backend.hpp: picks the compute type, makes the streams, runs them.
#include "core/backend.hpp"

#include <cmath>

#include "core/status.hpp"
#include "cpu/backward_run.hpp"
#include "cpu/forward_run.hpp"
#include "cpu/pool.hpp"

namespace qla::cpu {
namespace {

// Calls that take less than waking the workers run on one thread.
template <typename Args>
int threads_for(const Args& args, const Problem& p) {
  const double work = static_cast<double>(p.total_tokens()) * static_cast<double>(p.num_v_heads * p.k_dim * p.v_dim);
  return work < 2e6 ? 1 : resolve_threads(args.num_threads);
}

void check_sizes(const Problem& p) {
  QLA_SUPPORTED(p.k_dim >= 1 && p.k_dim <= kMaxDim && p.v_dim >= 1 && p.v_dim <= kMaxDim,
                "k, v: the CPU backend serves head sizes K and V from 1 to 256, got K = ", p.k_dim, ", V = ", p.v_dim,
                "; split or pad the heads");
  chosen_level();
}

const qla_tensor kAbsent{};

template <class T>
void forward_as(const qla_gdn_forward_args& args, const Problem& problem) {
  CommonArgs common{&args.q,
                    &args.k,
                    &args.v,
                    &args.g,
                    &args.beta,
                    &args.initial_state,
                    &args.cu_seqlens,
                    &args.A_log,
                    &args.dt_bias,
                    &args.has_initial_state,
                    &args.state_indices};
  common.checkpoint_every = args.state_checkpoints.data ? args.checkpoint_every_n_tokens : 0;
  common.flags = args.flags;
  const Call<T> call(problem, common, threads_for(args, problem));
  for (const qla_tensor* t : {&args.o, &args.a_inv, &args.a_gated, &args.g_cumsum, &args.q_rnorm, &args.k_rnorm})
    zero_outside(call.sequences, problem, *t);
  StreamPlan plan;
  plan.num_uncut = problem.num_seqs * problem.num_k_heads;
  const bool pool = args.state_indices.data != nullptr;
  const bool wide = args.a_inv.data || args.a_gated.data || args.g_cumsum.data;
  run_forward<T>({call, &args, pool ? &args.initial_state : &args.final_state, wide, plan});
}

template <class T>
void backward_as(const qla_gdn_backward_args& args, const Problem& problem) {
  CommonArgs common{&args.q,          &args.k,
                    &args.v,          &args.g,
                    &args.beta,       &args.initial_state,
                    &args.cu_seqlens, &args.A_log,
                    &args.dt_bias,    &args.has_initial_state,
                    &kAbsent};
  common.flags = args.flags;
  const Call<T> call(problem, common, threads_for(args, problem));
  for (const qla_tensor* t : {&args.dq, &args.dk, &args.dv, &args.dg, &args.dbeta}) zero_outside(call.sequences, problem, *t);
  StreamPlan plan;
  plan.num_uncut = problem.num_seqs * problem.num_k_heads;
  run_backward<T>({call, &args, plan});
}

}  // namespace

void forward_check(const qla_gdn_forward_args&, const Problem& problem) { check_sizes(problem); }
void backward_check(const qla_gdn_backward_args&, const Problem& problem) { check_sizes(problem); }
size_t forward_workspace(const qla_gdn_forward_args&, const Problem&) { return 0; }  // host memory is allocated inside
void backward_workspace(const qla_gdn_backward_args&, const Problem&, size_t* least, size_t* best) { *least = *best = 0; }

void forward(const qla_gdn_forward_args& args, const Problem& problem) {
  check_sizes(problem);
  problem.dtype == QLA_FLOAT64 ? forward_as<double>(args, problem) : forward_as<float>(args, problem);
}

void backward(const qla_gdn_backward_args& args, const Problem& problem) {
  check_sizes(problem);
  problem.dtype == QLA_FLOAT64 ? backward_as<double>(args, problem) : backward_as<float>(args, problem);
}

const char* level() {
  try {
    return chosen_level().name;
  } catch (const Error&) {
    return "unavailable";
  }
}

}  // namespace qla::cpu
