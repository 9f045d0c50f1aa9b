// te_ssd_bwd, in three kernels for each slab of rows and tokens, the last tokens first; what they exchange
// fits in L2. The first walks over the chunks of a head as the forward pass does, and keeps the state before
// each of them, and what the loss's gradient to the state is behind each. The second has all that a chunk's
// gradients follow from: a CTA has a chunk of some heads, one after the other, which share B and C and the
// sums of their gradients; sums over heads are taken where that makes products smaller. The third adds up the
// gradients of B and C, and makes the steps' gradients.

#include "base/device.h"
#include "base/finish.h"
#include "base/ops.h"
#include "ssm/operands.cuh"
#include "ssm/scan_bwd_ends.cuh"

namespace te {
namespace ssm {
namespace {

// Divides the workspace: steps, what gradients to them follow from, the state between slabs, unless that is a
// result, states and gradients of chunks, parts.
Status Divide(const Tensor& workspace, const Tensor& dinitial, const ScanCall& call, GradArgs* a) {
  int64_t used = 0;
  const auto take = [&](int64_t bytes) {
    char* part = static_cast<char*>(workspace.data) + used;
    used += CeilDiv(bytes, 256) * 256;
    return part;
  };
  const int64_t state = int64_t(a->steps.h) * a->p * a->n, tokens = int64_t(a->slab.rows) * a->slab.tokens;
  const int64_t moved = tokens / kChunk * state, summed = tokens * a->g * a->parts * a->n;
  a->of_chunks = reinterpret_cast<Steps*>(take(StepBytes(call)));
  a->ends = reinterpret_cast<Ends*>(take(tokens / kChunk * call.h * int64_t(sizeof(Ends))));
  float* carried = reinterpret_cast<float*>(take(Present(dinitial) ? 0 : call.rows * state * 4));
  a->before = Present(dinitial) ? Data<float>(dinitial) : carried;
  a->states = reinterpret_cast<Bf16*>(take(2 * moved * 2)), a->gradients = a->states + moved;
  a->dB_parts = reinterpret_cast<float*>(take(2 * summed * 4)), a->dC_parts = a->dB_parts + summed;
  return Expect("te_ssd_bwd", {{"workspace", workspace, U8, {used}}});
}

Status ExpectSlab(const ScanCall& call, int64_t rows, int64_t tokens, int64_t heads) {
  const bool fits =
      rows >= 1 && rows <= 256 && heads >= 1 && heads <= call.h && tokens >= kChunk && tokens <= 65535;
  TE_CHECK(fits && tokens % (tokens >= call.s ? kChunk : kKept) == 0,
           "te_ssd_bwd: a slab has %ld rows of %ld tokens, %ld heads for each CTA", long(rows), long(tokens),
           long(heads));
  return {};
}

}  // namespace

Status RunEnds(cudaStream_t stream, const GradArgs& a) {
  const dim3 grid(SumCtas(a) + StepCtas(a), a.slab.rows);
  const auto ends = a.steps.runs ? te_ssd_bwd_ends<true> : te_ssd_bwd_ends<false>;
  ends<<<grid, kThreads, 0, stream>>>(a, SumCtas(a));
  TE_LAUNCHED();
}

// Whether te_ssd_bwd has kernels of its own here.
static Status HasHopper(const ScanCall& call, bool* has) {
  *has = false;
#ifdef TE_HAS_90A
  TE_TRY(IsHopper(has));
  *has = *has && call.p <= 64;
#endif
  return {};
}

static Status RunSlab(cudaStream_t stream, const GradArgs& a, HopperGradArgs* hopper) {
  if (!hopper) {
    TE_TRY(RunStates(stream, a));
    TE_TRY(RunChunks(stream, a));
  }
#ifdef TE_HAS_90A
  if (hopper) {
    hopper->a = a;
    TE_TRY(RunOnHopper(stream, *hopper));
  }
#endif
  return RunEnds(stream, a);
}

static Status RunSlabs(cudaStream_t stream, const ScanCall& call, const float* dlast, GradArgs a) {
  const Slab slab = a.slab;
  HopperGradArgs hopper{};
  bool has_hopper = false;
  TE_TRY(HasHopper(call, &has_hopper));
#ifdef TE_HAS_90A
  if (has_hopper) TE_TRY(MakeMaps(call, a, &hopper));
#endif
  for (int64_t row = 0; row < call.rows; row += slab.rows) {
    a.after = dlast;
    for (int64_t i = CeilDiv(call.s, slab.tokens); i-- > 0; a.after = a.before) {
      a.slab.rows = int(std::min<int64_t>(slab.rows, call.rows - row));
      a.slab.first_row = int(row), a.slab.first_token = int(i * slab.tokens);
      TE_TRY(RunSlab(stream, a, has_hopper ? &hopper : nullptr));
    }
  }
  return {};
}

}  // namespace ssm

Status LaunchSsdBwd(cudaStream_t stream, Arg dy, Arg dlast, Arg x, Arg dt, Arg A, Arg B, Arg C, Arg D,
                    Arg dt_bias, Arg runs, Arg states, Ret dx, Ret ddt, Ret dA, Ret dB, Ret dC, Ret dD,
                    Ret ddt_bias, Ret dinitial, Ret workspace, Ret dA_partials, Ret dD_partials,
                    Ret ddt_bias_partials, bool softplus, double least, double most, int64_t shared,
                    int64_t slab_rows, int64_t slab_tokens, int64_t slab_heads) {
  constexpr const char* kOp = "te_ssd_bwd";
  ssm::ScanCall call;
  TE_TRY(ssm::ExpectScan({kOp, x, dt, A, B, C, dt_bias, runs, softplus, least, most, shared, 128}, &call));
  const Axes heads{call.h}, parts = Axes{call.rows * CeilDiv(call.s, ssm::kChunk), call.h};
  TE_TRY(Expect(kOp, {{"dy", dy, BF16, call.all},
                      {"dfinal", dlast, F32, call.state, kOptional},
                      {"D", D, F32, {call.h, 1}, kOptional},
                      {"states", states, F32, call.kept},
                      {"dx", dx, BF16, call.all},
                      {"ddt", ddt, dt.type, call.all.First(3)},
                      {"dA", dA, F32, heads},
                      {"dB", dB, BF16, call.of_groups},
                      {"dC", dC, BF16, call.of_groups},
                      {"dD", dD, F32, {call.h, 1}, Present(D) ? kRequired : kAbsent},
                      {"ddt_bias", ddt_bias, F32, heads, Present(dt_bias) ? kRequired : kAbsent},
                      {"dinitial", dinitial, F32, call.state, kOptional},
                      {"dA_partials", dA_partials, F32, parts},
                      {"dD_partials", dD_partials, F32, parts + Axes{1}, RequiredIf(Present(dD))},
                      {"ddt_bias_partials", ddt_bias_partials, F32, parts, RequiredIf(Present(ddt_bias))}}));
  TE_TRY(ssm::ExpectSlab(call, slab_rows, slab_tokens, slab_heads));
  using ssm::Bf16;
  ssm::GradArgs args{};
  args.steps = call.steps, args.slab = {int(slab_rows), int(slab_tokens), 0, 0, int(slab_heads)};
  args.dy = Data<const Bf16>(dy), args.x = Data<const Bf16>(x), args.B = Data<const Bf16>(B);
  args.C = Data<const Bf16>(C), args.D = Data<const float>(D), args.kept = Data<const float>(states);
  args.dx = Data<Bf16>(dx), args.dB = Data<Bf16>(dB), args.dC = Data<Bf16>(dC), args.ddt = ddt.data;
  args.dA_parts = Data<float>(dA_partials), args.D_parts = Data<float>(dD_partials);
  args.bias_parts = Data<float>(ddt_bias_partials);
  args.g = int(call.g), args.p = int(call.p), args.n = int(call.n);
  args.parts = int(CeilDiv(call.h / call.g, slab_heads));
  TE_TRY(ssm::Divide(workspace, dinitial, call, &args));
  TE_TRY(ssm::LaunchSteps(stream, call.steps, call.rows, const_cast<ssm::Steps*>(args.of_chunks)));
  TE_TRY(ssm::RunSlabs(stream, call, Data<const float>(dlast), args));
  const auto sum = [](Tensor partials, Tensor result) {
    return Ending{Reduce::kSumOfFloats, partials, result};
  };
  TE_TRY(FinishPartials(stream, sum(dA_partials, dA), sum(ddt_bias_partials, ddt_bias)));
  return FinishPartials(stream, sum(dD_partials, dD));
}

}  // namespace te
