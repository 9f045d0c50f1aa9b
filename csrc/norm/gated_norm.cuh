// What the kernels of the gated RMSNorm of Mamba-2 (Dao, Gu 2024, https://arxiv.org/abs/2405.21060) share.
// Each group of c channels of a row has a norm of its own:
//   y = x silu(z) rstd gamma, rstd = (mean((x silu(z))^2) + eps)^-1/2, or with the norm before the gate
//   y = x rstd gamma silu(z), rstd = (mean(x^2) + eps)^-1/2
// all in f32. A row has h = g c columns, which lie side by side, so tiles need not know of groups.
#pragma once

#include "base/divisor.cuh"
#include "base/silu.cuh"
#include "norm/norm_tiles.cuh"

namespace te {

struct GatedNormArgs {
  const void *x, *z;        // [rows, h] of one type
  Weights gamma;            // [h]
  const float* known_rstd;  // [rows, g], or nullptr: it is to be computed
  float* rstd;              // [rows, g] or nullptr
  int64_t rows, h;
  unsigned g, c;
  Divisor by_g, by_c;
  float eps;
  bool before_gate;

  // Whether 8 neighbours of a row are one access, and of one group.
  bool vectors() const { return c % 8 == 0 && Aligned(x) && Aligned(z) && Aligned(gamma.data); }
};

// The number that is normalized, and the gate, of N neighbours.
template <typename T, int N>
__device__ __forceinline__ void Gated(const Vec<T, N>& x, const Vec<T, N>& z, bool before_gate, float (&u)[N],
                                      float (&gate)[N]) {
#pragma unroll
  for (int i = 0; i < N; ++i) {
    gate[i] = z[i] * Sigmoid(z[i]);
    u[i] = before_gate ? x[i] : x[i] * gate[i];
  }
}

// Makes u of N neighbours y; kOne: they share rstd[0].
template <bool kOne, int N>
__device__ __forceinline__ void NormalizeGated(float (&u)[N], const float (&gate)[N],
                                               const float (&rstd)[kOne ? 1 : N], const float (&gamma)[N],
                                               bool before_gate) {
#pragma unroll
  for (int i = 0; i < N; ++i) {
    u[i] = u[i] * rstd[kOne ? 0 : i] * gamma[i];
    u[i] = before_gate ? u[i] * gate[i] : u[i];
  }
}

// gamma of 8 columns of a row, zeros beyond h.
template <bool kVectors>
__device__ __forceinline__ void GammaOf(const GatedNormArgs& a, int64_t column, int64_t end,
                                        float (&gamma)[8]) {
#pragma unroll
  for (float& each : gamma) each = 0.f;
  if constexpr (kVectors) {
    if (column < end) LoadWeights(a.gamma, column, gamma);
  } else {
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      float one[1];
      if (column + i >= end) continue;
      LoadWeights(a.gamma, column + i, one);
      gamma[i] = one[0];
    }
  }
}

// rstd of the c numbers from `first` on, by a warp. What it reads stays in L2 for tiles; z is not read where
// the norm is before the gate.
template <bool kVectors, typename T>
__device__ float WarpRstd(const GatedNormArgs& a, int64_t first) {
  constexpr int kVecs = 4 / sizeof(T), kStride = 32 * 8;  // of a lane, on their way at once
  const T *x = static_cast<const T*>(a.x) + first, *z = static_cast<const T*>(a.z) + first;
  const float inv_c = 1.f / a.c;
  const auto mean_square = [&](float factor) {
    float sum = 0.f;
    for (int64_t c = Lane() * 8; c < a.c; c += kVecs * kStride) {
      Vec<T, 8> xs[kVecs], zs[kVecs] = {};
#pragma unroll
      for (int k = 0; k < kVecs; ++k) {
        const int inside = min(a.c - c - k * kStride, int64_t{8});
        xs[k] = LoadRow<kVectors, true>(x + c + k * kStride, inside);
        if (!a.before_gate) zs[k] = LoadRow<kVectors, true>(z + c + k * kStride, inside);
      }
#pragma unroll
      for (int k = 0; k < kVecs; ++k) {
        float u[8], gate[8], some = 0.f;
        Gated(xs[k], zs[k], a.before_gate, u, gate);
#pragma unroll
        for (int i = 0; i < 8; ++i) some = fmaf(u[i] * factor, u[i] * factor, some);
        sum += some;
      }
    }
    return WarpSum(sum) * inv_c;
  };
  return Rstd(a.eps, mean_square);
}

