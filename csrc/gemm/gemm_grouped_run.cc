// From a grouped product to its kernel: the tensor maps by which it reads.
#include "base/device.h"
#include "base/tensor_map.h"
#include "gemm/gemm_grouped.h"

namespace te::grouped {
namespace {

constexpr const char* kOp = "te_gemm_grouped";

// A map of matrices [count, rows, inner], `box` rows at a time.
Status MakeMap(CUtensorMap* map, Type type, const void* data, int64_t inner, int64_t rows, int64_t count,
               int box) {
  const cuuint64_t row = inner * Width(type);
  return MakeTensorMap<3>(kOp, map, type, data, {cuuint64_t(inner), cuuint64_t(rows), cuuint64_t(count)},
                          {row, rows * row}, {cuuint32_t(box), 1});
}

// A map of one layout of FP8 in squares, `squares` of them side by side: [lines, squares, 128], `box` lines
// of a square at a time. L2 does not fetch the other layout, which lies next to it.
Status MakeSquares(CUtensorMap* map, const Problem& p, const void* first, int64_t lines, int64_t squares,
                   int box) {
  return MakeTensorMap<3>(kOp, map, F8E4M3FN, first, {128, cuuint64_t(squares), cuuint64_t(lines)},
                          {256, cuuint64_t(p.line)}, {1, cuuint32_t(box)},
                          CU_TENSOR_MAP_L2_PROMOTION_L2_128B);
}

// Maps of factors that are cut into slots along k, and the right one into slots of columns, which lie one
// after the other in all experts: [rows, slots, k] and [experts' slots, columns, slots, k].
Status MakeLeftSlots(CUtensorMap* map, const Problem& p) {
  const cuuint64_t slots = p.k_slots, slot = p.slot_k;
  return MakeTensorMap<3>(kOp, map, p.lhs, p.left, {slot, slots, cuuint64_t(p.rows)}, {slot, slots * slot},
                          {1, 64});
}
Status MakeRightSlots(CUtensorMap* map, const Problem& p) {
  const cuuint64_t slots = p.k_slots, slot = p.slot_k, rows = p.slot_columns;
  return MakeTensorMap<4>(kOp, map, p.rhs, p.right,
                          {slot, slots, rows, cuuint64_t(p.experts) * cuuint64_t(p.column_slots)},
                          {slot, slots * slot, rows * slots * slot}, {1, 128, 1});
}

Status MakeLeft(CUtensorMap* map, const Problem& p) {
  if (p.sums == Sums::kSquares) return MakeLeftSlots(map, p);
  if (p.line && !p.wgrad) return MakeSquares(map, p, p.left, p.rows, p.k / 128, 64);
  if (p.layout == Layout::kBothAcross) return MakeMap(map, p.lhs, p.left, p.rows, p.k, 1, 64);
  return MakeMap(map, p.lhs, p.left, p.k, p.rows, 1, 64);
}

Status MakeRight(CUtensorMap* map, const Problem& p) {
  if (p.sums == Sums::kSquares) return MakeRightSlots(map, p);
  if (p.line && p.wgrad)
    return MakeSquares(map, p, static_cast<const char*>(p.right) + 128, p.k, p.columns / 128, 128);
  const int64_t count = p.wgrad ? 1 : p.experts;
  if (p.layout == Layout::kAlong) return MakeMap(map, p.rhs, p.right, p.k, p.columns, count, 128);
  return MakeMap(map, p.rhs, p.right, p.columns, p.k, count, 64);
}

// Of a result of 16 bits, `kPieceRows` rows of 64 columns at a time.
Status MakeOut(CUtensorMap* map, const Problem& p) {
  if (p.sums != Sums::kSquares)
    return MakeMap(map, p.result, p.out, p.columns, p.rows, p.wgrad ? p.experts : 1, kPieceRows);
  const cuuint64_t slots = p.column_slots, slot = p.slot_columns, bytes = slot * Width(p.result);
  return MakeTensorMap<3>(kOp, map, p.result, p.out, {slot, slots, cuuint64_t(p.rows)},
                          {bytes, slots * bytes}, {1, kPieceRows});
}

}  // namespace

Status Run(cudaStream_t stream, const char* op, const Problem& p) {
  TE_TRY(ExpectHopper(op));
#ifndef TE_HAS_90A
  return {Status::kUnimplemented,
          Format("%s: te_jax was built without 90a-real; build it with TE_JAX_CUDA_ARCHS=90a-real", op)};
#endif
  KernelArgs args{};
  args.p = p;
  args.p.Cut();
  // Along k boxes are half of a tile, as each CTA of a cluster brings one half of what both read. Across k
  // they are 64 numbers of 64 k.
  TE_TRY(MakeLeft(&args.left, args.p));
  TE_TRY(MakeRight(&args.right, args.p));
  if (p.result != F32) TE_TRY(MakeOut(&args.out, args.p));
  if (p.layout != Layout::kAlong) return RunWide(stream, args);
  if (p.sums == Sums::kFast) return RunFast(stream, args);
  return p.sums == Sums::kSplit ? RunSplit(stream, args) : RunBlocks(stream, args);
}

}  // namespace te::grouped
