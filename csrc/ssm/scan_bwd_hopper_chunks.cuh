// On Hopper: the gradients of the chunks of a slab, of heads of up to 64 channels.
#pragma once

#include "ssm/hopper.cuh"
#include "ssm/scan_bwd.cuh"

namespace te::ssm {

template <int kN, bool kRuns>
struct HopperGradShared {
  static constexpr int kStages = 3;
  struct Stage {
    uint8_t x[kBoxBytes], dy[kBoxBytes], state[kWideBytes<kN>], gradient[kWideBytes<kN>];
  };
  alignas(1024) Stage stages[kStages];
  alignas(1024) uint8_t B[kWideBytes<kN>], C[kWideBytes<kN>];
  alignas(1024) uint8_t scores[2][kBoxBytes];    // of a head, times decays: a row is a token that sees
  alignas(1024) uint8_t pieces[4][kPieceBytes];  // of dx
  Steps steps[kStages];
  Runs<kRuns> runs;
  float from[4][kChunk];  // sums over the rows of each warp
  uint64_t full[kStages], empty[kStages], scores_full[2], scores_empty[2], group_full[1], sums_full[1];
};

// A chunk of some heads, one after the other, which share B and C, their scores, and sums of their gradients.
// Tokens are the rows of all results. One warpgroup has dC, one dB and dx, one the scores and their gradient.
// All that follows from a product of a state with B or C before it is weighed is what tokens make of that.
template <int kN, bool kRuns>
struct HopperGradients {
  using Shared = HopperGradShared<kN, kRuns>;
  static constexpr int kStages = Shared::kStages, kLast = Steps::kLast;
  const HopperGradArgs& given;
  Shared& s;
  const GradArgs& a = given.a;
  const int row = blockIdx.z, chunk = blockIdx.y, group = blockIdx.x / a.parts, part = blockIdx.x % a.parts;

  __device__ __forceinline__ int Row() const { return a.slab.first_row + row; }
  __device__ __forceinline__ int Token() const { return a.slab.first_token + chunk * kChunk; }
  __device__ __forceinline__ int Head(int i) const {
    return group * (a.steps.h / a.g) + part * a.slab.heads + i;
  }
  __device__ __forceinline__ int Heads() const {
    return min(a.slab.heads, a.steps.h / a.g - part * a.slab.heads);
  }
  __device__ __forceinline__ Ends& EndsOf(int i) const {
    return a.ends[(int64_t(row) * a.slab.Chunks() + chunk) * a.steps.h + Head(i)];
  }
  // The first of the thread's two rows, or the one 8 below.
  __device__ __forceinline__ static int RowOfHalf(int half) {
    return WarpOfGroup() * kBand + RowOf(2 * half);
  }

  __device__ __forceinline__ void Begin() {
    if (threadIdx.x == 0) {
      InitRing(s.full, s.empty, 1, 15 * kArrivals);
      InitRing(s.scores_full, s.scores_empty, 4 * kArrivals, 4 * kArrivals);
      InitBarrier(AddressOf(s.group_full), 1), InitBarrier(AddressOf(s.sums_full), 4 * kArrivals);
      FenceBarrierInit();
    }
    s.runs.Set(a.steps, Row(), Token(), threadIdx.x, kHopperThreads);
    __syncthreads();
  }

  // One warp.
  __device__ __forceinline__ void Copy() const {
    if (Lane() > 0) return;
    ArriveExpecting(AddressOf(s.group_full), 2 * kWideBytes<kN>);
    for (int box = 0; box < kN / 64; ++box) {
      const uint32_t at = box * kBoxBytes, full = AddressOf(s.group_full);
      CopyBox(AddressOf(s.B + at), &given.B, full, 64 * box, group, Token(), Row());
      CopyBox(AddressOf(s.C + at), &given.C, full, 64 * box, group, Token(), Row());
    }
    const int of_slab = row * a.slab.Chunks() + chunk;
    for (int i = 0; i < Heads(); ++i) {
      auto& stage = s.stages[i % kStages];
      const uint32_t full = AddressOf(&s.full[i % kStages]);
      WaitEmpty(s.empty, i);
      ArriveExpecting(full, sizeof(typename Shared::Stage) + sizeof(Steps));
      CopyBox(AddressOf(stage.dy), &given.dy, full, 0, Head(i), Token(), Row());
      CopyBox(AddressOf(stage.x), &given.x, full, 0, Head(i), Token(), Row());
      CopyBytes(AddressOf(&s.steps[i % kStages]), a.StepsOf(Row(), Token(), Head(i)), sizeof(Steps), full);
      for (int box = 0; box < kN / 64; ++box) {
        const uint32_t at = box * kBoxBytes;
        CopyBox(AddressOf(stage.state + at), &given.states, full, 64 * box, 0, Head(i), of_slab);
        CopyBox(AddressOf(stage.gradient + at), &given.gradients, full, 64 * box, 0, Head(i), of_slab);
      }
    }
  }

