// A CTA's walk over the chunks of a head. All products have channels of values as rows, 16 of each warp: so
// what one makes is, as it lies in registers, the left factor of the next, and warps share only tiles. Four
// warps have kSlab channels; a CTA has kGroups of such.
#pragma once

#include "delta/weights.cuh"

namespace te::delta {

struct WalkArgs {
  const Bf16 *q, *k;     // [rows, s, g, d]
  const Bf16* v;         // [rows, s, h, e]
  const Chunk* chunks;   // those of `part`
  const float* initial;  // [rows, h, d, e], or nullptr
  Bf16* y;               // as v
  float *last, *states;  // as initial; [rows, ceil(s / kKept), h, d, e]: or nullptr
  int s, h, g, d, e;
  const void* of_channels = nullptr;  // instead of `chunks` where each channel has a gate: of ChannelBytes(d)
  ChunkPart part = {};
};

// The walk on Hopper.
Status RunHopper(cudaStream_t stream, const WalkArgs& a, int64_t rows);

// What a walk needs of a chunk: with a gate for each head; and for each channel of keys.
struct OfHead {
  static constexpr bool kByChannel = false;
  template <int kD, int kGroups>
  struct Stage {
    Tokens<kD> k, q;
    Tokens<kChunk> inverse, seen;
    Tokens<kSlab> v[kGroups];

    __device__ __forceinline__ Tokens<kD>& Left() { return k; }
  };
  template <int kD>
  using Weights = delta::Weights;
};
struct OfChannel {
  static constexpr bool kByChannel = true;
  template <int kD, int kGroups>
  struct Stage : ChannelTiles<kD> {
    Tokens<kSlab> v[kGroups];

    __device__ __forceinline__ Tokens<kD>& Left() { return this->left; }
  };
  template <int kD>
  using Weights = ChannelWeights<kD>;
};

template <int kD, int kStages, typename Gate = OfHead, int kGroups = 1>
struct WalkShared {
  typename Gate::template Stage<kD, kGroups> stages[kStages];
  Tokens<kSlab> y[kGroups];
  typename Gate::template Weights<kD> weights[kStages];
};

// Products by mma.sync, which are done when they are called.
struct WarpProducts {
  static constexpr bool kOfWarps = true;
  // A barrier of the threads that walk, behind which products see what these have written.
  template <int kThreads>
  __device__ __forceinline__ static void Meet() {
    __syncthreads();
  }
  template <typename... Sums>
  __device__ __forceinline__ static void Begin(Sums&...) {}
  __device__ __forceinline__ static void Commit() {}
  template <int kPending, int kCount>
  __device__ __forceinline__ static void Wait(float (&)[kCount]) {}

  // The tile of what lies in registers, [16, 64] transposed.
  __device__ __forceinline__ static void Put(Tokens<kSlab>& tile, const uint32_t (&of)[kChunk / 4],
                                             int band) {
#pragma unroll
    for (int i = 0; i < kChunk / 4; ++i) {
      const int token = i / 2 * 8 + ssm::ColumnOf(0), value = band + ssm::RowOf(i % 2 * 2);
      const float2 two = ssm::Unpack(of[i]);
      *tile.At(token, value) = __float2bfloat16(two.x);
      *tile.At(token + 1, value) = __float2bfloat16(two.y);
    }
  }
  // d += left tile^T
  template <int kD>
  __device__ __forceinline__ static void Along(Results& d, const uint32_t (&left)[kD / 16][4],
                                               Tokens<kD>& tile) {
#pragma unroll
    for (int k = 0; k < kD / 16; ++k)
#pragma unroll
      for (int n = 0; n < kChunk / 16; ++n)
        Multiply(d, n, left[k], [&](auto& b) { tile.TransposedB(b, 16 * n, 16 * k); });
  }
  // d += left tile^T, of a tile that is 0 right of its diagonal.
  __device__ __forceinline__ static void Seen(Results& d, const Left& left, Tokens<kChunk>& tile) {
#pragma unroll
    for (int k = 0; k < kChunk / 16; ++k)
#pragma unroll
      for (int n = k; n < kChunk / 16; ++n)
        Multiply(d, n, left[k], [&](auto& b) { tile.TransposedB(b, 16 * n, 16 * k); });
  }
  // d += left tile, of a tile that is 0 right of its diagonal.
  __device__ __forceinline__ static void Seeing(Results& d, const Left& left, Tokens<kChunk>& tile) {
#pragma unroll
    for (int k = 0; k < kChunk / 16; ++k)
#pragma unroll
      for (int n = 0; n <= k; ++n) Multiply(d, n, left[k], [&](auto& b) { tile.B(b, 16 * k, 16 * n); });
  }
  // d = left tile, plus d where it adds.
  template <int kD>
  __device__ __forceinline__ static void Across(float (&d)[kD / 2], const Left& left, Tokens<kD>& tile,
                                                bool adds = true) {
#pragma unroll
    for (float& each : d) each = adds ? each : 0.f;
#pragma unroll
    for (int k = 0; k < kChunk / 16; ++k)
#pragma unroll
      for (int n = 0; n < kD / 16; ++n) Multiply(d, n, left[k], [&](auto& b) { tile.B(b, 16 * k, 16 * n); });
  }

