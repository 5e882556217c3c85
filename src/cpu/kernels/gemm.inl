// The one matrix product: c = epilogue(a b), register-blocked, on panels of b. Re-included for every level; see level.cpp.
//
// A tile is kMr rows by one panel (two vectors): 12 accumulators, two loads of b and six broadcasts of a feed twelve FMAs, so
// that the load ports are never the limit. a is read where it lies, by row or by column; only b is in panels.

template <class T>
using Vec = hn::Vec<hn::ScalableTag<T>>;
template <class T>
inline constexpr int kLanes = static_cast<int>(hn::MaxLanes(hn::ScalableTag<T>()));
template <class T>
inline constexpr int kPanel = 2 * kLanes<T>;
// Rows of a tile: 2 kMr accumulators, two of b and one broadcast must fit the registers (16 on SSE and AVX2, 32 on AVX-512 and
// NEON).
#if HWY_TARGET == HWY_AVX3 || HWY_TARGET == HWY_AVX3_DL || HWY_TARGET == HWY_NEON
inline constexpr int kMr = 8;
#else
inline constexpr int kMr = 6;
#endif

// a[m, k] is at a[m * ld + k] (by row) or a[k * ld + m] (by column). block > 0: by row, and k crosses to another panel of a every
// `block` columns, `jump` elements further on: an operand in panels read as a.
enum class Order { ByRow, ByColumn, Panels };
template <class T>
struct OperandA {
  const T* data;
  int64_t ld;
  int64_t jump;  // Panels: distance of panels; ld is then kPanel
};

// The part of k a tile at rows [m, m + n) needs: everything, only k < m + n (lower triangular a), or only k >= m (upper).
enum class Shape { Full, Lower, Upper };

template <class T, int kRows, Order order, class Epilogue>
HWY_INLINE void tile(const OperandA<T>& a, int m, int k_begin, int k_end, const T* HWY_RESTRICT b, const Epilogue& epilogue) {
  const hn::ScalableTag<T> d;
  Vec<T> acc[kRows][2];
  for (int r = 0; r < kRows; ++r) acc[r][0] = acc[r][1] = hn::Zero(d);
  const T* HWY_RESTRICT bk = b + static_cast<int64_t>(k_begin) * kPanel<T>;
  const auto step = [&](const T* HWY_RESTRICT ak, int64_t row_step) HWY_ATTR {
    const Vec<T> b0 = hn::Load(d, bk), b1 = hn::Load(d, bk + kLanes<T>);
    bk += kPanel<T>;
#pragma GCC unroll 12
    for (int r = 0; r < kRows; ++r) {
      const Vec<T> ar = hn::Set(d, ak[r * row_step]);
      acc[r][0] = hn::MulAdd(ar, b0, acc[r][0]);
      acc[r][1] = hn::MulAdd(ar, b1, acc[r][1]);
    }
  };
  if constexpr (order == Order::ByColumn) {
    const T* ak = a.data + m + k_begin * a.ld;
    for (int k = k_begin; k < k_end; ++k, ak += a.ld) step(ak, 1);
  } else if constexpr (order == Order::ByRow) {
    const T* ak = a.data + m * a.ld + k_begin;
    for (int k = k_begin; k < k_end; ++k, ++ak) step(ak, a.ld);
  } else {  // k_begin is 0
    for (int k = 0; k < k_end; k += kPanel<T>) {
      const T* ak = a.data + (k / kPanel<T>)*a.jump + m * kPanel<T>;
      const int n = k_end - k < kPanel<T> ? k_end - k : kPanel<T>;
      for (int i = 0; i < n; ++i, ++ak) step(ak, kPanel<T>);
    }
  }
#pragma GCC unroll 12
  for (int r = 0; r < kRows; ++r) epilogue(m + r, acc[r][0], acc[r][1]);
}

// Rows [m_begin, m_end) of one panel: epilogue(m, v0, v1) receives row m of a b.
template <class T, Order order, Shape shape = Shape::Full, class Epilogue>
HWY_INLINE void product(const OperandA<T>& a, int m_begin, int m_end, int k_size, const T* HWY_RESTRICT b,
                        const Epilogue& epilogue) {
  for (int m = m_begin; m < m_end;) {
    const int left = m_end - m;
    const int n = left > kMr && left < 2 * kMr ? (left + 1) / 2 : left < kMr ? left : kMr;  // no thin last tile
    const int k_begin = shape == Shape::Upper ? m : 0;
    const int k_end = shape == Shape::Lower && m + n < k_size ? m + n : k_size;
    switch (n) {
      case 1:
        tile<T, 1, order>(a, m, k_begin, k_end, b, epilogue);
        break;
      case 2:
        tile<T, 2, order>(a, m, k_begin, k_end, b, epilogue);
        break;
      case 3:
        tile<T, 3, order>(a, m, k_begin, k_end, b, epilogue);
        break;
      case 4:
        tile<T, 4, order>(a, m, k_begin, k_end, b, epilogue);
        break;
      case 5:
        tile<T, 5, order>(a, m, k_begin, k_end, b, epilogue);
        break;
      case 6:
        tile<T, 6, order>(a, m, k_begin, k_end, b, epilogue);
        break;
      default:
        if constexpr (kMr > 6) {
          if (n == 7)
            tile<T, 7, order>(a, m, k_begin, k_end, b, epilogue);
          else
            tile<T, 8, order>(a, m, k_begin, k_end, b, epilogue);
        }
    }
    m += n;
  }
}

template <class T>
HWY_INLINE void store_row(T* HWY_RESTRICT row, Vec<T> v0, Vec<T> v1) {
  const hn::ScalableTag<T> d;
  hn::Store(v0, d, row);
  hn::Store(v1, d, row + kLanes<T>);
}

// Independent FMAs from registers: the core's rate, the yardstick of the bench.
template <class T>
double fma_rate(int64_t rounds) {
  const hn::ScalableTag<T> d;
  Vec<T> acc[12];
  for (int i = 0; i < 12; ++i) acc[i] = hn::Set(d, static_cast<T>(i));
  Vec<T> x = hn::Set(d, static_cast<T>(0.5)), y = hn::Set(d, static_cast<T>(0.25));
  for (int64_t n = 0; n < rounds * 64; ++n) {
#pragma GCC unroll 12
    for (int i = 0; i < 12; ++i) acc[i] = hn::MulAdd(acc[i], x, y);
  }
  for (int i = 1; i < 12; ++i) acc[0] = hn::Add(acc[0], acc[i]);
  HWY_ALIGN T lanes[kLanes<T>];
  hn::Store(acc[0], d, lanes);
  volatile T sink = lanes[0];
  (void)sink;
  return static_cast<double>(rounds) * 64 * 12 * 2 * kLanes<T>;
}
