// From the sums of a tile to the result of a grouped product: scales, bias, c, and zeros where no token is.
#pragma once

#include "fp8.cuh"
#include "gemm_grouped_tiles.cuh"
#include "ptx.cuh"

namespace te::grouped {

// Writes a warp's 16 rows of tiles. sums: of a thread, as MultiplyTiles has them.
struct Writer {
  const Problem& p;
  Shared& s;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;

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
    if (p.result == F32 || p.c)
      WriteWide(tile, sums);
    else
      Write16(tile, sums);
  }

 private:
  // sums = sums * scale + bias.
  __device__ __forceinline__ void AddBias(const Tile& tile, float scale, float (&sums)[128]) const {
#pragma unroll
    for (int j = 0; j < 32; ++j) {
      const int column = tile.right_row + 8 * j + lane % 4 * 2;
      float2 bias = {0, 0};
      if (column < p.columns) bias = LoadPair(p.bias, int64_t{tile.expert} * p.columns + column);
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

  // Where 16 bytes of a row of the warp's piece lie: a column of them, over the rows, lies in all banks.
  __device__ __forceinline__ uint32_t InPiece(int row, int chunk) const {
    return AddressOf(s.pieces[warp]) + row * 128 + ((chunk ^ row % 8) << 4);
  }

  // Results of 16 bits, 64 columns at a time.
  __device__ __forceinline__ void Write16(const Tile& tile, const float (&sums)[128]) const {
    const Place place = PlaceOf(p, s, tile);
    const int first = warp * 16 + lane / 8;
#pragma unroll
    for (int piece = 0; piece < 4; ++piece) {
#pragma unroll
      for (int j = 0; j < 8; j += 2) {
        const float* v = sums + 4 * (piece * 8 + j);
        StoreMatrices(InPiece(lane % 16, j + lane / 16), Pack(v[0], v[1]), Pack(v[2], v[3]), Pack(v[4], v[5]),
                      Pack(v[6], v[7]));
      }
      __syncwarp();
      const int column = tile.right_row + piece * 64 + lane % 8 * 8;
      uint4* out =
          reinterpret_cast<uint4*>(static_cast<uint16_t*>(p.out) + (place.row + first) * p.columns + column);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const uint4 words = LoadShared16(InPiece(lane / 8 + 4 * i, lane % 8));
        const bool is_token = first + 4 * i < place.tokens;
        if (first + 4 * i < place.rows && column < p.columns)
          out[int64_t{i} * (p.columns / 2)] = is_token ? words : uint4{};  // 4 rows below are 4 * columns / 8
      }
      __syncwarp();
    }
  }

  // f32 results, and those to which c is added in f32, 32 columns at a time.
  __device__ __forceinline__ void WriteWide(const Tile& tile, const float (&sums)[128]) const {
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
        const float* v = sums + 4 * (piece * 4 + j);
        StoreShared(InPiece(lane / 4, 2 * j + lane % 4 / 2) + lane % 2 * 8, v[0], v[1]);
        StoreShared(InPiece(lane / 4 + 8, 2 * j + lane % 4 / 2) + lane % 2 * 8, v[2], v[3]);
      }
      __syncwarp();
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float4 v = __builtin_bit_cast(float4, LoadShared16(InPiece(lane / 8 + 4 * i, lane % 8)));
        const bool is_token = warp * 16 + lane / 8 + 4 * i < place.tokens;
        const float4 sum = {v.x + c[i][0].x, v.y + c[i][0].y, v.z + c[i][1].x, v.w + c[i][1].y};
        if (IsInside(place, i, column)) Store4(At(place, i, column), is_token ? sum : float4{});
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

}  // namespace te::grouped
