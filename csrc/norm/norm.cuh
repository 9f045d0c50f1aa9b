// What the norm kernels share: gamma and beta of any type, and the arguments of the forward ones.
#pragma once

#include <atomic>
#include <cfloat>

#include "base/fp8.cuh"
#include "base/partials.h"
#include "quantize/tile.cuh"

namespace te {

// The current device.
struct Gpu {
  int index, sms, shared_bytes;  // shared memory of a CTA at most
};

inline Status CurrentGpu(Gpu* out) {
  TE_CUDA(cudaGetDevice(&out->index));
  TE_CUDA(cudaDeviceGetAttribute(&out->sms, cudaDevAttrMultiProcessorCount, out->index));
  TE_CUDA(cudaDeviceGetAttribute(&out->shared_bytes, cudaDevAttrMaxSharedMemoryPerBlockOptin, out->index));
  return {};
}

constexpr int kStaticBytes = 3072;  // of shared memory: no kernel has more next to dynamic memory

// Lets kKernel have all the shared memory of a CTA. Asks CUDA once per kernel and device; threads that race
// do the same.
template <auto kKernel>
Status Prepare(const Gpu& gpu) {
  static std::atomic<bool> known[64];
  const bool keep = gpu.index < 64;
  if (keep && known[gpu.index].load(std::memory_order_relaxed)) return {};
  TE_CUDA(cudaFuncSetAttribute(kKernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                               gpu.shared_bytes - kStaticBytes));
  if (keep) known[gpu.index].store(true, std::memory_order_relaxed);
  return {};
}

__device__ __forceinline__ uint32_t SharedAddress(const void* p) { return __cvta_generic_to_shared(p); }

template <typename T, int N>
__device__ __forceinline__ Vec<T, N> LoadShared(uint32_t address) {
  Vec<T, N> out;
#pragma unroll
  for (int i = 0; i < int(N * sizeof(T) / 16); ++i) {
    const uint4 v = LoadShared16(address + 16 * i);
    out.words[4 * i] = v.x, out.words[4 * i + 1] = v.y, out.words[4 * i + 2] = v.z,
                  out.words[4 * i + 3] = v.w;
  }
  return out;
}

// 8 neighbours of a row, if `inside`, on their way to shared memory until WaitForPrefetch.
template <typename T>
__device__ __forceinline__ void Prefetch8(uint32_t address, const T* p, bool inside) {
#pragma unroll
  for (int i = 0; i < int(sizeof(T) / 2); ++i)
    Prefetch16(address + 16 * i, reinterpret_cast<const uint4*>(p) + i, inside);
}

// All but the last `pending` (0 .. 3) committed groups of the thread have arrived.
__device__ __forceinline__ void WaitForPrefetch(int pending) {
  switch (pending) {
    case 0:
      return WaitForPrefetch<0>();
    case 1:
      return WaitForPrefetch<1>();
    case 2:
      return WaitForPrefetch<2>();
    default:
      WaitForPrefetch<3>();
  }
}

// gamma or beta [h], of its own type. data is nullptr where it is absent.
struct Weights {
  const char* data;
  int bytes;  // of an element
  bool half;  // f16, not bf16
};

inline Weights WeightsOf(const Tensor& a) { return {Data<char>(a), a.type == F32 ? 4 : 2, a.type == F16}; }

// N neighbours from column c on, in f32. All threads take the same branch.
template <int N>
__device__ __forceinline__ void LoadWeights(const Weights& w, int64_t c, float (&out)[N]) {
  const char* p = w.data + c * w.bytes;
  const auto load = [&]<typename T>(const T* p) {
    const Vec<T, N> v = Load<N>(p);
#pragma unroll
    for (int i = 0; i < N; ++i) out[i] = v[i];
  };
  if (w.bytes == 4)
    load(reinterpret_cast<const float*>(p));
  else if (w.half)
    load(reinterpret_cast<const __half*>(p));
  else
    load(reinterpret_cast<const __nv_bfloat16*>(p));
}

// gamma, +1 where it is stored zero-centered.
template <int N>
__device__ __forceinline__ void LoadGamma(const Weights& gamma, bool zero_centered, int64_t c,
                                          float (&out)[N]) {
  LoadWeights(gamma, c, out);
  if (!zero_centered) return;
#pragma unroll
  for (int i = 0; i < N; ++i) out[i] += 1.f;
}

struct NormFwdArgs {
  const void* x;            // [rows, h]
  Weights gamma, beta;      // [h]
  const float* scale;       // [] or nullptr
  void* y;                  // [rows, h] of x's type, or nullptr
  uint8_t* data;            // [rows, h] or nullptr
  uint8_t* data_t;          // [h, rows] or nullptr
  const float* known_mean;  // [rows], nullptr for RMSNorm; read where known_rstd is there
  const float* known_rstd;  // [rows], or nullptr: the statistics are to be computed
  float* mean;              // [rows] or nullptr
  float* rstd;              // [rows] or nullptr
  float* amax_partials;     // [AmaxPlaces], any maxima of some of |y| whose maximum is amax
  int64_t rows, h;
  float eps;
  bool rms, zero_centered;

