// One call of the walks of the gated delta rule's backward pass on Hopper on the CPU, with threads of
// cluster.h, in one slab: from the standard input its numbers and arrays, to the standard output the states
// before chunks, the gradients behind them, what tokens write, the gradients to what they would write alone,
// and the gradient to the initial state.
#include "cluster.h"
//
#include "delta_maps.h"

namespace {

using namespace te::delta;

template <int kD, typename Gate, int kGroups>
void Run(const GradArgs& a) {
  const size_t bytes = sizeof(HopperShared<kD, Gate, kGroups, true>);
  const HopperGradWalkArgs given = WalksWithMaps(a, a.part.rows);
  cluster::Launch(GradWalkGrid(a, kGroups), 1, kWalkThreads<kGroups>, bytes,
                  [&] { te_gated_delta_bwd_walk_hopper<kD, Gate, kGroups>(given); });
}

template <typename Gate>
void RunGate(const GradArgs& a) {
  if (a.of.d > kMostKeys) return RunWalksOfHalves(a, a.part.rows);
  (a.of.d <= 64 ? Run<64, Gate, 1> : a.again.e <= kSlab ? Run<128, Gate, 1> : Run<128, Gate, 2>)(a);
}

}  // namespace

int main() {
  int32_t n[7];  // rows, tokens, heads of values and of keys, channels of keys and of values; whether the
                 // keys' have gates
  cluster::Read(n, sizeof(n));
  GradArgs a{};
  WalkArgs& again = a.again;
  using cluster::ReadArray;
  again.s = a.of.s = n[1], again.h = a.of.h = n[2], again.g = a.of.g = n[3], again.d = a.of.d = n[4];
  again.e = n[5];
  a.part = again.part = {0, n[0], 0, (n[1] + kChunk - 1) / kChunk};
  again.q = ReadArray<Bf16>(), again.k = ReadArray<Bf16>(), again.v = ReadArray<Bf16>();
  again.chunks = ReadArray<Chunk>();
  if (n[6]) again.of_channels = again.chunks;
  a.back = again, a.back.v = ReadArray<Bf16>();
  a.kept = ReadArray<float>(), a.after = ReadArray<float>();
  a.dq = cluster::Fresh<Bf16>(1);  // all gradients are wanted, so walks go forward, too
  size_t bytes[5];                 // of results, filled with what shows that nothing was written
  a.states = ReadArray<Bf16>(&bytes[0]), a.gradients = ReadArray<Bf16>(&bytes[1]);
  a.written = ReadArray<Bf16>(&bytes[2]), a.gradients_written = ReadArray<Bf16>(&bytes[3]);
  a.before = ReadArray<float>(&bytes[4]);
  (n[6] ? RunGate<OfChannel> : RunGate<OfHead>)(a);
  std::fwrite(a.states, 1, bytes[0], stdout), std::fwrite(a.gradients, 1, bytes[1], stdout);
  std::fwrite(a.written, 1, bytes[2], stdout), std::fwrite(a.gradients_written, 1, bytes[3], stdout);
  std::fwrite(a.before, 1, bytes[4], stdout);
}
