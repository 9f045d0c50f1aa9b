#include "attention/attention_plan.h"

#include <cudnn_frontend.h>

#include <memory>
#include <vector>

namespace te {
namespace {

namespace fe = cudnn_frontend;
using GraphTensor = std::shared_ptr<fe::graph::Tensor_attributes>;
using fe::graph::Graph;
using fe::graph::Tensor_attributes;

constexpr const char* kJoined[] = {"", " of q, kv", " of qkv"};

std::string Text(const AttentionKey& key) {
  std::string text = Format("%s%s %s q[%ld, %ld, %ld, %ld], k[%ld, %ld, %ld, %ld], v[.., %ld], scale %a",
                            key.backward ? "te_attention_bwd" : "te_attention_fwd", kJoined[key.joined - 1],
                            key.bf16 ? "bf16" : "f16", long(key.b), long(key.s), long(key.h), long(key.d),
                            long(key.b), long(key.t), long(key.g), long(key.d), long(key.e), key.scale);
  if (key.interleaved) text += ", interleaved";
  if (key.seq_major) text += ", as [s, b, h, d]";
  if (key.segments) text += Format(", %ld segments a row", long(key.segments));
  if (key.left >= 0) text += Format(", left %ld", long(key.left));
  if (key.right >= 0) text += Format(", right %ld", long(key.right));
  if (key.bottom_right) text += ", bottom right";
  if (key.bias_b)
    text += Format(", bias %s[%ld, %ld]", key.bias_f32 ? "f32 " : "", long(key.bias_b), long(key.bias_h));
  if (key.dbias) text += ", dbias";
  if (key.dropout_rate > 0) text += Format(", dropout %a", key.dropout_rate);
  if (key.deterministic) text += ", deterministic";
  if (key.top) text += ", largest logits";
  return text;
}

// cuDNN names the axes [b, h, s, d]; the strides say how they lie in memory. `at`: the tensor of the
// sequences' offsets, where they are segments of rows.
struct Layout {
  std::vector<int64_t> dims, strides;
  AttentionTensor at;
};

// One of the `arrays` of [b, s, arrays, heads, d] or, interleaved, [b, s, heads, arrays, d]; or s before b.
Layout Rows(const AttentionKey& key, int64_t s, int64_t heads, int64_t d, AttentionTensor at,
            int64_t arrays = 1) {
  const int64_t token = arrays * heads * d, of_head = key.interleaved ? arrays * d : d;
  const int64_t of_row = key.seq_major ? token : s * token, of_token = key.seq_major ? key.b * token : token;
  return {{key.sequences(), heads, s, d}, {of_row, of_head, of_token, 1}, at};
}

struct Layouts {
  Layout q, k, v, out, lse, bias;

  explicit Layouts(const AttentionKey& key)
      : q(Rows(key, key.s, key.h, key.d, kQAt, key.arrays_of_q())),
        k(Rows(key, key.t, key.g, key.d, kKAt, key.arrays_of_k())),
        v(Rows(key, key.t, key.g, key.e, kVAt, key.arrays_of_k())),
        out(Rows(key, key.s, key.h, key.e, kOutAt)),
        lse{{key.sequences(), key.h, key.s, 1},
            {key.h * key.s, key.segments ? 1 : key.s, key.segments ? key.h : 1, 1},
            kLseAt},
        bias{{key.bias_b, key.bias_h, key.s, key.t},
             {key.bias_h * key.s * key.t, key.s * key.t, key.t, 1},
             {}} {}
};

// Builds the tensors of one graph.
class Builder {
 public:
  Builder(Graph& graph, const AttentionKey& key) : graph_(graph), key_(key), layouts_(key) {}

  GraphTensor Small(const char* name, AttentionTensor uid, int64_t size, fe::DataType_t type) {
    return graph_.tensor(Tensor_attributes()
                             .set_name(name)
                             .set_uid(uid)
                             .set_dim({size, 1, 1, 1})
                             .set_stride({1, 1, 1, 1})
                             .set_data_type(type));
  }

  GraphTensor Input(const char* name, AttentionTensor uid, const Layout& layout) {
    auto tensor = graph_.tensor(
        Tensor_attributes().set_name(name).set_uid(uid).set_dim(layout.dims).set_stride(layout.strides));
    return Describe(tensor, uid, layout);
  }

  void Output(const GraphTensor& tensor, AttentionTensor uid, const Layout& layout) {
    tensor->set_output(true).set_uid(uid).set_dim(layout.dims).set_stride(layout.strides);
    Describe(tensor, uid, layout);
  }

