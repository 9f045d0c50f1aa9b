// On Hopper: the gradients of the chunks of a slab, of the states before them and the gradients to those
// behind.
#pragma once

#include "delta/delta_bwd_cluster.cuh"

namespace te::delta {

// A chunk of the heads that share a key, or of some of them, one after the other. Tokens are the rows of all
// results. One warpgroup has dq and dv, one dk, one the gradients to scores. What follows from a product of a
// state with queries or keys before it is weighed is what tokens make of that; so what is added to dq and dk
// is one product of all heads, whose tokens are weighed.
template <int kD, bool kRuns, int kHalves>
struct HopperGradients : GradCta<kD, kRuns, kHalves> {
  using Base = GradCta<kD, kRuns, kHalves>;
  using Shared = typename Base::Shared;
  using Known = typename Shared::Known;
  static constexpr int kStages = Shared::kStages;
  using Base::AreParts, Base::FirstKey, Base::GateAt, Base::GatesOf, Base::Group, Base::Half, Base::Head,
      Base::Heads, Base::Lengths, Base::PutPart, Base::Row, Base::Tiles, Base::Token, Base::Units,
      Base::WeightsOf;
  using Base::given, Base::s, Base::a, Base::row, Base::chunk;

  // Whether any token is of the run before the chunk. If not, nothing of the state may enter: 0 times its inf
  // would stay. Where some are, what they write reaches all of the chunk.
  __device__ __forceinline__ bool SeesState() const { return s.runs.Continues(0); }

  __device__ __forceinline__ void Begin() {
    using ssm::kArrivals;
    if (threadIdx.x == 0) {
      ssm::InitRing(s.full, s.empty, 1, 14 * kArrivals);
      ssm::InitRing(s.sums_full, s.sums_empty, 14 * kArrivals, kArrivals);
      InitBarrier(AddressOf(s.group_full), 1), InitBarrier(AddressOf(s.scores_full), 4 * kArrivals);
      FenceBarrierInit();
    }
    s.runs.Set(a.of, Row(), Token(), threadIdx.x, ssm::kHopperThreads);
    __syncthreads();
  }

  // One warp.
  __device__ __forceinline__ void Copy() const {
    if (Lane() > 0) return;
    const uint32_t of_group = AddressOf(s.group_full);
    ArriveExpecting(of_group, 2 * ssm::kWideBytes<kD>);
    for (int box = 0; box < kD / 64; ++box) {
      const int key = FirstKey() + 64 * box;
      CopyBox(AddressOf(s.q + box * kBoxBytes), &given.q, of_group, key, Group(), Token(), Row());
      CopyBox(AddressOf(s.k + box * kBoxBytes), &given.k, of_group, key, Group(), Token(), Row());
    }
    const int of_slab = row * a.part.chunks + chunk;
    for (int i = 0; i < Units(); ++i) {
      auto& stage = s.stages[i % kStages];
      const int head = Head(i / Tiles()), first = i % Tiles() * kSlab;
      const uint32_t full = AddressOf(&s.full[i % kStages]);
      ssm::WaitEmpty(s.empty, i);
      ArriveExpecting(full, sizeof(typename Shared::Stage) + sizeof(Known));
      CopyBytes(AddressOf(&s.known[i % kStages]), &WeightsOf(i / Tiles()), sizeof(Known), full);
      for (int box = 0; box < kD / 64; ++box) {
        const uint32_t at = box * kBoxBytes;
        const int key = FirstKey() + 64 * box;
        CopyBox(AddressOf(stage.state + at), &given.states, full, key, first, head, of_slab);
        CopyBox(AddressOf(stage.gradient + at), &given.gradients, full, key, first, head, of_slab);
      }
      CopyBox(AddressOf(stage.dy), &given.dy, full, first, head, Token(), Row());
      CopyBox(AddressOf(stage.written), &given.written, full, first, head, chunk * kChunk, row);
      CopyBox(AddressOf(stage.gradients_written), &given.gradients_written, full, first, head, chunk * kChunk,
              row);
    }
  }

