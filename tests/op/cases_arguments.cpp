// Part C and F: layouts, strides, types, arguments.
#include <gtest/gtest.h>

#include <cmath>

#include "op/cases.hpp"

namespace qla::test {

std::vector<Case> argument_cases() {
  std::vector<Case> table;
  const auto add = [&](Case c) { table.push_back(std::move(c)); };
  const std::vector<int32_t> all = {kBf16, kFp16, kF32, kF64};

  // BR-56 views (bitwise equality with contiguous tensors is in test_layouts.cpp)
  const std::vector<Options> views = {laid_out("fused", Layout::kFused), laid_out("gapped", Layout::kGapped),
                                      laid_out("head major", Layout::kHeadMajor),
                                      laid_out("every second token", Layout::kEverySecond)};
  add({.recipe = "BR56", .name = "views", .B = 2, .T = 100, .calls = views});
  add({.recipe = "BR56",
       .name = "views packed",
       .T = 140,
       .cu = {0, 37, 37, 130},
       .dtypes = {kBf16, kF32},
       .calls = {laid_out("fused", Layout::kFused), laid_out("gapped", Layout::kGapped)}});
  add({.recipe = "BR56", .name = "falling addresses", .B = 2, .T = 100, .calls = {laid_out("backwards", Layout::kBackwards)}});
  // BR-57 states from a pool
  add({.recipe = "BR57",
       .name = "state views",
       .B = 3,
       .T = 70,
       .calls = {states_in("pool[:, 1]", States::kPoolSlice),
                 states_in("big[::3]", States::kEveryThird),
                 {.name = "V first pool[:, 1]", .extra_flags = QLA_FLAG_STATE_V_FIRST, .states = States::kPoolSlice}}});
  // BR-58 state layouts
  add({.recipe = "BR58",
       .name = "V first",
       .T = 130,
       .dtypes = all,
       .calls = {
           {},
           v_first(),
           {.name = "V first cut", .cp_mode = QLA_CP_FIXED, .cp_segment_chunks = 1, .extra_flags = QLA_FLAG_STATE_V_FIRST}}});
  add({.recipe = "BR58",
       .name = "K 64 V 128",
       .T = 130,
       .K = 64,
       .V = 128,
       .dtypes = {kBf16, kF32, kF64},
       .calls = {{}, v_first()}});
  // BR-59 state types
  for (const int32_t type : all)
    add({.recipe = "BR59", .name = std::string("h0 ") + name_of(type), .T = 70, .state_dtype = type, .calls = {{}, v_first()}});
  // BR-61 fp32 tensors
  add({.recipe = "BR61",
       .name = "fp32",
       .T = 257,
       .dtypes = {kF32, kF64},
       .gate = gates::qwen(),
       .calls = {{}, uncut(), merged(1), fixed(1), recomputed()}});
  // BR-62 scale
  for (const double scale : {0.0, -0.7})
    add({.recipe = "BR62", .name = scale == 0 ? "zero" : "negative", .T = 70, .scale = scale});
  add({.recipe = "BR62", .name = "default", .T = 70, .K = 64});
  // BR-64 growth
  add({.recipe = "BR64",
       .name = "g 1e-3",
       .T = 256,
       .dtypes = {kBf16, kF32, kF64},
       .gate = gates::constant(1e-3),
       .calls = {{}, fixed(1)}});
  add({.recipe = "BR64",
       .name = "g positive at times",
       .T = 256,
       .gate = gates::sometimes(0.5, 0.02, gates::soft()),
       .calls = {{}, fixed(1)}});
  // BR-65 gate activation inside
  for (const bool bias : {true, false})
    for (const bool packed : {false, true})
      for (const int32_t type : {kBf16, kF32})
        add({.recipe = "BR65",
             .name = std::string(bias ? "bias" : "no bias") + (packed ? " packed " : " ") + name_of(type),
             .T = 300,
             .cu = packed ? std::vector<int64_t>{0, 15, 100, 300} : std::vector<int64_t>{},
             .g_dtype = type,
             .raw_gate = true,
             .dt_bias = bias,
             .calls = {{}, recomputed()}});
  add({.recipe = "BR65",
       .name = "raw 40 and -40",
       .T = 100,
       .dtypes = {kBf16, kF32, kF64},
       .raw_gate = true,
       .edit = [](Sample& s, Random& r) {
         for (double& x : s.in.g) x = r.uniform() < 0.1 ? 40 : r.uniform() < 0.5 ? -40 : x;
       }});
  // everything at once
  add({.recipe = "BR65",
       .name = "with sigmoid and norm",
       .T = 300,
       .cu = {0, 15, 100, 300},
       .dtypes = all,
       .keys = Keys::kRaw3,
       .qk_l2norm = true,
       .raw_gate = true,
       .beta_sigmoid = true,
       .neg_eigval = true,
       .calls = {{}, recomputed(), v_first(), fixed(1)},
       .hard = true,
       .emulator = {1e-2, 2e-2}});
  // D-6 one token
  add({.recipe = "D6", .name = "T 1", .T = 1, .dtypes = all, .calls = {{}, v_first()}});
  add({.recipe = "D6", .name = "B 5 T 1", .B = 5, .T = 1});
  // D-8 expanded d_o
  add({.recipe = "D8",
       .name = "loss is the sum of o",
       .T = 130,
       .edit = [](Sample& s, Random&) { s.in.d_o.assign(s.in.d_o.size(), 1.0); },
       .calls = {{}, {.name = "stride 0", .expanded_d_o = true}}});
  add({.recipe = "D8",
       .name = "views of d_o",
       .B = 2,
       .T = 130,
       .calls = {laid_out("every second token", Layout::kEverySecond)}});
  return table;
}

}  // namespace qla::test
