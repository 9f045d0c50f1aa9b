// What te_permute* and te_permute*_block read: rows of x by the slots of a buffer, whose groups, the runs of
// rows of one expert, begin at multiples of 128.
#pragma once

#include "base/check.h"
#include "base/fp8.cuh"
#include "experts/gather_order.cuh"

namespace te {

constexpr int64_t kMostRows = (int64_t{1} << 31) - 1;  // of a buffer: their numbers are ints

// addresses: u32 [devices, 2], where an array of each device is, the low word first; each has `rows` rows.
inline Status ExpectAddresses(const char* op, const Tensor& addresses, int64_t rows) {
  if (!Present(addresses)) return {};
  const int64_t devices = addresses.rank > 0 ? addresses.sizes[0] : 0;
  TE_CHECK(devices * rows <= kMostRows, "%s: %ld rows of %ld devices are 2^31 or more.", op, long(rows),
           long(devices));
  return Expect(op, {{"addresses", addresses, U32, {devices, 2}}});
}

// Rows of x, each with a weight; zeros where a row of the buffer pads a group.
template <typename T>
struct GatheredRows {
  struct Raw {
    Vec<T, 8> x;
    float weight;
  };
  const T* x;            // [tokens, n]
  const int* slots;      // [m]: token * topk + choice, below 0 where a row pads
  const float* weights;  // [tokens, topk] or nullptr
  const int* end;        // of the last group
  int64_t n;
  Divisor topk;
  GatherOrder order;

  // The rows of a call that is as ExpectGather says, which has a row or more, in tiles of rows x columns.
  static GatheredRows Of(Arg x, Arg slots, Arg offsets, Arg weights, int64_t topk, int rows, int columns) {
    const int* end = Data<int>(offsets) + Axes(offsets).last() - 1;
    const int64_t n = Axes(x).last(), tokens = Axes(x).Without(1).count();
    const GatherOrder order(tokens, columns * int64_t{sizeof(T)}, CeilDiv(slots.count(), rows),
                            CeilDiv(n, columns), topk);
    return {Data<T>(x), Data<int>(slots), Data<float>(weights), end, n, Divisor(unsigned(topk)), order};
  }

  // Whether no group reaches row `row0` or one behind it: nobody reads what is there.
  __device__ __forceinline__ bool Skips(int64_t row0) const { return row0 >= *end; }

  // The slots of 4 rows of the buffer, of which `rows` are inside; row is a multiple of 4.
  __device__ __forceinline__ void ReadSlots(int64_t row, int rows, int* out) const {
    if (rows >= 4) {
      const int4 four = *reinterpret_cast<const int4*>(slots + row);
      out[0] = four.x, out[1] = four.y, out[2] = four.z, out[3] = four.w;
    } else {
#pragma unroll
      for (int i = 0; i < 4; ++i) out[i] = i < rows ? slots[row + i] : -1;
    }
  }

  // 8 columns of the row of a slot, from `column` on, of which `columns` are inside.
  template <bool kVectors>
  __device__ __forceinline__ Raw LoadSlot(int slot, int64_t column, int columns) const {
    if (slot < 0 || columns <= 0) return {};
    return {LoadRow<kVectors, true>(x + topk.Of(slot).quotient * n + column, columns),
            weights ? weights[slot] : 1.f};
  }
};

// Rows of x in E4M3, times their blocks' scales: of this device, or of all whose `peers` are given.
struct GatheredFp8 : GatheredRows<__nv_fp8_e4m3> {
  const float* scales;    // [ceil(n / 128), tokens] or nullptr
  const uint64_t* peers;  // [devices], where x of each device is, or nullptr: all tokens are in this x
  Divisor tokens;         // of x

  static GatheredFp8 Of(Arg x, Arg scales, Arg slots, Arg offsets, Arg weights, Arg addresses, int64_t topk,
                        int rows, int columns) {
    const Divisor tokens(unsigned(std::max<int64_t>(Axes(x).Without(1).count(), 1)));
    return {GatheredRows::Of(x, slots, offsets, weights, topk, rows, columns), Data<float>(scales),
            Data<uint64_t>(addresses), tokens};
  }

  template <bool kVectors>
  __device__ __forceinline__ Raw LoadSlot(int slot, int64_t column, int columns) const {
    if (slot < 0 || columns <= 0) return {};
    const Split at = tokens.Of(topk.Of(slot).quotient);  // the device, and its token
    const auto* own = peers ? reinterpret_cast<const __nv_fp8_e4m3*>(peers[at.quotient]) : x;
    float weight = weights ? weights[slot] : 1.f;
    if (scales) weight *= scales[column / 128 * tokens.divisor() + at.rest];
    return {LoadRow<kVectors, true>(own + at.rest * n + column, columns), weight};
  }
};

inline Status ExpectGather(const char* op, Arg x, Arg slots, Arg offsets, Arg weights, int64_t topk,
                           Types types = kFloats) {
  TE_TRY(ExpectRank(op, "x", x, 1));
  TE_TRY(ExpectRank(op, "slots", slots, 1, true));
  TE_TRY(ExpectRank(op, "offsets", offsets, 1, true));
  TE_CHECK(topk >= 1 && topk <= kMostRows && slots.count() <= kMostRows && Present(offsets),
           "%s: topk is %ld, slots%s, offsets%s; pass a positive topk, less than 2^31 slots and an offset or "
           "more.",
           op, long(topk), slots.shape().c_str(), offsets.shape().c_str());
  TE_CHECK(Aligned(Data<int>(slots)), "%s: slots is not aligned to 16 bytes", op);
  return Expect(op, {{"x", x, types, Axes(x)},
                     {"slots", slots, S32, Axes(slots)},
                     {"offsets", offsets, S32, Axes(offsets)},
                     {"weights", weights, F32, Axes(x).Without(1) + Axes{topk}, kOptional}});
}

inline Status ExpectGatherFp8(const char* op, Arg x, Arg scales, Arg slots, Arg offsets, Arg weights,
                              Arg addresses, int64_t topk) {
  TE_TRY(ExpectGather(op, x, slots, offsets, weights, topk, F8E4M3FN));
  const Axes tokens = Axes(x).Without(1), blocks{CeilDiv(Axes(x).last(), 128)};
  const bool peers = Present(addresses);
  TE_TRY(Expect(op, {{"scales", scales, F32, blocks + tokens, AbsentIf(peers)},
                     {"weights", weights, F32, tokens + Axes{topk}, AbsentIf(peers)}}));
  return ExpectAddresses(op, addresses, tokens.count());
}

}  // namespace te
