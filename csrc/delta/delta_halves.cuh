// Walks on Hopper where keys have more than 128 channels, with a gate for each head: two warpgroups have the
// state of half of the channels each. Both put it, rounded, into shared memory, where the products that read
// it find all of its channels; what one group makes of what the keys read it hands to the other, and both add
// that to their half.
#pragma once

#include "delta/delta_bwd_hopper.cuh"

namespace te::delta {

template <int kStages>
struct WalkShared<kManyKeys, kStages, OfHead, 1> {
  alignas(16) uint8_t state[ssm::kWideBytes<kManyKeys>];  // [64, kManyKeys]
  alignas(16) uint8_t written[kBoxBytes];                 // what tokens write, [64 channels, 64]
  OfHead::Stage<kManyKeys, 1> stages[kStages];
  Tokens<kSlab> y[1];
  Weights weights[kStages];
};

struct HalvesShared {
  static constexpr int kStages = 2;
  WalkShared<kManyKeys, kStages, OfHead, 1> tiles;
  uint64_t full[kStages], empty[kStages], y_full[1], y_empty[1], state_full[1], state_empty[1];

  __device__ __forceinline__ uint8_t* StateOf(int) { return tiles.state; }
  __device__ __forceinline__ void Begin() {
    // Tiles of products and copies begin at a multiple.
    static_assert(sizeof(tiles.stages[0]) % 1024 == 0 &&
                  (sizeof(tiles.state) + sizeof(tiles.written)) % 1024 == 0);
    BeginWalks(*this, 2 * kWarps, kWarps);
  }
};
static_assert(sizeof(HalvesShared) <= 227 * 1024);

// The steps of the group with the kPart-th half: the first finds what tokens write, the other what they read.
template <bool kReads, int kPart>
struct HalfSteps : GradSteps<kManyKeys, HalvesShared::kStages, GroupProducts, kReads, OfHead, 1, 2, kPart> {
  using Products = GroupProducts;
  using Base = GradSteps<kManyKeys, HalvesShared::kStages, Products, kReads, OfHead, 1, 2, kPart>;
  using Base::a, Base::s, Base::state, Base::Band;
  static constexpr bool kFinds = kPart == 0;
  static constexpr int kBoxes = Base::kOwn / 64, kFirstBox = kPart * kBoxes;

  // Both groups; what either has written is there for products and for threads.
  __device__ __forceinline__ static void MeetAll() {
    FenceAsync();
    NamedBarrier(2, 2 * kThreads);
  }
  __device__ __forceinline__ void PutState() {
#pragma unroll
    for (int box = 0; box < kBoxes; ++box)
      ssm::PutRows(AddressOf(s.state) + (kFirstBox + box) * kBoxBytes + ssm::WarpOfGroup() * ssm::kPieceBytes,
                   state + 32 * box);
  }
  // d = state tokens^T, both along all channels of keys: queued.
  __device__ __forceinline__ void ReadState(Results& d, Tokens<kManyKeys>& tokens) {
    Products::Begin(d);
    ssm::MultiplyAlong<kManyKeys>(d, s.state, reinterpret_cast<const uint8_t*>(tokens.cells));
    Products::Commit();
  }
  // state += left keys, plus what it was where it `stays`: queued.
  __device__ __forceinline__ void Add(const Left& left, Tokens<kManyKeys>& keys, bool stays) {
    Products::Begin(state);
    Products::template Across<Base::kOwn>(state, left, Base::Own(keys), stays);
    Products::Commit();
  }
  // A left factor [16, 64] of each warp, from one group to the other, where the values were, which none reads
  // any more.
  __device__ __forceinline__ void Hand(int stage, const Left& left) {
    uint32_t words[kChunk / 4];
#pragma unroll
    for (int i = 0; i < kChunk / 4; ++i) words[i] = left[i / 4][i % 4];
    Products::Put(s.stages[stage].v[0], words, Band());
  }
  __device__ __forceinline__ void Take(int stage, Left& left) {
#pragma unroll
    for (int k = 0; k < kChunk / 16; ++k) s.stages[stage].v[0].TransposedA(left[k], 16 * k, Band());
  }

