// The last kernel of a slab of te_ssd_bwd: sums of the gradients of B and C, and the gradients to steps.
#pragma once

#include "ssm/scan_bwd.cuh"

namespace te::ssm {

// How many CTAs of a row add up dB and dC, four neighbours of each in a thread, and how many make the
// gradients to steps, of a chunk and one head in each warp.
inline unsigned SumCtas(const GradArgs& a) {
  return unsigned((int64_t(a.slab.tokens) * a.g * a.n / 4 + kThreads - 1) / kThreads);
}
inline unsigned StepCtas(const GradArgs& a) {
  return unsigned((a.steps.h + kWarps - 1) / kWarps * (a.slab.tokens / kChunk));
}

__device__ __forceinline__ void AddParts(const GradArgs& a, int64_t row, unsigned cta) {
  const int64_t pieces = int64_t(a.g) * a.n / 4, i = int64_t(cta) * kThreads + threadIdx.x,
                token = i / pieces;
  if (token >= a.slab.tokens || a.slab.first_token + token >= a.steps.s) return;
  const int64_t column = i % pieces * 4, group = column / a.n;
  const int64_t from = (((row * a.slab.tokens + token) * a.g + group) * a.parts) * a.n + column % a.n;
  const int64_t to = ((a.slab.first_row + row) * a.steps.s + a.slab.first_token + token) * a.g * a.n + column;
#pragma unroll
  for (int which = 0; which < 2; ++which) {
    const float* parts = (which ? a.dC_parts : a.dB_parts) + from;
    float sums[4] = {};
    for (int part = 0; part < a.parts; ++part) {
      const auto four = Load<4>(parts + int64_t(part) * a.n);
#pragma unroll
      for (int j = 0; j < 4; ++j) sums[j] += four[j];
    }
    Store((which ? a.dC : a.dB) + to, Round<Bf16, 4>(sums));
  }
}

// The gradients to steps, of a chunk and one head for each warp, two tokens in each lane. A step scales what
// its token adds, and the decay of all that goes past the token: from tokens before it, or the state, to it
// and later ones, or the state behind the chunk. Of two tokens that is what is summed to the later less what
// is summed from the earlier.
template <bool kRuns>
struct OfSteps {
  const GradArgs& a;
  const int64_t row;
  const int chunk, head, first;  // chunk of the slab, first token

  __device__ __forceinline__ int Run(int token) const {
    return kRuns ? a.steps.runs[row * a.steps.s + min(max(token, 0), a.steps.s - 1)] : 0;
  }

  __device__ __forceinline__ void Differentiate() const {
    const Steps& steps = *a.StepsOf(row, first, head);
    const Ends& of = a.ends[((row - a.slab.first_row) * a.slab.Chunks() + chunk) * a.steps.h + head];
    constexpr int kLast = Steps::kLast;
    const int before_run = Run(first - 1), last_run = Run(first + kLast);
    float own[2], ends[2], leaves[2], dots[2], sizes[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int t = 2 * Lane() + i, run = Run(first + t);
      sizes[i] = steps.sizes[t], dots[i] = of.dots[t];
      const float to_state = run == last_run ? steps.Between(t, kLast) * of.to_state[t] : 0.f;
      const float of_state = run == before_run ? steps.Since(t) * of.of_state[t] : 0.f;
      own[i] = to_state + of.from[t] + of.own[t];
      ends[i] = of.to[t] + of_state - sizes[i] * of.from[t];
      leaves[i] = sizes[i] * to_state;
    }
    const float sum = of.through[0] + of.through[1] + of.through[2] + of.through[3];
    const float through = before_run == last_run ? sum * steps.Since(kLast) : 0.f;
    float past[2];
    PastTokens(past, ends, leaves, through);
    Write(own, past, sizes, dots);
  }

  __device__ __forceinline__ void Write(const float (&own)[2], const float (&past)[2],
                                        const float (&sizes)[2], const float (&dots)[2]) const {
    float dA = 0, bias = 0, D = 0;
    const float rate = a.steps.A[head];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int token = first + 2 * Lane() + i;
      if (token >= a.steps.s) continue;
      dA += past[i] * sizes[i];
      D += dots[i];
      const float slope = a.steps.Slope(a.steps.Given(row, token, head));
      const float dt = slope == 0 ? 0.f : (own[i] + rate * past[i]) * slope;
      bias += dt;
      const int64_t at = (row * a.steps.s + token) * a.steps.h + head;
      if (a.steps.is_bf16)
        static_cast<Bf16*>(a.ddt)[at] = __float2bfloat16_rn(dt);
      else
        static_cast<float*>(a.ddt)[at] = dt;
    }
    dA = WarpSum(dA), bias = WarpSum(bias), D = WarpSum(D);
    if (Lane() > 0) return;
    const int64_t at = (row * ((a.steps.s + kChunk - 1) / kChunk) + first / kChunk) * a.steps.h + head;
    a.dA_parts[at] = dA;
    if (a.bias_parts) a.bias_parts[at] = bias;
    if (a.D_parts) a.D_parts[at] = D;
  }
};

// blockIdx.x: the CTAs that add up, `sums` of them, and behind them the CTAs of steps. blockIdx.y: the slab's
// rows.
template <bool kRuns>
__global__ void __launch_bounds__(kThreads) te_ssd_bwd_ends(const GradArgs a, unsigned sums) {
  if (blockIdx.x < sums) return AddParts(a, blockIdx.y, blockIdx.x);
  const int index = blockIdx.x - sums, of_heads = (a.steps.h + kWarps - 1) / kWarps, chunk = index / of_heads;
  const int head = index % of_heads * kWarps + WarpIndex(), first = a.slab.first_token + chunk * kChunk;
  if (head >= a.steps.h || first >= a.steps.s) return;
  OfSteps<kRuns>{a, a.slab.first_row + int64_t(blockIdx.y), chunk, head, first}.Differentiate();
}

}  // namespace te::ssm
