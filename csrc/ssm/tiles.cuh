// What the kernels of the state-space dual share: tiles of 16-bit numbers in shared memory as operands of the
// tensor cores, and the steps of a chunk of tokens.
#pragma once

#include "base/fp8.cuh"
#include "base/ptx.cuh"
#include "base/reduce.cuh"

namespace te::ssm {

using Bf16 = __nv_bfloat16;

constexpr int kChunk = 64;  // tokens
constexpr int kKept = 512;  // tokens: how often the forward pass keeps the state
constexpr int kWarps = 8, kThreads = 32 * kWarps;
constexpr int kBand = 16;  // tokens of which a warp makes results: rows of a product

// Where cells of a tile [kRows, kColumns] lie: rows that end in 16 bytes of padding, so that the eight rows
// of a matrix lie in different banks; or boxes of rows of 128 bytes, as products of warpgroups want them
// (base/hopper_tiles.cuh).
template <int kRows, int kColumns>
struct Padded {
  static constexpr int kCells = kRows * (kColumns + 8), kAlignment = 16;
  __device__ __forceinline__ static int At(int row, int column) { return row * (kColumns + 8) + column; }
};
template <int kRows, int kColumns>
struct Boxes {
  static_assert(kColumns % 64 == 0);
  static constexpr int kCells = kRows * kColumns, kAlignment = 16;
  __device__ __forceinline__ static int At(int row, int column) {
    return (column / 64 * kRows + row) * 64 + (column / 8 ^ row) % 8 * 8 + column % 8;
  }
};

// bf16 [kRows, kColumns]
template <int kRows, int kColumns, typename Layout = Padded<kRows, kColumns>>
struct Tile {
  alignas(Layout::kAlignment) Bf16 cells[Layout::kCells];

  __device__ __forceinline__ Bf16* At(int row, int column) { return cells + Layout::At(row, column); }

  // Fetches the rows at p, `stride` apart, of which `rows` are there, and of each `columns`, a multiple of 8;
  // zeros elsewhere. All kBy threads of the CTA call it.
  template <int kBy = kThreads>
  __device__ __forceinline__ void Fetch(const Bf16* p, int64_t stride, int rows, int columns) {
    constexpr int kPieces = kColumns / 8, kStep = kBy / kPieces;
    const int row = threadIdx.x / kPieces, column = threadIdx.x % kPieces * 8;
    p += row * stride + column, stride *= kStep;
    if (rows >= kRows && columns >= kColumns) {
#pragma unroll
      for (int i = 0; i < kRows / kStep; ++i, p += stride)
        PrefetchOrZero16(At(row + i * kStep, column), p, true);
      return;
    }
    const Bf16* somewhere = p - row * (stride / kStep) - column;
    for (int i = row; i < kRows; i += kStep, p += stride) {
      const bool inside = i < rows && column < columns;
      PrefetchOrZero16(At(i, column), inside ? p : somewhere, inside);
    }
  }

  // Clears the other rows. All kBy threads of the CTA call it, and meet at barriers before and behind.
  template <int kBy = kThreads, typename IsKept>
  __device__ __forceinline__ void Keep(IsKept&& is_kept) {
    constexpr int kPieces = kColumns / 8;
    for (int i = threadIdx.x % kBy; i < kRows * kPieces; i += kBy)
      if (!is_kept(i / kPieces)) *reinterpret_cast<uint4*>(At(i / kPieces, i % kPieces * 8)) = uint4{};
  }

