#include "support/call.hpp"

#include <algorithm>

namespace qla::test {

Numbers swap_state_axes(const Numbers& states, int64_t rows, int64_t columns) {
  Numbers out(states.size());
  const int64_t size = std::max<int64_t>(rows * columns, 1);
  for (size_t base = 0; base < states.size(); base += size)
    for (int64_t r = 0; r < rows; ++r)
      for (int64_t c = 0; c < columns; ++c) out[base + c * rows + r] = states[base + r * columns + c];
  return out;
}

namespace {

class Caller {
 public:
  Caller(const Backend& backend, const Sample& sample, const Options& options)
      : backend_(backend), s_(sample), in_(sample.in), opt_(options), arena_(backend) {}

  Result run() {
    if (!forward()) return result_;
    if (wants_backward()) backward();
    return result_;
  }

 private:
  // [B, T, heads, dim] or, with dim 0, [B, T, heads]
  std::vector<int64_t> shape_of(int64_t heads, int64_t dim) const {
    std::vector<int64_t> shape = {s_.batch, s_.length, heads};
    if (dim) shape.push_back(dim);
    return shape;
  }
  TestTensor make(Role role, int32_t dtype, int64_t heads, int64_t dim) {
    const int64_t D = std::max<int64_t>(dim, 1), T = s_.length, gap = dim ? 8 : 1;
    std::vector<int64_t> strides;
    switch (opt_.layout) {
      case Layout::kContiguous:
        break;
      case Layout::kFused:
        break;
      case Layout::kGapped:
        strides = {(T + 3) * (heads + 1) * D + 16 * gap, (heads + 1) * D, D, 1};
        break;
      case Layout::kHeadMajor:
        strides = {heads * T * D, D, T * D, 1};
        break;
      case Layout::kEverySecond:
        strides = {2 * T * heads * D, 2 * heads * D, D, 1};
        break;
      case Layout::kBackwards:  // outputs may not
        if (role == Role::kInput) strides = {T * heads * D, -heads * D, D, 1};
        break;
    }
    if (!dim && !strides.empty()) strides.pop_back();
    return arena_.tensor(role, dtype, shape_of(heads, dim), strides);
  }
  // q, k, v of one projection, or their gradients
  void make_fused(Role role, TestTensor& q, TestTensor& k, TestTensor& v) {
    const int64_t H = in_.k_heads, HV = in_.v_heads, K = in_.k_dim, V = in_.v_dim, width = 2 * H * K + 64 + HV * V;
    const int block = arena_.shared_block(s_.tokens() * width * size_of(s_.dtype));
    const auto view = [&](int64_t heads, int64_t dim, int64_t origin) {
      return arena_.view_in(block, role, s_.dtype, shape_of(heads, dim), {s_.length * width, width, dim, 1}, origin);
    };
    q = view(H, K, 0), k = view(H, K, H * K), v = view(HV, V, 2 * H * K + 64);
  }
  TestTensor make_states(Role role, int32_t dtype, int64_t count) {
    const int64_t HV = in_.v_heads;
    std::vector<int64_t> shape = {count, HV, in_.k_dim, in_.v_dim};
    if (opt_.v_first()) std::swap(shape[2], shape[3]);
    const int64_t R = shape[2], C = shape[3], size = HV * R * C;
    switch (opt_.states) {
      case States::kContiguous:
        return arena_.tensor(role, dtype, shape);
      case States::kPoolSlice: {
        const int block = arena_.shared_block(2 * count * size * size_of(dtype));
        return arena_.view_in(block, role, dtype, shape, {2 * size, R * C, C, 1}, size);
      }
      case States::kEveryThird:
        return arena_.tensor(role, dtype, shape, {3 * size, R * C, C, 1});
      case States::kTransposed:
        return arena_.tensor(role, dtype, shape, {size, R * C, 1, R});
    }
    return {};
  }
  void write_states(TestTensor& tensor, const Numbers& values) {
    tensor.write(opt_.v_first() ? swap_state_axes(values, in_.k_dim, in_.v_dim) : values);
  }
  Numbers read_states(const TestTensor& tensor) const {
    return opt_.v_first() ? swap_state_axes(tensor.read(), in_.v_dim, in_.k_dim) : tensor.read();
  }
  bool wants_backward() const { return opt_.backward && backend_.serves_backward(); }
  Numbers boundaries() const {
    const std::vector<int64_t>& cu = opt_.cu_override.empty() ? s_.cu : opt_.cu_override;
    return {cu.begin(), cu.end()};
  }
  TestTensor written(TestTensor tensor, const Numbers& values) {
    tensor.write(values);
    return tensor;
  }

