// (B5)-(B11): the gradients of one chunk and value head, no recurrence. Re-included for every level; see level.cpp.
//
// Everything of head-size length is formed transposed, [k][token]: S and dS+ are then read as they lie, by row, and tokens are
// the vector direction, so that row scales are vectors and <Q_i, HQ_i> needs no reduction across lanes.

template <class T>
struct GradsScratch {
  T *delta_t, *do_t, *dr_t;  // panels of [v_dim][P], columns are tokens
  T* jz;                     // panels of [2 c][P]: dO Delta^T, dR Delta^T
  T *d_p, *x, *y;            // [c, c]
  T *d_p_t, *x_t, *y_t;      // [c, c] their transposes
  T* right;                  // panels of [2 c][P]: X + X^T, then dP: what meets the rows of K and Q in (B9)

  GradsScratch(T* at, int c, int v_dim) {
    const int64_t wide = static_cast<int64_t>(c) * v_dim, square = static_cast<int64_t>(c) * c;
    delta_t = at, do_t = delta_t + wide, dr_t = do_t + wide;
    jz = dr_t + wide;
    d_p = jz + 2 * square, x = d_p + square, y = x + square;
    d_p_t = y + square, x_t = d_p_t + square, y_t = x_t + square;
    right = y_t + square;
  }
};

template <class T>
int64_t grads_scratch(int k_dim, int v_dim) {
  (void)k_dim;
  return 3 * static_cast<int64_t>(kMaxChunk) * v_dim + 10 * kMaxChunk * kMaxChunk;
}

// Token panels of [v_dim][P] from V panels of [stride rows][P].
template <class T>
HWY_INLINE void tokens_to_columns(const T* src, int64_t v_panel, int rows, int v_dim, T* dst) {
  for (int first = 0; first < rows; first += kPanel<T>, dst += static_cast<int64_t>(v_dim) * kPanel<T>) {
    const int width = rows - first < kPanel<T> ? rows - first : kPanel<T>;
    for (int v = 0; v < v_dim; v += kPanel<T>) {
      const int n = v_dim - v < kPanel<T> ? v_dim - v : kPanel<T>;
      transpose<T>(src + (v / kPanel<T>)*v_panel + first * kPanel<T>, kPanel<T>, width, n, dst + v * kPanel<T>, kPanel<T>);
    }
    if (width < kPanel<T>)
      for (int v = 0; v < v_dim; ++v)
        for (int j = width; j < kPanel<T>; ++j) dst[v * kPanel<T> + j] = 0;
  }
}