  template <typename PutState, typename PutY>
  __device__ __forceinline__ void Next(int i, PutState&& put_state, PutY&& put_y) {
    Base::StoreKept(i);
    Step(i % HalvesShared::kStages, put_state, put_y);
  }
  // As Walk::Step.
  template <typename PutState, typename PutY>
  __device__ __forceinline__ void Step(int stage, PutState&& put_state, PutY&& put_y) {
    auto& tiles = s.stages[stage];
    const Weights& weights = s.weights[stage];
    Left kept;
    Results of_queries;
    put_state();
    MeetAll();
    if constexpr (kFinds)
      Find(stage, weights, kept);
    else
      Look(tiles, weights, of_queries);
    MeetAll();
    if constexpr (!kFinds) Take(stage, kept);
    if constexpr (!kFinds && kReads) {
      Left written;
      ssm::LoadRows(written, s.written);
      Products::Begin(of_queries);
      Products::Seen(of_queries, written, tiles.seen);
      Products::Commit();
    }
    Add(kept, tiles.k, Stays(weights));
    if constexpr (!kFinds && kReads) {
      Products::template Wait<1>(of_queries);
      Base::PackY(of_queries);
    }
    if constexpr (kFinds != kReads) put_y();
    Products::template Wait<0>(state);
  }
  // What tokens write, for the other group, and what is left of it at the chunk's end.
  __device__ __forceinline__ void Find(int stage, const Weights& weights, Left& kept) {
    auto& tiles = s.stages[stage];
    Results of_keys, written = {};
    Left off;
    ReadState(of_keys, tiles.k);
    Base::Compare(stage, of_keys, off, [&] { Products::template Wait<0>(of_keys); });
    Products::Begin(written);
    Products::Seen(written, off, tiles.inverse);
    Products::Commit();
    Fade(state, weights);
    const Leaves<false> leaves(weights);
    Products::template Wait<0>(written);
    if constexpr (kReads)
      ssm::PutRows(AddressOf(s.written) + ssm::WarpOfGroup() * ssm::kPieceBytes, written);
    else
      Base::PackY(written);
    if (weights.several) Base::OnlyLastRun(stage, off, written);
#pragma unroll
    for (int k = 0; k < kChunk / 16; ++k)
      AsLeft(kept[k], written, k, [&](int i, int, float2 two) { return leaves(2 * k + i / 2, two); });
    Hand(stage, kept);
  }
  // What queries read of the state, and what is left of that.
  template <typename Stage>
  __device__ __forceinline__ void Look(Stage& tiles, const Weights& weights, Results& of_queries) {
    if constexpr (kReads) {
      ReadState(of_queries, tiles.q);
      Products::template Wait<0>(of_queries);
      Base::WeighQueries(weights, of_queries);
    }
    Fade(state, weights);
  }

