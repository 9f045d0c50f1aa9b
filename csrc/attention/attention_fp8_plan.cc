#include "attention/attention_fp8_plan.h"

#include <cudnn_frontend.h>

#include <memory>
#include <vector>

namespace te {
namespace {

namespace fe = cudnn_frontend;
using namespace fp8;
using GraphTensor = std::shared_ptr<fe::graph::Tensor_attributes>;

// cuDNN names the axes [b, h, s, d]; the strides say that they lie as [b, s, h, d], h of `line` heads.
struct Layout {
  std::vector<int64_t> dims, strides;
};
Layout Bshd(int64_t b, int64_t s, int64_t h, int64_t line, int64_t d) {
  return {{b, h, s, d}, {s * line * d, d, line * d, 1}};
}
Layout Queries(const Fp8Attention& a) { return Bshd(a.b, a.s, a.h, a.line_h, a.d); }
Layout Keys(const Fp8Attention& a) { return Bshd(a.b, a.t, a.g, a.line_g, a.d); }
Layout Lse(const Fp8Attention& a) { return {{a.b, a.h, a.s, 1}, {a.line_h * a.s, a.s, 1, 1}}; }
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

}  // namespace

GraphRecipe Fp8AttentionRecipe(const Fp8Attention& a) {
  return {Format("%s%s q[%ld, %ld, %ld of %ld, %ld], k and v[%ld, %ld, %ld of %ld, %ld], scale %a%s", a.op(),
                 a.backward ? (a.e5m2 ? " e5m2" : " e4m3") : "", long(a.b), long(a.s), long(a.h),
                 long(a.line_h), long(a.d), long(a.b), long(a.t), long(a.g), long(a.line_g), long(a.d),
                 double(a.scale), a.causal ? ", causal" : ""),
          [a](fe::graph::Graph& graph) {
            Adder adder(graph, a);
            a.backward ? adder.Backward() : adder.Forward();
          }};
}

}  // namespace te