  // Two warps: the products of the state before the chunk and its gradient behind it, added up.
  __device__ __forceinline__ void Through() const {
    const int warp = ssm::WarpOfGroup() - 2;
    for (int head = 0; head < Heads(); ++head) {
      float sum = 0;
      for (int i = head * Tiles(); i < (head + 1) * Tiles(); ++i) {
        ssm::WaitFull(s.full, i);
        const auto& stage = s.stages[i % kStages];
#pragma unroll 2
        for (unsigned at = (warp * 32 + Lane()) * 16; at < ssm::kWideBytes<kD>; at += 2 * 32 * 16) {
          const auto one = Load<8>(reinterpret_cast<const Bf16*>(stage.state + at));
          const auto other = Load<8>(reinterpret_cast<const Bf16*>(stage.gradient + at));
#pragma unroll
          for (int j = 0; j < 8; ++j) sum += one[j] * other[j];
        }
        ssm::Release(s.empty[i % kStages]);
      }
      sum = WarpSum(sum);
      ssm::WaitEmpty(s.sums_empty, head);
      if (Lane() == 0) s.sums[head % 2].products[warp] = sum;
      ssm::Release(s.sums_full[head % 2]);
    }
  }

  // One warp: what sums of a head come to. A lane has two tokens.
  __device__ __forceinline__ void OfGates() const {
    for (int head = 0; head < Heads(); ++head) {
      const Weights& weights = WeightsOf(head);
      const float2 betas = LoadTwo(weights.betas + 2 * Lane());
      const float keeps = weights.keeps;
      ssm::WaitFull(s.sums_full, head);
      const auto& sums = s.sums[head % 2];
      float past[2];
      sums.OfGates(betas, keeps, past);
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int token = 2 * Lane() + i;
        const float of_gate = past[i], of_beta = sums.along[token] - sums.Says(token);
        if (Half() > 0) {
          GatesOf(head)[0][token] = of_gate, GatesOf(head)[1][token] = of_beta;
        } else if (Token() + token < a.again.s) {
          const int64_t at = GateAt(head, token);
          a.dgate[at] = of_gate, a.dbeta[at] = of_beta;
        }
      }
      ssm::Release(s.sums_empty[head % 2]);
    }
  }

  // A warpgroup: dq, and by the first half dv, and v times the gradient to what tokens write.
  __device__ __forceinline__ void OfQueries() const {
    float dq[kD / 2] = {};
    ssm::WaitFull(s.group_full, 0);
    for (int head = 0; head < Heads(); ++head) {
      float reads[2] = {}, along[kSlab / 16] = {};
      for (int tile = 0; tile < Tiles(); ++tile) {
        const int i = head * Tiles() + tile;
        const int first = tile * kSlab;
        const int64_t values = ValuesAt(Head(head), first);
        Values v{};
        if (Half() == 0) LoadValues(v, values, first);  // on their way meanwhile
        ssm::WaitFull(s.full, i);
        const auto& stage = s.stages[i % kStages];
        const Weights& weights = s.known[i % kStages].weights;
        const float by[2] = {weights.queries[RowOfHalf(0)], weights.queries[RowOfHalf(1)]};
        float read[32];
        uint32_t dy[4][4];
        MultiplyState<kD>(read, s.q, stage.state);
        if (Half() == 0) OfValues(stage.gradients_written, weights.betas, v, values, first, along);
        LoadWeighed(dy, stage.dy, by);
        WaitForProducts<0>();
        Settle(read);
        AddState<kD>(dq, dy, stage.state);
        AddDots(reads, stage.dy, read, by);
        WaitForProducts<0>();
        Settle(dq);
        ssm::Release(s.empty[i % kStages]);
      }
      ssm::WaitEmpty(s.sums_empty, head);
      auto& sums = s.sums[head % 2];
      PutSums(sums.reads[0], reads);
#pragma unroll
      for (int j = 0; j < kSlab / 16; ++j) {
        const float sum = WarpSum<8>(along[j]);
        if (Lane() % 8 == 0) sums.along[TokenOfValues(j)] = sum;
      }
      ssm::Release(s.sums_full[head % 2]);
    }
#pragma unroll
    for (int i = 0; i < kD / 2; ++i) dq[i] = s.runs.Continues(RowOfHalf(i / 2 % 2)) ? dq[i] : 0.f;
    uint32_t rows[4][4];
    const auto& scores = WaitForScores();
    ssm::LoadRows(rows, scores.dy);
    AddState<kD>(dq, rows, s.k);
    WaitForProducts<0>();
    Settle(dq);
    Write(&given.dq, dq, s.q, true);
  }