  // As GradSteps::StepBack.
  template <typename PutState, typename PutY>
  __device__ __forceinline__ void StepBack(int stage, PutState&& put_state, PutY&& put_y) {
    auto& tiles = s.stages[stage];
    const Weights& weights = s.weights[stage];
    Left of_dy, read, left;
    Take(stage, of_dy);
    if (weights.continues < kChunk)
      tiles.q.template Keep<2 * kThreads>([&](int token) { return token < weights.continues; });
    put_state();
    MeetAll();
    if constexpr (kFinds)
      FindGradient(stage, weights, of_dy, left);
    else
      Base::Read(tiles, weights, of_dy, read);
    MeetAll();
    if constexpr (!kFinds) Take(stage, left);
    Add(left, tiles.k, true);
    if constexpr (kFinds) put_y();
    Products::template Wait<0>(state);
  }
  // The gradient to what tokens would write without each other, and what that is to the state.
  __device__ __forceinline__ void FindGradient(int stage, const Weights& weights, Left& of_dy, Left& left) {
    auto& tiles = s.stages[stage];
    Results written, seen = {}, off = {};
    Left read;
    const auto as_it_is = [](int, int, float2 two) { return two; };
    ReadState(written, tiles.k);
    Products::Begin(seen);
    Base::Queue(seen, of_dy, tiles.seen);
    WeighLeft<true>(written, weights, [&] { Products::template Wait<1>(written); });
    Products::template Wait<0>(seen);
#pragma unroll
    for (int j = 0; j < kChunk / 2; ++j) written[j] += seen[j];
#pragma unroll
    for (int k = 0; k < kChunk / 16; ++k) AsLeft(left[k], written, k, as_it_is);
    Products::Begin(off);
    Base::Queue(off, left, tiles.inverse);
    Base::Read(tiles, weights, of_dy, read);
    OfTokens says;
    LoadSays(says, weights);
    Products::template Wait<1>(off);
    Base::PackY(off);
    if (weights.continues < kChunk) Base::OnlyFirstRun(tiles, weights.continues, of_dy, off);
#pragma unroll
    for (int k = 0; k < kChunk / 16; ++k)
      AsLeft(left[k], off, k, [&](int i, int, float2 two) {
        const float2 by = says[2 * k + i / 2];
        return make_float2(-Weighed(by.x, two.x), -Weighed(by.y, two.y));
      });
    Hand(stage, left);
  }
};

template <typename Walk>
__device__ __forceinline__ void WalkHalf(HalvesShared& s, Walk& walk) {
  walk.Begin();
  for (int i = 0; i < walk.Count(); ++i) {
    ssm::WaitFull(s.full, i);
    const auto put_state = [&] {
      if constexpr (Walk::kLeavesStates) ssm::WaitEmpty(s.state_empty, i);
      walk.PutState();
      if constexpr (Walk::kLeavesStates) ssm::Release(s.state_full[0]);
    };
    const auto put_y = [&] {
      ssm::WaitEmpty(s.y_empty, i);
      walk.PutY();
      ssm::Release(s.y_full[0]);
    };
    walk.Next(i, put_state, put_y);
    ssm::Release(s.empty[i % HalvesShared::kStages]);
  }
  walk.End();
}

constexpr int kHalvesThreads = 3 * kThreads;
// One warpgroup copies, two walk. with_walk<kPart>(run): calls `run` with the walk of a group.
template <typename WithWalk>
__device__ __forceinline__ void TakeHalves(HalvesShared& s, const WalkMaps& maps, WithWalk&& with_walk) {
  constexpr int kRegisters = 232;
  s.Begin();
  AwaitPrevious();
  const int group = ssm::GroupIndex();
  if (group == 0) {
    GiveRegisters<3 * 168 - 2 * kRegisters>();
    with_walk.template operator()<0>([&](auto&& walk) { CopyForWalk(s, walk, maps); });
  } else if (group == 1) {
    TakeRegisters<kRegisters>();
    with_walk.template operator()<0>([&](auto&& walk) { WalkHalf(s, walk); });
  } else {
    TakeRegisters<kRegisters>();
    with_walk.template operator()<1>([&](auto&& walk) { WalkHalf(s, walk); });
  }
}

__global__ void __launch_bounds__(kHalvesThreads, 1)
    te_gated_delta_fwd_halves(const __grid_constant__ HopperWalkArgs given) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  extern __shared__ __align__(1024) uint8_t shared[];
  auto& s = *reinterpret_cast<HalvesShared*>(shared);
  const WalkMaps maps{&given.q, &given.k, &given.v, &given.y, nullptr};
  TakeHalves(s, maps, [&]<int kPart>(auto&& run) {
    HalfSteps<true, kPart> walk{
        {{given.a, s.tiles, blockIdx.z, int(blockIdx.x), int(blockIdx.y) * kSlab, 0}}};
    run(walk);
  });
#else
  __trap();  // compiled only for Hopper
#endif
}

__global__ void __launch_bounds__(kHalvesThreads, 1)
    te_gated_delta_bwd_walk_halves(const __grid_constant__ HopperGradWalkArgs given) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  extern __shared__ __align__(1024) uint8_t shared[];
  auto& s = *reinterpret_cast<HalvesShared*>(shared);
  LetNextStart();
  TakeHalves(s, MapsOfGradWalk(given), [&]<int kPart>(auto&& run) {
    RunGradWalk<HalfSteps<true, kPart>, HalfSteps<false, kPart>>(given.a, s.tiles, 0, int(blockIdx.y) * kSlab,
                                                                 run);
  });
#else
  __trap();  // compiled only for Hopper
#endif
}

}  // namespace te::delta
