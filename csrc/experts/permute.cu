// Tokens in the order of their experts and back. te_group finds where each pair of a token and an expert lies
// in a buffer whose groups, the runs of rows of one expert, begin at multiples of 128. te_permute gathers
// rows of x into the buffer, to FP8 in both layouts at once; bytes per element of the buffer in bf16: 2 read,
// 2 written. te_combine adds up the rows of each token, times their weights. te_combine_bwd computes the
// gradient of the weights.

#include <algorithm>

#include "base/finish.h"
#include "base/ops.h"
#include "experts/permute.cuh"
#include "quantize/tile.cuh"

namespace te {
namespace {

constexpr int kAlignment = 128;  // of groups; te_jax/ops/experts/permute.py has it too

// ---- te_group ----------------------------------------------------------------------------------------

constexpr int kGroupWarps = 8, kGroupThreads = 32 * kGroupWarps;
constexpr int kStrip = 256;                   // pairs of a warp
constexpr int kChunk = kGroupWarps * kStrip;  // pairs of a CTA; te_jax/ops/experts/permute.py has it too
constexpr int kChunksAtOnce = 16;

struct GroupArgs {
  const int* experts;  // [pairs]
  int* of_chunks;      // [chunks, num_experts]: pairs in the chunk, then in the chunks before it
  int* offsets;        // [num_experts + 1]
  int* counts;         // [num_experts]
  int* rows;           // [pairs]
  int* slots;          // [buffer]
  int64_t pairs;
  int num_experts, chunks;
};

// Calls visit(pair, expert, peers) for a warp's pairs, 32 at a time and in order: peers are the lanes whose
// pairs have the same expert. expert is -1 in lanes without a pair, and of a pair whose expert is none.
template <typename Visit>
__device__ __forceinline__ void VisitStrip(const GroupArgs& a, Visit visit) {
  const int64_t first = blockIdx.x * int64_t{kChunk} + WarpIndex() * kStrip;
  for (int64_t start = first; start < first + kStrip && start < a.pairs; start += 32) {
    const int64_t pair = start + Lane();
    const int given = pair < a.pairs ? a.experts[pair] : -1;
    const int expert = unsigned(given) < unsigned(a.num_experts) ? given : -1;
    const unsigned peers = __match_any_sync(~0u, expert);
    visit(pair, expert, peers);
    __syncwarp();
  }
}

// counts[kGroupWarps, num_experts] in shared memory: the pairs of each warp.
__device__ __forceinline__ void CountStrips(const GroupArgs& a, int* counts) {
  for (int i = threadIdx.x; i < kGroupWarps * a.num_experts; i += kGroupThreads) counts[i] = 0;
  __syncthreads();
  int* mine = counts + WarpIndex() * a.num_experts;
  VisitStrip(a, [&](int64_t, int expert, unsigned peers) {
    if (expert >= 0 && (peers & ((1u << Lane()) - 1)) == 0) mine[expert] += __popc(peers);
  });
  __syncthreads();
}

__global__ void __launch_bounds__(kGroupThreads) te_group_count(const GroupArgs a) {
  extern __shared__ int counts[];
  CountStrips(a, counts);
  for (int e = threadIdx.x; e < a.num_experts; e += kGroupThreads) {
    int sum = 0;
    for (int w = 0; w < kGroupWarps; ++w) sum += counts[w * a.num_experts + e];
    a.of_chunks[blockIdx.x * int64_t(a.num_experts) + e] = sum;
  }
}

// One CTA, a thread for each expert: what lies before each chunk in the expert's group, and where it begins.
__global__ void __launch_bounds__(kMostExperts) te_group_offsets(const GroupArgs a) {
  __shared__ int sums[kMostExperts];
  const int e = threadIdx.x;
  int sum = 0;
  for (int first = 0; e < a.num_experts && first < a.chunks; first += kChunksAtOnce) {
    int* of_chunks = a.of_chunks + first * int64_t(a.num_experts) + e;
    const int chunks = min(a.chunks - first, kChunksAtOnce);
    int each[kChunksAtOnce];  // all are read before the first is written: one latency, not one for each
#pragma unroll
    for (int i = 0; i < kChunksAtOnce; ++i) each[i] = i < chunks ? of_chunks[i * a.num_experts] : 0;
#pragma unroll
    for (int i = 0; i < kChunksAtOnce; ++i) {
      if (i < chunks) of_chunks[i * a.num_experts] = sum;
      sum += each[i];
    }
  }
  if (e < a.num_experts) a.counts[e] = sum;
  sum = (sum + kAlignment - 1) / kAlignment * kAlignment;
  sums[e] = sum;
  __syncthreads();
  for (int distance = 1; distance < kMostExperts; distance *= 2) {
    const int before = e >= distance ? sums[e - distance] : 0;
    __syncthreads();
    sums[e] += before;
    __syncthreads();
  }
  if (e < a.num_experts) a.offsets[e + 1] = sums[e];
  if (e == 0) a.offsets[0] = 0;
}

__global__ void __launch_bounds__(kGroupThreads) te_group_rows(const GroupArgs a) {
  extern __shared__ int next[];  // [kGroupWarps, num_experts]: the row of a warp's next pair
  CountStrips(a, next);
  for (int e = threadIdx.x; e < a.num_experts; e += kGroupThreads) {
    int row = a.offsets[e] + a.of_chunks[blockIdx.x * int64_t(a.num_experts) + e];
    for (int w = 0; w < kGroupWarps; ++w) {
      const int count = next[w * a.num_experts + e];
      next[w * a.num_experts + e] = row;
      row += count;
    }
  }
  __syncthreads();
  int* mine = next + WarpIndex() * a.num_experts;
  VisitStrip(a, [&](int64_t pair, int expert, unsigned peers) {
    const unsigned before = peers & ((1u << Lane()) - 1);
    const int row = expert >= 0 ? mine[expert] + __popc(before) : 0;
    __syncwarp();
    if (expert >= 0 && before == 0) mine[expert] += __popc(peers);
    if (expert >= 0) a.slots[row] = int(pair);
    if (pair < a.pairs) a.rows[pair] = expert >= 0 ? row : -1;
  });
}

// ---- te_permute --------------------------------------------------------------------------------------

template <typename T>
struct GatherSource : GatheredRows<T> {
  using Type = T;
  using Raw = typename GatheredRows<T>::Raw;
  static constexpr int kSlots = 1, kCtas = sizeof(T) == 2 ? 4 : 3, kWindow = 4;
  static constexpr bool kSums = false;

