// The walk on Hopper: its warps are a warpgroup, whose products (wgmma) read each tile once for all of them.
#pragma once

#include "delta/delta_walk.cuh"
#include "ssm/hopper.cuh"

namespace te::delta {

// As WarpProducts, but done when they are waited for. Left factors stay as they are until then.
struct GroupProducts {
  template <int kThreads>
  __device__ __forceinline__ static void Meet() {
    FenceAsync();
    NamedBarrier(1, kThreads);
  }
  __device__ __forceinline__ static void Put(Tokens<kSlab>& tile, const uint32_t (&of)[kChunk / 4],
                                             int band) {
#pragma unroll
    for (int i = 0; i < kChunk / 4; i += 4) {
      const Bf16* row = tile.At(i * 4 + Lane() / 16 * 8 + Lane() % 8, band + Lane() / 8 % 2 * 8);
      StoreMatrices<true>(AddressOf(row), of[i], of[i + 1], of[i + 2], of[i + 3]);
    }
  }
  // What products add to is there before: where it came between them, they would wait for each other.
  template <typename... Sums>
  __device__ __forceinline__ static void Begin(Sums&... sums) {
    (Settle(sums), ...);
    BeginProducts();
  }
  __device__ __forceinline__ static void Commit() { CommitProducts(); }
  template <int kPending, int kCount>
  __device__ __forceinline__ static void Wait(float (&d)[kCount]) {
    WaitForProducts<kPending>();
    Settle(d);
  }

  template <int kD>
  __device__ __forceinline__ static void Along(Results& d, const uint32_t (&left)[kD / 16][4],
                                               Tokens<kD>& tile) {
    const uint64_t right = TileDescriptor<false>(AddressOf(tile.cells));
#pragma unroll
    for (int k = 0; k < kD / 16; ++k) MultiplyRows<false>(d, left[k], right + ssm::Along(k));
  }
  __device__ __forceinline__ static void Seen(Results& d, const Left& left, Tokens<kChunk>& tile) {
    Along<kChunk>(d, left, tile);
  }
  __device__ __forceinline__ static void Seeing(Results& d, const Left& left, Tokens<kChunk>& tile) {
    Across<kChunk>(d, left, tile);
  }
  template <int kD>
  __device__ __forceinline__ static void Across(float (&d)[kD / 2], const Left& left, Tokens<kD>& tile) {
    ssm::MultiplyAcross(d, left, reinterpret_cast<const uint8_t*>(tile.cells));
  }
};

// A chunk takes less time than what it needs takes to come.
template <typename Gate, int kGroups>
constexpr int kHopperStages = Gate::kByChannel && kGroups > 1 ? 2 : 3;

// Whether there is a tile by way of which states that are kept for each chunk leave; else threads write them.
template <typename Gate, int kGroups>
constexpr bool kCopiesStates = !Gate::kByChannel && kGroups == 1;
template <int kD, bool kIsThere>
struct StateTile {
  alignas(1024) uint8_t of[ssm::kWideBytes<kD>];
};
template <int kD>
struct StateTile<kD, false> {};

// One warp fetches and one writes y for those that walk.
template <int kD, typename Gate = OfHead, int kGroups = 1>
struct HopperShared {
  static constexpr int kStages = kHopperStages<Gate, kGroups>;
  using Tiles = WalkShared<kD, kStages, Gate, kGroups>;
  Tiles tiles;
  StateTile<kD, kCopiesStates<Gate, kGroups>> state;
  alignas(8) uint64_t full[kStages], empty[kStages], y_full[1], y_empty[1];

