// A CTA's walk over the chunks of a head. All products have channels of values as rows, 16 of each warp: so
// what one makes is, as it lies in registers, the left factor of the next, and warps share only tiles.
#pragma once

#include "delta/delta.cuh"

namespace te::delta {

struct WalkArgs {
  const Bf16 *q, *k;     // [rows, s, g, d]
  const Bf16* v;         // [rows, s, h, e]
  const Chunk* chunks;   // [rows, ceil(s / kChunk), h]
  const float* initial;  // [rows, h, d, e], or nullptr
  Bf16* y;               // as v
  float *last, *states;  // as initial; [rows, ceil(s / kKept), h, d, e]: or nullptr
  int s, h, g, d, e;
};

template <int kColumns>
using Tokens = ssm::Tile<kChunk, kColumns, ssm::Boxes<kChunk, kColumns>>;

template <int kD, int kStages>
struct WalkShared {
  struct Stage {
    Tokens<kD> k, q;
    Tokens<kChunk> solve, seen;
    Tokens<kSlab> v;  // then y
  } stages[kStages];
  Weights weights[kStages];
};

// A left factor [16, 16], of the results [16, 64] of products, from column 16 * k on: each two neighbours
// through `fn(row, column, two)`, where row is 0 or 8 more than the lane's first one.
template <typename Fn>
__device__ __forceinline__ void AsLeft(uint32_t (&words)[4], const float (&of)[8][4], int k, Fn&& fn) {
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float* two = &of[2 * k + i / 2][i % 2 * 2];
    const float2 out = fn(i, 16 * k + i / 2 * 8 + ssm::ColumnOf(0), make_float2(two[0], two[1]));
    words[i] = ssm::Pack(out.x, out.y);
  }
}

__device__ __forceinline__ float2 LoadTwo(const float* p) { return *reinterpret_cast<const float2*>(p); }
// weight times x; 0, of any x, where the weight is.
__device__ __forceinline__ float Weighed(float weight, float x) { return weight == 0 ? 0.f : weight * x; }
__device__ __forceinline__ float2 Weighed(float2 weights, float2 two) {
  return make_float2(Weighed(weights.x, two.x), Weighed(weights.y, two.y));
}

template <int kD, int kStages>
struct Walk {
  const WalkArgs& a;
  WalkShared<kD, kStages>& s;
  const int64_t row;
  const int head, first;   // channel of values
  float state[kD / 8][4];  // [16, kD] of the warp

  __device__ __forceinline__ static int Band() { return kBand * WarpIndex(); }
  __device__ __forceinline__ int Chunks() const { return (a.s + kChunk - 1) / kChunk; }
  __device__ __forceinline__ int64_t Values(int chunk) const {
    return ((row * a.s + int64_t(chunk) * kChunk) * a.h + head) * a.e + first;
  }

  __device__ __forceinline__ void Fetch(int chunk) {
    const int rows = a.s - chunk * kChunk, group = head / (a.h / a.g);
    if (rows > 0) {
      auto& stage = s.stages[chunk % kStages];
      const Chunk& of = a.chunks[(row * Chunks() + chunk) * a.h + head];
      const int64_t stride = int64_t(a.g) * a.d;
      const int64_t at = (row * a.s + int64_t(chunk) * kChunk) * stride + group * a.d;
      stage.k.template Fetch<kThreads>(a.k + at, stride, rows, a.d);
      stage.v.template Fetch<kThreads>(a.v + Values(chunk), int64_t(a.h) * a.e, rows, a.e - first);
      stage.solve.template Fetch<kThreads>(of.solve, kChunk, kChunk, kChunk);
      stage.q.template Fetch<kThreads>(a.q + at, stride, rows, a.d);
      stage.seen.template Fetch<kThreads>(of.seen, kChunk, kChunk, kChunk);
      constexpr int kPieces = sizeof(Weights) / 16;
      if (threadIdx.x < kPieces)
        PrefetchOrZero16(reinterpret_cast<uint4*>(&s.weights[chunk % kStages]) + threadIdx.x,
                         reinterpret_cast<const uint4*>(&of.weights) + threadIdx.x, true);
    }
    CommitPrefetch();
  }

