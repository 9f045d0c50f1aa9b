// The gradients of the chunks of a slab, of the states before them and the gradients to those behind.

#include "base/check.h"
#include "ssm/scan_bwd.cuh"

namespace te::ssm {
namespace {

constexpr int kGradWarps = 8, kGradThreads = 32 * kGradWarps;

template <int kN, int kP, int kStages>
struct GradShared {
  Tile<kChunk, kN> B, C;
  Tile<kChunk, kP> x[kStages], dy[kStages];
  Tile<kP, kN> states[kStages], gradients[kStages];
  Tile<kChunk, kChunk> scores;
  Steps steps[kStages];
  // Of tokens, of each warp that has some of the columns, or of the rows, that are summed; see Scalars.
  float sums_to[2][kChunk], states_to[2][kChunk], states_from[2][kChunk], sums_from[4][kChunk];
  float dots[kChunk], own[kChunk];  // of a token with itself: dy x, and times its score
  float products[kGradWarps];
};

// A chunk of the heads of a CTA. Tokens are the rows of all products; two warps share a band of them.
template <int kN, int kP, int kStages>
struct Gradients {
  static constexpr int kHalf = kN / 2;  // columns of a warp
  const GradArgs& a;
  GradShared<kN, kP, kStages>& shared;
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
      shared.x[stage].template Fetch<kGradThreads>(a.x + at, stride, rows, a.p - first);
      shared.dy[stage].template Fetch<kGradThreads>(a.dy + at, stride, rows, a.p - first);
      shared.states[stage].template Fetch<kGradThreads>(a.states + state, a.n, a.p - first, a.n);
      shared.gradients[stage].template Fetch<kGradThreads>(a.gradients + state, a.n, a.p - first, a.n);
    }
    CommitPrefetch();
  }
  __device__ __forceinline__ void SetSteps(int unit) {
    if (WarpIndex() == unit % kGradWarps && unit < Units())
      shared.steps[unit % kStages].Set(a.steps, Row(), Head(unit), Token());
  }

  __device__ __forceinline__ void Next(int unit) {
    Fetch(unit);
    SetSteps(unit);
  }

