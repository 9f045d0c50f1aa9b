// te_gemm_grouped: out[r, n] = lhs[r, k] @ rhs[expert of r, n, k]^T, times inverse scales, plus bias; n and k
// may be several axes, of which only the last one has blocks.
// te_gemm_grouped_wgrad: out[e, n, k] = the sum over the rows r of expert e of lhs[n, r] rhs[k, r], plus c.
// te_gemm_grouped_paired, te_gemm_grouped_paired_wgrad: the same of a gradient in both layouts in one array,
// the left factor of the first and the right one of the second.
// te_gemm_grouped_wide, te_gemm_grouped_wide_wgrad: the same of factors that lie across k: out[r, n] =
// lhs[r, k] @ rhs[expert of r, k, n] plus bias, out[e, k, n] = the sum of lhs[r, k] rhs[r, n], plus c.
#include "gemm/gemm_grouped.h"

#include "base/ops.h"

namespace te {
namespace {

using grouped::InBlocks, grouped::kMost, grouped::Layout, grouped::Problem, grouped::SlotsOf, grouped::Sums;

// The arrays of an op but the scales of blocks.
struct Call {
  const char* op;
  Tensor lhs, rhs, offsets, counts, lhs_scale_inv, rhs_scale_inv, bias, c, out, workspace;
  bool in_blocks;
  Layout layout = Layout::kAlong;
};

// FP8 of both layouts in one array of 16 bits [r, slots, f/128, 128] -> the array as one of FP8 that begins
// with the first of `used` slots from `slot` on, and the bytes of its lines.
Status GetPaired(const char* op, const char* name, const Tensor& a, int64_t slot, int64_t used, bool e5m2,
                 Tensor* fp8, int64_t* line) {
  TE_TRY(ExpectRank(op, name, a, 4, true));
  TE_TRY(Expect(op, {{name, a, kHalves, Axes(a).First(3) + Axes{128}}}));
  TE_CHECK(Aligned(Data<void>(a)), "%s: %s must be aligned to 16 bytes", op, name);
  TE_CHECK(slot >= 0 && slot <= a.sizes[1] - used, "%s: slot is %ld, but %s is %s; pass the index of a slot.",
           op, long(slot), name, a.shape().c_str());
  const int64_t bytes = a.sizes[2] * 256;  // of a slot's line
  *fp8 = {static_cast<char*>(a.data) + slot * bytes, e5m2 ? F8E5M2 : F8E4M3FN, a.sizes, a.rank};
  *line = a.sizes[1] * bytes;
  return {};
}

// One for all experts, or one for each.
Axes ScaleAxes(const Tensor& scale, int64_t experts) {
  return {scale.rank == 1 && scale.sizes[0] == 1 ? 1 : experts};
}

// Checks the arrays of a call whose factors are of these axes, and whose out of those -> the problem.
Status MakeProblem(const Call& call, const Axes& rhs, const Axes& out, bool fast_accum, Problem* problem) {
  const Type left = call.lhs.type, result = call.out.type;
  const bool fp8 = kFp8.Have(left);
  const int64_t experts = Axes(call.counts)[0];
  TE_CHECK(experts >= 1 && experts <= kMostExperts, "%s: counts is %s; pass 1 to %d experts.", call.op,
           call.counts.shape().c_str(), kMostExperts);
  const Types rhs_types = !fp8 ? Types(left) : left == F8E5M2 ? Types(F8E4M3FN) : kFp8;
  const Need scale = !fp8 || call.in_blocks ? kAbsent : kRequired;
  TE_TRY(Expect(call.op,
                {{"lhs", call.lhs, call.layout == Layout::kAlong ? kHalves | kFp8 : kHalves, Axes(call.lhs)},
                 {"rhs", call.rhs, rhs_types, rhs},
                 {"offsets", call.offsets, S32, {experts + 1}},
                 {"counts", call.counts, S32, {experts}},
                 {"lhs_scale_inv", call.lhs_scale_inv, F32, ScaleAxes(call.lhs_scale_inv, experts), scale},
                 {"rhs_scale_inv", call.rhs_scale_inv, F32, ScaleAxes(call.rhs_scale_inv, experts), scale},
                 {"bias", call.bias, result, Axes{experts} + out.From(1), kOptional},
                 {"c", call.c, result, out, kOptional},
                 {"out", call.out, kFloats, out},
                 {"workspace", call.workspace, U8, {kGroupedWorkspace}}}));
  problem->experts = int(experts), problem->lhs = left, problem->rhs = call.rhs.type,
  problem->result = result;
  problem->sums = fp8 && !fast_accum ? Sums::kSplit : Sums::kFast, problem->layout = call.layout;
  problem->left = call.lhs.data, problem->right = call.rhs.data, problem->out = call.out.data;
  problem->offsets = Data<int>(call.offsets), problem->counts = Data<int>(call.counts);
  problem->left_inv = Data<float>(call.lhs_scale_inv), problem->right_inv = Data<float>(call.rhs_scale_inv);
  problem->left_each = call.lhs_scale_inv.count() > 1, problem->right_each = call.rhs_scale_inv.count() > 1;
  problem->bias = Data<void>(call.bias), problem->c = Data<void>(call.c);
  problem->counter = Data<int>(call.workspace);
  return {};
}

// rows x columns: of the result; k: what is contracted.
Status Run(cudaStream_t stream, const Call& call, int64_t rows, int64_t columns, int64_t k,
           std::initializer_list<Tensor> blocks, Problem* problem) {
  const int64_t buffer = problem->wgrad ? k : rows;
  TE_CHECK(buffer % 128 == 0, "%s: lhs is %s; pass a buffer of a multiple of 128 rows.", call.op,
           call.lhs.shape().c_str());
  const bool left_across = problem->layout == Layout::kBothAcross;
  TE_CHECK(
      columns / problem->column_slots % 8 == 0 &&
          (left_across ? rows : k / problem->k_slots) * Width(call.lhs.type) % 16 == 0,
      "%s: lhs is %s%s, rhs %s; pass an innermost axis of lhs of a multiple of 16 bytes, and 8 columns or "
      "a multiple of them.",
      call.op, Name(call.lhs.type).c_str(), call.lhs.shape().c_str(), call.rhs.shape().c_str());
  const int64_t tiles = CeilDiv(rows, 128) * CeilDiv(columns, 256) * (problem->wgrad ? problem->experts : 1);
  TE_CHECK(rows <= kMost && columns <= kMost && k <= kMost && tiles <= kMost,
           "%s: lhs is %s, rhs %s; pass less than 2^31 rows, columns and tiles.", call.op,
           call.lhs.shape().c_str(), call.rhs.shape().c_str());
  for (const Tensor& a : blocks)
    TE_CHECK(a.count() <= kMost && Aligned(Data<float>(a)),
             "%s: scales are f32%s; pass less than 2^31, aligned to 16 bytes", call.op, a.shape().c_str());
  for (const Tensor& a : {call.lhs, call.rhs, call.bias, call.c, call.out})
    TE_CHECK(Aligned(Data<void>(a)), "%s: arrays must be aligned to 16 bytes", call.op);
  problem->rows = int(rows), problem->columns = int(columns), problem->k = int(k);
  if (!Present(call.out)) return {};
  if (k == 0 && problem->wgrad && !Present(call.c)) return Zero(stream, {call.out});  // no rows, no sums
  TE_CHECK(k > 0, "%s: lhs is %s; pass an axis to contract.", call.op, call.lhs.shape().c_str());
  return grouped::Run(stream, call.op, *problem);
}

}  // namespace

Status LaunchGemmGrouped(cudaStream_t stream, Arg lhs, Arg rhs, Arg offsets, Arg counts, Arg lhs_scale_inv,
                         Arg rhs_scale_inv, Arg lhs_row_inv, Arg rhs_block_inv, Arg bias, Ret out,
                         Ret workspace, int64_t outer, bool fast_accum) {
  const char* op = "te_gemm_grouped";
  TE_TRY(ExpectRank(op, "lhs", lhs, 2));
  TE_TRY(ExpectRank(op, "rhs", rhs, lhs.rank + 1));
  TE_CHECK(outer == lhs.rank - 2, "%s: outer is %ld, lhs is %s; pass the axes of k less 1.", op, long(outer),
           lhs.shape().c_str());
  const Axes k_axes = Axes(lhs).From(1), n_axes = Axes(rhs).Without(k_axes.rank()).From(1);
  const int64_t rows = lhs.sizes[0], k = k_axes.count(), columns = n_axes.count(), experts = Axes(counts)[0];
  const bool in_blocks = Present(lhs_row_inv) || Present(rhs_block_inv);
  const Call call{op,   lhs,   rhs, offsets,   counts,   lhs_scale_inv, rhs_scale_inv,
                  bias, kNone, out, workspace, in_blocks};
  Problem problem{};
  TE_TRY(MakeProblem(call, Axes{experts} + n_axes + k_axes, Axes{rows} + n_axes, fast_accum, &problem));
  const Need blocks = !in_blocks || !kFp8.Have(lhs.type) ? kAbsent : kRequired;
  const Axes along = InBlocks(k_axes);
  TE_TRY(
      Expect(op, {{"lhs_row_inv", lhs_row_inv, F32, along + Axes{rows}, blocks},
                  {"rhs_block_inv", rhs_block_inv, F32, Axes{experts} + InBlocks(n_axes) + along, blocks}}));
  if (in_blocks) {
    problem.sums = Sums::kSquares;
    problem.column_slots = int(SlotsOf(n_axes)), problem.k_slots = int(SlotsOf(k_axes));
  }
  problem.left_blocks = Data<float>(lhs_row_inv), problem.right_blocks = Data<float>(rhs_block_inv);
  return Run(stream, call, rows, columns, k, {lhs_row_inv, rhs_block_inv}, &problem);
}

Status LaunchGemmGroupedWgrad(cudaStream_t stream, Arg lhs, Arg rhs, Arg offsets, Arg counts,
                              Arg lhs_scale_inv, Arg rhs_scale_inv, Arg lhs_row_inv, Arg rhs_row_inv, Arg c,
                              Ret out, Ret workspace, bool fast_accum, int64_t slots, int64_t slot) {
  const char* op = "te_gemm_grouped_wgrad";
  TE_TRY(ExpectRank(op, "lhs", lhs, 2, true));
  TE_CHECK(slots == 0 || slots == 1, "%s: slots is %ld; pass 0 or 1 axis.", op, long(slots));
  TE_TRY(ExpectRank(op, "rhs", rhs, 2 + int(slots), true));
  const int64_t rows = lhs.sizes[0], buffer = lhs.sizes[1], columns = rhs.sizes[slots],
                experts = Axes(counts)[0], count = slots ? rhs.sizes[0] : 1;
  TE_CHECK(slot >= 0 && slot < count, "%s: slot is %ld, but rhs is %s; pass the index of a buffer.", op,
           long(slot), rhs.shape().c_str());
  const Axes of_rhs = slots ? Axes{count, columns, buffer} : Axes{columns, buffer};
  const bool in_blocks = Present(lhs_row_inv) || Present(rhs_row_inv);
  const Call call{op,    lhs, rhs, offsets,   counts,   lhs_scale_inv, rhs_scale_inv,
                  kNone, c,   out, workspace, in_blocks};
  Problem problem{};
  problem.wgrad = true;
  TE_TRY(MakeProblem(call, of_rhs, {experts, rows, columns}, fast_accum, &problem));
  problem.right = static_cast<const char*>(problem.right) + slot * columns * buffer * Width(rhs.type);
  const Need blocks = !in_blocks || !kFp8.Have(lhs.type) ? kAbsent : kRequired;
  TE_TRY(Expect(op, {{"lhs_row_inv", lhs_row_inv, F32, {buffer / 128, rows}, blocks},
                     {"rhs_row_inv", rhs_row_inv, F32, {buffer / 128, columns}, blocks}}));
  if (in_blocks) problem.sums = Sums::kRows;
  problem.left_blocks = Data<float>(lhs_row_inv), problem.right_blocks = Data<float>(rhs_row_inv);
  return Run(stream, call, rows, columns, buffer, {lhs_row_inv, rhs_row_inv}, &problem);
}

Status LaunchGemmGroupedPaired(cudaStream_t stream, Arg lhs, Arg rhs, Arg offsets, Arg counts,
                               Arg lhs_scale_inv, Arg rhs_scale_inv, Ret out, Ret workspace, bool e5m2,
                               bool fast_accum, int64_t slot) {
  const char* op = "te_gemm_grouped_paired";
  TE_TRY(ExpectRank(op, "rhs", rhs, 4, true));
  const int64_t columns = rhs.sizes[1], slots = rhs.sizes[2], features = rhs.sizes[3],
                experts = Axes(counts)[0];
  Tensor left;
  Problem problem{};
  TE_TRY(GetPaired(op, "lhs", lhs, slot, slots, e5m2, &left, &problem.line));
  const int64_t rows = lhs.sizes[0];
  const Call call{op,    left,  rhs, offsets,   counts, lhs_scale_inv, rhs_scale_inv,
                  kNone, kNone, out, workspace, false};
  const Axes of_rhs{experts, columns, slots, lhs.sizes[2] * 128};
  TE_TRY(MakeProblem(call, of_rhs, {rows, columns}, fast_accum, &problem));
  return Run(stream, call, rows, columns, slots * features, {}, &problem);
}

Status LaunchGemmGroupedPairedWgrad(cudaStream_t stream, Arg lhs, Arg rhs, Arg offsets, Arg counts,
                                    Arg lhs_scale_inv, Arg rhs_scale_inv, Arg c, Ret out, Ret workspace,
                                    bool e5m2, bool fast_accum, int64_t slot) {
  const char* op = "te_gemm_grouped_paired_wgrad";
  TE_TRY(ExpectRank(op, "lhs", lhs, 2, true));
  Tensor right;
  Problem problem{};
  problem.wgrad = true;
  TE_TRY(GetPaired(op, "rhs", rhs, slot, 1, e5m2, &right, &problem.line));
  const int64_t rows = lhs.sizes[0], buffer = lhs.sizes[1], squares = rhs.sizes[2], experts = Axes(counts)[0];
  const Call call{op,    lhs, right, offsets,   counts, lhs_scale_inv, rhs_scale_inv,
                  kNone, c,   out,   workspace, false};
  const Axes of_rhs{buffer, rhs.sizes[1], squares, 128};
  TE_TRY(MakeProblem(call, of_rhs, {experts, rows, squares, 128}, fast_accum, &problem));
  return Run(stream, call, rows, squares * 128, buffer, {}, &problem);
}

Status LaunchGemmGroupedWide(cudaStream_t stream, Arg lhs, Arg rhs, Arg offsets, Arg counts, Arg bias,
                             Ret out, Ret workspace) {
  const char* op = "te_gemm_grouped_wide";
  TE_TRY(ExpectRank(op, "lhs", lhs, 2, true));
  TE_TRY(ExpectRank(op, "rhs", rhs, 3, true));
  const int64_t rows = lhs.sizes[0], k = lhs.sizes[1], columns = rhs.sizes[2], experts = Axes(counts)[0];
  const Call call{
      op, lhs, rhs, offsets, counts, kNone, kNone, bias, kNone, out, workspace, false, Layout::kRightAcross};
  Problem problem{};
  TE_TRY(MakeProblem(call, {experts, k, columns}, {rows, columns}, true, &problem));
  return Run(stream, call, rows, columns, k, {}, &problem);
}

Status LaunchGemmGroupedWideWgrad(cudaStream_t stream, Arg lhs, Arg rhs, Arg offsets, Arg counts, Arg c,
                                  Ret out, Ret workspace) {
  const char* op = "te_gemm_grouped_wide_wgrad";
  TE_TRY(ExpectRank(op, "lhs", lhs, 2, true));
  TE_TRY(ExpectRank(op, "rhs", rhs, 2, true));
  const int64_t buffer = lhs.sizes[0], rows = lhs.sizes[1], columns = rhs.sizes[1], experts = Axes(counts)[0];
  const Call call{
      op, lhs, rhs, offsets, counts, kNone, kNone, kNone, c, out, workspace, false, Layout::kBothAcross};
  Problem problem{};
  problem.wgrad = true;
  TE_TRY(MakeProblem(call, {buffer, columns}, {experts, rows, columns}, true, &problem));
  return Run(stream, call, rows, columns, buffer, {}, &problem);
}

}  // namespace te
