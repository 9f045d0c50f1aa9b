// One call of the kernels of te_ssd_bwd on Hopper on the CPU, slab by slab, with threads of cluster.h: from
// the standard input its numbers and arrays, to the standard output dx, ddt, dB, dC, the parts of dA, of
// dt_bias' and of D's gradients, and the gradient to the initial state.
#include "cluster.h"
//
#include "ssm/scan_bwd_ends.cuh"
#include "ssm/scan_bwd_hopper_chunks.cuh"
#include "ssm/scan_bwd_hopper_states.cuh"

namespace {

using namespace te;
using namespace te::ssm;

struct Sizes {
  int rows, s, h, p, g, n, slab_rows, slab_tokens, slab_heads;
  int Chunks() const { return (slab_tokens / kChunk) * slab_rows; }
};

template <int kN, bool kRuns>
void Run(const HopperGradArgs& given, const Sizes& n) {
  const GradArgs& a = given.a;
  const unsigned walks = a.slab.rows * (1 + (a.slab.tokens + kKept - 1) / kKept), chunks = a.slab.Chunks();
  cluster::Launch(dim3(n.h, walks), 1, kWalkThreads, sizeof(HopperWalkShared<kN, kRuns>),
                  [&] { te_ssd_bwd_states_hopper<kN, kRuns>(given); });
  cluster::Launch(dim3(a.g * a.parts, chunks, a.slab.rows), 1, kHopperThreads,
                  sizeof(HopperGradShared<kN, kRuns>), [&] { te_ssd_bwd_chunks_hopper<kN, kRuns>(given); });
  cluster::Launch(dim3(SumCtas(a) + StepCtas(a), a.slab.rows), 1, kThreads, 0,
                  [&] { te_ssd_bwd_ends<kRuns>(a, SumCtas(a)); });
}

}  // namespace

int main() {
  Sizes n;
  cluster::Read(&n, sizeof(n));
  HopperGradArgs given{};
  GradArgs& a = given.a;
  a.p = n.p, a.g = n.g, a.n = n.n, a.steps.s = n.s, a.steps.h = n.h, a.steps.softplus = true;
  a.steps.least = 0.001f, a.steps.most = 45.f;
  a.slab = {n.slab_rows, n.slab_tokens, 0, 0, n.slab_heads};
  a.parts = (n.h / n.g + n.slab_heads - 1) / n.slab_heads;
  using cluster::ReadArray, cluster::Fresh;
  a.dy = ReadArray<Bf16>(), a.x = ReadArray<Bf16>(), a.B = ReadArray<Bf16>(), a.C = ReadArray<Bf16>();
  a.steps.dt = ReadArray<float>(), a.steps.dt_bias = ReadArray<float>(), a.steps.A = ReadArray<float>();
  a.of_chunks = ReadArray<Steps>(), a.D = ReadArray<float>(), a.kept = ReadArray<float>();
  const float* after = ReadArray<float>();
  a.steps.runs = ReadArray<int>();
  const size_t tokens = size_t(n.rows) * n.s, all = size_t(n.rows) * ((n.s + kChunk - 1) / kChunk) * n.h;
  const size_t state = size_t(n.h) * n.p * n.n, slab = size_t(n.slab_rows) * n.slab_tokens;
  a.dx = Fresh<Bf16>(tokens * n.h * n.p), a.ddt = Fresh<float>(tokens * n.h);
  a.dB = Fresh<Bf16>(tokens * n.g * n.n), a.dC = Fresh<Bf16>(tokens * n.g * n.n);
  a.dA_parts = Fresh<float>(all), a.bias_parts = Fresh<float>(all), a.D_parts = Fresh<float>(all);
  a.before = Fresh<float>(n.rows * state), a.ends = Fresh<Ends>(n.Chunks() * n.h);
  a.states = Fresh<Bf16>(n.Chunks() * state), a.gradients = Fresh<Bf16>(n.Chunks() * state);
  a.dB_parts = Fresh<float>(slab * n.g * a.parts * n.n),
  a.dC_parts = Fresh<float>(slab * n.g * a.parts * n.n);
  const auto of_tokens = [&](const Bf16* data, int heads, int inner, int box) {
    return MapOf(data, {inner, heads, n.s, n.rows}, 2, box);
  };
  const auto of_states = [&](const Bf16* data, int box) {
    return MapOf(data, {n.n, n.p, n.h, n.Chunks()}, 1, box);
  };
  given.x = of_tokens(a.x, n.h, n.p, kChunk), given.dy = of_tokens(a.dy, n.h, n.p, kChunk);
  given.dx = of_tokens(a.dx, n.h, n.p, kPieceRows);
  given.B = of_tokens(a.B, n.g, n.n, kChunk), given.C = of_tokens(a.C, n.g, n.n, kChunk);
  given.states = of_states(a.states, 64), given.gradients = of_states(a.gradients, 64);
  given.states_out = of_states(a.states, kPieceRows),
  given.gradients_out = of_states(a.gradients, kPieceRows);
  const auto run = a.steps.runs ? (a.n <= 64 ? Run<64, true> : Run<128, true>)
                                : (a.n <= 64 ? Run<64, false> : Run<128, false>);
  for (int row = 0; row < n.rows; row += n.slab_rows) {
    a.after = after;
    for (int i = (n.s + n.slab_tokens - 1) / n.slab_tokens; i-- > 0; a.after = a.before) {
      a.slab.rows = std::min(n.slab_rows, n.rows - row), a.slab.first_row = row;
      a.slab.first_token = i * n.slab_tokens;
      run(given, n);
    }
  }
  std::fwrite(a.dx, 2, tokens * n.h * n.p, stdout), std::fwrite(a.ddt, 4, tokens * n.h, stdout);
  std::fwrite(a.dB, 2, tokens * n.g * n.n, stdout), std::fwrite(a.dC, 2, tokens * n.g * n.n, stdout);
  for (const float* parts : {a.dA_parts, a.bias_parts, a.D_parts}) std::fwrite(parts, 4, all, stdout);
  std::fwrite(a.before, 4, n.rows * state, stdout);
}
