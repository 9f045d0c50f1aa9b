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

}  // namespace

Status LaunchActivationFwd(cudaStream_t stream, Arg x, Arg scale, Ret y, Ret data, Ret data_t, Ret amax,
                           Ret scale_inv, Ret amax_parts, int64_t kind, double limit, double alpha,
                           double glu_linear_offset) {
  const char* op = "te_activation_fwd";
  ActivationCall of;
  TE_TRY(GetActivation(op, x, 2, kind, limit, alpha, glu_linear_offset, &of));
  const TileArrays arrays{scale, "y", y, data, data_t, amax_parts, kNone};
  const Totals totals{scale, amax, kNone, scale_inv, amax_parts, kNone};
  TE_TRY(ExpectTiles(op, x, of.m, {of.f}, 1, arrays));
  TE_TRY(ExpectTotals(op, Present(x), totals, {}));
  if (!Present(x)) return Finish(stream, totals);
  TE_TRY(DispatchSlots(x.type, of.a, [&]<typename T, int kA>() -> Status {
    const ActivationSource<T, kA> source{Data<T>(x), unsigned(of.f), of.act};
    return LaunchTiles(op, stream, te_activation_fwd_kernels<ActivationSource<T, kA>>, source,
                       Aligned(source.x), of.m.count(), of.f, arrays);
  }));
  return Finish(stream, totals);
}

Status LaunchActivationBwd(cudaStream_t stream, Arg dy, Arg x, Arg scale, Ret dx, Ret data, Ret data_t,
                           Ret amax, Ret dbias, Ret scale_inv, Ret amax_parts, Ret dbias_parts, int64_t kind,
                           double limit, double alpha, double glu_linear_offset) {
  const char* op = "te_activation_bwd";
  ActivationCall of;
  TE_TRY(GetActivation(op, x, 2, kind, limit, alpha, glu_linear_offset, &of));
  const Axes slots{of.a, of.f};
  const TileArrays arrays{scale, "dx", dx, data, data_t, amax_parts, dbias_parts};
  const Totals totals{scale, amax, dbias, scale_inv, amax_parts, dbias_parts};
  TE_TRY(Expect(op, {{"dy", dy, x.type, of.m + Axes{of.f}}}));
  TE_TRY(ExpectTiles(op, x, of.m, slots, of.a, arrays));
  TE_TRY(ExpectTotals(op, Present(x), totals, slots));
  if (!Present(x)) return Finish(stream, totals);
  TE_TRY(DispatchSlots(x.type, of.a, [&]<typename T, int kA>() -> Status {
    const GradientSource<T, kA> source{Data<T>(dy), Data<T>(x), unsigned(of.f), of.act};
    return LaunchTiles(op, stream, te_activation_bwd_kernels<GradientSource<T, kA>>, source,
                       Aligned(source.dy) && Aligned(source.x), of.m.count(), of.f, arrays);
  }));
  return Finish(stream, totals);
}

}  // namespace te
