// The activation of the MLP and its derivative over rows in groups, in x's type, straight to FP8 with a scale
// for each block of 128, in both layouts (block_tile.cuh). A tile has rows of one expert.

#include "activation/activation_block.cuh"
#include "base/groups.cuh"
#include "base/ops.h"

namespace te {
namespace {

TE_BLOCK_KERNELS(te_activation_grouped_block_fwd);
TE_BLOCK_KERNELS(te_activation_grouped_block_bwd);

template <typename Kernels, bool kBackward>
Status Launch(cudaStream_t stream, ActivationCall<kBackward> of, const GroupArrays& b, Totals totals,
              const BlockArrays& arrays, bool power_2, double epsilon) {
  TE_TRY(of.Check(3, true));
  const int64_t m = of.m.count(), sums[] = {Present(totals.dbias) ? m / kGroupRows : 0, of.a, of.f};
  const int64_t bytes = sums[0] * of.a * of.f * 4;
  GroupRows groups;
  TE_TRY(ExpectGroups(of.op, b, totals, false, m, {of.a, of.f}, &groups));
  TE_TRY(Expect(of.op, {{"workspace", b.workspace, U8, {bytes}, RequiredIf(bytes > 0)}}));
  BlockArgs a;
  TE_TRY(GetBlockArgs(of.op, of.m, of.columns().Without(1), of.f, arrays, power_2, epsilon, &a));
  if (!Present(of.x)) return Zero(stream, {totals.dbias});
  totals.dbias_partials = {b.workspace.data, F32, sums, 3};
  a.dbias_partials = Data<float>(totals.dbias_partials);
  TE_TRY(of.Dispatch([&]<typename Source>(const Source& source) {
    return LaunchBlocks<Kernels>(stream, GroupSource<Rounded<Source>>{{source}, groups}, a, of.aligned());
  }));
  return FinishGroups(stream, groups, m, totals);
}

}  // namespace

Status LaunchActivationGroupedBlockFwd(cudaStream_t stream, Arg x, Arg offsets, Arg counts, Arg bias,
                                       Ret data, Ret data_t, Ret scale_inv, Ret scale_inv_t, int64_t kind,
                                       double limit, double alpha, double glu_linear_offset, bool power_2,
                                       double epsilon) {
  const ActivationCall<false> of{
      "te_activation_grouped_block_fwd", x, kNone, {kind, limit, alpha, glu_linear_offset}};
  return Launch<te_activation_grouped_block_fwd_kernels>(
      stream, of, {offsets, counts, bias}, {}, {data, data_t, scale_inv, scale_inv_t}, power_2, epsilon);
}

Status LaunchActivationGroupedBlockBwd(cudaStream_t stream, Arg dy, Arg x, Arg offsets, Arg counts, Arg bias,
                                       Ret data, Ret data_t, Ret scale_inv, Ret scale_inv_t, Ret dbias,
                                       Ret workspace, int64_t kind, double limit, double alpha,
                                       double glu_linear_offset, bool power_2, double epsilon) {
  const ActivationCall<true> of{
      "te_activation_grouped_block_bwd", x, dy, {kind, limit, alpha, glu_linear_offset}};
  return Launch<te_activation_grouped_block_bwd_kernels>(
      stream, of, {offsets, counts, bias, workspace}, {.dbias = dbias},
      {data, data_t, scale_inv, scale_inv_t}, power_2, epsilon);
}

}  // namespace te
