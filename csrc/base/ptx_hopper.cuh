// Hopper's instructions (sm_90a) for products of tiles: barriers in shared memory, copies of tiles by tensor
// maps (TMA), and warpgroup products (wgmma). Addresses are 32-bit addresses of shared memory.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

namespace te {

// ---- barriers in shared memory ----

__device__ __forceinline__ void InitBarrier(uint32_t barrier, unsigned arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}
// What was initialized is seen by copies, and by the other CTAs of the cluster after they meet.
__device__ __forceinline__ void FenceBarrierInit() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}
// Waits for the end of the barrier's phase of this parity.
__device__ __forceinline__ void WaitBarrier(uint32_t barrier, unsigned parity) {
  asm volatile(
      "{\n.reg .pred done;\nAGAIN:\n"
      "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
      "@!done bra AGAIN;\n}" ::"r"(barrier),
      "r"(parity)
      : "memory");
}
// One arrival, and `bytes` more that copies are to bring in this phase.
__device__ __forceinline__ void ArriveExpecting(uint32_t barrier, unsigned bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes)
               : "memory");
}
// One arrival at the barrier that lies at this address in CTA `rank` of the cluster. Without
// `.release.cluster`, which becomes a MEMBAR.ALL.GPU in every step: what was read before has been waited for,
// and nothing was written but what products behind a FenceAsync have read.
__device__ __forceinline__ void ArriveAt(uint32_t barrier, unsigned rank) {
  asm volatile(
      "{\n.reg .b32 there;\nmapa.shared::cluster.u32 there, %0, %1;\n"
      "mbarrier.arrive.shared::cluster.b64 _, [there];\n}" ::"r"(barrier),
      "r"(rank)
      : "memory");
}

// One arrival at a barrier of this CTA, behind what the thread did.
__device__ __forceinline__ void Arrive(uint32_t barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}

// A word to this address in CTA `rank` of the cluster; the barrier there hears of its 4 bytes.
__device__ __forceinline__ void StoreAt(uint32_t to, int word, uint32_t barrier, unsigned rank) {
  asm volatile(
      "{\n.reg .b32 there, hears;\nmapa.shared::cluster.u32 there, %0, %3;\n"
      "mapa.shared::cluster.u32 hears, %2, %3;\n"
      "st.async.shared::cluster.mbarrier::complete_tx::bytes.b32 [there], %1, [hears];\n}" ::"r"(to),
      "r"(word), "r"(barrier), "r"(rank)
      : "memory");
}

// 16 bytes at this address in CTA `rank` of the cluster.
__device__ __forceinline__ float4 LoadAt(uint32_t from, unsigned rank) {
  float4 v;
  asm volatile(
      "{\n.reg .b32 there;\nmapa.shared::cluster.u32 there, %4, %5;\n"
      "ld.shared::cluster.v4.f32 {%0, %1, %2, %3}, [there];\n}"
      : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w)
      : "r"(from), "r"(rank)
      : "memory");
  return v;
}

__device__ __forceinline__ unsigned ClusterRank() {
  unsigned rank;
  asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
}
__device__ __forceinline__ void SyncCluster() {
  asm volatile("barrier.cluster.arrive.release;\nbarrier.cluster.wait.acquire;" ::: "memory");
}
// ---- registers of the threads of a warpgroup ----

template <int kRegisters>
__device__ __forceinline__ void GiveRegisters() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
}
template <int kRegisters>
__device__ __forceinline__ void TakeRegisters() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

// ---- copies into shared memory ----

__device__ __forceinline__ void PrefetchMap(const void* map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}
// The box of a tensor map at (x, y, z), x along the innermost axis; zeros beyond the tensor.
__device__ __forceinline__ void CopyBox(uint32_t to, const void* map, uint32_t barrier, int x, int y, int z) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5}], "
      "[%2];" ::"r"(to),
      "l"(map), "r"(barrier), "r"(x), "r"(y), "r"(z)
      : "memory");
}
// The box of a map of four axes at (x, y, z, w), x along the innermost axis.
__device__ __forceinline__ void CopyBox(uint32_t to, const void* map, uint32_t barrier, int x, int y, int z,
                                        int w) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5, "
      "%6}], [%2];" ::"r"(to),
      "l"(map), "r"(barrier), "r"(x), "r"(y), "r"(z), "r"(w)
      : "memory");
}
// The same to this address in all CTAs of the cluster whose bit of `ranks` is set; their barriers hear of it.
__device__ __forceinline__ void CopyBoxTo(unsigned ranks, uint32_t to, const void* map, uint32_t barrier,
                                          int x, int y, int z) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster [%0], "
      "[%1, {%3, %4, %5}], [%2], %6;" ::"r"(to),
      "l"(map), "r"(barrier), "r"(x), "r"(y), "r"(z), "h"(uint16_t(ranks))
      : "memory");
}
__device__ __forceinline__ void CopyBoxTo(unsigned ranks, uint32_t to, const void* map, uint32_t barrier,
                                          int x, int y, int z, int w) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster [%0], "
      "[%1, {%3, %4, %5, %6}], [%2], %7;" ::"r"(to),
      "l"(map), "r"(barrier), "r"(x), "r"(y), "r"(z), "r"(w), "h"(uint16_t(ranks))
      : "memory");
}
// `bytes`, a multiple of 16, from and to addresses aligned to 16.
__device__ __forceinline__ void CopyBytes(uint32_t to, const void* from, unsigned bytes, uint32_t barrier) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(to),
      "l"(from), "r"(bytes), "r"(barrier)
      : "memory");
}