// (B5), (B6) and the sums of (B10) over a chunk's square matrices; column_sum[j] = sum_i Y'_ij
template <class T>
HWY_INLINE void square_grads(const Grads<T>& g, const GradsScratch<T>& s, T* HWY_RESTRICT column_sum) {
  const hn::ScalableTag<T> d;
  const ChunkTiles<T>& chunk = *g.chunk;
  const HeadTiles<T>& head = *g.head;
  const int rows = chunk.rows, c = chunk.c;
  const Vec<T> scale = hn::Set(d, g.scale), zero = hn::Zero(d);
  for (int j = 0; j < c; ++j) column_sum[j] = 0;
  for (int i = 0; i < rows; ++i) {
    const Vec<T> row = hn::Set(d, static_cast<T>(i));
    for (int j = 0; j < c; j += kLanes<T>) {
      const int64_t at = static_cast<int64_t>(i) * c + j;
      if (j > i) {
        hn::Store(zero, d, s.d_p + at), hn::Store(zero, d, s.x + at), hn::Store(zero, d, s.y + at);
        continue;
      }
      const auto column = hn::Iota(d, static_cast<T>(j));
      const auto below = hn::Lt(column, row);
      const int64_t in_panel = i * kPanel<T> + j % kPanel<T>;
      const T* jz = s.jz + (j / kPanel<T>)*2 * c * kPanel<T> + in_panel;
      const Vec<T> kk = hn::Load(d, chunk.products + (j / kPanel<T>)*2 * rows * kPanel<T> + in_panel);
      const Vec<T> gate = hn::Load(d, head.decay + at), beta = hn::Load(d, head.beta + j);
      const Vec<T> score = hn::IfThenElseZero(hn::Le(column, row), hn::Load(d, jz));                             // J
      const Vec<T> z = hn::IfThenElseZero(below, hn::Neg(hn::Mul(gate, hn::Load(d, jz + c * kPanel<T>))));       // Z
      const Vec<T> y = hn::MulAdd(hn::Load(d, head.pg + at), score, hn::IfThenElseZero(below, hn::Mul(z, kk)));  // Y'
      hn::Store(hn::Mul(hn::Mul(scale, gate), hn::Mul(score, beta)), d, s.d_p + at);
      hn::Store(hn::Mul(z, beta), d, s.x + at);
      hn::Store(hn::IfThenElseZero(below, hn::Mul(y, beta)), d, s.y + at);
      hn::Store(hn::Add(hn::Load(d, column_sum + j), y), d, column_sum + j);
    }
  }
  transpose<T>(s.d_p, c, rows, rows, s.d_p_t, c);
  transpose<T>(s.x, c, rows, rows, s.x_t, c);
  transpose<T>(s.y, c, rows, rows, s.y_t, c);
  // columns past the last row are read by whole panels: keep them zero
  for (int i = 0; i < rows; ++i)
    for (int j = rows; j < c; ++j) s.d_p_t[i * c + j] = s.x_t[i * c + j] = s.y_t[i * c + j] = 0;
  const int q_row = (rows + kPanel<T> - 1) / kPanel<T> * kPanel<T>;  // where Q's panels begin behind K's
  for (int first = 0; first < rows; first += kPanel<T>) {
    T* panel = s.right + (first / kPanel<T>)*2 * c * kPanel<T>;
    for (int i = rows * kPanel<T>; i < q_row * kPanel<T>; ++i) panel[i] = 0;
    for (int i = 0; i < rows; ++i)
      for (int v = 0; v < kPanel<T>; v += kLanes<T>) {
        const int64_t at = static_cast<int64_t>(i) * c + first + v;
        hn::Store(hn::Add(hn::Load(d, s.x + at), hn::Load(d, s.x_t + at)), d, panel + i * kPanel<T> + v);
        hn::Store(hn::Load(d, s.d_p + at), d, panel + (q_row + i) * kPanel<T> + v);
      }
  }
}

// (B11), additions only: nothing that a strong decay would cancel
template <class T>
HWY_INLINE void gate_grads(const T* HWY_RESTRICT a, const T* HWY_RESTRICT e, const T* HWY_RESTRICT y_t, T whole, int rows, int c,
                           T* dg) {
  const hn::ScalableTag<T> d;
  HWY_ALIGN T row_prefix[kMaxChunk];  // B_it = sum_{j < t} Y_ij, over i
  for (int i = 0; i < c; ++i) row_prefix[i] = 0;
  T prefix_e = 0;
  for (int t = 0; t < rows; ++t) {
    if (t > 0) {
      prefix_e += e[t - 1];
      for (int i = 0; i < c; i += kLanes<T>)
        hn::Store(hn::Add(hn::Load(d, row_prefix + i), hn::Load(d, y_t + (t - 1) * c + i)), d, row_prefix + i);
    }
    Vec<T> sum = hn::Zero(d);
    const Vec<T> at = hn::Set(d, static_cast<T>(t));
    for (int i = t / kLanes<T> * kLanes<T>; i < c; i += kLanes<T>)
      sum = hn::Add(sum, hn::IfThenElseZero(hn::Ge(hn::Iota(d, static_cast<T>(i)), at), hn::Load(d, row_prefix + i)));
    dg[t] = hn::GetLane(hn::SumOfLanes(d, sum)) + prefix_e + whole;
  }
  T suffix_a = 0;
  for (int t = rows - 1; t >= 0; --t) {
    suffix_a += a[t];
    dg[t] += suffix_a;
  }
}

