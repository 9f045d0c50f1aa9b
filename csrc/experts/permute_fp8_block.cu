// As te_permute_block, of x that is in E4M3 itself. Bytes per element of the buffer: 1 read, 2 written.

#include "base/ops.h"
#include "experts/permute.cuh"
#include "quantize/block_tile.cuh"

namespace te {
namespace {

struct Fp8BlockGatherSource : GatheredFp8 {
  using Type = __nv_bfloat16;
  static constexpr int kSlots = 1, kCtas = 2, kInFlight = kBlockRows;

  __device__ __forceinline__ void Results(const Raw& raw, Vec<Type, 8> (&x)[1]) const {
    float f[8];
#pragma unroll
    for (int j = 0; j < 8; ++j) f[j] = raw.x[j] * raw.weight;
    x[0] = Round<Type>(f);
  }
};

TE_BLOCK_KERNELS(te_permute_fp8_block);

}  // namespace

Status LaunchPermuteFp8Block(cudaStream_t stream, Arg x, Arg scales, Arg slots, Arg offsets, Arg weights,
                             Arg addresses, Ret data, Ret data_t, Ret scale_inv, Ret scale_inv_t,
                             int64_t topk, bool power_2, double epsilon) {
  const char* op = "te_permute_fp8_block";
  TE_TRY(ExpectGatherFp8(op, x, scales, slots, offsets, weights, addresses, topk));
  const int64_t m = slots.count(), n = Axes(x).last();
  BlockArgs a;
  TE_TRY(GetBlockArgs(op, {m}, {}, n, {data, data_t, scale_inv, scale_inv_t}, power_2, epsilon, &a));
  if (m == 0 || n == 0) return {};
  const Fp8BlockGatherSource source{
      GatheredFp8::Of(x, scales, slots, offsets, weights, addresses, topk, kBlock, kBlock)};
  return LaunchBlocks<te_permute_fp8_block_kernels>(stream, source, a, Aligned(source.x));
}

}  // namespace te
