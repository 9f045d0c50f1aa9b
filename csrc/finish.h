// What ends a call of the C interface: partial results of launchers, finished on the device.
#pragma once

#include "tensor.h"

namespace te {

enum class Reduce { kMax, kSum };

// result [n...], of any float type, from parts f32 [parts, n...], 0 of no parts: their sum, each column in a
// fixed order, rounded once to the result's type; or the maximum of their bits, for no part is negative: inf
// stands above all numbers and NaN above inf.
Status FinishParts(cudaStream_t stream, Reduce reduce, const Tensor& parts, const Tensor& result);

}  // namespace te
