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

// Of matrices [count, rows, k], in boxes of 128 bytes of k of some rows.
Status MakeMap(CUtensorMap* map, Type type, const void* data, int64_t k, int64_t rows, int64_t count,
               int box) {
  PFN_cuTensorMapEncodeTiled_v12000 encode;
  TE_TRY(FindEncode(&encode));
  const int64_t width = Width(type);
  const cuuint64_t sizes[] = {cuuint64_t(k), cuuint64_t(rows), cuuint64_t(count)};
  const cuuint64_t strides[] = {cuuint64_t(k * width), cuuint64_t(rows * k * width)};
  const cuuint32_t boxes[] = {cuuint32_t(128 / width), cuuint32_t(box), 1}, steps[] = {1, 1, 1};
  const CUresult result = encode(
      map, width == 1 ? CU_TENSOR_MAP_DATA_TYPE_UINT8 : CU_TENSOR_MAP_DATA_TYPE_UINT16, 3,
      const_cast<void*>(data), sizes, strides, boxes, steps, CU_TENSOR_MAP_INTERLEAVE_NONE,
      CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  if (result == CUDA_SUCCESS) return {};
  return {Status::kInternal, Format("te_gemm_grouped: cuTensorMapEncodeTiled of [%ld, %ld, %ld]: error %d",
                                    long(count), long(rows), long(k), int(result))};
}

}  // namespace

Status Run(cudaStream_t stream, const Problem& problem) {
  const char* op = problem.wgrad ? "te_gemm_grouped_wgrad" : "te_gemm_grouped";
  TE_TRY(ExpectHopper(op));
#ifndef TE_HAS_90A
  return {Status::kUnimplemented,
          Format("%s: te_jax was built without 90a-real; build it with TE_JAX_CUDA_ARCHS=90a-real", op)};
#endif
  KernelArgs args{};
  args.p = problem;
  // Boxes are half of a tile: each CTA of a cluster brings one half of what both read.
  TE_TRY(MakeMap(&args.left, problem.lhs, problem.left, problem.k, problem.rows, 1, 64));
  TE_TRY(MakeMap(&args.right, problem.rhs, problem.right, problem.k, problem.columns,
                 problem.wgrad ? 1 : problem.experts, 128));
  if (problem.sums == Sums::kFast) return RunFast(stream, args);
  return problem.sums == Sums::kSplit ? RunSplit(stream, args) : RunBlocks(stream, args);
}

}  // namespace te::grouped
