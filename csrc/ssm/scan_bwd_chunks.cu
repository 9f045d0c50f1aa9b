// The gradients of the chunks of a slab, of the states before them and the gradients to those behind.

#include "base/check.h"
#include "ssm/scan_bwd.cuh"

namespace te::ssm {
namespace {

template <int kN, int kP, int kStages, bool kRuns>
struct GradShared {
  Tile<kChunk, kN> B, C;
  Tile<kChunk, kP> x[kStages], dy[kStages];
  Tile<kP, kN> states[kStages], gradients[kStages];
  Tile<kChunk, kChunk> scores;
  Steps steps[kStages];
  Runs<kRuns> runs;
  // Of tokens, of each warp that has some of the columns, or of the rows, that are summed; see Ends.
  float sums_to[2][kChunk], states_to[2][kChunk], states_from[2][kChunk], sums_from[4][kChunk];
  float dots[kChunk], own[kChunk];  // of a token with itself: dy x, and times its score
  float products[kWarps];
};

// A chunk of the heads of a CTA. Tokens are the rows of all products; two warps share a band of them.
template <int kN, int kP, int kStages, bool kRuns>
struct Gradients {
  static constexpr int kHalf = kN / 2;  // columns of a warp
  const GradArgs& a;
  GradShared<kN, kP, kStages, kRuns>& shared;
  const int row, chunk, group, part;
  float dB[kHalf / 8][4] = {}, dC[kHalf / 8][4] = {};  // [kBand, kHalf]
  float scores[4][4] = {}, dscores[4][4] = {};  // [kBand, 2 * 16]: C B^T, and its gradient, of all heads

  __device__ __forceinline__ static int Band() { return WarpIndex() % 4 * kBand; }
  __device__ __forceinline__ static int Side() { return WarpIndex() / 4; }
  // The columns of scores that a warp has, by 16: the later ones are seen by fewer.
  __device__ __forceinline__ static int From(int i) { return 32 * i + 16 * Side(); }

  __device__ __forceinline__ int Tiles() const { return (a.p + kP - 1) / kP; }
  __device__ __forceinline__ int FirstHead() const { return group * (a.steps.h / a.g) + part * a.slab.heads; }
  __device__ __forceinline__ int Units() const {
    return min(a.slab.heads, (group + 1) * (a.steps.h / a.g) - FirstHead()) * Tiles();
  }
  __device__ __forceinline__ int Head(int unit) const { return FirstHead() + unit / Tiles(); }
  __device__ __forceinline__ int First(int unit) const { return unit % Tiles() * kP; }
  __device__ __forceinline__ int64_t Row() const { return a.slab.first_row + row; }
  __device__ __forceinline__ int Token() const { return a.slab.first_token + chunk * kChunk; }
  __device__ __forceinline__ int64_t At() const { return Row() * a.steps.s + Token(); }

  __device__ __forceinline__ void Fetch(int unit) {
    if (unit < Units()) {
      const int head = Head(unit), first = First(unit), rows = a.steps.s - Token(), stage = unit % kStages;
      const int64_t at = a.Channels(At(), head, first), stride = int64_t(a.steps.h) * a.p;
      const int64_t state = a.States(int64_t(row) * a.slab.Chunks() + chunk, head, first);
      shared.x[stage].Fetch(a.x + at, stride, rows, a.p - first);
      shared.dy[stage].Fetch(a.dy + at, stride, rows, a.p - first);
      shared.states[stage].Fetch(a.states + state, a.n, a.p - first, a.n);
      shared.gradients[stage].Fetch(a.gradients + state, a.n, a.p - first, a.n);
      shared.steps[stage].Fetch(a.StepsOf(Row(), Token(), head));
    }
    CommitPrefetch();
  }
  __device__ __forceinline__ void Run() {
    FetchGroup();
    Fetch(0);
    for (int i = threadIdx.x; i < kChunk * kChunk / 2; i += kThreads)  // what no token sees stays 0
      *reinterpret_cast<uint32_t*>(shared.scores.At(i / (kChunk / 2), i % (kChunk / 2) * 2)) = 0;
    WaitForPrefetch<0>();
    __syncthreads();
    OfScores([&](int i, auto& left, auto& right) {
      for (int k = 0; k < kN; k += 16) {
        uint32_t c[4];
        shared.C.A(c, Band(), k);
        Multiply2(left, right, c, [&](auto& b) { shared.B.TransposedB(b, From(i), k); });
      }
    });
    for (int unit = 0; unit < Units(); ++unit) {
      if (unit > 0) {
        WaitForPrefetch<0>();
        __syncthreads();  // what was fetched is there for all, and scores and sums have been read
      }
      if (kStages > 1) Fetch(unit + 1);
      Unit(unit);
      if (kStages == 1) {
        __syncthreads();
        Fetch(unit + 1);
      }
    }
    Finish();
  }

