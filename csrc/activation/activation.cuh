// The activations of the MLP and their derivatives, as sources of tiles of f32 values: what te_activation_*
// and te_activation_block_* share.
#pragma once

#include <cfloat>
#include <cmath>

#include "base/fp8.cuh"
#include "base/ptx.cuh"

namespace te {

enum Kind {
  kGelu,
  kSilu,
  kRelu,
  kQuickGelu,
  kSquaredRelu,
  kClampedSilu,
  kKinds
};  // te_jax/ops/quantize/activation.py

// The derivative of min(x, limit): half at the tie, as jax has it.
__device__ __forceinline__ float BelowLimit(float x, float limit) {
  return x < limit ? 1.f : x == limit ? 0.5f : 0.f;
}

// The functions of slot 0 make two families, told apart at run time for 8 elements at once (all threads take
// the same branch): relu(x) or its square, and x * sigmoid(x * (c0 + c1 * x^2)). Gelu in its tanh form is in
// the second family: (1 + tanh(u)) / 2 = sigmoid(2 * u).
struct Activation {
  float c0, c1;        // times -log2(e)
  float d0, d1;        // the derivative of the sigmoid's argument: d0 + d1 * x^2
  bool relu, squared;  // the first family
  bool clamped;        // x0 = min(x0, limit), x1 = clip(x1, -limit, limit) + offset
  float limit, offset;

  // Finite, for c1 may be 0; where x is NaN, x times this is.
  static __device__ __forceinline__ float Square(float x) { return fminf(x * x, 1e30f); }

  __device__ __forceinline__ float Sigmoid(float x) const {
    return Reciprocal(1.f + Exp2(x * fmaf(c1, Square(x), c0)));  // 0 and 1 at -inf and inf
  }

  // Finds x as slot 0's function takes it, and what the function is multiplied with.
  template <typename T, int kA>
  __device__ __forceinline__ void Inputs(const Vec<T, 8> (&x)[kA], float (&x0)[8], float (&gate)[8]) const {
#pragma unroll
    for (int j = 0; j < 8; ++j) x0[j] = x[0][j], gate[j] = kA == 2 ? x[kA - 1][j] : 1.f;
    if (kA == 2 && clamped) {
#pragma unroll
      for (int j = 0; j < 8; ++j) {
        x0[j] = MinNan(x0[j], limit);
        gate[j] = MinNan(MaxNan(gate[j], -limit), limit) + offset;
      }
    }
  }

  template <typename T, int kA>
  __device__ __forceinline__ void Forward(const Vec<T, 8> (&x)[kA], float (&y)[8]) const {
    float x0[8], gate[8];
    Inputs(x, x0, gate);
    if (relu) {
#pragma unroll
      for (int j = 0; j < 8; ++j) {
        const float f = MaxNan(x0[j], 0.f);
        y[j] = squared ? f * (f * gate[j]) : f * gate[j];  // a square may be inf where this is not
      }
    } else {
#pragma unroll
      for (int j = 0; j < 8; ++j) y[j] = x0[j] * Sigmoid(x0[j]) * gate[j];
    }
  }

  // dy times f times gate. Where f times gate is inf, dy meets the larger one first, for dy is small.
  static __device__ __forceinline__ float Product(float dy, float f, float gate) {
    const float product = f * gate;
    if (fabsf(product) <= FLT_MAX) return dy * product;
    return fabsf(gate) > f ? dy * gate * f : dy * f * gate;
  }

  // The order is the reference's, so that the same results are not finite: dy times the other slot may be inf
  // where the slope is 0.
  template <typename T, int kA>
  __device__ __forceinline__ void Backward(const Vec<T, 8>& dy, const Vec<T, 8> (&x)[kA],
                                           float (&dx)[kA][8]) const {
    float x0[8], gate[8];
    Inputs(x, x0, gate);
    if (relu) {
#pragma unroll
      for (int j = 0; j < 8; ++j) {
        const float f = MaxNan(x0[j], 0.f), half = squared ? Product(dy[j], f, gate[j]) : 0.f;
        dx[0][j] =
            x0[j] > 0.f ? (squared ? half + half : dy[j] * gate[j]) : 0.f;  // 0 also where these are inf
        if (kA == 2) dx[kA - 1][j] = squared ? f * (f * dy[j]) : f * dy[j];
      }
    } else {
#pragma unroll
      for (int j = 0; j < 8; ++j) {
        const float s = Sigmoid(x0[j]), slope = x0[j] * fmaf(-s, s, s);        // finite where x0 is
        const float derivative = fmaf(slope, fmaf(d1, Square(x0[j]), d0), s);  // at most 1.13
        const float product = gate[j] * derivative;
        dx[0][j] = fabsf(product) <= FLT_MAX ? dy[j] * product : dy[j] * gate[j] * derivative;
        if (kA == 2) dx[kA - 1][j] = dy[j] * (x0[j] * s);
      }
    }
    if (kA == 2 && clamped) {
#pragma unroll
      for (int j = 0; j < 8; ++j) {
        const float x1 = x[kA - 1][j];
        dx[0][j] *= BelowLimit(x[0][j], limit);
        dx[kA - 1][j] *= BelowLimit(-x1, limit) * BelowLimit(MaxNan(x1, -limit), limit);
      }
    }
  }
};

template <typename T, int kA>
struct ActivationSource {
  using Type = T;
  struct Raw {
    Vec<T, 8> x[kA];
  };
  static constexpr int kSlots = 1, kCtas = 5 - kA, kWindow = 16 / int(sizeof(T)) / kA;
  static constexpr bool kSums = false;
  const T* x;  // [m, a, n]
  unsigned n;  // of 32 bits, as rows are: an address is one multiplication
  Activation act;

