// te_attention_fp8_fwd, te_attention_fp8_bwd: softmax(scale * q k^T) v on FP8 operands through cuDNN. The
// plans are built in the initialize stage; execution only looks them up.
#include <cudnn_frontend.h>

#include <cmath>
#include <memory>
#include <utility>

#include "common.h"
#include "cudnn_graph.h"
#include "module.h"

namespace te {
namespace {

namespace fe = cudnn_frontend;
using GraphTensor = std::shared_ptr<fe::graph::Tensor_attributes>;

// What a plan depends on.
struct Fp8Attention {
  bool backward = false;
  bool e5m2 = false;                          // the gradients; else E4M3, as all else is
  int64_t b = 0, s = 0, t = 0, h = 0, g = 0;  // batch, query and key length, query and key heads
  int64_t d = 0;                              // head dim
  bool causal = false;                        // query i sees keys 0 .. i
  float scale = 1;                            // of the logits

  bool empty() const { return b == 0 || s == 0 || t == 0 || h == 0 || d == 0; }
  int64_t queries() const { return b * s * h * d; }
  int64_t keys() const { return b * t * g * d; }
  const char* op() const { return backward ? "te_attention_fp8_bwd" : "te_attention_fp8_fwd"; }
};

// ---- the graphs ----------------------------------------------------------------------------------

// The arrays by uid.
enum Array : int64_t { kQ = 1, kK, kV, kOut, kLse, kDOut, kDQ, kDK, kDV };
enum Statistic : int64_t { kAmaxS = 16, kAmaxOut, kAmaxDQ, kAmaxDK, kAmaxDV, kAmaxDP };
constexpr int64_t kScales = 32;  // + i: element i of the operand `scales`

// The elements of `scales`, as te_jax/ops/attention_fp8.py packs them: what a value is multiplied with to be
// stored in FP8, and with Inv what a stored one is multiplied with. S are the probabilities, DP the gradient
// of q k^T.
enum OfBoth { kQInv, kKInv, kVInv, kS, kSInv };
enum OfForward { kOutScale = kSInv + 1, kForwardScales };
enum OfBackward { kOutInv = kSInv + 1, kDOutInv, kDP, kDPInv, kDQScale, kDKScale, kDVScale, kBackwardScales };

// cuDNN names the axes [b, h, s, d]; the strides say that they lie as [b, s, h, d].
struct Layout {
  std::vector<int64_t> dims, strides;
};
Layout Bshd(int64_t b, int64_t s, int64_t h, int64_t d) { return {{b, h, s, d}, {s * h * d, d, h * d, 1}}; }
Layout Queries(const Fp8Attention& a) { return Bshd(a.b, a.s, a.h, a.d); }
Layout Keys(const Fp8Attention& a) { return Bshd(a.b, a.t, a.g, a.d); }
Layout Lse(const Fp8Attention& a) { return {{a.b, a.h, a.s, 1}, {a.h * a.s, a.s, 1, 1}}; }
Layout One() { return {{1, 1, 1, 1}, {1, 1, 1, 1}}; }

fe::DataType_t Gradients(const Fp8Attention& a) {
  return a.e5m2 ? fe::DataType_t::FP8_E5M2 : fe::DataType_t::FP8_E4M3;
}

class Adder {
 public:
  Adder(fe::graph::Graph& graph, const Fp8Attention& attention) : graph_(graph), attention_(attention) {
    graph.set_io_data_type(fe::DataType_t::FP8_E4M3)
        .set_intermediate_data_type(fe::DataType_t::FLOAT)
        .set_compute_data_type(fe::DataType_t::FLOAT);
  }