  template <class Args>
  void common(Args& args) const {
    args.struct_size = sizeof(Args);
    args.backend = backend_.id(), args.device = backend_.device();
    args.num_threads = opt_.threads;
    const auto flag = [](bool on, uint32_t bit) { return on ? bit : 0u; };
    args.flags = opt_.extra_flags | flag(in_.qk_l2norm, QLA_FLAG_QK_L2NORM) | flag(in_.raw_gate, QLA_FLAG_RAW_GATE) |
                 flag(in_.beta_sigmoid, QLA_FLAG_BETA_SIGMOID) | flag(in_.neg_eigval, QLA_FLAG_NEG_EIGVAL);
    args.scale = s_.default_scale ? std::numeric_limits<double>::quiet_NaN() : in_.scale;
    args.cp_mode = opt_.cp_mode, args.cp_segment_chunks = opt_.cp_segment_chunks, args.cp_warmup_threshold = opt_.cp_threshold;
    args.q = q_.view(), args.k = k_.view(), args.v = v_.view(), args.g = g_.view(), args.beta = beta_.view();
    args.initial_state = h0_.view(), args.cu_seqlens = cu_.view(), args.A_log = a_log_.view(), args.dt_bias = dt_bias_.view();
    args.has_initial_state = has_initial_.view();
  }

  bool failed(qla_status status, const char* where) {
    if (status == QLA_OK) return false;
    result_.status = status, result_.error = backend_.last_error(), result_.where = where;
    return true;
  }
  bool fetched() {
    const std::string complaint = arena_.fetch();
    if (!complaint.empty()) result_.error = complaint, result_.where = "memory";
    return complaint.empty();
  }

