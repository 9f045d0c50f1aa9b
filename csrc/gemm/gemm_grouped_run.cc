// From a grouped product to its kernel: the tensor maps by which it reads.
#include <cudaTypedefs.h>

#include "base/device.h"
#include "gemm/gemm_grouped.h"

namespace te::grouped {
namespace {

// libcuda's function, which the CUDA runtime has loaded by the time that there is anything to multiply.
Status FindEncode(PFN_cuTensorMapEncodeTiled_v12000* encode) {
  static void* const found = [] {
    void* symbol = nullptr;
    cudaDriverEntryPointQueryResult result;
    const cudaError_t error = cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &symbol, 12000,
                                                               cudaEnableDefault, &result);
    return error == cudaSuccess && result == cudaDriverEntryPointSuccess ? symbol : nullptr;
  }();
  *encode = reinterpret_cast<PFN_cuTensorMapEncodeTiled_v12000>(found);
  if (found) return {};
  return {Status::kInternal,
          "te_gemm_grouped: the driver has no cuTensorMapEncodeTiled; it is older than CUDA 12"};
}

// A map of [outer, middle, inner] in boxes of 128 bytes. strides: bytes along the middle axis and the outer
// one.
Status MakeMap(CUtensorMap* map, Type type, const void* data, const cuuint64_t (&sizes)[3],
               const cuuint64_t (&strides)[2], const cuuint32_t (&box)[2], CUtensorMapL2promotion promotion) {
  PFN_cuTensorMapEncodeTiled_v12000 encode;
  TE_TRY(FindEncode(&encode));
  const int64_t width = Width(type);
  const cuuint32_t boxes[] = {cuuint32_t(128 / width), box[0], box[1]}, steps[] = {1, 1, 1};
  const CUresult result =
      encode(map, width == 1 ? CU_TENSOR_MAP_DATA_TYPE_UINT8 : CU_TENSOR_MAP_DATA_TYPE_UINT16, 3,
             const_cast<void*>(data), sizes, strides, boxes, steps, CU_TENSOR_MAP_INTERLEAVE_NONE,
             CU_TENSOR_MAP_SWIZZLE_128B, promotion, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  if (result == CUDA_SUCCESS) return {};
  return {Status::kInternal, Format("te_gemm_grouped: cuTensorMapEncodeTiled of [%ld, %ld, %ld]: error %d",
                                    long(sizes[2]), long(sizes[1]), long(sizes[0]), int(result))};
}

// A map of matrices [count, rows, inner], `box` rows at a time.
Status MakeMap(CUtensorMap* map, Type type, const void* data, int64_t inner, int64_t rows, int64_t count,
               int box) {
  const cuuint64_t row = inner * Width(type);
  return MakeMap(map, type, data, {cuuint64_t(inner), cuuint64_t(rows), cuuint64_t(count)}, {row, rows * row},
                 {cuuint32_t(box), 1}, CU_TENSOR_MAP_L2_PROMOTION_L2_256B);
}

// A map of one layout of FP8 in squares, `squares` of them side by side: [lines, squares, 128], `box` lines
// of a square at a time. L2 does not fetch the other layout, which lies next to it.
Status MakeSquares(CUtensorMap* map, const Problem& p, const void* first, int64_t lines, int64_t squares,
                   int box) {
  return MakeMap(map, F8E4M3FN, first, {128, cuuint64_t(squares), cuuint64_t(lines)},
                 {256, cuuint64_t(p.line)}, {1, cuuint32_t(box)}, CU_TENSOR_MAP_L2_PROMOTION_L2_128B);
}

Status MakeLeft(CUtensorMap* map, const Problem& p) {
  if (p.line && !p.wgrad) return MakeSquares(map, p, p.left, p.rows, p.k / 128, 64);
  if (p.layout == Layout::kBothAcross) return MakeMap(map, p.lhs, p.left, p.rows, p.k, 1, 64);
  return MakeMap(map, p.lhs, p.left, p.k, p.rows, 1, 64);
}

Status MakeRight(CUtensorMap* map, const Problem& p) {
  if (p.line && p.wgrad)
    return MakeSquares(map, p, static_cast<const char*>(p.right) + 128, p.k, p.columns / 128, 128);
  const int64_t count = p.wgrad ? 1 : p.experts;
  if (p.layout == Layout::kAlong) return MakeMap(map, p.rhs, p.right, p.k, p.columns, count, 128);
  return MakeMap(map, p.rhs, p.right, p.columns, p.k, count, 64);
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
  // Along k boxes are half of a tile, as each CTA of a cluster brings one half of what both read. Across k
  // they are 64 numbers of 64 k.
  TE_TRY(MakeLeft(&args.left, p));
  TE_TRY(MakeRight(&args.right, p));
  if (p.result != F32)
    TE_TRY(MakeMap(&args.out, p.result, p.out, p.columns, p.rows, p.wgrad ? p.experts : 1, kPieceRows));
  if (p.layout != Layout::kAlong) return RunWide(stream, args);
  if (p.sums == Sums::kFast) return RunFast(stream, args);
  return p.sums == Sums::kSplit ? RunSplit(stream, args) : RunBlocks(stream, args);
}

}  // namespace te::grouped
