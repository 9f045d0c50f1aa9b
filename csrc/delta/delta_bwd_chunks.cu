// The gradients of the chunks of a slab, of the states before them and the gradients to those behind: a CTA
// has a chunk of the heads of values that share a key, one after the other, and sums over them.

#include "base/check.h"
#include "delta/delta_bwd_ends.cuh"

namespace te::delta {
namespace {

constexpr int kGradThreads = ssm::kThreads, kSides = 2;  // warps that share a band of tokens
constexpr int kBands = kChunk / kBand;
static_assert(kGradThreads == 32 * kBands * kSides);

// Of 64 channels of a head's values.
template <int kD>
struct GradUnit {
  Tokens<kD> state, gradient;  // [channels, kD]
  Tokens<kSlab> dy, written, gradient_written;
  Weights weights;
  Pairs pairs;

  static constexpr int kPieces = (sizeof(Weights) + sizeof(Pairs)) / 16;
  static_assert(kPieces <= kGradThreads);
};

template <int kD, int kStages, bool kRuns>
struct GradShared {
  Tokens<kD> q, k;
  union {
    GradUnit<kD> units[kStages];
    Tokens<kChunk> of_pairs[2];  // behind the last one, where its state and gradient were
  };
  static_assert(2 * sizeof(Tokens<kChunk>) <= 2 * sizeof(Tokens<kD>));  // its pairs are still read
  ssm::Runs<kRuns> runs;
  GradSums<kSides, kSides, kGradThreads / 32> sums;
};

// Tokens are the rows of all products. A band of them is two warps', each with half of the columns.
template <int kD, int kStages, bool kRuns>
struct Gradients {
  static constexpr int kHalf = kD / kSides;
  using Columns = float[kHalf / 8][4];  // [kBand, kHalf]
  using Scores = float[4][4];           // [kBand, 2 * 16]
  const GradArgs& a;
  GradShared<kD, kStages, kRuns>& s;
  const int64_t row;
  const int chunk, group;
  Columns dq = {}, dk = {};
  // Products of keys, and of queries and keys; the gradients to those that a token's key and query have, of
  // all heads.
  Scores keys = {}, queries = {}, dkeys = {}, dqueries = {};
  float along = 0;  // of the token that four threads share: v times the gradient to what it writes

  __device__ __forceinline__ const WalkArgs& Of() const { return a.again; }
  __device__ __forceinline__ static int Band() { return WarpIndex() % kBands * kBand; }
  __device__ __forceinline__ static int Side() { return WarpIndex() / kBands; }
  // The columns of scores that a warp has, by 16: the later ones are seen by fewer.
  __device__ __forceinline__ static int From(int i) { return 32 * i + 16 * Side(); }
  __device__ __forceinline__ static int Column(int i) { return Side() * kHalf + 16 * i; }

  __device__ __forceinline__ int Tiles() const { return (Of().e + kSlab - 1) / kSlab; }
  __device__ __forceinline__ int Heads() const { return Of().h / Of().g; }
  __device__ __forceinline__ int Head(int unit) const { return group * Heads() + unit / Tiles(); }
  __device__ __forceinline__ int First(int unit) const { return unit % Tiles() * kSlab; }
  __device__ __forceinline__ int Token() const { return chunk * kChunk; }
  __device__ __forceinline__ int Rows() const { return Of().s - Token(); }
  __device__ __forceinline__ int64_t ValuesAt(int head, int first) const {
    return ((row * Of().s + Token()) * Of().h + head) * Of().e + first;
  }
  __device__ __forceinline__ int64_t Keys() const {
    return ((row * Of().s + Token()) * Of().g + group) * Of().d;
  }

  __device__ __forceinline__ void Fetch(int i) {
    if (i < Heads() * Tiles()) {
      auto& unit = s.units[i % kStages];
      const int head = Head(i), first = First(i), values = Of().e - first;
      const int64_t state = a.State(row, chunk, head) + int64_t(first) * Of().d;
      const int64_t written = a.Written(row, chunk, head, first);
      const int64_t stride = int64_t(Of().h) * Of().e;
      unit.dy.Fetch(a.back.v + ValuesAt(head, first), stride, Rows(), values);
      unit.written.Fetch(a.written + written, stride, Rows(), values);
      unit.gradient_written.Fetch(a.gradients_written + written, stride, Rows(), values);
      unit.state.Fetch(a.states + state, Of().d, values, Of().d);
      unit.gradient.Fetch(a.gradients + state, Of().d, values, Of().d);
      const Chunk& of = Of().chunks[Of().part.At(row, chunk, head, Of().h)];
      if (threadIdx.x < unit.kPieces)
        PrefetchOrZero16(reinterpret_cast<uint4*>(&unit.weights) + threadIdx.x,
                         reinterpret_cast<const uint4*>(&of.weights) + threadIdx.x, true);
    }
    CommitPrefetch();
  }

