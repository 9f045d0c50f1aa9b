// The kernel of te_gemm_grouped and te_gemm_grouped_wgrad. A CTA stays for the whole call and computes tiles
// of 128 x 256, by gemm_grouped_scheduler.cuh. One thread copies tiles of 128 bytes of k by tensor maps
// (TMA), four stages ahead, those that the CTAs of its cluster share into all of them at once. Two warpgroups
// multiply 64 rows each, in turns with what they write: the second starts a little later.
#pragma once

#include "fp8.cuh"
#include "gemm_grouped.h"
#include "gemm_grouped_scheduler.cuh"
#include "ops.h"
#include "ptx.cuh"
#include "ptx_hopper.cuh"

namespace te::grouped {

// What was chosen by measuring.
template <int kClusterCtas = 2, int kBandColumns = 8, int kLagStages = 2>
struct Plan {
  static constexpr int kCluster = kClusterCtas;  // CTAs that share copies: 1 or 2
  static constexpr int kBand = kBandColumns;     // of tiles, see Items
  static constexpr int kLag = kLagStages;        // that the second warpgroup starts later
};

constexpr int kWarps = 8, kConsumers = 32 * kWarps, kThreads = kConsumers + 128;
constexpr int kStages = 4;
constexpr unsigned kRowBytes = 128;  // of a tile, along k
constexpr unsigned kLeftBytes = kTileRows * kRowBytes, kRightBytes = kTileColumns * kRowBytes;
constexpr unsigned kStageBytes = kLeftBytes + kRightBytes;
constexpr unsigned kPieceBytes = 16 * 128;  // that a warp writes at a time: 16 rows
constexpr int kBlock = 128;                 // of scales

struct Shared {
  alignas(1024) uint8_t stages[kStages][kStageBytes];
  uint8_t pieces[kWarps][kPieceBytes];
  float scales[kStages][kTileColumns];  // of the right factor's blocks
  uint64_t full[kStages], empty[kStages];
  int offsets[kMostExperts + 1], counts[kMostExperts];
  int first[kMostExperts + 1];   // items before each expert in `order`, and all
  uint16_t order[kMostExperts];  // the experts, with the longest sums first
};

__device__ __forceinline__ uint32_t AddressOf(const void* shared) {
  return uint32_t(__cvta_generic_to_shared(shared));
}

__device__ __forceinline__ Group GroupOf(const Problem& p, const Shared& s, int expert) {
  return GroupOf(s.offsets[expert], s.offsets[expert + 1], s.counts[expert], p.wgrad ? p.k : p.rows);
}

template <typename P>
__device__ __forceinline__ Items ItemsOf(const Problem& p, const Group& group) {
  const bool nothing = p.wgrad && group.tokens == 0 && p.c == p.out;
  const int rows = nothing ? 0 : Parts(p.wgrad ? p.rows : group.rows, kTileRows);
  return {rows, Parts(p.columns, kTileColumns), P::kCluster, P::kBand};
}

// All threads of the CTA fill in the tables of `s`.
template <typename P>
__device__ __forceinline__ void MakeTables(const Problem& p, Shared& s) {
  for (int e = threadIdx.x; e <= p.experts; e += kThreads) {
    s.offsets[e] = p.offsets[e];
    if (e < p.experts) s.counts[e] = p.counts[e];
  }
  __syncthreads();
  for (int e = threadIdx.x; e < p.experts; e += kThreads) {
    int before = p.wgrad ? 0 : e;
    const int mine = GroupOf(p, s, e).tokens;
    for (int other = 0; p.wgrad && other < p.experts; ++other) {
      const int theirs = GroupOf(p, s, other).tokens;
      before += theirs > mine || (theirs == mine && other < e);
    }
    s.order[before] = uint16_t(e);
  }
  __syncthreads();
  const int lane = threadIdx.x % 32;
  int sum = 0;
  for (int at = lane; threadIdx.x < 32 && at - lane < p.experts; at += 32) {
    int items = at < p.experts ? ItemsOf<P>(p, GroupOf(p, s, s.order[at])).Count() : 0;
    const int own = items;
    for (int distance = 1; distance < 32; distance *= 2) {
      const int before = __shfl_up_sync(~0u, items, distance);
      items += lane >= distance ? before : 0;
    }
    if (at < p.experts) s.first[at] = sum + items - own;
    sum += __shfl_sync(~0u, items, 31);
  }
  if (threadIdx.x == 0) s.first[p.experts] = sum;
}

// A CTA's tile, with its place in the factors: coordinates of tensor maps.
struct Tile {
  int expert;
  bool stacked;             // of the cluster's item
  int left_row, right_row;  // of the first element
  int k, steps;             // where the sum begins, and over how many stages
};

// Where a tile goes: its first row in the result, how many rows of it the result has, and how many of these
// are not zeros.
struct Place {
  int64_t row;
  int rows, tokens;
};
__device__ __forceinline__ Place PlaceOf(const Problem& p, const Shared& s, const Tile& tile) {
  if (p.wgrad) {
    const int rows = p.rows - tile.left_row;
    return {int64_t{tile.expert} * p.rows + tile.left_row, rows, rows};
  }
  const Group group = GroupOf(p, s, tile.expert);
  const int before = tile.left_row - group.first;
  return {tile.left_row, group.rows - before, group.tokens - before};
}

// The tiles of a CTA, one after the other.
template <typename P, int kStep>
class Walk {
 public:
  __device__ __forceinline__ Walk(const Problem& p, const Shared& s)
      : p_(p), s_(s), rank_(P::kCluster > 1 ? ClusterRank() : 0) {}

