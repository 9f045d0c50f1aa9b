// The activation of the MLP and its derivative, straight to FP8 in both layouts. Bytes per element of the
// result in bf16: forward 2 read (4 where gated), 2 written; backward 4 read (3 where gated, for there are
// twice as many results), 2 written; 2 more where the result is wanted in x's type too.

#include "activation/activation.cuh"
#include "base/finish.h"
#include "base/ops.h"
#include "quantize/tile.cuh"

namespace te {
namespace {

TE_TILE_KERNELS(te_activation_fwd);
TE_TILE_KERNELS(te_activation_bwd);

template <typename Kernels, bool kBackward>
Status Launch(cudaStream_t stream, ActivationCall<kBackward> of, const TileArrays& arrays) {
  TE_TRY(of.Check(2));
  TE_TRY(ExpectTiles(of.op, of.x, of.m, of.columns(), of.slots(), arrays));
  if (!Present(of.x)) return Finish(stream, arrays.totals);
  TE_TRY(of.Dispatch([&](const auto& source) {
    return LaunchTiles<Kernels>(of.op, stream, source, of.aligned(), of.m.count(), of.f, arrays);
  }));
  return Finish(stream, arrays.totals);
}

}  // namespace

Status LaunchActivationFwd(cudaStream_t stream, Arg x, Arg scale, Ret y, Ret data, Ret data_t, Ret amax,
                           Ret scale_inv, Ret amax_partials, int64_t kind, double limit, double alpha,
                           double glu_linear_offset) {
  const ActivationCall<false> of{"te_activation_fwd", x, kNone, {kind, limit, alpha, glu_linear_offset}};
  const Totals totals{scale, amax, kNone, scale_inv, amax_partials};
  return Launch<te_activation_fwd_kernels>(stream, of, {totals, data, data_t, "y", y});
}

Status LaunchActivationBwd(cudaStream_t stream, Arg dy, Arg x, Arg scale, Ret dx, Ret data, Ret data_t,
                           Ret amax, Ret dbias, Ret scale_inv, Ret amax_partials, Ret dbias_partials,
                           int64_t kind, double limit, double alpha, double glu_linear_offset) {
  const ActivationCall<true> of{"te_activation_bwd", x, dy, {kind, limit, alpha, glu_linear_offset}};
  const Totals totals{scale, amax, dbias, scale_inv, amax_partials, dbias_partials};
  return Launch<te_activation_bwd_kernels>(stream, of, {totals, data, data_t, "dx", dx});
}

}  // namespace te