  template <bool kVectors, bool kAgain = false>
  __device__ __forceinline__ Raw Load(unsigned row, unsigned column, int columns) const {
    Raw raw;
#pragma unroll
    for (int s = 0; s < kA; ++s)
      raw.x[s] = LoadRow<kVectors, kAgain>(x + (uint64_t{row * kA + s} * n + column), columns);
    return raw;
  }

  __device__ __forceinline__ void Values(const Raw& raw, float (&f)[1][8]) const { act.Forward(raw.x, f[0]); }
};

template <typename T, int kA>
struct GradientSource {
  using Type = T;
  struct Raw {
    Vec<T, 8> dy, x[kA];
  };
  static constexpr int kSlots = kA, kCtas = 4 / kA, kWindow = 4 * kA / int(sizeof(T));
  static constexpr bool kSums = true;
  const T* dy;  // [m, n]
  const T* x;   // [m, a, n]
  unsigned n;
  Activation act;

  template <bool kVectors, bool kAgain = false>
  __device__ __forceinline__ Raw Load(unsigned row, unsigned column, int columns) const {
    Raw raw;
    raw.dy = LoadRow<kVectors, kAgain>(dy + (uint64_t{row} * n + column), columns);
#pragma unroll
    for (int s = 0; s < kA; ++s)
      raw.x[s] = LoadRow<kVectors, kAgain>(x + (uint64_t{row * kA + s} * n + column), columns);
    return raw;
  }

  __device__ __forceinline__ void Values(const Raw& raw, float (&f)[kA][8]) const {
    act.Backward(raw.dy, raw.x, f);
  }
};

struct ActivationOptions {
  int64_t kind;
  double limit, alpha, glu_linear_offset;
};

// A call: x is [m..., a, f], and of the gradient dy [m..., f].
template <bool kBackward>
struct ActivationCall {
  const char* op;
  Tensor x, dy;
  ActivationOptions options;
  // By Check:
  Axes m = {};
  int64_t a = 0, f = 0;
  Activation act = {};

  bool aligned() const { return Aligned(Data<void>(x)) && Aligned(Data<void>(dy)); }
  // Slots and axes of the columns of the result.
  int64_t slots() const { return kBackward ? a : 1; }
  Axes columns() const { return kBackward ? Axes{a, f} : Axes{f}; }

  // rank: the least that x has, or with `exactly` the only one.
  Status Check(int64_t rank, bool exactly = false) {
    TE_TRY(ExpectRank(op, "x", x, rank, exactly));
    const Axes all(x);
    m = all.Without(2), a = all[all.rank() - 2], f = all.last();
    TE_TRY(Expect(op, {{"x", x, kFloats, all}}));
    if (kBackward) TE_TRY(Expect(op, {{"dy", dy, x.type, m + Axes{f}}}));
    TE_CHECK(a == 1 || a == 2, "%s: x is %s; pass an array with an axis of 1 or 2 slots before the last", op,
             x.shape().c_str());
    TE_CHECK(m.count() * a <= UINT32_MAX && f <= UINT32_MAX, "%s: x %s is too large", op, x.shape().c_str());
    const auto [kind, limit, alpha, offset] = options;
    TE_CHECK(kind >= 0 && kind < kKinds, "%s: kind is %ld", op, long(kind));
    TE_CHECK(kind != kClampedSilu || a == 2, "%s: clamped_silu is gated", op);
    const double log2e = 1.4426950408889634, gelu = 2 * std::sqrt(2 / 3.14159265358979323846);
    const double c0 = kind == kGelu ? gelu : kind == kQuickGelu ? 1.702 : kind == kClampedSilu ? alpha : 1.0;
    const double c1 = kind == kGelu ? gelu * 0.044715 : 0.0;
    act = Activation(float(-log2e * c0), float(-log2e * c1), float(c0), float(3 * c1),
                     kind == kRelu || kind == kSquaredRelu, kind == kSquaredRelu, kind == kClampedSilu,
                     float(limit), float(offset));
    return {};
  }

  // Calls run(source) with the source of x's type and slots.
  template <typename Run>
  Status Dispatch(Run&& run) const {
    return DispatchFloat(x.type, [&]<typename T>() -> Status {
      const auto of_slots = [&]<int kA>() -> Status {
        if constexpr (kBackward)
          return run(GradientSource<T, kA>{Data<T>(dy), Data<T>(x), unsigned(f), act});
        else
          return run(ActivationSource<T, kA>{Data<T>(x), unsigned(f), act});
      };
      return a == 1 ? of_slots.template operator()<1>() : of_slots.template operator()<2>();
    });
  }
};

}  // namespace te
