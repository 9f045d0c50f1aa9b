// What the kernels of the state-space dual on Hopper share: a warpgroup's state, and how it is handed on.
#pragma once

#include <cuda.h>

#include "base/hopper_tiles.cuh"
#include "ssm/tiles.cuh"

namespace te::ssm {

constexpr int kGroup = 128;  // threads of a warpgroup
constexpr int kHopperThreads = 4 * kGroup;
constexpr int kHopperChannels = 64;  // of a CTA
constexpr int kPieceRows = 16;       // that a warp writes
constexpr unsigned kPieceBytes = kPieceRows * kRowBytes;
template <int kN>
constexpr unsigned kWideBytes = kN / 64 * kBoxBytes;  // of [64, kN]

// The warps of a CTA's groups, and of a group.
__device__ __forceinline__ int GroupIndex() {
  return __shfl_sync(~0u, threadIdx.x / kGroup, 0);  // alike in all lanes, as the compiler can see
}
__device__ __forceinline__ int WarpOfGroup() { return WarpIndex() % 4; }

// How many lanes of a warp arrive at a barrier. compute-sanitizer's racecheck takes what the other lanes did
// for unguarded: for it all do.
#ifdef TE_ALL_LANES_ARRIVE
constexpr int kArrivals = 32;
#else
constexpr int kArrivals = 1;
#endif

// The barriers of a ring, which so many arrivals fill and empty; one thread calls it.
template <int kStages>
__device__ __forceinline__ void InitRing(uint64_t (&full)[kStages], uint64_t (&empty)[kStages],
                                         unsigned to_fill, unsigned to_empty) {
  for (int i = 0; i < kStages; ++i)
    InitBarrier(AddressOf(&full[i]), to_fill), InitBarrier(AddressOf(&empty[i]), to_empty);
}
// The warp has done with what the barrier guards.
__device__ __forceinline__ void Release(const uint64_t& barrier) {
  __syncwarp();
  if (Lane() < kArrivals) Arrive(AddressOf(&barrier));
}
// kArrivals at a barrier that waits for what the warp's lanes have written, and for `bytes` of copies.
// Whether the lane is the one that is to issue them.
__device__ __forceinline__ bool Expect(uint32_t barrier, unsigned bytes) {
  __syncwarp();
  if (Lane() == 0)
    ArriveExpecting(barrier, bytes);
  else if (kArrivals > 1)
    Arrive(barrier);
  return Lane() == 0;
}
// The k-th passing of a ring of kStages.
template <int kStages>
__device__ __forceinline__ void WaitFull(const uint64_t (&full)[kStages], int k) {
  WaitBarrier(AddressOf(&full[k % kStages]), k / kStages % 2);
}
template <int kStages>
__device__ __forceinline__ void WaitEmpty(const uint64_t (&empty)[kStages], int k) {
  WaitBarrier(AddressOf(&empty[k % kStages]), k / kStages % 2 ^ 1);
}

// From the descriptor of a tile along k, [64, kN], to the descriptor of its k-th 16 columns.
__device__ __forceinline__ constexpr uint64_t Along(int k) {
  return k / 4 * (kBoxBytes >> 4) + k % 4 * kNextProduct<false>;
}
// d = left right^T, both [64, kN] along k, plus d where `adds`.
template <int kN>
__device__ __forceinline__ void MultiplyAlong(float (&d)[32], const uint8_t* left, const uint8_t* right) {
  const uint64_t a = TileDescriptor<false>(AddressOf(left)), b = TileDescriptor<false>(AddressOf(right));
#pragma unroll
  for (int k = 0; k < kN / 16; ++k)
    MultiplyTiles<Factors::kBF16, false, false>(d, a + Along(k), b + Along(k), k);
}
// d = left right, left [64, 64] in registers, right [64, N], plus d where it adds.
template <int kCount>
__device__ __forceinline__ void MultiplyAcross(float (&d)[kCount], const uint32_t (&left)[4][4],
                                               const uint8_t* right, int adds = 1) {
  const uint64_t b = TileDescriptor<true>(AddressOf(right));
#pragma unroll
  for (int k = 0; k < 4; ++k) MultiplyRows<true>(d, left[k], b + k * kNextProduct<true>, adds || k > 0);
}

// The rows of a tile [64, 64] that the warp has as rows of a left factor; of its transpose.
__device__ __forceinline__ void LoadRows(uint32_t (&rows)[4][4], const uint8_t* tile) {
#pragma unroll
  for (int k = 0; k < 4; ++k)
    LoadMatrices<false>(rows[k], tile + InBox(WarpOfGroup() * 16 + Lane() % 16, 2 * k + Lane() / 16));
}
__device__ __forceinline__ void LoadColumns(uint32_t (&rows)[4][4], const uint8_t* tile) {
#pragma unroll
  for (int k = 0; k < 4; ++k)
    LoadMatrices<true>(
        rows[k], tile + InBox(16 * k + Lane() % 8 + Lane() / 16 * 8, WarpOfGroup() * 2 + Lane() / 8 % 2));
}

// The results of a warp, rounded, to its 16 rows of a box.
__device__ __forceinline__ void PutRows(uint32_t rows, const float* of) {
#pragma unroll
  for (int j = 0; j < 8; j += 2, of += 8)
    StoreMatrices(rows + InBox(Lane() % 16, j + Lane() / 16), Pack(of[0], of[1]), Pack(of[2], of[3]),
                  Pack(of[4], of[5]), Pack(of[6], of[7]));
}

// f32 [64, kN] of a warpgroup, the channels of a head as rows.
template <int kN>
struct GroupState {
  float of[kN / 2];

