// Stands for csrc/base/ptx_hopper.cuh: the same functions in C++, for cluster.h.
#pragma once

#include <cuda.h>

namespace te {

enum class Factors { kE4M3, kE4M3E5M2, kE5M2E4M3, kBF16, kF16 };

// What a CUtensorMap stands for: an array by its sizes and strides in bytes, the innermost axis first, whose
// numbers have `width` bytes; in boxes of 128 bytes, `box` times along the axis `across`.
struct HostMap {
  uint8_t* data;
  int64_t sizes[4], strides[4];
  int across, box, width;

  // Matrices [count, rows, inner], in boxes of `box` rows.
  static HostMap Of(void* data, int64_t inner, int64_t rows, int64_t count, int box, int width) {
    const int64_t row = inner * width;
    return {static_cast<uint8_t*>(data), {inner, rows, count, 1}, {width, row, rows * row, 0}, 1, box, width};
  }
  // Numbers that lie one after the other, in boxes of `box` along the axis of rows, the third.
  static HostMap OfSlots(void* data, std::array<int64_t, 4> sizes, int box, int width) {
    HostMap map{static_cast<uint8_t*>(data), {}, {width}, 2, box, width};
    for (int i = 0; i < 4; ++i) {
      map.sizes[i] = sizes[i];
      if (i > 0) map.strides[i] = map.strides[i - 1] * sizes[i - 1];
    }
    return map;
  }
  // Bytes, one layout in squares: [count, rows, 128], a row each 256 bytes and a matrix each `line`, in boxes
  // of `box` matrices.
  static HostMap OfSquares(void* data, int64_t rows, int64_t count, int box, int64_t line) {
    return {static_cast<uint8_t*>(data), {128, rows, count, 1}, {1, 256, line, 0}, 2, box, 1};
  }

