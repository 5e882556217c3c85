// The fused form's items in two parts (plan/balance.hpp): outputs and final states have the bits of the same call with whole
// items, whatever is cut where, and however few CTAs walk the list.
#include <memory>
#include <random>

#include "cuda/kernels/forward/launch.hpp"
#include "cuda/kernels/plan_segments/launch.hpp"
#include "device/harness.hpp"
#include "forward_cases.hpp"

using namespace fwdtest;
using qla::test::check;
using qla::test::Device;

namespace {

struct Case {
  const char* name;
  std::vector<int64_t> lens;  // empty: batch rows of `tokens`
  int Hk = 1, Hv = 1, shares = 2, ctas = 132;
  int cut = -1;  // items that must be in two parts; -1: some, -2: any number
  bool bf16 = true, normalise = false, v_first = false, pool = false, has_initial = false;
  int h0_dtype = QLA_FLOAT32;  // -1: none
  double gate = 1.0 / 16;
  int64_t padding = 0, batch = 1, tokens = 0;
};

struct Result {
  std::vector<uint16_t> o;
  std::vector<uint8_t> state;
  int items = 0, cut = 0;
  bool guarded = false;
};

constexpr int64_t kState = 128 * 128;

class Call {
 public:
  explicit Call(const Case& c)
      : c(c),
        d(make_data(c.lens.empty() ? c.batch : 1, c.lens.empty() ? c.tokens : total(c.lens) + c.padding, c.lens, c.Hk, c.Hv,
                    c.bf16, c.gate, 1234)),
        q(rows(d.q)),
        k(rows(d.k)),
        v(rows(d.v)),
        g(std::vector<float>(d.g.begin(), d.g.end())),
        beta(std::vector<float>(d.beta.begin(), d.beta.end())),
        boundaries(std::vector<int64_t>(d.bos.begin(), d.bos.end())),
        cu(with_end(d)) {
    std::vector<int64_t> index(size_t(d.N()));
    std::vector<uint8_t> has(index.size());
    for (int n = 0; n < d.N(); n++) index[size_t(n)] = n % 3 == 1 ? -1 : d.N() - n, has[size_t(n)] = n % 2 == 0;
    indices = std::make_unique<Device<int64_t>>(index);
    flags = std::make_unique<Device<uint8_t>>(has);
  }

  // Whole items (0 shares), or the balanced list.
  Result run(int shares, int ctas) const {
    const int64_t N = d.N(), slots = num_slots(d), T = d.T, items = N * c.Hv;
    Device<PlanHeader> header(1);
    Device<WorkItem> list(size_t(items + shares));
    Device<ChunkRecord> table(size_t(std::max<int64_t>(1, slots)));
    Device<int32_t> part_flags(size_t(2 * shares));
    Device<float> carry(size_t(shares * kState)), vec(size_t(slots * c.Hv * kFusedVecFloats));
    Device<uint16_t> o(size_t(d.B * T * c.Hv * 128));
    const int width = c.h0_dtype == QLA_FLOAT32 ? 4 : 2;  // of a state's element
    const int64_t states = c.pool ? N + 1 : N;
    Device<uint8_t> h0(first_states(states, width)), ht(size_t(states * c.Hv * kState * 4));

    segments::Args plan{};
    if (!c.lens.empty()) plan.cu_seqlens = cu.get();
    plan.index_dtype = QLA_INT64;
    plan.has_initial = c.h0_dtype >= 0;
    plan.has_initial_state = c.has_initial ? flags->get() : nullptr;
    plan.num_seqs = N;
    plan.tokens = T;
    plan.slots = int32_t(slots);
    plan.num_v_heads = c.Hv;
    plan.v_parts = 1;
    plan.header = header.get();
    plan.items = list.get();
    plan.chunk_table = table.get();
    plan.balanced_shares = shares;
    plan.fused_ctas = std::min<int>(ctas, int(items + shares));
    plan.part_flags = part_flags.get();
    gates::Args gate{};
    gate.tokens = T;
    gate.varlen = !c.lens.empty();
    gate.num_v_heads = c.Hv;
    gate.scale = float(d.scale);
    gate.g = {g.get(), {T * c.Hv, c.Hv, 1}, QLA_FLOAT32};
    gate.beta = {beta.get(), {T * c.Hv, c.Hv, 1}, QLA_FLOAT32};
    gate.vec = vec.get();
    const int sms = qla::test::multiprocessors();
    CUDA_OK(shares ? segments::launch_balanced(plan, gate, nullptr) : segments::launch_with_gates(plan, gate, sms, nullptr));

    ForwardParams p;
    p.dtype = c.bf16 ? QLA_BFLOAT16 : QLA_FLOAT16;
    p.batch = d.B;
    p.tokens = T;
    p.num_k_heads = c.Hk;
    p.num_v_heads = c.Hv;
    p.q = {q.get(), T * c.Hk * 128, c.Hk * 128, 128};
    p.k = {k.get(), T * c.Hk * 128, c.Hk * 128, 128};
    p.v = {v.get(), T * c.Hv * 128, c.Hv * 128, 128};
    p.o = {o.get(), T * c.Hv * 128, c.Hv * 128, 128};
    p.plan = header.get();
    p.items = list.get();
    p.max_items = int32_t(items + shares);
    p.vec = vec.get();
    p.fused = true;
    p.normalise = c.normalise;
    p.scale = float(d.scale);
    const int64_t stride_k = c.v_first ? 1 : 128, stride_v = c.v_first ? 128 : 1;
    if (c.h0_dtype >= 0)
      p.initial_state = {h0.get(), c.h0_dtype, c.Hv * kState, kState, stride_k, stride_v}, p.num_states = states;
    p.final_state = c.pool ? p.initial_state : StateView{ht.get(), QLA_FLOAT32, c.Hv * kState, kState, stride_k, stride_v};
    if (c.pool) p.state_indices = indices->get(), p.state_indices_dtype = QLA_INT64;
    if (c.has_initial) p.has_initial_state = flags->get();
    p.shares = shares;
    p.part_flags = part_flags.get();
    p.carry_in = p.carry_out = carry.get();
    launch_forward(p, std::min(ctas, sms), nullptr);
    CUDA_OK(cudaDeviceSynchronize());

    Result r{o.download(), c.pool ? h0.download() : ht.download()};
    const std::vector<WorkItem> walked = list.download();
    r.items = header.download()[0].num_items;
    for (int i = 0; i < r.items; i++) r.cut += walked[size_t(i)].start == kStartCarried;
    r.guarded = o.guards_intact() && h0.guards_intact() && ht.guards_intact() && carry.guards_intact() &&
                part_flags.guards_intact() && list.guards_intact() && vec.guards_intact() && table.guards_intact();
    return r;
  }

