// Tensor maps, by which Hopper's copies read and write boxes of an array.
#pragma once

#include <cuda.h>

#include "base/tensor.h"

namespace te {

// A map for the op of this name, of an array of kRank axes, the innermost one first, in boxes of 128 bytes
// with the swizzle of 128 bytes: box[i] of axis i + 1, which are `strides[i]` bytes apart.
struct MapAxes {
  const cuuint64_t* sizes;
  const cuuint64_t* strides;
  const cuuint32_t* box;
  int rank;
};
Status MakeTensorMap(const char* op, CUtensorMap* map, Type type, const void* data, const MapAxes& axes,
                     CUtensorMapL2promotion promotion = CU_TENSOR_MAP_L2_PROMOTION_L2_256B);

template <int kRank>
Status MakeTensorMap(const char* op, CUtensorMap* map, Type type, const void* data,
                     const cuuint64_t (&sizes)[kRank], const cuuint64_t (&strides)[kRank - 1],
                     const cuuint32_t (&box)[kRank - 1],
                     CUtensorMapL2promotion promotion = CU_TENSOR_MAP_L2_PROMOTION_L2_256B) {
  return MakeTensorMap(op, map, type, data, MapAxes{sizes, strides, box, kRank}, promotion);
}

}  // namespace te
