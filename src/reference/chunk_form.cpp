#include "reference/chunk_form.hpp"

#include <algorithm>
#include <cmath>
#include <type_traits>

#include "reference/activations.hpp"
#include "reference/linear.hpp"
#include "reference/parallel.hpp"
#include "reference/rounding.hpp"

namespace qla::reference {
namespace {

constexpr double kGateFloor = -88.0;  // (F0)

template <class A>
using Tile = std::vector<A>;

struct Exact {
  using Real = double;
  static double round(double x) { return x; }
};
struct Bf16 {
  using Real = float;
  static float round(float x) { return round_bf16(x); }
};
struct Fp16 {
  using Real = float;
  static float round(float x) { return round_fp16(x); }
};

template <class P>
struct ByRows : P {};  // InverseOrder::kRows
template <class P>
inline constexpr bool kByRows = false;
template <class P>
inline constexpr bool kByRows<ByRows<P>> = true;

template <class P, class A>
Tile<A> rounded(Tile<A> x) {
  for (A& value : x) value = P::round(value);
  return x;
}

// x[i, :] *= scale[i]
template <class A>
Tile<A> rows_scaled(Tile<A> x, const Tile<A>& scale) {
  const int64_t columns = static_cast<int64_t>(x.size() / scale.size());
  for (size_t i = 0; i < x.size(); ++i) x[i] *= scale[i / columns];
  return x;
}

// What a chunk of one value head is made of. Rows past the sequence's end are zero (the tail rule), whatever memory holds there.
template <class P>
struct Chunk {
  using A = typename P::Real;
  int64_t first, rows;                // token, valid rows
  Tile<A> q, k;                       // [C, K] as given: the operands; norms ride on the scalings
  Tile<A> v, d_o;                     // [C, V]
  Tile<A> beta, rq, rk;               // [C]
  Tile<A> g, gamma, tail;             // (F1)
  Tile<A> decay;                      // G [C, C]
  Tile<A> a_gated;                    // Abar (F3), an operand
  Tile<A> p_gated;                    // Pg diag(beta) (F6), an operand
  Tile<A> qk, kk;                     // Q K^T, K K^T with the norms on, fp32
  Tile<A> k_scale, q_scale, e_scale;  // gamma rk; scale gamma rq; tail beta rk
};

template <class P>
class Head {  // one value head of one sequence
 public:
  using A = typename P::Real;

  Head(const Inputs& in, const Activated& act, int64_t n, int64_t head, int64_t C)
      : in_(in), act_(act), n_(n), head_(head), C_(C), K_(in.k_dim), V_(in.v_dim) {}

  int64_t num_chunks() const { return (in_.eos[n_] - in_.bos[n_] + C_ - 1) / C_; }

  Tile<A> start_state() const {
    Tile<A> state(K_ * V_, A(0));
    if (in_.starts_from_state(n_)) load_state(in_.initial_state, state);
    return state;
  }
  Tile<A> end_gradient() const {
    Tile<A> state(K_ * V_, A(0));
    if (!in_.d_final_state.empty()) load_state(in_.d_final_state, state);
    return state;
  }

  Chunk<P> chunk(int64_t index) const {
    Chunk<P> c;
    c.first = in_.bos[n_] + index * C_;
    c.rows = std::min(C_, in_.eos[n_] - c.first);
    const int64_t k_head = head_ / in_.group();
    c.q = rows_of(c, in_.q, in_.k_heads, k_head, K_);
    c.k = rows_of(c, in_.k, in_.k_heads, k_head, K_);
    c.v = rows_of(c, in_.v, in_.v_heads, head_, V_);
    c.d_o = in_.d_o.empty() ? Tile<A>(C_ * V_, A(0)) : rows_of(c, in_.d_o, in_.v_heads, head_, V_);
    c.beta = rows_of(c, act_.beta, in_.v_heads, head_, 1);
    c.rq = rows_of(c, act_.q_rnorm, in_.k_heads, k_head, 1);
    c.rk = rows_of(c, act_.k_rnorm, in_.k_heads, k_head, 1);
    gates(c);
    scores(c);
    c.a_gated = rounded<P>(inverse(c, /*gated=*/true));
    return c;
  }

