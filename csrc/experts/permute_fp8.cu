// Rows of x, which is in E4M3 itself, in the order of their experts, to FP8 in both layouts: of this device
// or of several, whose memory is read as if it were one's own. Bytes per element of the buffer: 1 read, 2
// written.
#include "base/finish.h"
#include "base/ops.h"
#include "experts/permute.cuh"
#include "quantize/tile.cuh"

namespace te {
namespace {

struct Fp8GatherSource : GatheredFp8 {
  using Type = __nv_bfloat16;
  static constexpr int kSlots = 1, kCtas = 4, kWindow = 4;
  static constexpr bool kSums = false;

  __device__ __forceinline__ void Values(const Raw& raw, float (&f)[1][8]) const {
#pragma unroll
    for (int j = 0; j < 8; ++j) f[0][j] = raw.x[j] * raw.weight;
  }
};

TE_TILE_KERNELS(te_permute_fp8);

__global__ void te_address(const void* p, uint64_t* address) { *address = reinterpret_cast<uint64_t>(p); }

}  // namespace

Status LaunchPermuteFp8(cudaStream_t stream, Arg x, Arg scales, Arg slots, Arg offsets, Arg weights,
                        Arg addresses, Arg scale, Ret rows, Ret data, Ret data_t, Ret amax, Ret amax_partials,
                        int64_t topk) {
  const char* op = "te_permute_fp8";
  TE_TRY(ExpectGatherFp8(op, x, scales, slots, offsets, weights, addresses, topk));
  const int64_t m = slots.count(), n = Axes(x).last();
  const TileArrays arrays{{scale, amax, kNone, kNone, amax_partials}, data, data_t, "rows", rows};
  const Tensor in_bf16{nullptr, BF16, &kNoElements, 1};
  TE_TRY(ExpectTiles(op, in_bf16, {m}, {n}, 1, arrays));
  if (m == 0 || n == 0) return Finish(stream, arrays.totals);
  const Fp8GatherSource source{
      GatheredFp8::Of(x, scales, slots, offsets, weights, addresses, topk, kTileRows, kTileColumns)};
  TE_TRY(LaunchTiles<te_permute_fp8_kernels>(op, stream, source, Aligned(source.x), m, n, arrays));
  return Finish(stream, arrays.totals);
}

// The result is where the operand is but where XLA fuses the call with a slice of a stack that it reads or
// writes, whatever is said of aliases.
static Status CopyUnlessSame(const char* op, cudaStream_t stream, const Tensor& a, const Tensor& same) {
  TE_TRY(Expect(op, {{"same", same, a.type, Axes(a)}}));
  if (a.data != same.data && Present(a))
    TE_CUDA(cudaMemcpyAsync(same.data, a.data, size_t(a.bytes()), cudaMemcpyDeviceToDevice, stream));
  return {};
}

Status LaunchAddress(cudaStream_t stream, Arg a, Ret same, Ret address) {
  const char* op = "te_address";
  TE_TRY(Expect(op, {{"address", address, U32, {2}, kOptional}}));
  TE_TRY(CopyUnlessSame(op, stream, a, same));
  if (!Present(address)) return {};
  te_address<<<1, 1, 0, stream>>>(same.data, Data<uint64_t>(address));
  TE_LAUNCHED();
}

Status LaunchKeep(cudaStream_t stream, Arg y, Arg, Arg, Ret same) {
  return CopyUnlessSame("te_keep", stream, y, same);
}

}  // namespace te
