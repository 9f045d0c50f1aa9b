// What a cuBLASLt GEMM is (key), how it runs (choice), and the calls that find and run it. gemm_plan.cc.
#pragma once

#include <cublasLt.h>

#include <compare>
#include <cstdint>
#include <string>

#include "common.h"

namespace te {

inline bool IsFp8(int type) { return type == CUDA_R_8F_E4M3 || type == CUDA_R_8F_E5M2; }
const char* TypeName(int type);  // cudaDataType_t -> "bf16"

// Everything an algorithm depends on, the device aside. Types are cudaDataType_t.
struct GemmKey {
  int64_t m = 0, n = 0, k = 0;
  int lhs = -1, rhs = -1, out = -1;
  int bias = -1;         // -1: none
  bool c = false;        // added, of out's type
  size_t workspace = 0;  // bytes
  bool fast_accum = false;
  bool tune = false;  // time the candidates, else take the heuristic's first

  auto operator<=>(const GemmKey&) const = default;
  bool fp8() const { return IsFp8(lhs) || IsFp8(rhs); }
  bool empty() const { return m == 0 || n == 0 || k == 0; }
};

struct GemmOperands {
  const void* lhs = nullptr;
  const void* rhs = nullptr;
  const float* lhs_scale_inv = nullptr;  // device, nullptr: 1
  const float* rhs_scale_inv = nullptr;
  const void* bias = nullptr;
  const void* c = nullptr;
  void* out = nullptr;
  void* workspace = nullptr;
};

struct GemmChoice {
  cublasLtHandle_t handle = nullptr;  // of the current device
  cublasLtMatmulAlgo_t algo;
};

// The algorithm for `key` on the current device. The first call makes the plan and, with key.tune, times its
// candidates on `stream`; it must not be capturing then.
ffi::Error FindGemm(cudaStream_t stream, const GemmKey& key, GemmChoice* choice);

// Enqueues the GEMM: no allocation, no synchronization.
ffi::Error RunGemm(cudaStream_t stream, const GemmKey& key, const GemmChoice& choice,
                   const GemmOperands& operands);

}  // namespace te
