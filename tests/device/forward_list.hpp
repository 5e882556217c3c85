// What test_forward runs.
#pragma once

#include <string>
#include <vector>

#include "cuda/kernels/forward/launch.hpp"
#include "plan/model.hpp"
#include "qla/qla.h"

namespace fwdtest {

struct Case {
  std::string name;
  int64_t B = 1, T = 256;
  std::vector<int64_t> lens;
  int Hk = 1, Hv = 1;
  bool bf16 = true;
  double gate = 1.0 / 16;
  int v_parts = 1;
  bool strided = false;  // q, k, v, o as slices of one padded buffer
  int h0_dtype = -1;     // -1: none
  bool v_first = false;
  bool pool = false;         // in place, with -1 for sequence 1
  bool has_initial = false;  // every second sequence starts from zero
  int segments = 1;          // cut each sequence; later segments start by warm-up or merged
  int warmup = 0;            // 0 with segments > 1: merged start states
  bool mixed = false;        // odd value heads have no warm-up
  int checkpoint = 0;        // chunks
  bool snapshots = false;
  int sms = 132;
  bool fused = false;
  bool direct = false;          // fused, without plan_and_gates before it
  bool normalise = false;       // fused: q and k of other lengths than 1
  int gate_type = QLA_FLOAT32;  // fused: of gate and beta
  bool heads_first = false;     // .. which lie [B][Hv][T]
  bool saves = false;           // fused: what backward reuses is compared, too
};

inline const std::vector<int64_t> kTails{1, 63, 64, 0, 65, 130, 5}, kPool{70, 100, 64, 3};  // sequences of several cases

inline std::vector<Case> forward_list() {
  std::vector<Case> cases;
  auto add = [&](Case c) { cases.push_back(c); };
  add({.name = "full chunks"});
  add({.name = "full chunks, fp16", .bf16 = false});
  add({.name = "tail", .T = 200, .Hv = 2});
  add({.name = "V split, group 8, tail", .T = 200, .Hv = 8, .v_parts = 2});
  add({.name = "varlen, padding, group 4", .T = 400, .lens = kTails, .Hk = 2, .Hv = 8, .h0_dtype = QLA_FLOAT32});
  add({.name = "varlen, V split, few CTAs",
       .T = 400,
       .lens = kTails,
       .Hk = 2,
       .Hv = 4,
       .v_parts = 2,
       .h0_dtype = QLA_FLOAT32,
       .sms = 3});
  add({.name = "one CTA for all, group 1",
       .T = 400,
       .lens = {70, 1, 129, 64, 0, 63},
       .Hk = 2,
       .Hv = 2,
       .h0_dtype = QLA_FLOAT32,
       .sms = 1});
  add({.name = "h0 bf16, V first", .T = 130, .h0_dtype = QLA_BFLOAT16, .v_first = true});
  add({.name = "h0 float64, fp16", .T = 130, .bf16 = false, .h0_dtype = QLA_FLOAT64});
  add({.name = "h0 fp16, V first, fp16", .T = 130, .bf16 = false, .h0_dtype = QLA_FLOAT16, .v_first = true});
  add({.name = "dense B = 3, strided views, tail", .B = 3, .T = 100, .Hk = 2, .Hv = 4, .strided = true, .h0_dtype = QLA_FLOAT32});
  add({.name = "strided views, V split, fp16", .B = 2, .T = 129, .Hk = 1, .Hv = 3, .bf16 = false, .v_parts = 2, .strided = true});
  add({.name = "pool in place, -1 skips", .T = 300, .lens = kPool, .Hv = 2, .h0_dtype = QLA_FLOAT32, .pool = true});
  add({.name = "pool in place, V split",
       .T = 300,
       .lens = kPool,
       .Hv = 2,
       .v_parts = 2,
       .h0_dtype = QLA_FLOAT32,
       .v_first = true,
       .pool = true,
       .sms = 2});
  add({.name = "has_initial_state", .T = 300, .lens = kPool, .Hv = 2, .h0_dtype = QLA_FLOAT32, .has_initial = true});
  add({.name = "snapshots and checkpoints",
       .T = 900,
       .lens = {400, 64, 256, 100},
       .Hv = 2,
       .h0_dtype = QLA_FLOAT32,
       .checkpoint = 2,
       .snapshots = true});
  add({.name = "segments, warm-up",
       .T = 900,
       .lens = {640, 200},
       .Hv = 2,
       .gate = 0.5,
       .segments = 3,
       .warmup = 1,
       .checkpoint = 1,
       .snapshots = true});
  add({.name = "segments, merged starts, V split",
       .T = 900,
       .lens = {640, 200},
       .Hv = 2,
       .v_parts = 2,
       .h0_dtype = QLA_FLOAT32,
       .segments = 3});
  add({.name = "no forgetting", .T = 1024, .Hv = 2, .gate = 0});
  add({.name = "strong decay", .T = 256, .gate = 20});
  add({.name = "fused, full chunks", .T = 1024, .fused = true});
  add({.name = "fused, fp16", .T = 1024, .bf16 = false, .fused = true});
  add({.name = "fused, tail, group 2", .T = 200, .Hv = 2, .fused = true});
  add({.name = "fused, varlen, padding", .T = 400, .lens = kTails, .Hk = 2, .Hv = 8, .h0_dtype = QLA_FLOAT32, .fused = true});
  add({.name = "fused, varlen, V first",
       .T = 400,
       .lens = kTails,
       .Hk = 2,
       .Hv = 4,
       .h0_dtype = QLA_FLOAT32,
       .v_first = true,
       .fused = true});
  add({.name = "fused, pool, V first",
       .T = 300,
       .lens = kPool,
       .Hv = 2,
       .h0_dtype = QLA_FLOAT32,
       .v_first = true,
       .pool = true,
       .fused = true});
  add({.name = "fused, varlen, one CTA",
       .T = 400,
       .lens = kTails,
       .Hk = 2,
       .Hv = 4,
       .h0_dtype = QLA_FLOAT32,
       .sms = 1,
       .fused = true});
  add({.name = "fused, dense B = 3, strided",
       .B = 3,
       .T = 100,
       .Hk = 2,
       .Hv = 4,
       .strided = true,
       .h0_dtype = QLA_BFLOAT16,
       .v_first = true,
       .fused = true});
  add({.name = "fused, pool", .T = 300, .lens = kPool, .Hv = 2, .h0_dtype = QLA_FLOAT32, .pool = true, .fused = true});
  add({.name = "fused, no forgetting", .T = 1024, .Hv = 2, .gate = 0, .fused = true});
  add({.name = "fused, strong decay", .T = 256, .gate = 20, .fused = true});
  add({.name = "fused, norms", .T = 1024, .Hv = 2, .fused = true, .normalise = true});
  add({.name = "fused, norms, fp16", .T = 1024, .bf16 = false, .fused = true, .normalise = true});
  add({.name = "fused, norms, no forgetting", .T = 1024, .gate = 0, .fused = true, .normalise = true});
  add({.name = "fused, norms, varlen, one CTA",
       .T = 400,
       .lens = kTails,
       .Hk = 2,
       .Hv = 4,
       .h0_dtype = QLA_FLOAT32,
       .sms = 1,
       .fused = true,
       .normalise = true});
  // the last chunk's rows end before, at and behind the border of Q's two boxes; the second one may lie past the last token
  for (bool normalise : {false, true})
    for (int64_t rows : {31, 32, 33})
      add({.name = std::string("fused, ") + (normalise ? "norms, " : "") + std::to_string(rows) + " rows in the last chunk",
           .T = 64 * 3 + rows,
           .lens = {128, 64 + rows},
           .Hv = 2,
           .h0_dtype = QLA_FLOAT32,
           .fused = true,
           .normalise = normalise});
  const Case cut{.T = 900, .lens = {640, 200}, .Hv = 2, .gate = 0.5, .segments = 3, .warmup = 1, .fused = true};
  const auto add_cut = [&](const char* name, auto&& change) {
    Case c = cut;
    c.name = std::string("fused, cut, ") + name;
    change(c);
    add(c);
  };
  add_cut("warm-up", [](Case&) {});
  add_cut("warm-up, fp16", [](Case& c) { c.bf16 = false; });
  add_cut("warm-up, norms", [](Case& c) { c.normalise = true; });
  add_cut("warm-up, norms, fp16", [](Case& c) { c.normalise = true, c.bf16 = false; });
  add_cut("long warm-up", [](Case& c) { c.gate = 0.2, c.warmup = 3; });
  add_cut("merged starts", [](Case& c) { c.h0_dtype = QLA_FLOAT32, c.warmup = 0, c.gate = 1.0 / 16; });
  add_cut("merged starts, norms, one CTA",
          [](Case& c) { c.h0_dtype = QLA_FLOAT32, c.warmup = 0, c.gate = 0, c.normalise = true, c.sms = 1; });
  add_cut("both, initial states", [](Case& c) { c.h0_dtype = QLA_FLOAT32, c.Hv = 4, c.mixed = true; });
  add_cut("both, three CTAs", [](Case& c) { c.h0_dtype = QLA_FLOAT32, c.Hv = 4, c.mixed = true, c.sms = 3; });
  add_cut("both, V first, three CTAs",
          [](Case& c) { c.h0_dtype = QLA_FLOAT32, c.v_first = true, c.Hv = 4, c.mixed = true, c.sms = 3; });
  add_cut("both, one CTA, fp16", [](Case& c) { c.Hv = 4, c.mixed = true, c.sms = 1, c.bf16 = false; });
  add_cut("tails, padding",
          [](Case& c) { c.T = 400, c.lens = kTails, c.Hk = 2, c.Hv = 8, c.gate = 1, c.segments = 2, c.mixed = true; });
  add_cut("tails, one CTA, norms", [](Case& c) {
    c.T = 400, c.lens = kTails, c.Hk = 2, c.Hv = 4, c.gate = 1, c.segments = 2, c.mixed = true, c.normalise = true, c.sms = 1;
  });
  add_cut("pool", [](Case& c) {
    c.T = 300, c.lens = kPool, c.gate = 1, c.segments = 2, c.h0_dtype = QLA_FLOAT32, c.pool = true, c.mixed = true;
  });
  add_cut("dense B = 3, strided", [](Case& c) {
    c.B = 3, c.T = 200, c.lens = {}, c.Hk = 2, c.Hv = 4, c.strided = true, c.h0_dtype = QLA_BFLOAT16, c.v_first = true;
  });
  for (const bool heads_first : {false, true}) {  // what the gates lie in, by whole chunks and with a tail in each sequence
    const char* const names[] = {"float64", "fp32", "bf16", "fp16"};
    for (const int type : {QLA_FLOAT64, QLA_FLOAT32, QLA_BFLOAT16, QLA_FLOAT16}) {
      if (type == QLA_FLOAT32 && !heads_first) continue;  // all the others
      add({.name = std::string("fused, gates ") + names[type] + (heads_first ? ", [B][Hv][T]" : ""),
           .T = 500,
           .lens = {130, 64, 257, 20},
           .Hk = 2,
           .Hv = 4,
           .fused = true,
           .gate_type = type,
           .heads_first = heads_first});
    }
  }
  for (Case c : std::vector<Case>(cases)) {  // every fused case with gradients again, keeping what backward reuses
    if (!c.fused || c.pool || c.segments > 1) continue;
    c.name += ", saves";
    c.saves = true;
    add(c);
  }
  for (Case c : std::vector<Case>(cases)) {  // every fused case again in one launch, where each item can have a CTA
    const int64_t seqs = c.lens.empty() ? c.B : int64_t(c.lens.size());
    const int64_t items = seqs * c.Hv;
    if (!c.fused || c.segments > 1 || items > c.sms) continue;
    c.name += ", direct";
    c.direct = true;
    add(c);
    if (items == 1 || seqs > qla::plan::kDirectSequences) continue;
    c.sms = int(items > 4 ? (items + 2) / 3 : 1);  // .. and where a CTA has three or four
    c.name += ", " + std::to_string(c.sms) + " CTAs";
    add(c);
  }
  return cases;
}

}  // namespace fwdtest