// ---- copies out of shared memory ----

// The box of a tensor map at (x, y, z), laid out as CopyBox brings it; what lies beyond the tensor is not
// written. What threads wrote into it is seen behind a FenceAsync of theirs, or of this one, where a barrier
// has told it of that.
__device__ __forceinline__ void StoreBox(const void* map, uint32_t from, int x, int y, int z) {
  asm volatile("cp.async.bulk.tensor.3d.global.shared::cta.bulk_group [%0, {%2, %3, %4}], [%1];" ::"l"(map),
               "r"(from), "r"(x), "r"(y), "r"(z)
               : "memory");
}
__device__ __forceinline__ void StoreBox(const void* map, uint32_t from, int x, int y, int z, int w) {
  asm volatile(
      "cp.async.bulk.tensor.4d.global.shared::cta.bulk_group [%0, {%2, %3, %4, %5}], [%1];" ::"l"(map),
      "r"(from), "r"(x), "r"(y), "r"(z), "r"(w)
      : "memory");
}
__device__ __forceinline__ void CommitStores() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }
// Until what this thread stores has been read from shared memory; until it has been written, too.
__device__ __forceinline__ void WaitForReads() {
  asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory");
}
__device__ __forceinline__ void WaitForStores() { asm volatile("cp.async.bulk.wait_group 0;" ::: "memory"); }

// ---- shared memory ----

// Copies and products that follow see what this thread wrote into its CTA's shared memory.
__device__ __forceinline__ void FenceAsync() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// Four 8 x 8 matrices of 16-bit numbers from their registers, or their transposes; lane l has the address of
// row l % 8 of l / 8.
template <bool kTransposed = false>
__device__ __forceinline__ void StoreMatrices(uint32_t address, uint32_t a, uint32_t b, uint32_t c,
                                              uint32_t d) {
  if constexpr (kTransposed)
    asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address),
                 "r"(a), "r"(b), "r"(c), "r"(d)
                 : "memory");
  else
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(a),
                 "r"(b), "r"(c), "r"(d)
                 : "memory");
}
__device__ __forceinline__ float2 LoadShared8(uint32_t address) {
  float2 v;
  asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];" : "=f"(v.x), "=f"(v.y) : "r"(address));
  return v;
}

// x in a register: else a loop reads where it comes from anew in each step.
__device__ __forceinline__ int Kept(int x) {
  asm volatile("" : "+r"(x));
  return x;
}
// ---- products of a warpgroup ----

// The types of the factors, of the left one first.
enum class Factors { kE4M3, kE4M3E5M2, kE5M2E4M3, kBF16, kF16 };

// Between registers that were written and the first product that adds to them; behind the last product of a
// batch; until no more than kPending batches are under way.
__device__ __forceinline__ void BeginProducts() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void CommitProducts() {
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}
template <int kPending>
__device__ __forceinline__ void WaitForProducts() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
}

// The compiler moves no use of d to before this point: products write it behind its back.
template <int kCount>
__device__ __forceinline__ void Settle(float (&d)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) asm volatile("" : "+f"(d[i])::"memory");
}

// d = A [64, k] times B [N, k] transposed, plus d where `adds`; k is 32 bytes. d holds of rows lane / 4 and +
// 8 of each warp's 16 the columns 8 j + lane % 4 * 2 and + 1: d[4 j], d[4 j + 1]; d[4 j + 2], d[4 j + 3]. a,
// b: descriptors of tiles; numbers of 16 bits lie along k or across it.
#define TE_D8(i)                                                                              \
  "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3]), "+f"(d[i + 4]), "+f"(d[i + 5]), \
      "+f"(d[i + 6]), "+f"(d[i + 7])
#define TE_NAMES32                                                         \
  "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, " \
  "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define TE_NAMES_TO_64                                                               \
  "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, " \
  "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
#define TE_WGMMA_N256(form, more)                                                                        \
  asm volatile(                                                                                          \
      "{\n.reg .pred adds;\nsetp.ne.b32 adds, %130, 0;\n"                                                \
      "wgmma.mma_async.sync.aligned.m64n256" form                                                        \
      " {"                                                                                               \
      "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "                           \
      "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "                 \
      "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "                 \
      "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63, "                 \
      "%64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, "                 \
      "%80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95, "                 \
      "%96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111, "     \
      "%112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, %127}"  \
      ", %128, %129, adds, 1, 1" more ";\n}"                                                             \
      : TE_D8(0), TE_D8(8), TE_D8(16), TE_D8(24), TE_D8(32), TE_D8(40), TE_D8(48), TE_D8(56), TE_D8(64), \
        TE_D8(72), TE_D8(80), TE_D8(88), TE_D8(96), TE_D8(104), TE_D8(112), TE_D8(120)                   \
      : "l"(a), "l"(b), "r"(adds), "n"(int(kLeftAcross)), "n"(int(kRightAcross)))
