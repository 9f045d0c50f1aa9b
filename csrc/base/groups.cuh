// Tiles over a buffer in groups, the runs of rows of one expert, which begin at multiples of 128: a tile has
// bands of 128 rows, each of one expert.
#pragma once

#include "base/finish.h"
#include "base/ops.h"
#include "base/partials.h"
#include "base/reduce.cuh"
#include "base/tensor.h"

namespace te {

constexpr int kGroupRows = kBlock;  // what groups begin at multiples of
constexpr int kTileBands = kTileRows / kGroupRows;

// The rows of a tile: in each band the rows of tokens end before `ends`, counted from the tile's first row;
// the others are padding. scales: of the bands' experts.
struct Bands {
  int ends[kTileBands];
  float scales[kTileBands];
  bool unused;  // no group has rows of the tile: nobody reads them
};

// What a Source of tiles over groups has next to the rows.
struct GroupRows {
  const int* offsets;  // [experts + 1]: the first row of each group, and the end of the last
  const int* counts;   // [experts]: rows of tokens, the first of a group
  int experts;
  bool one_scale;  // for all experts

  // Called by whole warps. Lanes compare neighbouring offsets: two latencies, where a search by halves would
  // have one for each step.
  __device__ __forceinline__ Bands At(int64_t row0, const float* scale) const {
    unsigned behind[kTileBands] = {};  // experts whose groups end before the band
    for (int e = Lane(); e < experts; e += 32) {
      const int end = offsets[e + 1];
#pragma unroll
      for (int b = 0; b < kTileBands; ++b)
        if (end <= row0 + b * kGroupRows) behind[b] = e + 1;
    }
    Bands bands{};
#pragma unroll
    for (int b = 0; b < kTileBands; ++b) {
      const int expert = WarpMax(behind[b]);
      if (b == 0) bands.unused = expert >= experts;
      if (expert >= experts) continue;
      const int64_t end = int64_t{offsets[expert]} + counts[expert] - row0;
      bands.ends[b] = int(min(end, int64_t{(b + 1) * kGroupRows}));
      bands.scales[b] = scale ? scale[one_scale ? 0 : expert] : 1.f;
    }
    return bands;
  }
};

// A Source over groups: the rows that are no tokens are read as zeros.
template <typename Of>
struct GroupSource : Of {
  GroupRows groups;
};

template <typename Source>
concept InGroups = requires { Source::groups; };

// Whether the rows of a source are those that slots name. A thread reads the slots of all its rows before it
// waits for anything, so that the rows come one latency later.
template <typename Source>
concept Gathers = requires(const Source& source, int* out) { source.ReadSlots(int64_t{}, 4, out); };

// The number of a CTA's tile: its own, or what a source with an `order` says.
template <typename Source>
__device__ __forceinline__ unsigned TileOf(const Source& source, unsigned cta) {
  if constexpr (requires { source.order; })
    return source.order.TileOf(cta);
  else
    return cta;
}

// The results of experts, 0 of those without rows, of the partials of their bands of 128 rows: amax? f32
// [experts], the maximum of the bits of f32 [bands, strips]; dbias? f32 [experts, columns], the sum of f32
// [bands, columns] in the order of the bands.
Status FinishGroups(cudaStream_t stream, const GroupRows& groups, int64_t rows, const Totals& of);

// What a call over groups has next to its rows. bias: absent.
struct GroupArrays {
  Tensor offsets, counts, bias = kNone, workspace = kNone;
};

// An error unless offsets i32 [e + 1], counts i32 [e], scale? f32 [e] or [1], amax? f32 [e] and dbias? f32
// [e, columns...] fit `rows` rows in groups. needs_scale: with FP8 results.
Status ExpectGroups(const char* op, const GroupArrays& b, const Totals& of, bool needs_scale, int64_t rows,
                    const Axes& columns, GroupRows* groups);

}  // namespace te
