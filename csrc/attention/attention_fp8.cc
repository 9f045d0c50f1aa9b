// te_attention_fp8_fwd, te_attention_fp8_bwd: softmax(scale * q k^T) v on FP8 operands through cuDNN.
#include <cmath>
#include <utility>

#include "attention/attention_fp8_plan.h"
#include "base/module.h"
#include "base/ops.h"

namespace te {
namespace {

using namespace fp8;

// The workspace begins with the amax of the probabilities, which cuDNN writes and nobody reads; then comes
// the plan's, aligned as an allocation.
constexpr int64_t kScratch = 256;

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

// pointers: of all but q, k, v and the scales. amaxes: cuDNN takes the maximum with what is there.
Status Run(Stage stage, cudaStream_t stream, const Fp8Attention& a, const Operands& given,
           GraphPointers pointers, std::initializer_list<Tensor> results,
           std::initializer_list<Tensor> amaxes) {
  const GraphRecipe recipe = Fp8AttentionRecipe(a);
  if (stage == Stage::kInitialize) return a.empty() ? Status{} : FindGraph(stream, recipe);
  TE_TRY(Zero(stream, amaxes));
  if (a.empty()) return Zero(stream, results);
  const int64_t size = given.workspace.bytes() - kScratch;
  TE_CHECK(size >= 0, "%s: the workspace has %ld bytes", a.op(), long(given.workspace.bytes()));
  pointers.insert({{kQ, given.q.data}, {kK, given.k.data}, {kV, given.v.data}});
  for (int64_t i = 0; i < given.count; ++i)
    pointers[kScales + i] = static_cast<float*>(given.scales.data) + i;
  auto* bytes = static_cast<char*>(given.workspace.data);
  if (!a.backward) pointers[kAmaxS] = bytes;
  return RunGraph(stream, recipe, std::move(pointers), bytes + kScratch, size);
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
  return kScratch + (a.empty() ? 0 : GraphWorkspace(Fp8AttentionRecipe(a)));
}

}  // namespace te
