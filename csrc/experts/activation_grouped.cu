// The activation of the MLP and its derivative over rows in groups, to FP8 in both layouts with a scale for
// each expert. Bytes per element as of activation.cu, of the rows that belong to groups.

#include "activation/activation.cuh"
#include "base/ops.h"
#include "experts/groups.cuh"
#include "quantize/tile.cuh"

namespace te {
namespace {

TE_TILE_KERNELS(te_activation_grouped_fwd);
TE_TILE_KERNELS(te_activation_grouped_bwd);

// What the two ops' calls have besides x and dy.
struct GroupedCall {
  const char* op;
  Tensor offsets, counts, bias, scale;
  const char* wide_name;
  Tensor wide, data, data_t, amax, dbias, workspace;
};

// Runs launch(groups, arrays) for results [m, columns], its statistics in the workspace, and then makes those
// of experts.
template <typename Launch>
Status LaunchGrouped(cudaStream_t stream, const ActivationCall& of, Type type, const Axes& columns,
                     const GroupedCall& b, Launch&& launch) {
  const int64_t m = of.m.count(), bands = m / kGroupRows;
  const bool fp8 = Present(b.data) || Present(b.data_t);
  GroupRows groups;
  TE_TRY(ExpectGroups(b.op, b.offsets, b.counts, b.scale, fp8, m, &groups));
  const int64_t amaxes = Present(b.amax) ? bands * CeilDiv(of.f, kTileColumns) : 0;
  const int64_t sums = Present(b.dbias) ? bands * of.a * of.f : 0;
  TE_TRY(Expect(b.op, {{"bias", b.bias, F32, {}, kAbsent},
                       {b.wide_name, b.wide, type, of.m + columns, kOptional},
                       {"data", b.data, kFp8, of.m + columns, kOptional},
                       {"data_t", b.data_t, Fp8Like(b.data), columns + of.m, kOptional},
                       {"amax", b.amax, F32, {groups.experts}, kOptional},
                       {"dbias", b.dbias, F32, {groups.experts, of.a, of.f}, kOptional},
                       {"workspace", b.workspace, U8, {(amaxes + sums) * 4}}}));
  if (m == 0 || of.f == 0) return Zero(stream, {b.amax, b.dbias});
  float* place = Data<float>(b.workspace);
  const GroupParts parts{{place, F32, &amaxes, 1}, {place + amaxes, F32, &sums, 1}};
  TE_TRY(launch(groups, TileArrays{b.scale, b.wide_name, b.wide, b.data, b.data_t, parts.amax, parts.dbias}));
  return FinishGroups(stream, groups, m, parts, b.amax, b.dbias);
}

}  // namespace

Status LaunchActivationGroupedFwd(cudaStream_t stream, Arg x, Arg offsets, Arg counts, Arg bias, Arg scale,
                                  Ret y, Ret data, Ret data_t, Ret amax, Ret workspace, int64_t kind,
                                  double limit, double alpha, double glu_linear_offset) {
  const char* op = "te_activation_grouped_fwd";
  ActivationCall of;
  TE_TRY(ExpectRank(op, "x", x, 3, true));
  TE_TRY(GetActivation(op, x, 3, kind, limit, alpha, glu_linear_offset, &of));
  const GroupedCall call{op, offsets, counts, bias, scale, "y", y, data, data_t, amax, kNone, workspace};
  return LaunchGrouped(stream, of, x.type, {of.f}, call,
                       [&](const GroupRows& groups, const TileArrays& arrays) {
                         return DispatchSlots(x.type, of.a, [&]<typename T, int kA>() -> Status {
                           using Source = GroupSource<ActivationSource<T, kA>>;
                           const Source source{{Data<T>(x), unsigned(of.f), of.act}, groups};
                           return LaunchTiles(op, stream, te_activation_grouped_fwd_kernels<Source>, source,
                                              Aligned(source.x), of.m.count(), of.f, arrays);
                         });
                       });
}

Status LaunchActivationGroupedBwd(cudaStream_t stream, Arg dy, Arg x, Arg offsets, Arg counts, Arg bias,
                                  Arg scale, Ret dx, Ret data, Ret data_t, Ret amax, Ret dbias, Ret workspace,
                                  int64_t kind, double limit, double alpha, double glu_linear_offset) {
  const char* op = "te_activation_grouped_bwd";
  ActivationCall of;
  TE_TRY(ExpectRank(op, "x", x, 3, true));
  TE_TRY(GetActivation(op, x, 3, kind, limit, alpha, glu_linear_offset, &of));
  TE_TRY(Expect(op, {{"dy", dy, x.type, of.m + Axes{of.f}}}));
  const GroupedCall call{op, offsets, counts, bias, scale, "dx", dx, data, data_t, amax, dbias, workspace};
  return LaunchGrouped(
      stream, of, x.type, {of.a, of.f}, call, [&](const GroupRows& groups, const TileArrays& arrays) {
        return DispatchSlots(x.type, of.a, [&]<typename T, int kA>() -> Status {
          using Source = GroupSource<GradientSource<T, kA>>;
          const Source source{{Data<T>(dy), Data<T>(x), unsigned(of.f), of.act}, groups};
          return LaunchTiles(op, stream, te_activation_grouped_bwd_kernels<Source>, source,
                             Aligned(source.dy) && Aligned(source.x), of.m.count(), of.f, arrays);
        });
      });
}

}  // namespace te
