// te_scale_update: one step of delayed scaling for tensors of one recipe, each into arrays of its own. In XLA
// it takes four kernels a tensor (a maximum, a division, two selections), and one more for each array that is
// cut out of a larger one; a step of a transformer layer updates a dozen tensors.

#include <cmath>

#include "base/check.h"
#include "base/ops.h"
#include "base/reduce.cuh"

namespace te {
namespace {

constexpr int kThreads = 256;

struct State {
  float* scale;    // [b]
  float* history;  // [b, l]
};

struct ScaleUpdateArgs {
  const float* scales;  // [n, b]
  const float*
      histories;        // [n, b, l]; slot l - 1 is the newest, slot 0 minus the steps since the scale changed
  const float* amaxes;  // [n, b], nullptr: the states stay as they are
  const float* fp8_max;  // [n]
  int64_t b, l;
  float margin_factor;  // 2^margin
  int interval;
  bool newest;  // the scale follows only this step's amax, not the largest of the history
  State results[kMostStates];
};

__global__ void __launch_bounds__(kThreads) te_scale_update(const __grid_constant__ ScaleUpdateArgs a) {
  __shared__ float tops[kThreads / 32];
  const int64_t tensor = blockIdx.x / a.b, row = blockIdx.x - tensor * a.b;
  const float* history = a.histories + blockIdx.x * a.l;
  float* new_history = a.results[tensor].history + row * a.l;
  const float amax = a.amaxes ? a.amaxes[blockIdx.x] : 0.f;
  const float scale = a.scales[blockIdx.x], since = -history[0];
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
  top = OfLanes(top, MaxNan);
  if (Lane() == 0) tops[WarpIndex()] = top;
  __syncthreads();
  if (threadIdx.x != 0) return;
  for (int w = 1; w < kThreads / 32; ++w) top = MaxNan(top, tops[w]);

  const float seen = a.newest ? amax : top;
  const float wanted = (recorded ? a.fp8_max[tensor] : 0.f) / seen / a.margin_factor;
  const bool changes = recorded && since == 0.f && seen > 0.f && seen < INFINITY && wanted == wanted;
  a.results[tensor].scale[row] = changes ? fminf(fmaxf(wanted, 1.17549435e-38f), 3.40282347e38f) : scale;
}

}  // namespace

Status LaunchScaleUpdate(cudaStream_t stream, Arg scales, Arg histories, Arg amaxes, Arg fp8_max,
                         Rets results, int64_t interval, double margin, bool newest) {
  const char* op = "te_scale_update";
  TE_TRY(ExpectRank(op, "scales", scales, 1));
  const Axes all(scales), b = all.From(1);
  const int64_t n = all[0], l = std::max<int64_t>(Axes(histories).last(), 1);
  TE_TRY(Expect(op, {{"scales", scales, F32, all},
                     {"histories", histories, F32, all + Axes{l}},
                     {"amaxes", amaxes, F32, all, kOptional},
                     {"fp8_max", fp8_max, F32, {n}, RequiredIf(Present(amaxes))}}));
  TE_CHECK(n <= kMostStates && results.size() == 2 * kMostStates,
           "%s: scales is %s, with %ld results; pass up to %d tensors, and two results for each of %d", op,
           scales.shape().c_str(), long(results.size()), kMostStates, kMostStates);
  TE_CHECK(interval >= 1 && interval <= (1 << 24), "%s: interval is %ld; pass 1 to 2^24", op, long(interval));
  ScaleUpdateArgs args{Data<float>(scales),
                       Data<float>(histories),
                       Data<float>(amaxes),
                       Data<float>(fp8_max),
                       b.count(),
                       l,
                       float(std::exp2(margin)),
                       int(interval),
                       newest,
                       {}};
  for (int i = 0; i < kMostStates; ++i) {
    const Need need = i < n ? kRequired : kAbsent;
    TE_TRY(Expect(op, {{"new_scale", results[2 * i], F32, b, need},
                       {"new_history", results[2 * i + 1], F32, b + Axes{l}, need}}));
    args.results[i] = {Data<float>(results[2 * i]), Data<float>(results[2 * i + 1])};
  }
  if (all.count() == 0) return {};
  te_scale_update<<<unsigned(all.count()), kThreads, 0, stream>>>(args);
  TE_LAUNCHED();
}

}  // namespace te
