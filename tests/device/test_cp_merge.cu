// cp_merge against (C1) in float64: chains of any length, some that start anew on the way, more chains than the grid holds at
// once; twice the same bits. With an argument: microseconds a step.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <random>

#include "cuda/kernels/cp_merge/launch.hpp"
#include "cuda/tile/transition.cuh"
#include "device/harness.hpp"

using namespace qla::cuda;
using namespace qla::test;

namespace {

constexpr int kN = 128;

struct Chains {
  std::vector<MergeChain> chains;
  std::vector<uint8_t> transitions;
  std::vector<float> states, moves;
  int most = 0;
};

// lengths[i] boundaries; anew: share of the later ones that have no M
Chains make(const std::vector<int>& lengths, double anew, unsigned seed) {
  std::mt19937 random(seed);
  std::normal_distribution<float> normal;
  std::uniform_real_distribution<double> uniform;
  Chains c;
  int entries = 0;
  for (int length : lengths) {
    c.chains.push_back({entries, length});
    entries += length;
  }
  std::shuffle(c.chains.begin(), c.chains.end(), random);
  c.most = int(c.chains.size());
  c.transitions.resize(entries);
  for (MergeChain chain : c.chains)
    for (int n = 1; n < chain.count; n++) c.transitions[chain.first + n] = uniform(random) >= anew;
  c.states.resize(size_t(entries) * kStateFloats);
  c.moves.resize(size_t(entries) * kStateFloats);
  for (float& x : c.states) x = normal(random);
  for (int e = 0; e < entries; e++)  // products of reflections are near orthogonal: so are these
    for (int i = 0; i < kN * kN; i++)
      c.moves[size_t(e) * kStateFloats + i] = 0.06f * normal(random) + (i % (kN + 1) == 0 ? 0.6f : 0.f);
  return c;
}

// as the pre-pass leaves them
std::vector<uint8_t> laid_out(const std::vector<float>& moves) {
  std::vector<uint8_t> bytes(moves.size() * sizeof(float));
  for (size_t i = 0; i < moves.size(); i++) {
    const size_t in = i % kStateFloats,
                 at = i / kStateFloats * transition::kBytes + transition::offset(int(in / kN), int(in % kN));
    const __nv_bfloat16 hi(moves[i]), lo(moves[i] - float(hi));
    std::memcpy(&bytes[at], &hi, 2);
    std::memcpy(&bytes[at + transition::kLowBytes], &lo, 2);
  }
  return bytes;
}

struct Run {
  Device<MergeChain> chains;
  Device<uint8_t> transitions;
  Device<float> states;
  Device<uint8_t> moves;
  Device<PlanHeader> header;
  int most;
  explicit Run(const Chains& c)
      : chains(c.chains), transitions(c.transitions), states(c.states), moves(laid_out(c.moves)), header(1), most(c.most) {
    PlanHeader h{};
    h.cut = 1;
    h.num_merges = c.most;
    header.upload({h});
  }
  void launch() {
    const cp_merge::Args a{header.get(), chains.get(), transitions.get(), states.get(), moves.get(), true};
    int sms = 0;
    cudaDeviceGetAttribute(&sms, cudaDevAttrMultiProcessorCount, 0);
    cuda_ok(cp_merge::launch(a, most, sms, nullptr), "cp_merge");
  }
};

void compare(const std::vector<int>& lengths, double anew, unsigned seed, const std::string& name) {
  const Chains c = make(lengths, anew, seed);
  Run run(c);
  run.launch();
  cuda_ok(cudaDeviceSynchronize(), name.c_str());
  const std::vector<float> got = run.states.download();
  check(run.states.guards_intact() && run.moves.guards_intact(), name + ": writes stay inside");
  double worst = 0, largest = 0;
  for (MergeChain chain : c.chains) {
    // some value rows, in float64
    for (int v = seed % 8; v < kN; v += 37) {
      std::vector<double> state(kN), next(kN);
      for (int n = 0; n < chain.count; n++) {
        const size_t at = size_t(chain.first + n) * kStateFloats;
        for (int k = 0; k < kN; k++) next[k] = c.states[at + v * kN + k];
        if (c.transitions[chain.first + n])
          for (int i = 0; i < kN; i++)
            for (int k = 0; k < kN; k++) next[k] += state[i] * double(c.moves[at + i * kN + k]);
        state = next;
        for (int k = 0; k < kN; k++) {
          worst = std::max(worst, std::isfinite(got[at + v * kN + k]) ? std::abs(got[at + v * kN + k] - state[k]) : 1e30);
          largest = std::max(largest, std::abs(state[k]));
        }
      }
    }
  }
  // Operands are split into 16 bits (walk.cuh), 2^-18 each a step: by an emulation 1e-5 of the largest after 128 steps.
  check(worst <= 1.5e-5 * largest, name + ": error " + std::to_string(worst) + " of " + std::to_string(largest));
  run.states.upload(c.states);
  run.launch();
  cuda_ok(cudaDeviceSynchronize(), name.c_str());
  const std::vector<float> again = run.states.download();
  check(std::memcmp(got.data(), again.data(), got.size() * sizeof(float)) == 0, name + ": the same bits");
}

void time_steps(int chains, int length) {
  Run run(make(std::vector<int>(chains, length), 0.0, 1));
  cudaEvent_t begin, end;
  cudaEventCreate(&begin);
  cudaEventCreate(&end);
  for (int i = 0; i < 20; i++) run.launch();
  cudaEventRecord(begin);
  for (int i = 0; i < 100; i++) run.launch();
  cudaEventRecord(end);
  cuda_ok(cudaDeviceSynchronize(), "time");
  float ms = 0;
  cudaEventElapsedTime(&ms, begin, end);
  std::printf("%d chains of %d: %.2f us, %.3f a step\n", chains, length, ms * 10, ms * 10 / float(length));
}

}  // namespace

int main(int argc, char** argv) {
  const std::string what = argc > 1 ? argv[1] : "";
  cuda_ok(cp_merge::prepare(), "prepare");
  compare({1}, 0.0, 1, "one boundary");
  compare({2}, 0.0, 2, "two");
  if (what == "quick") {  // for sanitizers
    compare({5, 3}, 0.3, 3, "two chains, some start anew");
    return summary("cp_merge");
  }
  compare({15, 15}, 0.0, 3, "two chains of 15");
  compare({31, 2, 33, 1, 64, 65}, 0.0, 4, "lengths around 32 and 64");
  compare({40, 33, 7, 90}, 0.3, 5, "some start anew");
  compare({40, 9}, 0.8, 6, "most start anew");
  compare(std::vector<int>(12, 5), 0.2, 7, "more chains");
  compare({31, 2, 33, 1, 64, 65, 40, 9, 7, 3, 5, 1, 2, 3, 4, 5, 6, 7, 8, 9}, 0.3, 8, "many chains");
  compare(std::vector<int>(41, 4), 0.1, 9, "more items than multiprocessors");
  if (what == "time")
    for (int chains : {1, 2, 4, 8, 16})
      for (int length : {7, 15, 31}) time_steps(chains, length);
  return summary("cp_merge");
}