  // The matrix that (F2), (F3) invert, without its unit diagonal: (G o L) diag(beta), or diag(beta) L
  Tile<A> strictly_lower(const Chunk<P>& c, bool gated) const {
    Tile<A> lower(C_ * C_, A(0));
    for (int64_t i = 0; i < C_; ++i)
      for (int64_t j = 0; j < i; ++j)
        lower[i * C_ + j] = c.kk[i * C_ + j] * (gated ? c.decay[i * C_ + j] * c.beta[j] : c.beta[i]);
    return lower;
  }

  // Abar = (I + (G o L) diag(beta))^-1 (F3), or (F2). By substitution, row after row; a 16-bit kernel does so for the diagonal
  // blocks of 16 and fills in those below by products of fp16 operands: A21 = -A22 (L21 A11), first for blocks of 16, then of 32;
  // or row of blocks after row of blocks (ByRows).
  Tile<A> inverse(const Chunk<P>& c, bool gated) const {
    const Tile<A> lower = strictly_lower(c, gated), blocks = inverse_by_blocks(lower, std::is_same_v<P, Exact> ? C_ : 16);
    const bool fits = std::all_of(blocks.begin(), blocks.end(), [](A x) { return std::fabs(x) < A(64); });
    return fits ? blocks : inverse_by_blocks(lower, C_);  // a growing recurrence, or beyond fp16: all by substitution
  }
  Tile<A> inverse_by_blocks(const Tile<A>& lower, int64_t block) const {
    Tile<A> inv(C_ * C_, A(0));
    for (int64_t i = 0; i < C_; ++i) {
      inv[i * C_ + i] = A(1);
      for (int64_t j = i / block * block; j < i; ++j)
        for (int64_t m = i / block * block; m <= j; ++m) inv[i * C_ + m] -= lower[i * C_ + j] * inv[j * C_ + m];
    }
    if (kByRows<P>) {
      for (int64_t row = block; row < C_; row += block)
        for (int64_t column = 0; column < row; column += block) below(lower, column, block, row, std::min(C_, row + block), inv);
      return inv;
    }
    for (int64_t size = block; size < C_; size *= 2)
      for (int64_t from = 0; from + size < C_; from += 2 * size)
        below(lower, from, size, from + size, std::min(C_, from + 2 * size), inv);
    return inv;
  }
  // Rows row .. end, columns column .. column + width: - A22 (L21 A11) with A22 of these rows, A11 of rows and L21 of columns
  // column .. row, where A is known
  void below(const Tile<A>& lower, int64_t column, int64_t width, int64_t row, int64_t end, Tile<A>& inv) const {
    const int64_t rows = end - row, depth = row - column;
    const auto operand = [&](const Tile<A>& of, int64_t i0, int64_t j0, int64_t m, int64_t n) {
      Tile<A> part(m * n);
      for (int64_t i = 0; i < m; ++i)
        for (int64_t j = 0; j < n; ++j) part[i * n + j] = round_fp16(of[(i0 + i) * C_ + j0 + j]);
      return part;
    };
    const Tile<A> l21 = operand(lower, row, column, rows, depth), a11 = operand(inv, column, column, depth, width),
                  a22 = operand(inv, row, row, rows, rows);
    const Tile<A> inner = rounded<Fp16>(nn(l21, a11, rows, width, depth)), outer = nn(a22, inner, rows, width, rows);
    for (int64_t i = 0; i < rows; ++i)
      for (int64_t j = 0; j < width; ++j) inv[(row + i) * C_ + column + j] = -outer[i * width + j];
  }

  // One chunk of the forward walk. state becomes S+; delta and snapshot are what a state pass would store.
  void forward(const Chunk<P>& c, Tile<A>& state, Tile<A>& o, Tile<A>& snapshot, Tile<A>& delta) const {
    snapshot = rounded<P>(state);
    Tile<A> resid = nn(c.k, snapshot, C_, V_, K_);  // KS
    for (int64_t i = 0; i < C_; ++i)
      for (int64_t x = 0; x < V_; ++x) resid[i * V_ + x] = c.v[i * V_ + x] - c.k_scale[i] * resid[i * V_ + x];  // (F4)
    const Tile<A> full = nn(c.a_gated, rounded<P>(std::move(resid)), C_, V_, C_);                               // (F5) Delta
    delta = rounded<P>(full);
    o = rows_scaled(nn(c.q, snapshot, C_, V_, K_), c.q_scale);  // (F7)
    gemm_nn(C_, V_, C_, c.p_gated.data(), delta.data(), o.data());
    const Tile<A> v_tail = rounded<P>(rows_scaled(full, c.e_scale));  // (F8), with the key's norm in it
    for (A& x : state) x *= c.gamma[C_ - 1];                          // (F9)
    gemm_tn(K_, V_, C_, c.k.data(), v_tail.data(), state.data());
  }

