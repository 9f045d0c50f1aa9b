// The activation of the MLP and its derivative over rows in groups, in x's type, straight to FP8 with a scale
// for each block of 128, in both layouts (block_tile.cuh). A tile has rows of one expert.

#include "activation/activation_block.cuh"
#include "base/ops.h"
#include "experts/groups.cuh"

namespace te {
namespace {

TE_BLOCK_KERNELS(te_activation_grouped_block_fwd);
TE_BLOCK_KERNELS(te_activation_grouped_block_bwd);

}  // namespace

Status LaunchActivationGroupedBlockFwd(cudaStream_t stream, Arg x, Arg offsets, Arg counts, Arg bias,
                                       Ret data, Ret data_t, Ret scale_inv, Ret scale_inv_t, int64_t kind,
                                       double limit, double alpha, double glu_linear_offset, bool power_2,
                                       double epsilon) {
  const char* op = "te_activation_grouped_block_fwd";
  ActivationCall of;
  TE_TRY(ExpectRank(op, "x", x, 3, true));
  TE_TRY(GetActivation(op, x, 3, kind, limit, alpha, glu_linear_offset, &of));
  GroupRows groups;
  TE_TRY(ExpectGroups(op, offsets, counts, kNone, false, of.m.count(), &groups));
  TE_TRY(Expect(op, {{"bias", bias, F32, {}, kAbsent}}));
  BlockArgs a;
  const BlockArrays arrays{data, data_t, scale_inv, scale_inv_t, kNone};
  TE_TRY(GetBlockArgs(op, of.m, {}, of.f, arrays, power_2, epsilon, &a));
  if (!Present(x)) return {};
  return DispatchSlots(x.type, of.a, [&]<typename T, int kA>() -> Status {
    using Source = GroupSource<Rounded<ActivationSource<T, kA>>>;
    const Source source{{{Data<T>(x), a.q, of.act}}, groups};
    return LaunchBlocks(stream, te_activation_grouped_block_fwd_kernels<Source>, source, a,
                        Aligned(source.x));
  });
}

Status LaunchActivationGroupedBlockBwd(cudaStream_t stream, Arg dy, Arg x, Arg offsets, Arg counts, Arg bias,
                                       Ret data, Ret data_t, Ret scale_inv, Ret scale_inv_t, Ret dbias,
                                       Ret workspace, int64_t kind, double limit, double alpha,
                                       double glu_linear_offset, bool power_2, double epsilon) {
  const char* op = "te_activation_grouped_block_bwd";
  ActivationCall of;
  TE_TRY(ExpectRank(op, "x", x, 3, true));
  TE_TRY(GetActivation(op, x, 3, kind, limit, alpha, glu_linear_offset, &of));
  const int64_t m = of.m.count(), sums[] = {Present(dbias) ? m / kGroupRows : 0, of.a, of.f};
  GroupRows groups;
  TE_TRY(ExpectGroups(op, offsets, counts, kNone, false, m, &groups));
  TE_TRY(Expect(op, {{"dy", dy, x.type, of.m + Axes{of.f}},
                     {"bias", bias, F32, {}, kAbsent},
                     {"dbias", dbias, F32, {groups.experts, of.a, of.f}, kOptional},
                     {"workspace", workspace, U8, {sums[0] * of.a * of.f * 4}}}));
  const GroupParts parts{kNone, {workspace.data, F32, sums, 3}};
  BlockArgs a;
  const BlockArrays arrays{data, data_t, scale_inv, scale_inv_t, parts.dbias};
  TE_TRY(GetBlockArgs(op, of.m, {of.a}, of.f, arrays, power_2, epsilon, &a));
  if (!Present(x)) return Zero(stream, {dbias});
  TE_TRY(DispatchSlots(x.type, of.a, [&]<typename T, int kA>() -> Status {
    using Source = GroupSource<Rounded<GradientSource<T, kA>>>;
    const Source source{{{Data<T>(dy), Data<T>(x), a.q, of.act}}, groups};
    return LaunchBlocks(stream, te_activation_grouped_block_bwd_kernels<Source>, source, a,
                        Aligned(source.dy) && Aligned(source.x));
  }));
  return FinishGroups(stream, groups, m, parts, kNone, dbias);
}

}  // namespace te