  // Masks, bias, and dropout: cuDNN draws with Philox, and draws the same again in the backward pass.
  template <typename Attributes>
  void SetOptions(Attributes& attributes) {
    attributes.set_attn_scale(key_.scale);
    if (key_.left >= 0 || key_.right >= 0)
      attributes.set_diagonal_alignment(key_.bottom_right ? fe::DiagonalAlignment_t::BOTTOM_RIGHT
                                                          : fe::DiagonalAlignment_t::TOP_LEFT);
    if (key_.left >= 0) attributes.set_diagonal_band_left_bound(int(key_.left) + 1);  // the first one hidden
    if (key_.right >= 0) attributes.set_diagonal_band_right_bound(int(key_.right));
    if (key_.segments)
      attributes.set_padding_mask(true)
          .set_seq_len_q(Small("q_lens", kQLens, key_.sequences(), fe::DataType_t::INT32))
          .set_seq_len_kv(Small("k_lens", kKLens, key_.sequences(), fe::DataType_t::INT32));
    if (key_.bias_b) attributes.set_bias(Input("bias", kBias, layouts_.bias));
    if (key_.dropout_rate > 0)  // compute capability 10.0 takes no INT32
      attributes.set_dropout(key_.dropout_rate, Small("seed", kSeed, 1, fe::DataType_t::INT64),
                             Small("offset", kOffset, 1, fe::DataType_t::INT64));
  }

  void Forward() {
    const GraphTensor q = Input("q", kQ, layouts_.q), k = Input("k", kK, layouts_.k),
                      v = Input("v", kV, layouts_.v);
    auto attributes = fe::graph::SDPA_attributes();
    attributes.set_name("te_attention_fwd").set_generate_stats(!key_.top);
    SetOptions(attributes);
    if (key_.top) {
      const GraphTensor top = Input("top", kTop, layouts_.lse), sum = Input("sum", kLse, layouts_.lse);
      top->set_output(true);
      sum->set_output(true);
      attributes.set_logit_max(top).set_score_sum_exp(sum);
    }
    const auto [out, lse] = graph_.sdpa(q, k, v, attributes);
    Output(out, kOut, layouts_.out);
    if (!key_.top) Output(lse, kLse, layouts_.lse);
  }

  // dk and dv have the g heads of k and v: cuDNN sums over the query heads of a group.
  void Backward() {
    const GraphTensor q = Input("q", kQ, layouts_.q), k = Input("k", kK, layouts_.k),
                      v = Input("v", kV, layouts_.v), out = Input("out", kOut, layouts_.out),
                      dout = Input("dout", kDOut, layouts_.out), lse = Input("lse", kLse, layouts_.lse);
    auto attributes = fe::graph::SDPA_backward_attributes();
    attributes.set_name("te_attention_bwd").set_deterministic_algorithm(key_.deterministic);
    SetOptions(attributes);
    if (key_.segments)
      attributes.set_max_total_seq_len_q(key_.b * key_.s).set_max_total_seq_len_kv(key_.b * key_.t);
    if (key_.dbias) {
      const GraphTensor dbias = Input("dbias", kDBias, layouts_.bias);
      dbias->set_output(true);
      attributes.set_dbias(dbias);
    }
    const auto [dq, dk, dv] = graph_.sdpa_backward(q, k, v, out, dout, lse, attributes);
    Output(dq, kDQ, layouts_.q);
    Output(dk, kDK, layouts_.k);
    Output(dv, kDV, layouts_.v);
  }

 private:
  GraphTensor Describe(const GraphTensor& tensor, AttentionTensor uid, const Layout& layout) {
    if (uid == kLse || uid == kTop || (uid == kBias && key_.bias_f32))
      tensor->set_data_type(fe::DataType_t::FLOAT);
    if (key_.segments && layout.at) tensor->set_ragged_offset(At(layout.at));
    return tensor;
  }

  // Gradients begin where what they are of does.
  GraphTensor At(AttentionTensor uid) {
    auto& at = at_[uid];
    if (!at) at = Small("offsets", uid, key_.sequences() + 1, fe::DataType_t::INT64);
    return at;
  }

  Graph& graph_;
  const AttentionKey& key_;
  const Layouts layouts_;
  std::unordered_map<int64_t, GraphTensor> at_;
};

}  // namespace

GraphRecipe AttentionRecipe(const AttentionKey& key) {
  return {Text(key), [key](Graph& graph) {
            graph.set_io_data_type(key.bf16 ? fe::DataType_t::BFLOAT16 : fe::DataType_t::HALF)
                .set_intermediate_data_type(fe::DataType_t::FLOAT)
                .set_compute_data_type(fe::DataType_t::FLOAT);
            Builder builder(graph, key);
            key.backward ? builder.Backward() : builder.Forward();
          }};
}

}  // namespace te
