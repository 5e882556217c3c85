// Part B: lengths, tails, empty sequences, packing, head maps, head sizes.
#include <gtest/gtest.h>

#include <algorithm>
#include <limits>

#include "op/cases.hpp"

namespace qla::test {
namespace {

// final states of empty sequences are the initial ones, bit for bit (or 0); their gradients pass through
void empty_sequences_pass_through(const Sample& s, const Values&, const Result& result) {
  const int64_t size = s.in.v_heads * s.in.state_size();
  for (int64_t n = 0; n < s.num_seqs(); ++n) {
    if (s.in.bos[n] != s.in.eos[n]) continue;
    for (int64_t i = n * size; i < (n + 1) * size; ++i) {
      const Values& got = result.values;
      const double start = s.in.initial_state.empty() ? 0.0 : s.in.initial_state[i],
                   end = s.in.d_final_state.empty() ? 0.0 : s.in.d_final_state[i];
      ASSERT_TRUE(got.final_state.empty() || got.final_state[i] == start) << "final_state of empty sequence " << n;
      ASSERT_TRUE(got.dh0.empty() || got.dh0[i] == end) << "dh0 of empty sequence " << n;
    }
  }
}

std::vector<int64_t> boundaries(const std::vector<int64_t>& lengths) {
  std::vector<int64_t> cu = {0};
  for (const int64_t length : lengths) cu.push_back(cu.back() + length);
  return cu;
}

std::vector<int64_t> long_tail(int shuffle, int64_t longest) {
  Random random(1037);
  std::vector<int64_t> lengths = {longest};
  for (int i = 0; i < 200; ++i) lengths.push_back(random.integer(1, 40));
  Random order(2037 + shuffle);
  std::shuffle(lengths.begin(), lengths.end(), order.engine());
  return lengths;
}

int64_t longest(const Case& c) {
  int64_t most = c.cu.empty() ? c.T : 0;
  for (size_t n = 1; n < c.cu.size(); ++n) most = std::max(most, c.cu[n] - c.cu[n - 1]);
  return most;
}

}  // namespace

std::vector<Case> shape_cases() {
  std::vector<Case> table;
  const auto add = [&](Case c) { table.push_back(std::move(c)); };
  const auto packed = [](const char* recipe, std::string name, std::vector<int64_t> cu) {
    Case c{.recipe = recipe, .name = std::move(name)};
    c.T = cu.back(), c.cu = std::move(cu);
    return c;
  };

  // BR-33 .. BR-35 empty sequences
  for (const bool h0 : {true, false}) {
    Case c = packed("BR33", h0 ? "empty between" : "empty between no h0", {0, 0, 64, 64, 64, 130, 130});
    c.dtypes = {kBf16, kFp16, kF32, kF64}, c.h0 = h0, c.extra = empty_sequences_pass_through,
    c.calls = {{}, uncut(), fixed(1), v_first()};
    add(c);
  }
  for (const auto& cu : {std::vector<int64_t>{0, 100, 256, 256, 256}, std::vector<int64_t>{0, 0, 0, 5}}) {
    Case c = packed("BR34", "boundaries to " + std::to_string(cu.back()), cu);
    c.extra = empty_sequences_pass_through, c.calls = {{}, fixed(1)};
    add(c);
  }
  {
    Case c{.recipe = "BR35", .name = "all empty", .T = 0, .cu = {0, 0, 0}, .dtypes = {kBf16, kFp16, kF32, kF64}};
    c.extra = empty_sequences_pass_through, c.calls = {{}, uncut(), fixed(1), v_first()};
    add(c);
    c.name = "all empty no h0", c.h0 = false;
    add(c);
    add({.recipe = "BR35", .name = "no tokens", .T = 0, .calls = {{}, uncut()}, .extra = empty_sequences_pass_through});
    add({.recipe = "BR35", .name = "all empty in a buffer", .T = 70, .cu = {0, 0}, .extra = empty_sequences_pass_through});
    std::vector<int64_t> cu(4097, 0);
    std::fill(cu.begin() + 2049, cu.end(), 77);
    c = packed("BR35", "4095 of 4096 empty", cu);
    c.H = 1, c.HV = 1, c.K = 16, c.V = 16, c.extra = empty_sequences_pass_through, c.dtypes = {kF32};
    add(c);  // heads of 128: test_long.py
    c = packed("BR35", "first empty", {0, 0, 90});
    c.extra = empty_sequences_pass_through;
    add(c);
    c = packed("BR35", "last empty", {0, 90, 90});
    c.extra = empty_sequences_pass_through;
    add(c);
  }
  // BR-37 one long among many short
  for (int shuffle = 0; shuffle < 10; ++shuffle) {
    Case c = packed("BR37", "shuffle " + std::to_string(shuffle), boundaries(long_tail(shuffle, 2048)));
    c.H = 1, c.HV = 1;
    c.h0 = shuffle % 3 != 0;
    if (shuffle % 3 == 1) c.edit = [](Sample& s, Random&) { s.in.initial_state.assign(s.in.initial_state.size(), 0.0); };
    c.dtypes = {kBf16};
    if (shuffle < 2) add(c);
    c.big = true;
    if (shuffle >= 2) add(c);
    c.big = false;
    c.K = c.V = 32, c.dtypes = {kF32};
    add(c);
  }
  // BR-38 one token at the end; 64 heads, and a BR-37 with 8192: test_long.py
  {
    Case c = packed("BR38", "last of 8192", {0, 8191, 8192});
    c.H = 1, c.HV = 1;
    add(c);
    c = packed("BR38", "first of 8192", {0, 1, 8192});
    c.H = 1, c.HV = 1;
    add(c);
    c = packed("BR38", "around a chunk", {0, 63, 64, 65, 129});
    c.dtypes = {kBf16, kFp16, kF32, kF64}, c.calls = {{}, fixed(1)};
    add(c);
  }
  // BR-40 strong gates, NaN past the end
  add({.recipe = "BR40",
       .name = "T 75",
       .B = 2,
       .T = 75,
       .dtypes = {kFp16, kBf16, kF32},
       .gate = gates::logsigmoid_over(0.01),
       .calls = {laid_out("gapped", Layout::kGapped)}});
  // BR-41 fixed lengths
  for (const int64_t B : {1, 3})
    for (const int64_t T : {1500, 28, 65})
      add({.recipe = "BR41", .name = "B " + std::to_string(B) + " T " + std::to_string(T), .B = B, .T = T, .H = 1, .HV = 2});
  // BR-48 head maps
  const std::pair<int64_t, int64_t> maps[] = {{1, 8}, {2, 8}, {16, 48}, {4, 4}, {3, 9}};
  for (const auto& [H, HV] : maps)
    add({.recipe = "BR48",
         .name = std::to_string(H) + " to " + std::to_string(HV),
         .T = HV > 16 ? 80 : 130,
         .H = H,
         .HV = HV,
         .dtypes = HV > 16 ? std::vector<int32_t>{kBf16} : std::vector<int32_t>{kBf16, kF32, kF64},
         .per_head = true});
  // BR-49, BR-51 head sizes: every pair, both state layouts
  for (const int64_t K : {16, 32, 48, 64, 80, 96, 128, 160, 192, 256})
    for (const int64_t V : {32, 64, 96, 128, 256})
      add({.recipe = "BR49",
           .name = "K " + std::to_string(K) + " V " + std::to_string(V),
           .T = 70,
           .H = 1,
           .HV = 2,
           .K = K,
           .V = V,
           .calls = {{}, v_first()}});
  const std::pair<int64_t, int64_t> odd[] = {{1, 1}, {3, 5}, {17, 33}, {255, 129}, {256, 1}, {1, 256}};
  for (const auto& [K, V] : odd)
    add({.recipe = "BR49",
         .name = "odd K " + std::to_string(K) + " V " + std::to_string(V),
         .T = 130,
         .H = 1,
         .HV = 2,
         .K = K,
         .V = V,
         .dtypes = {kF32, kF64},
         .calls = {{}, v_first(), fixed(1)}});
  for (const int64_t size : {32, 64})
    add({.recipe = "BR51",
         .name = std::to_string(size),
         .T = 100,
         .K = size,
         .V = size,
         .dtypes = {kBf16, kFp16, kF32, kF64},
         .gate = gates::qwen()});
  // BR-52 very many sequences; heads of 128: test_long.py
  {
    std::vector<int64_t> lengths(2050, 16);
    Case c = packed("BR52", "2050 documents", boundaries(lengths));
    c.H = 32, c.HV = 32, c.K = c.V = 8, c.dtypes = {kF32};
    c.calls.push_back(merged(1));  // nothing to cut, but planned for
    add(c);
    add({.recipe = "BR52", .name = "B 70000", .B = 70000, .T = 1, .H = 1, .HV = 1, .K = 8, .V = 8, .dtypes = {kF32}});
  }
  // .. and all of that where there is something to cut, by warm-up or merge as the gates say, and by merges alone
  for (Case& c : table) {
    if (longest(c) <= 64) continue;
    Options cut = c.calls.front();
    cut.cp_mode = QLA_CP_FIXED;
    cut.cp_segment_chunks = longest(c) > 2048 ? 8 : 1;
    cut.name = "cut, " + cut.name;
    c.calls.push_back(cut);
    cut.cp_threshold = -std::numeric_limits<double>::infinity();
    cut.name = "merged, " + cut.name;
    c.calls.push_back(cut);
  }
  return table;
}

}  // namespace qla::test
