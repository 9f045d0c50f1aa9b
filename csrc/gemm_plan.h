// Which algorithm runs a GEMM: chosen once per device kind and key, kept for the process. gemm_plan.cc.
#pragma once

#include "gemm_lt.h"

namespace te {

struct GemmChoice {
  cublasLtHandle_t handle = nullptr;  // of the current device
  Algo algo;
};

// The algorithm for `key` on the current device. The first call makes the plan: the choice that was loaded,
// or else the heuristic's first, or with key.tune or TuneAllGemms the fastest of the candidates, which are
// timed on `stream`; it must not be capturing then.
Status FindGemm(cudaStream_t stream, const GemmKey& key, GemmChoice* choice);

}  // namespace te