  // One chunk of the reverse walk. d_state is dS+ on entry and dS after; snapshot is dS+ as stored, d_resid is dR = dV,
  // unrounded.
  void reverse(const Chunk<P>& c, Tile<A>& d_state, Tile<A>& snapshot, Tile<A>& d_resid) const {
    snapshot = rounded<P>(d_state);
    Tile<A> d_delta = rows_scaled(nn(c.k, snapshot, C_, V_, K_), c.e_scale);  // (B1), diag(beta) of (B3) already in
    gemm_tn(C_, V_, C_, c.p_gated.data(), c.d_o.data(), d_delta.data());      // (B2)
    d_delta = rounded<P>(std::move(d_delta));
    d_resid.assign(C_ * V_, A(0));
    gemm_tn(C_, V_, C_, c.a_gated.data(), d_delta.data(), d_resid.data());  // (B3)
    const Tile<A> scaled_do = rounded<P>(rows_scaled(c.d_o, c.q_scale));
    Tile<A> scaled_dr = rounded<P>(rows_scaled(d_resid, c.k_scale));
    for (A& x : scaled_dr) x = -x;
    for (A& x : d_state) x *= c.gamma[C_ - 1];  // (B4)
    gemm_tn(K_, V_, C_, c.q.data(), scaled_do.data(), d_state.data());
    gemm_tn(K_, V_, C_, c.k.data(), scaled_dr.data(), d_state.data());
  }

  // (B5)-(B11) from S, Delta, dS+, dR as stored. Adds to the gradients of the normalised q and k; sets dg, dbeta.
  void grads(const Chunk<P>& c, const Tile<A>& state, const Tile<A>& delta, const Tile<A>& d_state, const Tile<A>& d_resid,
             Tile<A>& dq, Tile<A>& dk, Tile<A>& dg, Tile<A>& dbeta) const {
    const Tile<A> jj = nt(c.d_o, delta, C_, C_, V_), zz = nt(d_resid, delta, C_, C_, V_);  // J and Z before masks and gates
    Tile<A> dp(C_ * C_, A(0)), x(C_ * C_, A(0)), y(C_ * C_, A(0)), column(C_, A(0));
    for (int64_t i = 0; i < C_; ++i)
      for (int64_t j = 0; j <= i; ++j) {
        const int64_t at = i * C_ + j;
        const A z = j < i ? -c.decay[at] * zz[at] : A(0);  // (B6)
        // One operand for dP K and dP^T Q, one for X and X^T: with the norms of both rows in them. What the other side's norm
        // does too much is taken off the sum.
        dp[at] = operand(c.rq[i] * A(in_.scale) * c.decay[at] * jj[at] * c.beta[j] * c.rk[j], c.qk[at]);  // (B5)
        x[at] = operand(c.rk[i] * z * c.beta[j] * c.rk[j], c.kk[at]);
        y[at] = A(in_.scale) * c.decay[at] * c.qk[at] * jj[at] + z * c.kk[at];  // Y' (B10)
        column[j] += y[at];
        y[at] *= c.beta[j];
      }
    const Tile<A> hq = nt(c.d_o, state, C_, K_, V_), hk = nt(d_resid, state, C_, K_, V_);  // (B7)
    const Tile<A> he = rows_scaled(nt(delta, d_state, C_, K_, V_), c.tail);

    // (B8)
    Tile<A> add = nn(dp, c.k, C_, K_, C_);
    for (int64_t i = 0; i < C_ * K_; ++i) add[i] = add[i] / c.rq[i / K_] + A(in_.scale) * c.gamma[i / K_] * hq[i];
    accumulate(c, add, dq);
    // (B9)
    Tile<A> both(C_ * C_);
    for (int64_t i = 0; i < C_; ++i)
      for (int64_t j = 0; j < C_; ++j) both[i * C_ + j] = x[i * C_ + j] + x[j * C_ + i];
    add = nn(both, c.k, C_, K_, C_);
    gemm_tn(C_, K_, C_, dp.data(), c.q.data(), add.data());
    for (int64_t i = 0; i < C_ * K_; ++i) add[i] = add[i] / c.rk[i / K_] + (c.beta[i / K_] * he[i] - c.gamma[i / K_] * hk[i]);
    accumulate(c, add, dk);

    // (B10), (B11)
    Tile<A> a(C_), e(C_);
    for (int64_t i = 0; i < C_; ++i) {
      A qh = 0, kh = 0, eh = 0;
      for (int64_t m = 0; m < K_; ++m) {
        qh += c.q[i * K_ + m] * hq[i * K_ + m];
        kh += c.k[i * K_ + m] * hk[i * K_ + m];
        eh += c.k[i * K_ + m] * he[i * K_ + m];
      }
      a[i] = c.q_scale[i] * qh - c.k_scale[i] * kh;
      e[i] = c.rk[i] * eh;
      dbeta[i] = e[i] + column[i];
      e[i] *= c.beta[i];
    }
    A whole = 0, before = 0;
    for (int64_t i = 0; i < K_ * V_; ++i) whole += state[i] * d_state[i];
    whole *= c.gamma[C_ - 1];
    Tile<A> crossing(C_, A(0));  // sum over i >= t, j < t of the strictly lower Y
    for (int64_t i = 0; i < C_; ++i) {
      A prefix = 0;
      for (int64_t t = 0; t <= i; ++t) {
        crossing[t] += prefix;
        prefix += y[i * C_ + t];
      }
    }
    A suffix = 0;
    for (int64_t t = C_ - 1; t >= 0; --t) dg[t] = crossing[t] + whole + (suffix += a[t]);
    for (int64_t t = 0; t < C_; ++t) {
      dg[t] += before;
      before += e[t];
    }
  }

