// The walk on Hopper: its warps are a warpgroup, whose products (wgmma) read each tile once for all of them.
#pragma once

#include "delta/delta_walk.cuh"
#include "ssm/hopper.cuh"

namespace te::delta {

// As WarpProducts, but done when they are waited for. Left factors stay as they are until then.
struct GroupProducts {
  static constexpr bool kFences = true;
  __device__ __forceinline__ static void Fence() { FenceAsync(); }
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

constexpr int kHopperStages = 3;  // a chunk takes less time than what it needs takes to come
template <int kD, typename Gate = OfHead>
using HopperShared = WalkShared<kD, kHopperStages, Gate>;

template <int kD, typename Gate>
__global__ void __launch_bounds__(kThreads, 1) te_gated_delta_fwd_hopper(const WalkArgs a) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  extern __shared__ __align__(1024) uint8_t shared[];
  auto& all = *reinterpret_cast<HopperShared<kD, Gate>*>(shared);
  static_assert(sizeof(all.stages[0]) % 1024 == 0);  // tiles of products begin at a multiple
  AwaitPrevious();
  Walk<kD, kHopperStages, GroupProducts, true, Gate>{a, all, blockIdx.z, int(blockIdx.x),
                                                     int(blockIdx.y) * kSlab}
      .Run();
#else
  __trap();  // compiled only for Hopper
#endif
}

}  // namespace te::delta
