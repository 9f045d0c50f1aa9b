// The kernel of te_gemm_grouped*. A CTA stays for the whole call and computes tiles of 128 x 256, by
// gemm_grouped_scheduler.cuh. One thread copies tiles of 128 bytes of k by tensor maps (TMA), four stages
// ahead, those that the CTAs of its cluster share into all of them at once. Two warpgroups multiply 64 rows
// each.
#pragma once

#include "base/device.h"
#include "base/ptx.cuh"
#include "gemm/gemm_grouped_tiles.cuh"
#include "gemm/gemm_grouped_write.cuh"

namespace te::grouped {

// Whether the left and the right factor lie across k.
template <Layout kLayout>
constexpr bool kLeftAcross = kLayout == Layout::kBothAcross;
template <Layout kLayout>
constexpr bool kRightAcross = kLayout != Layout::kAlong;

// Copies kRows rows of a factor, half of a tile, to the CTA or to all of its cluster.
template <bool kAcross, int kRows, typename P>
__device__ __forceinline__ void CopyHalf(bool to_all, uint32_t to, const CUtensorMap* map, uint32_t full,
                                         int k, int row, int z) {
  constexpr unsigned kAll = (1u << P::kCluster) - 1;
  constexpr int kBoxRows = kAcross ? 64 : kRows;
#pragma unroll
  for (int i = 0; i < kRows; i += kBoxRows, to += kBoxBytes) {
    const int x = kAcross ? row + i : k, y = kAcross ? k : row + i;
    to_all ? CopyBoxTo(kAll, to, map, full, x, y, z) : CopyBox(to, map, full, x, y, z);
  }
}

// Copies a tile of kRows rows of a factor. shared: with the other CTAs of the cluster, each of which copies
// one half.
template <bool kAcross, int kRows, typename P>
__device__ __forceinline__ void CopyTile(bool shared, int rank, uint32_t to, const CUtensorMap* map,
                                         uint32_t full, int k, int row, int z) {
  constexpr unsigned kHalf = kRows / 2 * kRowBytes;
  if (P::kCluster == 2 && shared) {
    CopyHalf<kAcross, kRows / 2, P>(true, to + rank * kHalf, map, full, k, row + rank * kRows / 2, z);
  } else {
    CopyHalf<kAcross, kRows / 2, P>(false, to, map, full, k, row, z);
    CopyHalf<kAcross, kRows / 2, P>(false, to + kHalf, map, full, k, row + kRows / 2, z);
  }
}

// Copies a tile of kRows lines of squares, as CopyTile does: from a line of a square on, the second half from
// the one that lies `lines` and `squares` further.
template <int kRows, typename P>
__device__ __forceinline__ void CopySquares(bool shared, int rank, uint32_t to, const CUtensorMap* map,
                                            uint32_t full, int square, int line, int squares, int lines) {
  constexpr unsigned kAll = (1u << P::kCluster) - 1, kHalf = kRows / 2 * kRowBytes;
  if (P::kCluster == 2 && shared) {
    CopyBoxTo(kAll, to + rank * kHalf, map, full, 0, square + rank * squares, line + rank * lines);
  } else {
    CopyBox(to, map, full, 0, square, line);
    CopyBox(to + kHalf, map, full, 0, square + squares, line + lines);
  }
}

// Copies a step of both factors where they are cut into slots: from `k` of a slot on. halves: of the tile's
// columns.
template <typename P>
__device__ __forceinline__ void CopySlots(const KernelArgs& args, const Tile& tile, const Half (&halves)[2],
                                          int rank, uint32_t to, uint32_t full, int k, int slot) {
  constexpr unsigned kAll = (1u << P::kCluster) - 1;
  const bool shares_left = P::kCluster == 2 && !tile.stacked, shares_right = P::kCluster == 2 && tile.stacked;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const uint32_t left = to + half * (kLeftBytes / 2), right = to + kLeftBytes + half * (kRightBytes / 2);
    const int left_row = tile.left_row + half * (kTileRows / 2), row = halves[half].row;
    const int z = tile.expert * args.p.column_slots + halves[half].slot;
    if (!shares_left)
      CopyBox(left, &args.left, full, k, slot, left_row);
    else if (half == rank)
      CopyBoxTo(kAll, left, &args.left, full, k, slot, left_row);
    if (!shares_right)
      CopyBox(right, &args.right, full, k, slot, row, z);
    else if (half == rank)
      CopyBoxTo(kAll, right, &args.right, full, k, slot, row, z);
  }
}

