// Rows of x in the order of their experts, to FP8 with a scale for each block of 128 (block_tile.cuh). Groups
// begin at multiples of 128, so no block has rows of two experts. Bytes per element of the buffer in bf16: 2
// read, 2 written.

#include "base/ops.h"
#include "experts/permute.cuh"
#include "quantize/block_tile.cuh"

namespace te {
namespace {

template <typename T>
struct BlockGatherSource : GatheredRows<T> {
  using Type = T;
  using Raw = typename GatheredRows<T>::Raw;
  static constexpr int kSlots = 1, kCtas = sizeof(T) == 2 ? 2 : 1, kInFlight = kBlockRows;

  __device__ __forceinline__ void Results(const Raw& raw, Vec<T, 8> (&x)[1]) const {
    float f[8];
#pragma unroll
    for (int j = 0; j < 8; ++j) f[j] = raw.x[j] * raw.weight;
    x[0] = Round<T>(f);
  }
};

TE_BLOCK_KERNELS(te_permute_block);

}  // namespace

Status LaunchPermuteBlock(cudaStream_t stream, Arg x, Arg slots, Arg offsets, Arg weights, Ret data,
                          Ret data_t, Ret scale_inv, Ret scale_inv_t, int64_t topk, bool power_2,
                          double epsilon) {
  const char* op = "te_permute_block";
  TE_TRY(ExpectGather(op, x, slots, offsets, weights, topk));
  const int64_t m = slots.count(), n = Axes(x).last();
  BlockArgs a;
  TE_TRY(GetBlockArgs(op, {m}, {}, n, {data, data_t, scale_inv, scale_inv_t}, power_2, epsilon, &a));
  if (m == 0 || n == 0) return {};
  return DispatchFloat(x.type, [&]<typename T>() -> Status {
    const BlockGatherSource<T> source{GatheredRows<T>::Of(x, slots, offsets, weights, topk, kBlock, kBlock)};
    return LaunchBlocks<te_permute_block_kernels>(stream, source, a, Aligned(source.x));
  });
}

}  // namespace te
