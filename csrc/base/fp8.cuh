// Device helpers for rows of numbers: vector loads and stores, the saturating cast to FP8, byte transposes.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>

#include <cstring>
#include <type_traits>

#include "base/check.h"

namespace te {

// N neighbours of a row, packed in words: arrays of 16-bit elements the compiler takes apart, one register
// each, as soon as they are loaded, and so waits for a prefetch that is not needed yet. From 16 bytes on
// every access is one of 16 bytes.
template <typename T, int N>
struct alignas(N * sizeof(T) < 16 ? N * sizeof(T) : 16) Vec {
  using Word = std::conditional_t<N * sizeof(T) % 4 == 0, uint32_t, uint16_t>;
  static constexpr int kPerWord = sizeof(Word) / sizeof(T);
  Word words[N / kPerWord];

  __device__ __forceinline__ float operator[](int i) const {
    const uint32_t word = words[i / kPerWord] >> (kPerWord == 2 && i % 2 ? 16 : 0);
    if constexpr (std::is_same_v<T, float>) return __uint_as_float(word);
    if constexpr (std::is_same_v<T, __nv_bfloat16>) return __uint_as_float(word << 16);
    if constexpr (std::is_same_v<T, __half>) return __half2float(__ushort_as_half(uint16_t(word)));
    if constexpr (std::is_same_v<T, __nv_fp8_e4m3>) {
      const auto byte = __nv_fp8_storage_t(words[i / kPerWord] >> i % kPerWord * 8);
      return __half2float(__nv_cvt_fp8_to_halfraw(byte, __NV_E4M3));
    }
  }
  __device__ __forceinline__ void Set(int i, T value) {  // of zeros
    if constexpr (sizeof(T) == 4)
      words[i] = __builtin_bit_cast(uint32_t, value);
    else if constexpr (sizeof(T) == 1)
      words[i / kPerWord] |= Word(__builtin_bit_cast(uint8_t, value)) << i % kPerWord * 8;
    else
      words[i / kPerWord] |= Word(__builtin_bit_cast(uint16_t, value)) << i % kPerWord * 16;
  }
};

template <int N, typename T>
__device__ __forceinline__ Vec<T, N> Load(const T* p) {
  return *reinterpret_cast<const Vec<T, N>*>(p);
}

// Loads N neighbours that are read once: they are evicted first, so that they do not push out of L2 what the
// next kernel wants.
template <int N, typename T>
__device__ __forceinline__ Vec<T, N> LoadOnce(const T* p) {
  if constexpr (N * sizeof(T) >= 16) {
    static_assert(N * sizeof(T) % 16 == 0);
    struct alignas(16) {
      uint4 words[N * sizeof(T) / 16];
    } raw;
#pragma unroll
    for (size_t i = 0; i < N * sizeof(T) / 16; ++i)
      raw.words[i] = __ldcs(reinterpret_cast<const uint4*>(p) + i);
    return __builtin_bit_cast(Vec<T, N>, raw);
  } else {
    return Load<N>(p);
  }
}

// 8 neighbours of a row, of which `columns` are inside; zeros outside. kVectors: the 8 are inside or outside
// together. kAgain: they will be read again, and stay in L2.
template <bool kVectors, bool kAgain = false, typename T>
__device__ __forceinline__ Vec<T, 8> LoadRow(const T* p, int columns) {
  Vec<T, 8> out{};
  if constexpr (kVectors) {
    if (columns > 0) out = kAgain ? Load<8>(p) : LoadOnce<8>(p);
  } else {
#pragma unroll
    for (int i = 0; i < 8; ++i)
      if (i < columns) out.Set(i, p[i]);
  }
  return out;
}

template <typename T, int N>
__device__ __forceinline__ void Store(T* p, const Vec<T, N>& v) {
  *reinterpret_cast<Vec<T, N>*>(p) = v;
}

// f32 -> T, once rounded.
template <typename T, int N>
__device__ __forceinline__ Vec<T, N> Round(const float (&f)[N]) {
  Vec<T, N> out{};
#pragma unroll
  for (int i = 0; i < N; i += Vec<T, N>::kPerWord) {
    if constexpr (Vec<T, N>::kPerWord == 1) {
      out.Set(i, static_cast<T>(f[i]));
    } else {  // two in one instruction
      const auto pair = [](float low, float high) {
        if constexpr (std::is_same_v<T, __half>)
          return __floats2half2_rn(low, high);
        else
          return __floats2bfloat162_rn(low, high);
      }(f[i], f[i + 1]);
      memcpy(&out.words[i / 2], &pair, sizeof(pair));
    }
  }
  return out;
}

template <typename Q>
constexpr __nv_fp8_interpretation_t kInterpretation = __NV_E4M3;
template <>
inline constexpr __nv_fp8_interpretation_t kInterpretation<__nv_fp8_e5m2> = __NV_E5M2;

// Four f32 -> four FP8 in a word, the first in the lowest byte. E4M3 has no inf, so values beyond the largest
// finite one become it, inf too; NaN stays NaN (https://arxiv.org/abs/2209.05433, section 3.1).
template <typename Q>
__device__ __forceinline__ uint32_t Saturate4(float a, float b, float c, float d) {
  const uint32_t low = __nv_cvt_float2_to_fp8x2(make_float2(a, b), __NV_SATFINITE, kInterpretation<Q>);
  const uint32_t high = __nv_cvt_float2_to_fp8x2(make_float2(c, d), __NV_SATFINITE, kInterpretation<Q>);
  return low | high << 16;
}

template <typename Q>
__device__ __forceinline__ uint8_t Saturate(float f) {
  return __nv_cvt_float_to_fp8(f, __NV_SATFINITE, kInterpretation<Q>);
}

// Eight f32 -> eight FP8 in two words.
template <typename Q>
__device__ __forceinline__ void Quantize8(const float (&f)[8], uint32_t& low, uint32_t& high) {
  low = Saturate4<Q>(f[0], f[1], f[2], f[3]), high = Saturate4<Q>(f[4], f[5], f[6], f[7]);
}
// The type told apart at run time, not by a template: half as many kernels to compile.
__device__ __forceinline__ void Quantize8(const float (&f)[8], bool e5m2, uint32_t& low, uint32_t& high) {
  if (e5m2)
    Quantize8<__nv_fp8_e5m2>(f, low, high);
  else
    Quantize8<__nv_fp8_e4m3>(f, low, high);
}

// Whether the FP8 results of a call are E5M2; E4M3 where neither is wanted.
inline bool IsE5M2(const Tensor& data, const Tensor& data_t) {
  return (Present(data) ? data : data_t).type == F8E5M2;
}

// Runs `fn.operator()<T>()` with the CUDA type of `type`: float, __nv_bfloat16 or __half.
template <typename Fn>
Status DispatchFloat(Type type, Fn&& fn) {
  if (type == F32) return fn.template operator()<float>();
  if (type == BF16) return fn.template operator()<__nv_bfloat16>();
  if (type == F16) return fn.template operator()<__half>();
  return {Status::kInvalidArgument, "expected f32, bf16 or f16, got " + Name(type)};
}

// 4 x 4 bytes: byte j of word i <-> byte i of word j.
__device__ __forceinline__ void Transpose4x4(uint32_t& a, uint32_t& b, uint32_t& c, uint32_t& d) {
  const uint32_t ab_low = __byte_perm(a, b, 0x5140),
                 ab_high = __byte_perm(a, b, 0x7362);  // a0 b0 a1 b1, a2 b2 a3 b3
  const uint32_t cd_low = __byte_perm(c, d, 0x5140), cd_high = __byte_perm(c, d, 0x7362);
  a = __byte_perm(ab_low, cd_low, 0x5410), b = __byte_perm(ab_low, cd_low, 0x7632);
  c = __byte_perm(ab_high, cd_high, 0x5410), d = __byte_perm(ab_high, cd_high, 0x7632);
}

}  // namespace te