 private:
  template <int kCount, typename Load>
  __device__ __forceinline__ static void Multiply(float (&d)[kCount], int n, const uint32_t (&left)[4],
                                                  Load&& load) {
    float (&low)[4] = reinterpret_cast<float (&)[4]>(d[8 * n]);
    ssm::Multiply2(low, reinterpret_cast<float (&)[4]>(d[8 * n + 4]), left, load);
  }
};

// The left factor that results become, 16 columns `k`: each two neighbours through `fn(word, column, two)`.
template <int kCount, typename Fn>
__device__ __forceinline__ void AsLeft(uint32_t (&words)[4], const float (&of)[kCount], int k, Fn&& fn) {
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float* two = of + 8 * k + 2 * i;
    const float2 out = fn(i, 16 * k + i / 2 * 8 + ssm::ColumnOf(0), make_float2(two[0], two[1]));
    words[i] = ssm::Pack(out.x, out.y);
  }
}

// kReads: it makes y. If not, what tokens write stands there instead. kParts: the channels of keys are cut
// into so many, of which the warps have the state of kPart's.
template <int kD, int kStages, typename Products, bool kReads = true, typename Gate = OfHead, int kGroups = 1,
          int kParts = 1, int kPart = 0>
struct Walk {
  static constexpr int kOwn = kD / kParts, kFirstKey = kPart * kOwn;
  using Weighing = typename Gate::template Weights<kD>;
  const WalkArgs& a;
  WalkShared<kD, kStages, Gate, kGroups>& s;
  const int64_t row;
  const int head, first, group;  // channel of values, of the warp's group
  float state[kOwn / 2];         // [16, kOwn] of the warp
  uint32_t y[kChunk / 4];        // [16, 64], of the last chunk

  static constexpr int kRing = kStages, kWalking = kGroups * kThreads, kKeys = kD, kSlabs = kGroups;
  // Whether weights are loaded ahead of the products that they weigh: two groups have no registers for them.
  static constexpr bool kEarly = kGroups == 1;
  static constexpr bool kLooks = kReads, kByChannel = Gate::kByChannel, kLeavesStates = false,
                        kOfWarps = Products::kOfWarps;

  __device__ __forceinline__ static int Band() { return kBand * (WarpIndex() % kWarps); }
  __device__ __forceinline__ static void Meet() { Products::template Meet<kWalking>(); }
  __device__ __forceinline__ int Chunks() const { return (a.s + kChunk - 1) / kChunk; }
  __device__ __forceinline__ int64_t Values(int chunk) const {
    return ((row * a.s + int64_t(chunk) * kChunk) * a.h + head) * a.e + first;
  }