  static Tile<A> nn(const Tile<A>& a, const Tile<A>& b, int64_t m, int64_t n, int64_t p) {
    Tile<A> c(m * n, A(0));
    gemm_nn(m, n, p, a.data(), b.data(), c.data());
    return c;
  }
  static Tile<A> nt(const Tile<A>& a, const Tile<A>& b, int64_t m, int64_t n, int64_t p) {
    Tile<A> c(m * n, A(0));
    gemm_nt(m, n, p, a.data(), b.data(), c.data());
    return c;
  }

 private:
  void load_state(const std::vector<double>& from, Tile<A>& state) const {
    const double* first = &from[(n_ * in_.v_heads + head_) * in_.state_size()];
    std::copy(first, first + in_.state_size(), state.begin());
  }
  Tile<A> rows_of(const Chunk<P>& c, const std::vector<double>& from, int64_t heads, int64_t head, int64_t width) const {
    Tile<A> tile(C_ * width, A(0));
    for (int64_t i = 0; i < c.rows; ++i)
      for (int64_t x = 0; x < width; ++x) tile[i * width + x] = static_cast<A>(from[((c.first + i) * heads + head) * width + x]);
    return tile;
  }
  // An element of dP or X as an operand. fp16: where a zero row of q meets a zero row of k both norms are 1e3 and the product may
  // leave the range; it multiplies rows of zeros only.
  static A operand(A x, A pair) {
    if (std::is_base_of_v<Fp16, P> && std::fabs(x) > A(65504) && pair == A(0)) return A(0);
    return P::round(x);
  }
  void accumulate(const Chunk<P>& c, const Tile<A>& add, Tile<A>& total) const {
    for (int64_t i = 0; i < c.rows * K_; ++i) total[(c.first - in_.bos[n_]) * K_ + i] += add[i];
  }