  __device__ __forceinline__ bool Next(Tile* tile) {
    const int item = ItemOf(round_++, blockIdx.x / P::kCluster, gridDim.x / P::kCluster);
    if (item >= s_.first[p_.experts]) return false;
    while (item >= s_.first[at_ + 1]) ++at_;
    const int expert = s_.order[at_];
    const Group group = GroupOf(p_, s_, expert);
    const Item found = ItemsOf<P>(p_, group).At(item - s_.first[at_]);
    const int row = found.RowOf(rank_) * kTileRows;
    tile->expert = expert, tile->stacked = found.stacked;
    tile->right_row = found.ColumnOf(rank_) * kTileColumns;
    if (p_.wgrad) {
      tile->left_row = row;
      tile->k = group.first, tile->steps = Parts(group.tokens, kBlock) * (kBlock / kStep);
    } else {
      tile->left_row = group.first + row;
      // Of all CTAs alike: they copy for each other.
      tile->k = 0, tile->steps = found.row * kTileRows < group.tokens ? Parts(p_.k, kStep) : 0;
    }
    return true;
  }

 private:
  const Problem& p_;
  const Shared& s_;
  const int rank_;
  int round_ = 0, at_ = 0;
};

// A stage of the ring, and how often the ring was passed.
struct Ring {
  int stage = 0;
  unsigned parity = 0;
  __device__ __forceinline__ void Advance() {
    stage = stage + 1 == kStages ? 0 : stage + 1;
    parity ^= stage == 0;
  }
};

// One thread: copies what the CTA's tiles are made of.
template <Sums kSums, typename P, int kStep>
__device__ __forceinline__ void Produce(const KernelArgs& args, Shared& s) {
  constexpr unsigned kAll = (1u << P::kCluster) - 1, kHalfLeft = kLeftBytes / 2, kHalfRight = kRightBytes / 2;
  const Problem& p = args.p;
  const int rank = P::kCluster > 1 ? ClusterRank() : 0;
  Walk<P, kStep> walk(p, s);
  Ring ring;
  for (Tile tile; walk.Next(&tile);) {
    const int scales = kSums == Sums::kRows ? max(0, min(kTileColumns, p.columns - tile.right_row)) : 0;
    const int right_z = p.wgrad ? 0 : tile.expert;
    for (int step = 0; step < tile.steps; ++step, ring.Advance()) {
      const uint32_t full = AddressOf(&s.full[ring.stage]), left = AddressOf(s.stages[ring.stage]);
      const uint32_t right = left + kLeftBytes;
      const int k = tile.k + step * kStep;
      WaitBarrier(AddressOf(&s.empty[ring.stage]), ring.parity ^ 1);
      ArriveExpecting(full, kStageBytes + unsigned(scales * sizeof(float)));
      if (P::kCluster == 2 && !tile.stacked) {
        CopyBoxTo(kAll, left + rank * kHalfLeft, &args.left, full, k, tile.left_row + rank * kTileRows / 2,
                  0);
      } else {
        CopyBox(left, &args.left, full, k, tile.left_row, 0);
        CopyBox(left + kHalfLeft, &args.left, full, k, tile.left_row + kTileRows / 2, 0);
      }
      if (P::kCluster == 2 && tile.stacked) {
        CopyBoxTo(kAll, right + rank * kHalfRight, &args.right, full, k,
                  tile.right_row + rank * kTileColumns / 2, right_z);
      } else {
        CopyBox(right, &args.right, full, k, tile.right_row, right_z);
        CopyBox(right + kHalfRight, &args.right, full, k, tile.right_row + kTileColumns / 2, right_z);
      }
      if (scales > 0)
        CopyBytes(AddressOf(s.scales[ring.stage]),
                  p.right_blocks + int64_t{k / kBlock} * p.columns + tile.right_row,
                  unsigned(scales * sizeof(float)), full);
    }
  }
}

// The scales of a thread's two rows, and of the right factor's two blocks of 128 rows.
struct BlockScales {
  float rows[2], halves[2];
};

// A warp's part in the products: 16 rows of a tile.
template <Factors kFactors, Sums kSums, typename P>
struct Consumer {
  static constexpr int kStep = kRowBytes / (kFactors == Factors::kBF16 || kFactors == Factors::kF16 ? 2 : 1);
  static constexpr unsigned kTurn = 1;  // the barrier by which the second warpgroup starts later