  __device__ __forceinline__ void Run() {
    const int64_t stride = int64_t(Of().g) * Of().d;
    s.q.Fetch(Of().q + Keys(), stride, Rows(), Of().d), s.k.Fetch(Of().k + Keys(), stride, Rows(), Of().d);
    s.runs.Set(a.of, row, Token());
    Fetch(0);
    WaitForPrefetch<0>();
    __syncthreads();
#pragma unroll
    for (int i = 0; i < 2; ++i)
      if (From(i) <= Band()) {
        MultiplyTokens<kD>(s.k, s.k, i, keys[2 * i], keys[2 * i + 1]);
        MultiplyTokens<kD>(s.q, s.k, i, queries[2 * i], queries[2 * i + 1]);
      }
    for (int i = 0; i < Heads() * Tiles(); ++i) {
      if (i > 0) {
        WaitForPrefetch<0>();
        __syncthreads();  // what was fetched is there for all, and sums have been read
      }
      if (kStages > 1) Fetch(i + 1);
      Unit(i);
      __syncthreads();  // sums are there, and none reads what was fetched
      if (i % Tiles() == Tiles() - 1) FinishHead(i);
      if (kStages == 1) {
        __syncthreads();  // nor its weights
        Fetch(i + 1);
      }
    }
    Finish();
  }
  // Of the warp's tokens in `left` and those `From(i)` on in `right`, [kBand, 16], both along kColumns.
  template <int kColumns>
  __device__ __forceinline__ static void MultiplyTokens(Tokens<kColumns>& left, Tokens<kColumns>& right,
                                                        int i, float (&low)[4], float (&high)[4]) {
#pragma unroll 2
    for (int k = 0; k < kColumns; k += 16) {
      uint32_t of_left[4];
      left.A(of_left, Band(), k);
      ssm::Multiply2(low, high, of_left, [&](auto& b) { right.TransposedB(b, From(i), k); });
    }
  }

  __device__ __forceinline__ void Unit(int i) {
    auto& unit = s.units[i % kStages];
    const bool begins = i % Tiles() == 0;
    const Weights& weights = unit.weights;
    Values v = {};
    LoadValues(v, Head(i), First(i));  // on their way meanwhile
    OfScores(unit, begins);
    OfValues(unit, v, Head(i), First(i), begins);
    OfState(unit.dy, unit.state, s.q, dq, s.sums.reads, false, [&](int token) {
      const float by = weights.queries[token];
      return make_float2(by, by);
    });
    OfState(unit.gradient_written, unit.state, s.k, dk, s.sums.says, false, [&](int token) {
      const float by = weights.keys[token];
      return make_float2(-by * weights.betas[token], by);
    });
    OfState(unit.written, unit.gradient, s.k, dk, s.sums.leaves, begins, [&](int token) {
      const float by = weights.left[token];
      return make_float2(by, by);
    });
    OfStates(unit, begins);
  }

  // What follows from how much tokens see of each other: with P what queries see, M what keys do, below the
  // diagonal, W what tokens write and R the gradient to what they would write without each other, dP is
  // dy W^T and dM -beta R W^T.
  __device__ __forceinline__ void OfScores(GradUnit<kD>& unit, bool begins) {
    float reads[2] = {}, says[2] = {};  // sums over the warp's columns, of its two rows
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      float of_dy[2][4] = {}, of_keys[2][4] = {}, from[2][2] = {};  // from: sums over the warp's rows
      if (From(i) <= Band()) {
        MultiplyTokens<kSlab>(unit.dy, unit.written, i, of_dy[0], of_dy[1]);
        MultiplyTokens<kSlab>(unit.gradient_written, unit.written, i, of_keys[0], of_keys[1]);
#pragma unroll
        for (int tile = 0; tile < 2; ++tile)
#pragma unroll
          for (int half = 0; half < 2; ++half)
            Weigh(unit, i, tile, half, of_dy[tile], of_keys[tile], reads[half], says[half], from[tile]);
      }
#pragma unroll
      for (int tile = 0; tile < 2; ++tile)
#pragma unroll
        for (int side = 0; side < 2; ++side) {
          const float sum = ssm::SumOfBand(from[tile][side]);
          if (Lane() < 4)
            Put(s.sums.from[WarpIndex() % kBands][From(i) + 8 * tile + ssm::ColumnOf(side)], sum, begins);
        }
    }
    PutRows(s.sums.reads[Side()], reads, begins);
    PutRows(s.sums.says[Side()], says, begins);
  }

