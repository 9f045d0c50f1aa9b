// te_rope: turns pairs of channels by an angle that grows with the position. x is read once and written once;
// sines and cosines are computed once per position and shared by its heads.

#include <algorithm>
#include <cmath>

#include "fp8.cuh"

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
  T* y;                    // [rows, h, d]
  int64_t rows;
  int h, turned, d, rows_per_cta;  // heads, the first `turned` of which turn
  double w0, log2_ratio;           // pair i has the period w0 * 2^(log2_ratio * 2i / d)
  float sign;                      // -1 turns back
};

// kPairs neighbouring pairs at a time, aligned to their size. Consecutive: pair i is (2i, 2i + 1); else
// (i, i + d / 2).
template <typename T, int kPairs, bool kConsecutive>
__global__ void __launch_bounds__(kThreads) Rope(const RopeArgs<T> a) {
  extern __shared__ float2 turns[];  // [rows_per_cta, d / 2]: cos, sin
  const int64_t row0 = blockIdx.x * int64_t(a.rows_per_cta);
  const int rows = min(int64_t(a.rows_per_cta), a.rows - row0), half = a.d / 2;
  for (int j = threadIdx.x; j < rows * half; j += kThreads) {
    const float period =
        float(a.w0 * exp2(a.log2_ratio * (2 * (j % half)) / a.d));  // f32 would turn far rows wrong
    float sine, cosine;
    sincosf(a.positions[row0 + j / half] / period, &sine, &cosine);
    turns[j] = make_float2(cosine, a.sign * sine);
  }
  __syncthreads();

  const int per_row = a.h * half / kPairs, per_head = half / kPairs;  // the heads that do not turn are copied
  const T* x = a.x + row0 * a.h * a.d;
  T* y = a.y + row0 * a.h * a.d;
#pragma unroll 4
  for (int unit = threadIdx.x; unit < rows * per_row; unit += kThreads) {
    const int row = unit / per_row, head = unit % per_row / per_head, pair = unit % per_head * kPairs;
    const int64_t start = int64_t(row) * a.h * a.d + head * a.d;
    const float2* turn = turns + row * half + pair;
    const bool copied = head >= a.turned;
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
      const auto first = LoadOnce<kPairs>(x + start + pair),
                 second = LoadOnce<kPairs>(x + start + half + pair);
      if (copied) {
        Store(y + start + pair, first);
        Store(y + start + half + pair, second);
        continue;
      }
      float out1[kPairs], out2[kPairs];
#pragma unroll
      for (int i = 0; i < kPairs; ++i) {
        out1[i] = first[i] * turn[i].x - second[i] * turn[i].y;
        out2[i] = second[i] * turn[i].x + first[i] * turn[i].y;
      }
      Store(y + start + pair, Round<T, kPairs>(out1));
      Store(y + start + half + pair, Round<T, kPairs>(out2));
    }
  }
}

template <typename T, bool kConsecutive>
void Launch(cudaStream_t stream, const RopeArgs<T>& args) {
  constexpr int kWide = 16 / sizeof(T) / (kConsecutive ? 2 : 1);  // pairs in accesses of 16 bytes
  const bool wide = args.d / 2 % kWide == 0 && Aligned(args.x) && Aligned(args.y);
  const auto kernel = wide ? Rope<T, kWide, kConsecutive> : Rope<T, 1, kConsecutive>;
  const int64_t ctas = (args.rows + args.rows_per_cta - 1) / args.rows_per_cta;
  kernel<<<unsigned(ctas), kThreads, size_t(args.rows_per_cta) * args.d * sizeof(float), stream>>>(args);
}

ffi::Error LaunchRope(cudaStream_t stream, Arg x, Arg positions, Ret y, bool consecutive, bool inverse,
                      int64_t turned, double w0, double w1) {
  if (x.element_count() == 0) return ffi::Error::Success();
  const auto dims = x.dimensions();
  TE_CHECK(dims.size() >= 4 && dims.back() % 2 == 0, "te_rope: x is %s, expected [b..., s, n, h, d], even d",
           Shape(x).c_str());
  const int64_t slots = dims[dims.size() - 3], per_slot = dims[dims.size() - 2], d = dims.back();
  const int64_t h = slots * per_slot, rows = int64_t(x.element_count()) / (h * d);
  TE_CHECK(turned >= 0 && turned <= slots, "te_rope: turned is %ld, x is %s", long(turned), Shape(x).c_str());
  TE_CHECK(positions.element_type() == ffi::F32 && int64_t(positions.element_count()) == rows,
           "te_rope: positions%s must be f32, one for each of %ld rows", Shape(positions).c_str(),
           long(rows));
  TE_CHECK(y->element_count() == x.element_count() && y->element_type() == x.element_type(),
           "te_rope: y must be as x%s", Shape(x).c_str());
  TE_CHECK(d * int64_t(sizeof(float)) <= kSharedBytes && h * d <= INT32_MAX / kMostRows,
           "te_rope: x%s has too wide a head", Shape(x).c_str());
  const int64_t fit = std::min<int64_t>(kMostRows, kSharedBytes / (d * int64_t(sizeof(float))));
  const int rows_per_cta = int(std::clamp<int64_t>(kElements / (h * d), 1, fit));
  return DispatchFloat(x.element_type(), [&]<typename T>() -> ffi::Error {
    const RopeArgs<T> args{Data<T>(x),
                           Data<float>(positions),
                           Data<T>(y),
                           rows,
                           int(h),
                           int(turned * per_slot),
                           int(d),
                           rows_per_cta,
                           w0,
                           std::log2(w1 / w0),
                           inverse ? -1.f : 1.f};
    consecutive ? Launch<T, true>(stream, args) : Launch<T, false>(stream, args);
    TE_LAUNCHED();
  });
}

}  // namespace

TE_HANDLER(te_rope, LaunchRope,
           Bind()
               .Ctx<Stream>()
               .Arg<Arg>()  // x: b... s n h d
               .Arg<Arg>()  // positions: f32 b... s
               .Ret<Arg>()  // y: b... s n h d
               .Attr<bool>("consecutive")
               .Attr<bool>("inverse")
               .Attr<int64_t>("turned")
               .Attr<double>("w0")
               .Attr<double>("w1"));

}  // namespace te
