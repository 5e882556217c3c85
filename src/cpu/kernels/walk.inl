// The two recurrences over chunks, one panel of V at a time: its state panel stays in L1 through all products of the chunk.
// Re-included for every level; see level.cpp.

// Rows of a matrix that lies transposed, in panels of [k_dim][P] whose columns are its rows, times a panel of b.
template <class T, class Epilogue>
HWY_INLINE void rows_times(const T* panels, int rows, int k_dim, const T* b, const Epilogue& epilogue) {
  for (int first = 0; first < rows; first += kPanel<T>, panels += static_cast<int64_t>(k_dim) * kPanel<T>)
    product<T, Order::ByColumn>({panels - first, kPanel<T>, 0}, first, first + kPanel<T> < rows ? first + kPanel<T> : rows, k_dim, b,
                                epilogue);
}

template <class T>
void walk(const Walk<T>& w, int p_begin, int p_end) {
  const hn::ScalableTag<T> d;
  const ChunkTiles<T>& chunk = *w.chunk;
  const HeadTiles<T>& head = *w.head;
  const int rows = chunk.rows, k_dim = chunk.k_dim, c = chunk.c;
  const bool with_o = w.o.data != nullptr;
  HWY_ALIGN T v[kMaxChunk * kPanel<T>];  // V, then R
  HWY_ALIGN T o[kMaxChunk * kPanel<T>];
  HWY_ALIGN T v_new[kMaxChunk * kPanel<T>];   // D
  HWY_ALIGN T v_tail[kMaxChunk * kPanel<T>];  // E
  const OperandA<T> abar{head.abar, c, 0}, pg{head.pg, c, 0};
  const OperandA<T> k_t{chunk.k_t, kPanel<T>, static_cast<int64_t>(k_dim) * kPanel<T>};
  const Vec<T> decay = hn::Set(d, head.gamma[rows - 1]);
  auto ahead = reinterpret_cast<uintptr_t>(w.ahead ? w.ahead : w.chunk);  // only ever prefetched; never 0: that costs a page walk
  const auto ahead_step = static_cast<uintptr_t>(w.ahead_step);
  const auto look_ahead = [&]() HWY_ATTR {
    __builtin_prefetch(reinterpret_cast<const void*>(ahead), 0, 2);
    ahead += ahead_step;
  };
  for (int p = p_begin; p < p_end; ++p) {
    const int64_t state_at = static_cast<int64_t>(p) * k_dim * kPanel<T>;
    const T* state_in = w.state_in + state_at;
    T* state_out = w.state_out ? w.state_out + state_at : nullptr;
    T* delta = w.delta ? w.delta + static_cast<int64_t>(p) * c * kPanel<T> : nullptr;
    if (w.known_delta) {
      for (int i = 0; i < rows; ++i) {
        const Vec<T> beta = hn::Set(d, head.beta[i]), tail = hn::Set(d, head.tail[i]);
        const T* row = delta + i * kPanel<T>;
        store_row<T>(v_tail + i * kPanel<T>, hn::Mul(tail, hn::Mul(beta, hn::Load(d, row))),
                     hn::Mul(tail, hn::Mul(beta, hn::Load(d, row + kLanes<T>))));
      }
    } else {
      if (w.v.data) {
        load_panel<T>(w.v, rows, p * kPanel<T>, w.v_dim, v);
      } else
        for (int i = 0; i < rows * kPanel<T>; ++i) v[i] = 0;
      // rows lie pages apart, so the processor does not see them coming: ask for them while the product runs, a row at a time
      const RowAddress next_v =
          p + 1 < p_end ? row_address(w.v, 0, (p + 1) * kPanel<T>) : row_address(w.v, rows, p_begin * kPanel<T>);
      const RowAddress next_o = row_address(w.o, 0, p * kPanel<T>);
      // (F4) R = V - diag(gamma) K S
      rows_times<T>(chunk.k_t, rows, k_dim, state_in, [&](int m, Vec<T> v0, Vec<T> v1) HWY_ATTR {
        next_v.prefetch(m);
        look_ahead();
        const Vec<T> gamma = hn::Set(d, head.gamma[m]);
        T* row = v + m * kPanel<T>;
        store_row<T>(row, hn::NegMulAdd(gamma, v0, hn::Load(d, row)), hn::NegMulAdd(gamma, v1, hn::Load(d, row + kLanes<T>)));
      });
      // the first term of (F7)
      if (with_o)
        rows_times<T>(chunk.q_t, rows, k_dim, state_in, [&](int m, Vec<T> v0, Vec<T> v1) HWY_ATTR {
          next_o.prefetch(m);
          look_ahead();
          const Vec<T> gamma = hn::Set(d, w.scale * head.gamma[m]);
          store_row<T>(o + m * kPanel<T>, hn::Mul(gamma, v0), hn::Mul(gamma, v1));
        });
      // (F5) Delta = Abar R, D = diag(beta) Delta; (F8) E = diag(tail) D
      product<T, Order::ByRow, Shape::Lower>(abar, 0, rows, rows, v, [&](int m, Vec<T> v0, Vec<T> v1) HWY_ATTR {
        if (delta) store_row<T>(delta + m * kPanel<T>, v0, v1);
        const Vec<T> beta = hn::Set(d, head.beta[m]), tail = hn::Set(d, head.tail[m]);
        v0 = hn::Mul(beta, v0), v1 = hn::Mul(beta, v1);
        store_row<T>(v_new + m * kPanel<T>, v0, v1);
        store_row<T>(v_tail + m * kPanel<T>, hn::Mul(tail, v0), hn::Mul(tail, v1));
      });
      if (with_o) {
        // (F7) O = scale diag(gamma) Q S + Pg D
        product<T, Order::ByRow, Shape::Lower>(pg, 0, rows, rows, v_new, [&](int m, Vec<T> v0, Vec<T> v1) HWY_ATTR {
          T* row = o + m * kPanel<T>;
          store_row<T>(row, hn::Add(v0, hn::Load(d, row)), hn::Add(v1, hn::Load(d, row + kLanes<T>)));
        });
        store_panel<T>(o, rows, p * kPanel<T>, w.v_dim, w.o);
      }
    }
    if (!state_out) continue;
    // (F9) S+ = gamma_C S + K^T E
    product<T, Order::Panels>(k_t, 0, k_dim, rows, v_tail, [&](int m, Vec<T> v0, Vec<T> v1) HWY_ATTR {
      look_ahead();
      const T* from = w.state_in + state_at + m * kPanel<T>;
      store_row<T>(state_out + m * kPanel<T>, hn::MulAdd(decay, hn::Load(d, from), v0),
                   hn::MulAdd(decay, hn::Load(d, from + kLanes<T>), v1));
    });
  }
}

