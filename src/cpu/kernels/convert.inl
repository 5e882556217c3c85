// Rows between the caller's types and the compute type, and transposes of tiles. Re-included for every level; see level.cpp.

// bfloat16 is the upper half of a float; rounding is to nearest even and a NaN stays one.
HWY_INLINE float from_bf16(uint16_t x) {
  const uint32_t bits = static_cast<uint32_t>(x) << 16;
  float f;
  __builtin_memcpy(&f, &bits, 4);
  return f;
}
HWY_INLINE uint16_t to_bf16(float f) {
  uint32_t bits;
  __builtin_memcpy(&bits, &f, 4);
  const uint32_t rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16;
  const uint32_t nan = (bits >> 16) | 0x40;
  return static_cast<uint16_t>((bits & 0x7FFFFFFF) > 0x7F800000 ? nan : rounded);
}

// IEEE half: exponents 1..30 are shifted into place, subnormals come from a subtraction, inf and NaN keep their payload.
HWY_INLINE float from_f16(uint16_t x) {
  const uint32_t sign = static_cast<uint32_t>(x & 0x8000) << 16, rest = x & 0x7FFF;
  const uint32_t normal = (rest << 13) + (112u << 23), special = (rest << 13) | 0x7F800000;
  const uint32_t lifted = (rest << 13) + (113u << 23);
  float f, subnormal;
  __builtin_memcpy(&subnormal, &lifted, 4);
  subnormal -= 6.103515625e-05f;  // 2^-14
  uint32_t sub;
  __builtin_memcpy(&sub, &subnormal, 4);
  const uint32_t bits = sign | (rest >= 0x7C00 ? special : rest >= 0x0400 ? normal : sub);
  __builtin_memcpy(&f, &bits, 4);
  return f;
}
HWY_INLINE uint16_t to_f16(float f) {
  uint32_t bits;
  __builtin_memcpy(&bits, &f, 4);
  const uint32_t sign = (bits >> 16) & 0x8000, rest = bits & 0x7FFFFFFF;
  const uint32_t normal = (rest - (112u << 23) + 0xFFF + ((rest >> 13) & 1)) >> 13;
  float magnitude, lifted;
  __builtin_memcpy(&magnitude, &rest, 4);
  lifted = magnitude + 0.5f;  // the sum's ulp is 2^-24, the spacing of half subnormals: the addition rounds to nearest even
  uint32_t sub;
  __builtin_memcpy(&sub, &lifted, 4);
  sub -= 0x3F000000;
  const uint32_t value = rest > 0x7F800000 ? 0x7E00 : rest >= 0x477FF000 ? 0x7C00 : rest >= 0x38800000 ? normal : sub;
  return static_cast<uint16_t>(sign | value);
}

template <class T>
HWY_INLINE void load_values(int32_t dtype, const void* src, int n, T* HWY_RESTRICT dst) {
  switch (dtype) {
    case QLA_FLOAT32:
      for (int i = 0; i < n; ++i) dst[i] = static_cast<T>(static_cast<const float*>(src)[i]);
      break;
    case QLA_BFLOAT16:
      for (int i = 0; i < n; ++i) dst[i] = static_cast<T>(from_bf16(static_cast<const uint16_t*>(src)[i]));
      break;
    case QLA_FLOAT16:
      for (int i = 0; i < n; ++i) dst[i] = static_cast<T>(from_f16(static_cast<const uint16_t*>(src)[i]));
      break;
    default:
      for (int i = 0; i < n; ++i) dst[i] = static_cast<T>(static_cast<const double*>(src)[i]);
  }
}

template <class T>
HWY_INLINE void store_values(int32_t dtype, void* dst, int n, const T* HWY_RESTRICT src) {
  switch (dtype) {
    case QLA_FLOAT32:
      for (int i = 0; i < n; ++i) static_cast<float*>(dst)[i] = static_cast<float>(src[i]);
      break;
    case QLA_BFLOAT16:
      for (int i = 0; i < n; ++i) static_cast<uint16_t*>(dst)[i] = to_bf16(static_cast<float>(src[i]));
      break;
    case QLA_FLOAT16:
      for (int i = 0; i < n; ++i) static_cast<uint16_t*>(dst)[i] = to_f16(static_cast<float>(src[i]));
      break;
    default:
      for (int i = 0; i < n; ++i) static_cast<double*>(dst)[i] = static_cast<double>(src[i]);
  }
}

HWY_INLINE int64_t size_of(int32_t dtype) { return dtype == QLA_FLOAT64 ? 8 : dtype == QLA_FLOAT32 ? 4 : 2; }
HWY_INLINE char* row_at(const Rows& rows, int64_t row) {
  return static_cast<char*>(rows.data) + row * rows.stride * size_of(rows.dtype);
}

