// As delta_bwd_walk.cc, where channels have gates.
#include "cluster.h"
//
#include "delta/channel_bwd_hopper.cuh"

namespace {

using namespace te::delta;

template <int kD, int kGroups>
void Run(const ChannelGradArgs& a) {
  const size_t bytes = sizeof(HopperShared<kD, OfChannel, kGroups>);
  cluster::Launch(ChannelWalkGrid(a, kGroups), 1, kWalkThreads<kGroups>, bytes,
                  [&] { te_gated_delta_channel_bwd_walk_hopper<kD, kGroups>(a); });
}

}  // namespace

int main() {
  int32_t n[6];  // rows, tokens, heads of values and of keys, channels of keys and of values
  cluster::Read(n, sizeof(n));
  ChannelGradArgs a{};
  WalkArgs& again = a.again;
  using cluster::ReadArray;
  again.s = a.of.s = n[1], again.h = a.of.h = n[2], again.g = a.of.g = n[3], again.d = a.of.d = n[4],
  again.e = n[5];
  a.part = again.part = {0, n[0], 0, (n[1] + kChunk - 1) / kChunk};
  again.v = ReadArray<Bf16>(), again.of_channels = ReadArray<uint8_t>();
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