// rstd of a row's groups to where they are wanted, by a warp.
template <bool kVectors, typename T>
__device__ __forceinline__ void StoreRowRstd(const GatedNormArgs& a, uint64_t* found, int64_t row) {
  for (unsigned group = 0; group < a.g; ++group) {
    const int64_t norm = row * a.g + group;
    const float rstd = WarpRstd<kVectors, T>(a, norm * a.c);
    if (Lane() > 0) continue;
    HandOver(found, norm, make_float2(0.f, rstd));
    if (a.rstd) a.rstd[norm] = rstd;
  }
}

// rstd, known or from another CTA.
__device__ __forceinline__ float AwaitRstd(const GatedNormArgs& a, const uint64_t* found, int64_t norm) {
  return found ? AwaitStats(found, norm).y : a.known_rstd[norm];
}

// By all threads: rstd of a group in the `rows` rows from row0 on -> rstd [kRows], zeros beyond them.
template <int kRows>
__device__ __forceinline__ void AwaitRows(const GatedNormArgs& a, const uint64_t* found, int64_t row0,
                                          int rows, unsigned group, float* rstd) {
  for (int row = threadIdx.x; row < kRows; row += blockDim.x)
    rstd[row] = row < rows ? AwaitRstd(a, found, (row0 + row) * a.g + group) : 0.f;
  __syncthreads();
}

// What the sources of tiles have in common, of one thread: its 8 columns do not change.
template <typename T, bool kVectors>
struct GatedSource {
  using Type = T;
  struct Raw {
    Vec<T, 8> x, z;
    int row;  // of the tile
  };
  static constexpr int kSlots = 1;
  const GatedNormArgs& a;
  const uint64_t* found;  // of NormTiles
  float* rstd;            // shared: of the rows of the tile
  unsigned row0;          // of the tile
  float gamma[8];

  template <bool>
  __device__ __forceinline__ Raw Load(unsigned row, unsigned column, int inside) const {
    const uint64_t at = uint64_t{row} * unsigned(a.h) + column;  // one multiplication
    return {LoadRow<kVectors>(static_cast<const T*>(a.x) + at, inside),
            LoadRow<kVectors>(static_cast<const T*>(a.z) + at, inside), int(row - row0)};
  }
};

// The operands of a forward call, and rstd. ExpectGatedNorm checks them, GatedNormArgsOf takes them.
struct GatedNormArrays {
  Tensor x, z, gamma, rstd, known_rstd = kNone;
};

inline Status ExpectGatedNorm(const char* op, const GatedNormArrays& b, int64_t least, Need rstd) {
  TE_TRY(ExpectRank(op, "x", b.x, least));
  const Axes all(b.x), norms = all.Without(1), columns = all.From(all.rank() - 2);
  return Expect(op, {{"x", b.x, kFloats, all},
                     {"z", b.z, b.x.type, all},
                     {"gamma", b.gamma, kFloats, columns},
                     {"known_rstd", b.known_rstd, F32, norms, kOptional},
                     {"rstd", b.rstd, F32, norms, Present(b.known_rstd) ? kAbsent : rstd}});
}

// x is Present.
inline Status GatedNormArgsOf(const char* op, const GatedNormArrays& b, double eps, bool before_gate,
                              GatedNormArgs* out) {
  const Axes all(b.x);
  const int64_t g = all[all.rank() - 2], c = all.last();
  const int64_t rows = all.Without(2).count();
  TE_CHECK(g * c <= INT32_MAX && rows <= UINT32_MAX, "%s: x %s is too large", op, b.x.shape().c_str());
  *out = {Data<void>(b.x),
          Data<void>(b.z),
          WeightsOf(b.gamma),
          Data<float>(b.known_rstd),
          Data<float>(b.rstd),
          rows,
          g * c,
          unsigned(g),
          unsigned(c),
          Divisor(unsigned(g)),
          Divisor(unsigned(c)),
          float(eps),
          before_gate};
  return {};
}

}  // namespace te