  bool forward() {
    const int64_t HV = in_.v_heads, H = in_.k_heads, N = s_.num_seqs();
    const int32_t real = s_.grad_state_dtype();
    if (opt_.layout == Layout::kFused) {
      make_fused(Role::kInput, q_, k_, v_);
    } else {
      q_ = make(Role::kInput, s_.dtype, H, in_.k_dim), k_ = make(Role::kInput, s_.dtype, H, in_.k_dim),
      v_ = make(Role::kInput, s_.dtype, HV, in_.v_dim);
    }
    q_.write(in_.q), k_.write(in_.k), v_.write(in_.v);
    if (!s_.no_gate) g_ = written(make(Role::kInput, s_.g_dtype, HV, 0), in_.g);
    if (opt_.expanded_beta) {
      beta_ = written(arena_.tensor(Role::kInput, s_.beta_dtype, shape_of(HV, 0), {s_.length, 1, 0}), in_.beta);
    } else {
      beta_ = written(make(Role::kInput, s_.beta_dtype, HV, 0), in_.beta);
    }
    if (!in_.initial_state.empty()) write_states(h0_ = make_states(Role::kInput, s_.state_dtype, N), in_.initial_state);
    if (!s_.cu.empty()) cu_ = written(arena_.tensor(Role::kInput, opt_.cu_dtype, {N + 1}), boundaries());
    if (!in_.A_log.empty()) a_log_ = written(arena_.tensor(Role::kInput, real, {HV}), in_.A_log);
    if (!in_.dt_bias.empty()) dt_bias_ = written(arena_.tensor(Role::kInput, real, {HV}), in_.dt_bias);
    if (!in_.has_initial.empty())
      has_initial_ =
          written(arena_.tensor(Role::kInput, QLA_BOOL8, {N}), Numbers(in_.has_initial.begin(), in_.has_initial.end()));
    o_ = make(Role::kOutput, s_.dtype, HV, in_.v_dim);
    if (opt_.final_state) ht_ = make_states(Role::kOutput, real, N);

    qla_gdn_forward_args args = {};
    common(args);
    args.o = o_.view(), args.final_state = ht_.view();
    TestTensor a_inv, a_gated, h, saved, checkpoints;
    const bool training = wants_backward() && opt_.reuse_saved;
    if (training || opt_.parts) g_cumsum_ = arena_.tensor(Role::kOutput, real, shape_of(HV, 0));
    if (training && in_.qk_l2norm) {
      q_rnorm_ = arena_.tensor(Role::kOutput, real, shape_of(H, 0));
      k_rnorm_ = arena_.tensor(Role::kOutput, real, shape_of(H, 0));
    }
    if (opt_.parts) {
      int64_t chunks = 0;
      for (int64_t n = 0; n < N; ++n) chunks += (in_.eos[n] - in_.bos[n] + 63) / 64;
      a_inv = arena_.tensor(Role::kOutput, s_.dtype, {s_.batch, s_.length, HV, 64});
      a_gated = arena_.tensor(Role::kOutput, s_.dtype, {s_.batch, s_.length, HV, 64});
      std::vector<int64_t> shape = {chunks, HV, in_.k_dim, in_.v_dim};
      if (opt_.v_first()) std::swap(shape[2], shape[3]);
      h = arena_.tensor(Role::kOutput, s_.dtype, shape);
    }
    if (opt_.checkpoint_every) {
      int64_t count = 0;
      for (int64_t n = 0; n < N; ++n) count += (in_.eos[n] - in_.bos[n]) / opt_.checkpoint_every;
      std::vector<int64_t> shape = {count, HV, in_.k_dim, in_.v_dim};
      if (opt_.v_first()) std::swap(shape[2], shape[3]);
      checkpoints = arena_.tensor(Role::kOutput, real, shape);
      args.checkpoint_every_n_tokens = opt_.checkpoint_every;
    }
    args.g_cumsum = g_cumsum_.view(), args.q_rnorm = q_rnorm_.view(), args.k_rnorm = k_rnorm_.view();
    args.a_inv = a_inv.view(), args.a_gated = a_gated.view(), args.h = h.view(), args.state_checkpoints = checkpoints.view();
    if (training) {
      size_t bytes = 0;
      if (failed(backend_.forward_saved(args, &bytes), "forward_saved")) return false;
      if (bytes) saved_ = arena_.tensor(Role::kOutput, QLA_UINT8, {static_cast<int64_t>(bytes)});
      args.saved = saved_.view();
    }
    if (opt_.edit_forward) opt_.edit_forward(args);
    size_t bytes = 0;
    if (failed(backend_.forward_workspace(args, &bytes), "forward_workspace")) return false;
    args.workspace = bytes ? arena_.scratch(bytes) : nullptr;
    args.workspace_bytes = bytes;
    arena_.upload();
    if (failed(backend_.forward(args), "forward")) {
      fetched();
      result_.values.o = o_.read();
      return false;
    }
    if (!fetched()) return false;
    result_.values.o = o_.read();
    if (ht_.present()) result_.values.final_state = read_states(ht_);
    if (a_inv.present()) result_.a_inv = a_inv.read(), result_.a_gated = a_gated.read(), result_.h = read_states(h);
    if (g_cumsum_.present()) result_.g_cumsum = g_cumsum_.read();
    if (checkpoints.present()) result_.checkpoints = read_states(checkpoints);
    arena_.freeze();
    return true;
  }

