// Tiles in shared memory as Hopper's copies bring them and its products read them: boxes of rows of 128
// bytes, with the swizzle of 128 bytes from a multiple of 1024 on.
#pragma once

#include "base/ptx_hopper.cuh"

namespace te {

constexpr unsigned kRowBytes = 128;
constexpr unsigned kBoxBytes = 64 * kRowBytes;  // of 64 rows

__device__ __forceinline__ uint32_t AddressOf(const void* shared) {
  return uint32_t(__cvta_generic_to_shared(shared));
}

// Where 16 bytes of a row lie in a box: a column of them, over the rows, lies in all banks.
__device__ __forceinline__ uint32_t InBox(int row, int piece) { return row * 128 + ((piece ^ row % 8) << 4); }

// Where products find a tile, or what of it begins at some k. Along k it has rows of 128 bytes of k. Across k
// it has boxes of 64 rows, of which a row is one k. 8 rows are 1024 bytes in both.
template <bool kAcross>
__device__ __forceinline__ uint64_t TileDescriptor(uint32_t address) {
  constexpr uint64_t kSwizzled = 1, kEightRows = 1024, kNextBox = kAcross ? kBoxBytes : 0;
  return kSwizzled << 62 | kEightRows >> 4 << 32 | kNextBox >> 4 << 16 | (address & 0x3ffff) >> 4;
}
// From the descriptor of some k to the descriptor of the next 32 bytes of k, or of the next 16 rows across
// it.
template <bool kAcross>
constexpr uint64_t kNextProduct = (kAcross ? 16 * kRowBytes : 32) >> 4;

}  // namespace te
