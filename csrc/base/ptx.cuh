// Instructions that CUDA C++ has no name for. They stand only here and in ptx_hopper.cuh, so that a build
// without nvcc (tests/host_cuda) can replace them.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

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

// Barrier `index` (1 to 15; 0 is __syncthreads') of `threads` threads of a CTA.
__device__ __forceinline__ void NamedBarrier(unsigned index, unsigned threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(index), "r"(threads) : "memory");
}

// Shared memory by its 32-bit address. The compiler takes many instructions more for generic pointers, and
// the kernels of norms issue about as many instructions as they can while they wait for memory.
__device__ __forceinline__ uint4 LoadShared16(uint32_t address) {
  uint4 v;
  asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "r"(address));
  return v;
}
__device__ __forceinline__ void StoreShared(uint32_t address, float a, float b, float c, float d) {
  asm volatile("st.shared.v4.f32 [%0], {%1, %2, %3, %4};" ::"r"(address), "f"(a), "f"(b), "f"(c), "f"(d)
               : "memory");
}

// 16 bytes, if `inside`, on their way to shared memory until WaitForPrefetch.
__device__ __forceinline__ void Prefetch16(uint32_t address, const uint4* p, bool inside) {
  asm volatile(
      "{\n.reg .pred inside;\nsetp.ne.b32 inside, %2, 0;\n"
      "@inside cp.async.cg.shared.global [%0], [%1], 16;\n}" ::"r"(address),
      "l"(p), "r"(int(inside))
      : "memory");
}
// The same to a pointer; zeros if not `inside`.
__device__ __forceinline__ void PrefetchOrZero16(void* shared, const void* p, bool inside) {
  asm volatile(
      "cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(uint32_t(__cvta_generic_to_shared(shared))),
      "l"(p), "r"(inside ? 16 : 0)
      : "memory");
}
__device__ __forceinline__ void CommitPrefetch() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// All but the last kPending committed groups of the thread have arrived.
template <int kPending>
__device__ __forceinline__ void WaitForPrefetch() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}

// A kernel lets the next one on the stream start before it is over, once all its CTAs have said so, where the
// next one is launched so (finish.cu); the next one awaits the end of the first, and what it wrote. Both do
// nothing on GPUs before Hopper.
__device__ __forceinline__ void LetNextStart() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}
__device__ __forceinline__ void AwaitPrevious() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// On the tensor cores, with words of two numbers: d += A [16, 16] times B [16, 8].
#define TE_MMA(type)                                                         \
  asm("mma.sync.aligned.m16n8k16.row.col.f32." type "." type                 \
      ".f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};" \
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])                       \
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1))
template <bool kHalf>
__device__ __forceinline__ void MultiplyAdd(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  if constexpr (kHalf)
    TE_MMA("f16");
  else
    TE_MMA("bf16");
}
#undef TE_MMA

// Four matrices of 8 x 8 numbers of 16 bits from shared memory: lane 8 i + r has the address of row r of
// matrix i, and of each matrix a lane gets a word: two neighbours in row lane / 4, from column 2 * (lane % 4)
// on; or, if kTransposed, in column lane / 4, from row 2 * (lane % 4) on.
template <bool kTransposed>
__device__ __forceinline__ void LoadMatrices(uint32_t (&words)[4], const void* row) {
  const auto address = uint32_t(__cvta_generic_to_shared(row));
  if constexpr (kTransposed)
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(words[0]), "=r"(words[1]), "=r"(words[2]), "=r"(words[3])
                 : "r"(address)
                 : "memory");
  else
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(words[0]), "=r"(words[1]), "=r"(words[2]), "=r"(words[3])
                 : "r"(address)
                 : "memory");
}

}  // namespace te