  // Operands of MultiplyAdd. A [16, 16]: rows and columns from `row` and `column` on; of the transposed tile,
  // `row` and `column` of the tile are A's column and row.
  __device__ __forceinline__ void A(uint32_t (&a)[4], int row, int column) {
    LoadMatrices<false>(a, At(row + Lane() % 16, column + Lane() / 16 * 8));
  }
  __device__ __forceinline__ void TransposedA(uint32_t (&a)[4], int row, int column) {
    LoadMatrices<true>(a, At(row + Lane() % 8 + Lane() / 16 * 8, column + Lane() / 8 % 2 * 8));
  }
  // Two B [16, 8], neighbours in their columns: words 0 and 1, 2 and 3. The tile has B's rows as rows, or, of
  // the transposed tile, as columns.
  __device__ __forceinline__ void B(uint32_t (&b)[4], int row, int column) {
    LoadMatrices<true>(b, At(row + Lane() % 16, column + Lane() / 16 * 8));
  }
  __device__ __forceinline__ void TransposedB(uint32_t (&b)[4], int row, int column) {
    LoadMatrices<false>(b, At(row + Lane() % 8 + Lane() / 16 * 8, column + Lane() / 8 % 2 * 8));
  }
};

// left, right: two results of MultiplyAdd, [16, 8] each and neighbours.
template <typename F>
__device__ __forceinline__ void Multiply2(float (&left)[4], float (&right)[4], const uint32_t (&a)[4],
                                          F&& load) {
  uint32_t b[4];
  load(b);
  MultiplyAdd<false>(left, a, b[0], b[1]);
  MultiplyAdd<false>(right, a, b[2], b[3]);
}

// The place of element i of a result of MultiplyAdd, of the lane.
__device__ __forceinline__ int RowOf(int i) { return Lane() / 4 + i / 2 * 8; }
__device__ __forceinline__ int ColumnOf(int i) { return Lane() % 4 * 2 + i % 2; }
// The sum over a result's 16 rows, of the lane's value in each column.
__device__ __forceinline__ float SumOfBand(float v) {
#pragma unroll
  for (int by = 4; by < 32; by *= 2) v += __shfl_xor_sync(~0u, v, by);
  return v;
}
// What goes past each of the lane's two tokens of a chunk: `through` the chunk, what ends at it or later
// tokens, what leaves the chunk from earlier ones.
__device__ __forceinline__ void PastTokens(float (&past)[2], const float (&ends)[2], const float (&leaves)[2],
                                           float through) {
  float behind = ends[0] + ends[1], before = leaves[0] + leaves[1];  // of this and later; of earlier tokens
#pragma unroll
  for (int by = 1; by < 32; by *= 2) {
    const float later = __shfl_sync(~0u, behind, min(Lane() + by, 31));
    const float earlier = __shfl_sync(~0u, before, max(Lane() - by, 0));
    if (Lane() + by < 32) behind += later;
    if (Lane() >= by) before += earlier;
  }
  const float later = __shfl_sync(~0u, behind, min(Lane() + 1, 31));
  const float earlier = __shfl_sync(~0u, before, max(Lane() - 1, 0));
  const float least = (Lane() > 0 ? earlier : 0.f) + through;
  past[0] = behind + least, past[1] = (Lane() < 31 ? later : 0.f) + ends[1] + leaves[0] + least;
}

__device__ __forceinline__ uint32_t Pack(float low, float high) {
  const __nv_bfloat162 both = __floats2bfloat162_rn(low, high);
  uint32_t word;
  memcpy(&word, &both, sizeof(word));
  return word;
}
__device__ __forceinline__ float2 Unpack(uint32_t word) {
  return make_float2(__uint_as_float(word << 16), __uint_as_float(word & 0xffff0000u));
}

// x [16, 16] of an operand whose columns are tokens from `first` on: each token's `weight(token)` times, with
// kRuns zeros unless `is_added(token)`.
template <bool kRuns, typename Weight, typename IsAdded>
__device__ __forceinline__ void WeighTokens(uint32_t (&x)[4], int first, Weight&& weight,
                                            IsAdded&& is_added) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int token = first + 8 * half + ColumnOf(0);
    const float low = weight(token), high = weight(token + 1);
    const bool has_low = !kRuns || is_added(token), has_high = !kRuns || is_added(token + 1);
#pragma unroll
    for (int i = 2 * half; i < 2 * half + 2; ++i) {
      const float2 both = Unpack(x[i]);
      x[i] = Pack(has_low ? both.x * low : 0.f, has_high ? both.y * high : 0.f);
    }
  }
}

// How the state moves from token to token.
struct StepArgs {
  const void* dt;        // [rows, s, h], bf16 or f32
  const float* A;        // [h]
  const float* dt_bias;  // [h], or nullptr
  const int* runs;       // [rows, s], or nullptr: which tokens belong together
  int s, h;
  bool is_bf16, softplus;
  float least, most;  // bounds of a step