  // Eight threads share a token, 16 behind the one before.
  using Values = Vec<Bf16, 8>[kSlab / 16];
  __device__ __forceinline__ static int TokenOfValues(int j) {
    return threadIdx.x % ssm::kGroup / 8 + 16 * j;
  }
  __device__ __forceinline__ bool Has(int j, int first) const {
    return Token() + TokenOfValues(j) < a.again.s && first + int(threadIdx.x) % 8 * 8 < a.again.e;
  }
  // Of the first token, and how far it is to the next.
  __device__ __forceinline__ int64_t ValuesAt(int head, int first) const {
    const int64_t token = Row() * a.again.s + Token() + TokenOfValues(0);
    return (token * a.again.h + head) * a.again.e + first + threadIdx.x % 8 * 8;
  }
  __device__ __forceinline__ int64_t NextValues() const { return int64_t(16) * a.again.h * a.again.e; }
  __device__ __forceinline__ void LoadValues(Values& v, int64_t at, int first) const {
#pragma unroll
    for (int j = 0; j < kSlab / 16; ++j, at += NextValues())
      if (Has(j, first)) v[j] = Load<8>(a.again.v + at);
  }
  // dv, and v times the gradient to what a token writes.
  __device__ __forceinline__ void OfValues(const uint8_t* gradients_written, const float* betas,
                                           const Values& v, int64_t at, int first,
                                           float (&along)[kSlab / 16]) const {
#pragma unroll
    for (int j = 0; j < kSlab / 16; ++j, at += NextValues()) {
      if (!Has(j, first)) continue;
      const int token = TokenOfValues(j);
      const auto of =
          Load<8>(reinterpret_cast<const Bf16*>(gradients_written + InBox(token, threadIdx.x % 8)));
      const float beta = betas[token];
      float dv[8];
#pragma unroll
      for (int n = 0; n < 8; ++n) along[j] += of[n] * v[j][n], dv[n] = beta * of[n];
      Store(a.dv + at, Round<Bf16, 8>(dv));
    }
  }

  // A warpgroup: dk.
  template <bool kSeesState>
  __device__ __forceinline__ void OfKeys() const {
    float dk[kD / 2] = {};
    ssm::WaitFull(s.group_full, 0);
    for (int head = 0; head < Heads(); ++head) {
      float says[2] = {}, leaves[2] = {};
      for (int i = head * Tiles(); i < (head + 1) * Tiles(); ++i) {
        ssm::WaitFull(s.full, i);
        const auto& stage = s.stages[i % kStages];
        const Weights& weights = s.known[i % kStages].weights;
        float product[32], by[2], less[2], left[2];
        uint32_t weighed[4][4], written[4][4];
        if constexpr (kSeesState) MultiplyState<kD>(product, s.k, stage.state);
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const int token = RowOfHalf(half);
          by[half] = weights.keys[token], less[half] = -by[half] * weights.betas[token];
          left[half] = weights.left[token];
        }
        if constexpr (kSeesState) {
          LoadWeighed(weighed, stage.gradients_written, less);
          WaitForProducts<0>();
          Settle(product);
          AddState<kD>(dk, weighed, stage.state);
          AddDots(says, stage.gradients_written, product, by);
        }
        MultiplyState<kD>(product, s.k, stage.gradient);
        LoadWeighed(written, stage.written, left);
        WaitForProducts<0>();
        Settle(product), Settle(dk);
        AddState<kD>(dk, written, stage.gradient);
        AddDots(leaves, stage.written, product, left);
        WaitForProducts<0>();
        Settle(dk);
        ssm::Release(s.empty[i % kStages]);
      }
      ssm::WaitEmpty(s.sums_empty, head);
      PutSums(s.sums[head % 2].says[0], says), PutSums(s.sums[head % 2].leaves[0], leaves);
      ssm::Release(s.sums_full[head % 2]);
    }
    FinishKeys(dk);
  }
  __device__ __forceinline__ void FinishKeys(float (&dk)[kD / 2]) const {
    const auto& scores = WaitForScores();
    uint32_t rows[3][4][4];
    ssm::LoadColumns(rows[0], scores.dy), ssm::LoadColumns(rows[1], scores.written);
    ssm::LoadRows(rows[2], scores.written);
    BeginProducts();
    ssm::MultiplyAcross(dk, rows[0], s.q);
    ssm::MultiplyAcross(dk, rows[1], s.k);
    ssm::MultiplyAcross(dk, rows[2], s.k);
    CommitProducts();
    WaitForProducts<0>();
    Settle(dk);
    Write(&given.dk, dk, s.k, false);
  }

  // The gradients to scores of all heads, of queries where a stage has dy, and of keys where it has what
  // tokens write: it is the stage that the next head would have.
  __device__ __forceinline__ const typename Shared::Stage& WaitForScores() const {
    ssm::WaitFull(s.scores_full, 0);
    return s.stages[Units() % kStages];
  }

  // Less what a token's length takes away of the gradient, where it is divided by it: what lies along the
  // token. By way of the stage behind the one of scores.
  __device__ __forceinline__ void Write(const CUtensorMap* map, float (&of)[kD / 2], const uint8_t* tokens,
                                        bool of_queries) const {
    if (a.of.normalize) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int token = RowOfHalf(half);
        const auto two_of = [&](int j) {
          const uint8_t* at = tokens + j / 8 * kBoxBytes + InBox(token, j % 8) + Lane() % 4 * 4;
          return ssm::Unpack(*reinterpret_cast<const uint32_t*>(at));
        };
        float along = 0;
#pragma unroll
        for (int j = 0; j < kD / 8; ++j) {
          const float2 two = two_of(j);
          along += two.x * of[4 * j + 2 * half] + two.y * of[4 * j + 2 * half + 1];
        }
        along = WarpSum<4>(along);
        if constexpr (kHalves > 1) {
          if (Lane() % 4 == 0) s.along[of_queries][token] = along;
          continue;
        }
        const float less = along * Lengths(of_queries)[token] * Lengths(of_queries)[token];
#pragma unroll
        for (int j = 0; j < kD / 8; ++j) {
          const float2 two = two_of(j);
          of[4 * j + 2 * half] -= less * two.x, of[4 * j + 2 * half + 1] -= less * two.y;
        }
      }
    }
    const int next = Units() + (of_queries ? 1 : 2);
    ssm::WaitEmpty(s.empty, next);
    if (AreParts()) return PutPart(of, of_queries);
    const uint32_t piece = AddressOf(&s.stages[next % kStages]) + ssm::WarpOfGroup() * ssm::kPieceBytes;