  const Problem& p;
  Shared& s;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  Ring ring;
  bool waits = P::kLag > 0;  // for the other warpgroup, or that one for this

  // The row of the tile of a thread's first row of two; the other one is 8 below.
  __device__ __forceinline__ int Row() const { return warp * 16 + lane / 4; }

  // The CTAs that copy into this stage may do so again.
  __device__ __forceinline__ void Release(int stage) const {
    if (lane < P::kCluster) ArriveAt(AddressOf(&s.empty[stage]), lane);
  }
  __device__ __forceinline__ uint64_t Left(int stage) const {
    return TileDescriptor(AddressOf(s.stages[stage]) + warp / 4 * (kLeftBytes / 2));
  }
  __device__ __forceinline__ uint64_t Right(int stage) const {
    return TileDescriptor(AddressOf(s.stages[stage]) + kLeftBytes);
  }

  __device__ __forceinline__ void WaitForTurn() {
    if (waits && warp >= kWarps / 2) NamedBarrier(kTurn, kConsumers), waits = false;
  }
  __device__ __forceinline__ void GiveTurn(bool now) {
    if (waits && now && warp < kWarps / 2) ArriveNamed(kTurn, kConsumers), waits = false;
  }

  // sums: the products of a tile, added in the tensor cores.
  __device__ __forceinline__ void MultiplyFast(const Tile& tile, float (&sums)[128]) {
    int before = 0;
    for (int step = 0; step < tile.steps; ++step) {
      const int stage = ring.stage;
      WaitBarrier(AddressOf(&s.full[stage]), ring.parity);
      const uint64_t left = Left(stage), right = Right(stage);
      BeginProducts();
#pragma unroll
      for (int i = 0; i < 4; ++i) MultiplyTiles<kFactors>(sums, left + 2 * i, right + 2 * i, step | i);
      CommitProducts();
      WaitForProducts<1>();
      if (step > 0) Release(before);
      GiveTurn(step + 1 == P::kLag);
      before = stage;
      ring.Advance();
    }
    WaitForProducts<0>();
    Settle(sums);
    if (tile.steps > 0) Release(before);
  }

