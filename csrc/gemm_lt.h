// cuBLASLt as te_gemm and te_gemm_block call it: what a GEMM is (key), its operands, its descriptors, its
// algorithms. gemm_lt.cc.
#pragma once

#include <cublasLt.h>

#include <compare>
#include <cstdint>
#include <string>
#include <vector>

#include "status.h"

namespace te {

inline bool IsFp8(int type) { return type == CUDA_R_8F_E4M3 || type == CUDA_R_8F_E5M2; }
const char* TypeName(int type);  // cudaDataType_t -> "bf16"

// What the scales of FP8 operands are of. In blocks they are f32 and aligned to 16 bytes; with L = ceil(k /
// 128) ("128-element 1D and 128x128 2D Block Scaling" in cuBLAS's documentation, whose A and B are our rhs
// and lhs):
//   1 x 128    [L, m] or [L, n]: one of each block along k of a row, the rows innermost; m, n: multiples of 4
//   128 x 128  [ceil(n / 128), L]: k innermost, L rounded up to a multiple of 4
// Not offered: lhs and rhs both 128 x 128, fast accumulation, another compute capability than 9.0.
enum class Scales {
  kTensor,
  kRows,
  kRowsBySquares
};  // lhs x rhs: f32 [] each; 1x128 x 1x128; 1x128 x 128x128

// Everything an algorithm depends on, the device aside. Types are cudaDataType_t.
struct GemmKey {
  int64_t m = 0, n = 0, k = 0;
  int lhs = -1, rhs = -1, out = -1;
  int bias = -1;         // -1: none
  bool c = false;        // added, of out's type
  size_t workspace = 0;  // bytes
  bool fast_accum = false;
  Scales scales = Scales::kTensor;
  bool tune =
      false;  // time the candidates, else take the heuristic's first; a loaded choice comes before both

  auto operator<=>(const GemmKey&) const = default;
  bool fp8() const { return IsFp8(lhs) || IsFp8(rhs); }
  bool empty() const { return m == 0 || n == 0 || k == 0; }
};

// All of the key but `tune`, as text: in messages, and as the name of a tuned choice in a file.
std::string Describe(const GemmKey& key);

// The key, to be tuned, that Describe has this text of. Whether there is one.
bool FindKey(const std::string& text, GemmKey* key);

struct GemmOperands {
  const void* lhs = nullptr;
  const void* rhs = nullptr;
  const float* lhs_scale_inv = nullptr;  // device; nullptr: 1, or in blocks to look for algorithms alone
  const float* rhs_scale_inv = nullptr;
  const void* bias = nullptr;
  const void* c = nullptr;
  void* out = nullptr;
  void* workspace = nullptr;
};

using Algo = cublasLtMatmulAlgo_t;
using Algos = std::vector<Algo>;

// A handle for the current device.
Status CreateHandle(cublasLtHandle_t* handle);

// Enqueues the GEMM: no allocation on the device, no synchronization.
Status Matmul(cudaStream_t stream, cublasLtHandle_t handle, const GemmKey& key, const Algo& algo,
              const GemmOperands& operands);

// The algorithms that run `key` on the handle's device, the heuristic's first guess in front; more than those
// of the heuristic where key.tune. Never empty, and the same in every process: they follow from the key, the
// model of the device and the version of cuBLASLt. Pointers have no part in it (the heuristic takes them for
// aligned to 256 bytes, its default), and the workspace is of one size (te_jax/ops/gemm.py).
Status Candidates(cublasLtHandle_t handle, const GemmKey& key, Algos* algos);
bool Has(const Algos& algos, const Algo& algo);

}  // namespace te
