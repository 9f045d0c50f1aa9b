// A CTA's walk over the chunks of a head. All products have channels of values as rows, 16 of each warp: so
// what one makes is, as it lies in registers, the left factor of the next, and warps share only tiles.
#pragma once

#include "delta/channel.cuh"

namespace te::delta {

struct WalkArgs {
  const Bf16 *q, *k;     // [rows, s, g, d]
  const Bf16* v;         // [rows, s, h, e]
  const Chunk* chunks;   // [rows, ceil(s / kChunk), h]
  const float* initial;  // [rows, h, d, e], or nullptr
  Bf16* y;               // as v
  float *last, *states;  // as initial; [rows, ceil(s / kKept), h, d, e]: or nullptr
  int s, h, g, d, e;
  const void* of_channels = nullptr;  // as chunks, of ChannelBytes(d), where each channel has a gate
};

// The walk on Hopper.
Status RunHopper(cudaStream_t stream, const WalkArgs& a, int64_t rows);

// What a walk needs of a chunk: with a gate for each head; and for each channel of keys.
struct OfHead {
  static constexpr bool kByChannel = false;
  template <int kD>
  struct Stage {
    Tokens<kD> k, q;
    Tokens<kChunk> inverse, seen;
    Tokens<kSlab> v;

    __device__ __forceinline__ Tokens<kD>& Left() { return k; }
  };
  template <int kD>
  using Weights = delta::Weights;
};
struct OfChannel {
  static constexpr bool kByChannel = true;
  template <int kD>
  struct Stage : ChannelTiles<kD> {
    Tokens<kSlab> v;

