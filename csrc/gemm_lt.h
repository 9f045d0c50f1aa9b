// cuBLASLt as te_gemm calls it: what a GEMM is (key), its operands, its descriptors, its algorithms.
// gemm_lt.cc.
#pragma once

#include <cublasLt.h>

#include <compare>
#include <cstdint>
#include <string>
#include <vector>

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

// All of the key but `tune`, as text: in messages, and as the name of a tuned choice in a file.
std::string Describe(const GemmKey& key);

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

using Algo = cublasLtMatmulAlgo_t;
using Algos = std::vector<Algo>;

// A handle for the current device.
ffi::Error CreateHandle(cublasLtHandle_t* handle);

// Enqueues the GEMM: no allocation on the device, no synchronization.
ffi::Error Matmul(cudaStream_t stream, cublasLtHandle_t handle, const GemmKey& key, const Algo& algo,
                  const GemmOperands& operands);

// The algorithms that run `key` on the handle's device, the heuristic's first guess in front; more than those
// of the heuristic where key.tune. Never empty.
ffi::Error Candidates(cublasLtHandle_t handle, const GemmKey& key, Algos* algos);

// An error unless `algo` runs `key` on the handle's device.
ffi::Error Check(cublasLtHandle_t handle, const GemmKey& key, const Algo& algo);

}  // namespace te
