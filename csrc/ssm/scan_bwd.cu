// te_ssd_bwd, in three kernels for each slab of rows and tokens, the last tokens first; what they exchange
// fits in L2. The first walks over the chunks of a head as the forward pass does, and keeps the state before
// each of them, and what the loss's gradient to the state is behind each. The second has all that a chunk's
// gradients follow from: a CTA has a chunk of some heads, one after the other, which share B and C and the
// sums of their gradients; sums over heads are taken where that makes products smaller. The third adds up the
// gradients of B and C.

#include "base/finish.h"
#include "base/ops.h"
#include "ssm/scan.cuh"

namespace te {
namespace ssm {
namespace {

constexpr int kGradWarps = 8, kGradThreads = 32 * kGradWarps;

struct Slab {
  int rows, tokens;  // of a slab, the tokens a multiple of kKept
  int first_row, first_token;
  int heads;  // of a CTA of the second kernel

  __device__ __forceinline__ int Chunks() const { return tokens / kChunk; }
};

struct GradArgs {
  StepArgs steps;
  Slab slab;
  const Bf16 *dy, *x, *B, *C;  // dy, x [rows, s, h, p], B, C [rows, s, g, n]
  const float *D, *kept;       // D? [h, channels], kept [rows, s / kKept, h, p, n]
  const float* after;  // [rows, h, p, n], or nullptr: the gradient to the state behind the slab's tokens,
  float* before;       // and before them
  Bf16 *states, *gradients;    // [slab rows, chunks, h, p, n]: of the state before a chunk, and behind it
  float *dB_parts, *dC_parts;  // [slab rows, tokens, g, parts, n]
  Bf16 *dx, *dB, *dC;
  void* ddt;                               // of dt's type
  float *dA_parts, *bias_parts, *D_parts;  // [rows, chunks, h]; the last two may be nullptr
  int g, p, n, channels, parts;

  __device__ __forceinline__ int Group(int head) const { return head / (steps.h / g); }
  // Of the state of a head: of index [.., h, p, n].
  __device__ __forceinline__ int64_t States(int64_t index, int head, int first) const {
    return ((index * steps.h + head) * p + first) * n;
  }
  __device__ __forceinline__ int64_t Channels(int64_t token, int head, int first) const {
    return (token * steps.h + head) * p + first;
  }
};

// -- states -------------------------------------------------------------------------------------------------

template <int kN, int kP>
struct WalkShared {
  Tile<kChunk, kN> B[2];
  Tile<kChunk, kP> x[2];
  Steps steps[2];
};

// Forward over kKept tokens with x and B, or, kBack, backward over the slab's with dy and C.
template <int kN, int kP, bool kBack>
struct Walk {
  const GradArgs& a;
  WalkShared<kN, kP>& shared;
  const int row, head, first;     // row of the slab
  const int first_chunk, chunks;  // of the slab
  State<kN, kP> state;

  __device__ __forceinline__ int Chunk(int i) const { return first_chunk + (kBack ? chunks - 1 - i : i); }
  __device__ __forceinline__ int64_t Row() const { return a.slab.first_row + row; }

  __device__ __forceinline__ void Fetch(int i) {
    if (i < chunks) {
      const int token = a.slab.first_token + Chunk(i) * kChunk, rows = a.steps.s - token;
      const int64_t at = Row() * a.steps.s + token;
      const int64_t of_group = (at * a.g + a.Group(head)) * a.n;
      if (rows > 0) {
        shared.x[i % 2].Fetch((kBack ? a.dy : a.x) + a.Channels(at, head, first), int64_t(a.steps.h) * a.p,
                              rows, a.p - first);
        shared.B[i % 2].Fetch((kBack ? a.C : a.B) + of_group, int64_t(a.g) * a.n, rows, a.n);
      }
    }
    CommitPrefetch();
  }
  __device__ __forceinline__ void SetSteps(int i) {
    if (WarpIndex() == i % kWarps && i < chunks)
      shared.steps[i % 2].Set(a.steps, Row(), head, a.slab.first_token + Chunk(i) * kChunk);
  }

