// The activation of the MLP and its derivative, straight to FP8 in both layouts. Bytes per element of the
// result in bf16: forward 2 read (4 where gated), 2 written; backward 4 read (3 where gated, for there are
// twice as many results), 2 written; 2 more where the result is wanted in x's type too.

#include "activation.cuh"
#include "ops.h"
#include "tile.cuh"

namespace te {
namespace {

TE_TILE_KERNELS(te_activation_fwd);
TE_TILE_KERNELS(te_activation_bwd);

}  // namespace

Status LaunchActivationFwd(cudaStream_t stream, Arg x, Arg scale, Ret y, Ret data, Ret data_t, Ret amax,
                           int64_t kind, double limit, double alpha, double glu_linear_offset) {
  const char* op = "te_activation_fwd";
  SlotAxes of;
  TE_TRY(GetSlotAxes(op, x, 2, &of));
  const TileArrays arrays{scale, "y", y, data, data_t, amax, kNone};
  TE_TRY(ExpectTiles(op, x, of.m, {of.f}, 1, arrays));
  Activation act;
  TE_TRY(MakeActivation(op, kind, of.a, limit, alpha, glu_linear_offset, &act));
  if (!Present(x)) return {};
  return DispatchSlots(x, of.a, [&]<typename T, int kA>() -> Status {
    const ActivationSource<T, kA> source{Data<T>(x), unsigned(of.f), act};
    return LaunchTiles(op, stream, te_activation_fwd_kernels<ActivationSource<T, kA>>, source,
                       Aligned(source.x), of.m.count(), of.f, arrays);
  });
}

Status LaunchActivationBwd(cudaStream_t stream, Arg dy, Arg x, Arg scale, Ret dx, Ret data, Ret data_t,
                           Ret amax, Ret dbias, int64_t kind, double limit, double alpha,
                           double glu_linear_offset) {
  const char* op = "te_activation_bwd";
  SlotAxes of;
  TE_TRY(GetSlotAxes(op, x, 2, &of));
  const TileArrays arrays{scale, "dx", dx, data, data_t, amax, dbias};
  TE_TRY(Expect(op, {{"dy", dy, x.type, of.m + Axes{of.f}}}));
  TE_TRY(ExpectTiles(op, x, of.m, {of.a, of.f}, of.a, arrays));
  Activation act;
  TE_TRY(MakeActivation(op, kind, of.a, limit, alpha, glu_linear_offset, &act));
  if (!Present(x)) return {};
  return DispatchSlots(x, of.a, [&]<typename T, int kA>() -> Status {
    const GradientSource<T, kA> source{Data<T>(dy), Data<T>(x), unsigned(of.f), act};
    return LaunchTiles(op, stream, te_activation_bwd_kernels<GradientSource<T, kA>>, source,
                       Aligned(source.dy) && Aligned(source.x), of.m.count(), of.f, arrays);
  });
}

}  // namespace te