  __device__ __forceinline__ void FetchGroup() {
    const int64_t of_group = (At() * a.g + group) * a.n, stride = int64_t(a.g) * a.n;
    const int rows = a.steps.s - Token();
    shared.B.Fetch(a.B + of_group, stride, rows, a.n);
    shared.C.Fetch(a.C + of_group, stride, rows, a.n);
    shared.runs.Set(a.steps, Row(), Token());
  }

  // Calls `of(i, left, right)` for the scores of the warp that some token sees.
  template <typename Of>
  __device__ __forceinline__ void OfScores(Of&& of) {
#pragma unroll
    for (int i = 0; i < 2; ++i)
      if (From(i) <= Band()) of(i, scores[2 * i], scores[2 * i + 1]);
  }

  __device__ __forceinline__ void Unit(int unit) {
    const int stage = unit % kStages, tile = unit % Tiles();
    const bool begins = tile == 0;
    const Steps& steps = shared.steps[stage];
    Scores(stage, begins);
    Through(stage, begins);
    float dx[kP / 16][4] = {};
    OfState(stage, dx);
    Sides(shared.dy[stage], shared.states[stage], shared.C, dC, shared.states_to, begins,
          [&](int token) { return shared.runs.Continues(token) ? steps.Since(token) : 0.f; });
    Sides(shared.x[stage], shared.gradients[stage], shared.B, dB, shared.states_from, begins, [&](int token) {
      return shared.runs.AreOne(token, Steps::kLast) ? steps.Weight(token, Steps::kLast) : 0.f;
    });
    __syncthreads();  // scores are there for all, and sums
    if (tile == Tiles() - 1) WriteEnds(Head(unit));
    OfTokens(stage, dx);
    WriteTokens(unit, dx);
  }

  // Scores of the head, for OfTokens, and what follows from dy x^T.
  __device__ __forceinline__ void Scores(int stage, bool begins) {
    float to[2] = {};  // sums over the warp's columns, of its two rows
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      float dots[2][4] = {}, from[2][2] = {};  // dy x^T; sums over the warp's rows, of its columns
      if (From(i) <= Band()) {
#pragma unroll
        for (int k = 0; k < kP; k += 16) {
          uint32_t d[4];
          shared.dy[stage].A(d, Band(), k);
          Multiply2(dots[0], dots[1], d, [&](auto& b) { shared.x[stage].TransposedB(b, From(i), k); });
        }
#pragma unroll
        for (int tile = 0; tile < 2; ++tile)
#pragma unroll
          for (int half = 0; half < 2; ++half)
            Weigh(stage, i, tile, half, dots[tile], begins, to[half], from[tile]);
      }
#pragma unroll
      for (int tile = 0; tile < 2; ++tile)
#pragma unroll
        for (int side = 0; side < 2; ++side) {
          const float sum = SumOfBand(from[tile][side]);
          if (Lane() < 4)
            Put(shared.sums_from[WarpIndex() % 4][From(i) + 8 * tile + ColumnOf(side)], sum, begins);
        }
    }
    PutRows(shared.sums_to[Side()], to, begins);
  }

