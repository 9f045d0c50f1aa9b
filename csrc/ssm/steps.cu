// The steps of all chunks, which all heads' CTAs would else compute again, each behind a load of dt.

#include "base/check.h"
#include "ssm/tiles.cuh"

namespace te::ssm {
namespace {

// A warp has the tokens of a chunk of one head, two in a lane.
__global__ void __launch_bounds__(kThreads) te_ssd_steps(const StepArgs a, Steps* steps) {
  LetNextStart();
  constexpr float kLog2E = 1.44269504f;
  // exp2 of it is 0; larger ones would push the small ones behind them out of the sum.
  constexpr float kLeast = -160;
  const int head = blockIdx.y * kWarps + WarpIndex(), first = blockIdx.x * kChunk;
  if (head >= a.h) return;
  Steps& out = steps[(int64_t(blockIdx.z) * gridDim.x + blockIdx.x) * a.h + head];
  float logs[2], sizes[2];
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int token = first + 2 * Lane() + i;
    sizes[i] = token < a.s ? a.Bounded(a.Given(blockIdx.z, token, head)) : 0.f;
    const float log = token < a.s ? sizes[i] * a.A[head] * kLog2E : 0.f;
    // A NaN stays in the size, for in the sums it would be of later runs, too.
    logs[i] = log < kLeast || sizes[i] != sizes[i] ? kLeast : log;
  }
  float sum = logs[0] + logs[1];
#pragma unroll
  for (int by = 1; by < 32; by *= 2) {
    const float other = __shfl_sync(~0u, sum, max(Lane() - by, 0));
    if (Lane() >= by) sum += other;
  }
  const float before = __shfl_sync(~0u, sum, max(Lane() - 1, 0));
  const float first_sum = (Lane() > 0 ? before : 0.f) + logs[0];
  const int at = 2 * Lane();
  *reinterpret_cast<float2*>(out.sums + at) = make_float2(first_sum, sum);
  *reinterpret_cast<float2*>(out.sizes + at) = make_float2(sizes[0], sizes[1]);
}

}  // namespace

Status LaunchSteps(cudaStream_t stream, const StepArgs& a, int64_t rows, Steps* steps) {
  const dim3 grid(unsigned(CeilDiv(a.s, kChunk)), unsigned(CeilDiv(a.h, kWarps)), unsigned(rows));
  if (grid.x * grid.y * grid.z == 0) return {};
  te_ssd_steps<<<grid, kThreads, 0, stream>>>(a, steps);
  TE_LAUNCHED();
}

}  // namespace te::ssm
