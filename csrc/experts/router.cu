// te_router_fwd, te_router_bwd: a warp for each token chooses its experts, weighs them, and takes gradients
// back to its logits. Bytes per token: 4 E read and 8 k written; the backward pass reads as much and writes 4
// E.

#include <algorithm>
#include <cfloat>
#include <cmath>

#include "base/finish.h"
#include "base/ops.h"
#include "base/reduce.cuh"

namespace te {
namespace {

constexpr int kWarps = 4, kThreads = 32 * kWarps;
constexpr int kTokensOfAWarp = 4, kMostCtas = 1024;
constexpr size_t kShared = 48 << 10;  // bytes that a CTA has unasked
// What the weights of a token are divided by at least; the sum below which both are taken times e^46, for the
// derivative divides by the sum's square.
constexpr float kLeastSum = 1e-20f, kSmallSum = 1e-10f, kLarger = 46.f;
constexpr float kLeastLargerSum = 0.94961194f;  // 1e-20 e^46

struct RouterArgs {
  const float* logits;    // [tokens, experts]
  const float* bias;      // [experts] or nullptr
  const float* dweights;  // [tokens, topk], of the backward pass
  const int* chosen;      // [tokens, topk], of the backward pass
  float* weights;         // [tokens, topk]
  int* experts;           // [tokens, topk]
  int* counts_partials;   // [gridDim.x, num_experts], one of each CTA
  float* dlogits;         // [tokens, experts]
  int64_t tokens;
  int num_experts, topk, num_groups, group_topk;  // group_topk = num_groups: all groups
  int warp_words;                                 // of shared memory for a warp
  bool sigmoid, scores_first, normalizes;
  float scaling_factor;
};

// A float as an unsigned of the same order; 0 is below all of them.
__device__ __forceinline__ unsigned Ordered(float f) {
  const unsigned bits = __float_as_uint(f);
  return bits >> 31 ? ~bits : bits | 0x80000000u;
}

// exp(values - their maximum) over its sum, of a warp's values[n] in shared memory. NaN where the maximum is
// not finite. Returns what the logarithms of the results are below the values.
struct Below {
  float top, log_sum;
  __device__ __forceinline__ float Log(float value) const { return value - top - log_sum; }
};
__device__ __forceinline__ Below Softmax(float* values, int n) {
  float top = -INFINITY, sum = 0.f;
  for (int i = Lane(); i < n; i += 32) top = fmaxf(top, values[i]);
  top = OfLanes(top, fmaxf);
  for (int i = Lane(); i < n; i += 32) sum += values[i] = expf(values[i] - top);
  sum = WarpSum(sum);
  for (int i = Lane(); i < n; i += 32) values[i] /= sum;
  __syncwarp();
  return {top, logf(sum)};
}

// The chosen scores of a token, and what they are divided by, both perhaps times e^46. A sigmoid that small
// is e^logit.
struct Picked {
  float sum, least;
  bool is_larger;
};
__device__ __forceinline__ Picked PickScores(const RouterArgs& a, const float* logits, const float* scores,
                                             Below below, const int* chosen, float* picked) {
  float sum = 0.f;
  for (int n = Lane(); n < a.topk; n += 32) picked[n] = scores[chosen[n]];
  __syncwarp();
  if (!a.scores_first) Softmax(picked, a.topk);
  for (int n = Lane(); n < a.topk; n += 32) sum += picked[n];
  sum = WarpSum(sum);
  if (!a.normalizes || !a.scores_first || !(sum < kSmallSum)) return {sum, kLeastSum, false};
  sum = 0.f;
  for (int n = Lane(); n < a.topk; n += 32) sum += picked[n] = expf(below.Log(logits[chosen[n]]) + kLarger);
  return {WarpSum(sum), kLeastLargerSum, true};
}

// Hides the groups that are not among a token's best: those with the largest sums of their `width` largest
// choices. sums[num_groups] is scratch.
__device__ __forceinline__ void HideGroups(const RouterArgs& a, float* choice, float* sums) {
  const int size = a.num_experts / a.num_groups;
  const int width = min(max(1, a.topk / a.group_topk), size);
  for (int g = Lane(); g < a.num_groups; g += 32) {
    const float* group = choice + g * size;
    float sum = 0.f, last = INFINITY;
    int last_at = -1;  // of equal values the lower index comes first
    for (int n = 0; n < width; ++n) {
      float best = -INFINITY;
      int best_at = size;
      for (int i = 0; i < size; ++i) {
        const bool is_left = group[i] < last || (group[i] == last && i > last_at);
        if (is_left && (group[i] > best || best_at == size)) best = group[i], best_at = i;
      }
      sum += best;
      last = best;
      last_at = best_at;
    }
    sums[g] = sum;
  }
  __syncwarp();
  for (int i = Lane(); i < a.num_experts; i += 32) {
    const int g = i / size;
    int before = 0;
    for (int other = 0; other < a.num_groups; ++other)
      before += sums[other] > sums[g] || (sums[other] == sums[g] && other < g);
    if (before >= a.group_topk) choice[i] = -INFINITY;
  }
  __syncwarp();
}

// The topk largest of choice[num_experts], which it overwrites, in order: their indices.
__device__ __forceinline__ void ChooseExperts(const RouterArgs& a, unsigned* keys, int* chosen) {
  for (int n = 0; n < a.topk; ++n) {
    unsigned best = 0;
    int at = 0;
    for (int i = Lane(); i < a.num_experts; i += 32)
      if (keys[i] > best) best = keys[i], at = i;
    const unsigned top = WarpMax(best);
    const int index = int(~WarpMax(best == top ? ~unsigned(at) : 0u));
    if (Lane() == 0) {
      chosen[n] = index;
      keys[index] = 0;
    }
    __syncwarp();
  }
}

// A warp has in shared memory: scores[experts], choice[experts], and picked[topk], chosen[topk], where the
// sums of groups lie before. Behind the warps' words lie the CTA's counts[experts].
__global__ void __launch_bounds__(kThreads) te_router_fwd(const RouterArgs a) {
  LetNextStart();
  extern __shared__ float words[];
  const int E = a.num_experts, k = a.topk;
  float* scores = words + WarpIndex() * a.warp_words;
  float *choice = scores + E, *picked = choice + E;
  int *chosen = reinterpret_cast<int*>(picked + k),
      *counts = reinterpret_cast<int*>(words + kWarps * a.warp_words);
  for (int i = threadIdx.x; i < E; i += kThreads) counts[i] = 0;
  __syncthreads();

  for (int64_t token = blockIdx.x * int64_t(kWarps) + WarpIndex(); token < a.tokens;
       token += gridDim.x * int64_t(kWarps)) {
    const float* logits = a.logits + token * E;
    unsigned has_nan = 0;
    for (int i = Lane(); i < E; i += 32) {
      const float logit = logits[i];
      has_nan |= logit != logit;
      scores[i] = a.sigmoid ? 1.f / (1.f + expf(-logit)) : logit;
    }
    has_nan = WarpMax(has_nan);
    __syncwarp();
    Below below{};
    if (a.scores_first && !a.sigmoid) below = Softmax(scores, E);
    for (int i = Lane(); i < E; i += 32) {
      const float c = a.bias ? scores[i] + a.bias[i] : scores[i];
      choice[i] = c != c || c == -INFINITY ? -FLT_MAX : c == 0.f ? 0.f : c;  // HideGroups has -INFINITY
    }
    __syncwarp();
    if (a.group_topk < a.num_groups) HideGroups(a, choice, picked);
    unsigned* keys = reinterpret_cast<unsigned*>(choice);
    for (int i = Lane(); i < E; i += 32) keys[i] = Ordered(choice[i]);
    __syncwarp();
    ChooseExperts(a, keys, chosen);

    const Picked of = PickScores(a, logits, scores, below, chosen, picked);
    const float sum = !a.normalizes ? 1.f : of.sum < of.least ? of.least : of.sum;  // which may be a NaN
    for (int n = Lane(); n < k; n += 32) {
      const float weight = a.scaling_factor * (picked[n] / sum);
      a.weights[token * k + n] = has_nan ? NAN : weight;
      a.experts[token * k + n] = chosen[n];
      atomicAdd(&counts[chosen[n]], 1);  // of integers: the same sum in any order
    }
    __syncwarp();
  }
  __syncthreads();
  for (int i = threadIdx.x; i < E; i += kThreads) a.counts_partials[int64_t(blockIdx.x) * E + i] = counts[i];
}

// The gradient of logits: of w = scaling_factor * p / sum(p), and of p, the scores of the chosen ones.
__global__ void __launch_bounds__(kThreads) te_router_bwd(const RouterArgs a) {
  extern __shared__ float words[];
  const int E = a.num_experts, k = a.topk;
  float* scores = words + WarpIndex() * (E + k);
  float* picked = scores + E;
  for (int64_t token = blockIdx.x * int64_t(kWarps) + WarpIndex(); token < a.tokens;
       token += gridDim.x * int64_t(kWarps)) {
    const float *logits = a.logits + token * E, *dweights = a.dweights + token * k;
    const int* chosen = a.chosen + token * k;
    float* dlogits = a.dlogits + token * E;
    for (int i = Lane(); i < E; i += 32) {
      scores[i] = a.sigmoid ? 1.f / (1.f + expf(-logits[i])) : logits[i];
    }
    __syncwarp();
    Below below{};
    if (a.scores_first && !a.sigmoid) below = Softmax(scores, E);
    const Picked of = PickScores(a, logits, scores, below, chosen, picked);

    float dot = 0.f;  // of p and the gradient of w
    for (int n = Lane(); n < k; n += 32) dot += picked[n] * dweights[n];
    dot = WarpSum(dot);
    const auto dpicked = [&](int n) {
      if (!a.normalizes) return a.scaling_factor * dweights[n];
      if (of.sum < of.least) return a.scaling_factor * dweights[n] / of.least;
      return a.scaling_factor * ((dweights[n] - dot / of.sum) / of.sum);
    };
    float onto = 0.f;  // sum of p and the gradient of p, which a softmax takes off
    for (int n = Lane(); n < k; n += 32) onto += picked[n] * dpicked(n);
    onto = a.sigmoid ? 0.f : WarpSum(onto);
    const bool all = a.scores_first && !a.sigmoid;  // experts are in the softmax
    for (int i = Lane(); i < E; i += 32) dlogits[i] = all ? -scores[i] * onto : 0.f;
    __syncwarp();
    for (int n = Lane(); n < k; n += 32) {
      const float p = picked[n], d = dpicked(n);
      const float score = of.is_larger ? scores[chosen[n]] : p;
      dlogits[chosen[n]] = a.sigmoid ? p * (1.f - score) * d : p * d - score * onto;
    }
    __syncwarp();
  }
}

Status MakeArgs(const char* op, Arg logits, int64_t topk, bool sigmoid, bool scores_first, bool normalizes,
                double scaling_factor, int64_t num_groups, int64_t group_topk, RouterArgs* args) {
  TE_TRY(ExpectRank(op, "logits", logits, 1));
  const int64_t experts = Axes(logits).last();
  TE_CHECK(experts >= 1 && experts <= kMostExperts, "%s: logits is f32%s; pass 1 to %d experts.", op,
           logits.shape().c_str(), kMostExperts);
  TE_CHECK(
      topk >= 1 && topk <= experts && num_groups >= 1 && experts % num_groups == 0 && group_topk >= 1 &&
          group_topk <= num_groups && topk <= group_topk * (experts / num_groups),
      "%s: %ld experts are chosen of %ld of %ld groups of %ld experts; pass groups of equal size with as "
      "many experts as are chosen.",
      op, long(topk), long(group_topk), long(num_groups), long(experts));
  *args = {};
  args->logits = Data<float>(logits);
  args->tokens = Axes(logits).Without(1).count();
  args->num_experts = int(experts);
  args->topk = int(topk);
  args->num_groups = int(num_groups);
  args->group_topk = int(group_topk);
  args->sigmoid = sigmoid;
  args->scores_first = scores_first;
  args->normalizes = normalizes;
  args->scaling_factor = float(scaling_factor);
  return {};
}

// te_jax/ops/experts/router.py asks for as many partials of the counts.
int64_t Ctas(int64_t tokens) {
  return std::clamp<int64_t>(CeilDiv(tokens, kWarps * kTokensOfAWarp), 1, kMostCtas);
}

}  // namespace

Status LaunchRouterFwd(cudaStream_t stream, Arg logits, Arg expert_bias, Ret weights, Ret experts, Ret counts,
                       Ret counts_partials, int64_t topk, bool sigmoid, bool scores_first, bool normalizes,
                       double scaling_factor, int64_t num_groups, int64_t group_topk) {
  const char* op = "te_router_fwd";
  RouterArgs args;
  TE_TRY(MakeArgs(op, logits, topk, sigmoid, scores_first, normalizes, scaling_factor, num_groups, group_topk,
                  &args));
  const Axes tokens = Axes(logits).Without(1);
  const int64_t ctas = Ctas(args.tokens);
  TE_TRY(Expect(op, {{"logits", logits, F32, tokens + Axes{args.num_experts}},
                     {"expert_bias", expert_bias, F32, {args.num_experts}, kOptional},
                     {"weights", weights, F32, tokens + Axes{topk}},
                     {"experts", experts, S32, tokens + Axes{topk}},
                     {"counts", counts, S32, {args.num_experts}},
                     {"counts_partials", counts_partials, S32, {ctas, args.num_experts}}}));
  args.bias = Data<float>(expert_bias);
  args.weights = Data<float>(weights);
  args.experts = Data<int>(experts);
  args.counts_partials = Data<int>(counts_partials);
  args.warp_words = 2 * args.num_experts + std::max(2 * args.topk, args.num_groups);
  const size_t shared = sizeof(float) * (kWarps * args.warp_words + args.num_experts);
  if (shared > kShared)
    TE_CUDA(cudaFuncSetAttribute(reinterpret_cast<const void*>(te_router_fwd),
                                 cudaFuncAttributeMaxDynamicSharedMemorySize, int(shared)));
  te_router_fwd<<<unsigned(ctas), kThreads, shared, stream>>>(args);
  TE_CUDA(cudaGetLastError());
  return FinishPartials(stream, {Reduce::kSumOfInts, counts_partials, counts});
}

Status LaunchRouterBwd(cudaStream_t stream, Arg dweights, Arg logits, Arg experts, Ret dlogits, int64_t topk,
                       bool sigmoid, bool scores_first, bool normalizes, double scaling_factor,
                       int64_t num_groups, int64_t group_topk) {
  const char* op = "te_router_bwd";
  RouterArgs args;
  TE_TRY(MakeArgs(op, logits, topk, sigmoid, scores_first, normalizes, scaling_factor, num_groups, group_topk,
                  &args));
  const Axes tokens = Axes(logits).Without(1), all = tokens + Axes{args.num_experts};
  TE_TRY(Expect(op, {{"dweights", dweights, F32, tokens + Axes{topk}},
                     {"logits", logits, F32, all},
                     {"experts", experts, S32, tokens + Axes{topk}},
                     {"dlogits", dlogits, F32, all}}));
  if (args.tokens == 0) return {};
  args.dweights = Data<float>(dweights);
  args.chosen = Data<int>(experts);
  args.dlogits = Data<float>(dlogits);
  const size_t shared = sizeof(float) * kWarps * (args.num_experts + topk);  // at most 32 KB
  te_router_bwd<<<unsigned(Ctas(args.tokens)), kThreads, shared, stream>>>(args);
  TE_LAUNCHED();
}

}  // namespace te