  // The chunk of the row, where all that walk, kThreads threads, fetch it.
  __device__ __forceinline__ void Fetch(int chunk, int to) {
    auto& stage = s.stages[to];
    const int rows = a.s - chunk * kChunk;
    if constexpr (Gate::kByChannel) {
      const auto& of = static_cast<const ChannelChunk<kD>*>(a.of_channels)[a.part.At(row, chunk, head, a.h)];
      FetchPieces<(kReads ? sizeof(of.tiles) : offsetof(ChannelTiles<kD>, q)) / 16>(&stage, &of.tiles);
      stage.v[0].template Fetch<kThreads>(a.v + Values(chunk), int64_t(a.h) * a.e, rows, a.e - first);
      FetchPieces<sizeof(of.weights) / 16>(&s.weights[to], &of.weights);
    } else {
      const Chunk& of = a.chunks[a.part.At(row, chunk, head, a.h)];
      const int64_t stride = int64_t(a.g) * a.d, of_key = head / (a.h / a.g);
      const int64_t at = (row * a.s + int64_t(chunk) * kChunk) * stride + of_key * a.d;
      stage.k.template Fetch<kThreads>(a.k + at, stride, rows, a.d);
      stage.v[0].template Fetch<kThreads>(a.v + Values(chunk), int64_t(a.h) * a.e, rows, a.e - first);
      FetchPieces<sizeof(of.inverse) / 16>(&stage.inverse, &of.inverse);
      if (kReads) stage.q.template Fetch<kThreads>(a.q + at, stride, rows, a.d);
      if (kReads) FetchPieces<sizeof(of.seen) / 16>(&stage.seen, &of.seen);
      FetchPieces<sizeof(of.weights) / 16>(&s.weights[to], &of.weights);
    }
  }
  // kCount pieces of 16 bytes, as they lie.
  template <int kCount>
  __device__ __forceinline__ static void FetchPieces(void* to, const void* from) {
#pragma unroll
    for (int i = 0; i < kCount; i += kThreads)
      if (i + kThreads <= kCount || i + int(threadIdx.x) < kCount)
        PrefetchOrZero16(static_cast<uint4*>(to) + i + threadIdx.x,
                         static_cast<const uint4*>(from) + i + threadIdx.x, true);
  }

  // Each number of the state: where it is in memory, of those that are there.
  template <typename Fn>
  __device__ __forceinline__ void EachOfState(int64_t index, Fn&& fn) {
    const int value = Band() + ssm::RowOf(0), key = kFirstKey + ssm::ColumnOf(0);
    const int64_t from = ((index * a.h + head) * a.d + key) * a.e + first + value;
    if (a.d >= kFirstKey + kOwn && first + kSlab <= a.e) {
#pragma unroll
      for (int i = 0; i < kOwn / 2; ++i)
        fn(state[i], from + int64_t(i / 4 * 8 + i % 2) * a.e + i % 4 / 2 * 8);
      return;
    }
#pragma unroll
    for (int i = 0; i < kOwn / 2; ++i)
      if (first + value + i % 4 / 2 * 8 < a.e && key + i / 4 * 8 + i % 2 < a.d)
        fn(state[i], from + int64_t(i / 4 * 8 + i % 2) * a.e + i % 4 / 2 * 8);
  }
  __device__ __forceinline__ void Store(float* to, int64_t index) {
    EachOfState(index, [&](float& each, int64_t at) { to[at] = each; });
  }
  // The state that it begins with; zeros without it.
  __device__ __forceinline__ void Load(const float* from, int64_t index) {
#pragma unroll
    for (float& each : state) each = 0;
    if (from) EachOfState(index, [&](float& each, int64_t at) { each = from[at]; });
  }