  // Three warps: the products of the state before the chunk and its gradient behind it, added up.
  __device__ __forceinline__ void Through() const {
    const int warp = WarpOfGroup() - 1;
    for (int i = 0; i < Heads(); ++i) {
      WaitFull(s.full, i);
      const auto& stage = s.stages[i % kStages];
      float sum = 0;
      for (unsigned at = (warp * 32 + Lane()) * 16; at < kWideBytes<kN>; at += 3 * 32 * 16) {
        const auto one = Load<8>(reinterpret_cast<const Bf16*>(stage.state + at));
        const auto other = Load<8>(reinterpret_cast<const Bf16*>(stage.gradient + at));
#pragma unroll
        for (int j = 0; j < 8; ++j) sum += one[j] * other[j];
      }
      Release(s.empty[i % kStages]);
      sum = WarpSum(sum);
      if (Lane() == 0) EndsOf(i).through[warp] = sum;
      if (Lane() == 0 && warp == 0) EndsOf(i).through[3] = 0;
    }
  }

  // The sums over channels of tokens [64, 64] times what the state has of each, for the thread's two rows.
  __device__ __forceinline__ static void PutSums(float (&to)[kChunk], const uint32_t (&tokens)[4][4],
                                                 const float (&of)[32]) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float sum = 0;
#pragma unroll
      for (int j = 0; j < 8; ++j) {
        const float2 two = Unpack(tokens[j / 2][j % 2 * 2 + half]);
        sum += two.x * of[4 * j + 2 * half] + two.y * of[4 * j + 2 * half + 1];
      }
      sum = OfLanes<4>(sum, [](float one, float other) { return one + other; });
      if (Lane() % 4 == 0) to[RowOfHalf(half)] = sum;
    }
  }
  // The thread's two rows, each `by` times; 0 where that is 0.
  __device__ __forceinline__ static void WeighRows(uint32_t (&tokens)[4][4], const float (&by)[2]) {
#pragma unroll
    for (auto& four : tokens)
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float2 two = Unpack(four[i]);
        four[i] = by[i % 2] == 0 ? 0 : Pack(two.x * by[i % 2], two.y * by[i % 2]);
      }
  }
  // sums += tokens state, to be waited for.
  __device__ __forceinline__ static void AddStates(float (&sums)[kN / 2], const uint32_t (&tokens)[4][4],
                                                   const uint8_t* state) {
    BeginProducts();
    MultiplyAcross(sums, tokens, state);
    CommitProducts();
  }
  // Rows that no state reaches, of another run than it, whose inf times their 0 is no number.
  template <typename IsReached>
  __device__ __forceinline__ static void Clear(float (&sums)[kN / 2], IsReached&& is_reached) {
    if constexpr (!kRuns) return;
    const bool reached[2] = {is_reached(RowOfHalf(0)), is_reached(RowOfHalf(1))};
#pragma unroll
    for (int i = 0; i < kN / 2; ++i) sums[i] = reached[i / 2 % 2] ? sums[i] : 0.f;
  }

  // A warpgroup: dC.
  __device__ __forceinline__ void OfC() const {
    float dC[kN / 2] = {};
    WaitFull(s.group_full, 0);
    for (int i = 0; i < Heads(); ++i) {
      WaitFull(s.full, i);
      const auto& stage = s.stages[i % kStages];
      const Steps& steps = s.steps[i % kStages];
      float seen[32], by[2];
      BeginProducts();
      MultiplyAlong<kN>(seen, s.C, stage.state);
      CommitProducts();
      uint32_t dy[4][4], weighed[4][4];
      LoadRows(dy, stage.dy);
      memcpy(weighed, dy, sizeof(dy));
#pragma unroll
      for (int half = 0; half < 2; ++half)
        by[half] = s.runs.Continues(RowOfHalf(half)) ? steps.Since(RowOfHalf(half)) : 0.f;
      WeighRows(weighed, by);
      WaitForProducts<0>();
      Settle(seen);
      AddStates(dC, weighed, stage.state);
      PutSums(EndsOf(i).of_state, dy, seen);
      WaitForProducts<0>();
      Settle(dC);
      Release(s.empty[i % kStages]);
    }
    Clear(dC, [&](int token) { return s.runs.Continues(token); });
    Finish(dC, false);
  }

  // A warpgroup: dB, and dx.
  __device__ __forceinline__ void OfB() const {
    float dB[kN / 2] = {};
    WaitFull(s.group_full, 0);
    for (int i = 0; i < Heads(); ++i) {
      WaitFull(s.full, i);
      const auto& stage = s.stages[i % kStages];
      const Steps& steps = s.steps[i % kStages];
      float dx[32], by[2], left[2];
      BeginProducts();
      MultiplyAlong<kN>(dx, s.B, stage.gradient);
      CommitProducts();
      uint32_t x[4][4];
      LoadRows(x, stage.x);
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int token = RowOfHalf(half);
        left[half] = s.runs.AreOne(token, kLast) ? steps.Between(token, kLast) : 0.f;
        by[half] = left[half] * steps.sizes[token];
      }
      WaitForProducts<0>();
      Settle(dx);
      PutSums(EndsOf(i).to_state, x, dx);
      WeighRows(x, by);
      AddStates(dB, x, stage.gradient);
#pragma unroll
      for (int j = 0; j < 32; ++j) dx[j] = left[j / 2 % 2] == 0 ? 0.f : dx[j] * left[j / 2 % 2];
      OfTokens(i, dx);
      WaitForProducts<0>();
      Settle(dB);
      Settle(dx);
      Release(s.scores_empty[i % 2]);
      WriteTokens(i, dx);
    }
    Clear(dB, [&](int token) { return s.runs.AreOne(token, kLast); });
    Finish(dB, true);
    if (Lane() == 0) WaitForStores();
  }
  // dx through the tokens of the chunk, to be waited for.
  __device__ __forceinline__ void OfTokens(int i, float (&dx)[32]) const {
    WaitFull(s.scores_full, i);
    const uint64_t scores = TileDescriptor<true>(AddressOf(s.scores[i % 2]));
    const uint64_t dy = TileDescriptor<true>(AddressOf(s.stages[i % kStages].dy));
    BeginProducts();
#pragma unroll
    for (int k = 0; k < 4; ++k)
      MultiplyTiles<Factors::kBF16, true, true>(dx, scores + k * kNextProduct<true>,
                                                dy + k * kNextProduct<true>, 1);
    CommitProducts();
  }
  // dx times steps, and through D.
  __device__ __forceinline__ void WriteTokens(int i, float (&dx)[32]) const {
    const int stage = i % kStages;
    uint32_t dy[4][4];
    if (a.D) LoadRows(dy, s.stages[stage].dy);
    const float D = a.D ? a.D[Head(i)] : 0.f;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float step = s.steps[stage].sizes[RowOfHalf(half)];
#pragma unroll
      for (int j = 0; j < 8; ++j) {
        float(&low) = dx[4 * j + 2 * half], (&high) = dx[4 * j + 2 * half + 1];
        low *= step, high *= step;
        if (!a.D) continue;
        const float2 two = Unpack(dy[j / 2][j % 2 * 2 + half]);
        low += D * two.x, high += D * two.y;
      }
    }
    Release(s.empty[stage]);
    const uint32_t piece = AddressOf(s.pieces[WarpOfGroup()]);
    if (Lane() == 0) WaitForReads();  // of the piece before
    __syncwarp();
    PutRows(piece, dx);
    FenceAsync();
    __syncwarp();
    if (Lane() > 0) return;
    StoreBox(&given.dx, piece, 0, Head(i), Token() + WarpOfGroup() * kBand, Row());
    CommitStores();
  }

  // A warpgroup: the scores of each head, and the sum of their gradients, which has a barrier of its own: who
  // waits for the k-th passing of one has waited for those before.
  __device__ __forceinline__ void OfScores() const {
    float scores[32], dscores[32] = {};
    WaitFull(s.group_full, 0);
    BeginProducts();
    MultiplyAlong<kN>(scores, s.C, s.B);
    CommitProducts();
    WaitForProducts<0>();
    Settle(scores);
    for (int i = 0; i < Heads(); ++i) {
      WaitFull(s.full, i);
      const auto& stage = s.stages[i % kStages];
      float dots[32];
      BeginProducts();
      MultiplyAlong<64>(dots, stage.dy, stage.x);
      CommitProducts();
      WaitForProducts<0>();
      Settle(dots);
      WaitEmpty(s.scores_empty, i);
      Weigh(i, scores, dots, dscores);
    }
    const int last = Heads();
    WaitEmpty(s.scores_empty, last);
    PutRows(AddressOf(s.scores[last % 2]) + WarpOfGroup() * kPieceBytes, dscores);
    FenceAsync();
    Release(s.sums_full[0]);
  }

  // Scores of a head, for OfTokens, and what follows from dots, dy x^T.
  __device__ __forceinline__ void Weigh(int i, const float (&scores)[32], const float (&dots)[32],
                                        float (&dscores)[32]) const {
    const Steps& steps = s.steps[i % kStages];
    const int band = WarpOfGroup() * kBand;
    const float sums_to[2] = {steps.sums[RowOfHalf(0)], steps.sums[RowOfHalf(1)]};
    Ends& ends = EndsOf(i);
    float of_head[32], to[2] = {};  // sums over columns
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      const int first = 8 * j + ColumnOf(0);
      float from[2] = {};  // sums over the warp's rows
#pragma unroll
      for (int k = 4 * j; k < 4 * j + 4; ++k) of_head[k] = 0;
      if (8 * j < band + kBand) {
        const float2 sums = *reinterpret_cast<const float2*>(steps.sums + first);
        const float2 sizes = *reinterpret_cast<const float2*>(steps.sizes + first);
#pragma unroll
        for (int k = 0; k < 4; ++k) {
          const int half = k / 2, side = k % 2, line = RowOfHalf(half), column = first + side, at = 4 * j + k;
          const float size = side ? sizes.y : sizes.x;
          const bool is_seen = (8 * j < band || column <= line) && s.runs.AreOne(column, line);
          const float decay = is_seen ? Exp2(sums_to[half] - (side ? sums.y : sums.x)) : 0.f;
          of_head[at] = is_seen ? scores[at] * decay : 0.f;
          if (is_seen) dscores[at] += dots[at] * decay * size;
          const float product = is_seen ? of_head[at] * dots[at] : 0.f;
          // What a token adds to itself cancels in the gradients to decays, where it would drown the rest.
          if (8 * j >= band && column == line)
            ends.dots[line] = dots[at], ends.own[line] = product;
          else
            from[side] += product, to[half] += product * size;
        }
      }
#pragma unroll
      for (int side = 0; side < 2; ++side) {
        const float sum = SumOfBand(from[side]);
        if (Lane() < 4) s.from[WarpOfGroup()][first + side] = sum;
      }
    }
    PutRows(AddressOf(s.scores[i % 2]) + WarpOfGroup() * kPieceBytes, of_head);
    FenceAsync();
    Release(s.scores_full[i % 2]);
    Release(s.empty[i % kStages]);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float sum = OfLanes<4>(to[half], [](float one, float other) { return one + other; });
      if (Lane() % 4 == 0) ends.to[RowOfHalf(half)] = sum;
    }
    NamedBarrier(1, kGroup);  // the sums of all warps are there
    const int t = threadIdx.x % kGroup;
    if (t < kChunk) ends.from[t] = s.from[0][t] + s.from[1][t] + s.from[2][t] + s.from[3][t];
    NamedBarrier(1, kGroup);
  }

  // The gradient of C, or of B, through scores, of all heads, and what there is of it.
  __device__ __forceinline__ void Finish(float (&sums)[kN / 2], bool of_B) const {
    WaitFull(s.sums_full, 0);
    const uint8_t* dscores = s.scores[Heads() % 2];
    uint32_t rows[4][4];
    if (of_B)
      LoadColumns(rows, dscores);
    else
      LoadRows(rows, dscores);
    BeginProducts();
    MultiplyAcross(sums, rows, of_B ? s.C : s.B);
    CommitProducts();
    WaitForProducts<0>();
    Settle(sums);
    float* parts = of_B ? a.dB_parts : a.dC_parts;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int token = RowOfHalf(half);
      if (Token() + token >= a.steps.s) continue;
      const int64_t of_slab = int64_t(row) * a.slab.tokens + chunk * kChunk + token;
      float* to = parts + ((of_slab * a.g + group) * a.parts + part) * a.n + ColumnOf(0);
#pragma unroll
      for (int j = 0; j < kN / 8; ++j)
        if (8 * j < a.n)
          *reinterpret_cast<float2*>(to + 8 * j) =
              make_float2(sums[4 * j + 2 * half], sums[4 * j + 2 * half + 1]);
    }
  }
};

template <int kN, bool kRuns>
__global__ void __launch_bounds__(kHopperThreads, 1)
    te_ssd_bwd_chunks_hopper(const __grid_constant__ HopperGradArgs given) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  extern __shared__ __align__(1024) uint8_t shared[];
  if (given.a.slab.first_token + int(blockIdx.y) * kChunk >= given.a.steps.s) return;
  HopperGradients<kN, kRuns> of{given, *reinterpret_cast<HopperGradShared<kN, kRuns>*>(shared)};
  of.Begin();
  const int group = GroupIndex();
  if (group == 3) {
    GiveRegisters<40>();
    return WarpOfGroup() == 0 ? of.Copy() : of.Through();
  }
  TakeRegisters<152>();
  if (group == 0)
    of.OfC();
  else if (group == 1)
    of.OfB();
  else
    of.OfScores();
#else
  __trap();  // compiled only for Hopper
#endif
}

}  // namespace te::ssm
