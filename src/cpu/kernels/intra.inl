// The intra-chunk stage (F0)-(F3), (F6): products of keys and queries, gates, the inverse. Re-included for every level; see
// level.cpp.

// e^x with inf and NaN as they should be: Highway's is only good in a range, and e^NaN is 0 there.
template <class T>
HWY_INLINE Vec<T> exp_of(Vec<T> x) {
  const hn::ScalableTag<T> d;
  const Vec<T> most = hn::Set(d, static_cast<T>(sizeof(T) == 4 ? 100.0 : 715.0)),
               least = hn::Set(d, static_cast<T>(sizeof(T) == 4 ? -104.0 : -745.0));
  const Vec<T> clamped = hn::IfThenElse(hn::Gt(x, most), most, hn::IfThenElse(hn::Lt(x, least), least, x));
  const Vec<T> e = hn::Exp(d, hn::IfThenElse(hn::IsNaN(x), hn::Zero(d), clamped));
  return hn::IfThenElse(hn::IsNaN(x), x, e);
}

template <class T>
struct GateSums {  // chunk-local inclusive cumsum (F1) in two parts whose differences are exact to the last bits: math.md "Gates"
  HWY_ALIGN T hi[kMaxChunk], lo[kMaxChunk];
};

template <class T>
HWY_INLINE void sum_gates(const T* HWY_RESTRICT g, int rows, int c, GateSums<T>& sums) {
  const T floor_at = static_cast<T>(kGateFloor<T>);
  T hi = 0, lo = 0;
  for (int i = 0; i < rows; ++i) {
    const T given = g ? g[i] : 0;
    const T raw = given < floor_at ? floor_at : given;  // (F0); NaN stays
    T high = raw;
    if constexpr (sizeof(T) == 4) high = ::nearbyintf(raw * 8) * static_cast<T>(0.125);
    hi += high;
    lo += raw - high;
    sums.hi[i] = hi;
    sums.lo[i] = lo;
  }
  for (int i = rows; i < c; ++i) sums.hi[i] = hi, sums.lo[i] = lo;  // tail rows: raw gate 0
}

// products: panels of [2 rows][P] over the tokens of K
template <class T>
void products(const ChunkTiles<T>& chunk, bool with_q) {
  const int rows = chunk.rows, m_end = with_q ? 2 * rows : rows;
  T* out = chunk.products;
  const T* b = chunk.k_t;
  const OperandA<T> a{chunk.kq, chunk.ld, 0};
  for (int first = 0; first < rows; first += kPanel<T>) {
    const auto store = [&](int m, Vec<T> v0, Vec<T> v1) HWY_ATTR { store_row<T>(out + m * kPanel<T>, v0, v1); };
    // lower triangles only: rows before the panel's first column are never looked at
    product<T, Order::ByRow>(a, first, rows, chunk.k_dim, b, store);
    if (with_q) product<T, Order::ByRow>(a, rows + first, m_end, chunk.k_dim, b, store);
    out += 2 * rows * kPanel<T>;
    b += static_cast<int64_t>(chunk.k_dim) * kPanel<T>;
  }
}

template <class T>
void head_tiles(const ChunkTiles<T>& chunk, const T* g, const T* beta, T scale, bool a_form, const HeadTiles<T>& out) {
  const hn::ScalableTag<T> d;
  const int rows = chunk.rows, c = chunk.c;
  GateSums<T> sums;
  sum_gates<T>(g, rows, c, sums);
  const T hi_end = sums.hi[c - 1], lo_end = sums.lo[c - 1];
  for (int i = 0; i < c; i += kLanes<T>) {
    const Vec<T> hi = hn::Load(d, sums.hi + i), lo = hn::Load(d, sums.lo + i);
    hn::Store(exp_of<T>(hn::Add(hi, lo)), d, out.gamma + i);
    hn::Store(exp_of<T>(hn::Add(hn::Sub(hn::Set(d, hi_end), hi), hn::Sub(hn::Set(d, lo_end), lo))), d, out.tail + i);
  }
  for (int i = 0; i < rows; ++i) out.beta[i] = beta[i];
  for (int i = rows; i < c; ++i) out.tail[i] = out.beta[i] = 0;

  HWY_ALIGN T lower[kMaxChunk];  // row i of (G o L) diag(beta)
  const Vec<T> zero = hn::Zero(d);
  for (int i = 0; i < rows; ++i) {
    const Vec<T> hi_i = hn::Set(d, sums.hi[i]), lo_i = hn::Set(d, sums.lo[i]);
    T* HWY_RESTRICT inverse = out.abar + i * c;
    T* pg = out.pg ? out.pg + i * c : nullptr;
    T* decay = out.decay ? out.decay + i * c : nullptr;
    const Vec<T> row = hn::Set(d, static_cast<T>(i));
    for (int j = 0; j < c; j += kLanes<T>) {
      if (j > i) {  // above the diagonal
        if (pg) hn::Store(zero, d, pg + j);
        if (decay) hn::Store(zero, d, decay + j);
        hn::Store(zero, d, inverse + j);
        continue;
      }
      const Vec<T> x = hn::Add(hn::Sub(hi_i, hn::Load(d, sums.hi + j)), hn::Sub(lo_i, hn::Load(d, sums.lo + j)));
      const auto column = hn::Iota(d, static_cast<T>(j));
      const Vec<T> gate = hn::IfThenElseZero(hn::Le(column, row), exp_of<T>(x));  // G, the upper half never enters
      const T* HWY_RESTRICT kk = chunk.products + (j / kPanel<T>)*2 * rows * kPanel<T> + i * kPanel<T> + j % kPanel<T>;
      // rows of the products above a panel's first column were not computed: select, never multiply by zero
      const Vec<T> strength = a_form ? hn::Set(d, beta[i]) : hn::Load(d, out.beta + j);
      hn::Store(hn::IfThenElseZero(hn::Lt(column, row), hn::Mul(hn::Mul(gate, hn::Load(d, kk)), strength)), d, lower + j);
      if (pg) {
        const Vec<T> qk = hn::Load(d, kk + rows * kPanel<T>);
        hn::Store(hn::IfThenElseZero(hn::Le(column, row), hn::Mul(hn::Mul(gate, qk), hn::Set(d, scale))), d, pg + j);
      }
      if (decay) hn::Store(gate, d, decay + j);
    }
    // Abar = (I + (G o L) diag(beta))^-1 (F3) by rows: forward substitution, the stable way
    for (int j = 0; j <= i; j += kLanes<T>) {
      Vec<T> even = zero, odd = zero;
      int r = j;
      for (; r + 1 < i; r += 2) {
        even = hn::MulAdd(hn::Set(d, lower[r]), hn::Load(d, out.abar + r * c + j), even);
        odd = hn::MulAdd(hn::Set(d, lower[r + 1]), hn::Load(d, out.abar + (r + 1) * c + j), odd);
      }
      if (r < i) even = hn::MulAdd(hn::Set(d, lower[r]), hn::Load(d, out.abar + r * c + j), even);
      hn::Store(hn::Neg(hn::Add(even, odd)), d, inverse + j);
    }
    inverse[i] = 1;
  }
}