  // Two neighbours of a row of scores.
  __device__ __forceinline__ void Weigh(int stage, int i, int tile, int half, const float (&dots)[4],
                                        bool begins, float& to, float (&from)[2]) {
    const Steps& steps = shared.steps[stage];
    const int line = Band() + RowOf(2 * half), first = From(i) + 8 * tile + ColumnOf(0);
    const float2 sums = *reinterpret_cast<const float2*>(steps.sums + first);
    const float2 sizes = *reinterpret_cast<const float2*>(steps.sizes + first);
    const float decays[2] = {Exp2(steps.sums[line] - sums.x), Exp2(steps.sums[line] - sums.y)};
    const bool crosses = From(i) == Band();  // the diagonal
    float mine[2];
#pragma unroll
    for (int side = 0; side < 2; ++side) {
      const int column = first + side, j = 2 * half + side;
      const bool is_seen = (!crosses || column <= line) && shared.runs.AreOne(column, line);
      const float decay = is_seen ? decays[side] : 0.f, size = side ? sizes.y : sizes.x, dot = dots[j];
      mine[side] = is_seen ? scores[2 * i + tile][j] * decay : 0.f;
      if (is_seen) dscores[2 * i + tile][j] += dot * decay * size;
      const float product = is_seen ? mine[side] * dot : 0.f;
      // What a token adds to itself cancels in the gradients to decays, where it would drown the rest.
      if (crosses && column == line) {
        Put(shared.dots[line], dot, begins);
        Put(shared.own[line], product, begins);
      } else {
        from[side] += product, to += product * size;
      }
    }
    *reinterpret_cast<uint32_t*>(shared.scores.At(line, first)) = Pack(mine[0], mine[1]);
  }