  // Two neighbours of a row of scores.
  __device__ __forceinline__ void Weigh(const GradUnit<kD>& unit, int i, int tile, int half,
                                        const float (&of_dy)[4], const float (&of_keys)[4], float& reads,
                                        float& says, float (&from)[2]) {
    const Pairs& pairs = unit.pairs;
    const int line = Band() + ssm::RowOf(2 * half), first = From(i) + 8 * tile + ssm::ColumnOf(0);
    const float2 sums = LoadTwo(pairs.sums + first), lengths = LoadTwo(pairs.of_keys + first);
    const float sum = pairs.sums[line], beta = unit.weights.betas[line];
    const float weights[2] = {Exp2(sum - sums.x) * lengths.x, Exp2(sum - sums.y) * lengths.y};
    const float of_query = a.of.scale * pairs.of_queries[line], of_key = pairs.of_keys[line];
#pragma unroll
    for (int side = 0; side < 2; ++side) {
      const int column = first + side, j = 2 * half + side;
      if (column > line || !s.runs.AreOne(column, line)) continue;
      const float by_query = of_dy[j] * weights[side] * of_query;
      dqueries[2 * i + tile][j] += by_query;
      // What a token sees of itself does not depend on gates.
      if (column == line) continue;
      const float by_key = of_keys[j] * weights[side] * of_key;
      const float read = by_query * queries[2 * i + tile][j], said = by_key * keys[2 * i + tile][j];
      dkeys[2 * i + tile][j] -= beta * by_key;
      reads += read, says += said, from[side] += read - beta * said;
    }
  }

