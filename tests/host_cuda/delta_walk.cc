// One call of the gated delta rule's walk on Hopper on the CPU, with threads of cluster.h: from the standard
// input its numbers and arrays, to the standard output y, the last states, and those that are kept.
#include "cluster.h"
//
#include "delta_maps.h"

namespace {

using namespace te::delta;

template <typename Kernel>
void Launch(const WalkArgs& a, int rows, int groups, int threads, size_t bytes, Kernel&& kernel) {
  const unsigned heads = a.h, slabs = (a.e + groups * kSlab - 1) / (groups * kSlab);
  const HopperWalkArgs given{a, MapOfKeys(a.q, a, rows), MapOfKeys(a.k, a, rows), MapOfValues(a.v, a, rows),
                             MapOfValues(a.y, a, rows)};
  cluster::Launch({heads, slabs, unsigned(rows)}, 1, threads, bytes, [&] { kernel(given); });
}

template <int kD, typename Gate, int kGroups>
void Run(const WalkArgs& a, int rows) {
  Launch(a, rows, kGroups, kWalkThreads<kGroups>, sizeof(HopperShared<kD, Gate, kGroups>),
         te_gated_delta_fwd_hopper<kD, Gate, kGroups>);
}

template <typename Gate>
void RunGate(const WalkArgs& a, int rows) {
  if (a.d > kMostKeys)
    return Launch(a, rows, 1, kHalvesThreads, sizeof(HalvesShared), te_gated_delta_fwd_halves);
  (a.d <= 64 ? Run<64, Gate, 1> : a.e <= kSlab ? Run<128, Gate, 1> : Run<128, Gate, 2>)(a, rows);
}

}  // namespace

int main() {
  int32_t n[7];  // rows, tokens, heads of values and of keys, channels of keys and of values; whether the
                 // keys' have gates
  cluster::Read(n, sizeof(n));
  WalkArgs a{};
  using cluster::ReadArray;
  a.s = n[1], a.h = n[2], a.g = n[3], a.d = n[4], a.e = n[5];
  a.q = ReadArray<Bf16>(), a.k = ReadArray<Bf16>(), a.v = ReadArray<Bf16>(), a.chunks = ReadArray<Chunk>();
  a.part = {0, n[0], 0, (n[1] + kChunk - 1) / kChunk};
  if (n[6]) a.of_channels = a.chunks;
  a.initial = ReadArray<float>();
  size_t bytes[3];  // of results, filled with what shows that nothing was written
  a.y = ReadArray<Bf16>(&bytes[0]), a.last = ReadArray<float>(&bytes[1]),
  a.states = ReadArray<float>(&bytes[2]);
  (n[6] ? RunGate<OfChannel> : RunGate<OfHead>)(a, n[0]);
  std::fwrite(a.y, 1, bytes[0], stdout), std::fwrite(a.last, 1, bytes[1], stdout);
  std::fwrite(a.states, 1, bytes[2], stdout);
}