  __device__ __forceinline__ void Values(const Raw& raw, float (&f)[1][8]) const {
#pragma unroll
    for (int j = 0; j < 8; ++j) f[0][j] = raw.x[j] * raw.weight;
  }
};

TE_TILE_KERNELS(te_permute);

// ---- te_combine --------------------------------------------------------------------------------------

constexpr int kCombineThreads = 128;

template <typename T>
struct CombineArgs {
  const T* rows;          // [buffer, n]
  const uint64_t* peers;  // [devices], where rows of each device are, or nullptr
  Divisor buffer;
  const int* positions;  // [tokens, topk]: the row of each choice, below 0 where it has none; with peers the
                         // device's number times the buffer, and its row
  float* weights;        // [tokens, topk] or nullptr; the gradient is written
  T* y;                  // [tokens, n]; its gradient is read
  int64_t n;
  int topk;

  // The row at a position, which is not below 0.
  __device__ __forceinline__ const T* At(int position) const {
    if (!peers) return rows + position * n;
    const Split at = buffer.Of(position);
    return reinterpret_cast<const T*>(peers[at.quotient]) + at.rest * n;
  }
};

// A CTA adds up the rows of a token, in the order of its choices.
template <typename T, bool kVectors>
__global__ void __launch_bounds__(kCombineThreads) te_combine(const CombineArgs<T> a) {
  const int64_t token = blockIdx.x;
  const int* positions = a.positions + token * a.topk;
  const float* weights = a.weights ? a.weights + token * a.topk : nullptr;
  for (int64_t column = threadIdx.x * 8; column < a.n; column += kCombineThreads * 8) {
    const int columns = int(min(a.n - column, int64_t{8}));
    float sums[8] = {};
#pragma unroll 4
    for (int choice = 0; choice < a.topk; ++choice) {
      const int position = positions[choice];
      Vec<T, 8> row{};
      if (position >= 0) row = LoadRow<kVectors>(a.At(position) + column, columns);
      const float weight = position < 0 ? 0.f : weights ? weights[choice] : 1.f;
#pragma unroll
      for (int j = 0; j < 8; ++j) sums[j] += weight * row[j];
    }
    StoreUnquantized<kVectors>(a.y + token * a.n + column, sums, columns);
  }
}

// A warp of a token's CTA for each of its choices, in turns: dy, in T or in E4M3 times scales [n / 128,
// tokens], times the row.
template <typename T, bool kVectors, typename Dy = T>
__global__ void __launch_bounds__(kCombineThreads)
    te_combine_bwd(const CombineArgs<T> a, const float* scales = nullptr) {
  const int64_t token = blockIdx.x;
  const Dy* dy = reinterpret_cast<const Dy*>(a.y) + token * a.n;
  for (int choice = WarpIndex(); choice < a.topk; choice += kCombineThreads / 32) {
    const int position = a.positions[token * a.topk + choice];
    const T* row = a.rows + position * a.n;
    float sum = 0.f;
    for (int64_t column = Lane() * 8; position >= 0 && column < a.n; column += 32 * 8) {
      const int columns = int(min(a.n - column, int64_t{8}));
      const auto left = LoadRow<kVectors, true>(dy + column, columns);
      const auto right = LoadRow<kVectors>(row + column, columns);
      const float scale = sizeof(Dy) == 1 ? scales[column / 128 * gridDim.x + token] : 1.f;
#pragma unroll
      for (int j = 0; j < 8; ++j) sum += left[j] * scale * right[j];
    }
    sum = WarpSum(sum);
    if (Lane() == 0) a.weights[token * a.topk + choice] = sum;
  }
}

// What both passes check; y is dy in the backward pass.
Status ExpectCombine(const char* op, const Tensor& rows, const Tensor& positions, const Tensor& weights,
                     const Tensor& y, bool backward, bool fp8 = false) {
  TE_TRY(ExpectRank(op, "rows", rows, 2, true));
  TE_TRY(ExpectRank(op, "positions", positions, 1));
  const Axes choices(positions), tokens = choices.Without(1);
  return Expect(op,
                {{"rows", rows, fp8 ? Types(BF16) : kFloats, Axes(rows)},
                 {"positions", positions, S32, choices},
                 {backward ? "dweights" : "weights", weights, F32, choices, RequiredIf(backward)},
                 {backward ? "dy" : "y", y, fp8 ? F8E4M3FN : rows.type, tokens + Axes{Axes(rows).last()}}});
}

template <typename T>
CombineArgs<T> ArgsOf(const Tensor& rows, const Tensor& addresses, const Tensor& positions,
                      const Tensor& weights, const Tensor& y) {
  const Divisor buffer(unsigned(std::max<int64_t>(rows.sizes[0], 1)));
  return {Data<T>(rows),        Data<uint64_t>(addresses), buffer,        Data<int>(positions),
          Data<float>(weights), static_cast<T*>(y.data),   rows.sizes[1], int(Axes(positions).last())};
}

template <typename T, typename Dy>
Status RunCombineBwd(cudaStream_t stream, const CombineArgs<T>& args, int64_t tokens, const float* scales) {
  const bool vectors = args.n % 8 == 0 && Aligned(args.rows) && Aligned(args.y);
  const auto kernel = vectors ? te_combine_bwd<T, true, Dy> : te_combine_bwd<T, false, Dy>;
  kernel<<<unsigned(tokens), kCombineThreads, 0, stream>>>(args, scales);
  TE_LAUNCHED();
}

}  // namespace

Status LaunchGroup(cudaStream_t stream, Arg experts, Ret offsets, Ret counts, Ret rows, Ret slots,
                   Ret workspace, int64_t num_experts, int64_t buffer) {
  const char* op = "te_group";
  TE_TRY(ExpectRank(op, "experts", experts, 1));
  TE_CHECK(num_experts >= 1 && num_experts <= kMostExperts, "%s: num_experts is %ld; pass 1 to %d.", op,
           long(num_experts), kMostExperts);
  const int64_t pairs = Axes(experts).count(), chunks = std::max<int64_t>(CeilDiv(pairs, kChunk), 1);
  const int64_t least =
      CeilDiv(pairs + (kAlignment - 1) * std::min(num_experts, pairs), kAlignment) * kAlignment;
  TE_CHECK(buffer >= least && buffer <= kMostRows,
           "%s: buffer is %ld; pass at least %ld for experts%s, and less than 2^31.", op, long(buffer),
           long(least), experts.shape().c_str());
  TE_TRY(Expect(op, {{"experts", experts, S32, Axes(experts)},
                     {"offsets", offsets, S32, {num_experts + 1}},
                     {"counts", counts, S32, {num_experts}},
                     {"rows", rows, S32, Axes(experts)},
                     {"slots", slots, S32, {buffer}},
                     {"workspace", workspace, U8, {chunks * num_experts * 4}}}));
  TE_TRY(Fill(stream, 0xff, {slots}));
  if (pairs == 0) return Zero(stream, {offsets, counts});
  const GroupArgs args{Data<int>(experts),
                       Data<int>(workspace),
                       Data<int>(offsets),
                       Data<int>(counts),
                       Data<int>(rows),
                       Data<int>(slots),
                       pairs,
                       int(num_experts),
                       int(chunks)};
  const size_t shared = sizeof(int) * kGroupWarps * num_experts;  // at most 32 KB
  te_group_count<<<unsigned(chunks), kGroupThreads, shared, stream>>>(args);
  te_group_offsets<<<1, kMostExperts, 0, stream>>>(args);
  te_group_rows<<<unsigned(chunks), kGroupThreads, shared, stream>>>(args);
  TE_LAUNCHED();
}

Status LaunchPermute(cudaStream_t stream, Arg x, Arg slots, Arg offsets, Arg weights, Arg scale, Ret rows,
                     Ret data, Ret data_t, Ret amax, Ret amax_partials, int64_t topk) {
  const char* op = "te_permute";
  TE_TRY(ExpectGather(op, x, slots, offsets, weights, topk));
  const int64_t m = slots.count(), n = Axes(x).last();
  const TileArrays arrays{{scale, amax, kNone, kNone, amax_partials}, data, data_t, "rows", rows};
  TE_TRY(ExpectTiles(op, x, {m}, {n}, 1, arrays));
  if (m == 0 || n == 0) return Finish(stream, arrays.totals);
  TE_TRY(DispatchFloat(x.type, [&]<typename T>() {
    const GatherSource<T> source{
        GatheredRows<T>::Of(x, slots, offsets, weights, topk, kTileRows, kTileColumns)};
    return LaunchTiles<te_permute_kernels>(op, stream, source, Aligned(source.x), m, n, arrays);
  }));
  return Finish(stream, arrays.totals);
}

Status LaunchCombine(cudaStream_t stream, Arg rows, Arg positions, Arg weights, Arg addresses, Ret y) {
  const char* op = "te_combine";
  TE_TRY(ExpectCombine(op, rows, positions, weights, y, false));
  TE_TRY(ExpectAddresses(op, addresses, rows.sizes[0]));
  if (!Present(y)) return {};
  return DispatchFloat(rows.type, [&]<typename T>() -> Status {
    const auto args = ArgsOf<T>(rows, addresses, positions, weights, y);
    const bool vectors = args.n % 8 == 0 && Aligned(args.rows) && Aligned(args.y);
    const auto kernel = vectors ? te_combine<T, true> : te_combine<T, false>;
    const auto tokens = unsigned(Axes(positions).Without(1).count());
    kernel<<<tokens, kCombineThreads, 0, stream>>>(args);
    TE_LAUNCHED();
  });
}

Status LaunchCombineBwd(cudaStream_t stream, Arg dy, Arg rows, Arg positions, Arg scales, Ret dweights) {
  const char* op = "te_combine_bwd";
  const bool fp8 = Present(scales);
  TE_TRY(ExpectCombine(op, rows, positions, dweights, dy, true, fp8));
  const Axes tokens = Axes(positions).Without(1);
  TE_TRY(Expect(op, {{"scales", scales, F32, Axes{CeilDiv(Axes(rows).last(), 128)} + tokens, kOptional}}));
  if (!Present(dy)) return Zero(stream, {dweights});
  if (fp8)
    return RunCombineBwd<__nv_bfloat16, __nv_fp8_e4m3>(
        stream, ArgsOf<__nv_bfloat16>(rows, kNone, positions, dweights, dy), tokens.count(),
        Data<float>(scales));
  return DispatchFloat(rows.type, [&]<typename T>() {
    return RunCombineBwd<T, T>(stream, ArgsOf<T>(rows, kNone, positions, dweights, dy), tokens.count(),
                               nullptr);
  });
}

}  // namespace te