  __device__ __forceinline__ static void Put(float& place, float value, bool begins) {
    place = begins ? value : place + value;
  }
  // A value of each of the thread's two rows, summed over the four threads that share them.
  __device__ __forceinline__ static void PutRows(float (&place)[kChunk], float (&of)[2], bool begins) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float sum = OfLanes<4>(of[half], [](float one, float other) { return one + other; });
      if (Lane() % 4 == 0) Put(place[Band() + RowOf(2 * half)], sum, begins);
    }
  }

  // The product of the state before the chunk and its gradient behind it, added up.
  __device__ __forceinline__ void Through(int stage, bool begins) {
    float sum = 0;
    constexpr int kPieces = kN / 8;
#pragma unroll 4
    for (int i = threadIdx.x; i < kP * kPieces; i += kThreads) {
      const auto one = Load<8>(shared.states[stage].At(i / kPieces, i % kPieces * 8));
      const auto other = Load<8>(shared.gradients[stage].At(i / kPieces, i % kPieces * 8));
#pragma unroll
      for (int j = 0; j < 8; ++j) sum += one[j] * other[j];
    }
    sum = WarpSum(sum);
    if (Lane() == 0) Put(shared.products[WarpIndex()], sum, begins);
  }

  // dx through the state behind the chunk: [kBand, kP / 2].
  __device__ __forceinline__ void OfState(int stage, float (&dx)[kP / 16][4]) {
    const Steps& steps = shared.steps[stage];
#pragma unroll
    for (int k = 0; k < kN; k += 16) {
      uint32_t b[4];
      shared.B.A(b, Band(), k);
#pragma unroll
      for (int i = 0; i < kP / 32; ++i)
        Multiply2(dx[2 * i], dx[2 * i + 1], b, [&](auto& words) {
          shared.gradients[stage].TransposedB(words, Side() * kP / 2 + 16 * i, k);
        });
    }
    const float sum = steps.sums[Steps::kLast];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int token = Band() + RowOf(2 * half);
      const bool is_seen = shared.runs.AreOne(token, Steps::kLast);
      const float left = Exp2(sum - steps.sums[token]);
#pragma unroll
      for (auto& four : dx)
#pragma unroll
        for (int j = 2 * half; j < 2 * half + 2; ++j) four[j] = is_seen ? four[j] * left : 0.f;
    }
  }

  // Adds tokens [kChunk, kP] times a state to the sum over heads, `weight` times, and the unweighed product's
  // rows times those of `other` to `sums`: [kBand, kHalf] of both.
  template <typename Weight>
  __device__ __forceinline__ void Sides(Tile<kChunk, kP>& tokens, Tile<kP, kN>& state,
                                        Tile<kChunk, kN>& other, float (&total)[kHalf / 8][4],
                                        float (&sums)[2][kChunk], bool begins, Weight&& weight) {
    float product[kHalf / 8][4] = {};
#pragma unroll
    for (int k = 0; k < kP; k += 16) {
      uint32_t t[4];
      tokens.A(t, Band(), k);
#pragma unroll
      for (int i = 0; i < kHalf / 16; ++i)
        Multiply2(product[2 * i], product[2 * i + 1], t,
                  [&](auto& b) { state.B(b, k, Side() * kHalf + 16 * i); });
    }
    float along[2] = {};
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int token = Band() + RowOf(2 * half);
      const float by = weight(token);
#pragma unroll
      for (int i = 0; i < kHalf / 8; ++i) {
        const float2 with =
            Unpack(*reinterpret_cast<const uint32_t*>(other.At(token, Side() * kHalf + 8 * i + ColumnOf(0))));
        float (&four)[4] = product[i];
        along[half] += four[2 * half] * with.x + four[2 * half + 1] * with.y;
        if (by != 0)
          total[i][2 * half] += by * four[2 * half], total[i][2 * half + 1] += by * four[2 * half + 1];
      }
    }
    PutRows(sums[Side()], along, begins);
  }

  // dx through the tokens of the chunk, and through D.
  __device__ __forceinline__ void OfTokens(int stage, float (&dx)[kP / 16][4]) {
#pragma unroll
    for (int k = 0; k < kChunk; k += 16)
      if (k >= Band()) {
        uint32_t m[4];
        shared.scores.TransposedA(m, k, Band());
#pragma unroll
        for (int i = 0; i < kP / 32; ++i)
          Multiply2(dx[2 * i], dx[2 * i + 1], m,
                    [&](auto& b) { shared.dy[stage].B(b, k, Side() * kP / 2 + 16 * i); });
      }
  }
  __device__ __forceinline__ void WriteTokens(int unit, const float (&dx)[kP / 16][4]) {
    const int head = Head(unit), first = First(unit), stage = unit % kStages;
    const int column = Side() * kP / 2 + ColumnOf(0), left = a.p - first - column;  // channels from there on
    const float D = a.D ? a.D[head] : 0.f;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int token = Band() + RowOf(2 * half);
      if (Token() + token >= a.steps.s) continue;
      const float step = shared.steps[stage].sizes[token];
      const Bf16* dy = shared.dy[stage].At(token, column);
      Bf16* to = a.dx + a.Channels(At() + token, head, first) + column;
#pragma unroll
      for (int i = 0; i < kP / 16; ++i) {
        if (8 * i >= left) continue;
        float low = dx[i][2 * half] * step, high = dx[i][2 * half + 1] * step;
        if (a.D) {
          const float2 of_dy = Unpack(*reinterpret_cast<const uint32_t*>(dy + 8 * i));
          low += D * of_dy.x, high += D * of_dy.y;
        }
        *reinterpret_cast<uint32_t*>(to + 8 * i) = Pack(low, high);
      }
    }
  }

  __device__ __forceinline__ void WriteEnds(int head) const {
    Ends& to = a.ends[(int64_t(row) * a.slab.Chunks() + chunk) * a.steps.h + head];
    const int t = threadIdx.x;
    if (t < kChunk) {
      to.to[t] = shared.sums_to[0][t] + shared.sums_to[1][t];
      to.from[t] =
          shared.sums_from[0][t] + shared.sums_from[1][t] + shared.sums_from[2][t] + shared.sums_from[3][t];
      to.of_state[t] = shared.states_to[0][t] + shared.states_to[1][t];
      to.to_state[t] = shared.states_from[0][t] + shared.states_from[1][t];
      to.own[t] = shared.own[t], to.dots[t] = shared.dots[t];
    }
    if (t != kChunk) return;
    float sum = 0;
#pragma unroll
    for (float product : shared.products) sum += product;
    *reinterpret_cast<float4*>(to.through) = make_float4(sum, 0, 0, 0);
  }

  // The gradients of B and C through scores, of all heads, and what there is of them.
  __device__ __forceinline__ void Finish() {
    __syncthreads();  // none reads scores any more
#pragma unroll
    for (int i = 0; i < 2; ++i)
      if (From(i) <= Band())
#pragma unroll
        for (int tile = 0; tile < 2; ++tile)
#pragma unroll
          for (int j = 0; j < 4; j += 2)
            *reinterpret_cast<uint32_t*>(
                shared.scores.At(Band() + RowOf(j), From(i) + 8 * tile + ColumnOf(0))) =
                Pack(dscores[2 * i + tile][j], dscores[2 * i + tile][j + 1]);
    __syncthreads();
#pragma unroll
    for (int k = 0; k < kChunk; k += 16) {
      uint32_t m[4];
      if (k <= Band()) {
        shared.scores.A(m, Band(), k);
#pragma unroll
        for (int i = 0; i < kHalf / 16; ++i)
          Multiply2(dC[2 * i], dC[2 * i + 1], m, [&](auto& b) { shared.B.B(b, k, Side() * kHalf + 16 * i); });
      }
      if (k >= Band()) {
        shared.scores.TransposedA(m, k, Band());
#pragma unroll
        for (int i = 0; i < kHalf / 16; ++i)
          Multiply2(dB[2 * i], dB[2 * i + 1], m, [&](auto& b) { shared.C.B(b, k, Side() * kHalf + 16 * i); });
      }
    }
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int token = Band() + RowOf(2 * half);
      if (Token() + token >= a.steps.s) continue;
      const int64_t of_slab = int64_t(row) * a.slab.tokens + chunk * kChunk + token;
      const int64_t at = ((of_slab * a.g + group) * a.parts + part) * a.n;
#pragma unroll
      for (int i = 0; i < kHalf / 8; ++i) {
        const int column = Side() * kHalf + 8 * i + ColumnOf(0);
        if (column >= a.n) continue;
        *reinterpret_cast<float2*>(a.dB_parts + at + column) =
            make_float2(dB[i][2 * half], dB[i][2 * half + 1]);
        *reinterpret_cast<float2*>(a.dC_parts + at + column) =
            make_float2(dC[i][2 * half], dC[i][2 * half + 1]);
      }
    }
  }
};

