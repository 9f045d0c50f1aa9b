// A product of no terms, which cuBLASLt does not take. gemm_empty.cu.
#pragma once

#include "common.h"

namespace te {

// out [m, n] = bias [n] + c [m, n], each 0 where it is absent, in one rounding. Of the types that te_gemm
// takes; out is not empty, and may be c.
ffi::Error BiasPlusC(cudaStream_t stream, const Arg& bias, const Arg& c, const Arg& out, int64_t n);

}  // namespace te
