// The activation of the MLP and its derivative over rows in groups, to FP8 in both layouts with a scale for
// each expert. Bytes per element as of activation.cu, of the rows that belong to groups.

#include "activation/activation.cuh"
#include "base/groups.cuh"
#include "base/ops.h"
#include "quantize/tile.cuh"

namespace te {
namespace {

TE_TILE_KERNELS(te_activation_grouped_fwd);
TE_TILE_KERNELS(te_activation_grouped_bwd);

template <typename Kernels, bool kBackward>
Status Launch(cudaStream_t stream, ActivationCall<kBackward> of, const GroupArrays& b, TileArrays arrays) {
  TE_TRY(of.Check(3, true));
  Totals& totals = arrays.totals;
  const int64_t m = of.m.count(), bands = m / kGroupRows;
  GroupRows groups;
  TE_TRY(ExpectGroups(of.op, b, totals, arrays.fp8(), m, {of.a, of.f}, &groups));
  const int64_t amaxes = Present(totals.amax) ? bands * CeilDiv(of.f, kTileColumns) : 0;
  const int64_t sums = Present(totals.dbias) ? bands * of.a * of.f : 0;
  TE_TRY(ExpectTensors(of.op, of.x, of.m, of.columns(), arrays));
  TE_TRY(Expect(of.op, {{"workspace", b.workspace, U8, {(amaxes + sums) * 4}}}));
  if (!Present(of.x)) return Zero(stream, {totals.amax, totals.dbias});
  float* place = Data<float>(b.workspace);
  totals.amax_partials = {place, F32, &amaxes, 1}, totals.dbias_partials = {place + amaxes, F32, &sums, 1};
  TE_TRY(of.Dispatch([&]<typename Source>(const Source& source) {
    return LaunchTiles<Kernels>(of.op, stream, GroupSource<Source>{source, groups}, of.aligned(), m, of.f,
                                arrays);
  }));
  return FinishGroups(stream, groups, m, totals);
}

}  // namespace

Status LaunchActivationGroupedFwd(cudaStream_t stream, Arg x, Arg offsets, Arg counts, Arg bias, Arg scale,
                                  Ret y, Ret data, Ret data_t, Ret amax, Ret workspace, int64_t kind,
                                  double limit, double alpha, double glu_linear_offset) {
  const ActivationCall<false> of{
      "te_activation_grouped_fwd", x, kNone, {kind, limit, alpha, glu_linear_offset}};
  return Launch<te_activation_grouped_fwd_kernels>(stream, of, {offsets, counts, bias, workspace},
                                                   {{scale, amax}, data, data_t, "y", y});
}

Status LaunchActivationGroupedBwd(cudaStream_t stream, Arg dy, Arg x, Arg offsets, Arg counts, Arg bias,
                                  Arg scale, Ret dx, Ret data, Ret data_t, Ret amax, Ret dbias, Ret workspace,
                                  int64_t kind, double limit, double alpha, double glu_linear_offset) {
  const ActivationCall<true> of{"te_activation_grouped_bwd", x, dy, {kind, limit, alpha, glu_linear_offset}};
  return Launch<te_activation_grouped_bwd_kernels>(stream, of, {offsets, counts, bias, workspace},
                                                   {{scale, amax, dbias}, data, data_t, "dx", dx});
}

}  // namespace te