  // Those of a tile's step. There are less than 2^31 of them in all (gemm_grouped.cc).
  __device__ __forceinline__ BlockScales ScalesOf(const Tile& tile, int step) const {
    BlockScales scales;
    const int block = tile.k / kBlock + step, row = min(tile.left_row + Row(), p.rows - 1);
    const float* of_rows = p.left_blocks + block * p.rows + row;
    scales.rows[0] = of_rows[0], scales.rows[1] = of_rows[row + 8 < p.rows ? 8 : 0];
    if constexpr (kSums == Sums::kSquares) {
      const int along = Parts(p.k, kBlock), squares = Parts(p.columns, kBlock);
      const int square = min(tile.right_row / kBlock, squares - 1);
      const float* of_halves = p.right_blocks + (tile.expert * squares + square) * along + block;
      scales.halves[0] = of_halves[0], scales.halves[1] = of_halves[square + 1 < squares ? along : 0];
    }
    return scales;
  }

  // Half of a tile's columns: sums += part, times the scales of this step.
  __device__ __forceinline__ void Promote(int half, int stage, const BlockScales& scales,
                                          const float (&part)[64], float (&sums)[128]) const {
    const uint32_t columns = AddressOf(&s.scales[stage][half * kTileColumns / 2 + lane % 4 * 2]);
    float factors[2];
    if constexpr (kSums == Sums::kSquares)
      factors[0] = scales.rows[0] * scales.halves[half], factors[1] = scales.rows[1] * scales.halves[half];
#pragma unroll
    for (int j = 0; j < 16; ++j) {
      float2 column;
      if constexpr (kSums == Sums::kRows) column = LoadShared8(columns + j * 32);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        float& sum = sums[half * 64 + 4 * j + i];
        if constexpr (kSums == Sums::kSplit)
          sum += part[4 * j + i];
        else if constexpr (kSums == Sums::kSquares)
          sum += part[4 * j + i] * factors[i / 2];
        else
          sum += part[4 * j + i] * (i % 2 ? column.y : column.x) * scales.rows[i / 2];
      }
    }
  }

