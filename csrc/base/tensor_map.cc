#include "base/tensor_map.h"

#include <cudaTypedefs.h>

#include "base/check.h"

namespace te {
namespace {

// libcuda's function, which the CUDA runtime has loaded by the time that there is anything to copy.
Status FindEncode(const char* op, PFN_cuTensorMapEncodeTiled_v12000* encode) {
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
          Format("%s: the driver has no cuTensorMapEncodeTiled; it is older than CUDA 12", op)};
}

}  // namespace

Status MakeTensorMap(const char* op, CUtensorMap* map, Type type, const void* data, const MapAxes& axes,
                     CUtensorMapL2promotion promotion) {
  PFN_cuTensorMapEncodeTiled_v12000 encode;
  TE_TRY(FindEncode(op, &encode));
  const int64_t width = Width(type);
  cuuint32_t boxes[5] = {cuuint32_t(128 / width)};
  constexpr cuuint32_t kSteps[] = {1, 1, 1, 1, 1};
  std::copy(axes.box, axes.box + axes.rank - 1, boxes + 1);
  const CUresult result = encode(
      map, width == 1 ? CU_TENSOR_MAP_DATA_TYPE_UINT8 : CU_TENSOR_MAP_DATA_TYPE_UINT16, cuuint32_t(axes.rank),
      const_cast<void*>(data), axes.sizes, axes.strides, boxes, kSteps, CU_TENSOR_MAP_INTERLEAVE_NONE,
      CU_TENSOR_MAP_SWIZZLE_128B, promotion, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  if (result == CUDA_SUCCESS) return {};
  std::string sizes;
  for (int i = axes.rank; i-- > 0;) sizes += std::to_string(axes.sizes[i]) + (i ? ", " : "");
  return {Status::kInternal,
          Format("%s: cuTensorMapEncodeTiled of [%s]: error %d", op, sizes.c_str(), int(result))};
}

}  // namespace te
