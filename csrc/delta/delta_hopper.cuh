// The walk on Hopper: its warps are a warpgroup, whose products (wgmma) read each tile once for all of them.
#pragma once

#include "delta/delta_walk.cuh"
#include "ssm/hopper.cuh"

namespace te::delta {

// As WarpProducts, but done when they are waited for. Left factors stay as they are until then.
struct GroupProducts {
  static constexpr bool kOfWarps = false;
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
  __device__ __forceinline__ static void Across(float (&d)[kD / 2], const Left& left, Tokens<kD>& tile,
                                                bool adds = true) {
    ssm::MultiplyAcross(d, left, reinterpret_cast<const uint8_t*>(tile.cells), adds);
  }
};

// A chunk takes less time than what it needs takes to come. Three where shared memory has them: gates of
// channels, two groups, and the states that walks of the backward pass (kBack) leave take more, each.
template <typename Gate, int kGroups, bool kBack>
constexpr int kHopperStages = int(Gate::kByChannel) + (kGroups > 1) + kBack > 1 ? 2 : 3;

// [64, kD] of each group.
template <int kD, int kGroups>
struct StateTiles {
  alignas(1024) uint8_t of[kGroups][ssm::kWideBytes<kD>];
};
struct NoTiles {};

// All threads of a CTA: its barriers, where so many warps walk, and so many of them leave y.
template <typename Shared>
__device__ __forceinline__ void BeginWalks(Shared& s, unsigned walking, unsigned leaving_y) {
  constexpr unsigned kOne = ssm::kArrivals;
  if (threadIdx.x == 0) {
    ssm::InitRing(s.full, s.empty, kOne, walking * kOne);
    ssm::InitRing(s.y_full, s.y_empty, leaving_y * kOne, kOne);
    ssm::InitRing(s.state_full, s.state_empty, walking * kOne, kOne);
    FenceBarrierInit();
  }
  __syncthreads();
}

// One warp fetches for those that walk, and others write what they leave.
template <int kD, typename Gate = OfHead, int kGroups = 1, bool kBack = false>
struct HopperShared {
  static constexpr int kStages = kHopperStages<Gate, kGroups, kBack>;
  using Tiles = WalkShared<kD, kStages, Gate, kGroups>;
  Tiles tiles;
  std::conditional_t<kBack, StateTiles<kD, kGroups>, NoTiles> states;

  __device__ __forceinline__ uint8_t* StateOf(int group) { return states.of[group]; }

  alignas(8) uint64_t full[kStages], empty[kStages], y_full[1], y_empty[1], state_full[1], state_empty[1];