template <class T>
void grads(const Grads<T>& g) {
  const hn::ScalableTag<T> d;
  const ChunkTiles<T>& chunk = *g.chunk;
  const HeadTiles<T>& head = *g.head;
  const int rows = chunk.rows, c = chunk.c, k_dim = chunk.k_dim, v_dim = g.v_dim;
  const GradsScratch<T> s(g.scratch, c, v_dim);
  tokens_to_columns<T>(g.delta, static_cast<int64_t>(c) * kPanel<T>, rows, v_dim, s.delta_t);
  tokens_to_columns<T>(g.do_dr, 2 * static_cast<int64_t>(c) * kPanel<T>, rows, v_dim, s.do_t);
  tokens_to_columns<T>(g.do_dr + c * kPanel<T>, 2 * static_cast<int64_t>(c) * kPanel<T>, rows, v_dim, s.dr_t);

  const OperandA<T> do_dr{g.do_dr, kPanel<T>, 2 * static_cast<int64_t>(c) * kPanel<T>};
  for (int first = 0; first < rows; first += kPanel<T>) {
    T* out = s.jz + (first / kPanel<T>)*2 * c * kPanel<T>;
    const T* b = s.delta_t + static_cast<int64_t>(first) * v_dim;
    const auto store = [&](int m, Vec<T> v0, Vec<T> v1) HWY_ATTR { store_row<T>(out + m * kPanel<T>, v0, v1); };
    product<T, Order::Panels>(do_dr, first, rows, v_dim, b, store);          // (B5) dO Delta^T
    product<T, Order::Panels>(do_dr, c + first, c + rows, v_dim, b, store);  // (B6) dR Delta^T
  }
  HWY_ALIGN T a[kMaxChunk], e[kMaxChunk], column_sum[kMaxChunk];
  square_grads<T>(g, s, column_sum);

  const int64_t state_panel = static_cast<int64_t>(k_dim) * kPanel<T>;
  const OperandA<T> state{g.state, kPanel<T>, state_panel}, d_state{g.d_state, kPanel<T>, state_panel},
      kq_t{chunk.k_t, kPanel<T>, state_panel};
  const int q_row = (rows + kPanel<T> - 1) / kPanel<T> * kPanel<T>;
  for (int first = 0; first < rows; first += kPanel<T>) {
    const int64_t panel_at = static_cast<int64_t>(first) * k_dim, wide_at = static_cast<int64_t>(first) * v_dim;
    T *dq = g.dq_t + panel_at, *dk = g.dk_t + panel_at;
    const T *q_t = chunk.q_t + panel_at, *k_t = chunk.k_t + panel_at;
    const Vec<T> gamma0 = hn::Load(d, head.gamma + first), gamma1 = hn::Load(d, head.gamma + first + kLanes<T>);
    const Vec<T> tail0 = hn::Load(d, head.tail + first), tail1 = hn::Load(d, head.tail + first + kLanes<T>);
    const Vec<T> beta0 = hn::Load(d, head.beta + first), beta1 = hn::Load(d, head.beta + first + kLanes<T>);
    const Vec<T> scale = hn::Set(d, g.scale), sg0 = hn::Mul(scale, gamma0), sg1 = hn::Mul(scale, gamma1);
    Vec<T> a0 = hn::Zero(d), a1 = hn::Zero(d), e0 = hn::Zero(d), e1 = hn::Zero(d);
    // (B7) HQ, first term of (B8); a of (B11)
    product<T, Order::Panels>(state, 0, k_dim, v_dim, s.do_t + wide_at, [&](int m, Vec<T> v0, Vec<T> v1) HWY_ATTR {
      v0 = hn::Mul(sg0, v0), v1 = hn::Mul(sg1, v1);
      a0 = hn::MulAdd(v0, hn::Load(d, q_t + m * kPanel<T>), a0);
      a1 = hn::MulAdd(v1, hn::Load(d, q_t + m * kPanel<T> + kLanes<T>), a1);
      T* row = dq + m * kPanel<T>;
      if (!g.first) v0 = hn::Add(v0, hn::Load(d, row)), v1 = hn::Add(v1, hn::Load(d, row + kLanes<T>));
      store_row<T>(row, v0, v1);
    });
    // (B7) HK, second term of (B9)
    product<T, Order::Panels>(state, 0, k_dim, v_dim, s.dr_t + wide_at, [&](int m, Vec<T> v0, Vec<T> v1) HWY_ATTR {
      v0 = hn::Mul(gamma0, v0), v1 = hn::Mul(gamma1, v1);
      a0 = hn::NegMulAdd(v0, hn::Load(d, k_t + m * kPanel<T>), a0);
      a1 = hn::NegMulAdd(v1, hn::Load(d, k_t + m * kPanel<T> + kLanes<T>), a1);
      T* row = dk + m * kPanel<T>;
      if (g.first)
        v0 = hn::Neg(v0), v1 = hn::Neg(v1);
      else
        v0 = hn::Sub(hn::Load(d, row), v0), v1 = hn::Sub(hn::Load(d, row + kLanes<T>), v1);
      store_row<T>(row, v0, v1);
    });
    // (B7) HE, first term of (B9); e' of (B10)
    product<T, Order::Panels>(d_state, 0, k_dim, v_dim, s.delta_t + wide_at, [&](int m, Vec<T> v0, Vec<T> v1) HWY_ATTR {
      v0 = hn::Mul(tail0, v0), v1 = hn::Mul(tail1, v1);
      e0 = hn::MulAdd(v0, hn::Load(d, k_t + m * kPanel<T>), e0);
      e1 = hn::MulAdd(v1, hn::Load(d, k_t + m * kPanel<T> + kLanes<T>), e1);
      T* row = dk + m * kPanel<T>;
      store_row<T>(row, hn::MulAdd(beta0, v0, hn::Load(d, row)), hn::MulAdd(beta1, v1, hn::Load(d, row + kLanes<T>)));
    });
    const auto add_to = [&](T* panel) {
      return [=](int m, Vec<T> v0, Vec<T> v1) HWY_ATTR {
        const hn::ScalableTag<T> tag;
        T* row = panel + m * kPanel<T>;
        store_row<T>(row, hn::Add(v0, hn::Load(tag, row)), hn::Add(v1, hn::Load(tag, row + kLanes<T>)));
      };
    };
    // (B8) dP K; dP is lower triangular: its columns past this panel's tokens are zero
    HWY_ALIGN T d_p_t[kMaxChunk * kPanel<T>];
    const int last = first + kPanel<T> < rows ? first + kPanel<T> : rows;
    for (int j = 0; j < last; ++j)
      store_row<T>(d_p_t + j * kPanel<T>, hn::Load(d, s.d_p_t + j * c + first), hn::Load(d, s.d_p_t + j * c + first + kLanes<T>));
    product<T, Order::Panels>(kq_t, 0, k_dim, last, d_p_t, add_to(dq));
    // (B9) (X + X^T) K + dP^T Q
    product<T, Order::Panels>(kq_t, 0, k_dim, q_row + rows, s.right + (first / kPanel<T>)*2 * c * kPanel<T>, add_to(dk));
    hn::Store(a0, d, a + first), hn::Store(a1, d, a + first + kLanes<T>);
    hn::Store(e0, d, e + first), hn::Store(e1, d, e + first + kLanes<T>);
  }
  Vec<T> whole0 = hn::Zero(d), whole1 = hn::Zero(d);
  const int64_t state_size = (v_dim + kPanel<T> - 1) / kPanel<T> * state_panel;
  for (int64_t i = 0; i < state_size; i += kPanel<T>) {
    whole0 = hn::MulAdd(hn::Load(d, g.state + i), hn::Load(d, g.d_state + i), whole0);
    whole1 = hn::MulAdd(hn::Load(d, g.state + i + kLanes<T>), hn::Load(d, g.d_state + i + kLanes<T>), whole1);
  }
  const T whole = head.gamma[rows - 1] * hn::GetLane(hn::SumOfLanes(d, hn::Add(whole0, whole1)));
  for (int i = 0; i < rows; ++i) {
    g.dbeta[i] = e[i] + column_sum[i];  // (B10)
    e[i] *= head.beta[i];
  }
  gate_grads<T>(a, e, s.y_t, whole, rows, c, g.dg);
}
