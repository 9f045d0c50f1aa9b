// te_attention_fp8_fwd, te_attention_fp8_bwd: softmax(scale * q k^T) v on FP8 operands through cuDNN.
#include <algorithm>
#include <cmath>
#include <utility>

#include "attention/attention_fp8_plan.h"
#include "base/finish.h"
#include "base/module.h"
#include "base/ops.h"

namespace te {
namespace {

using namespace fp8;

constexpr int64_t kAmaxes = 4;  // of the backward pass: kAmaxDQ and the next three

// The largest divisor of n up to `most`, at least 1.
int64_t DivisorOf(int64_t n, int64_t most) {
  int64_t divisor = std::clamp<int64_t>(most, 1, n);
  while (n % divisor) --divisor;
  return divisor;
}

// What cuDNN computes at a time of a call: all of it, or some rows, or some heads of a row. The parts of a
// call are alike. Causal gradients of 64 and more heads of rows at once take 1.1 to 1.4 times as long as
// cuDNN's bf16 ones, of 48 and fewer 0.81 to 0.94 times (9.19 and 9.28 on an H200, results/log.md). Full
// attention has no such step.
Fp8Attention PartOf(const Fp8Attention& call) {
  constexpr int64_t kMostHeads = 48;
  Fp8Attention part = call;
  if (!call.backward || !call.causal || call.empty()) return part;
  const int64_t each = call.h / call.g;
  part.g = DivisorOf(call.g, kMostHeads / each), part.h = part.g * each;
  part.b = part.g < call.g ? 1 : DivisorOf(call.b, kMostHeads / call.h);
  return part;
}

int64_t PartsOf(const Fp8Attention& call, const Fp8Attention& part) {
  return call.b / part.b * (call.g / part.g);
}

// The workspace begins with the amax of the probabilities, which cuDNN writes and nobody reads, or with the
// amaxes of several parts of a backward pass, f32 [kAmaxes, parts]. Then comes the plan's, aligned as an
// allocation.
int64_t ScratchOf(const Fp8Attention& call, const Fp8Attention& part) {
  constexpr int64_t kAlignment = 256;
  const int64_t amaxes = call.empty() ? 1 : kAmaxes * PartsOf(call, part);
  return CeilDiv(amaxes * int64_t{sizeof(float)}, kAlignment) * kAlignment;
}

// What both launchers have; `count` scales.
struct Operands {
  const Tensor &q, &k, &v, &scales;
  int64_t count;
  const Tensor& workspace;
  bool causal;
  double scale;
};

Status Describe(const Operands& given, Fp8Attention* a) {
  const Axes q(given.q), k(given.k);
  a->b = q[0], a->s = q[1], a->h = q[2], a->d = q[3];
  a->t = k[1], a->g = k[2];
  a->line_h = a->h, a->line_g = a->g;
  TE_TRY(Expect(a->op(), {{"q", given.q, F8E4M3FN, a->query_axes()},
                          {"k", given.k, F8E4M3FN, a->key_axes()},
                          {"v", given.v, F8E4M3FN, a->key_axes()},
                          {"scales", given.scales, F32, {given.count}},
                          {"workspace", given.workspace, U8, {Axes(given.workspace)[0]}}}));
  TE_CHECK(a->g > 0 && a->h % a->g == 0, "%s: %ld query heads are no multiple of %ld key heads", a->op(),
           long(a->h), long(a->g));
  TE_CHECK(std::isfinite(given.scale), "%s: scale is %g", a->op(), given.scale);
  a->causal = given.causal;
  a->scale = float(given.scale);
  return {};
}

// The pointers of the part of a call that begins with this row and this key head.
GraphPointers PartAt(GraphPointers pointers, const Fp8Attention& a, int64_t row, int64_t head) {
  const int64_t query = row * a.h + head * (a.h / a.g);  // heads of rows before it
  const int64_t queries = (row * a.s * a.h + head * (a.h / a.g)) * a.d, keys = (row * a.t * a.g + head) * a.d;
  const auto move = [&](std::initializer_list<int64_t> uids, int64_t bytes) {
    for (const int64_t uid : uids) pointers[uid] = static_cast<char*>(pointers[uid]) + bytes;
  };
  move({kQ, kOut, kDOut, kDQ}, queries);
  move({kK, kV, kDK, kDV}, keys);
  move({kLse}, query * a.s * int64_t{sizeof(float)});
  return pointers;
}

// Runs the plan for each part of a backward pass. An amax is of one run: cuDNN 9.19 does not take the maximum
// with what an earlier run wrote.
Status RunParts(cudaStream_t stream, const Fp8Attention& a, const Fp8Attention& part,
                const GraphPointers& pointers, std::initializer_list<Tensor> amaxes, char* workspace,
                int64_t size) {
  const int64_t parts = PartsOf(a, part), scratch = ScratchOf(a, part);
  auto* partials = reinterpret_cast<float*>(workspace);
  TE_CUDA(cudaMemsetAsync(partials, 0, scratch, stream));
  for (int64_t i = 0; i < parts; ++i) {
    const int64_t across = a.g / part.g;
    GraphPointers own = PartAt(pointers, a, i / across * part.b, i % across * part.g);
    for (int64_t amax = 0; amax < kAmaxes; ++amax) own[kAmaxDQ + amax] = partials + amax * parts + i;
    TE_TRY(RunGraph(stream, Fp8AttentionRecipe(part), std::move(own), workspace + scratch, size));
  }
  const auto ending = [&](int64_t amax) -> Ending {
    return {Reduce::kMaxOfBits, {partials + amax * parts, F32, &parts, 1}, amaxes.begin()[amax]};
  };
  TE_TRY(FinishPartials(stream, ending(0), ending(1)));
  return FinishPartials(stream, ending(2), ending(3));
}

// pointers: of all but q, k, v and the scales.
Status Run(Stage stage, cudaStream_t stream, const Fp8Attention& a, const Operands& given,
           GraphPointers pointers, std::initializer_list<Tensor> results,
           std::initializer_list<Tensor> amaxes) {
  const Fp8Attention part = PartOf(a);
  const GraphRecipe recipe = Fp8AttentionRecipe(part);
  if (stage == Stage::kInitialize) return a.empty() ? Status{} : FindGraph(stream, recipe);
  if (a.empty()) {
    TE_TRY(Zero(stream, results));
    return Zero(stream, amaxes);
  }
  const int64_t scratch = ScratchOf(a, part), size = given.workspace.bytes() - scratch;
  TE_CHECK(size >= 0, "%s: the workspace has %ld bytes", a.op(), long(given.workspace.bytes()));
  pointers.insert({{kQ, given.q.data}, {kK, given.k.data}, {kV, given.v.data}});
  for (int64_t i = 0; i < given.count; ++i)
    pointers[kScales + i] = static_cast<float*>(given.scales.data) + i;
  auto* bytes = static_cast<char*>(given.workspace.data);
  if (PartsOf(a, part) > 1) return RunParts(stream, a, part, pointers, amaxes, bytes, size);
  TE_TRY(Zero(stream, amaxes));
  if (!a.backward) pointers[kAmaxS] = bytes;
  return RunGraph(stream, recipe, std::move(pointers), bytes + scratch, size);
}

}  // namespace

Status LaunchAttentionFp8Fwd(Stage stage, cudaStream_t stream, Arg q, Arg k, Arg v, Arg scales, Ret out,
                             Ret lse, Ret amax, Ret workspace, bool causal, double scale) {
  Fp8Attention a;
  const Operands given{q, k, v, scales, kForwardScales, workspace, causal, scale};
  TE_TRY(Describe(given, &a));
  TE_TRY(Expect(
      a.op(),
      {{"out", out, F8E4M3FN, a.query_axes()}, {"lse", lse, F32, a.lse_axes()}, {"amax", amax, F32, {}}}));
  TE_CHECK(a.t > 0 || !Present(lse), "%s: no key to attend to: t is 0", a.op());
  return Run(stage, stream, a, given, {{kOut, out.data}, {kLse, lse.data}, {kAmaxOut, amax.data}}, {out, lse},
             {amax});
}

Status LaunchAttentionFp8Bwd(Stage stage, cudaStream_t stream, Arg dout, Arg q, Arg k, Arg v, Arg out,
                             Arg lse, Arg scales, Ret dq, Ret dk, Ret dv, Ret dq_amax, Ret dk_amax,
                             Ret dv_amax, Ret dp_amax, Ret workspace, bool causal, double scale) {
  Fp8Attention a;
  a.backward = true;
  const Operands given{q, k, v, scales, kBackwardScales, workspace, causal, scale};
  TE_TRY(Describe(given, &a));
  const Type type = dout.type;
  a.e5m2 = type == F8E5M2;
  TE_TRY(Expect(a.op(), {{"dout", dout, kFp8, a.query_axes()},
                         {"out", out, F8E4M3FN, a.query_axes()},
                         {"lse", lse, F32, a.lse_axes()},
                         {"dq", dq, type, a.query_axes()},
                         {"dk", dk, type, a.key_axes()},
                         {"dv", dv, type, a.key_axes()},
                         {"dq_amax", dq_amax, F32, {}},
                         {"dk_amax", dk_amax, F32, {}},
                         {"dv_amax", dv_amax, F32, {}},
                         {"dp_amax", dp_amax, F32, {}}}));
  return Run(stage, stream, a, given,
             {{kOut, out.data},
              {kLse, lse.data},
              {kDOut, dout.data},
              {kDQ, dq.data},
              {kDK, dk.data},
              {kDV, dv.data},
              {kAmaxDQ, dq_amax.data},
              {kAmaxDK, dk_amax.data},
              {kAmaxDV, dv_amax.data},
              {kAmaxDP, dp_amax.data}},
             {dq, dk, dv}, {dq_amax, dk_amax, dv_amax, dp_amax});
}

int64_t AttentionFp8Workspace(const std::string& kind, bool e5m2, int64_t b, int64_t s, int64_t t, int64_t h,
                              int64_t g, int64_t d, bool causal, double scale) {
  const Fp8Attention a{kind == "bwd", e5m2, b, s, t, h, g, d, causal, float(scale)};
  const Fp8Attention part = PartOf(a);
  return ScratchOf(a, part) + (a.empty() ? 0 : GraphWorkspace(Fp8AttentionRecipe(part)));
}

}  // namespace te
