// A product of no terms, which cuBLASLt does not take. gemm_empty.cu.
#pragma once

#include "tensor.h"

namespace te {

// out [m, n] = bias [n] + c [m, n], each 0 where it is absent, in one rounding. Of the types that te_gemm
// takes; out is not empty, and may be c.
Status BiasPlusC(cudaStream_t stream, const Tensor& bias, const Tensor& c, const Tensor& out, int64_t n);

}  // namespace te