template <class T>
void reverse(const Reverse<T>& r, int p_begin, int p_end) {
  const hn::ScalableTag<T> d;
  const ChunkTiles<T>& chunk = *r.chunk;
  const HeadTiles<T>& head = *r.head;
  const int rows = chunk.rows, k_dim = chunk.k_dim, c = chunk.c;
  const int q_row = (rows + kPanel<T> - 1) / kPanel<T> * kPanel<T>;  // where Q's panels begin behind K's
  HWY_ALIGN T local[2 * kMaxChunk * kPanel<T>];                      // dO, dR where nobody wants to keep them
  HWY_ALIGN T scaled[2 * kMaxChunk * kPanel<T>];  // -diag(gamma) dR, scale diag(gamma) dO: the rows of K, then of Q
  HWY_ALIGN T d_v_new[kMaxChunk * kPanel<T>];     // dD, then diag(beta) dD
  const OperandA<T> kq{chunk.kq, chunk.ld, 0}, abar{head.abar, c, 0}, pg{head.pg, c, 0};
  const OperandA<T> k_t{chunk.k_t, kPanel<T>, static_cast<int64_t>(k_dim) * kPanel<T>};
  const Vec<T> decay = hn::Set(d, head.gamma[rows - 1]);
  for (int i = rows * kPanel<T>; i < q_row * kPanel<T>; ++i) scaled[i] = 0;
  for (int p = p_begin; p < p_end; ++p) {
    const int64_t state_at = static_cast<int64_t>(p) * k_dim * kPanel<T>;
    const T* d_state_in = r.d_state_in + state_at;
    T* d_state_out = r.d_state_out + state_at;
    T* d_o = r.do_dr ? r.do_dr + static_cast<int64_t>(p) * 2 * c * kPanel<T> : local;
    T* d_resid = d_o + c * kPanel<T>;
    if (r.d_o.data && r.d_o_step != 1)
      load_strided_panel<T>(r.d_o, r.d_o_step, rows, p * kPanel<T>, r.v_dim, d_o);
    else if (r.d_o.data)
      load_panel<T>(r.d_o, rows, p * kPanel<T>, r.v_dim, d_o);
    else
      for (int i = 0; i < rows * kPanel<T>; ++i) d_o[i] = 0;
    for (int i = 0; i < rows; ++i) {
      const Vec<T> gamma = hn::Set(d, r.scale * head.gamma[i]);
      const T* row = d_o + i * kPanel<T>;
      store_row<T>(scaled + (q_row + i) * kPanel<T>, hn::Mul(gamma, hn::Load(d, row)),
                   hn::Mul(gamma, hn::Load(d, row + kLanes<T>)));
    }
    const RowAddress next_d_o =
        p + 1 < p_end ? row_address(r.d_o, 0, (p + 1) * kPanel<T>) : row_address(r.d_o, -kInnerChunk, p_begin * kPanel<T>);
    const RowAddress next_dv = row_address(r.dv, 0, p * kPanel<T>);
    // (B1) dE = K dS+
    product<T, Order::ByRow>(kq, 0, rows, k_dim, d_state_in, [&](int m, Vec<T> v0, Vec<T> v1) HWY_ATTR {
      next_d_o.prefetch(m);
      next_dv.prefetch(m);
      const Vec<T> tail = hn::Set(d, head.tail[m]);
      store_row<T>(d_v_new + m * kPanel<T>, hn::Mul(tail, v0), hn::Mul(tail, v1));
    });
    // (B2) dD = diag(tail) dE + Pg^T dO
    product<T, Order::ByColumn, Shape::Upper>(pg, 0, rows, rows, d_o, [&](int m, Vec<T> v0, Vec<T> v1) HWY_ATTR {
      const Vec<T> beta = hn::Set(d, head.beta[m]);
      T* row = d_v_new + m * kPanel<T>;
      store_row<T>(row, hn::Mul(beta, hn::Add(v0, hn::Load(d, row))), hn::Mul(beta, hn::Add(v1, hn::Load(d, row + kLanes<T>))));
    });
    // (B3) dR = Abar^T diag(beta) dD = dV
    product<T, Order::ByColumn, Shape::Upper>(abar, 0, rows, rows, d_v_new, [&](int m, Vec<T> v0, Vec<T> v1) HWY_ATTR {
      const Vec<T> gamma = hn::Set(d, -head.gamma[m]);
      store_row<T>(d_resid + m * kPanel<T>, v0, v1);
      store_row<T>(scaled + m * kPanel<T>, hn::Mul(gamma, v0), hn::Mul(gamma, v1));
    });
    if (r.dv.data) store_panel<T>(d_resid, rows, p * kPanel<T>, r.v_dim, r.dv);
    // (B4) dS = gamma_C dS+ + scale Q^T diag(gamma) dO - K^T diag(gamma) dR
    product<T, Order::Panels>(k_t, 0, k_dim, q_row + rows, scaled, [&](int m, Vec<T> v0, Vec<T> v1) HWY_ATTR {
      const T* from = r.d_state_in + state_at + m * kPanel<T>;
      store_row<T>(d_state_out + m * kPanel<T>, hn::MulAdd(decay, hn::Load(d, from), v0),
                   hn::MulAdd(decay, hn::Load(d, from + kLanes<T>), v1));
    });
  }
}

