// The arrays of a call as launchers take them, whoever calls: a pointer, a type and a shape.
#pragma once

#include <algorithm>
#include <cstdint>
#include <initializer_list>
#include <string>
#include <utility>
#include <vector>

#include "base/status.h"

namespace te {

// The element types that launchers take. The numbers are XLA's; a value that is not listed is a type that no
// launcher takes.
enum class Type : int {
  S32 = 4,
  U8 = 6,
  U32 = 8,
  F16 = 10,
  F32 = 11,
  BF16 = 16,
  F8E5M2 = 19,
  F8E4M3FN = 20,
};
using enum Type;

inline std::string Name(Type type) {
  constexpr std::pair<Type, const char*> kNames[] = {{F32, "f32"},           {BF16, "bf16"},     {F16, "f16"},
                                                     {F8E4M3FN, "f8e4m3fn"}, {F8E5M2, "f8e5m2"}, {U8, "u8"},
                                                     {S32, "i32"},           {U32, "u32"}};
  for (const auto& [listed, name] : kNames)
    if (listed == type) return name;
  return "type " + std::to_string(int(type));
}

// Bytes of an element of a listed type.
constexpr int64_t Width(Type type) {
  return type == F32 || type == S32 || type == U32 ? 4 : type == F16 || type == BF16 ? 2 : 1;
}

// An array in device memory, row-major. An optional array that is absent has no elements, and any type and
// rank.
struct Tensor {
  void* data;
  Type type;
  const int64_t* sizes;  // of the axes; they outlive the call
  int64_t rank;

  int64_t count() const {
    int64_t product = 1;
    for (int64_t i = 0; i < rank; ++i) product *= sizes[i];
    return product;
  }
  int64_t bytes() const { return count() * Width(type); }
  std::string shape() const {  // "[4, 2048, 4096]", for error messages
    std::string text = "[";
    for (int64_t i = 0; i < rank; ++i) text += (i > 0 ? ", " : "") + std::to_string(sizes[i]);
    return text + "]";
  }
};

// The operands and results of a launcher: handler.h tells them apart by these types.
struct Arg : Tensor {};
struct Ret : Tensor {};
using Rets = std::vector<Ret>;  // all results behind those before it

inline constexpr int64_t kNoElements = 0;
inline constexpr Tensor kNone{nullptr, F32, &kNoElements, 1};  // where a launcher has no such array

inline bool Present(const Tensor& a) { return a.count() != 0; }

// The pointer as T, nullptr where the array is absent.
template <typename T>
T* Data(const Tensor& a) {
  return Present(a) ? static_cast<T*>(a.data) : nullptr;
}

// Does `p` allow 16-byte accesses? (nullptr does.)
inline bool Aligned(const void* p) { return reinterpret_cast<uintptr_t>(p) % 16 == 0; }

// Fills arrays with a byte.
inline Status Fill(cudaStream_t stream, int byte, std::initializer_list<Tensor> arrays) {
  for (const Tensor& array : arrays)
    if (Present(array)) TE_CUDA(cudaMemsetAsync(array.data, byte, array.bytes(), stream));
  return {};
}
inline Status Zero(cudaStream_t stream, std::initializer_list<Tensor> arrays) {
  return Fill(stream, 0, arrays);
}

// The stage of a launcher that first plans its work: kInitialize, which runs before kExecute and is never
// captured into a CUDA graph, makes the plan and launches nothing.
enum class Stage { kInitialize, kExecute };

}  // namespace te