  // sums: the products of a tile, in f32 every 128 of k.
  __device__ __forceinline__ void MultiplySplit(const Tile& tile, float (&sums)[128]) {
    constexpr bool kScaled = kSums != Sums::kSplit;
    for (int step = 0; step < tile.steps; ++step) {
      BlockScales scales;
      if (kScaled) scales = ScalesOf(tile, step);
      const int stage = ring.stage;
      WaitBarrier(AddressOf(&s.full[stage]), ring.parity);
      const uint64_t left = Left(stage), right = Right(stage);
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        float part[64];
        BeginProducts();
#pragma unroll
        for (int i = 0; i < 4; ++i)
          MultiplyTiles<kFactors>(part, left + 2 * i, right + half * (kRightBytes / 2 >> 4) + 2 * i, i);
        CommitProducts();
        WaitForProducts<0>();
        Settle(part);
        if (half == 1 && kSums != Sums::kRows) Release(stage);
        Promote(half, stage, scales, part, sums);
      }
      if (kSums == Sums::kRows) {  // whose scales lie in the stage
        __syncwarp();
        Release(stage);
      }
      GiveTurn(step + 1 == P::kLag);
      ring.Advance();
    }
  }

  __device__ __forceinline__ void Run() {
    const bool wide = p.result == F32 || p.c;
    Walk<P, kStep> walk(p, s);
    for (Tile tile; walk.Next(&tile);) {
      float sums[128];
      if (kSums != Sums::kFast || tile.steps == 0) {
#pragma unroll
        for (int i = 0; i < 128; ++i) sums[i] = 0;
      }
      WaitForTurn();
      if constexpr (kSums == Sums::kFast)
        MultiplyFast(tile, sums);
      else
        MultiplySplit(tile, sums);
      GiveTurn(true);
      if (wide)
        WriteWide(tile, sums);
      else
        Write16(tile, sums);
    }
    WaitForTurn();  // a barrier is left as it was found
    GiveTurn(true);
  }

  // ---- the result ----

  // What the sums of this tile are multiplied by.
  __device__ __forceinline__ float ScaleOf(const Tile& tile) const {
    if (!p.left_inv) return 1.f;
    return p.left_inv[p.left_each ? tile.expert : 0] * p.right_inv[p.right_each ? tile.expert : 0];
  }

  // Neighbours in a row of the result's type.
  __device__ __forceinline__ float2 LoadPair(const void* from, int64_t at) const {
    if (p.result == F32) return *reinterpret_cast<const float2*>(static_cast<const float*>(from) + at);
    const auto load = [&]<typename T>() {
      const Vec<T, 2> pair = Load<2>(static_cast<const T*>(from) + at);
      return make_float2(pair[0], pair[1]);
    };
    return p.result == BF16 ? load.template operator()<__nv_bfloat16>() : load.template operator()<__half>();
  }
  __device__ __forceinline__ uint32_t Pack(float a, float b) const {
    const float pair[] = {a, b};
    return p.result == BF16 ? Round<__nv_bfloat16>(pair).words[0] : Round<__half>(pair).words[0];
  }

  // Four numbers of 8 columns: those of two neighbours in a row, and in the row 8 below; zeros where no token
  // is.
  __device__ __forceinline__ float4 Values(const Tile& tile, const Place& place, float scale, int j,
                                           const float* sums) const {
    const int column = tile.right_row + 8 * j + lane % 4 * 2;
    float2 bias = {0, 0};
    if (p.bias && column < p.columns) bias = LoadPair(p.bias, int64_t{tile.expert} * p.columns + column);
    const bool upper = Row() < place.tokens, lower = Row() + 8 < place.tokens;
    return {upper ? sums[0] * scale + bias.x : 0, upper ? sums[1] * scale + bias.y : 0,
            lower ? sums[2] * scale + bias.x : 0, lower ? sums[3] * scale + bias.y : 0};
  }

  // Where 16 bytes of a row of the warp's piece lie: a column of them, over the rows, lies in all banks.
  __device__ __forceinline__ uint32_t InPiece(int row, int chunk) const {
    return AddressOf(s.pieces[warp]) + row * 128 + ((chunk ^ row % 8) << 4);
  }

  // Results of 16 bits, 64 columns at a time.
  __device__ __forceinline__ void Write16(const Tile& tile, const float (&sums)[128]) const {
    const float scale = ScaleOf(tile);
    const Place place = PlaceOf(p, s, tile);
    uint16_t* out = static_cast<uint16_t*>(p.out) + (place.row + warp * 16) * p.columns;
#pragma unroll
    for (int piece = 0; piece < 4; ++piece) {
#pragma unroll
      for (int j = 0; j < 8; j += 2) {
        const int at = piece * 8 + j;
        const float4 left = Values(tile, place, scale, at, sums + 4 * at);
        const float4 right = Values(tile, place, scale, at + 1, sums + 4 * at + 4);
        StoreMatrices(InPiece(lane % 16, j + lane / 16), Pack(left.x, left.y), Pack(left.z, left.w),
                      Pack(right.x, right.y), Pack(right.z, right.w));
      }
      __syncwarp();
      const int column = tile.right_row + piece * 64 + lane % 8 * 8;
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int row = lane / 8 + 4 * i;
        const uint4 words = LoadShared16(InPiece(row, lane % 8));
        if (warp * 16 + row < place.rows && column < p.columns)
          *reinterpret_cast<uint4*>(out + int64_t{row} * p.columns + column) = words;
      }
      __syncwarp();
    }
  }

  // f32 results, and those to which c is added in f32, 32 columns at a time.
  __device__ __forceinline__ void WriteWide(const Tile& tile, const float (&sums)[128]) const {
    const float scale = ScaleOf(tile);
    const Place place = PlaceOf(p, s, tile);
#pragma unroll
    for (int piece = 0; piece < 8; ++piece) {
      const int column = tile.right_row + piece * 32 + lane % 8 * 4;
      float2 c[4][2] = {};
#pragma unroll
      for (int i = 0; i < 4; ++i)
        if (p.c && IsInside(place, i, column)) {
          c[i][0] = LoadPair(p.c, At(place, i, column)), c[i][1] = LoadPair(p.c, At(place, i, column) + 2);
        }
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const int at = piece * 4 + j;
        const float4 values = Values(tile, place, scale, at, sums + 4 * at);
        StoreShared(InPiece(lane / 4, 2 * j + lane % 4 / 2) + lane % 2 * 8, values.x, values.y);
        StoreShared(InPiece(lane / 4 + 8, 2 * j + lane % 4 / 2) + lane % 2 * 8, values.z, values.w);
      }
      __syncwarp();
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float4 v = __builtin_bit_cast(float4, LoadShared16(InPiece(lane / 8 + 4 * i, lane % 8)));
        const float4 sum = {v.x + c[i][0].x, v.y + c[i][0].y, v.z + c[i][1].x, v.w + c[i][1].y};
        if (IsInside(place, i, column)) Store4(At(place, i, column), sum);
      }
      __syncwarp();
    }
  }
  __device__ __forceinline__ bool IsInside(const Place& place, int i, int column) const {
    return warp * 16 + lane / 8 + 4 * i < place.rows && column < p.columns;
  }
  __device__ __forceinline__ int64_t At(const Place& place, int i, int column) const {
    return (place.row + warp * 16 + lane / 8 + 4 * i) * p.columns + column;
  }
  __device__ __forceinline__ void Store4(int64_t at, const float4& v) const {
    if (p.result == F32)
      *reinterpret_cast<float4*>(static_cast<float*>(p.out) + at) = v;
    else
      *reinterpret_cast<uint2*>(static_cast<uint16_t*>(p.out) + at) =
          make_uint2(Pack(v.x, v.y), Pack(v.z, v.w));
  }
};