  __device__ __forceinline__ void Run() {
    FetchGroup();
    Next(0);
    for (int i = threadIdx.x; i < kChunk * kChunk / 2; i += kGradThreads)  // what no token sees stays 0
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
        __syncthreads();  // what was fetched is there for all, and scalars have been read
      }
      if (kStages > 1) Next(unit + 1);
      Unit(unit);
      if (unit % Tiles() == Tiles() - 1 && WarpIndex() == unit % kGradWarps) Scalars(unit);
      if (kStages == 1) {
        __syncthreads();
        Next(unit + 1);
      }
    }
    Finish();
  }

  __device__ __forceinline__ void FetchGroup() {
    const int64_t of_group = (At() * a.g + group) * a.n, stride = int64_t(a.g) * a.n;
    const int rows = a.steps.s - Token();
    shared.B.template Fetch<kGradThreads>(a.B + of_group, stride, rows, a.n);
    shared.C.template Fetch<kGradThreads>(a.C + of_group, stride, rows, a.n);
  }

  // Calls `of(i, left, right)` for the scores of the warp that some token sees.
  template <typename Of>
  __device__ __forceinline__ void OfScores(Of&& of) {
#pragma unroll
    for (int i = 0; i < 2; ++i)
      if (From(i) <= Band()) of(i, scores[2 * i], scores[2 * i + 1]);
  }

  __device__ __forceinline__ void Unit(int unit) {
    const int stage = unit % kStages;
    const bool begins = unit % Tiles() == 0;
    Scores(unit, stage, begins);
    Through(stage, begins);
    float dx[kP / 16][4] = {};
    OfState(stage, dx);
    // Two results at a time in the same registers.
    Sides(
        shared.dy[stage], shared.states[stage], shared.C, dC, shared.states_to, begins,
        [&](const Steps& steps, int token) {
          return steps.Continues(token, a.steps.runs) ? steps.Since(token) : 0.f;
        },
        stage);
    Sides(
        shared.x[stage], shared.gradients[stage], shared.B, dB, shared.states_from, begins,
        [&](const Steps& steps, int token) {
          return steps.IsSeen(token, Steps::kLast, a.steps.runs)
                     ? steps.Between(token, Steps::kLast) * steps.sizes[token]
                     : 0.f;
        },
        stage);
    __syncthreads();  // scores are there for all, and sums
    OfTokens(stage, dx);
    WriteTokens(unit, dx);
  }

  // Scores of the head, for OfTokens, and what follows from dy x^T.
  __device__ __forceinline__ void Scores(int unit, int stage, bool begins) {
    const Steps& steps = shared.steps[stage];
    const bool has_runs = a.steps.runs;
    float to[2] = {};  // sums over the warp's columns, of its two rows
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      float dots[2][4] = {};  // dy x^T
      const bool any = From(i) <= Band();
      if (any)
#pragma unroll
        for (int k = 0; k < kP; k += 16) {
          uint32_t d[4];
          shared.dy[stage].A(d, Band(), k);
          Multiply2(dots[0], dots[1], d, [&](auto& b) { shared.x[stage].TransposedB(b, From(i), k); });
        }
#pragma unroll
      for (int tile = 0; tile < 2; ++tile) {
        float from[2] = {};  // sums over the warp's rows, of two columns
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          float mine[2] = {};
#pragma unroll
          for (int side = 0; side < 2; ++side) {
            const int j = 2 * half + side, column = From(i) + 8 * tile + ColumnOf(j),
                      line = Band() + RowOf(j);
            if (!any || !steps.IsSeen(column, line, has_runs)) continue;
            const float decay = steps.Between(column, line), dot = dots[tile][j];
            mine[side] = scores[2 * i + tile][j] * decay;
            dscores[2 * i + tile][j] += dot * decay * steps.sizes[column];
            // What a token adds to itself cancels in the gradients to decays, where it would drown the rest.
            if (column == line) {
              Put(shared.dots[line], dot, begins);
              Put(shared.own[line], mine[side] * dot, begins);
              continue;
            }
            from[side] += mine[side] * dot;
            to[half] += mine[side] * dot * steps.sizes[column];
          }
          if (any)
            *reinterpret_cast<uint32_t*>(shared.scores.At(
                Band() + RowOf(2 * half), From(i) + 8 * tile + ColumnOf(0))) = Pack(mine[0], mine[1]);
        }
#pragma unroll
        for (float& sum : from)
#pragma unroll
          for (int by = 4; by < 32; by *= 2) sum += __shfl_xor_sync(~0u, sum, by);
        if (Lane() < 4)
#pragma unroll
          for (int side = 0; side < 2; ++side)
            Put(shared.sums_from[WarpIndex() % 4][From(i) + 8 * tile + ColumnOf(side)], from[side], begins);
      }
    }
    PutRows(shared.sums_to[Side()], to, begins);
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
    for (int i = threadIdx.x; i < kP * kPieces; i += kGradThreads) {
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
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const int token = Band() + RowOf(j);
      const bool is_seen = steps.IsSeen(token, Steps::kLast, a.steps.runs);
      const float left = steps.Between(token, Steps::kLast);
#pragma unroll
      for (auto& four : dx) four[j] = is_seen ? four[j] * left : 0.f;
    }
  }

  // Adds tokens [kChunk, kP] times a state to the sum over heads, `weight` times, and the unweighed product's
  // rows times those of `other` to `sums`: [kBand, kHalf] of both.
  template <typename Weight>
  __device__ __forceinline__ void Sides(Tile<kChunk, kP>& tokens, Tile<kP, kN>& state,
                                        Tile<kChunk, kN>& other, float (&total)[kHalf / 8][4],
                                        float (&sums)[2][kChunk], bool begins, Weight&& weight, int stage) {
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
      const float by = weight(shared.steps[stage], token);
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
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int token = Band() + RowOf(2 * half);
      if (Token() + token >= a.steps.s) continue;
      const float step = shared.steps[stage].sizes[token];
#pragma unroll
      for (int i = 0; i < kP / 16; ++i) {
        const int channel = Side() * kP / 2 + 8 * i + ColumnOf(0);
        if (first + channel >= a.p) continue;
        float low = dx[i][2 * half] * step, high = dx[i][2 * half + 1] * step;
        if (a.D) {
          const float2 dy = Unpack(*reinterpret_cast<const uint32_t*>(shared.dy[stage].At(token, channel)));
          low += a.D[head] * dy.x, high += a.D[head] * dy.y;
        }
        *reinterpret_cast<uint32_t*>(a.dx + a.Channels(At() + token, head, first) + channel) =
            Pack(low, high);
      }
    }
  }

  // The gradients to steps, of one head, by one warp: two tokens for each lane. A step scales what its token
  // adds, and the decay of all that goes past the token: from tokens before it, or the state, to it and later
  // ones, or the state behind the chunk. Of two tokens that is what is summed to the later less what is
  // summed from the earlier one.
  __device__ __forceinline__ void Scalars(int unit) {
    const int head = Head(unit);
    const bool has_runs = a.steps.runs;
    const Steps& steps = shared.steps[unit % kStages];
    float own[2], ends[2], leaves[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int t = 2 * Lane() + i;
      const float size = steps.sizes[t];
      const float to_state =
          steps.IsSeen(t, Steps::kLast, has_runs)
              ? steps.Between(t, Steps::kLast) * (shared.states_from[0][t] + shared.states_from[1][t])
              : 0.f;
      const float to_tokens =
          shared.sums_from[0][t] + shared.sums_from[1][t] + shared.sums_from[2][t] + shared.sums_from[3][t];
      const float of_state = steps.Continues(t, has_runs)
                                 ? steps.Since(t) * (shared.states_to[0][t] + shared.states_to[1][t])
                                 : 0.f;
      own[i] = to_state + to_tokens + shared.own[t];
      ends[i] = shared.sums_to[0][t] + shared.sums_to[1][t] + of_state - size * to_tokens;
      leaves[i] = size * to_state;
    }
    float through = 0;
#pragma unroll
    for (float product : shared.products) through += product;
    through = steps.Continues(Steps::kLast, has_runs) ? through * steps.Since(Steps::kLast) : 0.f;
    // Of this and later tokens; of earlier ones.
    float behind = ends[0] + ends[1], before = leaves[0] + leaves[1];
#pragma unroll
    for (int by = 1; by < 32; by *= 2) {
      const float later = __shfl_sync(~0u, behind, min(Lane() + by, 31));
      const float earlier = __shfl_sync(~0u, before, max(Lane() - by, 0));
      if (Lane() + by < 32) behind += later;
      if (Lane() >= by) before += earlier;
    }
    const float earlier = __shfl_sync(~0u, before, max(Lane() - 1, 0));
    before = Lane() > 0 ? earlier : 0.f;
    const float later = __shfl_sync(~0u, behind, min(Lane() + 1, 31));
    const float past[2] = {behind + before + through,
                           (Lane() < 31 ? later : 0.f) + ends[1] + before + leaves[0] + through};
    float dA = 0, bias = 0, D = 0;
    const float rate = a.steps.A[head];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int t = 2 * Lane() + i, token = Token() + t;
      if (token >= a.steps.s) continue;
      dA += past[i] * steps.sizes[t];
      D += shared.dots[t];
      const float slope = a.steps.Slope(a.steps.Given(Row(), token, head));
      const float dt = slope == 0 ? 0.f : (own[i] + rate * past[i]) * slope;
      bias += dt;
      const int64_t at = (At() + t) * a.steps.h + head;
      if (a.steps.is_bf16)
        static_cast<Bf16*>(a.ddt)[at] = __float2bfloat16_rn(dt);
      else
        static_cast<float*>(a.ddt)[at] = dt;
    }
    dA = WarpSum(dA), bias = WarpSum(bias), D = WarpSum(D);
    if (Lane() > 0) return;
    const int64_t at = (Row() * ((a.steps.s + kChunk - 1) / kChunk) + Token() / kChunk) * a.steps.h + head;
    a.dA_parts[at] = dA;
    if (a.bias_parts) a.bias_parts[at] = bias;
    if (a.D_parts) a.D_parts[at] = D;
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

