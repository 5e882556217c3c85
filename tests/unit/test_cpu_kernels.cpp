// The level-specific functions, each against plain loops, at every level this machine can run.
#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <random>

#include "cpu/dispatch.hpp"
#include "cpu/memory.hpp"
#include "cpu/view.hpp"

namespace qla::cpu {
namespace {

template <class T>
std::vector<T> random_values(int64_t n, unsigned seed) {
  std::mt19937 random(seed);
  std::normal_distribution<double> normal;
  std::vector<T> x(static_cast<size_t>(n));
  for (T& value : x) value = static_cast<T>(normal(random));
  return x;
}

// Panels of [m][P] from [m, n].
template <class T>
Buffer<T> to_panels(const std::vector<T>& x, int m, int n, int panel) {
  Buffer<T> out(static_cast<size_t>((n + panel - 1) / panel * panel * m));
  for (int64_t i = 0; i < static_cast<int64_t>(out.size()); ++i) out.data()[i] = 0;
  for (int i = 0; i < m; ++i)
    for (int j = 0; j < n; ++j) out.data()[(j / panel * m + i) * panel + j % panel] = x[static_cast<size_t>(i * n + j)];
  return out;
}

template <class T>
void check_merge(const KernelTable<T>& t, const char* name) {
  for (const auto& [k, v] : {std::pair{1, 1}, {5, 3}, {16, 40}, {37, 33}, {128, 17}}) {
    const auto m = random_values<T>(k * k, 1), s = random_values<T>(k * v, 2), a = random_values<T>(k * v, 3);
    const Buffer<T> pm = to_panels(m, k, k, t.panel), ps = to_panels(s, k, v, t.panel), pa = to_panels(a, k, v, t.panel);
    Buffer<T> out(pa.size());
    for (const bool transposed : {false, true}) {
      t.merge(pm.data(), transposed, ps.data(), pa.data(), k, v, out.data());
      for (int i = 0; i < k; ++i)
        for (int j = 0; j < v; ++j) {
          double sum = a[static_cast<size_t>(i * v + j)];
          for (int l = 0; l < k; ++l)
            sum += static_cast<double>(transposed ? m[static_cast<size_t>(l * k + i)] : m[static_cast<size_t>(i * k + l)]) *
                   s[static_cast<size_t>(l * v + j)];
          EXPECT_NEAR(out.data()[(j / t.panel * k + i) * t.panel + j % t.panel], sum, sizeof(T) == 4 ? 1e-4 : 1e-12)
              << name << " K " << k << " V " << v << " transposed " << transposed;
        }
    }
  }
}

TEST(CpuKernels, Merge) {
  for (const Level& level : levels()) {
    check_merge(*level.f32, level.name);
    check_merge(*level.f64, level.name);
  }
}

// (F2), (F3): (I + (G o L) diag(beta)) Abar = I and (I + diag(beta) L) A = I
template <class T>
void check_inverse(const KernelTable<T>& t, const char* name) {
  constexpr int k_dim = 24;
  for (const int rows : {1, 2, 31, 32, 45, 64}) {
    const int c = rows <= 32 ? 32 : 64;
    Buffer<T> kq(static_cast<size_t>(2 * c * k_dim)), k_t(static_cast<size_t>(c * k_dim)),
        products(static_cast<size_t>(2 * c * c));
    Buffer<T> square(static_cast<size_t>(2 * c * c)), vectors(static_cast<size_t>(3 * c));
    const auto k = random_values<T>(rows * k_dim, 5), q = random_values<T>(rows * k_dim, 6);
    for (int i = 0; i < rows * k_dim; ++i)
      kq.data()[i] = k[static_cast<size_t>(i)] / 4, kq.data()[rows * k_dim + i] = q[static_cast<size_t>(i)];
    const ChunkTiles<T> chunk{rows, k_dim, c, k_dim, kq.data(), k_t.data(), nullptr, products.data()};
    t.transpose_to_panels(kq.data(), k_dim, rows, k_dim, k_t.data());
    t.products(chunk, true);
    std::vector<T> g = random_values<T>(rows, 7), beta = random_values<T>(rows, 8);
    for (T& x : g) x = -std::fabs(x) / 8;
    HeadTiles<T> head{square.data(), square.data() + c * c, nullptr, vectors.data(), vectors.data() + c, vectors.data() + 2 * c};
    for (const bool a_form : {false, true}) {
      t.head_tiles(chunk, a_form ? nullptr : g.data(), beta.data(), T(0.5), a_form, head);
      double cumsum = 0;
      std::vector<double> sums;
      for (const T x : g) sums.push_back(cumsum += x);
      const auto lower = [&](int i, int j) {  // of what is inverted
        double dot = 0;
        for (int l = 0; l < k_dim; ++l) dot += static_cast<double>(kq.data()[i * k_dim + l]) * kq.data()[j * k_dim + l];
        const auto at = [](int x) { return static_cast<size_t>(x); };
        return a_form ? dot * beta[at(i)] : dot * beta[at(j)] * std::exp(sums[at(i)] - sums[at(j)]);
      };
      for (int i = 0; i < rows; ++i)
        for (int j = 0; j < rows; ++j) {
          double sum = head.abar[i * c + j];
          for (int l = j; l < i; ++l) sum += lower(i, l) * head.abar[l * c + j];
          EXPECT_NEAR(sum, i == j, sizeof(T) == 4 ? 1e-4 : 1e-12) << name << " rows " << rows << " at " << i << ", " << j;
        }
    }
  }
}

TEST(CpuKernels, Inverse) {
  for (const Level& level : levels()) {
    check_inverse(*level.f32, level.name);
    check_inverse(*level.f64, level.name);
  }
}

// Every 16-bit pattern there and back; ties to even, overflow to infinity, NaN stays.
TEST(CpuKernels, SixteenBitTypes) {
  for (const Level& level : levels())
    for (const int32_t dtype : {QLA_BFLOAT16, QLA_FLOAT16}) {
      std::vector<uint16_t> bits(65536), back(65536);
      std::vector<float> values(65536);
      for (size_t i = 0; i < bits.size(); ++i) bits[i] = static_cast<uint16_t>(i);
      level.f32->load_rows({bits.data(), 0, dtype}, 1, 65536, values.data(), 65536);
      level.f32->store_rows(values.data(), 65536, 1, 65536, {back.data(), 0, dtype});
      for (size_t i = 0; i < bits.size(); ++i) {
        const double expected = load_scalar(dtype, &bits[i]);
        if (std::isnan(expected)) {
          EXPECT_TRUE(std::isnan(values[i])) << level.name << " " << i;
          EXPECT_TRUE(std::isnan(load_scalar(dtype, &back[i]))) << level.name << " " << i;
        } else {
          EXPECT_EQ(values[i], expected) << level.name << " " << i;
          EXPECT_EQ(back[i], bits[i]) << level.name;
        }
      }
      std::vector<float> odd = random_values<float>(4096, 3);
      for (size_t i = 0; i < odd.size(); ++i) odd[i] = std::ldexp(odd[i], static_cast<int>(i % 48) - 28);
      odd[0] = 65519.99f, odd[1] = 65520.0f, odd[2] = 1e30f, odd[3] = 5.9604645e-08f / 2, odd[4] = 6.1e-05f, odd[5] = -0.0f;
      std::vector<uint16_t> stored(odd.size());
      level.f32->store_rows(odd.data(), 0, 1, static_cast<int>(odd.size()), {stored.data(), 0, dtype});
      for (size_t i = 0; i < odd.size(); ++i) {
        uint16_t expected;
        store_scalar(dtype, &expected, odd[i]);
        EXPECT_EQ(stored[i], expected) << level.name << " " << odd[i];
      }
    }
}

TEST(CpuKernels, LevelIsWhatItsNameSays) {
  for (const Level& level : levels()) {
    const int bytes = level.f32->panel * 2;  // of one vector
    const std::string name = level.name;
    EXPECT_EQ(bytes, name == "scalar" ? 4 : name == "x86-64-v3" ? 32 : name == "x86-64-v4" ? 64 : 16) << name;
    EXPECT_EQ(level.f64->panel, name == "scalar" ? 2 : level.f32->panel / 2) << name;
  }
}

}  // namespace
}  // namespace qla::cpu