  // dt, with its bias.
  __device__ __forceinline__ float Given(int64_t row, int token, int head) const {
    const int64_t at = (row * s + token) * h + head;
    const float given =
        is_bf16 ? __bfloat162float(static_cast<const Bf16*>(dt)[at]) : static_cast<const float*>(dt)[at];
    return dt_bias ? given + dt_bias[head] : given;
  }
  __device__ __forceinline__ float Unbounded(float given) const {
    return softplus ? fmaxf(given, 0) + log1pf(expf(-fabsf(given))) : given;
  }
  __device__ __forceinline__ float Bounded(float given) const {
    const float step = Unbounded(given);
    return step < least ? least : step > most ? most : step;
  }
  // The derivative of `Bounded`.
  __device__ __forceinline__ float Slope(float given) const {
    const float step = Unbounded(given);
    return step < least || step > most ? 0.f : softplus ? 1.f / (1.f + expf(-given)) : 1.f;
  }
};

// Of the tokens of a chunk and one head; LaunchSteps makes them.
struct Steps {
  static constexpr int kLast = kChunk - 1;
  alignas(16) float sums[kChunk];  // of the logarithms to base 2 of decays, up to a token
  float sizes[kChunk];             // 0 behind the last token

  // All threads of the CTA call it.
  __device__ __forceinline__ void Fetch(const Steps* from) {
    constexpr int kPieces = 2 * kChunk / 4;
    if (threadIdx.x < kPieces)
      PrefetchOrZero16(sums + 4 * threadIdx.x, reinterpret_cast<const float*>(from) + 4 * threadIdx.x, true);
  }
  // How much of the state before the chunk is there at a token, and how much of what token `from` adds at
  // `to`, the same or a later one: where it is seen.
  __device__ __forceinline__ float Since(int to) const { return Exp2(sums[to]); }
  __device__ __forceinline__ float Between(int from, int to) const { return Exp2(sums[to] - sums[from]); }
  // Times the step's size.
  __device__ __forceinline__ float Weight(int from, int to) const { return Between(from, to) * sizes[from]; }
};
static_assert(sizeof(Steps) == 8 * kChunk);

// Which tokens of a chunk belong together, and to the token before it; without kRuns all do.
template <bool kRuns>
struct Runs {
  uint8_t of[kRuns ? kChunk : 1];  // how many runs began behind the token before the chunk

  // All `threads` threads of who calls it have an index. a.runs [rows, a.s].
  template <typename Args>
  __device__ __forceinline__ void Set(const Args& a, int64_t row, int first, int index = threadIdx.x,
                                      int threads = kThreads) {
    if constexpr (kRuns) {
      const int *runs = a.runs + row * a.s, last = a.s - 1;
      for (int i = index; i < kChunk; i += threads)
        of[i] = runs[min(first + i, last)] - runs[min(max(first - 1, 0), last)];
    }
  }
  __device__ __forceinline__ bool Continues(int to) const { return !kRuns || of[to] == 0; }
  __device__ __forceinline__ bool AreOne(int from, int to) const { return !kRuns || of[from] == of[to]; }
};

// steps [rows, ceil(s / kChunk), h].
Status LaunchSteps(cudaStream_t stream, const StepArgs& a, int64_t rows, Steps* steps);

// Calls `run<states of a tile, whether there are runs>()`, for n of up to 128.
template <typename Fn>
Status DispatchStates(int64_t n, bool runs, Fn&& run) {
  if (n <= 64) return runs ? run.template operator()<64, true>() : run.template operator()<64, false>();
  return runs ? run.template operator()<128, true>() : run.template operator()<128, false>();
}

// Of shared memory that a CTA may have.
inline Status SharedBytes(int64_t* bytes) {
  int device, most;
  TE_CUDA(cudaGetDevice(&device));
  TE_CUDA(cudaDeviceGetAttribute(&most, cudaDevAttrMaxSharedMemoryPerBlockOptin, device));
  *bytes = most;
  return {};
}

template <typename Kernel>
Status AllowShared(Kernel kernel, size_t bytes) {
  TE_CUDA(cudaFuncSetAttribute(reinterpret_cast<const void*>(kernel),
                               cudaFuncAttributeMaxDynamicSharedMemorySize, int(bytes)));
  return {};
}

}  // namespace te::ssm