// One thread: copies what the CTA's tiles are made of.
template <Sums kSums, Layout kLayout, typename P, int kStep>
__device__ __forceinline__ void Produce(const KernelArgs& args, Shared& s) {
  const Problem& p = args.p;
  const int rank = RankOf<P>();
  const bool left_squares = kLayout == Layout::kAlong && p.line && !p.wgrad;
  const bool right_squares = kLayout == Layout::kAlong && p.line && p.wgrad;
  Walk<P, kStep, true> walk(p, s);
  Ring ring;
  for (Tile tile; walk.Next(&tile);) {
    const int scales = kSums == Sums::kRows ? max(0, min(kTileColumns, p.columns - tile.right_row)) : 0;
    const int right_z = p.wgrad ? 0 : tile.expert;
    [[maybe_unused]] const Half halves[] = {HalfOf<kSums>(p, tile, 0), HalfOf<kSums>(p, tile, 1)};
    [[maybe_unused]] int slot_k = 0, slot = 0;
    for (int step = 0; step < tile.steps; ++step, ring.Advance()) {
      const uint32_t full = AddressOf(&s.full[ring.stage]), left = AddressOf(s.stages[ring.stage]);
      const int k = tile.k + step * kStep;
      WaitBarrier(AddressOf(&s.empty[ring.stage]), ring.parity ^ 1);
      ArriveExpecting(full, kStageBytes + unsigned(scales * sizeof(float)));
      if constexpr (kSums == Sums::kSquares) {
        CopySlots<P>(args, tile, halves, rank, left, full, slot_k, slot);
        if ((slot_k += kStep) >= p.slot_k) slot_k = 0, ++slot;
        continue;
      }
      if (left_squares)
        CopySquares<kTileRows, P>(!tile.stacked, rank, left, &args.left, full, k / kBlock, tile.left_row, 0,
                                  kTileRows / 2);
      else
        CopyTile<kLeftAcross<kLayout>, kTileRows, P>(!tile.stacked, rank, left, &args.left, full, k,
                                                     tile.left_row, 0);
      if (right_squares)
        CopySquares<kTileColumns, P>(tile.stacked, rank, left + kLeftBytes, &args.right, full,
                                     tile.right_row / kBlock, k, 1, 0);
      else
        CopyTile<kRightAcross<kLayout>, kTileColumns, P>(tile.stacked, rank, left + kLeftBytes, &args.right,
                                                         full, k, tile.right_row, right_z);
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

// Reads the scales of blocks of a tile's steps, one step after the other.
template <Sums kSums>
struct ScaleReader {
  const float *rows = nullptr, *halves = nullptr;
  int lower = 0, right = 0;  // from the first of a pair to the second

  // row: of the thread's first row of two, in the left factor; the other one is 8 below.
  __device__ __forceinline__ ScaleReader(const Problem& p, const Tile& tile, int row) {
    if constexpr (kSums == Sums::kSplit) return;
    row = min(row, p.rows - 1);
    rows = p.left_blocks + int64_t{tile.k / kBlock} * p.rows + row, lower = row + 8 < p.rows ? 8 : 0;
    if constexpr (kSums == Sums::kSquares) {
      const int along = p.k_blocks, squares = p.column_blocks;
      const int square = min(tile.right_row / kBlock, squares - 1);
      // All lanes read the same, which goes to uniform registers, and these are waited for as soon as they
      // are asked for: that took 15 % of a product. So the place depends on the lane, by `row >> 31`, which
      // is 0.
      halves = p.right_blocks + (int64_t{tile.expert} * squares + square) * along + (row >> 31);
      right = square + 1 < squares ? along : 0;
    }
  }

  // The scales of the next step. stride: p.rows.
  __device__ __forceinline__ BlockScales Read(int stride) {
    BlockScales scales;
    scales.rows[0] = rows[0], scales.rows[1] = rows[lower];
    rows += stride;
    if constexpr (kSums == Sums::kSquares) {
      scales.halves[0] = halves[0], scales.halves[1] = halves[right];
      ++halves;
    }
    return scales;
  }
};

// The products of a warp: 16 rows of a tile.
template <Factors kFactors, Sums kSums, Layout kLayout, typename P>
struct Consumer {
  static constexpr int kStep = kRowBytes / (kFactors == Factors::kBF16 || kFactors == Factors::kF16 ? 2 : 1);
  static constexpr bool kLeft = kLeftAcross<kLayout>, kRight = kRightAcross<kLayout>;

  const KernelArgs& args;
  Shared& s;
  const Problem& p = args.p;
  const int warp = __shfl_sync(~0u, threadIdx.x / 32, 0);  // alike in all lanes, as the compiler can see
  const int lane = Kept(threadIdx.x % 32);
  Ring ring;

  // The row of the tile of a thread's first row of two; the other one is 8 below.
  __device__ __forceinline__ int Row() const { return warp * 16 + lane / 4; }

  // The CTAs that copy into this stage may do so again.
  __device__ __forceinline__ void Release(int stage) const {
    if (lane < P::kCluster) ArriveAt(AddressOf(&s.empty[stage]), lane);
  }
  __device__ __forceinline__ uint64_t Left(int stage) const {
    return TileDescriptor<kLeft>(AddressOf(s.stages[stage]) + warp / 4 * kBoxBytes);
  }
  __device__ __forceinline__ uint64_t Right(int stage) const {
    return TileDescriptor<kRight>(AddressOf(s.stages[stage]) + kLeftBytes);
  }

  // Where k are rows of both tiles: writes zeros over the rows of a stage that are no tokens', which may hold
  // anything. Its first `tokens` rows are tokens'.
  __device__ __forceinline__ void ClearPadding(int tokens, int stage) const {
    const uint32_t chunk = AddressOf(s.stages[stage]) + lane % 8 * 16;
    for (int row = tokens + warp * 4 + lane / 8; row < kStep; row += kWarps * 4)
      for (unsigned box = 0; box < kStageBytes; box += kBoxBytes)
        StoreShared(chunk + box + row * kRowBytes, 0.f, 0.f, 0.f, 0.f);
    FenceAsync();
    NamedBarrier(1, kConsumers);
  }

  // sums: the products of a tile, added in the tensor cores. `meanwhile` is called while the last ones run.
  template <typename F>
  __device__ __forceinline__ void MultiplyFast(const Tile& tile, float (&sums)[128], F meanwhile) {
    int before = 0, tokens = 0;  // of the steps that are left, where k are rows
    if constexpr (kLeft) tokens = GroupOf(p, s, tile.expert).tokens;
    for (int step = 0; step < tile.steps; ++step) {
      const int stage = ring.stage;
      WaitBarrier(AddressOf(&s.full[stage]), ring.parity);
      if constexpr (kLeft) {
        if (tokens < kStep) ClearPadding(tokens, stage);  // in the last step, in all threads
        tokens -= kStep;
      }
      const uint64_t left = Left(stage), right = Right(stage);
      BeginProducts();
#pragma unroll
      for (int i = 0; i < 4; ++i)
        MultiplyTiles<kFactors, kLeft, kRight>(sums, left + i * kNextProduct<kLeft>,
                                               right + i * kNextProduct<kRight>, step | i);
      CommitProducts();
      WaitForProducts<1>();
      if (step > 0) Release(before);
      before = stage;
      ring.Advance();
    }
    meanwhile();
    WaitForProducts<0>();
    Settle(sums);
    if (tile.steps > 0) Release(before);
  }

  // Half of a tile's columns: sums += fresh, the products of one step, times its scales.
  __device__ __forceinline__ void Promote(int half, int stage, const BlockScales& scales,
                                          const float (&fresh)[64], float (&sums)[128]) const {
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
          sum += fresh[4 * j + i];
        else if constexpr (kSums == Sums::kSquares)
          sum += fresh[4 * j + i] * factors[i / 2];
        else
          sum += fresh[4 * j + i] * (i % 2 ? column.y : column.x) * scales.rows[i / 2];
      }
    }
  }

  // How many halves of a tile's columns a warpgroup has to multiply: what lies beyond the result is nobody's.
  __device__ __forceinline__ int Halves(const Tile& tile) const {
    const bool has_rows = warp / 4 * (kTileRows / 2) < PlaceOf(p, s, tile).tokens;
    return !has_rows ? 0 : tile.right_row / kBlock + 1 < p.column_blocks ? 2 : 1;
  }

  // sums += the products of the next kSteps steps, one half after the other.
  template <int kHalves, int kSteps>
  __device__ __forceinline__ void MultiplySteps(const BlockScales& scales, float (&sums)[128]) {
    constexpr bool kInStages = kSums == Sums::kRows;  // scales of columns
    if (kHalves == 0) {
      Ring at = ring;
#pragma unroll
      for (int step = 0; step < kSteps; ++step, at.Advance())
        WaitBarrier(AddressOf(&s.full[at.stage]), at.parity);
    }
#pragma unroll
    for (int half = 0; half < kHalves; ++half) {
      float fresh[64];
      Ring at = ring;
#pragma unroll
      for (int step = 0; step < kSteps; ++step, at.Advance()) {
        if (half == 0) WaitBarrier(AddressOf(&s.full[at.stage]), at.parity);
        const uint64_t left = Left(at.stage), right = Right(at.stage) + half * (kRightBytes / 2 >> 4);
        BeginProducts();
#pragma unroll
        for (int i = 0; i < 4; ++i) MultiplyTiles<kFactors>(fresh, left + 2 * i, right + 2 * i, step | i);
        CommitProducts();
      }
      WaitForProducts<0>();
      Settle(fresh);
      if (half == kHalves - 1 && !kInStages) ReleaseNext<kSteps>();
      Promote(half, ring.stage, scales, fresh, sums);
    }
    if (kHalves == 0 || kInStages) {
      __syncwarp();
      ReleaseNext<kSteps>();
    }
  }
  template <int kSteps>
  __device__ __forceinline__ void ReleaseNext() {
#pragma unroll
    for (int i = 0; i < kSteps; ++i, ring.Advance()) Release(ring.stage);
  }

  // sums: the products of a tile's first kHalves halves, in f32 every 128 of k, each 128 with its scales, or
  // where blocks have none every kSplitSteps * 128.
  template <int kHalves>
  __device__ __forceinline__ void MultiplySplit(const Tile& tile, float (&sums)[128]) {
    constexpr bool kScaled = kSums != Sums::kSplit;
    ScaleReader<kSums> reader(p, tile, tile.left_row + Row());
    BlockScales next;  // a step ahead
    if (kScaled && tile.steps > 0) next = reader.Read(p.rows);
    int step = 0;
    if constexpr (!kScaled)
      for (; step + kSplitSteps <= tile.steps; step += kSplitSteps)
        MultiplySteps<kHalves, kSplitSteps>(next, sums);
    for (; step < tile.steps; ++step) {
      const BlockScales scales = next;
      if (kScaled && step + 1 < tile.steps) next = reader.Read(p.rows);
      MultiplySteps<kHalves, 1>(scales, sums);
    }
  }

  __device__ __forceinline__ void Run() {
    const Writer<kSums> writer{args, s, warp, lane};
    Walk<P, kStep, false> walk(p, s);
    Tile tile, next;
    for (bool more = walk.Next(&tile); more; tile = next) {
      float sums[128];
      if (kSums != Sums::kFast || tile.steps == 0) {
#pragma unroll
        for (int i = 0; i < 128; ++i) sums[i] = 0;
      }
      const float scale = writer.ScaleOf(tile);  // on its way while it multiplies
      if constexpr (kSums == Sums::kFast)
        MultiplyFast(tile, sums, [&] { more = walk.Next(&next); });
      else if (const int halves = Halves(tile); halves == 2)
        MultiplySplit<2>(tile, sums);
      else
        halves ? MultiplySplit<1>(tile, sums) : MultiplySplit<0>(tile, sums);
      writer.Write(tile, scale, sums);
      if (kSums != Sums::kFast) more = walk.Next(&next);
    }
    writer.Finish();
  }
};

template <Factors kFactors, Sums kSums, Layout kLayout, typename P>
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
      InitBarrier(AddressOf(&s.items_full[i]), 1);
      InitBarrier(AddressOf(&s.items_empty[i]), (kWarps + 1) * P::kCluster);
    }
    FenceBarrierInit();
  }
  MakeTables<P>(args.p, s);
  SyncCluster();
  if (threadIdx.x >= kConsumers) {
    GiveRegisters<40>();
    constexpr int kStep = Consumer<kFactors, kSums, kLayout, P>::kStep;
    if (threadIdx.x == kConsumers) Produce<kSums, kLayout, P, kStep>(args, s);
  } else {
    TakeRegisters<232>();
    Consumer<kFactors, kSums, kLayout, P>{args, s}.Run();
  }
  SyncCluster();  // no CTA leaves before the others' last arrivals at its barriers