  // Byte `at` of the box at a place, rows of 128; nullptr beyond the array.
  uint8_t* At(std::array<int, 4> place, int at) const {
    place[0] += at % 128 / width, place[across] += at / 128;
    uint8_t* byte = data + at % width;
    for (int i = 0; i < 4; ++i) {
      if (place[i] < 0 || place[i] >= sizes[i]) return nullptr;
      byte += place[i] * strides[i];
    }
    return byte;
  }
};

// Of bf16 [outer, mid, near, inner], sizes from the innermost axis on, in boxes of `box` along axis `across`;
// of mid `there` are there, or all.
inline CUtensorMap MapOf(const __nv_bfloat16* data, std::array<int64_t, 4> sizes, int across, int box,
                         int64_t there = 0) {
  HostMap map{const_cast<uint8_t*>(reinterpret_cast<const uint8_t*>(data)), {}, {}, across, box, 2};
  for (int i = 0, stride = 2; i < 4; stride *= sizes[i++]) map.sizes[i] = sizes[i], map.strides[i] = stride;
  if (there) map.sizes[2] = there;
  static_assert(sizeof(map) <= sizeof(CUtensorMap));
  CUtensorMap stands{};
  std::memcpy(&stands, &map, sizeof(map));
  return stands;
}

inline cluster::Barrier& BarrierOf(int cta, uint32_t address) { return cluster::ctas[cta].barriers[address]; }
inline uint8_t* Shared8(int cta, uint32_t address) { return cluster::ctas[cta].shared() + address; }
inline uint32_t Swizzled(uint32_t address) { return address ^ (address >> 7 & 7) << 4; }

inline void InitBarrier(uint32_t barrier, unsigned arrivals) {
  BarrierOf(cluster::self->cta, barrier) = {int(arrivals), int(arrivals)};
}
inline void FenceBarrierInit() {}
inline void WaitBarrier(uint32_t barrier, unsigned parity) {
  cluster::Await([=] { return (BarrierOf(cluster::self->cta, barrier).phases & 1) != parity; });
}
inline void ArriveExpecting(uint32_t barrier, unsigned bytes) {
  cluster::Barrier& mine = BarrierOf(cluster::self->cta, barrier);
  mine.bytes += bytes;
  mine.Arrive();
}
inline void Arrive(uint32_t barrier) { BarrierOf(cluster::self->cta, barrier).Arrive(); }
inline void ArriveAt(uint32_t barrier, unsigned rank) { BarrierOf(rank, barrier).Arrive(); }
inline void StoreAt(uint32_t to, int word, uint32_t barrier, unsigned rank) {
  cluster::copies.push_back([=] {
    std::memcpy(Shared8(rank, to), &word, sizeof(word));
    BarrierOf(rank, barrier).Bring(sizeof(word));
  });
}
inline float4 LoadAt(uint32_t from, unsigned rank) {
  float4 v;
  std::memcpy(&v, Shared8(rank, from), sizeof(v));
  return v;
}
inline unsigned ClusterRank() { return cluster::self->cta; }
inline void SyncCluster() { cluster::Meet(cluster::everyone); }
template <int kRegisters>
void GiveRegisters() {}
template <int kRegisters>
void TakeRegisters() {}

inline int Kept(int x) { return x; }

inline void PrefetchMap(const void*) {}
inline void CopyBoxTo(unsigned ranks, uint32_t to, const void* map, uint32_t barrier, int x, int y, int z,
                      int w = 0) {
  const HostMap m = *static_cast<const HostMap*>(map);
  if (to % 1024) cluster::Fail("a tile is not aligned to 1024 bytes");
  cluster::copies.push_back([=] {
    for (int cta = 0; ranks >> cta; ++cta) {
      if (!(ranks >> cta & 1)) continue;
      for (int at = 0; at < m.box * 128; ++at) {
        const uint8_t* byte = m.At({x, y, z, w}, at);
        *Shared8(cta, Swizzled(to + at)) = byte ? *byte : 0;
      }
      BarrierOf(cta, barrier).Bring(m.box * 128);
    }
  });
}
inline void CopyBox(uint32_t to, const void* map, uint32_t barrier, int x, int y, int z, int w = 0) {
  CopyBoxTo(1u << cluster::self->cta, to, map, barrier, x, y, z, w);
}
inline void CopyBytes(uint32_t to, const void* from, unsigned bytes, uint32_t barrier) {
  if ((to | bytes | reinterpret_cast<uintptr_t>(from)) % 16)
    cluster::Fail("a copy is not aligned to 16 bytes");
  cluster::copies.push_back([=, cta = cluster::self->cta] {
    std::memcpy(Shared8(cta, to), from, bytes);
    BarrierOf(cta, barrier).Bring(bytes);
  });
}

inline void StoreBox(const void* map, uint32_t from, int x, int y, int z, int w = 0) {
  const HostMap m = *static_cast<const HostMap*>(map);
  if (from % 1024) cluster::Fail("a piece is not aligned to 1024 bytes");
  cluster::Thread* const thread = cluster::self;
  for (const auto& t : cluster::threads)
    if (t->cta == thread->cta && t->index / 32 == thread->index / 32 && !t->fenced)
      cluster::Fail("a piece is stored that a lane wrote without a fence behind it");
  ++thread->unread, ++thread->outgoing;
  cluster::copies.push_back([=] {
    std::vector<uint8_t> box(m.box * 128);
    for (int at = 0; at < m.box * 128; ++at) box[at] = *Shared8(thread->cta, Swizzled(from + at));
    --thread->unread;
    cluster::copies.push_back([=] {
      for (int at = 0; at < m.box * 128; ++at)
        if (uint8_t* byte = m.At({x, y, z, w}, at)) *byte = box[at];
      --thread->outgoing;
    });
  });
}
inline void CommitStores() {}
inline void WaitForReads() {
  cluster::Await([] { return !cluster::self->unread; });
}
inline void WaitForStores() {
  cluster::Await([] { return !cluster::self->outgoing; });
}

template <typename T>
T FromShared(uint32_t address) {
  T value;
  std::memcpy(&value, Shared8(cluster::self->cta, address), sizeof(T));
  return value;
}
template <typename T>
void ToShared(uint32_t address, const T& value) {
  std::memcpy(Shared8(cluster::self->cta, address), &value, sizeof(T));
}
inline uint4 LoadShared16(uint32_t address) { return FromShared<uint4>(address); }
inline float2 LoadShared8(uint32_t address) { return FromShared<float2>(address); }
template <bool kTransposed = false>
void StoreMatrices(uint32_t address, uint32_t a, uint32_t b, uint32_t c, uint32_t d) {
  const uint32_t words[] = {a, b, c, d};
  const int lane = threadIdx.x % 32, across = lane / 4, along = lane % 4 * 2;
  cluster::self->fenced = false;
  for (int i = 0; i < 4; ++i)
    for (int side = 0; side < 2; ++side) {
      const int row = kTransposed ? along + side : across, column = kTransposed ? across : along + side;
      const uint16_t number = uint16_t(words[i] >> 16 * side);
      ToShared(cluster::Exchange(address, 8 * i + row) + 2 * column, number);
    }
}
template <bool kTransposed>
void LoadMatrices(uint32_t (&words)[4], const void* row) {
  const uint32_t address = uint32_t(__cvta_generic_to_shared(row));
  const int lane = threadIdx.x % 32, across = lane / 4, along = lane % 4 * 2;
  for (int i = 0; i < 4; ++i)
    for (int side = 0; side < 2; ++side) {
      const uint32_t from = cluster::Exchange(address, 8 * i + (kTransposed ? along + side : across));
      const uint32_t number = FromShared<uint16_t>(from + 2 * (kTransposed ? across : along + side));
      words[i] = side ? words[i] | number << 16 : number;
    }
}

template <bool kHalf>
void MultiplyAdd(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  static_assert(!kHalf);
  struct Words {
    uint32_t a[4], b[2];
  };
  static std::map<std::pair<int, int>, std::array<Words, 32>> of_warps;
  auto& all = of_warps[{cluster::self->cta, cluster::self->index / 32}];
  const int lane = threadIdx.x % 32, row = lane / 4, column = lane % 4 * 2;
  all[lane] = {{a[0], a[1], a[2], a[3]}, {b0, b1}};
  cluster::MeetWarp();
  const auto number = [](uint32_t word, int side) { return __uint_as_float(word >> 16 * side << 16); };
  for (int i = 0; i < 4; ++i)
    for (int k = 0; k < 16; ++k) {
      const Words &left = all[row * 4 + k % 8 / 2], &right = all[(column + i % 2) * 4 + k % 8 / 2];
      d[i] += number(left.a[k / 8 * 2 + i / 2], k % 2) * number(right.b[k / 8], k % 2);
    }
  cluster::MeetWarp();
}

// What a thread fetches is there when it has waited for it, and fenced, as products want it.
inline void PrefetchOrZero16(void* shared, const void* p, bool inside) {
  const uint32_t to = uint32_t(__cvta_generic_to_shared(shared));
  cluster::self->fetches.back().push_back(
      [=] { ToShared(to, inside ? *static_cast<const uint4*>(p) : uint4{}); });
}
inline void CommitPrefetch() { cluster::self->fetches.emplace_back(); }
template <int kPending>
void WaitForPrefetch() {
  auto& groups = cluster::self->fetches;
  for (; int(groups.size()) > kPending + 1; groups.erase(groups.begin()))
    for (const cluster::Action& fetch : groups.front()) cluster::self->stores.push_back(fetch);
}

inline void StoreShared(uint32_t address, float a, float b, float c, float d) {
  const auto store = [=] { ToShared(address, float4{a, b, c, d}); };
  cluster::self->stores.push_back(store);
}
inline void FenceAsync() {
  cluster::self->fenced = true;
  for (const cluster::Action& store : std::exchange(cluster::self->stores, {})) store();
}
inline void NamedBarrier(unsigned index, unsigned threads) {
  cluster::Meeting& meeting = cluster::Mine().named[index];
  meeting.members = int(threads);
  cluster::Meet(meeting);
}

// What the thread does in all batches but the last `pending`.
inline void Multiply(int pending) {
  auto& batches = cluster::self->batches;
  for (; int(batches.size()) > pending; batches.erase(batches.begin()))
    for (const cluster::Action& multiply : batches.front()) multiply();
}
inline void BeginProducts() {}
inline void CommitProducts() {
  cluster::self->batches.push_back(std::exchange(cluster::self->open, {}));
  if (cluster::random() % 2) Multiply(0);
}
template <int kPending>
void WaitForProducts() {
  Multiply(kPending);
  __syncwarp();  // the lanes wait together
}
template <int kCount>
void Settle(float (&)[kCount]) {}

// A number of a factor, of kBF16, kF16 or FP8, where the descriptor of its tile says: with the swizzle of 128
// bytes, along k 8 rows each `stride` bytes; across k 64 rows each `leading` bytes, 8 k each `stride` bytes.
template <typename T, bool kAcross>
float NumberAt(int cta, uint64_t tile, int row, int k) {
  const auto field = [&](int bit) { return uint32_t(tile >> bit & 0x3fff) << 4; };
  const uint32_t first = field(0), leading = field(16), stride = field(32);
  if (tile >> 46 != 1 << 16) cluster::Fail("a descriptor is not of the swizzle of 128 bytes");
  const uint32_t at = kAcross ? row / 64 * leading + k / 8 * stride + k % 8 * 128 + row % 64 * sizeof(T)
                              : row / 8 * stride + row % 8 * 128 + k * sizeof(T);
  T number;
  std::memcpy(&number, Shared8(cta, Swizzled(first + at)), sizeof(T));
  return float(number);
}

template <typename Left, typename Right, bool kLeftAcross, bool kRightAcross, int kCount>
void Multiply(float (&d)[kCount], uint64_t a, uint64_t b, int adds) {
  const int row = threadIdx.x / 32 % 4 * 16 + threadIdx.x % 32 / 4, first = threadIdx.x % 4 * 2;
  cluster::self->open.push_back([=, sums = d, cta = cluster::self->cta] {
    constexpr int kColumns = 32 / sizeof(Left);
    float left[2][kColumns], right[kColumns];
    for (int i = 0; i < 2 * kColumns; ++i)
      left[i / kColumns][i % kColumns] =
          NumberAt<Left, kLeftAcross>(cta, a, row + i / kColumns * 8, i % kColumns);
    for (int j = 0; j < kCount / 2; ++j) {  // of a pair of columns one, in both rows
      for (int i = 0; i < kColumns; ++i)
        right[i] = NumberAt<Right, kRightAcross>(cta, b, j / 2 * 8 + first + j % 2, i);
      for (int lower = 0; lower < 2; ++lower) {
        float sum = 0;
        for (int i = 0; i < kColumns; ++i) sum += left[lower][i] * right[i];
        float& to = sums[j / 2 * 4 + lower * 2 + j % 2];
        to = adds ? to + sum : sum;
      }
    }
  });
}

// The left factor in registers: a row has its numbers in the four lanes of its quarter of a matrix.
template <bool kRightAcross, int kCount>
void MultiplyRows(float (&d)[kCount], const uint32_t (&a)[4], uint64_t b, int adds = 1) {
  const int lane = threadIdx.x % 32, first = lane % 4 * 2;
  std::array<float, 16> left[2];
  for (int word = 0; word < 4; ++word)
    for (int other = 0; other < 4; ++other) {
      const uint32_t two = cluster::Exchange(a[word], lane / 4 * 4 + other);
      for (int side = 0; side < 2; ++side)
        left[word % 2][word / 2 * 8 + other * 2 + side] = __uint_as_float(two >> 16 * side << 16);
    }
  cluster::self->open.push_back([=, sums = d, cta = cluster::self->cta] {
    if (!adds) std::fill_n(sums, kCount, 0.f);
    for (int j = 0; j < kCount / 2; ++j)
      for (int k = 0; k < 16; ++k) {
        const float right = NumberAt<__nv_bfloat16, kRightAcross>(cta, b, j / 2 * 8 + first + j % 2, k);
        for (int lower = 0; lower < 2; ++lower) sums[j / 2 * 4 + lower * 2 + j % 2] += left[lower][k] * right;
      }
  });
}

template <Factors kFactors, bool kLeftAcross = false, bool kRightAcross = false, int kCount>
void MultiplyTiles(float (&d)[kCount], uint64_t a, uint64_t b, int adds) {
  using E4M3 = __nv_fp8_e4m3;
  using E5M2 = __nv_fp8_e5m2;
  const auto multiply = [&]<typename Left, typename Right>() {
    Multiply<Left, Right, kLeftAcross, kRightAcross>(d, a, b, adds);
  };
  if constexpr (kFactors == Factors::kE4M3) multiply.template operator()<E4M3, E4M3>();
  if constexpr (kFactors == Factors::kE4M3E5M2) multiply.template operator()<E4M3, E5M2>();
  if constexpr (kFactors == Factors::kE5M2E4M3) multiply.template operator()<E5M2, E4M3>();
  if constexpr (kFactors == Factors::kBF16) multiply.template operator()<__nv_bfloat16, __nv_bfloat16>();
  if constexpr (kFactors == Factors::kF16) multiply.template operator()<__half, __half>();
}

}  // namespace te
