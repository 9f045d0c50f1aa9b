// silu(x) = x * sigmoid(x) and its derivative.
#pragma once

#include "base/ptx.cuh"

namespace te {

// 1 / (1 + exp(-x)), to some ulp of x as an error of x.
__device__ __forceinline__ float Sigmoid(float x) { return Reciprocal(1.f + Exp2(-1.44269504f * x)); }

// The derivative of silu at x, from Sigmoid(x): at most 1.1, and finite where x is.
__device__ __forceinline__ float SiluSlope(float x, float sigmoid) {
  return fmaf(x, fmaf(-sigmoid, sigmoid, sigmoid), sigmoid);
}

}  // namespace te
