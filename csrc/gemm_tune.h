// Times the candidates of a GEMM on scratch memory. gemm_tune.cc.
#pragma once

#include <cstdint>
#include <functional>

#include "gemm_lt.h"

namespace te {

struct Timing {
  int64_t fastest = 0;
  double ms = 0;  // its median; 0: nothing was timed
};

// Enqueues candidate i on the scratch operands; false if cuBLASLt refuses it.
using RunCandidate = std::function<bool(int64_t i, const GemmOperands& operands)>;

// Candidate 0, untimed, where there is no memory for scratch operands. Waits for `stream`; must not be
// captured.
Timing TuneGemm(cudaStream_t stream, const GemmKey& key, int64_t candidates, const RunCandidate& run);

}  // namespace te
