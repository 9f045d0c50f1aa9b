// Instructions that CUDA C++ has no name for. They stand here alone, so that a build without nvcc
// (tests/host_cuda) can put its own in their place.
#pragma once

namespace te {

// 2^x: 2 ulp. 1 / x: 1 ulp. Both take subnormals for 0.
__device__ __forceinline__ float Exp2(float x) {
  asm("ex2.approx.ftz.f32 %0, %0;" : "+f"(x));
  return x;
}
__device__ __forceinline__ float Reciprocal(float x) {
  asm("rcp.approx.ftz.f32 %0, %0;" : "+f"(x));
  return x;
}

// NaN where a or b is; one instruction.
__device__ __forceinline__ float MaxNan(float a, float b) {
  asm("max.NaN.f32 %0, %0, %1;" : "+f"(a) : "f"(b));
  return a;
}
__device__ __forceinline__ float MinNan(float a, float b) {
  asm("min.NaN.f32 %0, %0, %1;" : "+f"(a) : "f"(b));
  return a;
}

}  // namespace te