  // Each number of the state: where it is in memory, or -1 where it is not.
  template <typename Fn>
  __device__ __forceinline__ void EachOfState(int64_t index, Fn&& fn) {
    const int64_t from = (index * a.h + head) * a.d * a.e + first;
#pragma unroll
    for (int i = 0; i < kD / 8; ++i)
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const int value = Band() + ssm::RowOf(j), key = 8 * i + ssm::ColumnOf(j);
        if (first + value < a.e && key < a.d) fn(state[i][j], from + int64_t(key) * a.e + value);
      }
  }
  __device__ __forceinline__ void Store(float* to, int64_t index) {
    EachOfState(index, [&](float& each, int64_t at) { to[at] = each; });
  }

  // d += left tile^T, of a tile [64, 64] whose rows are the results' columns, 0 right of its diagonal.
  __device__ __forceinline__ static void MultiplySeen(float (&d)[8][4], const uint32_t (&left)[4][4],
                                                      Tokens<kChunk>& tile) {
#pragma unroll
    for (int k = 0; k < kChunk / 16; ++k)
#pragma unroll
      for (int n = k; n < kChunk / 16; ++n)
        ssm::Multiply2(d[2 * n], d[2 * n + 1], left[k],
                       [&](auto& b) { tile.TransposedB(b, 16 * n, 16 * k); });
  }

  // What the state says of keys and of queries, [16, 64] both.
  __device__ __forceinline__ void Read(int stage, float (&of_keys)[8][4], float (&of_queries)[8][4]) {
    auto& tiles = s.stages[stage];
#pragma unroll
    for (int k = 0; k < kD / 16; ++k) {
      uint32_t left[4];
#pragma unroll
      for (int i = 0; i < 4; ++i)
        left[i] = ssm::Pack(state[2 * k + i / 2][i % 2 * 2], state[2 * k + i / 2][i % 2 * 2 + 1]);
#pragma unroll
      for (int n = 0; n < kChunk / 16; ++n) {
        ssm::Multiply2(of_keys[2 * n], of_keys[2 * n + 1], left,
                       [&](auto& b) { tiles.k.TransposedB(b, 16 * n, 16 * k); });
        ssm::Multiply2(of_queries[2 * n], of_queries[2 * n + 1], left,
                       [&](auto& b) { tiles.q.TransposedB(b, 16 * n, 16 * k); });
      }
    }
  }

  // How far v is off what the state says, as a left factor.
  __device__ __forceinline__ void Compare(int stage, const float (&of_keys)[8][4], uint32_t (&off)[4][4]) {
#pragma unroll
    for (int k = 0; k < kChunk / 16; ++k) {
      uint32_t v[4];
      s.stages[stage].v.TransposedA(v, 16 * k, Band());
      AsLeft(off[k], of_keys, k, [&](int i, int token, float2 said) {
        const float2 of_v = ssm::Unpack(v[i]);
        said = Weighed(LoadTwo(s.weights[stage].keys + token), said);
        return make_float2(of_v.x - said.x, of_v.y - said.y);
      });
    }
  }

  // The state behind the chunk. written [16, 64]: what its tokens write.
  __device__ __forceinline__ void Advance(int stage, const float (&written)[8][4]) {
    const Weights& weights = s.weights[stage];
#pragma unroll
    for (auto& four : state)
#pragma unroll
      for (float& each : four) each = Weighed(weights.keeps, each);
#pragma unroll
    for (int k = 0; k < kChunk / 16; ++k) {
      uint32_t left[4];
      AsLeft(left, written, k, [&](int, int token, float2 two) {
        const float2 of = LoadTwo(weights.left + token);
        return make_float2(of.x < 0 ? 0.f : of.x * two.x, of.y < 0 ? 0.f : of.y * two.y);
      });
#pragma unroll
      for (int n = 0; n < kD / 16; ++n)
        ssm::Multiply2(state[2 * n], state[2 * n + 1], left,
                       [&](auto& b) { s.stages[stage].k.B(b, 16 * k, 16 * n); });
    }
  }

  // Where a chunk has several runs: what the last one's tokens write, without any of the others', as 0 times
  // an inf would stay; nor their keys.
  __device__ __forceinline__ void OnlyLastRun(int stage, uint32_t (&off)[4][4], float (&written)[8][4]) {
    const float* left = s.weights[stage].left;
#pragma unroll
    for (auto& four : written)
#pragma unroll
      for (float& each : four) each = 0;
#pragma unroll
    for (int k = 0; k < kChunk / 16; ++k)
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float2 of = LoadTwo(left + 16 * k + i / 2 * 8 + ssm::ColumnOf(0));
        off[k][i] &= (of.x < 0 ? 0u : 0xffffu) | (of.y < 0 ? 0u : 0xffff0000u);
      }
    MultiplySeen(written, off, s.stages[stage].solve);
    __syncthreads();  // none reads k any more
    s.stages[stage].k.template Keep<kThreads>([&](int token) { return left[token] >= 0; });
    __syncthreads();
  }

  // y [16, 64], which goes where the warp's channels of v were, and from there to memory.
  __device__ __forceinline__ void Write(int chunk, const float (&y)[8][4]) {
    auto& tile = s.stages[chunk % kStages].v;
    __syncwarp();  // no lane reads v any more
#pragma unroll
    for (int i = 0; i < 8; ++i)
#pragma unroll
      for (int j = 0; j < 4; ++j)
        *tile.At(8 * i + ssm::ColumnOf(j), Band() + ssm::RowOf(j)) = __float2bfloat16(y[i][j]);
    __syncwarp();
    const int column = Band() + Lane() % 2 * 8;
    Bf16* const to = a.y + Values(chunk) + column;
#pragma unroll
    for (int token = Lane() / 2; token < kChunk; token += 16)
      if (chunk * kChunk + token < a.s && first + column < a.e)
        *reinterpret_cast<uint4*>(to + int64_t(token) * a.h * a.e) =
            *reinterpret_cast<const uint4*>(tile.At(token, column));
  }

  __device__ __forceinline__ void Step(int chunk) {
    const int stage = chunk % kStages;
    uint32_t off[4][4], left[4][4];
    float y[8][4] = {}, written[8][4] = {};
    {
      float of_keys[8][4] = {};
      Read(stage, of_keys, y);
      Compare(stage, of_keys, off);
    }
    MultiplySeen(written, off, s.stages[stage].solve);
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const float2 of = LoadTwo(s.weights[stage].queries + 8 * i + ssm::ColumnOf(0));
#pragma unroll
      for (int j = 0; j < 4; ++j) y[i][j] = Weighed(j % 2 ? of.y : of.x, y[i][j]);
    }