#pragma unroll
    for (int box = 0; box < kD / 64; ++box) ssm::PutRows(piece + box * kBoxBytes, of + 32 * box);
    FenceAsync();
    __syncwarp();
    if (Lane() > 0) return;
    for (int box = 0; box < kD / 64; ++box)
      StoreBox(map, piece + box * kBoxBytes, 64 * box, Group(), Token() + ssm::WarpOfGroup() * kBand, Row());
    CommitStores();
    WaitForStores();
  }

  // A warpgroup: the gradients to scores, by so many of a head's units together: none is released before all
  // of them have come, so they are fewer than stages.
  static constexpr int kTogether = 2;
  static_assert(kTogether < kStages);
  __device__ __forceinline__ void OfScores() const {
    float dqueries[32] = {}, dkeys[32] = {};
    ssm::WaitFull(s.group_full, 0);
    for (int head = 0; head < Heads(); ++head) {
      float reads[2] = {}, says[2] = {}, from[8][2] = {}, scores[32], products[32];
      for (int tile = 0; tile < Tiles(); tile += kTogether) {
        const int first = head * Tiles() + tile, last = first + min(kTogether, Tiles() - tile) - 1;
        const Known& known = s.known[last % kStages];
        MultiplyState<kD>(scores, s.q, s.k);
        MultiplyWritten(products, first, last, [](const auto& stage) { return stage.dy; });
        WaitForProducts<0>();
        Settle(scores), Settle(products);
        Weigh<true>(known, scores, products, dqueries, reads, from);
        MultiplyState<kD>(scores, s.k, s.k);
        MultiplyWritten(products, first, last, [](const auto& stage) { return stage.gradients_written; });
        WaitForProducts<0>();
        Settle(scores), Settle(products);
        for (int i = first; i < last; ++i) ssm::Release(s.empty[i % kStages]);
        Weigh<false>(known, scores, products, dkeys, says, from);
        ssm::Release(s.empty[last % kStages]);
      }
      ssm::WaitEmpty(s.sums_empty, head);
      auto& sums = s.sums[head % 2];
      PutSums(sums.reads[1], reads), PutSums(sums.says[1], says);
#pragma unroll
      for (int j = 0; j < 8; ++j)
#pragma unroll
        for (int side = 0; side < 2; ++side) {
          const float sum = ssm::SumOfBand(from[j][side]);
          if (Lane() < 4) sums.from[ssm::WarpOfGroup()][8 * j + ssm::ColumnOf(side)] = sum;
        }
      ssm::Release(s.sums_full[head % 2]);
    }
    ssm::WaitEmpty(s.empty, Units());
    const auto& stage = s.stages[Units() % kStages];
    ssm::PutRows(AddressOf(stage.dy) + ssm::WarpOfGroup() * ssm::kPieceBytes, dqueries);
    ssm::PutRows(AddressOf(stage.written) + ssm::WarpOfGroup() * ssm::kPieceBytes, dkeys);
    FenceAsync();
    ssm::Release(s.scores_full[0]);
  }
  // products = tokens written^T, both along the values of the units from `first` to `last`; to be waited for.
  template <typename TokensOf>
  __device__ __forceinline__ void MultiplyWritten(float (&products)[32], int first, int last,
                                                  TokensOf&& tokens_of) const {
#pragma unroll 1
    for (int i = first; i <= last; ++i) {
      ssm::WaitFull(s.full, i);
      const auto& stage = s.stages[i % kStages];
      const uint64_t left = TileDescriptor<false>(AddressOf(tokens_of(stage)));
      const uint64_t right = TileDescriptor<false>(AddressOf(stage.written));
      BeginProducts();
#pragma unroll
      for (int k = 0; k < kSlab / 16; ++k)
        MultiplyTiles<Factors::kBF16, false, false>(products, left + ssm::Along(k), right + ssm::Along(k),
                                                    i - first + k);
      CommitProducts();
    }
  }

  // What follows from how much tokens see of each other: with P what queries see, M what keys do, below the
  // diagonal, W what tokens write and R the gradient to what they would write without each other, dP is
  // dy W^T and dM -beta R W^T.
  template <bool kOfQueries>
  __device__ __forceinline__ void Weigh(const Known& known, const float (&scores)[32],
                                        const float (&products)[32], float (&gradients)[32], float (&to)[2],
                                        float (&from)[8][2]) const {
    const Pairs& pairs = known.pairs;
    const int band = ssm::WarpOfGroup() * kBand;
    float sums_to[2], of_row[2], beta[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int line = RowOfHalf(half);
      sums_to[half] = pairs.sums[line], beta[half] = known.weights.betas[line];
      of_row[half] = kOfQueries ? a.of.scale * pairs.of_queries[line] : pairs.of_keys[line];
    }
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      if (8 * j >= band + kBand) continue;
      const int first = 8 * j + ssm::ColumnOf(0);
      const float2 sums = LoadTwo(pairs.sums + first), lengths = LoadTwo(pairs.of_keys + first);
#pragma unroll
      for (int k = 0; k < 4; ++k) {
        const int half = k / 2, side = k % 2, at = 4 * j + k, line = RowOfHalf(half), column = first + side;
        const bool is_one = s.runs.AreOne(column, line);
        const bool is_seen = is_one && (8 * j < band || column < line);
        const float weight = Exp2(sums_to[half] - (side ? sums.y : sums.x)) * (side ? lengths.y : lengths.x);
        // What a token sees of itself does not depend on gates.
        const bool is_summed = is_seen || (kOfQueries && column == line);
        const float gradient = is_summed ? products[at] * weight * of_row[half] : 0.f;
        const float product = is_seen ? gradient * scores[at] : 0.f;
        to[half] += product;
        if constexpr (kOfQueries)
          gradients[at] += gradient, from[j][side] += product;
        else if (is_seen)
          gradients[at] -= beta[half] * gradient, from[j][side] -= beta[half] * product;
      }
    }
  }
};