  void gates(Chunk<P>& c) const {
    c.g.assign(C_, A(0));
    for (int64_t i = 0; i < C_; ++i) {
      A raw = i < c.rows ? static_cast<A>(act_.g[(c.first + i) * in_.v_heads + head_]) : A(0);
      if (raw < A(kGateFloor)) raw = A(kGateFloor);  // (F0); a NaN fails the comparison and stays
      c.g[i] = raw;
    }
    cumulative_sum(c.g);  // (F1)
    // a kernel's are in base 2
    const auto exp = [](A x) { return std::is_same_v<P, Exact> ? std::exp(x) : x < A(-126) ? A(0) : std::exp2(x); };
    c.gamma.resize(C_), c.tail.resize(C_);
    c.k_scale.resize(C_), c.q_scale.resize(C_), c.e_scale.resize(C_);
    c.decay.assign(C_ * C_, A(0));
    for (int64_t i = 0; i < C_; ++i) {
      c.gamma[i] = exp(c.g[i]);
      c.tail[i] = i < c.rows ? exp(c.g[C_ - 1] - c.g[i]) : A(0);
      for (int64_t j = 0; j <= i; ++j) c.decay[i * C_ + j] = exp(c.g[i] - c.g[j]);
      c.k_scale[i] = c.gamma[i] * c.rk[i];
      c.q_scale[i] = A(in_.scale) * c.gamma[i] * c.rq[i];
      c.e_scale[i] = c.tail[i] * c.beta[i] * c.rk[i];
    }
  }
  // In fp32 as a warp does it: in base 2, two rows a lane, distances doubled. Where gates are strong the sum's roundings are
  // those that decide the errors of G.
  void cumulative_sum(Tile<A>& g) const {
    if (std::is_same_v<P, Exact>) {
      for (int64_t i = 1; i < C_; ++i) g[i] += g[i - 1];
      return;
    }
    const int64_t lanes = C_ / 2;
    Tile<A> through(lanes), before;
    for (A& x : g) x *= A(1.4426950408889634f);
    for (int64_t l = 0; l < lanes; ++l) through[l] = g[2 * l] + g[2 * l + 1];
    for (int64_t d = 1; d < lanes; d *= 2) {
      before = through;
      for (int64_t l = d; l < lanes; ++l) through[l] += before[l - d];
    }
    for (int64_t l = 0; l < lanes; ++l) g[2 * l] = through[l] - g[2 * l + 1], g[2 * l + 1] = through[l];
  }
  void scores(Chunk<P>& c) const {
    c.qk = nt(c.q, c.k, C_, C_, K_);
    c.kk = nt(c.k, c.k, C_, C_, K_);
    c.p_gated.assign(C_ * C_, A(0));
    for (int64_t i = 0; i < C_; ++i)
      for (int64_t j = 0; j <= i; ++j) {
        const int64_t at = i * C_ + j;
        c.qk[at] *= c.rq[i] * c.rk[j];
        c.kk[at] *= c.rk[i] * c.rk[j];
        c.p_gated[at] = P::round(A(in_.scale) * c.decay[at] * c.qk[at] * c.beta[j]);  // (F6)
      }
  }