  // Whether 8 neighbours of a row are one access.
  bool vectors() const {
    return h % 8 == 0 && Aligned(x) && Aligned(y) && Aligned(data) && Aligned(gamma.data) &&
           Aligned(beta.data);
  }
};

// (variance + eps)^-1/2, where mean_square(factor) is the mean of (factor (x - mean))^2. Numbers from 2^64 on
// have no square in f32: a second round takes them times 2^-96, so that a sum of squares fits too, and eps
// counts for nothing. All
// threads of the row take the same way. It is one loop, for two copies of its body would not fit in
// registers.
template <typename MeanSquare>
__device__ __forceinline__ float Rstd(float eps, MeanSquare&& mean_square) {
  float factor = 1.f, variance;
#pragma unroll 1
  while (!((variance = mean_square(factor)) <= FLT_MAX) && factor == 1.f) factor = 0x1p-96f;
  return rsqrtf(variance + (factor == 1.f ? eps : 0.f)) * factor;
}

// mean and rstd of a row that the caller has.
__device__ __forceinline__ float2 KnownStats(const NormFwdArgs& a, int64_t row) {
  return make_float2(a.known_mean ? a.known_mean[row] : 0.f, a.known_rstd[row]);
}

// mean and rstd of a row, as far as they are results; by one thread.
__device__ __forceinline__ void WriteStats(const NormFwdArgs& a, int64_t row, float mean, float rstd) {
  if (a.mean) a.mean[row] = mean;
  if (a.rstd) a.rstd[row] = rstd;
}

// gamma and beta of N neighbours.
template <int N>
struct Affine {
  float gamma[N], beta[N];
};

template <int N>
__device__ __forceinline__ Affine<N> LoadAffine(const NormFwdArgs& a, int64_t c) {
  Affine<N> out{};
  LoadGamma(a.gamma, a.zero_centered, c, out.gamma);
  if (a.beta.data) LoadWeights(a.beta, c, out.beta);
  return out;
}

// f32 [width] in shared memory, staged as the words 0 .. 3 of every 8, then the words 4 .. 7: so the lanes'
// accesses meet no bank twice. width: a multiple of 8; c: of the first of 8 columns.
__device__ __forceinline__ void Stage8(uint32_t staged, int width, int c, const float (&v)[8]) {
  StoreShared(staged + c * 2, v[0], v[1], v[2], v[3]);
  StoreShared(staged + (width + c) * 2, v[4], v[5], v[6], v[7]);
}

__device__ __forceinline__ void LoadStaged8(uint32_t staged, int width, int c, float (&out)[8]) {
  const Vec<float, 4> low = LoadShared<float, 4>(staged + c * 2);
  const Vec<float, 4> high = LoadShared<float, 4>(staged + (width + c) * 2);
#pragma unroll
  for (int i = 0; i < 4; ++i) out[i] = low[i], out[4 + i] = high[i];
}

// gamma and beta so staged, one after the other.
__device__ __forceinline__ Affine<8> StagedAffine(uint32_t staged, int width, int c) {
  Affine<8> out;
  LoadStaged8(staged, width, c, out.gamma);
  LoadStaged8(staged + width * 4, width, c, out.beta);
  return out;
}

// y in f32 of N neighbours of a row, from x - mean: exact in a row of equal numbers. Returns amax and |y|'s
// maximum.
template <int N>
__device__ __forceinline__ float Normalize(float (&x)[N], float rstd, const Affine<N>& affine, float amax) {
#pragma unroll
  for (int i = 0; i < N; ++i) {
    x[i] = x[i] * rstd * affine.gamma[i] + affine.beta[i];
    amax = MaxNan(amax, fabsf(x[i]));
  }
  return amax;
}

// Writes y and data at `offset` of [rows, h], where they are wanted. N: 8 or 1. Q: void without FP8.
template <typename T, typename Q, int N>
__device__ __forceinline__ void StoreRow(const NormFwdArgs& a, float (&y)[N], float scale, int64_t offset) {
  if (a.y) Store(static_cast<T*>(a.y) + offset, Round<T>(y));
  if constexpr (std::is_void_v<Q>)
    return;
  else if (!a.data)
    return;
  else if constexpr (N == 8) {
    float scaled[8];
#pragma unroll
    for (int i = 0; i < 8; ++i) scaled[i] = y[i] * scale;
    uint2 q;
    Quantize8<Q>(scaled, q.x, q.y);
    *reinterpret_cast<uint2*>(a.data + offset) = q;
  } else
    a.data[offset] = Saturate<Q>(y[0] * scale);
}

// The CTA's amax in its place of partials of [rows, h], zeros in the places that no CTA has.
__device__ inline void StoreCtaAmax(float* partials, int64_t rows, int64_t h, float amax) {
  __shared__ unsigned scratch[kMostWarps];
  const unsigned bits = CtaMax(__float_as_uint(amax), scratch);
  const int64_t places = AmaxPlaces(rows, h);
  if (!partials || WarpIndex() > 0) return;
  for (int64_t i = blockIdx.x + int64_t{gridDim.x} * Lane(); i < places; i += int64_t{gridDim.x} * 32)
    partials[i] = i == blockIdx.x ? __uint_as_float(bits) : 0.f;
}

// Adds up what the blockDim.y rows in work at once had in `sums`, and writes it to `partials` [h]. scratch:
// for each of these rows [kVecs, 8, blockDim.x], `pitch` apart; only the threads of that row may have used it
// before.
template <int kVecs>
__device__ void StoreRowsSums(float (&sums)[kVecs][8], float* scratch, int pitch, float* partials, int h) {
  const int c = threadIdx.x * 8, stride = blockDim.x * 8;
  if (blockDim.y > 1) {
    RowBarrier();
#pragma unroll
    for (int k = 0; k < kVecs; ++k)
#pragma unroll
      for (int i = 0; i < 8; ++i)
        scratch[threadIdx.y * pitch + k * stride + i * blockDim.x + threadIdx.x] = sums[k][i];
    __syncthreads();
    for (int y = 1; y < blockDim.y && threadIdx.y == 0; ++y)
#pragma unroll
      for (int k = 0; k < kVecs; ++k)
#pragma unroll
        for (int i = 0; i < 8; ++i)
          sums[k][i] += scratch[y * pitch + k * stride + i * blockDim.x + threadIdx.x];
  }
#pragma unroll
  for (int k = 0; k < kVecs; ++k)
    if (threadIdx.y == 0 && c + k * stride < h) Store(partials + c + k * stride, Round<float>(sums[k]));
}

// The operands of a forward call, and the statistics. ExpectNorm checks them, NormFwdArgsOf takes them; what
// else the arguments have is to be filled in.
struct NormArrays {
  Tensor x, gamma, beta, mean, rstd;
  Tensor known_mean = kNone, known_rstd = kNone;
};

// rstd: whether it is needed where the statistics are not known. Where they are they are no results.
inline Status ExpectNorm(const char* op, const NormArrays& b, bool rms, Need rstd) {
  const Axes all(b.x), rows = all.Without(1), h{all.last()};
  const bool known = Present(b.known_rstd);
  return Expect(op, {{"x", b.x, kFloats, rows + h},
                     {"gamma", b.gamma, kFloats, h},
                     {"beta", b.beta, kFloats, h, AbsentIf(rms)},
                     {"known_rstd", b.known_rstd, F32, rows, RequiredIf(Present(b.known_mean))},
                     {"known_mean", b.known_mean, F32, rows, known && !rms ? kRequired : kAbsent},
                     {"mean", b.mean, F32, rows, AbsentIf(rms || known)},
                     {"rstd", b.rstd, F32, rows, known ? kAbsent : rstd}});
}

inline NormFwdArgs NormFwdArgsOf(const NormArrays& b, double eps, bool rms, bool zero_centered) {
  NormFwdArgs out{};
  out.x = Data<void>(b.x), out.gamma = WeightsOf(b.gamma), out.beta = WeightsOf(b.beta);
  out.known_mean = Data<float>(b.known_mean), out.known_rstd = Data<float>(b.known_rstd);
  out.mean = Data<float>(b.mean), out.rstd = Data<float>(b.rstd);
  out.rows = Axes(b.x).Without(1).count(), out.h = Axes(b.x).last();
  out.eps = float(eps), out.rms = rms, out.zero_centered = zero_centered;
  return out;
}

// norm_fwd_t.cu: with data_t.
Status LaunchNormFwdTransposed(cudaStream_t stream, const NormFwdArgs& args, Type x_type, bool e5m2,
                               const Tensor& workspace);

}  // namespace te