  __device__ __forceinline__ void Begin() {
    static_assert(sizeof(tiles.stages[0]) % 1024 == 0);  // tiles of products begin at a multiple
    static_assert(sizeof(tiles.stages) % 1024 == 0 && sizeof(tiles.y) % 1024 == 0);
    BeginWalks(*this, kGroups * kWarps, kGroups * kWarps);
  }
};
// Whether CTAs of two groups walk: where `walks` of one, of all heads of `rows` each, would take turns on the
// multiprocessors, and two groups are fewer turns.
Status IsWide(const WalkArgs& a, int64_t rows, int walks, bool* wide);
template <int kGroups>
constexpr int kWalkThreads = (1 + kGroups) * kThreads;
// The first group of walkers is the CTA's second.
__device__ __forceinline__ int WalkingGroup() { return max(ssm::GroupIndex() - 1, 0); }

// The tensor maps of what a walk fetches and writes, in boxes of a chunk's tokens: q and k [rows, s, g, d], v
// [rows, s, h, e], y as v or as the array of a slab; and of the states of a slab's chunks, [count, h, e, d].
struct WalkMaps {
  const CUtensorMap *q, *k, *v, *y, *states;
};

// What a chunk needs, by one warp.
template <typename Walk>
__device__ __forceinline__ void CopyChunk(Walk& walk, const WalkMaps& maps, int chunk, int to,
                                          uint32_t full) {
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
// Another: what those that walk have put into one place, step by step.
template <typename Store>
__device__ __forceinline__ void CopyOut(const uint64_t (&full)[1], const uint64_t (&empty)[1], int count,
                                        Store&& store) {
  for (int i = 0; i < count; ++i) {
    ssm::WaitFull(full, i);
    if (Lane() == 0) {
      FenceAsync();
      store(i);
      CommitStores();
      WaitForReads();
    }
    ssm::Release(empty[0]);
  }
  if (Lane() == 0) WaitForStores();
}
template <typename Shared, typename Walk>
__device__ __forceinline__ void CopyY(Shared& s, Walk& walk, const WalkMaps& maps) {
  const ChunkPart part = walk.Part();
  CopyOut(s.y_full, s.y_empty, walk.Count(), [&](int i) {
    const int token = (walk.ChunkOf(i) - part.first_chunk) * kChunk, row = int(walk.row) - part.first_row;
    for (int j = 0; j < Walk::kSlabs; ++j)
      StoreBox(maps.y, AddressOf(&walk.s.y[j]), walk.first + j * kSlab, walk.head, token, row);
  });
}
template <typename Shared, typename Walk>
__device__ __forceinline__ void CopyStates(Shared& s, Walk& walk, const WalkMaps& maps) {
  const ChunkPart part = walk.Part();
  CopyOut(s.state_full, s.state_empty, walk.Count(), [&](int i) {
    const int chunk = walk.ChunkOf(i) - part.first_chunk, row = int(walk.row) - part.first_row;
    for (int j = 0; j < Walk::kSlabs; ++j)
      for (int box = 0; box < Walk::kKeys / 64; ++box)
        StoreBox(maps.states, AddressOf(s.StateOf(j) + box * kBoxBytes), 64 * box, walk.first + j * kSlab,
                 walk.head, row * part.chunks + chunk);
  });
}

// A warpgroup, of which a warp each does so.
template <typename Shared, typename Walk>
__device__ __forceinline__ void CopyForWalk(Shared& s, Walk& walk, const WalkMaps& maps) {
  const int warp = ssm::WarpOfGroup();
  if (warp == 0) CopyChunks(s, walk, maps);
  if (warp == 1) CopyY(s, walk, maps);
  if constexpr (Walk::kLeavesStates)
    if (warp == 2) CopyStates(s, walk, maps);
}

template <typename Shared, typename Walk>
__device__ __forceinline__ void WalkBehind(Shared& s, Walk& walk) {
  walk.Begin();
  for (int i = 0; i < walk.Count(); ++i) {
    ssm::WaitFull(s.full, i);
    const auto put_state = [&] {
      if constexpr (Walk::kLeavesStates) {
        ssm::WaitEmpty(s.state_empty, i);
#pragma unroll
        for (int box = 0; box < Walk::kKeys / 64; ++box)
          ssm::PutRows(
              AddressOf(s.states.of[walk.group] + box * kBoxBytes) + ssm::WarpOfGroup() * ssm::kPieceBytes,
              walk.state + 32 * box);
        ssm::Release(s.state_full[0]);
      }
    };
    const auto put_y = [&] {
      ssm::WaitEmpty(s.y_empty, i);
      walk.PutY();
      ssm::Release(s.y_full[0]);
    };
    walk.Next(i, put_state, put_y);
    ssm::Release(s.empty[i % Shared::kStages]);
  }
  walk.End();
}

// The warpgroup's part in the walks, of which a thread has kRegisters where the CTA has two: of what it
// begins with, 168 in each of three groups.
template <int kGroups, int kRegisters, typename Shared, typename Walk>
__device__ __forceinline__ void TakePart(Shared& s, Walk&& walk, const WalkMaps& maps) {
  s.Begin();
  AwaitPrevious();
  if (ssm::GroupIndex() == 0) {
    if constexpr (kGroups > 1) GiveRegisters<3 * 168 - 2 * kRegisters>();
    CopyForWalk(s, walk, maps);
  } else {
    if constexpr (kGroups > 1) TakeRegisters<kRegisters>();
    WalkBehind(s, walk);
  }
}

struct HopperWalkArgs {
  WalkArgs a;
  CUtensorMap q, k, v, y;
};
// Where keys have more than kMostKeys channels.
Status RunHalves(cudaStream_t stream, const HopperWalkArgs& given, int64_t rows);

template <int kD, typename Gate, int kGroups>
__global__ void __launch_bounds__(kWalkThreads<kGroups>, 1)
    te_gated_delta_fwd_hopper(const __grid_constant__ HopperWalkArgs given) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  extern __shared__ __align__(1024) uint8_t shared[];
  auto& s = *reinterpret_cast<HopperShared<kD, Gate, kGroups>*>(shared);
  const int group = WalkingGroup(), first = (int(blockIdx.y) * kGroups + group) * kSlab;
  using Steps = Walk<kD, kHopperStages<Gate, kGroups, false>, GroupProducts, true, Gate, kGroups>;
  TakePart<kGroups, 208>(s, Steps{given.a, s.tiles, blockIdx.z, int(blockIdx.x), first, group},
                         {&given.q, &given.k, &given.v, &given.y, nullptr});
#else
  __trap();  // compiled only for Hopper
#endif
}

}  // namespace te::delta
