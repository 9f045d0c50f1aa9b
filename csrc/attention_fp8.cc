// te_attention_fp8_fwd, te_attention_fp8_bwd: softmax(scale * q k^T) v on FP8 operands through cuDNN. The
// plans are built in the initialize stage; execution only looks them up.
#include <cmath>
#include <utility>

#include "attention_fp8_plan.h"
#include "module.h"

namespace te {
namespace {

using namespace fp8;

// The workspace begins with the amax of the probabilities, which cuDNN writes and nobody reads; then comes
// the plan's, aligned as an allocation.
constexpr int64_t kScratch = 256;

// ---- what the handlers share: checks, and the call -----------------------------------------------

// q [b, s, h, d], k and v [b, t, g, d]; count: of scales.
ffi::Error Describe(const Arg& q, const Arg& k, const Arg& v, const Arg& scales, int64_t count,
                    const Arg& workspace, bool causal, double scale, Fp8Attention* a) {
  const Axes q_axes(q), k_axes(k);
  a->b = q_axes[0], a->s = q_axes[1], a->h = q_axes[2], a->d = q_axes[3];
  a->t = k_axes[1], a->g = k_axes[2];
  TE_TRY(Expect(a->op(), {{"q", &q, ffi::F8E4M3FN, a->query_axes()},
                          {"k", &k, ffi::F8E4M3FN, a->key_axes()},
                          {"v", &v, ffi::F8E4M3FN, a->key_axes()},
                          {"scales", &scales, ffi::F32, {count}},
                          {"workspace", &workspace, ffi::U8, {Axes(workspace)[0]}}}));
  TE_CHECK(a->g > 0 && a->h % a->g == 0, "%s: %ld query heads are no multiple of %ld key heads", a->op(),
           long(a->h), long(a->g));
  TE_CHECK(std::isfinite(scale), "%s: scale is %g", a->op(), scale);
  a->causal = causal;
  a->scale = float(scale);
  return ffi::Error::Success();
}

ffi::Error Initialize(cudaStream_t stream, const Fp8Attention& a) {
  int64_t bytes = 0;
  return a.empty() ? ffi::Error::Success() : FindGraph(stream, Fp8AttentionRecipe(a), &bytes);
}

ffi::Error Run(cudaStream_t stream, const Fp8Attention& a, const Arg& scales, GraphPointers pointers,
               Ret& workspace) {
  TE_CHECK(workspace->size_bytes() >= size_t(kScratch), "%s: the workspace has %zu bytes", a.op(),
           workspace->size_bytes());
  for (int64_t i = 0; i < int64_t(scales.element_count()); ++i)
    pointers[kScales + i] = static_cast<float*>(scales.untyped_data()) + i;
  auto* bytes = static_cast<char*>(workspace->untyped_data());
  if (!a.backward) pointers[kAmaxS] = bytes;
  return RunGraph(stream, Fp8AttentionRecipe(a), std::move(pointers), bytes + kScratch,
                  int64_t(workspace->size_bytes()) - kScratch);
}

// ---- te_attention_fp8_fwd ------------------------------------------------------------------------

ffi::Error DescribeForward(const Arg& q, const Arg& k, const Arg& v, const Arg& scales, Ret& out, Ret& lse,
                           Ret& amax, Ret& workspace, bool causal, double scale, Fp8Attention* a) {
  TE_TRY(Describe(q, k, v, scales, kForwardScales, *workspace, causal, scale, a));
  TE_TRY(Expect(a->op(), {{"out", &*out, ffi::F8E4M3FN, a->query_axes()},
                          {"lse", &*lse, ffi::F32, a->lse_axes()},
                          {"amax", &*amax, ffi::F32, {}}}));
  TE_CHECK(a->t > 0 || !Present(lse), "%s: no key to attend to: t is 0", a->op());
  return ffi::Error::Success();
}

ffi::Error InitializeForward(cudaStream_t stream, Arg q, Arg k, Arg v, Arg scales, Ret out, Ret lse, Ret amax,
                             Ret workspace, bool causal, double scale) {
  Fp8Attention a;
  TE_TRY(DescribeForward(q, k, v, scales, out, lse, amax, workspace, causal, scale, &a));
  return Initialize(stream, a);
}

ffi::Error ExecuteForward(cudaStream_t stream, Arg q, Arg k, Arg v, Arg scales, Ret out, Ret lse, Ret amax,
                          Ret workspace, bool causal, double scale) {
  Fp8Attention a;
  TE_TRY(DescribeForward(q, k, v, scales, out, lse, amax, workspace, causal, scale, &a));
  if (a.empty()) return Zero(stream, {&*out, &*lse, &*amax});
  TE_TRY(Zero(stream, {&*amax}));  // cuDNN takes the maximum with what is there
  return Run(stream, a, scales,
             {{kQ, q.untyped_data()},
              {kK, k.untyped_data()},
              {kV, v.untyped_data()},
              {kOut, out->untyped_data()},
              {kLse, lse->untyped_data()},
              {kAmaxOut, amax->untyped_data()}},
             workspace);
}

// ---- te_attention_fp8_bwd ------------------------------------------------------------------------

struct Gradient {
  Arg dq, dk, dv, dq_amax, dk_amax, dv_amax, dp_amax;
};

ffi::Error DescribeBackward(const Arg& dout, const Arg& q, const Arg& k, const Arg& v, const Arg& out,
                            const Arg& lse, const Arg& scales, const Gradient& grad, const Arg& workspace,
                            bool causal, double scale, Fp8Attention* a) {
  a->backward = true;
  TE_TRY(Describe(q, k, v, scales, kBackwardScales, workspace, causal, scale, a));
  const ffi::DataType type = dout.element_type();
  a->e5m2 = type == ffi::F8E5M2;
  return Expect(a->op(), {{"dout", &dout, kFp8, a->query_axes()},
                          {"out", &out, ffi::F8E4M3FN, a->query_axes()},
                          {"lse", &lse, ffi::F32, a->lse_axes()},
                          {"dq", &grad.dq, type, a->query_axes()},
                          {"dk", &grad.dk, type, a->key_axes()},
                          {"dv", &grad.dv, type, a->key_axes()},
                          {"dq_amax", &grad.dq_amax, ffi::F32, {}},
                          {"dk_amax", &grad.dk_amax, ffi::F32, {}},
                          {"dv_amax", &grad.dv_amax, ffi::F32, {}},
                          {"dp_amax", &grad.dp_amax, ffi::F32, {}}});
}

ffi::Error InitializeBackward(cudaStream_t stream, Arg dout, Arg q, Arg k, Arg v, Arg out, Arg lse,
                              Arg scales, Ret dq, Ret dk, Ret dv, Ret dq_amax, Ret dk_amax, Ret dv_amax,
                              Ret dp_amax, Ret workspace, bool causal, double scale) {
  Fp8Attention a;
  const Gradient grad{*dq, *dk, *dv, *dq_amax, *dk_amax, *dv_amax, *dp_amax};
  TE_TRY(DescribeBackward(dout, q, k, v, out, lse, scales, grad, *workspace, causal, scale, &a));
  return Initialize(stream, a);
}

ffi::Error ExecuteBackward(cudaStream_t stream, Arg dout, Arg q, Arg k, Arg v, Arg out, Arg lse, Arg scales,
                           Ret dq, Ret dk, Ret dv, Ret dq_amax, Ret dk_amax, Ret dv_amax, Ret dp_amax,
                           Ret workspace, bool causal, double scale) {
  Fp8Attention a;
  const Gradient grad{*dq, *dk, *dv, *dq_amax, *dk_amax, *dv_amax, *dp_amax};
  TE_TRY(DescribeBackward(dout, q, k, v, out, lse, scales, grad, *workspace, causal, scale, &a));
  TE_TRY(
      Zero(stream, {&grad.dq_amax, &grad.dk_amax, &grad.dv_amax, &grad.dp_amax}));  // as in the forward pass
  if (a.empty()) return Zero(stream, {&grad.dq, &grad.dk, &grad.dv});
  return Run(stream, a, scales,
             {{kQ, q.untyped_data()},
              {kK, k.untyped_data()},
              {kV, v.untyped_data()},
              {kOut, out.untyped_data()},
              {kLse, lse.untyped_data()},
              {kDOut, dout.untyped_data()},
              {kDQ, dq->untyped_data()},
              {kDK, dk->untyped_data()},
              {kDV, dv->untyped_data()},
              {kAmaxDQ, dq_amax->untyped_data()},
              {kAmaxDK, dk_amax->untyped_data()},
              {kAmaxDV, dv_amax->untyped_data()},
              {kAmaxDP, dp_amax->untyped_data()}},
             workspace);
}

}  // namespace

int64_t AttentionFp8Workspace(const std::string& kind, bool e5m2, int64_t b, int64_t s, int64_t t, int64_t h,
                              int64_t g, int64_t d, bool causal, double scale) {
  const Fp8Attention a{kind == "bwd", e5m2, b, s, t, h, g, d, causal, float(scale)};
  return kScratch + (a.empty() ? 0 : GraphWorkspace(Fp8AttentionRecipe(a)));
}

TE_HANDLER_INIT(te_attention_fp8_fwd, ExecuteForward, InitializeForward,
                .Ctx<Stream>()
                    .Arg<Arg>()  // q E4M3 [b, s, h, d]
                    .Arg<Arg>()  // k E4M3 [b, t, g, d]
                    .Arg<Arg>()  // v E4M3 [b, t, g, d]
                    .Arg<Arg>()  // scales f32 [6], OfBoth, OfForward
                    .Ret<Arg>()  // out E4M3 [b, s, h, d]
                    .Ret<Arg>()  // lse f32 [b, h, s], natural log
                    .Ret<Arg>()  // amax f32 []
                    .Ret<Arg>()  // workspace, uint8
                    .Attr<bool>("causal")
                    .Attr<double>("scale"));

TE_HANDLER_INIT(te_attention_fp8_bwd, ExecuteBackward, InitializeBackward,
                .Ctx<Stream>()
                    .Arg<Arg>()  // dout E4M3 or E5M2 [b, s, h, d]
                    .Arg<Arg>()  // q E4M3
                    .Arg<Arg>()  // k E4M3
                    .Arg<Arg>()  // v E4M3
                    .Arg<Arg>()  // out E4M3
                    .Arg<Arg>()  // lse f32 [b, h, s]
                    .Arg<Arg>()  // scales f32 [12], OfBoth, OfBackward
                    .Ret<Arg>()  // dq [b, s, h, d] of dout's type
                    .Ret<Arg>()  // dk [b, t, g, d]
                    .Ret<Arg>()  // dv [b, t, g, d]
                    .Ret<Arg>()  // dq_amax f32 []
                    .Ret<Arg>()  // dk_amax
                    .Ret<Arg>()  // dv_amax
                    .Ret<Arg>()  // dp_amax
                    .Ret<Arg>()  // workspace, uint8
                    .Attr<bool>("causal")
                    .Attr<double>("scale"));

}  // namespace te
