// The activation of the MLP and its derivative, in x's type, straight to FP8 with a scale for each block of
// 128, in both layouts (block_tile.cuh). Bytes per element are those of te_activation_* without a wide
// result.

#include "activation/activation_block.cuh"
#include "base/finish.h"
#include "base/ops.h"

namespace te {
namespace {

TE_BLOCK_KERNELS(te_activation_block_fwd);
TE_BLOCK_KERNELS(te_activation_block_bwd);

}  // namespace

Status LaunchActivationBlockFwd(cudaStream_t stream, Arg x, Ret data, Ret data_t, Ret scale_inv,
                                Ret scale_inv_t, int64_t kind, double limit, double alpha,
                                double glu_linear_offset, bool power_2, double epsilon) {
  const char* op = "te_activation_block_fwd";
  ActivationCall of;
  TE_TRY(GetActivation(op, x, 3, kind, limit, alpha, glu_linear_offset, &of));
  BlockArgs a;
  const BlockArrays arrays{data, data_t, scale_inv, scale_inv_t, kNone};
  TE_TRY(GetBlockArgs(op, of.m, {}, of.f, arrays, power_2, epsilon, &a));
  if (!Present(x)) return {};
  return DispatchSlots(x.type, of.a, [&]<typename T, int kA>() -> Status {
    using Source = Rounded<ActivationSource<T, kA>>;
    const Source source{{Data<T>(x), a.q, of.act}};
    return LaunchBlocks(stream, te_activation_block_fwd_kernels<Source>, source, a, Aligned(source.x));
  });
}

Status LaunchActivationBlockBwd(cudaStream_t stream, Arg dy, Arg x, Ret data, Ret data_t, Ret scale_inv,
                                Ret scale_inv_t, Ret dbias, Ret dbias_parts, int64_t kind, double limit,
                                double alpha, double glu_linear_offset, bool power_2, double epsilon) {
  const char* op = "te_activation_block_bwd";
  ActivationCall of;
  TE_TRY(GetActivation(op, x, 3, kind, limit, alpha, glu_linear_offset, &of));
  TE_TRY(Expect(op, {{"dy", dy, x.type, of.m + Axes{of.f}}}));
  BlockArgs a;
  const BlockArrays arrays{data, data_t, scale_inv, scale_inv_t, dbias_parts};
  const Totals totals{kNone, kNone, dbias, kNone, kNone, dbias_parts};
  TE_TRY(GetBlockArgs(op, of.m, {of.a}, of.f, arrays, power_2, epsilon, &a));
  TE_TRY(ExpectTotals(op, Present(x), totals, {of.a, of.f}));
  if (!Present(x)) return Finish(stream, totals);
  TE_TRY(DispatchSlots(x.type, of.a, [&]<typename T, int kA>() -> Status {
    using Source = Rounded<GradientSource<T, kA>>;
    const Source source{{Data<T>(dy), Data<T>(x), a.q, of.act}};
    return LaunchBlocks(stream, te_activation_block_bwd_kernels<Source>, source, a,
                        Aligned(source.dy) && Aligned(source.x));
  }));
  return Finish(stream, totals);
}

}  // namespace te
