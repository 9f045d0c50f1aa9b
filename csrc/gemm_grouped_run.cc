// From a grouped product to its kernel: the tensor maps by which it reads.
#include <cudaTypedefs.h>

#include "device.h"
#include "gemm_grouped.h"

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

// Of matrices [count, rows, inner], in boxes of 128 bytes of `box` rows.
Status MakeMap(CUtensorMap* map, Type type, const void* data, int64_t inner, int64_t rows, int64_t count,
               int box) {
  PFN_cuTensorMapEncodeTiled_v12000 encode;
  TE_TRY(FindEncode(&encode));
  const int64_t width = Width(type);
  const cuuint64_t sizes[] = {cuuint64_t(inner), cuuint64_t(rows), cuuint64_t(count)};
  const cuuint64_t strides[] = {cuuint64_t(inner * width), cuuint64_t(rows * inner * width)};
  const cuuint32_t boxes[] = {cuuint32_t(128 / width), cuuint32_t(box), 1}, steps[] = {1, 1, 1};
  const CUresult result = encode(
      map, width == 1 ? CU_TENSOR_MAP_DATA_TYPE_UINT8 : CU_TENSOR_MAP_DATA_TYPE_UINT16, 3,
      const_cast<void*>(data), sizes, strides, boxes, steps, CU_TENSOR_MAP_INTERLEAVE_NONE,
      CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  if (result == CUDA_SUCCESS) return {};
  return {Status::kInternal, Format("te_gemm_grouped: cuTensorMapEncodeTiled of [%ld, %ld, %ld]: error %d",
                                    long(count), long(rows), long(inner), int(result))};
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
  const int64_t count = p.wgrad ? 1 : p.experts;
  // Along k boxes are half of a tile, as each CTA of a cluster brings one half of what both read. Across k
  // they are 64 numbers of 64 k.
  TE_TRY(p.layout == Layout::kBothAcross ? MakeMap(&args.left, p.lhs, p.left, p.rows, p.k, 1, 64)
                                         : MakeMap(&args.left, p.lhs, p.left, p.k, p.rows, 1, 64));
  TE_TRY(p.layout == Layout::kAlong ? MakeMap(&args.right, p.rhs, p.right, p.k, p.columns, count, 128)
                                    : MakeMap(&args.right, p.rhs, p.right, p.columns, p.k, count, 64));
  if (p.result != F32)
    TE_TRY(MakeMap(&args.out, p.result, p.out, p.columns, p.rows, p.wgrad ? p.experts : 1, kPieceRows));
  if (p.layout != Layout::kAlong) return RunWide(stream, args);
  if (p.sums == Sums::kFast) return RunFast(stream, args);
  return p.sums == Sums::kSplit ? RunSplit(stream, args) : RunBlocks(stream, args);
}

}  // namespace te::grouped
