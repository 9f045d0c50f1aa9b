// The activation of the MLP and its derivative, in x's type, straight to FP8 with a scale for each block of
// 128, in both layouts (block_tile.cuh). It moves as many bytes per element as te_activation_* without a
// result in x's type.

#include "activation/activation_block.cuh"
#include "base/finish.h"
#include "base/ops.h"

namespace te {
namespace {

TE_BLOCK_KERNELS(te_activation_block_fwd);
TE_BLOCK_KERNELS(te_activation_block_bwd);

template <typename Kernels, bool kBackward>
Status Launch(cudaStream_t stream, ActivationCall<kBackward> of, const BlockArrays& arrays, bool power_2,
              double epsilon) {
  TE_TRY(of.Check(3));
  BlockArgs a;
  TE_TRY(GetBlockArgs(of.op, of.m, of.columns().Without(1), of.f, arrays, power_2, epsilon, &a));
  if (!Present(of.x)) return Finish(stream, arrays.totals);
  TE_TRY(of.Dispatch([&]<typename Source>(const Source& source) {
    return LaunchBlocks<Kernels>(stream, Rounded<Source>{source}, a, of.aligned());
  }));
  return Finish(stream, arrays.totals);
}

}  // namespace

Status LaunchActivationBlockFwd(cudaStream_t stream, Arg x, Ret data, Ret data_t, Ret scale_inv,
                                Ret scale_inv_t, int64_t kind, double limit, double alpha,
                                double glu_linear_offset, bool power_2, double epsilon) {
  const ActivationCall<false> of{
      "te_activation_block_fwd", x, kNone, {kind, limit, alpha, glu_linear_offset}};
  return Launch<te_activation_block_fwd_kernels>(stream, of, {data, data_t, scale_inv, scale_inv_t}, power_2,
                                                 epsilon);
}

Status LaunchActivationBlockBwd(cudaStream_t stream, Arg dy, Arg x, Ret data, Ret data_t, Ret scale_inv,
                                Ret scale_inv_t, Ret dbias, Ret dbias_partials, int64_t kind, double limit,
                                double alpha, double glu_linear_offset, bool power_2, double epsilon) {
  const ActivationCall<true> of{"te_activation_block_bwd", x, dy, {kind, limit, alpha, glu_linear_offset}};
  const Totals totals{.dbias = dbias, .dbias_partials = dbias_partials};
  return Launch<te_activation_block_bwd_kernels>(stream, of, {data, data_t, scale_inv, scale_inv_t, totals},
                                                 power_2, epsilon);
}

}  // namespace te
