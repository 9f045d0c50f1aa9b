// On Hopper: which heads and keys of a chunk a CTA of the last kernel of a slab has, and what the CTAs of a
// cluster add up.
#pragma once

#include "delta/delta_bwd_chunks_tiles.cuh"

namespace te::delta {

// kHalves: two CTAs of a cluster have kD channels of queries and keys each. All that they compute is linear
// in these but for what a token's length takes away.
template <int kD, bool kRuns, int kHalves>
struct GradCta {
  using Shared = HopperGradShared<kD, kRuns>;
  static constexpr int kStages = Shared::kStages;
  const HopperGradArgs& given;
  Shared& s;
  const GradArgs& a = given.a;
  const int row = blockIdx.z, chunk = blockIdx.y, index = blockIdx.x / kHalves;

  __device__ __forceinline__ int Half() const { return blockIdx.x % kHalves; }
  __device__ __forceinline__ int FirstKey() const { return Half() * kD; }
  __device__ __forceinline__ int Group() const { return index / given.parts; }
  __device__ __forceinline__ int64_t Row() const { return a.part.first_row + row; }
  __device__ __forceinline__ int Token() const { return (a.part.first_chunk + chunk) * kChunk; }
  __device__ __forceinline__ int Tiles() const { return (a.again.e + kSlab - 1) / kSlab; }
  __device__ __forceinline__ int Heads() const { return given.heads; }
  __device__ __forceinline__ int Units() const { return Heads() * Tiles(); }
  __device__ __forceinline__ int Head(int i) const { return index * Heads() + i; }
  __device__ __forceinline__ Chunk& ChunkOf(int i) const {
    return a.chunks[a.again.part.At(Row(), Token() / kChunk, Head(i), a.again.h)];
  }
  __device__ __forceinline__ const Weights& WeightsOf(int i) const { return ChunkOf(i).weights; }

  __device__ __forceinline__ int64_t GateAt(int head, int token) const {
    return (Row() * a.again.s + Token() + token) * a.again.h + Head(head);
  }
  // What the second half has of a head's dgate and dbeta, where the chunk's inverse was, which only walks
  // read.
  using OfGate = float[kChunk];
  __device__ __forceinline__ OfGate* GatesOf(int head) const {
    return reinterpret_cast<OfGate*>(ChunkOf(head).inverse.cells);
  }

  // The inverse lengths of queries or keys.
  __device__ __forceinline__ const float* Lengths(bool of_queries) const {
    const Pairs& pairs = s.known[(Units() - 1) % kStages].pairs;
    return of_queries ? pairs.of_queries : pairs.of_keys;
  }

  // Where several CTAs share the heads of a key, or its channels, dq or dk of this one's, f32
  // [64, kD], in the stage behind the one of scores, or in the next.
  __device__ __forceinline__ bool AreParts() const { return kHalves > 1 || given.parts > 1; }
  static constexpr int kPitch = kD + 8;
  static_assert(kChunk * kPitch * 4 <= sizeof(typename Shared::Stage));
  __device__ __forceinline__ uint8_t* PartOf(bool queries) const {
    return reinterpret_cast<uint8_t*>(&s.stages[(Units() + (queries ? 1 : 2)) % kStages]);
  }
  __device__ __forceinline__ void PutPart(const float (&of)[kD / 2], bool of_queries) const {
#pragma unroll
    for (int i = 0; i < kD / 2; i += 2) {
      const int at = RowOfHalf(i / 2 % 2) * kPitch + i / 4 * 8 + ssm::ColumnOf(0);
      reinterpret_cast<float2*>(PartOf(of_queries))[at / 2] = make_float2(of[i], of[i + 1]);
    }
  }
  // All threads: of each CTA of the cluster some tokens, of its channels, summed over all in the order of
  // heads.
  __device__ __forceinline__ void AddParts() const {
    SyncCluster();
    constexpr int kPieces = kD / 4, kOfOne = kChunk * kPieces;
    for (int i = int(ClusterRank()) / kHalves * ssm::kHopperThreads + threadIdx.x; i < 2 * kOfOne;
         i += given.parts * ssm::kHopperThreads) {
      const bool of_queries = i < kOfOne;
      const int token = i % kOfOne / kPieces, column = i % kPieces * 4, key = FirstKey() + column;
      if (Token() + token >= a.again.s || key >= a.again.d) continue;
      const uint32_t at = AddressOf(PartOf(of_queries)) + (token * kPitch + column) * 4;
      float sums[4] = {};
      for (int other = 0; other < given.parts; ++other) {
        const float4 of = LoadAt(at, other * kHalves + Half());
        sums[0] += of.x, sums[1] += of.y, sums[2] += of.z, sums[3] += of.w;
      }
      if (kHalves > 1 && a.of.normalize) TakeAlong(sums, of_queries, token, column);
      const int64_t to = ((Row() * a.again.s + Token() + token) * a.again.g + Group()) * a.again.d + key;
      Store((of_queries ? a.dq : a.dk) + to, Round<Bf16, 4>(sums));
    }
    if (kHalves > 1 && Half() == 0) AddGates();
    SyncCluster();
  }
  // Four neighbours of a token less what its length takes away.
  __device__ __forceinline__ void TakeAlong(float (&sums)[4], bool of_queries, int token, int column) const {
    float along = 0;
    for (int other = 0; other < given.parts * kHalves; ++other) {
      const float4 of = LoadAt(AddressOf(&s.along[of_queries][token / 4 * 4]), other);
      along += token % 4 < 2 ? (token % 4 < 1 ? of.x : of.y) : token % 4 < 3 ? of.z : of.w;
    }
    const float less = along * Lengths(of_queries)[token] * Lengths(of_queries)[token];
    const uint8_t* tokens = (of_queries ? s.q : s.k) + column / 64 * kBoxBytes;
    const uint8_t* at = tokens + InBox(token, column % 64 / 8) + column % 8 * 2;
    const auto four = Load<4>(reinterpret_cast<const Bf16*>(at));
#pragma unroll
    for (int i = 0; i < 4; ++i) sums[i] -= less * float(four[i]);
  }
  // The gradients to gates and betas, with what the second half has of them.
  __device__ __forceinline__ void AddGates() const {
    for (int i = threadIdx.x; i < Heads() * kChunk; i += ssm::kHopperThreads) {
      const int head = i / kChunk, token = i % kChunk;
      if (Token() + token >= a.again.s) continue;
      const int64_t at = GateAt(head, token);
      a.dgate[at] += GatesOf(head)[0][token], a.dbeta[at] += GatesOf(head)[1][token];
    }
  }
};

}  // namespace te::delta