template <int kD, bool kRuns, int kHalves>
__global__ void __launch_bounds__(ssm::kHopperThreads, 1)
    te_gated_delta_bwd_chunks_hopper(const __grid_constant__ HopperGradArgs given) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  extern __shared__ __align__(1024) uint8_t shared[];
  LetNextStart();
  AwaitPrevious();
  HopperGradients<kD, kRuns, kHalves> of{{given, *reinterpret_cast<HopperGradShared<kD, kRuns>*>(shared)}};
  of.Begin();
  const int group = ssm::GroupIndex();
  // In each branch anew, as their threads have their own number of registers.
  const auto leave = [&] {
    if (of.AreParts()) of.AddParts();
  };
  if (group == 3) {
    GiveRegisters<40>();
    const int warp = ssm::WarpOfGroup();
    warp == 0 ? of.Copy() : warp == 1 ? of.OfGates() : of.Through();
    leave();
  } else if (group == 2) {
    TakeRegisters<168>();
    of.OfScores();
    leave();
  } else if (group == 1) {
    TakeRegisters<152>();
    if (kRuns && !of.SeesState())
      of.template OfKeys<!kRuns>();
    else
      of.template OfKeys<true>();
    leave();
  } else {
    TakeRegisters<152>();
    of.OfQueries();
    leave();
  }
#else
  __trap();  // compiled only for Hopper
#endif
}

}  // namespace te::delta
