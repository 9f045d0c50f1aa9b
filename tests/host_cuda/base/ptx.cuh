// Stands for csrc/base/ptx.cuh: the same functions in C++, or only declared where no kernel calls them here.
#pragma once
#include <cmath>

namespace te {

inline float Exp2(float x) { return std::exp2(x); }
inline float Reciprocal(float x) { return 1.f / x; }
inline float MaxNan(float a, float b) { return a != a || b != b ? NAN : a > b ? a : b; }
inline float MinNan(float a, float b) { return a != a || b != b ? NAN : a < b ? a : b; }

inline void LetNextStart() {}
inline void AwaitPrevious() {}

void NamedBarrier(unsigned index, unsigned threads);
uint4 LoadShared16(uint32_t address);
void StoreShared(uint32_t address, float a, float b, float c, float d);
void Prefetch16(uint32_t address, const uint4* p, bool inside);
void PrefetchOrZero16(void* shared, const void* p, bool inside);
void CommitPrefetch();
template <int kPending>
void WaitForPrefetch();
template <bool kTransposed>
void LoadMatrices(uint32_t (&words)[4], const void* row);
template <bool kHalf>
void MultiplyAdd(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1);

}  // namespace te
