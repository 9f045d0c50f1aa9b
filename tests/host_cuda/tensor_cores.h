// Asynchronous copies and the tensor cores, for the fibers of host_cuda.h: base/ptx.cuh declares them.
#pragma once

namespace te {

// What a thread fetches is there when it has waited for it, and not before.
struct Fetch {
  void* to;
  const void* from;  // nullptr: zeros
};
inline std::deque<std::vector<Fetch>>& Fetches() {
  static std::vector<std::deque<std::vector<Fetch>>> of_threads(1024, {{}});
  return of_threads[host_cuda::Cta::Get().rank()];
}
inline void PrefetchOrZero16(void* shared, const void* p, bool inside) {
  Fetches().back().push_back({shared, inside ? p : nullptr});
}
inline char* AtShared(uint32_t address) {
  return static_cast<char*>(host_cuda::Cta::Get().shared()) + address;
}
inline void Prefetch16(uint32_t address, const uint4* p, bool inside) {
  if (inside) PrefetchOrZero16(AtShared(address), p, true);
}
inline uint4 LoadShared16(uint32_t address) {
  uint4 v;
  std::memcpy(&v, AtShared(address), 16);
  return v;
}
inline void StoreShared(uint32_t address, float a, float b, float c, float d) {
  const float all[] = {a, b, c, d};
  std::memcpy(AtShared(address), all, 16);
}
inline void CommitPrefetch() { Fetches().emplace_back(); }
template <int kPending>
void WaitForPrefetch() {
  for (auto& groups = Fetches(); groups.size() > kPending + 1; groups.pop_front())
    for (const Fetch& f : groups.front()) f.from ? std::memcpy(f.to, f.from, 16) : std::memset(f.to, 0, 16);
}

template <bool kTransposed>
void LoadMatrices(uint32_t (&words)[4], const void* row) {
  const auto rows = host_cuda::Cta::Get().Gather<const uint16_t*>(static_cast<const uint16_t*>(row));
  const int across = threadIdx.x % 32 / 4, along = threadIdx.x % 4 * 2;
  for (int i = 0; i < 4; ++i) {
    const auto at = [&](int r, int c) -> uint32_t { return rows[8 * i + r][c]; };
    words[i] = kTransposed ? at(along, across) | at(along + 1, across) << 16
                           : at(across, along) | at(across, along + 1) << 16;
  }
}

template <bool kHalf>
void MultiplyAdd(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  struct Words {
    uint32_t a[4], b[2];
  };
  const auto all = host_cuda::Cta::Get().Gather<Words>({{a[0], a[1], a[2], a[3]}, {b0, b1}});
  const auto number = [](uint32_t word, int i) {
    const uint16_t bits = uint16_t(word >> 16 * i);
    return kHalf ? float(host_cuda::Bits<__half>(bits)) : float(host_cuda::Bits<__nv_bfloat16>(bits));
  };
  const int row = threadIdx.x % 32 / 4, column = threadIdx.x % 4 * 2;
  for (int i = 0; i < 4; ++i)
    for (int k = 0; k < 16; ++k) {
      const Words& left = all[row * 4 + k % 8 / 2];
      const Words& right = all[(column + i % 2) * 4 + k % 8 / 2];
      d[i] += number(left.a[k / 8 * 2 + i / 2], k % 2) * number(right.b[k / 8], k % 2);
    }
}

}  // namespace te