  __device__ __forceinline__ void Run(const float* from, Bf16* to) {
    const bool has_runs = a.steps.runs;
    Fetch(0);
    SetSteps(0);
    state.Load(from, a.p - first, a.n);
    for (int i = 0; i < chunks; ++i) {
      const int chunk = Chunk(i);
      const bool is_there = a.slab.first_token + chunk * kChunk < a.steps.s;
      WaitForPrefetch<0>();
      __syncthreads();
      Fetch(i + 1);
      SetSteps(i + 1);
      if (!is_there) continue;
      state.Store(to + a.States(int64_t(row) * a.slab.Chunks() + chunk, head, first), a.p - first, a.n);
      const Steps& steps = shared.steps[i % 2];
      constexpr int kLast = Steps::kLast;
      const bool stays = steps.Continues(kLast, has_runs);
      if constexpr (kBack)
        state.Add(
            has_runs, stays, steps.Since(kLast), shared.x[i % 2], shared.B[i % 2],
            [&](int token) { return steps.Since(token); },
            [&](int token) { return steps.Continues(token, has_runs); });
      else
        state.Add(
            has_runs, stays, steps.Since(kLast), shared.x[i % 2], shared.B[i % 2],
            [&](int token) { return steps.Between(token, kLast) * steps.sizes[token]; },
            [&](int token) { return steps.IsSeen(token, kLast, has_runs); });
    }
  }
};

// blockIdx.z: the slab's rows, backward; behind them each kKept tokens of the rows, forward.
template <int kN, int kP>
__global__ void __launch_bounds__(kThreads) te_ssd_bwd_states(const GradArgs a) {
  extern __shared__ uint4 memory[];
  auto& shared = *reinterpret_cast<WalkShared<kN, kP>*>(memory);
  const int head = blockIdx.x, first = blockIdx.y * kP, rows = a.slab.rows;
  if (int(blockIdx.z) < rows) {
    const int row = blockIdx.z;
    const int64_t at = a.States(a.slab.first_row + row, head, first);
    Walk<kN, kP, true> walk{a, shared, row, head, first, 0, a.slab.Chunks()};
    walk.Run(a.after ? a.after + at : nullptr, a.gradients);
    walk.state.Store(a.before + at, a.p - first, a.n);
    return;
  }
  constexpr int kChunks = kKept / kChunk;
  const int index = blockIdx.z - rows, row = index % rows, part = index / rows;
  const int64_t kept = (int64_t(a.slab.first_row) + row) * ((a.steps.s + kKept - 1) / kKept) +
                       a.slab.first_token / kKept + part;
  if (a.slab.first_token + part * kKept >= a.steps.s) return;
  const int chunks = min(kChunks, a.slab.Chunks() - part * kChunks);
  Walk<kN, kP, false> walk{a, shared, row, head, first, part * kChunks, chunks};
  walk.Run(a.kept + a.States(kept, head, first), a.states);
}

// -- gradients
// ------------------------------------------------------------------------------------------------

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
          const float* D = a.D + head * a.channels + (a.channels > 1 ? first + channel : 0);
          low += D[0] * dy.x, high += D[a.channels > 1] * dy.y;
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

// Four neighbours of dB and of dC for each thread.
__global__ void __launch_bounds__(256) te_ssd_bwd_sums(const GradArgs a) {
  const int64_t pieces = int64_t(a.g) * a.n / 4;
  const int64_t i = int64_t(blockIdx.x) * blockDim.x + threadIdx.x, token = i / pieces, row = blockIdx.y;
  if (token >= a.slab.tokens || a.slab.first_token + token >= a.steps.s) return;
  const int64_t column = i % pieces * 4, group = column / a.n;
  const int64_t from = (((row * a.slab.tokens + token) * a.g + group) * a.parts) * a.n + column % a.n;
  const int64_t to = ((a.slab.first_row + row) * a.steps.s + a.slab.first_token + token) * a.g * a.n + column;
#pragma unroll
  for (int which = 0; which < 2; ++which) {
    const float* parts = (which ? a.dC_parts : a.dB_parts) + from;
    float sums[4] = {};
    for (int part = 0; part < a.parts; ++part) {
      const auto four = Load<4>(parts + int64_t(part) * a.n);
#pragma unroll
      for (int j = 0; j < 4; ++j) sums[j] += four[j];
    }
    Store((which ? a.dC : a.dB) + to, Round<Bf16, 4>(sums));
  }
}

template <int kN, int kP, int kStages>
Status RunSlab(cudaStream_t stream, const GradArgs& a) {
  const auto states = te_ssd_bwd_states<kN, kP>;
  const auto chunks = te_ssd_bwd_chunks<kN, kP, kStages>;
  constexpr size_t kWalkBytes = sizeof(WalkShared<kN, kP>), kGradBytes = sizeof(GradShared<kN, kP, kStages>);
  TE_TRY(AllowShared(states, kWalkBytes));
  TE_TRY(AllowShared(chunks, kGradBytes));
  const unsigned rows = a.slab.rows, tokens = a.slab.tokens;
  const dim3 walks(a.steps.h, unsigned(CeilDiv(a.p, kP)), rows * unsigned(1 + CeilDiv(tokens, kKept)));
  const dim3 grid(a.g * a.parts, tokens / kChunk, rows);
  const dim3 sums(unsigned(CeilDiv(int64_t(tokens) * a.g * a.n / 4, 256)), rows);
  states<<<walks, kThreads, kWalkBytes, stream>>>(a);
  chunks<<<grid, kGradThreads, kGradBytes, stream>>>(a);
  te_ssd_bwd_sums<<<sums, 256, 0, stream>>>(a);
  TE_LAUNCHED();
}

template <int kN>
Status RunWithin(cudaStream_t stream, const GradArgs& a, int64_t shared_bytes) {
  static_assert(sizeof(GradShared<kN, 64, 2>) <= 227 * 1024 && sizeof(GradShared<kN, 64, 1>) <= 99 * 1024);
  if (int64_t(sizeof(GradShared<kN, 64, 2>)) <= shared_bytes) return RunSlab<kN, 64, 2>(stream, a);
  return RunSlab<kN, 64, 1>(stream, a);
}

}  // namespace
}  // namespace ssm

Status LaunchSsdBwd(cudaStream_t stream, Arg dy, Arg dlast, Arg x, Arg dt, Arg A, Arg B, Arg C, Arg D, Arg z,
                    Arg dt_bias, Arg runs, Arg states, Ret dx, Ret ddt, Ret dA, Ret dB, Ret dC, Ret dD,
                    Ret dz, Ret ddt_bias, Ret dinitial, Ret workspace, Ret dA_partials, Ret dD_partials,
                    Ret ddt_bias_partials, bool softplus, double least, double most, int64_t shared,
                    int64_t slab_rows, int64_t slab_tokens, int64_t slab_heads) {
  constexpr const char* kOp = "te_ssd_bwd";
  TE_TRY(ExpectRank(kOp, "x", x, 4, true));
  TE_TRY(ExpectRank(kOp, "B", B, 4, true));
  const Axes all(x), tokens = all.First(2), of_groups(B);
  const int64_t rows = all[0], s = all[1], h = all[2], p = all[3], g = of_groups[2], n = of_groups[3];
  const Axes state{rows, h, p, n}, heads{h}, of_heads = Axes{rows * CeilDiv(s, ssm::kChunk), h};
  TE_TRY(
      Expect(kOp, {{"dy", dy, BF16, all},
                   {"dfinal", dlast, F32, state, kOptional},
                   {"x", x, BF16, all},
                   {"dt", dt, Types(BF16) | F32, all.First(3)},
                   {"A", A, F32, heads},
                   {"B", B, BF16, tokens + Axes{g, n}},
                   {"C", C, BF16, tokens + Axes{g, n}},
                   {"D", D, F32, {h, 1}, kOptional},
                   {"z", z, BF16, all, kAbsent},
                   {"dt_bias", dt_bias, F32, heads, kOptional},
                   {"segments", runs, S32, tokens, kOptional},
                   {"states", states, F32, Axes{rows, CeilDiv(s, ssm::kKept)} + state.From(1)},
                   {"dx", dx, BF16, all},
                   {"ddt", ddt, dt.type, all.First(3)},
                   {"dA", dA, F32, heads},
                   {"dB", dB, BF16, of_groups},
                   {"dC", dC, BF16, of_groups},
                   {"dD", dD, F32, {h, 1}, AbsentIf(!Present(D))},
                   {"dz", dz, BF16, all, kAbsent},
                   {"ddt_bias", ddt_bias, F32, heads, AbsentIf(!Present(dt_bias))},
                   {"dinitial", dinitial, F32, state, kOptional},
                   {"dA_partials", dA_partials, F32, of_heads},
                   {"dD_partials", dD_partials, F32, of_heads + Axes{1}, RequiredIf(Present(dD))},
                   {"ddt_bias_partials", ddt_bias_partials, F32, of_heads, RequiredIf(Present(ddt_bias))}}));
  TE_CHECK(g >= 1 && h % g == 0 && shared == (g == 1 ? 1 : h / g), "%s: x is %s, B %s, shared %ld", kOp,
           x.shape().c_str(), B.shape().c_str(), long(shared));
  TE_CHECK(p % 8 == 0 && n % 8 == 0 && n >= 8 && n <= 128,
           "%s: x is %s, B %s; pass multiples of 8, up to 128 states", kOp, x.shape().c_str(),
           B.shape().c_str());
  TE_CHECK(s <= INT32_MAX - ssm::kKept && h * p * n <= INT32_MAX && g * h <= INT32_MAX && p <= 65535,
           "%s: x is %s, too large for one call", kOp, x.shape().c_str());
  TE_CHECK(slab_rows >= 1 && slab_rows <= 256 && slab_heads >= 1 && slab_heads <= h &&
               slab_tokens >= ssm::kChunk && slab_tokens <= 65535 &&
               (slab_tokens >= s ? slab_tokens % ssm::kChunk : slab_tokens % ssm::kKept) == 0,
           "%s: a slab has %ld rows of %ld tokens, %ld heads for each CTA", kOp, long(slab_rows),
           long(slab_tokens), long(slab_heads));
  const int64_t parts = CeilDiv(h / g, slab_heads), chunks = slab_tokens / ssm::kChunk;
  int64_t used = 0;
  const auto take = [&](int64_t bytes) {
    char* at = static_cast<char*>(workspace.data) + used;
    used += CeilDiv(bytes, 256) * 256;
    return at;
  };
  const int64_t kept = Present(dinitial) ? 0 : state.count() * 4, moved = slab_rows * chunks * h * p * n * 2;
  const int64_t summed = slab_rows * slab_tokens * g * parts * n * 4;
  float* carried = reinterpret_cast<float*>(take(kept));
  char *both = take(2 * moved), *sums = take(2 * summed);
  TE_CHECK(workspace.bytes() >= used, "%s: workspace is %s; pass %ld bytes", kOp, workspace.shape().c_str(),
           long(used));
  if (Present(dinitial)) carried = Data<float>(dinitial);
  int64_t shared_bytes = 0;
  TE_TRY(ssm::SharedBytes(&shared_bytes));
  ssm::GradArgs args{};
  args.steps = {dt.data,
                Data<const float>(A),
                Data<const float>(dt_bias),
                Data<const int>(runs),
                int(s),
                int(h),
                dt.type == BF16,
                softplus,
                float(least),
                float(most)};
  args.dy = Data<const ssm::Bf16>(dy), args.x = Data<const ssm::Bf16>(x);
  args.B = Data<const ssm::Bf16>(B), args.C = Data<const ssm::Bf16>(C);
  args.D = Data<const float>(D), args.kept = Data<const float>(states), args.before = carried;
  args.states = reinterpret_cast<ssm::Bf16*>(both),
  args.gradients = reinterpret_cast<ssm::Bf16*>(both + moved);
  args.dB_parts = reinterpret_cast<float*>(sums), args.dC_parts = reinterpret_cast<float*>(sums + summed);
  args.dx = Data<ssm::Bf16>(dx), args.dB = Data<ssm::Bf16>(dB), args.dC = Data<ssm::Bf16>(dC),
  args.ddt = ddt.data;
  args.dA_parts = Data<float>(dA_partials), args.D_parts = Data<float>(dD_partials);
  args.bias_parts = Data<float>(ddt_bias_partials);
  args.g = int(g), args.p = int(p), args.n = int(n), args.channels = 1, args.parts = int(parts);
  for (int64_t row = 0; row < rows; row += slab_rows) {
    args.after = Data<const float>(dlast);
    for (int64_t slab = CeilDiv(s, slab_tokens); slab-- > 0; args.after = carried) {
      args.slab = {int(std::min(slab_rows, rows - row)), int(slab_tokens), int(row), int(slab * slab_tokens),
                   int(slab_heads)};
      TE_TRY((n <= 64 ? ssm::RunWithin<64> : ssm::RunWithin<128>)(stream, args, shared_bytes));
    }
  }
  const auto sum = [](Tensor partials, Tensor result) {
    return Ending{Reduce::kSumOfFloats, partials, result};
  };
  TE_TRY(FinishPartials(stream, sum(dA_partials, dA), sum(ddt_bias_partials, ddt_bias)));
  return FinishPartials(stream, sum(dD_partials, dD));
}

}  // namespace te
