// The CPU behind core/backend.hpp: picks the compute type, makes the streams, runs them.
#include "core/backend.hpp"

#include <cmath>

#include "core/status.hpp"
#include "cpu/backward_run.hpp"
#include "cpu/forward_run.hpp"
#include "cpu/pool.hpp"
#include "cpu/segments.hpp"
#include "plan/choose_cpu.hpp"

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

// The rule that qla_gdn_plan prints. A pool updated in place is not cut: a sequence's last segment would write what its first may
// still read.
template <typename Args>
plan::CutRule cut_rule(const Args& args, const Problem& problem) {
  plan::CutRule rule = plan::choose_cpu(plan::make_policy(args, problem.dtype), problem);
  if constexpr (requires { args.state_indices; })
    if (args.state_indices.data) rule.segment_chunks = 0;
  return rule;
}

template <class T>
void zero_states_of(const Call<T>& call, const Sequence& seq, const qla_gdn_forward_args& args) {
  for (int64_t head = 0; head < call.problem.num_v_heads; ++head) {
    for (int64_t i = 0; i < seq.chunks(); ++i) call.zero_state(state_rows(args.h, seq.first_chunk + i, head));
    for (int64_t i = 0; call.args.checkpoint_every > 0 && i < seq.tokens() / call.args.checkpoint_every; ++i)
      call.zero_state(state_rows(args.state_checkpoints, seq.first_checkpoint + i, head));
  }
}

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
  for (const Sequence& seq : call.sequences)
    if (seq.state_slot < 0) zero_states_of(call, seq, args);
  const bool pool = args.state_indices.data != nullptr;
  const bool wide = args.a_inv.data || args.a_gated.data || args.g_cumsum.data;
  for_each_plan<T>(call, cut_rule(args, problem), nullptr, nullptr, [&](const StreamPlan& plan) {
    Buffer<T> merged(static_cast<size_t>(plan.num_merged * call.state_size));
    run_prepasses<T>(call, plan, nullptr, nullptr, merged.data());
    run_forward<T>({call, &args, pool ? &args.initial_state : &args.final_state, wide, plan, merged.data()});
  });
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
  GateSums sums;
  sums.dA_log.assign(static_cast<size_t>(problem.num_v_heads), 0), sums.ddt_bias = sums.dA_log;
  for_each_plan<T>(call, cut_rule(args, problem), &args.d_o, &args.d_final_state, [&](const StreamPlan& plan) {
    Buffer<T> merged(static_cast<size_t>(plan.num_merged * call.state_size));
    run_prepasses<T>(call, plan, &args.d_o, &args.d_final_state, merged.data());
    run_backward<T>({call, &args, plan, merged.data(), &sums});
  });
  for (int64_t head = 0; head < problem.num_v_heads; ++head) {
    if (args.dA_log.data) store_at({args.dA_log.data, args.dA_log.stride[0], args.dA_log.dtype}, head, sums.dA_log[head]);
    if (args.ddt_bias.data)
      store_at({args.ddt_bias.data, args.ddt_bias.stride[0], args.ddt_bias.dtype}, head, sums.ddt_bias[head]);
  }
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
