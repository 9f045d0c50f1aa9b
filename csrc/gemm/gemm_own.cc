// te_gemm and te_gemm_block by te_jax's kernel of grouped products: FP8 of one scale with split accumulation,
// or with scales of rows by squares, on Hopper.
//
// With one scale sums go to f32 every 256 of k, cuBLASLt's every 128: on an H200 at its power limit that
// takes 2 to 5 % less time than cuBLASLt's first guess for each of the products of large layers (with 128
// both give the same bits). Tensor cores keep 13 bits behind the leading one of the largest term of 32
// products and the sum so far, so a piece of 256, 8 such additions, loses up to 8 x 2^-13 of its largest
// partial sum, and one of 128 up to 4 x; what pieces lose does not grow with k.
//
// With scales of rows by squares both kernels add to f32 every 128 and give the same bits. On H200s this one
// takes 1 to 5 % less time than cuBLASLt's first guess from k = 12288 on with results of up to 7168 columns;
// for a shorter k 0.98 to 1.04 of its time. Wider results of a long k were not measured.
#include "gemm/gemm_own.h"

#include <cstring>

#include "base/device.h"
#include "base/ops.h"

namespace te {

namespace {
constexpr int64_t kLeastK = 12288, kMostColumns = 7168;  // of products with scales of squares, see above
}

Algo OwnAlgo() { return {}; }

bool IsOwn(const Algo& algo) {
  const Algo own = OwnAlgo();
  return std::memcmp(&algo, &own, sizeof(algo)) == 0;
}

Status HasOwn(const GemmKey& key, bool* has) {
  *has = false;
#ifdef TE_HAS_90A
  // cuBLASLt's scales of squares have lines of a multiple of 4.
  const bool squares =
      key.scales == Scales::kRowsBySquares && key.k % 512 == 0 && key.k >= kLeastK && key.n <= kMostColumns;
  const bool split = key.scales == Scales::kTensor && !key.fast_accum;
  const bool taken = key.fp8() && (split || squares) && !key.empty() &&
                     (key.bias == kNoType || key.bias == key.out) && key.workspace >= kGroupedWorkspace &&
                     std::max({key.m, key.n, key.k}) <= grouped::kMost;
  if (!taken) return {};
  TE_TRY(IsHopper(has));
  if (!*has) return {};
  int multiprocessors = 0;
  TE_TRY(Multiprocessors(&multiprocessors));
  // Tiles of 128 x 256: a last round of few of them leaves most of the GPU idle, where cuBLASLt has others.
  const int64_t tiles = CeilDiv(key.m, 128) * CeilDiv(key.n, 256), rounds = CeilDiv(tiles, multiprocessors);
  *has = tiles * 100 >= rounds * multiprocessors * 93;
#endif
  return {};
}

Status MatmulOwn(cudaStream_t stream, const GemmKey& key, const GemmOperands& operands) {
  const char* op = key.scales == Scales::kTensor ? "te_gemm" : "te_gemm_block";
  return grouped::Run(stream, op, OneGroup(key, operands));
}

}  // namespace te