  void Forward() {
    auto attributes = fe::graph::SDPA_fp8_attributes();
    attributes.set_name("te_attention_fp8_fwd").set_generate_stats(true).set_attn_scale(attention_.scale);
    if (attention_.causal)
      attributes.set_diagonal_alignment(fe::DiagonalAlignment_t::TOP_LEFT).set_diagonal_band_right_bound(0);
    const auto [out, lse, amax_s, amax] = graph_.sdpa_fp8(
        Input(kQ, Queries(attention_)), Input(kK, Keys(attention_)), Input(kV, Keys(attention_)),
        Scale(kQInv), Scale(kKInv), Scale(kVInv), Scale(kSInv), Scale(kS), Scale(kOutScale), attributes);
    Output(out, kOut, Queries(attention_), fe::DataType_t::FP8_E4M3);
    Output(lse, kLse, Lse(attention_), fe::DataType_t::FLOAT);
    Output(amax_s, kAmaxS, One(), fe::DataType_t::FLOAT);
    Output(amax, kAmaxOut, One(), fe::DataType_t::FLOAT);
  }

  // dk and dv have the g heads of k and v: cuDNN sums over the query heads of a group.
  void Backward() {
    auto attributes = fe::graph::SDPA_fp8_backward_attributes();
    attributes.set_name("te_attention_fp8_bwd")
        .set_attn_scale(attention_.scale)
        .set_causal_mask(attention_.causal);
    const fe::DataType_t type = Gradients(attention_);
    const auto [dq, dk, dv, amax_dq, amax_dk, amax_dv, amax_dp] = graph_.sdpa_fp8_backward(
        Input(kQ, Queries(attention_)), Input(kK, Keys(attention_)), Input(kV, Keys(attention_)),
        Input(kOut, Queries(attention_)), Input(kDOut, Queries(attention_), type),
        Input(kLse, Lse(attention_), fe::DataType_t::FLOAT), Scale(kQInv), Scale(kKInv), Scale(kVInv),
        Scale(kOutInv), Scale(kDOutInv), Scale(kSInv), Scale(kDPInv), Scale(kS), Scale(kDQScale),
        Scale(kDKScale), Scale(kDVScale), Scale(kDP), attributes);
    Output(dq, kDQ, Queries(attention_), type);
    Output(dk, kDK, Keys(attention_), type);
    Output(dv, kDV, Keys(attention_), type);
    Output(amax_dq, kAmaxDQ, One(), fe::DataType_t::FLOAT);
    Output(amax_dk, kAmaxDK, One(), fe::DataType_t::FLOAT);
    Output(amax_dv, kAmaxDV, One(), fe::DataType_t::FLOAT);
    Output(amax_dp, kAmaxDP, One(), fe::DataType_t::FLOAT);
  }

 private:
  GraphTensor Input(int64_t uid, const Layout& layout, fe::DataType_t type = fe::DataType_t::FP8_E4M3) {
    return graph_.tensor(fe::graph::Tensor_attributes()
                             .set_name("te_" + std::to_string(uid))
                             .set_uid(uid)
                             .set_dim(layout.dims)
                             .set_stride(layout.strides)
                             .set_data_type(type));
  }

  GraphTensor Scale(int64_t i) { return Input(kScales + i, One(), fe::DataType_t::FLOAT); }

  static void Output(const GraphTensor& tensor, int64_t uid, const Layout& layout, fe::DataType_t type) {
    tensor->set_output(true).set_uid(uid).set_dim(layout.dims).set_stride(layout.strides).set_data_type(type);
  }

