// What both passes of the state-space dual take.
#pragma once

#include "base/check.h"
#include "ssm/tiles.cuh"

namespace te::ssm {

struct ScanOperands {
  const char* op;
  Tensor x, dt, A, B, C, dt_bias, runs;
  bool softplus;
  double least, most;
  int64_t shared;       // heads of a group, or 1 where one group is for all heads, wherever these are
  int64_t most_states;  // that the op has kernels for
};

// What the forward pass takes and makes next to the steps, as LaunchSsdFwd says.
struct ScanArrays {
  const Bf16 *x, *B, *C, *z;
  const float *D, *initial;
  Bf16* y;
  float *last, *states;
  int channels;  // of D
};

// Sizes and shapes.
struct ScanCall {
  Axes all, of_groups, state, kept;  // of x, of B, of a state, of the states that are kept
  int64_t rows, s, h, p, g, n;
  StepArgs steps;
};

inline Status ExpectScan(const ScanOperands& of, ScanCall* call) {
  TE_TRY(ExpectRank(of.op, "x", of.x, 4, true));
  TE_TRY(ExpectRank(of.op, "B", of.B, 4, true));
  const Axes all(of.x), groups(of.B);
  const int64_t rows = all[0], s = all[1], h = all[2], p = all[3], g = groups[2], n = groups[3];
  const Axes state{rows, h, p, n}, kept{rows, CeilDiv(s, kKept), h, p, n};
  *call = {all, all.First(2) + Axes{g, n}, state, kept, rows, s, h, p, g, n, {}};
  TE_TRY(Expect(of.op, {{"x", of.x, BF16, all},
                        {"dt", of.dt, Types(BF16) | F32, all.First(3)},
                        {"A", of.A, F32, {h}},
                        {"B", of.B, BF16, call->of_groups},
                        {"C", of.C, BF16, call->of_groups},
                        {"dt_bias", of.dt_bias, F32, {h}, kOptional},
                        {"segments", of.runs, S32, all.First(2), kOptional}}));
  const std::string x = of.x.shape(), B = of.B.shape();
  TE_CHECK(g >= 1 && h % g == 0 && (of.shared == h / g || (g == 1 && of.shared == 1)),
           "%s: x is %s, B %s, shared %ld", of.op, x.c_str(), B.c_str(), long(of.shared));
  TE_CHECK(p % 8 == 0 && n % 8 == 0 && n >= 8 && n <= of.most_states,
           "%s: x is %s, B %s; pass multiples of 8, up to %ld states", of.op, x.c_str(), B.c_str(),
           long(of.most_states));
  TE_CHECK(s <= INT32_MAX - kKept && h * p * n <= INT32_MAX && rows <= 65535 && p <= 65535 &&
               CeilDiv(h, kWarps) <= 65535,
           "%s: x is %s, too large for one call", of.op, x.c_str());
  call->steps = {of.dt.data,
                 Data<const float>(of.A),
                 Data<const float>(of.dt_bias),
                 Data<const int>(of.runs),
                 int(s),
                 int(h),
                 of.dt.type == BF16,
                 of.softplus,
                 float(of.least),
                 float(of.most)};
  return {};
}

// te_ssd_fwd on Hopper, of up to 128 states and without z; steps are of all chunks.
Status RunHopper(cudaStream_t stream, const ScanCall& call, const ScanArrays& arrays, const Steps* steps);

// Bytes of the steps of all chunks.
inline int64_t StepBytes(const ScanCall& call) {
  return call.rows * CeilDiv(call.s, kChunk) * call.h * int64_t(sizeof(Steps));
}

}  // namespace te::ssm