  const Inputs& in_;
  const Activated& act_;
  int64_t n_, head_, C_, K_, V_;
};

template <class P>
Outputs forward(const Inputs& in, int64_t C) {
  using A = typename P::Real;
  const Activated act = activate(in);
  Outputs out;
  out.o.assign(in.tokens * in.v_heads * in.v_dim, 0.0);
  out.final_state.assign(in.num_seqs() * in.v_heads * in.state_size(), 0.0);
  parallel_for(in.num_seqs() * in.v_heads, [&](int64_t job) {
    const int64_t n = job / in.v_heads, h = job % in.v_heads;
    const Head<P> head(in, act, n, h, C);
    Tile<A> state = head.start_state(), o, snapshot, delta;
    for (int64_t index = 0; index < head.num_chunks(); ++index) {
      const Chunk<P> c = head.chunk(index);
      head.forward(c, state, o, snapshot, delta);
      for (int64_t i = 0; i < c.rows; ++i)
        std::copy_n(&o[i * in.v_dim], in.v_dim, &out.o[((c.first + i) * in.v_heads + h) * in.v_dim]);
    }
    std::copy(state.begin(), state.end(), &out.final_state[job * in.state_size()]);
  });
  return out;
}

template <class P>
void backward_head(const Inputs& in, const Activated& act, int64_t n, int64_t h, int64_t C, Tile<typename P::Real>& dq,
                   Tile<typename P::Real>& dk, Gradients& grads) {
  using A = typename P::Real;
  const Head<P> head(in, act, n, h, C);
  const int64_t chunks = head.num_chunks();
  std::vector<Tile<A>> states(chunks), deltas(chunks);
  Tile<A> state = head.start_state(), o;
  for (int64_t index = 0; index < chunks; ++index) head.forward(head.chunk(index), state, o, states[index], deltas[index]);
  Tile<A> d_state = head.end_gradient(), after, d_resid, dg(C), dbeta(C);
  for (int64_t index = chunks - 1; index >= 0; --index) {
    const Chunk<P> c = head.chunk(index);
    head.reverse(c, d_state, after, d_resid);
    head.grads(c, states[index], deltas[index], after, rounded<P>(d_resid), dq, dk, dg, dbeta);
    for (int64_t i = 0; i < c.rows; ++i) {
      const int64_t at = (c.first + i) * in.v_heads + h;
      std::copy_n(&d_resid[i * in.v_dim], in.v_dim, &grads.dv[at * in.v_dim]);
      grads.dg[at] = dg[i];
      grads.dbeta[at] = dbeta[i];
    }
  }
  if (in.initial_state.empty() || in.starts_from_state(n))
    std::copy(d_state.begin(), d_state.end(), &grads.dh0[(n * in.v_heads + h) * in.state_size()]);
}

template <class P>
Gradients backward(const Inputs& in, int64_t C) {
  using A = typename P::Real;
  const Activated act = activate(in);
  Gradients grads;
  grads.dq.assign(in.q.size(), 0.0);
  grads.dk.assign(in.k.size(), 0.0);
  grads.dv.assign(in.v.size(), 0.0);
  grads.dg.assign(in.tokens * in.v_heads, 0.0);
  grads.dbeta.assign(in.tokens * in.v_heads, 0.0);
  grads.dh0.assign(in.num_seqs() * in.v_heads * in.state_size(), 0.0);
  parallel_for(in.num_seqs() * in.k_heads, [&](int64_t job) {
    const int64_t n = job / in.k_heads, k_head = job % in.k_heads, length = in.eos[n] - in.bos[n];
    Tile<A> dq(length * in.k_dim, A(0)), dk(length * in.k_dim, A(0));  // summed over the group in the accumulators' type
    for (int64_t h = k_head * in.group(); h < (k_head + 1) * in.group(); ++h) backward_head<P>(in, act, n, h, C, dq, dk, grads);
    for (int64_t i = 0; i < length; ++i) {
      const int64_t at = ((in.bos[n] + i) * in.k_heads + k_head) * in.k_dim;
      std::copy_n(&dq[i * in.k_dim], in.k_dim, &grads.dq[at]);
      std::copy_n(&dk[i * in.k_dim], in.k_dim, &grads.dk[at]);
    }
  });
  activations_adjoint(in, act, grads);
  return grads;
}

}  // namespace

Outputs chunk_forward(const Inputs& in, Operand operand, int64_t chunk, InverseOrder order) {
  if (operand == Operand::kExact) return forward<Exact>(in, chunk);
  if (order == InverseOrder::kRows)
    return operand == Operand::kBf16 ? forward<ByRows<Bf16>>(in, chunk) : forward<ByRows<Fp16>>(in, chunk);
  return operand == Operand::kBf16 ? forward<Bf16>(in, chunk) : forward<Fp16>(in, chunk);
}

Gradients chunk_backward(const Inputs& in, Operand operand, int64_t chunk, InverseOrder order) {
  if (operand == Operand::kExact) return backward<Exact>(in, chunk);
  if (order == InverseOrder::kRows)
    return operand == Operand::kBf16 ? backward<ByRows<Bf16>>(in, chunk) : backward<ByRows<Fp16>>(in, chunk);
  return operand == Operand::kBf16 ? backward<Bf16>(in, chunk) : backward<Fp16>(in, chunk);
}

ChunkParts chunk_parts(const Inputs& in, int64_t chunk) {
  const Activated act = activate(in);
  ChunkParts parts;
  parts.g_cumsum.assign(in.tokens * in.v_heads, 0.0);
  parts.a_inv.assign(in.tokens * in.v_heads * chunk, 0.0);
  parts.a_gated = parts.a_inv;
  for (int64_t n = 0; n < in.num_seqs(); ++n) {
    const int64_t chunks = Head<Exact>(in, act, n, 0, chunk).num_chunks(), slot = static_cast<int64_t>(parts.h.size());
    parts.h.resize(slot + chunks * in.v_heads * in.state_size());
    for (int64_t h = 0; h < in.v_heads; ++h) {
      const Head<Exact> head(in, act, n, h, chunk);
      Tile<double> state = head.start_state(), o, snapshot, delta;
      for (int64_t index = 0; index < chunks; ++index) {
        const Chunk<Exact> c = head.chunk(index);
        const Tile<double> ungated = head.inverse(c, false);
        for (int64_t i = 0; i < c.rows; ++i) {
          const int64_t at = (c.first + i) * in.v_heads + h;
          parts.g_cumsum[at] = c.g[i];
          std::copy_n(&ungated[i * chunk], chunk, &parts.a_inv[at * chunk]);
          std::copy_n(&c.a_gated[i * chunk], chunk, &parts.a_gated[at * chunk]);
        }
        std::copy(state.begin(), state.end(), parts.h.begin() + slot + (index * in.v_heads + h) * in.state_size());
        head.forward(c, state, o, snapshot, delta);
      }
    }
  }
  return parts;
}

}  // namespace qla::reference
