// te_rope: turns pairs of channels by an angle that grows with the position. x is read once and written once;
// sines and cosines are computed once per position and shared by its heads.

#include <algorithm>

#include "base/fp8.cuh"
#include "base/ops.h"

namespace te {
namespace {

constexpr int kThreads = 256;
constexpr int kElements = 8192;  // of x for a CTA, about: as many positions as that takes
constexpr int kMostRows = 16;
constexpr int64_t kSharedBytes = 48 << 10;

template <typename T>
struct RopeArgs {
  const T* x;              // [rows, h, d]
  const float* positions;  // [rows]
  const float* inv_freq;   // [half], radians per position
  T* y;                    // [rows, h, d]
  int64_t rows;
  int h, turned;  // heads, the first `turned` of which turn
  int d, half;    // channels of a head, the first 2 * half of which turn
  int rows_per_cta;
  float sign;  // -1 turns back
};

// kPairs neighbouring pairs at a time, aligned to their size. Consecutive: pair i is (2i, 2i + 1); else
// (i, i + half), and behind them (2i, 2i + 1) again.
template <typename T, int kPairs, bool kConsecutive>
__global__ void __launch_bounds__(kThreads) te_rope(const RopeArgs<T> a) {
  extern __shared__ float2 turns[];  // [rows_per_cta, half]: cos, sin
  const int64_t row0 = blockIdx.x * int64_t(a.rows_per_cta);
  const int rows = min(int64_t(a.rows_per_cta), a.rows - row0), half = a.half;
  for (int j = threadIdx.x; j < rows * half; j += kThreads) {
    float sine, cosine;
    sincosf(a.positions[row0 + j / half] * a.inv_freq[j % half], &sine, &cosine);
    turns[j] = make_float2(cosine, a.sign * sine);
  }
  __syncthreads();

  const int per_head = a.d / 2 / kPairs, per_row = a.h * per_head;  // what does not turn is copied
  const T* x = a.x + row0 * a.h * a.d;
  T* y = a.y + row0 * a.h * a.d;
#pragma unroll 4
  for (int unit = threadIdx.x; unit < rows * per_row; unit += kThreads) {
    const int row = unit / per_row, head = unit % per_row / per_head, pair = unit % per_head * kPairs;
    const int64_t start = int64_t(row) * a.h * a.d + head * a.d;
    const float2* turn = turns + row * half + pair;
    const bool behind = pair >= half, copied = behind || head >= a.turned;
    float out[2 * kPairs];
    if constexpr (kConsecutive) {
      const auto v = LoadOnce<2 * kPairs>(x + start + 2 * pair);
      if (copied) {
        Store(y + start + 2 * pair, v);
        continue;
      }
#pragma unroll
      for (int i = 0; i < kPairs; ++i) {
        out[2 * i] = v[2 * i] * turn[i].x - v[2 * i + 1] * turn[i].y;
        out[2 * i + 1] = v[2 * i + 1] * turn[i].x + v[2 * i] * turn[i].y;
      }
      Store(y + start + 2 * pair, Round<T, 2 * kPairs>(out));
    } else {
      const int64_t at1 = start + (behind ? 2 * pair : pair), at2 = at1 + (behind ? kPairs : half);
      const auto first = LoadOnce<kPairs>(x + at1), second = LoadOnce<kPairs>(x + at2);
      if (copied) {
        Store(y + at1, first);
        Store(y + at2, second);
        continue;
      }
      float out1[kPairs], out2[kPairs];
#pragma unroll
      for (int i = 0; i < kPairs; ++i) {
        out1[i] = first[i] * turn[i].x - second[i] * turn[i].y;
        out2[i] = second[i] * turn[i].x + first[i] * turn[i].y;
      }
      Store(y + at1, Round<T, kPairs>(out1));
      Store(y + at2, Round<T, kPairs>(out2));
    }
  }
}

// Runs the kernel of the widest accesses that the turned channels and the others both divide into: of kPairs,
// or of fewer.
template <bool kConsecutive, int kPairs, typename T>
Status Launch(cudaStream_t stream, const RopeArgs<T>& a) {
  if constexpr (kPairs > 1)
    if (!Aligned(a.x) || !Aligned(a.y) || a.half % kPairs || a.d / 2 % kPairs)
      return Launch<kConsecutive, kPairs / 2>(stream, a);
  const auto kernel = te_rope<T, kPairs, kConsecutive>;
  const unsigned ctas = CeilDiv(a.rows, a.rows_per_cta);
  kernel<<<ctas, kThreads, size_t(a.rows_per_cta) * a.half * sizeof(float2), stream>>>(a);
  TE_LAUNCHED();
}

}  // namespace

Status LaunchRope(cudaStream_t stream, Arg x, Arg positions, Arg inv_freq, Ret y, bool consecutive,
                  bool inverse, int64_t turned) {
  TE_TRY(ExpectRank("te_rope", "x", x, 4));
  const Axes all(x), tokens = all.Without(3);
  const int64_t slots = all[tokens.rank()], per_slot = all[tokens.rank() + 1], d = all.last();
  const int64_t h = slots * per_slot, rows = tokens.count(), half = Axes(inv_freq).last();
  TE_TRY(Expect("te_rope", {{"x", x, kFloats, all},
                            {"positions", positions, F32, tokens},
                            {"inv_freq", inv_freq, F32, {half}},
                            {"y", y, x.type, all}}));
  if (!Present(x)) return {};
  TE_CHECK(turned >= 0 && turned <= slots, "te_rope: turned is %ld, x is %s", long(turned),
           x.shape().c_str());
  TE_CHECK(d % 2 == 0 && half >= 1 && 2 * half <= d,
           "te_rope: inv_freq is %s, x is %s; pass one frequency for each pair of channels that turns",
           inv_freq.shape().c_str(), x.shape().c_str());
  const int64_t table = half * int64_t(sizeof(float2));
  TE_CHECK(table <= kSharedBytes && h * d <= INT32_MAX / kMostRows, "te_rope: x%s has too wide a head",
           x.shape().c_str());
  const int64_t fit = std::min(int64_t(kMostRows), kSharedBytes / table);
  const int rows_per_cta = int(std::clamp<int64_t>(kElements / (h * d), 1, fit));
  return DispatchFloat(x.type, [&]<typename T>() -> Status {
    const RopeArgs<T> args(Data<T>(x), Data<float>(positions), Data<float>(inv_freq), Data<T>(y), rows,
                           int(h), int(turned * per_slot), int(d), int(half), rows_per_cta,
                           inverse ? -1.f : 1.f);
    constexpr int kPairs = 16 / sizeof(T);  // accesses of 16 bytes
    return consecutive ? Launch<true, kPairs / 2>(stream, args) : Launch<false, kPairs>(stream, args);
  });
}

}  // namespace te