  __device__ __forceinline__ static void Put(float& place, float value, bool begins) {
    place = begins ? value : place + value;
  }
  // A value of each of the thread's two rows, summed over the four threads that share them.
  __device__ __forceinline__ static void PutRows(float (&place)[kChunk], const float (&of)[2], bool begins) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float sum = WarpSum<4>(of[half]);
      if (Lane() % 4 == 0) Put(place[Band() + ssm::RowOf(2 * half)], sum, begins);
    }
  }

  // Adds tokens [kChunk, kSlab] times a state to `total`, `weight(token).x` times; and the product's rows
  // times those of `other`, `weight(token).y` times, to `sums`.
  template <typename Weight>
  __device__ __forceinline__ void OfState(Tokens<kSlab>& tokens, Tokens<kD>& state, Tokens<kD>& other,
                                          Columns& total, float (&sums)[kSides][kChunk], bool begins,
                                          Weight&& weight) {
    Columns product = {};
#pragma unroll 2
    for (int k = 0; k < kSlab; k += 16) {
      uint32_t left[4];
      tokens.A(left, Band(), k);
#pragma unroll
      for (int i = 0; i < kHalf / 16; ++i)
        ssm::Multiply2(product[2 * i], product[2 * i + 1], left, [&](auto& b) { state.B(b, k, Column(i)); });
    }
    float with_other[2] = {};
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int token = Band() + ssm::RowOf(2 * half);
      const float2 by = weight(token);
      if (by.y == 0) continue;
#pragma unroll
      for (int i = 0; i < kHalf / 8; ++i) {
        const float2 of = TwoOf(other, token, i);
        float (&four)[4] = product[i];
        with_other[half] += four[2 * half] * of.x + four[2 * half + 1] * of.y;
        total[i][2 * half] += by.x * four[2 * half], total[i][2 * half + 1] += by.x * four[2 * half + 1];
      }
      with_other[half] *= by.y;
    }
    PutRows(sums[Side()], with_other, begins);
  }
  __device__ __forceinline__ static float2 TwoOf(Tokens<kD>& tile, int token, int i) {
    const Bf16* at = tile.At(token, Side() * kHalf + 8 * i + ssm::ColumnOf(0));
    return ssm::Unpack(*reinterpret_cast<const uint32_t*>(at));
  }

  // v of a token that four threads share; of it, dv, beta times the gradient to what a token would write, and
  // that times v.
  using Values = Vec<Bf16, 8>[kSlab / 32];
  __device__ __forceinline__ bool Has(int first, int j) const {
    return int(threadIdx.x) / 4 < Rows() && first + ColumnOfValues(j) < Of().e;
  }
  __device__ __forceinline__ static int ColumnOfValues(int j) { return threadIdx.x % 4 * 8 + 32 * j; }
  __device__ __forceinline__ int64_t TokenOfValues(int head, int first) const {
    return ValuesAt(head, first) + int64_t(threadIdx.x / 4) * Of().h * Of().e;
  }
  __device__ __forceinline__ void LoadValues(Values& v, int head, int first) const {
#pragma unroll
    for (int j = 0; j < kSlab / 32; ++j)
      if (Has(first, j)) v[j] = Load<8>(Of().v + TokenOfValues(head, first) + ColumnOfValues(j));
  }
  __device__ __forceinline__ void OfValues(GradUnit<kD>& unit, const Values& v, int head, int first,
                                           bool begins) {
    const int token = threadIdx.x / 4;
    const float beta = unit.weights.betas[token];
    if (begins) along = 0;
#pragma unroll
    for (int j = 0; j < kSlab / 32; ++j) {
      if (!Has(first, j)) continue;
      const auto of = Load<8>(unit.gradient_written.At(token, ColumnOfValues(j)));
      float dv[8];
#pragma unroll
      for (int n = 0; n < 8; ++n) along += of[n] * v[j][n], dv[n] = beta * of[n];
      Store(a.dv + TokenOfValues(head, first) + ColumnOfValues(j), Round<Bf16, 8>(dv));
    }
  }

  // The product of the state before the chunk and its gradient behind it.
  __device__ __forceinline__ void OfStates(GradUnit<kD>& unit, bool begins) {
    float sum = 0;
    constexpr int kPieces = kD / 8;
#pragma unroll 2
    for (int i = threadIdx.x; i < kSlab * kPieces; i += kGradThreads) {
      const auto one = Load<8>(unit.state.At(i / kPieces, i % kPieces * 8));
      const auto other = Load<8>(unit.gradient.At(i / kPieces, i % kPieces * 8));
#pragma unroll
      for (int j = 0; j < 8; ++j) sum += one[j] * other[j];
    }
    sum = WarpSum(sum);
    if (Lane() == 0) Put(s.sums.products[WarpIndex()], sum, begins);
  }

  __device__ __forceinline__ void FinishHead(int i) {
    const auto& unit = s.units[i % kStages];
    const int64_t at = (row * Of().s + Token()) * Of().h + Head(i);
    const int token = threadIdx.x / 4;
    const float of_v = WarpSum<4>(along);
    if (threadIdx.x % 4 == 0 && token < Rows())
      a.dbeta[at + int64_t(token) * Of().h] = of_v - s.sums.Says(token);
    if (WarpIndex() > 0) return;
    float past[2];
    s.sums.OfGates(LoadTwo(unit.weights.betas + 2 * Lane()), unit.weights.keeps, past);
#pragma unroll
    for (int n = 0; n < 2; ++n)
      if (2 * Lane() + n < Rows()) a.dgate[at + int64_t(2 * Lane() + n) * Of().h] = past[n];
  }

  // The gradients of queries and keys through scores, of all heads, and what there is of them.
  __device__ __forceinline__ void Finish() {
    __syncthreads();  // none reads the last unit any more
    const Pairs& pairs = s.units[(Heads() * Tiles() - 1) % kStages].pairs;
    PutScores(s.of_pairs[0], dqueries), PutScores(s.of_pairs[1], dkeys);
    __syncthreads();
#pragma unroll
    for (int k = 0; k < kChunk; k += 16) {
      if (k <= Band()) {
        Add(dq, s.of_pairs[0], false, k, s.k);
        Add(dk, s.of_pairs[1], false, k, s.k);
      }
      if (k >= Band()) {
        Add(dk, s.of_pairs[0], true, k, s.q);
        Add(dk, s.of_pairs[1], true, k, s.k);
      }
    }
    if (a.of.normalize) {
      Along(s.q, dq, s.sums.reads), Along(s.k, dk, s.sums.says);
      __syncthreads();
    }
    WriteKeys(a.dq, s.q, dq, s.sums.reads, pairs.of_queries);
    WriteKeys(a.dk, s.k, dk, s.sums.says, pairs.of_keys);
  }
  __device__ __forceinline__ static void PutScores(Tokens<kChunk>& to, const Scores& of) {
#pragma unroll
    for (int i = 0; i < 2; ++i)
#pragma unroll
      for (int tile = 0; tile < 2; ++tile)
#pragma unroll
        for (int j = 0; j < 4; j += 2)
          *reinterpret_cast<uint32_t*>(to.At(Band() + ssm::RowOf(j), From(i) + 8 * tile + ssm::ColumnOf(0))) =
              ssm::Pack(of[2 * i + tile][j], of[2 * i + tile][j + 1]);
  }
  // The 16 columns `k` of scores, or rows, transposed, times the rows of tokens.
  __device__ __forceinline__ static void Add(Columns& to, Tokens<kChunk>& scores, bool transposed, int k,
                                             Tokens<kD>& tokens) {
    uint32_t left[4];
    if (transposed)
      scores.TransposedA(left, k, Band());
    else
      scores.A(left, Band(), k);
#pragma unroll
    for (int i = 0; i < kHalf / 16; ++i)
      ssm::Multiply2(to[2 * i], to[2 * i + 1], left, [&](auto& b) { tokens.B(b, k, Column(i)); });
  }
  __device__ __forceinline__ static void Along(Tokens<kD>& tokens, const Columns& of,
                                               float (&sums)[kSides][kChunk]) {
    float along[2] = {};
#pragma unroll
    for (int half = 0; half < 2; ++half)
#pragma unroll
      for (int i = 0; i < kHalf / 8; ++i) {
        const float2 two = TwoOf(tokens, Band() + ssm::RowOf(2 * half), i);
        along[half] += two.x * of[i][2 * half] + two.y * of[i][2 * half + 1];
      }
    PutRows(sums[Side()], along, true);
  }
  // What a token's length takes away of the gradient, where it is divided by it: what lies along the token.
  __device__ __forceinline__ void WriteKeys(Bf16* to, Tokens<kD>& tokens, const Columns& of,
                                            const float (&sums)[kSides][kChunk], const float* lengths) const {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int token = Band() + ssm::RowOf(2 * half);
      if (token >= Rows()) continue;
      const float less =
          a.of.normalize ? lengths[token] * lengths[token] * (sums[0][token] + sums[1][token]) : 0.f;
      Bf16* const at = to + Keys() + int64_t(token) * Of().g * Of().d;
#pragma unroll
      for (int i = 0; i < kHalf / 8; ++i) {
        const int column = Side() * kHalf + 8 * i + ssm::ColumnOf(0);
        if (column >= Of().d) continue;
        const float2 two = TwoOf(tokens, token, i);
        *reinterpret_cast<uint32_t*>(at + column) =
            ssm::Pack(of[i][2 * half] - less * two.x, of[i][2 * half + 1] - less * two.y);
      }
    }
  }
};

