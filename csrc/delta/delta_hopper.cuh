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

// A warpgroup fetches and writes for those that walk.
template <int kD, typename Gate = OfHead, int kGroups = 1>
struct HopperShared {
  static constexpr int kStages = kHopperStages<Gate, kGroups>;
  using Tiles = WalkShared<kD, kStages, Gate, kGroups>;
  Tiles tiles;
  alignas(8) uint64_t full[kStages], empty[kStages], y_full[1], y_empty[1];

  __device__ __forceinline__ void Begin() {
    static_assert(sizeof(tiles.stages[0]) % 1024 == 0);  // tiles of products begin at a multiple
    constexpr unsigned kOne = kWarps * ssm::kArrivals, kAll = kGroups * kOne;
    if (threadIdx.x == 0) {
      ssm::InitRing(full, empty, kOne, kAll), ssm::InitRing(y_full, y_empty, kAll, kOne);
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

// Chunks on their way to shared memory, and y from there, whose walk is the first group's.
template <typename Shared, typename Walk>
__device__ __forceinline__ void Bring(Shared& s, Walk& walk) {
  constexpr int kStages = Shared::kStages;
  for (int i = 0; i < walk.Count() + kStages; ++i) {
    if (i < walk.Count()) {
      ssm::WaitEmpty(s.empty, i);
      walk.FetchNext(i);
    }
    CommitPrefetch();
    if (i > 0 && i <= walk.Count()) {
      WaitForPrefetch<1>();
      FenceAsync();
      ssm::Release(s.full[(i - 1) % kStages]);
    }
    const int last = i - kStages;
    if (last < 0) continue;
    ssm::WaitFull(s.y_full, last);
    walk.Send(walk.To(last), walk.Rows(last));
    ssm::Release(s.y_empty[0]);
  }
}

template <typename Shared, typename Walk>
__device__ __forceinline__ void WalkBehind(Shared& s, Walk& walk) {
  walk.Begin();
  for (int i = 0; i < walk.Count(); ++i) {
    ssm::WaitFull(s.full, i);
    const auto put = [&] {
      ssm::WaitEmpty(s.y_empty, i);
      walk.PutY();
      ssm::Release(s.y_full[0]);
    };
    walk.Next(i, [] {}, put);
    ssm::Release(s.empty[i % Shared::kStages]);
  }
  walk.End();
}

// The warpgroup's part in the walks, of which a thread has kRegisters where the CTA has two: of what it
// begins with, 168 in each of three groups.
template <int kGroups, int kRegisters, typename Shared, typename Walk>
__device__ __forceinline__ void TakePart(Shared& s, Walk&& walk) {
  s.Begin();
  AwaitPrevious();
  if (ssm::GroupIndex() == 0) {
    if constexpr (kGroups > 1) GiveRegisters<3 * 168 - 2 * kRegisters>();
    Bring(s, walk);
  } else {
    if constexpr (kGroups > 1) TakeRegisters<kRegisters>();
    WalkBehind(s, walk);
  }
}

template <int kD, typename Gate, int kGroups>
__global__ void __launch_bounds__(kWalkThreads<kGroups>, 1) te_gated_delta_fwd_hopper(const WalkArgs a) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  extern __shared__ __align__(1024) uint8_t shared[];
  auto& s = *reinterpret_cast<HopperShared<kD, Gate, kGroups>*>(shared);
  const int group = WalkingGroup(), first = (int(blockIdx.y) * kGroups + group) * kSlab;
  using Steps = Walk<kD, kHopperStages<Gate, kGroups>, GroupProducts, true, Gate, kGroups>;
  TakePart<kGroups, 208>(s, Steps{a, s.tiles, blockIdx.z, int(blockIdx.x), first, group});
#else
  __trap();  // compiled only for Hopper
#endif
}

}  // namespace te::delta
