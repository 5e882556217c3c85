// Two packed sequences, forward and backward in float64 from C++, with grouped heads and an initial state; the gradients are
// checked against central differences of the loss along a random direction.
//
//   c++ -std=c++20 packed_training.cpp -I... -L... -lqla -o packed_training   (docs/c-api.md says where header and library are)
#include <cmath>
#include <cstdio>
#include <functional>
#include <random>
#include <vector>

#include "qla/qla.hpp"

namespace {

constexpr int64_t kTokens = 150, kHeads = 2, kValueHeads = 4, kK = 16, kV = 24, kSequences = 2;

using Array = std::vector<double>;

struct Inputs {
  Array q = Array(kTokens * kHeads * kK), k = q, v = Array(kTokens * kValueHeads * kV), g = Array(kTokens * kValueHeads),
        beta = g;
  Array state = Array(kSequences * kValueHeads * kK * kV);

  std::vector<Array*> all() { return {&q, &k, &v, &g, &beta, &state}; }
};

double dot(const Array& a, const Array& b) {
  double sum = 0;
  for (size_t i = 0; i < a.size(); ++i) sum += a[i] * b[i];
  return sum;
}

}  // namespace

int main() try {
  std::mt19937 random(1);
  std::normal_distribution<double> normal;
  Inputs in;
  for (Array* array : in.all())
    for (double& x : *array) x = normal(random) / std::sqrt(static_cast<double>(kK));
  for (double& x : in.g) x = -std::abs(x);
  for (double& x : in.beta) x = 1 / (1 + std::exp(-x));

  const std::vector<int64_t> cu_seqlens = {0, 93, kTokens};
  Array o(in.v.size()), final_state(in.state.size());
  auto args = qla::forward_args();
  args.q = qla::view(in.q, {1, kTokens, kHeads, kK});
  args.k = qla::view(in.k, {1, kTokens, kHeads, kK});
  args.v = qla::view(in.v, {1, kTokens, kValueHeads, kV});
  args.g = qla::view(in.g, {1, kTokens, kValueHeads});
  args.beta = qla::view(in.beta, {1, kTokens, kValueHeads});
  args.initial_state = qla::view(in.state, {kSequences, kValueHeads, kK, kV});
  args.cu_seqlens = qla::view(cu_seqlens, {kSequences + 1});
  args.o = qla::view(o, {1, kTokens, kValueHeads, kV});
  args.final_state = qla::view(final_state, {kSequences, kValueHeads, kK, kV});

  // loss = <o, d_o> + <final_state, d_final_state>
  qla::HostWorkspace workspace;
  Array d_o(o.size()), d_final(final_state.size());
  for (double& x : d_o) x = normal(random);
  for (double& x : d_final) x = normal(random);
  const auto loss = [&] {
    qla::forward(args, workspace);
    return dot(o, d_o) + dot(final_state, d_final);
  };
  std::printf("loss %.6f\n", loss());

  Inputs gradients;
  auto back = qla::backward_args(args);
  back.d_o = qla::view(d_o, {1, kTokens, kValueHeads, kV});
  back.d_final_state = qla::view(d_final, {kSequences, kValueHeads, kK, kV});
  back.dq = qla::view(gradients.q, {1, kTokens, kHeads, kK});
  back.dk = qla::view(gradients.k, {1, kTokens, kHeads, kK});
  back.dv = qla::view(gradients.v, {1, kTokens, kValueHeads, kV});
  back.dg = qla::view(gradients.g, {1, kTokens, kValueHeads});
  back.dbeta = qla::view(gradients.beta, {1, kTokens, kValueHeads});
  back.d_initial_state = qla::view(gradients.state, {kSequences, kValueHeads, kK, kV});
  qla::backward(back, workspace);

  const char* const names[] = {"dq", "dk", "dv", "dg", "dbeta", "d_initial_state"};
  bool good = true;
  for (size_t which = 0; which < in.all().size(); ++which) {
    Array& input = *in.all()[which];
    const Array kept = input;
    Array direction(input.size());
    for (double& x : direction) x = normal(random);
    const double step = 1e-6;
    for (size_t i = 0; i < input.size(); ++i) input[i] = kept[i] + step * direction[i];
    const double above = loss();
    for (size_t i = 0; i < input.size(); ++i) input[i] = kept[i] - step * direction[i];
    const double below = loss();
    input = kept;
    const double expected = (above - below) / (2 * step), got = dot(*gradients.all()[which], direction);
    const bool close = std::abs(got - expected) <= 1e-6 * std::max(1.0, std::abs(expected));
    std::printf("%-16s along a random direction: %+.8f, by differences %+.8f%s\n", names[which], got, expected,
                close ? "" : "  WRONG");
    good = good && close;
  }

  // A wrong argument is an exception that says what to do, and the next call works.
  args.beta.shape[1] -= 1;
  std::printf("refused: %s\n", qla::why_not(args).value_or("nothing").c_str());
  good = good && qla::why_not(args).has_value();
  args.beta.shape[1] += 1;
  const std::vector<int64_t> lens = {93, kTokens - 93};
  std::printf("%s", qla::Plan(args, lens).text().c_str());
  return good ? 0 : 1;
} catch (const std::exception& error) {
  std::fprintf(stderr, "%s\n", error.what());
  return 1;
}
