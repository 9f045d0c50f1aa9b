// Instructions that CUDA C++ has no name for. They stand here alone, so that a build without nvcc
// (tests/host_cuda) can put its own in their place.
#pragma once

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

// In one access: from C++ the compiler makes four of it where it has the words in registers.
__device__ __forceinline__ void StoreGlobal16(void* p, uint32_t a, uint32_t b, uint32_t c, uint32_t d) {
  asm volatile("st.global.v4.b32 [%0], {%1, %2, %3, %4};" ::"l"(p), "r"(a), "r"(b), "r"(c), "r"(d)
               : "memory");
}

// Shared memory by its 32-bit address. The compiler takes many instructions more for generic pointers, and
// the kernels of norms issue about as many instructions as they can while they wait for memory.
__device__ __forceinline__ uint32_t SharedAddress(const void* p) { return __cvta_generic_to_shared(p); }

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
__device__ __forceinline__ void Prefetch16(uint32_t address, const void* p, bool inside) {
  asm volatile(
      "{\n.reg .pred inside;\nsetp.ne.b32 inside, %2, 0;\n"
      "@inside cp.async.cg.shared.global [%0], [%1], 16;\n}" ::"r"(address),
      "l"(p), "r"(int(inside))
      : "memory");
}
__device__ __forceinline__ void CommitPrefetch() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// All but the last `pending` (0 .. 3) committed groups of the thread have arrived.
__device__ __forceinline__ void WaitForPrefetch(int pending) {
  switch (pending) {
    case 0:
      asm volatile("cp.async.wait_group 0;" ::: "memory");
      break;
    case 1:
      asm volatile("cp.async.wait_group 1;" ::: "memory");
      break;
    case 2:
      asm volatile("cp.async.wait_group 2;" ::: "memory");
      break;
    default:
      asm volatile("cp.async.wait_group 3;" ::: "memory");
  }
}

// A barrier of `threads` threads of the CTA, whole warps. __syncthreads is the one of id 0.
__device__ __forceinline__ void NamedBarrier(int id, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

// The barrier of all threads of a cluster in two halves. Its fence waits for all stores that are on their
// way, so it is no barrier for a loop. Before sm_90 a CTA is alone.
__device__ __forceinline__ void ClusterArrive() {
#if __CUDA_ARCH__ >= 900
  asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
#endif
}
__device__ __forceinline__ void ClusterWait() {
#if __CUDA_ARCH__ >= 900
  asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
#else
  __syncthreads();
#endif
}

// Messages between the CTAs of a cluster, counted in bytes by an mbarrier at the receiver's end. One thread
// says once for every round how many bytes come (before or after they do); all wait for round 0, 1, ..
__device__ __forceinline__ void InitMessages(uint32_t barrier) {  // ClusterArrive is to follow
#if __CUDA_ARCH__ >= 900
  asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;\nfence.mbarrier_init.release.cluster;" ::"r"(barrier)
               : "memory");
#endif
}
__device__ __forceinline__ void ExpectMessages(uint32_t barrier, int bytes) {
#if __CUDA_ARCH__ >= 900
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes)
               : "memory");
#endif
}
__device__ __forceinline__ void WaitForMessages(uint32_t barrier, int round) {
#if __CUDA_ARCH__ >= 900
  asm volatile(
      "{\n.reg .pred done;\nwait:\n"
      "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n@!done bra wait;\n}" ::"r"(barrier),
      "r"(round & 1)
      : "memory");
#else
  __syncthreads();
#endif
}
// To `address` in the CTA of that rank in the cluster.
__device__ __forceinline__ void SendMessage(uint32_t address, uint32_t barrier, int cta, float2 v) {
#if __CUDA_ARCH__ >= 900
  asm volatile(
      "{\n.reg .b32 to, at;\nmapa.shared::cluster.u32 to, %0, %2;\nmapa.shared::cluster.u32 at, %1, %2;\n"
      "st.async.shared::cluster.mbarrier::complete_tx::bytes.v2.f32 [to], {%3, %4}, [at];\n}" ::"r"(address),
      "r"(barrier), "r"(cta), "f"(v.x), "f"(v.y)
      : "memory");
#else
  asm volatile("st.shared.v2.f32 [%0], {%1, %2};" ::"r"(address), "f"(v.x), "f"(v.y) : "memory");
#endif
}

}  // namespace te
