// The tensor maps of the state-space dual's kernels on Hopper.
#pragma once

#include "base/token_maps.h"
#include "ssm/operands.cuh"

namespace te::ssm {

// Of x, and of B and C.
inline TokenSizes ChannelsOf(const ScanCall& call) { return {call.rows, call.s, call.s, call.h, call.p}; }
inline TokenSizes FactorsOf(const ScanCall& call) { return {call.rows, call.s, call.s, call.g, call.n}; }
// Of [count, h, p, n].
inline StateSizes StatesOf(const ScanCall& call, int64_t count) { return {count, call.h, call.p, call.n}; }

}  // namespace te::ssm