  fe::graph::Graph& graph_;
  const Fp8Attention& attention_;
};

GraphRecipe RecipeOf(const Fp8Attention& a) {
  return {Format("%s%s q[%ld, %ld, %ld, %ld], k and v[%ld, %ld, %ld, %ld], scale %a%s", a.op(),
                 a.backward ? (a.e5m2 ? " e5m2" : " e4m3") : "", long(a.b), long(a.s), long(a.h), long(a.d),
                 long(a.b), long(a.t), long(a.g), long(a.d), double(a.scale), a.causal ? ", causal" : ""),
          [a](fe::graph::Graph& graph) {
            Adder adder(graph, a);
            a.backward ? adder.Backward() : adder.Forward();
          }};
}

// The workspace begins with the amax of the probabilities, which cuDNN writes and nobody reads; then comes
// the plan's, aligned as an allocation.
constexpr int64_t kScratch = 256;

// ---- what the handlers share: checks, and the call -----------------------------------------------

bool IsShape(const Arg& a, std::initializer_list<int64_t> dims) {
  const auto got = a.dimensions();
  return std::equal(got.begin(), got.end(), dims.begin(), dims.end());
}

// q [b, s, h, d], k and v [b, t, g, d].
ffi::Error Describe(const Arg& q, const Arg& k, const Arg& v, const Arg& scales, int64_t count, bool causal,
                    double scale, Fp8Attention* a) {
  const auto qd = q.dimensions(), kd = k.dimensions();
  TE_CHECK(qd.size() == 4 && kd.size() == 4, "%s: q%s, k%s must have 4 axes", a->op(), Shape(q).c_str(),
           Shape(k).c_str());
  a->b = qd[0], a->s = qd[1], a->t = kd[1], a->h = qd[2], a->g = kd[2], a->d = qd[3];
  for (const Arg* x : {&k, &v})
    TE_CHECK(IsShape(*x, {a->b, a->t, a->g, a->d}), "%s: q%s, k%s, v%s do not match", a->op(),
             Shape(q).c_str(), Shape(k).c_str(), Shape(v).c_str());
  TE_CHECK(a->g > 0 && a->h % a->g == 0, "%s: %ld query heads are no multiple of %ld key heads", a->op(),
           long(a->h), long(a->g));
  for (const Arg* x : {&q, &k, &v})
    TE_CHECK(x->element_type() == ffi::F8E4M3FN, "%s: q, k and v must be E4M3", a->op());
  TE_CHECK(scales.element_type() == ffi::F32 && IsShape(scales, {count}), "%s: scales%s must be f32[%ld]",
           a->op(), Shape(scales).c_str(), long(count));
  TE_CHECK(std::isfinite(scale), "%s: scale is %g", a->op(), scale);
  a->causal = causal;
  a->scale = float(scale);
  return ffi::Error::Success();
}

ffi::Error CheckArray(const Fp8Attention& a, const char* name, const Arg& x, ffi::DataType type,
                      std::initializer_list<int64_t> dims) {
  TE_CHECK(x.element_type() == type && IsShape(x, dims), "%s: %s%s has the wrong type or shape", a.op(), name,
           Shape(x).c_str());
  return ffi::Error::Success();
}

ffi::Error CheckAmax(const Fp8Attention& a, const Arg& amax) {
  return CheckArray(a, "an amax", amax, ffi::F32, {});
}

ffi::Error Initialize(cudaStream_t stream, const Fp8Attention& a) {
  int64_t bytes = 0;
  return a.empty() ? ffi::Error::Success() : FindGraph(stream, RecipeOf(a), &bytes);
}

ffi::Error Run(cudaStream_t stream, const Fp8Attention& a, const Arg& scales, GraphPointers pointers,
               Ret& workspace) {
  TE_CHECK(workspace->size_bytes() >= size_t(kScratch), "%s: the workspace has %zu bytes", a.op(),
           workspace->size_bytes());
  for (int64_t i = 0; i < int64_t(scales.element_count()); ++i)
    pointers[kScales + i] = static_cast<float*>(scales.untyped_data()) + i;
  auto* bytes = static_cast<char*>(workspace->untyped_data());
  if (!a.backward) pointers[kAmaxS] = bytes;
  return RunGraph(stream, RecipeOf(a), std::move(pointers), bytes + kScratch,
                  int64_t(workspace->size_bytes()) - kScratch);
}

// ---- te_attention_fp8_fwd ------------------------------------------------------------------------

ffi::Error DescribeForward(const Arg& q, const Arg& k, const Arg& v, const Arg& scales, Ret& out, Ret& lse,
                           Ret& amax, bool causal, double scale, Fp8Attention* a) {
  TE_TRY(Describe(q, k, v, scales, kForwardScales, causal, scale, a));
  TE_TRY(CheckArray(*a, "out", *out, ffi::F8E4M3FN, {a->b, a->s, a->h, a->d}));
  TE_TRY(CheckArray(*a, "lse", *lse, ffi::F32, {a->b, a->h, a->s}));
  TE_CHECK(a->t > 0 || !Present(lse), "%s: no key to attend to: t is 0", a->op());
  return CheckAmax(*a, *amax);
}

ffi::Error InitializeForward(cudaStream_t stream, Arg q, Arg k, Arg v, Arg scales, Ret out, Ret lse, Ret amax,
                             Ret workspace, bool causal, double scale) {
  Fp8Attention a;
  TE_TRY(DescribeForward(q, k, v, scales, out, lse, amax, causal, scale, &a));
  return Initialize(stream, a);
}

ffi::Error ExecuteForward(cudaStream_t stream, Arg q, Arg k, Arg v, Arg scales, Ret out, Ret lse, Ret amax,
                          Ret workspace, bool causal, double scale) {
  Fp8Attention a;
  TE_TRY(DescribeForward(q, k, v, scales, out, lse, amax, causal, scale, &a));
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
                            const Arg& lse, const Arg& scales, const Gradient& grad, bool causal,
                            double scale, Fp8Attention* a) {
  a->backward = true;
  TE_TRY(Describe(q, k, v, scales, kBackwardScales, causal, scale, a));
  const ffi::DataType type = dout.element_type();
  TE_CHECK(type == ffi::F8E4M3FN || type == ffi::F8E5M2, "%s: dout must be E4M3 or E5M2", a->op());
  a->e5m2 = type == ffi::F8E5M2;
  TE_TRY(CheckArray(*a, "dout", dout, type, {a->b, a->s, a->h, a->d}));
  TE_TRY(CheckArray(*a, "out", out, ffi::F8E4M3FN, {a->b, a->s, a->h, a->d}));
  TE_TRY(CheckArray(*a, "lse", lse, ffi::F32, {a->b, a->h, a->s}));
  TE_TRY(CheckArray(*a, "dq", grad.dq, type, {a->b, a->s, a->h, a->d}));
  TE_TRY(CheckArray(*a, "dk", grad.dk, type, {a->b, a->t, a->g, a->d}));
  TE_TRY(CheckArray(*a, "dv", grad.dv, type, {a->b, a->t, a->g, a->d}));
  for (const Arg* amax : {&grad.dq_amax, &grad.dk_amax, &grad.dv_amax, &grad.dp_amax})
    TE_TRY(CheckAmax(*a, *amax));
  return ffi::Error::Success();
}

ffi::Error InitializeBackward(cudaStream_t stream, Arg dout, Arg q, Arg k, Arg v, Arg out, Arg lse,
                              Arg scales, Ret dq, Ret dk, Ret dv, Ret dq_amax, Ret dk_amax, Ret dv_amax,
                              Ret dp_amax, Ret workspace, bool causal, double scale) {
  Fp8Attention a;
  const Gradient grad{*dq, *dk, *dv, *dq_amax, *dk_amax, *dv_amax, *dp_amax};
  TE_TRY(DescribeBackward(dout, q, k, v, out, lse, scales, grad, causal, scale, &a));
  return Initialize(stream, a);
}

ffi::Error ExecuteBackward(cudaStream_t stream, Arg dout, Arg q, Arg k, Arg v, Arg out, Arg lse, Arg scales,
                           Ret dq, Ret dk, Ret dv, Ret dq_amax, Ret dk_amax, Ret dv_amax, Ret dp_amax,
                           Ret workspace, bool causal, double scale) {
  Fp8Attention a;
  const Gradient grad{*dq, *dk, *dv, *dq_amax, *dk_amax, *dv_amax, *dp_amax};
  TE_TRY(DescribeBackward(dout, q, k, v, out, lse, scales, grad, causal, scale, &a));
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
  return kScratch + (a.empty() ? 0 : GraphWorkspace(RecipeOf(a)));
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