// Where rows that the walk comes to next lie; only ever prefetched, so it may point outside the tensor.
struct RowAddress {
  uintptr_t at, step;
  HWY_INLINE void prefetch(int row) const {
    __builtin_prefetch(reinterpret_cast<const void*>(at + static_cast<uintptr_t>(row) * step));
  }
};
HWY_INLINE RowAddress row_address(const Rows& src, int first_row, int first_column) {
  const auto step = static_cast<uintptr_t>(src.stride * size_of(src.dtype));
  const auto column = static_cast<uintptr_t>(first_column * size_of(src.dtype));
  return {reinterpret_cast<uintptr_t>(src.data) + static_cast<uintptr_t>(static_cast<int64_t>(first_row)) * step + column, step};
}

template <class T>
void load_rows(const Rows& src, int rows, int n, T* dst, int64_t ld) {
  for (int r = 0; r < rows; ++r) {
    T* row = dst + r * ld;
    load_values<T>(src.dtype, row_at(src, r), n, row);
    for (int64_t i = n; i < ld; ++i) row[i] = 0;
  }
}

template <class T>
void store_rows(const T* src, int64_t ld, int rows, int n, const Rows& dst) {
  for (int r = 0; r < rows; ++r) store_values<T>(dst.dtype, row_at(dst, r), n, src + r * ld);
}

// Columns [first, first + kPanel) of rows [0, rows) as one panel, zero past column n.
template <class T>
HWY_INLINE void load_panel(const Rows& src, int rows, int first, int n, T* HWY_RESTRICT panel) {
  const int width = n - first < kPanel<T> ? n - first : kPanel<T>;
  for (int r = 0; r < rows; ++r, panel += kPanel<T>) {
    const char* row = row_at(src, r) + first * size_of(src.dtype);
    if (width == kPanel<T>) {
      load_values<T>(src.dtype, row, kPanel<T>, panel);
    } else {
      load_values<T>(src.dtype, row, width, panel);
      for (int i = width; i < kPanel<T>; ++i) panel[i] = 0;
    }
  }
}
template <class T>
void load_strided_panel(const Rows& src, int64_t step, int rows, int first, int n, T* panel) {
  const int width = n - first < kPanel<T> ? n - first : kPanel<T>;
  for (int r = 0; r < rows; ++r, panel += kPanel<T>) {
    const char* row = row_at(src, r);
    for (int i = 0; i < width; ++i) load_values<T>(src.dtype, row + (first + i) * step * size_of(src.dtype), 1, panel + i);
    for (int i = width; i < kPanel<T>; ++i) panel[i] = 0;
  }
}
template <class T>
HWY_INLINE void store_panel(const T* HWY_RESTRICT panel, int rows, int first, int n, const Rows& dst) {
  const int width = n - first < kPanel<T> ? n - first : kPanel<T>;
  for (int r = 0; r < rows; ++r, panel += kPanel<T>) {
    char* row = row_at(dst, r) + first * size_of(dst.dtype);
    if (width == kPanel<T>)
      store_values<T>(dst.dtype, row, kPanel<T>, panel);
    else
      store_values<T>(dst.dtype, row, width, panel);
  }
}

template <class T>
void normalize_rows(T* data, int64_t ld, int rows, int n, T* rnorm) {
  const hn::ScalableTag<T> d;
  (void)n;  // rows are zero from n to ld, which is a multiple of every vector
  for (int r = 0; r < rows; ++r, data += ld) {
    Vec<T> sums[4] = {hn::Zero(d), hn::Zero(d), hn::Zero(d), hn::Zero(d)};  // chains enough to hide an addition's latency
    int64_t i = 0;
    for (; i + 4 * kLanes<T> <= ld; i += 4 * kLanes<T>)
      for (int j = 0; j < 4; ++j) {
        const Vec<T> x = hn::Load(d, data + i + j * kLanes<T>);
        sums[j] = hn::MulAdd(x, x, sums[j]);
      }
    for (; i < ld; i += kLanes<T>) {
      const Vec<T> x = hn::Load(d, data + i);
      sums[0] = hn::MulAdd(x, x, sums[0]);
    }
    const T sum = hn::GetLane(hn::SumOfLanes(d, hn::Add(hn::Add(sums[0], sums[1]), hn::Add(sums[2], sums[3]))));
    const T inverse = static_cast<T>(1 / ::sqrt(static_cast<double>(sum) + 1e-6));
    const Vec<T> by = hn::Set(d, inverse);
    for (i = 0; i < ld; i += kLanes<T>) hn::Store(hn::Mul(by, hn::Load(d, data + i)), d, data + i);
    rnorm[r] = inverse;
  }
}

