// One call of the scan's kernel on Hopper on the CPU, with threads of cluster.h: from the standard input its
// numbers and arrays, to the standard output y, the last states, and those that are kept.
#include "cluster.h"
//
#include "ssm/scan_hopper.cuh"

namespace {

using namespace te;
using namespace te::ssm;

// Of [rows, s, heads, inner].
CUtensorMap Map(Bf16* data, int rows, int s, int heads, int inner, int tokens) {
  const int64_t head = inner * 2, token = heads * head;
  const HostMap map{
      reinterpret_cast<uint8_t*>(data), {inner, heads, s, rows}, {2, head, token, s * token}, 2, tokens, 2};
  static_assert(sizeof(map) <= sizeof(CUtensorMap));
  CUtensorMap stands{};
  std::memcpy(&stands, &map, sizeof(map));
  return stands;
}

template <int kN, bool kRuns>
void Run(const HopperArgs& a, int rows) {
  const unsigned heads = a.steps.h, tiles = (a.p + kHopperChannels - 1) / kHopperChannels;
  cluster::Launch({heads, tiles, unsigned(rows)}, 1, kHopperThreads, sizeof(HopperShared<kN, kRuns>),
                  [&] { te_ssd_fwd_hopper<kN, kRuns>(a); });
}

}  // namespace

int main() {
  int32_t n[7];  // rows, tokens, heads, channels, groups, states, channels of D
  cluster::Read(n, sizeof(n));
  HopperArgs a{};
  using cluster::ReadArray;
  a.steps.s = n[1], a.steps.h = n[2], a.p = n[3], a.g = n[4], a.n = n[5], a.channels = n[6];
  Bf16 *const x = ReadArray<Bf16>(), *const B = ReadArray<Bf16>(), *const C = ReadArray<Bf16>();
  a.of_chunks = ReadArray<Steps>(), a.D = ReadArray<float>(), a.initial = ReadArray<float>();
  a.steps.runs = ReadArray<int>();
  size_t bytes[3];  // of results, filled with what shows that nothing was written
  Bf16* const y = ReadArray<Bf16>(&bytes[0]);
  a.last = ReadArray<float>(&bytes[1]), a.states = ReadArray<float>(&bytes[2]);
  a.x = Map(x, n[0], n[1], n[2], n[3], kChunk), a.y = Map(y, n[0], n[1], n[2], n[3], kPieceRows);
  a.B = Map(B, n[0], n[1], n[4], n[5], kChunk), a.C = Map(C, n[0], n[1], n[4], n[5], kChunk);
  const auto run = a.steps.runs ? (a.n <= 64 ? Run<64, true> : Run<128, true>)
                                : (a.n <= 64 ? Run<64, false> : Run<128, false>);
  run(a, n[0]);
  std::fwrite(y, 1, bytes[0], stdout), std::fwrite(a.last, 1, bytes[1], stdout);
  std::fwrite(a.states, 1, bytes[2], stdout);
}
