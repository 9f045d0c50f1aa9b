// te_scale_update: one step of delayed scaling for tensors of one recipe. In XLA it takes four kernels a
// tensor (a maximum, a division, two selections), and a step of a transformer layer updates a dozen.

#include <cmath>

#include "check.h"
#include "ops.h"
#include "reduce.cuh"

namespace te {
namespace {

constexpr int kThreads = 256;

struct ScaleUpdateArgs {
  const float* scale;    // [b]
  const float* history;  // [b, l]; slot l - 1 is the newest, slot 0 minus the steps since the scale changed
  const float* amax;     // [b]
  float* new_scale;      // [b]
  float* new_history;    // [b, l]
  int64_t l;
  float fp8_max, margin_factor;  // 2^margin
  int interval;
  bool newest;  // the scale follows this step's amax alone, not the largest of the history
};

__global__ void __launch_bounds__(kThreads) te_scale_update(const ScaleUpdateArgs a) {
  __shared__ float tops[kThreads / 32];
  const float* history = a.history + blockIdx.x * a.l;
  float* new_history = a.new_history + blockIdx.x * a.l;
  const float amax = a.amax[blockIdx.x], scale = a.scale[blockIdx.x], since = -history[0];
  const bool recorded = amax > 0.f && amax < INFINITY;

  float top = amax;
  constexpr int kBatch = 4;  // loads on their way at once: the compiler moves none before a store
  for (int64_t first = threadIdx.x; first < a.l; first += kBatch * kThreads) {
    float old[kBatch];
#pragma unroll
    for (int k = 0; k < kBatch; ++k) {
      const int64_t i = first + k * kThreads;
      old[k] = i < a.l ? history[i] : amax;
    }
#pragma unroll
    for (int k = 0; k < kBatch; ++k) {
      const int64_t i = first + k * kThreads;
      top = MaxNan(top, old[k]);
      if (i >= a.l) continue;
      if (!recorded) new_history[i] = old[k];
      if (recorded && i >= 2) new_history[i - 1] = old[k];
    }
  }
  if (recorded && threadIdx.x == 0) {
    if (a.l > 1) new_history[a.l - 1] = amax;
    const float steps = since + 1.f, interval = float(a.interval);
    new_history[0] = 0.f - (steps - floorf(steps / interval) * interval);  // from 0 up, of any sign
  }
  for (int other = 16; other > 0; other /= 2) top = MaxNan(top, __shfl_xor_sync(~0u, top, other));
  if (Lane() == 0) tops[WarpIndex()] = top;
  __syncthreads();
  if (threadIdx.x != 0) return;
  for (int w = 1; w < kThreads / 32; ++w) top = MaxNan(top, tops[w]);

  const float seen = a.newest ? amax : top;
  const float wanted = a.fp8_max / seen / a.margin_factor;
  const bool changes = recorded && since == 0.f && seen > 0.f && seen < INFINITY && wanted == wanted;
  a.new_scale[blockIdx.x] = changes ? fminf(fmaxf(wanted, 1.17549435e-38f), 3.40282347e38f) : scale;
}

}  // namespace

Status LaunchScaleUpdate(cudaStream_t stream, Arg scale, Arg history, Arg amax, Ret new_scale,
                         Ret new_history, double fp8_max, int64_t interval, double margin, bool newest) {
  const char* op = "te_scale_update";
  const Axes b(amax);
  const int64_t l = std::max<int64_t>(Axes(history).last(), 1);
  TE_TRY(Expect(op, {{"amax", amax, F32, b},
                     {"scale", scale, F32, b},
                     {"amax_history", history, F32, b + Axes{l}},
                     {"new_scale", new_scale, F32, b},
                     {"new_history", new_history, F32, b + Axes{l}}}));
  TE_CHECK(interval >= 1 && interval <= (1 << 24), "%s: interval is %ld; pass 1 to 2^24", op, long(interval));
  if (b.count() == 0) return {};
  const ScaleUpdateArgs args{Data<float>(scale),
                             Data<float>(history),
                             Data<float>(amax),
                             Data<float>(new_scale),
                             Data<float>(new_history),
                             l,
                             float(fp8_max),
                             float(std::exp2(margin)),
                             int(interval),
                             newest};
  te_scale_update<<<unsigned(b.count()), kThreads, 0, stream>>>(args);
  TE_LAUNCHED();
}

}  // namespace te