  void backward() {
    const int64_t HV = in_.v_heads, H = in_.k_heads, N = s_.num_seqs();
    const int32_t real = s_.grad_state_dtype();
    TestTensor d_o, d_ht, dq, dk, dv, dg, dbeta, dh0, d_a_log, d_dt_bias;
    if (!in_.d_o.empty()) {
      if (opt_.expanded_d_o)
        d_o = arena_.tensor(Role::kInput, s_.dtype, shape_of(HV, in_.v_dim), {0, 0, 0, 1});
      else
        d_o = make(Role::kInput, s_.dtype, HV, in_.v_dim);
      d_o.write(in_.d_o);
    }
    if (!in_.d_final_state.empty()) write_states(d_ht = make_states(Role::kInput, real, N), in_.d_final_state);
    if (opt_.layout == Layout::kFused) {
      make_fused(Role::kOutput, dq, dk, dv);
    } else {
      dq = make(Role::kOutput, s_.dtype, H, in_.k_dim), dk = make(Role::kOutput, s_.dtype, H, in_.k_dim),
      dv = make(Role::kOutput, s_.dtype, HV, in_.v_dim);
    }
    if (g_.present()) dg = make(Role::kOutput, s_.g_dtype, HV, 0);
    dbeta = make(Role::kOutput, s_.beta_dtype, HV, 0);
    if (h0_.present()) dh0 = make_states(Role::kOutput, real, N);
    if (a_log_.present()) d_a_log = arena_.tensor(Role::kOutput, real, {HV});
    if (dt_bias_.present()) d_dt_bias = arena_.tensor(Role::kOutput, real, {HV});

    qla_gdn_backward_args args = {};
    common(args);
    args.g_cumsum = g_cumsum_.view(), args.q_rnorm = q_rnorm_.view(), args.k_rnorm = k_rnorm_.view(), args.saved = saved_.view();
    args.d_o = d_o.view(), args.d_final_state = d_ht.view();
    args.dq = dq.view(), args.dk = dk.view(), args.dv = dv.view(), args.dg = dg.view(), args.dbeta = dbeta.view();
    args.d_initial_state = dh0.view(), args.dA_log = d_a_log.view(), args.ddt_bias = d_dt_bias.view();
    if (opt_.edit_backward) opt_.edit_backward(args);
    size_t least = 0, best = 0;
    if (failed(backend_.backward_workspace(args, &least, &best), "backward_workspace")) return;
    args.workspace = best ? arena_.scratch(best) : nullptr;
    args.workspace_bytes = best;
    arena_.upload();
    if (failed(backend_.backward(args), "backward") || !fetched()) return;
    Values& values = result_.values;
    values.dq = dq.read(), values.dk = dk.read(), values.dv = dv.read(), values.dbeta = dbeta.read();
    if (dg.present()) values.dg = dg.read();
    if (dh0.present()) values.dh0 = read_states(dh0);
    if (d_a_log.present()) values.dA_log = d_a_log.read();
    if (d_dt_bias.present()) values.ddt_bias = d_dt_bias.read();
  }

  const Backend& backend_;
  const Sample& s_;
  const reference::Inputs& in_;
  const Options& opt_;
  Arena arena_;
  Result result_;
  TestTensor q_, k_, v_, g_, beta_, h0_, cu_, a_log_, dt_bias_, has_initial_, o_, ht_, g_cumsum_, q_rnorm_, k_rnorm_, saved_;
};

}  // namespace

Values run_chained(const Backend& backend, const Sample& sample, const std::vector<int64_t>& lengths, const Options& options) {
  Options piece = options;
  piece.backward = false;
  Values whole;
  Numbers state = sample.in.initial_state;
  int64_t from = 0;
  for (const int64_t length : lengths) {
    Sample part = tokens_of(sample, from, from + length);
    part.in.initial_state = state;
    const Result result = run(backend, part, piece);
    if (!result.ok()) return {};
    whole.o.insert(whole.o.end(), result.values.o.begin(), result.values.o.end());
    state = result.values.final_state;
    from += length;
  }
  whole.final_state = state;
  return whole;
}

Result run(const Backend& backend, const Sample& sample, const Options& options) {
  return Caller(backend, sample, options).run();
}

}  // namespace qla::test
