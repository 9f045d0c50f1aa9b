// One call of the walks of the gated delta rule's backward pass on Hopper on the CPU, with threads of
// cluster.h, in one slab: from the standard input its numbers and arrays, to the standard output the states
// before chunks, the gradients behind them, what tokens write, the gradients to what they would write alone,
// and the gradient to the initial state.
#include "cluster.h"
//
#include "delta/delta_bwd_hopper.cuh"

namespace {

using namespace te::delta;

template <int kD, int kGroups>
void Run(const GradArgs& a) {
  const size_t bytes = sizeof(HopperShared<kD, OfHead, kGroups>);
  cluster::Launch(GradWalkGrid(a, kGroups), 1, kWalkThreads<kGroups>, bytes,
                  [&] { te_gated_delta_bwd_walk_hopper<kD, kGroups>(a); });
}

}  // namespace

int main() {
  int32_t n[6];  // rows, tokens, heads of values and of keys, channels of keys and of values
  cluster::Read(n, sizeof(n));
  GradArgs a{};
  WalkArgs& again = a.again;
  using cluster::ReadArray;
  again.s = n[1], again.h = n[2], again.g = n[3], again.d = n[4], again.e = n[5];
  a.slab = {n[0], (n[1] + kChunk - 1) / kChunk * kChunk, 0, 0};
  again.q = ReadArray<Bf16>(), again.k = ReadArray<Bf16>(), again.v = ReadArray<Bf16>();
  again.chunks = ReadArray<Chunk>();
  a.back = again, a.back.v = ReadArray<Bf16>();
  a.kept = ReadArray<float>(), a.after = ReadArray<float>();
  size_t bytes[5];  // of results, filled with what shows that nothing was written
  a.states = ReadArray<Bf16>(&bytes[0]), a.gradients = ReadArray<Bf16>(&bytes[1]);
  a.written = ReadArray<Bf16>(&bytes[2]), a.gradients_written = ReadArray<Bf16>(&bytes[3]);
  a.before = ReadArray<float>(&bytes[4]);
  (again.d <= 64 ? Run<64, 1> : again.e <= kSlab ? Run<128, 1> : Run<128, 2>)(a);
  std::fwrite(a.states, 1, bytes[0], stdout), std::fwrite(a.gradients, 1, bytes[1], stdout);
  std::fwrite(a.written, 1, bytes[2], stdout), std::fwrite(a.gradients_written, 1, bytes[3], stdout);
  std::fwrite(a.before, 1, bytes[4], stdout);
}
