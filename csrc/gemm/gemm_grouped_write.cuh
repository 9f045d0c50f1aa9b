// From the sums of a tile to the result of a grouped product: scales, bias, c, and zeros where no token is.
#pragma once

#include "base/fp8.cuh"
#include "base/ptx.cuh"
#include "gemm/gemm_grouped_tiles.cuh"

namespace te::grouped {

// Writes a warp's 16 rows of tiles. sums: of a thread, as MultiplyTiles has them.
template <Sums kSums>
struct Writer {
  const KernelArgs& args;
  Shared& s;
  const int warp, lane;
  const Problem& p = args.p;

  // What the sums of a tile are multiplied by.
  __device__ __forceinline__ float ScaleOf(const Tile& tile) const {
    if (!p.left_inv) return 1.f;
    return p.left_inv[p.left_each ? tile.expert : 0] * p.right_inv[p.right_each ? tile.expert : 0];
  }

  __device__ __forceinline__ void Write(const Tile& tile, float scale, float (&sums)[128]) const {
    if (p.bias)
      AddBias(tile, scale, sums);
    else if (p.left_inv)
#pragma unroll
      for (int i = 0; i < 128; ++i) sums[i] *= scale;
    if (p.c) AddC(tile, sums);
    if (p.result == F32)
      WriteWide(tile, sums);
    else
      Write16(tile, sums);
  }

  // Behind the last tile: until all is written.
  __device__ __forceinline__ void Finish() const {
    if (lane == 0) WaitForStores();
  }

 private:
  // sums = sums * scale + bias.
  __device__ __forceinline__ void AddBias(const Tile& tile, float scale, float (&sums)[128]) const {
    const Half halves[] = {HalfOf<kSums>(p, tile, 0), HalfOf<kSums>(p, tile, 1)};
#pragma unroll
    for (int j = 0; j < 32; ++j) {
      const int column = halves[j / 16].column + j % 16 * 8 + lane % 4 * 2;
      float2 bias = {0, 0};
      if (column < halves[j / 16].end) bias = LoadPair(p.bias, int64_t{tile.expert} * p.columns + column);
#pragma unroll
      for (int i = 0; i < 4; ++i) sums[4 * j + i] = sums[4 * j + i] * scale + (i % 2 ? bias.y : bias.x);
    }
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

  // Where 16 bytes of a row of the warp's piece lie.
  __device__ __forceinline__ uint32_t InPiece(int row, int chunk) const {
    return AddressOf(s.pieces[warp]) + InBox(row, chunk);
  }

  // Results of 16 bits, 64 columns at a time. Rows that all are tokens' are stored while the warp goes on:
  // that makes wgrad of experts of few tokens, which writes more than it reads, some 2 to 5 % faster on an
  // H100.
  __device__ __forceinline__ void Write16(const Tile& tile, const float (&sums)[128]) const {
    const Place place = PlaceOf(p, s, tile);
    const bool whole = (warp + 1) * kPieceRows <= place.tokens;
#pragma unroll
    for (int piece = 0; piece < 4; ++piece) {
      if (lane == 0) WaitForReads();  // of the piece before
      __syncwarp();
#pragma unroll
      for (int j = 0; j < 8; j += 2) {
        const float* v = sums + 4 * (piece * 8 + j);
        StoreMatrices(InPiece(lane % 16, j + lane / 16), Pack(v[0], v[1]), Pack(v[2], v[3]), Pack(v[4], v[5]),
                      Pack(v[6], v[7]));
      }
      if (whole)
        StorePiece(tile, piece);
      else
        WritePiece(tile, place, piece);
    }
  }

  __device__ __forceinline__ void StorePiece(const Tile& tile, int piece) const {
    FenceAsync();
    __syncwarp();
    if (lane > 0) return;
    const int row = tile.left_row + warp * kPieceRows;
    const Half half = HalfOf<kSums>(p, tile, piece / 2);
    const int column = half.row + piece % 2 * 64;  // of its slot
    if constexpr (kSums == Sums::kSquares)
      StoreBox(&args.out, AddressOf(s.pieces[warp]), column, half.slot, row);
    else
      StoreBox(&args.out, AddressOf(s.pieces[warp]), column, row, p.wgrad ? tile.expert : 0);
    CommitStores();
  }

  // The rows of a piece that the result has, with zeros in those that are no tokens'.
  __device__ __forceinline__ void WritePiece(const Tile& tile, const Place& place, int piece) const {
    __syncwarp();
    const Half half = HalfOf<kSums>(p, tile, piece / 2);
    const int first = warp * kPieceRows + lane / 8, column = half.column + piece % 2 * 64 + lane % 8 * 8;
    uint4* out =
        reinterpret_cast<uint4*>(static_cast<uint16_t*>(p.out) + (place.row + first) * p.columns + column);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const uint4 words = LoadShared16(InPiece(lane / 8 + 4 * i, lane % 8));
      const bool is_token = first + 4 * i < place.tokens;
      if (first + 4 * i < place.rows && column < half.end)
        out[int64_t{i} * (p.columns / 2)] = is_token ? words : uint4{};  // 4 rows below are 4 * columns / 8
    }
  }

  // f32 results, from the registers: 32 bytes of 8 rows at a time. On an H200 a kernel of only such stores
  // reaches 3.05 TB/s, and one of whole rows, by way of shared memory, 4.36. Next to products these stores
  // are faster: products wait for the reads from L2, which stores push back, and the detour takes shared
  // memory from the stages.
  __device__ __forceinline__ void WriteWide(const Tile& tile, const float (&sums)[128]) const {
    VisitPairs(tile, [&](const Place& place, int row, int64_t at, int i) {
      const bool is_token = row < place.tokens;
      *reinterpret_cast<float2*>(static_cast<float*>(p.out) + at) =
          is_token ? make_float2(sums[i], sums[i + 1]) : float2{};
    });
  }

  __device__ __forceinline__ void AddC(const Tile& tile, float (&sums)[128]) const {
    VisitPairs(tile, [&](const Place&, int, int64_t at, int i) {
      const float2 c = LoadPair(p.c, at);
      sums[i] += c.x, sums[i + 1] += c.y;
    });
  }

  // Calls visit(place, row of the tile, where in the result, i) for each pair of neighbours sums[i], sums[i +
  // 1] that the result has.
  template <typename F>
  __device__ __forceinline__ void VisitPairs(const Tile& tile, F visit) const {
    const Place place = PlaceOf(p, s, tile);
    const Half halves[] = {HalfOf<kSums>(p, tile, 0), HalfOf<kSums>(p, tile, 1)};
#pragma unroll
    for (int j = 0; j < 32; ++j) {
      const int column = halves[j / 16].column + j % 16 * 8 + lane % 4 * 2;
#pragma unroll
      for (int lower = 0; lower < 2; ++lower) {
        const int row = warp * 16 + lane / 4 + 8 * lower;
        if (row < place.rows && column < halves[j / 16].end)
          visit(place, row, (place.row + row) * p.columns + column, 4 * j + 2 * lower);
      }
    }
  }
};

}  // namespace te::grouped