template <int kN, int kP, int kStages, bool kRuns>
__global__ void __launch_bounds__(kThreads) te_ssd_bwd_chunks(const GradArgs a) {
  extern __shared__ uint4 memory[];
  auto& shared = *reinterpret_cast<GradShared<kN, kP, kStages, kRuns>*>(memory);
  const int group = blockIdx.x / a.parts, part = blockIdx.x % a.parts;
  if (a.slab.first_token + int(blockIdx.y) * kChunk >= a.steps.s) return;
  Gradients<kN, kP, kStages, kRuns>{a, shared, int(blockIdx.z), int(blockIdx.y), group, part}.Run();
}

template <int kN, int kStages, bool kRuns>
Status Run(cudaStream_t stream, const GradArgs& a) {
  const auto chunks = te_ssd_bwd_chunks<kN, 64, kStages, kRuns>;
  constexpr size_t kBytes = sizeof(GradShared<kN, 64, kStages, kRuns>);
  TE_TRY(AllowShared(chunks, kBytes));
  const dim3 grid(a.g * a.parts, a.slab.tokens / kChunk, a.slab.rows);
  chunks<<<grid, kThreads, kBytes, stream>>>(a);
  TE_LAUNCHED();
}

template <int kN, bool kRuns>
Status RunWithin(cudaStream_t stream, const GradArgs& a) {
  constexpr int64_t kTwo = sizeof(GradShared<kN, 64, 2, true>), kOne = sizeof(GradShared<kN, 64, 1, true>);
  static_assert(kTwo <= 227 * 1024 && kOne <= 99 * 1024);
  int64_t bytes = 0;
  TE_TRY(SharedBytes(&bytes));
  return kTwo <= bytes ? Run<kN, 2, kRuns>(stream, a) : Run<kN, 1, kRuns>(stream, a);
}

}  // namespace

Status RunChunks(cudaStream_t stream, const GradArgs& a) {
  return DispatchStates(a.n, a.steps.runs,
                        [&]<int kN, bool kRuns>() { return RunWithin<kN, kRuns>(stream, a); });
}

}  // namespace te::ssm