// ---- transposes: 4 x 4 blocks of floats in registers, the rest by element ----
#if HWY_TARGET != HWY_SCALAR
HWY_INLINE void transpose_4x4(const float* HWY_RESTRICT src, int64_t ld, float* HWY_RESTRICT dst, int64_t dst_ld) {
  const hn::FixedTag<float, 4> d;
  const hn::FixedTag<double, 2> d2;
  const auto r0 = hn::LoadU(d, src), r1 = hn::LoadU(d, src + ld), r2 = hn::LoadU(d, src + 2 * ld),
             r3 = hn::LoadU(d, src + 3 * ld);
  const auto lo01 = hn::BitCast(d2, hn::InterleaveLower(d, r0, r1)), lo23 = hn::BitCast(d2, hn::InterleaveLower(d, r2, r3));
  const auto hi01 = hn::BitCast(d2, hn::InterleaveUpper(d, r0, r1)), hi23 = hn::BitCast(d2, hn::InterleaveUpper(d, r2, r3));
  hn::StoreU(hn::BitCast(d, hn::InterleaveLower(d2, lo01, lo23)), d, dst);
  hn::StoreU(hn::BitCast(d, hn::InterleaveUpper(d2, lo01, lo23)), d, dst + dst_ld);
  hn::StoreU(hn::BitCast(d, hn::InterleaveLower(d2, hi01, hi23)), d, dst + 2 * dst_ld);
  hn::StoreU(hn::BitCast(d, hn::InterleaveUpper(d2, hi01, hi23)), d, dst + 3 * dst_ld);
}
#endif

// dst[n, rows] = src[rows, n]^T
template <class T>
HWY_INLINE void transpose(const T* HWY_RESTRICT src, int64_t ld, int rows, int n, T* HWY_RESTRICT dst, int64_t dst_ld) {
  int r = 0;
#if HWY_TARGET != HWY_SCALAR
  if constexpr (sizeof(T) == 4) {
    for (; r + 4 <= rows; r += 4) {
      int i = 0;
      for (; i + 4 <= n; i += 4) transpose_4x4(src + r * ld + i, ld, dst + i * dst_ld + r, dst_ld);
      for (; i < n; ++i)
        for (int j = 0; j < 4; ++j) dst[i * dst_ld + r + j] = src[(r + j) * ld + i];
    }
  }
#endif
  for (; r < rows; ++r)
    for (int i = 0; i < n; ++i) dst[i * dst_ld + r] = src[r * ld + i];
}

template <class T>
void transpose_to_panels(const T* src, int64_t ld, int rows, int n, T* dst) {
  for (int first = 0; first < rows; first += kPanel<T>, dst += static_cast<int64_t>(n) * kPanel<T>) {
    const int width = rows - first < kPanel<T> ? rows - first : kPanel<T>;
    transpose<T>(src + first * ld, ld, width, n, dst, kPanel<T>);
    if (width < kPanel<T>)
      for (int i = 0; i < n; ++i)
        for (int j = width; j < kPanel<T>; ++j) dst[i * kPanel<T> + j] = 0;
  }
}

template <class T>
void transpose_from_panels(const T* src, int rows, int n, T* dst, int64_t ld) {
  for (int first = 0; first < rows; first += kPanel<T>, src += static_cast<int64_t>(n) * kPanel<T>) {
    const int width = rows - first < kPanel<T> ? rows - first : kPanel<T>;
    transpose<T>(src, kPanel<T>, n, width, dst + first * ld, ld);
  }
}

template <class T>
void load_state(const Rows& src, bool v_first, int k_dim, int v_dim, int p_begin, int p_end, T* panels) {
  HWY_ALIGN T rows[kPanel<T> * kMaxDim];
  for (int p = p_begin; p < p_end; ++p) {
    const int first = p * kPanel<T>;
    T* panel = panels + static_cast<int64_t>(first) * k_dim;
    if (!v_first) {
      load_panel<T>(src, k_dim, first, v_dim, panel);
      continue;
    }
    const int width = v_dim - first < kPanel<T> ? v_dim - first : kPanel<T>;
    for (int v = 0; v < width; ++v) load_values<T>(src.dtype, row_at(src, first + v), k_dim, rows + v * k_dim);
    transpose_to_panels<T>(rows, k_dim, width, k_dim, panel);
  }
}

template <class T>
void store_state(const T* panels, bool v_first, int k_dim, int v_dim, int p_begin, int p_end, const Rows& dst) {
  HWY_ALIGN T rows[kPanel<T> * kMaxDim];
  for (int p = p_begin; p < p_end; ++p) {
    const int first = p * kPanel<T>;
    const T* panel = panels + static_cast<int64_t>(first) * k_dim;
    if (!v_first) {
      store_panel<T>(panel, k_dim, first, v_dim, dst);
      continue;
    }
    const int width = v_dim - first < kPanel<T> ? v_dim - first : kPanel<T>;
    transpose_from_panels<T>(panel, width, k_dim, rows, k_dim);
    for (int v = 0; v < width; ++v) store_values<T>(dst.dtype, row_at(dst, first + v), k_dim, rows + v * k_dim);
  }
}