 private:
  static int64_t total(const std::vector<int64_t>& lens) {
    int64_t sum = 0;
    for (const int64_t n : lens) sum += n;
    return sum;
  }
  static std::vector<int64_t> with_end(const Data& d) {
    std::vector<int64_t> cu = d.bos;
    cu.push_back(d.end_token);
    return cu;
  }
  std::vector<uint16_t> rows(const std::vector<double>& x) const {  // past the last sequence: NaN
    const size_t row = x.size() / size_t(std::max<int64_t>(1, d.B * d.T));
    std::vector<uint16_t> bits(x.size());
    for (size_t i = 0; i < x.size(); i++) bits[i] = to_bits(i / row < size_t(d.end_token) ? x[i] : NAN, c.bf16);
    return bits;
  }
  std::vector<uint8_t> first_states(int64_t count, int width) const {
    Rng r(99);
    std::vector<uint8_t> bytes(size_t(count * c.Hv * kState) * size_t(width));
    for (size_t i = 0; i < bytes.size(); i += size_t(width)) {
      const float x = float(r.normal() * 0.3);
      const uint16_t half = to_bits(x, true);
      std::memcpy(&bytes[i], width == 4 ? static_cast<const void*>(&x) : &half, size_t(width));
    }
    return bytes;
  }

  const Case& c;
  const Data d;
  const Device<uint16_t> q, k, v;
  const Device<float> g, beta;
  const Device<int64_t> boundaries, cu;
  std::unique_ptr<Device<int64_t>> indices;
  std::unique_ptr<Device<uint8_t>> flags;
};

bool is_nan(uint16_t x, bool bf16) {
  const uint16_t exponent = bf16 ? 0x7f80 : 0x7c00;
  return (x & exponent) == exponent && (x & (exponent ^ 0x7fff));
}

void run(const Case& c) {
  const std::string name = c.name;
  const Call call(c);
  const Result whole = call.run(0, 132), parts = call.run(c.shares, c.ctas);
  check(whole.guarded && parts.guarded, name + ": writes stay inside");
  check(whole.cut == 0 && (c.cut == -2 || (c.cut == -1 ? parts.cut > 0 : parts.cut == c.cut)),
        name + ": " + std::to_string(parts.cut) + " cut");
  int64_t unwritten = 0, different = 0;
  for (size_t i = 0; i < whole.o.size(); i++) unwritten += is_nan(whole.o[i], c.bf16), different += whole.o[i] != parts.o[i];
  check(unwritten == 0, name + ": " + std::to_string(unwritten) + " of o NaN");
  check(different == 0, name + ": " + std::to_string(different) + " of o differ");
  check(whole.state == parts.state, name + ": final states");
}

}  // namespace