    __device__ __forceinline__ Tokens<kD>& Left() { return this->left; }
  };
  template <int kD>
  using Weights = ChannelWeights<kD>;
};

template <int kD, int kStages, typename Gate = OfHead>
struct WalkShared {
  typename Gate::template Stage<kD> stages[kStages];
  Tokens<kSlab> y;
  typename Gate::template Weights<kD> weights[kStages];
};

// Results of products, [16, 8 i] of a warp: d[4 j] .. d[4 j + 3] are of columns 8 j to 8 j + 7, as
// MultiplyAdd has them. A left factor [16, 16 i] has four words for 16 columns.
using Results = float[kChunk / 2];
using Left = uint32_t[kChunk / 16][4];

// Products by mma.sync, which are done when they are called.
struct WarpProducts {
  static constexpr bool kFences = false;
  template <typename... Sums>
  __device__ __forceinline__ static void Begin(Sums&...) {}
  __device__ __forceinline__ static void Commit() {}
  template <int kPending, int kCount>
  __device__ __forceinline__ static void Wait(float (&)[kCount]) {}

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
  // d += left tile
  template <int kD>
  __device__ __forceinline__ static void Across(float (&d)[kD / 2], const Left& left, Tokens<kD>& tile) {
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

__device__ __forceinline__ float2 LoadTwo(const float* p) { return *reinterpret_cast<const float2*>(p); }
// weight times x; 0, of any x, where the weight is.
__device__ __forceinline__ float Weighed(float weight, float x) { return weight == 0 ? 0.f : weight * x; }

// How much of what two neighbours' keys and queries read of the state counts, and of what they write at the
// chunk's end, below 0 of tokens of another run; and whether a token is of the last one's run.
__device__ __forceinline__ float2 OfKeys(const Weights& of, int token) { return LoadTwo(of.keys + token); }
__device__ __forceinline__ float2 OfQueries(const Weights& of, int token) {
  return LoadTwo(of.queries + token);
}
__device__ __forceinline__ float2 OfLeft(const Weights& of, int token) { return LoadTwo(of.left + token); }
__device__ __forceinline__ bool IsOfLast(const Weights& of, int token) { return of.left[token] >= 0; }
// Where channels have gates, tiles have the rest.
template <int kD>
__device__ __forceinline__ float2 OfKeys(const ChannelWeights<kD>& of, int token) {
  return make_float2(token < of.continues, token + 1 < of.continues);
}
template <int kD>
__device__ __forceinline__ float2 OfQueries(const ChannelWeights<kD>& of, int token) {
  return OfKeys(of, token);
}
template <int kD>
__device__ __forceinline__ float2 OfLeft(const ChannelWeights<kD>& of, int token) {
  return make_float2(token < of.last ? -1.f : 1.f, token + 1 < of.last ? -1.f : 1.f);
}
template <int kD>
__device__ __forceinline__ bool IsOfLast(const ChannelWeights<kD>& of, int token) {
  return token >= of.last;
}

// What is left at a chunk's end of a state, [16, kCount * 2] of a warp.
template <int kCount>
__device__ __forceinline__ void Fade(float (&state)[kCount], const Weights& of) {
#pragma unroll
  for (float& each : state) each = Weighed(of.keeps, each);
}
template <int kCount, int kD>
__device__ __forceinline__ void Fade(float (&state)[kCount], const ChannelWeights<kD>& of) {
#pragma unroll
  for (int i = 0; i < kCount; i += 4) {
    const float2 keeps = LoadTwo(of.keeps + 2 * i + ssm::ColumnOf(0));
#pragma unroll
    for (int j = 0; j < 4; j += 2) {
      state[i + j] = Weighed(keeps.x, state[i + j]);
      state[i + j + 1] = Weighed(keeps.y, state[i + j + 1]);
    }
  }
}

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

// kReads: it makes y. If not, what tokens write stands there instead.
template <int kD, int kStages, typename Products, bool kReads = true, typename Gate = OfHead>
struct Walk {
  using OfTokens = typename Gate::template Weights<kD>;
  const WalkArgs& a;
  WalkShared<kD, kStages, Gate>& s;
  const int64_t row;
  const int head, first;   // channel of values
  float state[kD / 2];     // [16, kD] of the warp
  uint32_t y[kChunk / 4];  // [16, 64], of the last chunk

  static constexpr int kAhead =
      kStages > 1 ? kStages - 1 : 1;  // chunks that are fetched before they are needed

  __device__ __forceinline__ static int Band() { return kBand * WarpIndex(); }
  __device__ __forceinline__ int Chunks() const { return (a.s + kChunk - 1) / kChunk; }
  __device__ __forceinline__ int64_t Values(int chunk) const {
    return ((row * a.s + int64_t(chunk) * kChunk) * a.h + head) * a.e + first;
  }

  __device__ __forceinline__ void Fetch(int chunk) {
    const int rows = a.s - chunk * kChunk;
    if (rows > 0) {
      auto& stage = s.stages[chunk % kStages];
      const int64_t index = (row * Chunks() + chunk) * a.h + head;
      if constexpr (Gate::kByChannel) {
        const auto& of = static_cast<const ChannelChunk<kD>*>(a.of_channels)[index];
        FetchPieces<(kReads ? sizeof(of.tiles) : offsetof(ChannelTiles<kD>, q)) / 16>(&stage, &of.tiles);
        FetchValues(stage, chunk, rows);
        FetchPieces<sizeof(of.weights) / 16>(&s.weights[chunk % kStages], &of.weights);
      } else {
        const Chunk& of = a.chunks[index];
        const int64_t stride = int64_t(a.g) * a.d, group = head / (a.h / a.g);
        const int64_t at = (row * a.s + int64_t(chunk) * kChunk) * stride + group * a.d;
        stage.k.template Fetch<kThreads>(a.k + at, stride, rows, a.d);
        FetchValues(stage, chunk, rows);
        stage.inverse.template Fetch<kThreads>(of.inverse, kChunk, kChunk, kChunk);
        if (kReads) stage.q.template Fetch<kThreads>(a.q + at, stride, rows, a.d);
        if (kReads) stage.seen.template Fetch<kThreads>(of.seen, kChunk, kChunk, kChunk);
        FetchPieces<sizeof(of.weights) / 16>(&s.weights[chunk % kStages], &of.weights);
      }
    }
    CommitPrefetch();
  }
  template <typename Stage>
  __device__ __forceinline__ void FetchValues(Stage& stage, int chunk, int rows) {
    stage.v.template Fetch<kThreads>(a.v + Values(chunk), int64_t(a.h) * a.e, rows, a.e - first);
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

  // Each number of the state: where it is in memory, or -1 where it is not.
  template <typename Fn>
  __device__ __forceinline__ void EachOfState(int64_t index, Fn&& fn) {
    const int64_t from = (index * a.h + head) * a.d * a.e + first;
#pragma unroll
    for (int i = 0; i < kD / 2; ++i) {
      const int value = Band() + ssm::RowOf(i % 4), key = i / 4 * 8 + ssm::ColumnOf(i % 4);
      if (first + value < a.e && key < a.d) fn(state[i], from + int64_t(key) * a.e + value);
    }
  }
  __device__ __forceinline__ void Store(float* to, int64_t index) {
    EachOfState(index, [&](float& each, int64_t at) { to[at] = each; });
  }

  // How far v is off what the state says, times beta, as a left factor.
  __device__ __forceinline__ void Compare(int stage, const Results& of_keys, Left& off) {
#pragma unroll
    for (int k = 0; k < kChunk / 16; ++k) {
      uint32_t v[4];
      s.stages[stage].v.TransposedA(v, 16 * k, Band());
      AsLeft(off[k], of_keys, k, [&](int i, int token, float2 said) {
        const float2 of_v = ssm::Unpack(v[i]), of = OfKeys(s.weights[stage], token);
        const float2 beta = LoadTwo(s.weights[stage].betas + token);
        return make_float2(beta.x * (of_v.x - Weighed(of.x, said.x)),
                           beta.y * (of_v.y - Weighed(of.y, said.y)));
      });
    }
  }

  // Where a chunk has several runs: what the last one's tokens write, without any of the others', as 0 times
  // an inf would stay; nor their keys.
  __device__ __forceinline__ void OnlyLastRun(int stage, Left& off, Results& written) {
    const OfTokens& weights = s.weights[stage];
#pragma unroll
    for (float& each : written) each = 0;
#pragma unroll
    for (int k = 0; k < kChunk / 16; ++k)
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float2 of = OfLeft(weights, 16 * k + i / 2 * 8 + ssm::ColumnOf(0));
        off[k][i] &= (of.x < 0 ? 0u : 0xffffu) | (of.y < 0 ? 0u : 0xffff0000u);
      }
    Products::Begin(written);
    Products::Seen(written, off, s.stages[stage].inverse);
    Products::Commit();
    Products::template Wait<0>(written);
    __syncthreads();  // none reads k any more
    s.stages[stage].Left().template Keep<kThreads>([&](int token) { return IsOfLast(weights, token); });
    Meet();
  }

  // A barrier of all threads, behind which products see what these have written.
  __device__ __forceinline__ static void Meet() {
    if constexpr (Products::kFences) Products::Fence();
    __syncthreads();
  }

  // y, by way of the warp's channels of a tile: the `rows` first tokens of them.
  __device__ __forceinline__ void Write(Bf16* to, int rows) {
    __syncwarp();  // no lane reads the one before
#pragma unroll
    for (int i = 0; i < kChunk / 4; ++i) {
      const int token = i / 2 * 8 + ssm::ColumnOf(0), value = Band() + ssm::RowOf(i % 2 * 2);
      const float2 two = ssm::Unpack(y[i]);
      *s.y.At(token, value) = __float2bfloat16(two.x);
      *s.y.At(token + 1, value) = __float2bfloat16(two.y);
    }
    __syncwarp();
    const int column = Band() + Lane() % 2 * 8;
#pragma unroll
    for (int token = Lane() / 2; token < kChunk; token += 16)
      if (token < rows && first + column < a.e)
        *reinterpret_cast<uint4*>(to + int64_t(token) * a.h * a.e + column) =
            *reinterpret_cast<const uint4*>(s.y.At(token, column));
  }

  // Products are queued so that the tensor cores have the next while threads weigh what the last one made.
  // `fetch` and `write`: what else is to be done meanwhile, for the chunks ahead and for the last one.
  template <typename Fetch, typename Write>
  __device__ __forceinline__ void Step(int stage, Fetch&& fetch, Write&& write) {
    auto& tiles = s.stages[stage];
    const OfTokens& weights = s.weights[stage];
    uint32_t of_state[kD / 16][4];
    Left off, left, kept;
    Results of_keys = {}, of_queries = {}, written = {};
    const auto as_it_is = [](int, int, float2 two) { return two; };
#pragma unroll
    for (int k = 0; k < kD / 16; ++k) AsLeft(of_state[k], state, k, as_it_is);
    if (kStages > 1) fetch();
    Products::Begin(of_keys, of_queries);
    Products::template Along<kD>(of_keys, of_state, tiles.k);
    Products::Commit();
    if (kReads) Products::template Along<kD>(of_queries, of_state, tiles.q);
    Products::Commit();
    write();
    Products::template Wait<1>(of_keys);
    Compare(stage, of_keys, off);
    Products::Begin(written);
    Products::Seen(written, off, tiles.inverse);
    Products::Commit();
    if (kReads) {
      Products::template Wait<1>(of_queries);
      WeighQueries(weights, of_queries);
    }
    Fade(state, weights);
    Products::template Wait<0>(written);
    if (!kReads) PackY(written);
#pragma unroll
    for (int k = 0; k < kChunk / 16; ++k) AsLeft(left[k], written, k, as_it_is);
    if (weights.several) OnlyLastRun(stage, off, written);
    Products::Begin(of_queries);
    if (kReads) Products::Seen(of_queries, left, tiles.seen);
    Products::Commit();
#pragma unroll
    for (int k = 0; k < kChunk / 16; ++k)
      AsLeft(kept[k], written, k, [&](int, int token, float2 two) {
        const float2 of = OfLeft(weights, token);
        return make_float2(of.x < 0 ? 0.f : of.x * two.x, of.y < 0 ? 0.f : of.y * two.y);
      });
    Products::Begin(state);
    Products::template Across<kD>(state, kept, tiles.Left());
    Products::Commit();
    if (kReads) {
      Products::template Wait<1>(of_queries);
      PackY(of_queries);
    }
    Products::template Wait<0>(state);
  }
  __device__ __forceinline__ void WeighQueries(const OfTokens& weights, Results& of_queries) {
#pragma unroll
    for (int i = 0; i < kChunk / 2; i += 2) {
      const float2 of = OfQueries(weights, i / 4 * 8 + ssm::ColumnOf(0));
      of_queries[i] = Weighed(of.x, of_queries[i]), of_queries[i + 1] = Weighed(of.y, of_queries[i + 1]);
    }
  }
  __device__ __forceinline__ void PackY(const Results& of) {
#pragma unroll
    for (int i = 0; i < kChunk / 4; ++i) y[i] = ssm::Pack(of[2 * i], of[2 * i + 1]);
  }

  __device__ __forceinline__ void Run() {
    const auto write = [&](int chunk) { Write(a.y + Values(chunk), a.s - chunk * kChunk); };
#pragma unroll
    for (int chunk = 0; chunk < kAhead; ++chunk) Fetch(chunk);
#pragma unroll
    for (float& each : state) each = 0;
    if (a.initial) EachOfState(row, [&](float& each, int64_t at) { each = a.initial[at]; });
    for (int chunk = 0; chunk < Chunks(); ++chunk) {
      WaitForPrefetch<kAhead - 1>();
      Meet();  // what was fetched is there for all
      if (a.states && chunk % (kKept / kChunk) == 0)
        Store(a.states, row * ((a.s + kKept - 1) / kKept) + chunk / (kKept / kChunk));
      const auto write_last = [&] {
        if (chunk > 0) write(chunk - 1);
      };
      Step(chunk % kStages, [&] { Fetch(chunk + kAhead); }, write_last);
      if (kStages == 1) {
        __syncthreads();  // none reads the tokens any more
        Fetch(chunk + kAhead);
      }
    }
    if (Chunks() > 0) write(Chunks() - 1);
    if (a.last) Store(a.last, row);
  }
};

template <int kD, int kStages, typename Gate>
__global__ void __launch_bounds__(kThreads, kStages > 1 ? 1 : 2) te_gated_delta_fwd(const WalkArgs a) {
  extern __shared__ uint4 memory[];
  auto& shared = *reinterpret_cast<WalkShared<kD, kStages, Gate>*>(memory);
  Walk<kD, kStages, WarpProducts, true, Gate>{a, shared, blockIdx.z, int(blockIdx.x), int(blockIdx.y) * kSlab}
      .Run();
}

}  // namespace te::delta