template <int kD, int kStages, bool kRuns>
__global__ void __launch_bounds__(kGradThreads) te_gated_delta_bwd_chunks(const GradArgs a) {
  extern __shared__ uint4 memory[];
  auto& shared = *reinterpret_cast<GradShared<kD, kStages, kRuns>*>(memory);
  const int64_t row = a.part.first_row + int(blockIdx.z);
  const int chunk = a.part.first_chunk + int(blockIdx.y);
  Gradients<kD, kStages, kRuns>{a, shared, row, chunk, int(blockIdx.x)}.Run();
}

template <int kD, int kStages, bool kRuns>
Status Run(cudaStream_t stream, const GradArgs& a) {
  const auto kernel = te_gated_delta_bwd_chunks<kD, kStages, kRuns>;
  constexpr size_t kBytes = sizeof(GradShared<kD, kStages, kRuns>);
  TE_TRY(ssm::AllowShared(kernel, kBytes));
  const dim3 grid(a.of.g, a.part.There(a.of.s), a.part.rows);
  kernel<<<grid, kGradThreads, kBytes, stream>>>(a);
  TE_LAUNCHED();
}

template <int kD, bool kRuns>
Status RunWithin(cudaStream_t stream, const GradArgs& a) {
  constexpr int64_t kTwo = sizeof(GradShared<kD, 2, true>), kOne = sizeof(GradShared<kD, 1, true>);
  static_assert(kTwo <= 227 * 1024 && kOne <= 99 * 1024);
  int64_t bytes = 0;
  TE_TRY(ssm::SharedBytes(&bytes));
  return kTwo <= bytes ? Run<kD, 2, kRuns>(stream, a) : Run<kD, 1, kRuns>(stream, a);
}

}  // namespace

Status RunGradChunks(cudaStream_t stream, const GradArgs& a) {
  return ssm::DispatchStates(a.of.d, a.of.runs,
                             [&]<int kD, bool kRuns>() { return RunWithin<kD, kRuns>(stream, a); });
}

}  // namespace te::delta