int main(int argc, char** argv) {
  const bool quick = argc > 1 && std::string(argv[1]) == "quick";  // for sanitizers
  prepare_forward();
  const std::vector<int64_t> in_two{256, 512, 512, 512, 512};  // a share is 8 chunks: from the first one's 4 on all are 4 + 4
  const std::vector<int64_t> tails{193, 449, 511, 512, 450, 510};
  std::vector<Case> cases;
  auto add = [&](Case c) { cases.push_back(c); };
  add({.name = "all but the first in two", .lens = in_two, .shares = 6, .cut = 4});
  add({.name = "all but the first in two, one CTA", .lens = in_two, .shares = 6, .ctas = 1, .cut = 4});
  add({.name = "tails, empty sequences, padding",
       .lens = {193, 0, 449, 0, 0, 511, 450, 0},
       .Hv = 2,
       .shares = 6,
       .cut = -1,
       .padding = 77});
  add({.name = "pool, -1 skips one that is cut", .lens = in_two, .Hv = 1, .shares = 6, .cut = 4, .pool = true});
  add({.name = "norms, tails, two CTAs", .lens = tails, .Hk = 2, .Hv = 2, .shares = 9, .ctas = 2, .normalise = true});
  if (quick) {
    for (const Case& c : cases) run(c);
    return qla::test::summary("forward_balanced");
  }
  // three heads of the first one are 12 chunks, so that every border of 8 falls into the middle of an item behind them
  add({.name = "three heads, all but the first in two", .lens = in_two, .Hv = 3, .shares = 14, .cut = 12});
  add({.name = "three heads, three CTAs", .lens = in_two, .Hv = 3, .shares = 14, .ctas = 3, .cut = 12});
  add({.name = "fp16", .lens = tails, .Hv = 4, .shares = 18, .bf16 = false});
  add({.name = "norms, fp16", .lens = tails, .Hk = 2, .Hv = 4, .shares = 18, .bf16 = false, .normalise = true});
  add({.name = "h0 bf16, V first", .lens = tails, .Hv = 2, .shares = 9, .v_first = true, .h0_dtype = QLA_BFLOAT16});
  add({.name = "without h0", .lens = tails, .Hv = 2, .shares = 9, .h0_dtype = -1});
  add({.name = "has_initial_state", .lens = tails, .Hv = 2, .shares = 9, .has_initial = true});
  add({.name = "pool, V first, four CTAs",
       .lens = tails,
       .Hk = 2,
       .Hv = 6,
       .shares = 30,
       .ctas = 4,
       .v_first = true,
       .pool = true});
  add({.name = "no forgetting", .lens = tails, .Hv = 2, .shares = 9, .gate = 0});
  add({.name = "strong decay", .lens = tails, .Hv = 2, .shares = 9, .gate = 20});
  add({.name = "dense, B = 5", .Hk = 2, .Hv = 4, .shares = 15, .batch = 5, .tokens = 460});
  add({.name = "one long among short ones", .lens = {64, 1, 2048, 63, 65, 640, 130}, .Hv = 3, .shares = 5, .padding = 5});
  add({.name = "nothing but empty sequences", .lens = {0, 0, 0}, .Hv = 2, .shares = 4, .cut = 0, .padding = 40});
  add({.name = "192 items on 132 multiprocessors",
       .lens = std::vector<int64_t>(8, 512),
       .Hk = 8,
       .Hv = 24,
       .shares = 132,
       .cut = 64});
  for (const Case& c : cases) run(c);
  std::mt19937_64 random(76);
  const auto pick = [&](int64_t low, int64_t high) { return std::uniform_int_distribution<int64_t>(low, high)(random); };
  for (int i = 0; i < 24; i++) {
    Case c{.name = "random", .Hv = int(pick(1, 5)), .shares = int(pick(2, 20)), .ctas = int(pick(1, 20)), .cut = -2};
    c.lens.resize(size_t(pick(1, 9)));
    for (int64_t& n : c.lens) n = pick(0, 4) == 0 ? 0 : pick(1, 900);
    c.normalise = i % 3 == 0;
    c.bf16 = i % 4 != 0;
    const std::string name = "random " + std::to_string(i);
    c.name = name.c_str();
    run(c);
  }
  return qla::test::summary("forward_balanced");
}