#else
  __trap();  // compiled only for Hopper
#endif
}

template <Factors kFactors, Sums kSums, Layout kLayout = Layout::kAlong, typename P = Plan<>>
Status Launch(cudaStream_t stream, const KernelArgs& args) {
  const auto kernel = te_gemm_grouped<kFactors, kSums, kLayout, P>;
  constexpr int kStep = Consumer<kFactors, kSums, kLayout, P>::kStep;
  static_assert(sizeof(Shared) <= 227 * 1024);
  TE_CUDA(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, sizeof(Shared)));
  int multiprocessors = 0;
  TE_TRY(Multiprocessors(&multiprocessors));
  const int ctas = multiprocessors / P::kCluster * P::kCluster;
  KernelArgs given = args;
  const Problem& p = args.p;
  const int64_t tiles = CeilDiv(p.rows, kTileRows) * CeilDiv(p.columns, kTileColumns);
  if (IsCounted(p.wgrad ? tiles * p.experts : tiles, tiles * CeilDiv(p.k, kStep), ctas))
    TE_CUDA(cudaMemsetAsync(p.counter, 0, sizeof(int), stream));
  else
    given.p.counter = nullptr;
  cudaLaunchAttribute cluster{};
  cluster.id = cudaLaunchAttributeClusterDimension;
  cluster.val.clusterDim = {unsigned(P::kCluster), 1, 1};
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(ctas);
  config.blockDim = dim3(kThreads);
  config.dynamicSmemBytes = sizeof(Shared);
  config.stream = stream;
  config.attrs = &cluster;
  config.numAttrs = 1;
  TE_CUDA(cudaLaunchKernelEx(&config, kernel, given));
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