  // of [p, n] at `from`, the state's first row; zeros outside and without `from`.
  __device__ __forceinline__ void Load(const float* from, int p, int n) {
    EachPair([&](int i, int row, int column) {
      const bool inside = from && row < p && column < n;
      const float2 two =
          inside ? *reinterpret_cast<const float2*>(from + int64_t(row) * n + column) : float2{};
      of[i] = two.x, of[i + 1] = two.y;
    });
  }
  __device__ __forceinline__ void Store(float* to, int p, int n) const {
    EachPair([&](int i, int row, int column) {
      if (row < p && column < n)
        *reinterpret_cast<float2*>(to + int64_t(row) * n + column) = make_float2(of[i], of[i + 1]);
    });
  }
  // Rounded, as a factor [64, kN] along the states.
  __device__ __forceinline__ void Put(const uint8_t* tile) const {
#pragma unroll
    for (int box = 0; box < kN / 64; ++box)
      PutRows(AddressOf(tile) + box * kBoxBytes + WarpOfGroup() * kPieceBytes, of + 32 * box);
    FenceAsync();
  }

  // What is left of it, `keeps` times, or, with kRuns, nothing; and x^T B of the tokens of a chunk, each
  // `weight(token)` times, with kRuns if `is_added(token)`; `added` is B, or without the others, as 0 times
  // an inf would stay.
  template <bool kRuns, typename Weight, typename IsAdded>
  __device__ __forceinline__ void Add(bool stays, float keeps, const uint8_t* x, const uint8_t* added,
                                      Weight&& weight, IsAdded&& is_added) {
    uint32_t channels[4][4];
    LoadColumns(channels, x);
#pragma unroll
    for (int k = 0; k < 4; ++k) WeighTokens<kRuns>(channels[k], 16 * k, weight, is_added);
#pragma unroll
    for (float& each : of) each = !kRuns || stays ? each * keeps : 0.f;
    BeginProducts();
    MultiplyAcross(of, channels, added);
    CommitProducts();
    WaitForProducts<0>();
    Settle(of);
  }

 private:
  // Each two neighbours of the thread: where they are in `of`, their row and the first one's column.
  template <typename Fn>
  __device__ __forceinline__ static void EachPair(Fn&& fn) {
#pragma unroll
    for (int i = 0; i < kN / 2; i += 2) fn(i, WarpOfGroup() * 16 + RowOf(i % 4), i / 4 * 8 + ColumnOf(0));
  }
};

// A tile [64, kN] of tokens, or where some are not kept, a copy with zeros in their place. All threads of the
// warpgroup call it.
template <int kN, bool kRuns, typename IsKept>
__device__ __forceinline__ const uint8_t* Kept(const uint8_t* tile, uint8_t* copy, bool all,
                                               IsKept&& is_kept) {
  if constexpr (kRuns) {
    if (!all) {
      NamedBarrier(1, kGroup);  // no warp's products read the last copy any more
      for (int i = threadIdx.x % kGroup; i < int(kWideBytes<kN> / 16); i += kGroup)
        reinterpret_cast<uint4*>(copy)[i] =
            is_kept(i / 8 % 64) ? reinterpret_cast<const uint4*>(tile)[i] : uint4{};
      FenceAsync();
      NamedBarrier(1, kGroup);
      return copy;
    }
  }
  return tile;
}

}  // namespace te::ssm
