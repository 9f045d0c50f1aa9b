// Sums and maxima over a warp, over the threads of one row, over a CTA. No atomics: the order, so the result,
// is fixed.
#pragma once

#include "base/ptx.cuh"

namespace te {

constexpr int kMostWarps = 32;  // in a CTA

// Index of the thread's warp in a CTA whose blockDim.x is a multiple of 32, and of the thread in its warp.
__device__ __forceinline__ int WarpIndex() { return (threadIdx.y * blockDim.x + threadIdx.x) / 32; }
__device__ __forceinline__ int Lane() { return threadIdx.x % 32; }

// What `take` makes of the values of kLanes neighbouring lanes, in each of them.
template <int kLanes = 32, typename T, typename Take>
__device__ __forceinline__ T OfLanes(T v, Take take) {
#pragma unroll
  for (int other = kLanes / 2; other > 0; other /= 2) v = take(v, __shfl_xor_sync(~0u, v, other));
  return v;
}

template <int kLanes = 32>
__device__ __forceinline__ float WarpSum(float v) {
  return OfLanes<kLanes>(v, [](float a, float b) { return a + b; });
}

__device__ __forceinline__ unsigned WarpMax(unsigned v) { return __reduce_max_sync(~0u, v); }
__device__ __forceinline__ unsigned WarpSumOfInts(unsigned v) { return __reduce_add_sync(~0u, v); }

// A barrier of the blockDim.x threads that share a threadIdx.y: the rows of a CTA do not wait for each other.
// A CTA has 16 barriers, of which 0 is __syncthreads': so it has at most 15 rows of more than a warp each.
__device__ __forceinline__ void RowBarrier() {
  if (blockDim.x == 32) return __syncwarp();
  NamedBarrier(threadIdx.y + 1, blockDim.x);
}

// Sums of two values over the blockDim.x threads (a multiple of 32, at most 512) that share a threadIdx.y;
// all of these call it. Calls in sequence alternate between two scratch[kMostWarps]: one barrier each is
// then enough, because whoever writes a scratch again has met all its readers at the barrier of the call
// between. One half of a warp sums a, the other b: that takes half the shuffles.
__device__ __forceinline__ float2 RowSum(float a, float b, float2* scratch) {
  const int half = Lane() / 16, warps = blockDim.x / 32;
  float v = WarpSum<16>((half ? b : a) + __shfl_xor_sync(~0u, half ? a : b, 16));
  if (warps > 1) {
    if (Lane() % 16 == 0) (half ? scratch[WarpIndex()].y : scratch[WarpIndex()].x) = v;
    RowBarrier();
    const float2* mine = scratch + threadIdx.y * warps + Lane() % 16;
    v = WarpSum<16>(Lane() % 16 < warps ? (half ? mine->y : mine->x) : 0.f);
  }
  return make_float2(__shfl_sync(~0u, v, 0), __shfl_sync(~0u, v, 16));
}

__device__ __forceinline__ float RowSum(float v, float2* scratch) {
  v = WarpSum(v);
  const int warps = blockDim.x / 32;
  if (warps == 1) return v;
  if (Lane() == 0) scratch[WarpIndex()].x = v;
  RowBarrier();
  const int lane = Lane() % 16;
  return WarpSum<16>(lane < warps ? scratch[threadIdx.y * warps + lane].x : 0.f);
}

// What of_warp makes of the values of a warp, over the CTA; the result is in its first warp. of_warp makes 0
// of zeros. scratch[kMostWarps] must not be in use.
template <typename OfWarp>
__device__ __forceinline__ unsigned OfCta(unsigned v, unsigned* scratch, OfWarp of_warp) {
  v = of_warp(v);
  if (Lane() == 0) scratch[WarpIndex()] = v;
  __syncthreads();
  const int warps = blockDim.x * blockDim.y / 32;
  return WarpIndex() == 0 ? of_warp(Lane() < warps ? scratch[Lane()] : 0) : 0;
}

__device__ __forceinline__ unsigned CtaMax(unsigned v, unsigned* scratch) {
  return OfCta(v, scratch, WarpMax);
}

}  // namespace te