  // The state, rounded, as rows of values: those of the head begin at `of_head`. A lane writes eight keys,
  // those of its four neighbours.
  __device__ __forceinline__ void Keep(Bf16* of_head) const {
    const int value = first + Band() + ssm::RowOf(0), key = Lane() % 4 * 8;
    Bf16* const to = of_head + int64_t(value) * a.d + key;
#pragma unroll
    for (int i = 0; i < kD / 32; ++i)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        uint32_t words[4];
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          const float* const two = state + 16 * i + 4 * j + 2 * half;
          words[j] = ssm::Pack(two[0], two[1]);
        }
        Transpose(words);
        if (value + 8 * half < a.e && key + 32 * i < a.d)
          *reinterpret_cast<uint4*>(to + 8 * half * a.d + 32 * i) =
              make_uint4(words[0], words[1], words[2], words[3]);
      }
  }
  // The i-th word of four neighbouring lanes, of which the i-th gets them.
  __device__ __forceinline__ static void Transpose(uint32_t (&words)[4]) {
    const auto swap = [](uint32_t& low, uint32_t& high, int by) {
      const bool is_upper = Lane() & by;
      const uint32_t other = __shfl_xor_sync(~0u, is_upper ? low : high, by);
      (is_upper ? low : high) = other;
    };
    swap(words[0], words[1], 1), swap(words[2], words[3], 1);
    swap(words[0], words[2], 2), swap(words[1], words[3], 2);
  }

  // How far v is off what the state says, times beta, as a left factor. `ready`: when of_keys are there.
  template <typename Ready>
  __device__ __forceinline__ void Compare(int stage, Results& of_keys, Left& off, Ready&& ready) {
    OfTokens betas, says;
    uint32_t v[kChunk / 16][4];
    if constexpr (!kEarly) ready();
#pragma unroll
    for (int k = 0; k < kChunk / 16; ++k) s.stages[stage].v[group].TransposedA(v[k], 16 * k, Band());
    LoadBetas(betas, s.weights[stage]), LoadSays(says, s.weights[stage]);
    if constexpr (kEarly) ready();
#pragma unroll
    for (int k = 0; k < kChunk / 16; ++k)
      AsLeft(off[k], of_keys, k, [&](int i, int, float2 said) {
        const float2 of_v = ssm::Unpack(v[k][i]), beta = betas[2 * k + i / 2], by = says[2 * k + i / 2];
        return make_float2(beta.x * of_v.x - Weighed(by.x, said.x), beta.y * of_v.y - Weighed(by.y, said.y));
      });
  }

  // Where a chunk has several runs: what the last one's tokens write, without any of the others', as 0 times
  // an inf would stay; nor their keys. By mma.sync: with products of warpgroups in a branch ptxas serializes
  // all of the kernel's (its message C7511).
  __device__ __forceinline__ void OnlyLastRun(int stage, Left& off, Results& written) {
    const Weighing& weights = s.weights[stage];
#pragma unroll
    for (float& each : written) each = 0;
#pragma unroll
    for (int k = 0; k < kChunk / 16; ++k)
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int token = 16 * k + i / 2 * 8 + ssm::ColumnOf(0);
        off[k][i] &= (token < weights.last ? 0u : 0xffffu) | (token + 1 < weights.last ? 0u : 0xffff0000u);
      }
    WarpProducts::Seen(written, off, s.stages[stage].inverse);