#pragma unroll
    for (int k = 0; k < kChunk / 16; ++k)
      AsLeft(left[k], written, k, [](int, int, float2 two) { return two; });
    MultiplySeen(y, left, s.stages[stage].seen);
    Write(chunk, y);
    if (s.weights[stage].several) OnlyLastRun(stage, off, written);
    Advance(stage, written);
  }

  __device__ __forceinline__ void Run() {
    Fetch(0);
#pragma unroll
    for (auto& four : state)
#pragma unroll
      for (float& each : four) each = 0;
    if (a.initial) EachOfState(row, [&](float& each, int64_t at) { each = a.initial[at]; });
    for (int chunk = 0; chunk < Chunks(); ++chunk) {
      WaitForPrefetch<0>();
      __syncthreads();  // what was fetched is there for all
      if (kStages > 1) Fetch(chunk + 1);
      if (a.states && chunk % (kKept / kChunk) == 0)
        Store(a.states, row * ((a.s + kKept - 1) / kKept) + chunk / (kKept / kChunk));
      Step(chunk);
      if (kStages == 1) {
        __syncthreads();  // none reads the tokens any more
        Fetch(chunk + 1);
      }
    }
    if (a.last) Store(a.last, row);
  }
};

template <int kD, int kStages>
__global__ void __launch_bounds__(kThreads, kStages > 1 ? 1 : 2) te_gated_delta_fwd(const WalkArgs a) {
  extern __shared__ uint4 memory[];
  auto& shared = *reinterpret_cast<WalkShared<kD, kStages>*>(memory);
  Walk<kD, kStages>{a, shared, blockIdx.z, int(blockIdx.x), int(blockIdx.y) * kSlab}.Run();
}

}  // namespace te::delta