// out = m state + add: a merge (C1), (C3). m lies as its own walk left it, panels of [k_dim][P] over K columns.
template <class T>
void merge(const T* m, bool transposed, const T* state, const T* add, int k_dim, int v_dim, T* out) {
  const hn::ScalableTag<T> d;
  const int64_t panel_size = static_cast<int64_t>(k_dim) * kPanel<T>;
  for (int first = 0; first < v_dim; first += kPanel<T>, state += panel_size, add += panel_size, out += panel_size) {
    const auto epilogue = [&](int row, Vec<T> v0, Vec<T> v1) HWY_ATTR {
      const T* from = add + row * kPanel<T>;
      store_row<T>(out + row * kPanel<T>, hn::Add(v0, hn::Load(d, from)), hn::Add(v1, hn::Load(d, from + kLanes<T>)));
    };
    if (!transposed) {
      product<T, Order::Panels>({m, 0, panel_size}, 0, k_dim, k_dim, state, epilogue);
    } else {  // rows of m^T are columns of m, one panel of them at a time
      for (int row = 0; row < k_dim; row += kPanel<T>) {
        const int end = row + kPanel<T> < k_dim ? row + kPanel<T> : k_dim;
        // by column from this panel: element (row + i, k) is at panel[k * P + i]
        product<T, Order::ByColumn>({m + (row / kPanel<T>)*panel_size - row, kPanel<T>, 0}, row, end, k_dim, state, epilogue);
      }
    }
  }
}