template <Factors kFactors, Sums kSums, typename P>
__global__ void __launch_bounds__(kThreads, 1) te_gemm_grouped(const __grid_constant__ KernelArgs args) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  extern __shared__ __align__(1024) uint8_t shared[];
  Shared& s = *reinterpret_cast<Shared*>(shared);
  if (threadIdx.x == 0) {
    PrefetchMap(&args.left);
    PrefetchMap(&args.right);
    for (int i = 0; i < kStages; ++i) {
      InitBarrier(AddressOf(&s.full[i]), 1);
      InitBarrier(AddressOf(&s.empty[i]), kWarps * P::kCluster);
    }
    FenceBarrierInit();
  }
  MakeTables<P>(args.p, s);
  SyncCluster();
  if (threadIdx.x >= kConsumers) {
    GiveRegisters<40>();
    if (threadIdx.x == kConsumers) Produce<kSums, P, Consumer<kFactors, kSums, P>::kStep>(args, s);
  } else {
    TakeRegisters<232>();
    Consumer<kFactors, kSums, P>{args.p, s}.Run();
  }
  SyncCluster();  // no CTA leaves before the others' last arrivals at its barriers
#else
  __trap();  // compiled for Hopper alone
#endif
}

template <Factors kFactors, Sums kSums, typename P = Plan<>>
Status Launch(cudaStream_t stream, const KernelArgs& args) {
  const auto kernel = te_gemm_grouped<kFactors, kSums, P>;
  static_assert(sizeof(Shared) <= 227 * 1024);
  TE_CUDA(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, sizeof(Shared)));
  int device, multiprocessors;
  TE_CUDA(cudaGetDevice(&device));
  TE_CUDA(cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, device));
  cudaLaunchAttribute cluster{.id = cudaLaunchAttributeClusterDimension};
  cluster.val.clusterDim = {unsigned(P::kCluster), 1, 1};
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(multiprocessors / P::kCluster * P::kCluster);
  config.blockDim = dim3(kThreads);
  config.dynamicSmemBytes = sizeof(Shared);
  config.stream = stream;
  config.attrs = &cluster;
  config.numAttrs = 1;
  TE_CUDA(cudaLaunchKernelEx(&config, kernel, args));
  return {};
}

// By the types of the factors, of FP8.
template <Sums kSums>
Status LaunchFp8(cudaStream_t stream, const KernelArgs& args) {
  if (args.p.lhs == F8E5M2) return Launch<Factors::kE5M2E4M3, kSums>(stream, args);
  if (args.p.rhs == F8E5M2) return Launch<Factors::kE4M3E5M2, kSums>(stream, args);
  return Launch<Factors::kE4M3, kSums>(stream, args);
}

}  // namespace te::grouped
