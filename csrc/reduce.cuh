// Sums and maxima over a warp, over the threads of one row, over a CTA. No atomics: the order, so the result,
// is fixed.
#pragma once

#include "common.h"

namespace te {

constexpr int kMostWarps = 32;  // in a CTA

// Index of the thread's warp in a CTA whose blockDim.x is a multiple of 32, and of the thread in its warp.
__device__ __forceinline__ int WarpIndex() { return (threadIdx.y * blockDim.x + threadIdx.x) / 32; }
__device__ __forceinline__ int Lane() { return threadIdx.x % 32; }

__device__ __forceinline__ float WarpSum(float v) {
#pragma unroll
  for (int other = 16; other > 0; other /= 2) v += __shfl_xor_sync(~0u, v, other);
  return v;
}

__device__ __forceinline__ unsigned WarpMax(unsigned v) { return __reduce_max_sync(~0u, v); }

// Sums of two values over the blockDim.x threads (a multiple of 32) that share a threadIdx.y. All threads of
// the CTA take part. Calls in sequence alternate between two scratch[kMostWarps]: one barrier each is then
// enough, because whoever writes a scratch again has met all its readers at the barrier of the call between.
__device__ __forceinline__ float2 RowSum(float a, float b, float2* scratch) {
  a = WarpSum(a), b = WarpSum(b);
  const int warps = blockDim.x / 32;
  if (warps == 1) return make_float2(a, b);
  if (Lane() == 0) scratch[WarpIndex()] = make_float2(a, b);
  __syncthreads();
  const float2 mine = Lane() < warps ? scratch[threadIdx.y * warps + Lane()] : make_float2(0.f, 0.f);
  return make_float2(WarpSum(mine.x), WarpSum(mine.y));
}

__device__ __forceinline__ float RowSum(float v, float2* scratch) {
  v = WarpSum(v);
  const int warps = blockDim.x / 32;
  if (warps == 1) return v;
  if (Lane() == 0) scratch[WarpIndex()].x = v;
  __syncthreads();
  return WarpSum(Lane() < warps ? scratch[threadIdx.y * warps + Lane()].x : 0.f);
}

// The maximum over the CTA, in its first warp. scratch[kMostWarps] must not be in use.
__device__ __forceinline__ unsigned CtaMax(unsigned v, unsigned* scratch) {
  v = WarpMax(v);
  if (Lane() == 0) scratch[WarpIndex()] = v;
  __syncthreads();
  const int warps = blockDim.x * blockDim.y / 32;
  return WarpIndex() == 0 ? WarpMax(Lane() < warps ? scratch[Lane()] : 0) : 0;
}

}  // namespace te