template <int kN, int kP, int kStages>
__global__ void __launch_bounds__(kGradThreads) te_ssd_bwd_chunks(const GradArgs a) {
  extern __shared__ uint4 memory[];
  auto& shared = *reinterpret_cast<GradShared<kN, kP, kStages>*>(memory);
  const int group = blockIdx.x / a.parts, part = blockIdx.x % a.parts;
  if (a.slab.first_token + int(blockIdx.y) * kChunk >= a.steps.s) return;
  Gradients<kN, kP, kStages>{a, shared, int(blockIdx.z), int(blockIdx.y), group, part}.Run();
}

template <int kN, int kStages>
Status Run(cudaStream_t stream, const GradArgs& a) {
  const auto chunks = te_ssd_bwd_chunks<kN, 64, kStages>;
  constexpr size_t kBytes = sizeof(GradShared<kN, 64, kStages>);
  TE_TRY(AllowShared(chunks, kBytes));
  const dim3 grid(a.g * a.parts, a.slab.tokens / kChunk, a.slab.rows);
  chunks<<<grid, kGradThreads, kBytes, stream>>>(a);
  TE_LAUNCHED();
}

template <int kN>
Status RunWithin(cudaStream_t stream, const GradArgs& a) {
  static_assert(sizeof(GradShared<kN, 64, 2>) <= 227 * 1024 && sizeof(GradShared<kN, 64, 1>) <= 99 * 1024);
  int64_t bytes = 0;
  TE_TRY(SharedBytes(&bytes));
  return int64_t(sizeof(GradShared<kN, 64, 2>)) <= bytes ? Run<kN, 2>(stream, a) : Run<kN, 1>(stream, a);
}

}  // namespace

Status RunChunks(cudaStream_t stream, const GradArgs& a) {
  return a.n <= 64 ? RunWithin<64>(stream, a) : RunWithin<128>(stream, a);
}

}  // namespace te::ssm