#pragma unroll
    for (int i = 0; i < kChunk / 2; ++i)
      if (i / 4 * 8 + ssm::ColumnOf(i % 2) < weights.last) written[i] = 0;
    Meet();  // none reads k any more
    s.stages[stage].Left().template Keep<kWalking>([&](int token) { return token >= weights.last; });
    Meet();
  }

  // y into the warp's channels of a tile, and from there to memory: the `rows` first tokens.
  __device__ __forceinline__ void Write(Bf16* to, int rows) {
    Tokens<kSlab>& tile = s.y[group];
    __syncwarp();  // no lane reads the one before
    Products::Put(tile, y, Band());
    __syncwarp();
    const int column = Band() + Lane() % 2 * 8;
#pragma unroll
    for (int token = Lane() / 2; token < kChunk; token += 16)
      if (token < rows && first + column < a.e)
        *reinterpret_cast<uint4*>(to + int64_t(token) * a.h * a.e + column) =
            *reinterpret_cast<const uint4*>(tile.At(token, column));
  }

  __device__ __forceinline__ void PutY() { Products::Put(s.y[group], y, Band()); }

  // The channels of a tile of keys, or queries, that the state has, which boxes of 64 are.
  __device__ __forceinline__ static Tokens<kOwn>& Own(Tokens<kD>& keys) {
    return reinterpret_cast<Tokens<kOwn>&>(keys.cells[kFirstKey * kChunk]);
  }

  // Products are queued so that the tensor cores have the next while threads weigh what the last one made.
  // `meanwhile` and `write`: what else is to be done then, for other chunks or with the state, and with y.
  template <typename Meanwhile, typename Write>
  __device__ __forceinline__ void Step(int stage, Meanwhile&& meanwhile, Write&& write) {
    auto& tiles = s.stages[stage];
    const Weighing& weights = s.weights[stage];
    uint32_t of_state[kD / 16][4];
    Left off, left, kept;
    Results of_keys = {}, of_queries = {}, written = {};
    const auto as_it_is = [](int, int, float2 two) { return two; };
#pragma unroll
    for (int k = 0; k < kD / 16; ++k) AsLeft(of_state[k], state, k, as_it_is);
    meanwhile();
    Products::Begin(of_keys, of_queries);
    Products::template Along<kD>(of_keys, of_state, tiles.k);
    Products::Commit();
    if (kReads) Products::template Along<kD>(of_queries, of_state, tiles.q);
    Products::Commit();
    Compare(stage, of_keys, off, [&] { Products::template Wait<1>(of_keys); });
    Products::Begin(written);
    Products::Seen(written, off, tiles.inverse);
    Products::Commit();
    if (kReads) {
      Products::template Wait<1>(of_queries);
      WeighQueries(weights, of_queries);
    }
    Fade(state, weights);
    if constexpr (!kEarly) Products::template Wait<0>(written);
    const Leaves<Gate::kByChannel> leaves(weights);
    if constexpr (kEarly) Products::template Wait<0>(written);
    if (!kReads) PackY(written);
#pragma unroll
    for (int k = 0; k < kChunk / 16; ++k) AsLeft(left[k], written, k, as_it_is);
    if (weights.several) OnlyLastRun(stage, off, written);
    Products::Begin(of_queries);
    if (kReads) Products::Seen(of_queries, left, tiles.seen);
    Products::Commit();
#pragma unroll
    for (int k = 0; k < kChunk / 16; ++k)
      AsLeft(kept[k], written, k, [&](int i, int, float2 two) { return leaves(2 * k + i / 2, two); });
    Products::Begin(state);
    Products::template Across<kD>(state, kept, tiles.Left(), Stays(weights));
    Products::Commit();
    if (kReads) {
      Products::template Wait<1>(of_queries);
      PackY(of_queries);
    }
    write();
    Products::template Wait<0>(state);
  }
  __device__ __forceinline__ void WeighQueries(const Weighing& weights, Results& of_queries) {
    OfTokens by;
    LoadQueries(by, weights);
    WeighTokens(of_queries, by);
  }
  __device__ __forceinline__ void PackY(const Results& of) {
#pragma unroll
    for (int i = 0; i < kChunk / 4; ++i) y[i] = ssm::Pack(of[2 * i], of[2 * i + 1]);
  }

  // The steps of a walk, in its order, as `WalkAlong` and the walks on Hopper call them.
  __device__ __forceinline__ int Count() const { return Chunks(); }
  __device__ __forceinline__ int ChunkOf(int i) const { return i; }
  // Where the array begins that y goes to.
  __device__ __forceinline__ ChunkPart Part() const { return {}; }
  __device__ __forceinline__ void FetchNext(int i) { Fetch(i, i % kStages); }
  __device__ __forceinline__ Bf16* To(int i) const { return a.y + Values(i); }
  __device__ __forceinline__ int Rows(int i) const { return a.s - i * kChunk; }
  __device__ __forceinline__ void Begin() { Load(a.initial, row); }
  template <typename Meanwhile, typename Write>
  __device__ __forceinline__ void Next(int i, Meanwhile&& meanwhile, Write&& write) {
    StoreKept(i);
    Step(i % kStages, meanwhile, write);
  }
  __device__ __forceinline__ void StoreKept(int i) {
    if (a.states && i % (kKept / kChunk) == 0)
      Store(a.states, row * ((a.s + kKept - 1) / kKept) + i / (kKept / kChunk));
  }
  __device__ __forceinline__ void End() {
    if (a.last) Store(a.last, row);
  }
};

// A walk whose threads fetch what they need and write y themselves.
template <typename Walk>
__device__ __forceinline__ void WalkAlong(Walk&& walk) {
  constexpr int kStages = std::decay_t<Walk>::kRing, kAhead = kStages > 1 ? kStages - 1 : 1;
  const auto fetch = [&](int i) {
    if (i < walk.Count()) walk.FetchNext(i);
    CommitPrefetch();
  };
#pragma unroll
  for (int i = 0; i < kAhead; ++i) fetch(i);
  walk.Begin();
  for (int i = 0; i < walk.Count(); ++i) {
    WaitForPrefetch<kAhead - 1>();
    walk.Meet();  // what was fetched is there for all
    const auto ahead = [&] {
      if (kStages > 1) fetch(i + kAhead);
    };
    walk.Next(i, ahead, [&] { walk.Write(walk.To(i), walk.Rows(i)); });
    if (kStages > 1) continue;
    __syncthreads();  // none reads the tokens any more
    fetch(i + 1);
  }
  walk.End();
}

template <int kD, int kStages, typename Gate>
__global__ void __launch_bounds__(kThreads, kStages > 1 ? 1 : 2) te_gated_delta_fwd(const WalkArgs a) {
  extern __shared__ uint4 memory[];
  auto& shared = *reinterpret_cast<WalkShared<kD, kStages, Gate>*>(memory);
  WalkAlong(Walk<kD, kStages, WarpProducts, true, Gate>{a, shared, blockIdx.z, int(blockIdx.x),
                                                        int(blockIdx.y) * kSlab, 0});
}

}  // namespace te::delta
