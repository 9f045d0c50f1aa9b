// What the files of te_gemm and te_gemm_block share: what a GEMM is (key), its operands, and who runs it.
#pragma once

#include <cublasLt.h>

#include <compare>
#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "base/check.h"

namespace te {

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

constexpr Type kNoType = Type(0);

// Everything an algorithm depends on, the device aside.
struct GemmKey {
  int64_t m = 0, n = 0, k = 0;
  Type lhs = kNoType, rhs = kNoType, out = kNoType;
  Type bias = kNoType;   // if there is one
  bool c = false;        // added, of out's type
  size_t workspace = 0;  // bytes
  bool fast_accum = false;
  Scales scales = Scales::kTensor;
  bool tune =
      false;  // time the candidates, else take the heuristic's first; a loaded choice comes before both

  auto operator<=>(const GemmKey&) const = default;
  bool fp8() const { return kFp8.Have(lhs) || kFp8.Have(rhs); }
  bool empty() const { return m == 0 || n == 0 || k == 0; }
};

// All of the key but `tune`, as text: in messages, and as the name of a tuned choice in a file.
std::string Describe(const GemmKey& key);

// The key, to be tuned, that Describe has this text of. Whether there is one.
bool FindKey(const std::string& text, GemmKey* key);

struct GemmOperands {
  const void* lhs = nullptr;
  const void* rhs = nullptr;
  const float* lhs_scale_inv = nullptr;  // device; nullptr: 1, or in blocks only to look for algorithms
  const float* rhs_scale_inv = nullptr;
  const void* bias = nullptr;
  const void* c = nullptr;
  void* out = nullptr;
  void* workspace = nullptr;
};

// ---- gemm_lt.cc: cuBLASLt ----

using Algo = cublasLtMatmulAlgo_t;
using Algos = std::vector<Algo>;

// A handle for the current device.
Status CreateHandle(cublasLtHandle_t* handle);

// Enqueues the GEMM: no allocation on the device, no synchronization.
Status Matmul(cudaStream_t stream, cublasLtHandle_t handle, const GemmKey& key, const Algo& algo,
              const GemmOperands& operands);

// The algorithms that run `key` on the handle's device, in front te_jax's own where HasOwn, or the
// heuristic's first guess; more than the heuristic has where key.tune. Never empty, and the same in
// every process: they follow from the key, the model of the device and the version of cuBLASLt. They do not
// depend on pointers (the heuristic takes them for aligned to 256 bytes, its default), and the workspace is
// of one size (te_jax/ops/gemm/dense.py).
Status Candidates(cublasLtHandle_t handle, const GemmKey& key, Algos* algos);
bool Has(const Algos& algos, const Algo& algo);

// ---- gemm_own.cc: te_jax's kernel of grouped products, of one group ----

// An algorithm that cuBLASLt does not have: it stands for this kernel where algorithms are kept.
Algo OwnAlgo();
bool IsOwn(const Algo& algo);

// Whether this kernel is what runs `key` on the current device unless another was timed to be faster.
Status HasOwn(const GemmKey& key, bool* has);

// As Matmul.
Status MatmulOwn(cudaStream_t stream, const GemmKey& key, const GemmOperands& operands);

// ---- gemm_tune.cc: times the candidates of a GEMM on scratch memory ----

struct Timing {
  int64_t fastest = 0;
  double ms = 0;  // its median; 0: nothing was timed
};

// Enqueues candidate i on the scratch operands; false if cuBLASLt refuses it.
using RunCandidate = std::function<bool(int64_t i, const GemmOperands& operands)>;

// Candidate 0, untimed, where there is no memory for scratch operands. Waits for `stream`; must not be
// captured.
Timing TuneGemm(cudaStream_t stream, const GemmKey& key, int64_t candidates, const RunCandidate& run);

// ---- gemm_plan.cc: which algorithm runs a GEMM, chosen once per device kind and key, kept for the process
// ----

struct GemmChoice {
  cublasLtHandle_t handle = nullptr;  // of the current device
  Algo algo;
};

// The algorithm for `key` on the current device. The first call makes the plan: the choice that was loaded,
// or else the heuristic's first, or with key.tune or TuneAllGemms the fastest of the candidates, which are
// timed on `stream`; it must not be capturing then.
Status FindGemm(cudaStream_t stream, const GemmKey& key, GemmChoice* choice);

// ---- gemm_empty.cu: a product of no terms, which cuBLASLt does not take ----

// out [m, n] = bias [n] + c [m, n], each 0 where it is absent, in one rounding. The types are what te_gemm
// takes; out is not empty, and may be c.
Status BiasPlusC(cudaStream_t stream, const Tensor& bias, const Tensor& c, const Tensor& out, int64_t n);

}  // namespace te