  __device__ __forceinline__ void Begin() {
    static_assert(sizeof(tiles.stages[0]) % 1024 == 0);  // tiles of products begin at a multiple
    static_assert(sizeof(tiles.stages) % 1024 == 0 && sizeof(tiles.y) % 1024 == 0);
    constexpr unsigned kAll = kGroups * kWarps * ssm::kArrivals;
    if (threadIdx.x == 0) {
      ssm::InitRing(full, empty, ssm::kArrivals, kAll), ssm::InitRing(y_full, y_empty, kAll, ssm::kArrivals);
      FenceBarrierInit();
    }
    __syncthreads();
  }
};
// Whether CTAs of two groups walk: where `walks` of one, of all heads of `rows` each, would take turns on the
// multiprocessors, and two groups are fewer turns.
Status IsWide(const WalkArgs& a, int64_t rows, int walks, bool* wide);
template <int kGroups>
constexpr int kWalkThreads = (1 + kGroups) * kThreads;
// The first group of walkers is the CTA's second.
__device__ __forceinline__ int WalkingGroup() { return max(ssm::GroupIndex() - 1, 0); }

// Of what a walk fetches and writes, in boxes of a chunk's tokens: q and k [rows, s, g, d], v [rows, s, h, e],
// y as v or as the array of a slab. Where states are kept, [count, h, e, d], in boxes of 16 channels of values.
struct WalkMaps {
  const CUtensorMap *q, *k, *v, *y, *states;
};

// What a chunk needs, by one warp.
template <typename Walk>
__device__ __forceinline__ void CopyChunk(Walk& walk, const WalkMaps& maps, int chunk, int to, uint32_t full) {
  constexpr int kD = Walk::kKeys;
  constexpr unsigned kValues = Walk::kSlabs * kBoxBytes;
  const WalkArgs& a = walk.a;
  auto& stage = walk.s.stages[to];
  const int row = int(walk.row), token = chunk * kChunk;
  const int64_t at = a.part.At(row, chunk, walk.head, a.h);
  if constexpr (Walk::kByChannel) {
    const auto& of = static_cast<const ChannelChunk<kD>*>(a.of_channels)[at];
    constexpr unsigned kTiles = Walk::kLooks ? sizeof(of.tiles) : offsetof(ChannelTiles<kD>, q);
    if (!ssm::Expect(full, kTiles + kValues + sizeof(of.weights))) return;
    CopyBytes(AddressOf(&stage), &of.tiles, kTiles, full);
    CopyBytes(AddressOf(&walk.s.weights[to]), &of.weights, sizeof(of.weights), full);
  } else {
    const Chunk& of = a.chunks[at];
    constexpr unsigned kTiles = (Walk::kLooks ? 2 : 1) * (sizeof(stage.k) + sizeof(of.inverse));
    const int key = walk.head / (a.h / a.g);
    if (!ssm::Expect(full, kTiles + kValues + sizeof(of.weights))) return;
    for (int box = 0; box < kD / 64; ++box)
      CopyBox(AddressOf(&stage.k) + box * kBoxBytes, maps.k, full, 64 * box, key, token, row);
    CopyBytes(AddressOf(&stage.inverse), &of.inverse, sizeof(of.inverse), full);
    CopyBytes(AddressOf(&walk.s.weights[to]), &of.weights, sizeof(of.weights), full);
    if constexpr (Walk::kLooks) {
      for (int box = 0; box < kD / 64; ++box)
        CopyBox(AddressOf(&stage.q) + box * kBoxBytes, maps.q, full, 64 * box, key, token, row);
      CopyBytes(AddressOf(&stage.seen), &of.seen, sizeof(of.seen), full);
    }
  }
  for (int i = 0; i < Walk::kSlabs; ++i)
    CopyBox(AddressOf(&stage.v[i]), maps.v, full, walk.first + i * kSlab, walk.head, token, row);
}

// One warp: the walk is the first group's.
template <typename Shared, typename Walk>
__device__ __forceinline__ void CopyChunks(Shared& s, Walk& walk, const WalkMaps& maps) {
  for (int i = 0; i < walk.Count(); ++i) {
    ssm::WaitEmpty(s.empty, i);
    CopyChunk(walk, maps, walk.ChunkOf(i), i % Shared::kStages, AddressOf(&s.full[i % Shared::kStages]));
  }
}
// Another: y of all groups.
template <typename Shared, typename Walk>
__device__ __forceinline__ void CopyY(Shared& s, Walk& walk, const WalkMaps& maps) {
  const ChunkPart part = walk.Part();
  const int row = int(walk.row) - part.first_row;
  for (int i = 0; i < walk.Count(); ++i) {
    ssm::WaitFull(s.y_full, i);
    if (Lane() == 0) {
      const int token = (walk.ChunkOf(i) - part.first_chunk) * kChunk;
      for (int j = 0; j < Walk::kSlabs; ++j)
        StoreBox(maps.y, AddressOf(&walk.s.y[j]), walk.first + j * kSlab, walk.head, token, row);
      CommitStores();
      WaitForReads();
    }
    ssm::Release(s.y_empty[0]);
  }
  if (Lane() == 0) WaitForStores();
}

// By each warp that walks, its channels of values.
template <typename Shared, typename Walk>
__device__ __forceinline__ void CopyState(Shared& s, Walk& walk, const WalkMaps& maps, int chunk) {
  constexpr int kBoxes = Walk::kKeys / 64;
  const uint32_t piece = AddressOf(s.state.of) + ssm::WarpOfGroup() * ssm::kPieceBytes;
  if (Lane() == 0) WaitForReads();  // of the one before
  __syncwarp();
#pragma unroll
  for (int box = 0; box < kBoxes; ++box) ssm::PutRows(piece + box * kBoxBytes, walk.state + 32 * box);
  FenceAsync();
  __syncwarp();
  if (Lane() > 0) return;
  const ChunkPart part = walk.Part();
  const int index = (int(walk.row) - part.first_row) * part.chunks + chunk - part.first_chunk;
  for (int box = 0; box < kBoxes; ++box)
    StoreBox(maps.states, piece + box * kBoxBytes, 64 * box, walk.first + Walk::Band(), walk.head, index);
  CommitStores();
}

template <typename Shared, typename Walk>
__device__ __forceinline__ void WalkBehind(Shared& s, Walk& walk, const WalkMaps& maps) {
  walk.Begin();
  for (int i = 0; i < walk.Count(); ++i) {
    ssm::WaitFull(s.full, i);
    const auto put = [&] {
      ssm::WaitEmpty(s.y_empty, i);
      walk.PutY();
      FenceAsync();
      ssm::Release(s.y_full[0]);
    };
    const auto copy = [&] {
      if constexpr (Walk::kLeavesStates) CopyState(s, walk, maps, walk.ChunkOf(i));
    };
    walk.Next(i, copy, put);
    ssm::Release(s.empty[i % Shared::kStages]);
  }
  walk.End();
  if (Walk::kLeavesStates && Lane() == 0) WaitForStores();
}

// The warpgroup's part in the walks, of which a thread has kRegisters where the CTA has two: of what it
// begins with, 168 in each of three groups.
template <int kGroups, int kRegisters, typename Shared, typename Walk>
__device__ __forceinline__ void TakePart(Shared& s, Walk&& walk, const WalkMaps& maps) {
  s.Begin();
  AwaitPrevious();
  if (ssm::GroupIndex() == 0) {
    if constexpr (kGroups > 1) GiveRegisters<3 * 168 - 2 * kRegisters>();
    if (ssm::WarpOfGroup() == 0) CopyChunks(s, walk, maps);
    if (ssm::WarpOfGroup() == 1) CopyY(s, walk, maps);
  } else {
    if constexpr (kGroups > 1) TakeRegisters<kRegisters>();
    WalkBehind(s, walk, maps);
  }
}

struct HopperWalkArgs {
  WalkArgs a;
  CUtensorMap q, k, v, y;
};

template <int kD, typename Gate, int kGroups>
__global__ void __launch_bounds__(kWalkThreads<kGroups>, 1) 
    te_gated_delta_fwd_hopper(const __grid_constant__ HopperWalkArgs given) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  extern __shared__ __align__(1024) uint8_t shared[];
  auto& s = *reinterpret_cast<HopperShared<kD, Gate, kGroups>*>(shared);
  const int group = WalkingGroup(), first = (int(blockIdx.y) * kGroups + group) * kSlab;
  using Steps = Walk<kD, kHopperStages<Gate, kGroups>, GroupProducts, true, Gate, kGroups>;
  TakePart<kGroups, 208>(s, Steps{given.a, s.tiles, blockIdx.z, int(blockIdx.x), first, group},
                         {&given.q, &given.k, &given.v, &given.y, nullptr});
#else
  __trap();  // compiled only for Hopper
#endif
}

}  // namespace te::delta
