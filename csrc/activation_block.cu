// The activation of the MLP and its derivative, in x's type, straight to FP8 with a scale for each block of
// 128, in both layouts (block_tile.cuh). Bytes per element are those of te_activation_* without a wide
// result.

#include "activation.cuh"
#include "block_tile.cuh"
#include "ops.h"

namespace te {
namespace {

// The values of a source of activation.cuh, rounded to its type.
template <typename Source>
struct Rounded : Source {
  using T = typename Source::Type;
  // Both slots' gradients stay in registers: room for one row on its way, and of f32 for half as many
  // threads.
  static constexpr int kInFlight = Source::kSlots > 1                  ? 1
                                   : sizeof(typename Source::Raw) > 32 ? 2
                                                                       : kBlockRows;
  static constexpr int kCtas = Source::kSlots * sizeof(T) > 4 ? 1 : 2;

  __device__ __forceinline__ void Results(const typename Source::Raw& raw,
                                          Vec<T, 8> (&x)[Source::kSlots]) const {
    float f[Source::kSlots][8];
    Source::Values(raw, f);
#pragma unroll
    for (int s = 0; s < Source::kSlots; ++s) x[s] = Round<T>(f[s]);
  }
};

TE_BLOCK_KERNELS(te_activation_block_fwd);
TE_BLOCK_KERNELS(te_activation_block_bwd);

}  // namespace

Status LaunchActivationBlockFwd(cudaStream_t stream, Arg x, Ret data, Ret data_t, Ret scale_inv,
                                Ret scale_inv_t, int64_t kind, double limit, double alpha,
                                double glu_linear_offset, bool power_2, double epsilon) {
  const char* op = "te_activation_block_fwd";
  SlotAxes of;
  TE_TRY(GetSlotAxes(op, x, 3, &of));
  Activation act;
  TE_TRY(MakeActivation(op, kind, of.a, limit, alpha, glu_linear_offset, &act));
  BlockArgs a;
  const BlockArrays arrays{data, data_t, scale_inv, scale_inv_t, kNone};
  TE_TRY(GetBlockArgs(op, of.m, {}, of.f, arrays, power_2, epsilon, &a));
  if (!Present(x)) return {};
  return DispatchSlots(x, of.a, [&]<typename T, int kA>() -> Status {
    using Source = Rounded<ActivationSource<T, kA>>;
    const Source source{{Data<T>(x), a.q, act}};
    return LaunchBlocks(stream, te_activation_block_fwd_kernels<Source>, source, a, Aligned(source.x));
  });
}

Status LaunchActivationBlockBwd(cudaStream_t stream, Arg dy, Arg x, Ret data, Ret data_t, Ret scale_inv,
                                Ret scale_inv_t, Ret dbias, int64_t kind, double limit, double alpha,
                                double glu_linear_offset, bool power_2, double epsilon) {
  const char* op = "te_activation_block_bwd";
  SlotAxes of;
  TE_TRY(GetSlotAxes(op, x, 3, &of));
  TE_TRY(Expect(op, {{"dy", dy, x.type, of.m + Axes{of.f}}}));
  Activation act;
  TE_TRY(MakeActivation(op, kind, of.a, limit, alpha, glu_linear_offset, &act));
  BlockArgs a;
  const BlockArrays arrays{data, data_t, scale_inv, scale_inv_t, dbias};
  TE_TRY(GetBlockArgs(op, of.m, {of.a}, of.f, arrays, power_2, epsilon, &a));
  if (!Present(x)) return {};
  return DispatchSlots(x, of.a, [&]<typename T, int kA>() -> Status {
    using Source = Rounded<GradientSource<T, kA>>;
    const Source source{{Data<T>(dy), Data<T>(x), a.q, act}};
    return LaunchBlocks(stream, te_activation_block_bwd_kernels<Source>, source, a,
                        Aligned(source.dy) && Aligned(source.x));
  });
}

}  // namespace te
