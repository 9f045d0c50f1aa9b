// What module.cc shows to Python besides the FFI handlers, and the files that define it.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "dl.h"

namespace te {

// cudnn_stubs.cc: libcudnn.so.9, opened at first use.
const dl::Library& Cudnn();

// gemm.cc: libcublasLt.so.13, opened at first use.
const dl::Library& CublasLt();

// gemm.cc: the plans made so far in this process.
struct GemmPlan {
  std::string key;  // device, m, n, k, dtypes, epilogue, accumulation
  int64_t algos;    // candidates the heuristic gave
  int64_t chosen;   // index of the one in use
  double ms;        // its median time; 0 where it was not timed
};
std::vector<GemmPlan> GemmPlans();

// attention.cc: bytes of workspace that te_attention_fwd ("fwd") or te_attention_bwd ("bwd"), or its packed
// form, needs on the current device. Builds and keeps the plan. Throws std::runtime_error with cuDNN's reason
// if there is none.
int64_t AttentionWorkspace(const std::string& kind, const std::string& dtype, int64_t b, int64_t s, int64_t t,
                           int64_t h, int64_t g, int64_t d, int64_t e, bool packed, bool causal, double scale,
                           double dropout_rate, bool deterministic);

}  // namespace te
