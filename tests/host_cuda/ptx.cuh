// In place of csrc/ptx.cuh: the same functions in C++.
#pragma once
#include <cmath>

namespace te {

inline float Exp2(float x) { return std::exp2(x); }
inline float Reciprocal(float x) { return 1.f / x; }
inline float MaxNan(float a, float b) { return a != a || b != b ? NAN : a > b ? a : b; }
inline float MinNan(float a, float b) { return a != a || b != b ? NAN : a < b ? a : b; }

inline host_cuda::Cluster& Here() { return host_cuda::Cluster::Get(); }
inline uint32_t SharedAddress(const void* p) { return Here().Address(p); }
template <typename T>
T LoadFrom(uint32_t address) {
  T v;
  std::memcpy(&v, Here().At(address), sizeof(v));
  return v;
}
inline uint4 LoadShared16(uint32_t address) { return LoadFrom<uint4>(address); }
inline void StoreShared(uint32_t address, float a, float b, float c, float d) {
  const float4 v{a, b, c, d};
  std::memcpy(Here().At(address), &v, sizeof(v));
}
inline void Prefetch16(uint32_t address, const void* p, bool inside) {
  if (inside) Here().Copy16(address, p);
}
inline void StoreGlobal16(void* p, uint32_t a, uint32_t b, uint32_t c, uint32_t d) {
  const uint4 v{a, b, c, d};
  std::memcpy(p, &v, sizeof(v));
}
inline void CommitPrefetch() { Here().CommitCopies(); }
inline void WaitForPrefetch(int pending) { Here().AwaitCopies(pending); }
inline void NamedBarrier(int id, int threads) { Here().SyncNamed(id, threads); }

inline void ClusterArrive() { Here().Arrive(); }
inline void ClusterWait() { Here().AwaitCluster(0); }  // no kernel has a second one
inline void InitMessages(uint32_t barrier) { Here().messages(barrier) = {}; }
inline void ExpectMessages(uint32_t barrier, int bytes) {
  Here().messages(barrier).expected = true;
  Here().messages(barrier).Add(-bytes);
}
inline void WaitForMessages(uint32_t barrier, int round) { Here().AwaitMessages(barrier, round); }
inline void SendMessage(uint32_t address, uint32_t barrier, int cta, float2 v) {
  std::memcpy(Here().At(Here().AddressIn(address, cta)), &v, sizeof(v));
  Here().messages(Here().AddressIn(barrier, cta)).Add(sizeof(v));
}

}  // namespace te