#define TE_WGMMA_N128(form)                                                                  \
  asm volatile(                                                                              \
      "{\n.reg .pred adds;\nsetp.ne.b32 adds, %66, 0;\n"                                     \
      "wgmma.mma_async.sync.aligned.m64n128" form                                            \
      " {"                                                                                   \
      "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "               \
      "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "     \
      "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "     \
      "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63}"      \
      ", %64, %65, adds, 1, 1;\n}"                                                           \
      : TE_D8(0), TE_D8(8), TE_D8(16), TE_D8(24), TE_D8(32), TE_D8(40), TE_D8(48), TE_D8(56) \
      : "l"(a), "l"(b), "r"(adds))
template <Factors kFactors, bool kLeftAcross, bool kRightAcross>
__device__ __forceinline__ void MultiplyTiles(float (&d)[128], uint64_t a, uint64_t b, int adds) {
  if constexpr (kFactors == Factors::kE4M3)
    TE_WGMMA_N256("k32.f32.e4m3.e4m3", "");
  else if constexpr (kFactors == Factors::kE4M3E5M2)
    TE_WGMMA_N256("k32.f32.e4m3.e5m2", "");
  else if constexpr (kFactors == Factors::kE5M2E4M3)
    TE_WGMMA_N256("k32.f32.e5m2.e4m3", "");
  else if constexpr (kFactors == Factors::kBF16)
    TE_WGMMA_N256("k16.f32.bf16.bf16", ", %131, %132");
  else
    TE_WGMMA_N256("k16.f32.f16.f16", ", %131, %132");
}
// Only for FP8.
template <Factors kFactors>
__device__ __forceinline__ void MultiplyTiles(float (&d)[64], uint64_t a, uint64_t b, int adds) {
  static_assert(kFactors != Factors::kBF16 && kFactors != Factors::kF16);
  if constexpr (kFactors == Factors::kE4M3)
    TE_WGMMA_N128("k32.f32.e4m3.e4m3");
  else if constexpr (kFactors == Factors::kE4M3E5M2)
    TE_WGMMA_N128("k32.f32.e4m3.e5m2");
  else
    TE_WGMMA_N128("k32.f32.e5m2.e4m3");
}
// Only for bf16.
template <Factors kFactors, bool kLeftAcross, bool kRightAcross>
__device__ __forceinline__ void MultiplyTiles(float (&d)[32], uint64_t a, uint64_t b, int adds) {
  static_assert(kFactors == Factors::kBF16);
  asm volatile(
      "{\n.reg .pred adds;\nsetp.ne.b32 adds, %34, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {" TE_NAMES32
      "}, %32, %33, adds, 1, 1, %35, %36;\n}"
      : TE_D8(0), TE_D8(8), TE_D8(16), TE_D8(24)
      : "l"(a), "l"(b), "r"(adds), "n"(int(kLeftAcross)), "n"(int(kRightAcross)));
}
// d += A [64, 16] times B [N, 16] transposed, of bf16; a: two neighbours each of A's rows lane / 4 and + 8,
// columns lane % 4 * 2, then 8 further. They stay as they are until the product has been waited for.
template <bool kRightAcross>
__device__ __forceinline__ void MultiplyRows(float (&d)[32], const uint32_t (&a)[4], uint64_t b,
                                             int adds = 1) {
  asm volatile(
      "{\n.reg .pred adds;\nsetp.ne.b32 adds, %38, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {" TE_NAMES32
      "}, {%32, %33, %34, %35}, %36, adds, 1, 1, %37;\n}"
      : TE_D8(0), TE_D8(8), TE_D8(16), TE_D8(24)
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "n"(int(kRightAcross)), "r"(adds));
}
template <bool kRightAcross>
__device__ __forceinline__ void MultiplyRows(float (&d)[64], const uint32_t (&a)[4], uint64_t b,
                                             int adds = 1) {
  asm volatile(
      "{\n.reg .pred adds;\nsetp.ne.b32 adds, %70, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 {" TE_NAMES32 ", " TE_NAMES_TO_64
      "}, {%64, %65, %66, %67}, %68, adds, 1, 1, %69;\n}"
      : TE_D8(0), TE_D8(8), TE_D8(16), TE_D8(24), TE_D8(32), TE_D8(40), TE_D8(48), TE_D8(56)
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "n"(int(kRightAcross)), "r"(adds));
}
#undef TE_NAMES_TO_64
#undef TE_NAMES32
#undef TE_WGMMA_N128
#undef TE_WGMMA_N256
#undef TE_D8

}  // namespace te
