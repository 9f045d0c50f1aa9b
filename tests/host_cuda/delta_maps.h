// The tensor maps of the gated delta rule's kernels on Hopper, as csrc/delta/maps.h has them.
#pragma once

#include "delta/delta_halves.cuh"

namespace te::delta {

inline CUtensorMap MapOfKeys(const Bf16* data, const WalkArgs& a, int rows, int box = kChunk) {
  return MapOf(data, {a.d, a.g, a.s, rows}, 2, box);
}
inline CUtensorMap MapOfValues(const Bf16* data, const WalkArgs& a, int rows) {
  return MapOf(data, {a.e, a.h, a.s, rows}, 2, kChunk);
}
// In the array of a slab.
inline CUtensorMap MapOfWritten(const Bf16* data, const GradArgs& a) {
  const int tokens = a.part.chunks * kChunk,
            there = std::min(tokens, a.again.s - a.part.first_chunk * kChunk);
  return MapOf(data, {a.again.e, a.again.h, tokens, a.part.rows}, 2, kChunk, there);
}
inline CUtensorMap MapOfStates(const Bf16* data, const GradArgs& a) {
  return MapOf(data, {a.again.d, a.again.e, a.again.h, a.part.rows * a.part.chunks}, 1, kSlab);
}

inline HopperGradWalkArgs WalksWithMaps(const GradArgs& a, int rows) {
  const WalkArgs& of = a.again;
  return {a,
          MapOfKeys(of.q, of, rows),
          MapOfKeys(of.k, of, rows),
          MapOfValues(of.v, of, rows),
          MapOfValues(a.back.v, of, rows),
          MapOfWritten(a.written, a),
          MapOfWritten(a.gradients_written, a),
          MapOfStates(a.states, a),
          MapOfStates(a.gradients, a)};
}
inline void RunWalksOfHalves(const GradArgs& a, int rows) {
  const HopperGradWalkArgs given = WalksWithMaps(a, rows);
  cluster::Launch(GradWalkGrid(a, 1), 1, kHalvesThreads, sizeof(HalvesShared),
                  [&] { te_gated_delta_bwd_walk_halves(given); });
}

}  // namespace te::delta
