// In place of csrc/ptx.cuh: the same functions in C++.
#pragma once
#include <cmath>

namespace te {

inline float Exp2(float x) { return std::exp2(x); }
inline float Reciprocal(float x) { return 1.f / x; }
inline float MaxNan(float a, float b) { return a != a || b != b ? NAN : a > b ? a : b; }
inline float MinNan(float a, float b) { return a != a || b != b ? NAN : a < b ? a : b; }

}  // namespace te
