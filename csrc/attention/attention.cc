// te_attention_fwd, te_attention_bwd: softmax(scale * q k^T + bias, masked) v in bf16 or f16 through cuDNN
// (FlashAttention, arXiv:2205.14135).
#include <cmath>
#include <stdexcept>
#include <utility>

#include "attention/attention_segments.h"
#include "base/check.h"
#include "base/module.h"
#include "base/ops.h"

namespace te {
namespace {

// q, k and v; or q and kv; or qkv. Or their gradients.
struct Arrays {
  const Tensor &q, &k, &v, &kv, &qkv;
};

// What both ops have next to these arrays: masks, dropout, and the operands for them.
struct Options {
  const Tensor &bias, &segments, &rng;
  int64_t left, right;
  bool bottom_right, seq_major, interleaved;
  double scale, dropout_rate;
  bool deterministic = false;  // backward
};

// A call, its arrays checked: what its plan depends on, and where its arrays are.
struct Call {
  const char* op;
  AttentionKey key = {};
  Type type = BF16;
  GraphPointers pointers = {};
  const int32_t* segments = nullptr;
};

// The sizes, and which arrays are there, as the shapes say.
void SetSizes(Call* call, const Arrays& a, bool interleaved) {
  AttentionKey& key = call->key;
  key.joined = a.qkv.rank == 5 ? 3 : a.kv.rank == 5 ? 2 : 1;
  key.interleaved = interleaved && key.joined > 1;
  const Tensor& queries = key.joined == 3 ? a.qkv : a.q;
  const Axes q(queries), k(key.joined == 3 ? a.qkv : key.joined == 2 ? a.kv : a.k);
  const int64_t heads = key.joined == 3 ? 3 : 2, groups = key.joined > 1 ? 3 : 2;  // axes of q, of k
  key.b = q[0], key.s = q[1], key.h = q[heads], key.d = q[heads + 1];
  key.t = k[1], key.g = k[groups], key.e = key.joined > 1 ? key.d : Axes(a.v)[3];
  call->type = queries.type;
}

// q, k and v, or, with `first` kDQ, their gradients: their shapes, and where each begins.
Status SetArrays(Call* call, AttentionTensor first, const char* const (&names)[5], const Arrays& a) {
  const AttentionKey& key = call->key;
  const auto needed = [](bool is_there) { return is_there ? kRequired : kAbsent; };
  const bool apart = key.joined == 1, qkv = key.joined == 3;
  const Types halves = first == kQ ? kHalves : Types(call->type);
  TE_TRY(
      Expect(call->op, {{names[0], a.q, halves, {key.b, key.s, key.h, key.d}, needed(!qkv)},
                        {names[1], a.k, call->type, {key.b, key.t, key.g, key.d}, needed(apart)},
                        {names[2], a.v, call->type, {key.b, key.t, key.g, key.e}, needed(apart)},
                        {names[3], a.kv, call->type, {key.b, key.t, 2, key.g, key.d}, needed(!apart && !qkv)},
                        {names[4], a.qkv, halves, {key.b, key.s, 3, key.h, key.d}, needed(qkv)}}));
  const auto place = [&](const Tensor& array, int64_t i) -> void* {
    return static_cast<uint16_t*>(array.data) + i * (key.interleaved ? key.d : key.g * key.d);
  };
  const Tensor& joined = qkv ? a.qkv : a.kv;
  call->pointers[first] = qkv ? a.qkv.data : a.q.data;
  call->pointers[first + 1] = apart ? a.k.data : place(joined, key.joined - 2);
  call->pointers[first + 2] = apart ? a.v.data : place(joined, key.joined - 1);
  return {};
}

// A bias [b or 1, h or 1, s, t].
Status SetBias(Call* call, const Tensor& bias) {
  if (!Present(bias)) return {};
  AttentionKey& key = call->key;
  const Axes axes(bias);
  key.bias_b = axes[0] == 1 ? 1 : key.b, key.bias_h = axes[1] == 1 ? 1 : key.h;
  key.bias_f32 = bias.type == F32;
  call->pointers[kBias] = bias.data;
  return Expect(call->op, {{"bias", bias, Types(call->type) | F32, key.bias_axes(), kOptional}});
}

Status SetOptions(Call* call, const Options& o) {
  AttentionKey& key = call->key;
  TE_CHECK(std::isfinite(o.scale), "%s: scale is %g", call->op, o.scale);
  TE_CHECK(o.dropout_rate >= 0 && o.dropout_rate < 1, "%s: dropout_rate is %g", call->op, o.dropout_rate);
  key.bf16 = call->type == BF16;
  key.left = o.left, key.right = o.right, key.bottom_right = o.bottom_right;
  key.seq_major = o.seq_major;
  key.scale = float(o.scale), key.dropout_rate = float(o.dropout_rate);
  key.deterministic = o.deterministic;
  TE_TRY(SetBias(call, o.bias));
  const bool drops = key.dropout_rate > 0 && !key.empty();
  TE_TRY(Expect(call->op, {{"segments", o.segments, S32, {key.b, Axes(o.segments)[1], 4}, kOptional},
                           {"rng", o.rng, U32, {key.b, key.h, 4}, RequiredIf(drops)}}));
  if (Present(o.segments)) {
    TE_CHECK(!key.seq_major, "%s: no segments in arrays [s, b, heads, d]", call->op);
    key.segments = Axes(o.segments)[1];
    call->segments = static_cast<const int32_t*>(o.segments.data);
  }
  if (drops) {
    call->pointers[kSeed] = o.rng.data;
    call->pointers[kOffset] = static_cast<uint32_t*>(o.rng.data) + 2;
  }
  return {};
}

// All that both ops have.
Status Describe(Call* call, const Arrays& arrays, const Options& options) {
  SetSizes(call, arrays, options.interleaved);
  TE_TRY(SetArrays(call, kQ, {"q", "k", "v", "kv", "qkv"}, arrays));
  TE_CHECK(call->key.g > 0 && call->key.h % call->key.g == 0,
           "%s: %ld query heads are no multiple of %ld key heads", call->op, long(call->key.h),
           long(call->key.g));
  return SetOptions(call, options);
}

// The rows of tokens of what the kernels write: they leave out what is in no segment.
Status FillOutside(cudaStream_t stream, const Call& call) {
  const AttentionKey& key = call.key;
  // heads [.., d] of 2 bytes, in an array of `arrays`; interleaved heads lie apart
  const auto halves = [&](AttentionTensor tensor, int64_t heads, int64_t d, bool keys, int64_t arrays = 1) {
    const bool apart = key.interleaved && arrays > 1;
    return TokenRows{call.pointers.at(tensor), arrays * heads * d / 2, (apart ? 1 : heads) * d / 2, keys,
                     apart ? heads : 1,        arrays * d / 2};
  };
  const auto heads = [&](AttentionTensor tensor, uint32_t fill) {
    return TokenRows{call.pointers.at(tensor), key.h, key.h, false, 1, 0, fill};
  };
  const TokenRows out = key.backward ? TokenRows{} : halves(kOut, key.h, key.e, false);
  if (key.top)  // a sum of 0: its logarithm is -inf
    return FillOutside(stream, key, call.segments, {out, heads(kLse, 0), heads(kTop, kMinusInfinity)});
  if (!key.backward) return FillOutside(stream, key, call.segments, {out, heads(kLse, kMinusInfinity)});
  return FillOutside(stream, key, call.segments,
                     {halves(kDQ, key.h, key.d, false, key.arrays_of_q()),
                      halves(kDK, key.g, key.d, true, key.arrays_of_k()),
                      halves(kDV, key.g, key.e, true, key.arrays_of_k())});
}

// results: all but the workspace.
Status Run(Stage stage, cudaStream_t stream, Call& call, std::initializer_list<Tensor> results,
           const Tensor& workspace) {
  const AttentionKey& key = call.key;
  const GraphRecipe recipe = AttentionRecipe(key);
  if (key.empty()) return stage == Stage::kExecute ? Zero(stream, results) : Status{};
  if (stage == Stage::kInitialize) return FindGraph(stream, recipe);
  const int64_t bytes = (workspace.bytes() - SegmentBytes(key)) / 256 * 256;
  if (key.segments) {
    TE_CHECK(bytes >= 0, "%s: the workspace has %ld bytes", call.op, long(workspace.bytes()));
    if (key.dbias) TE_CUDA(cudaMemsetAsync(call.pointers.at(kDBias), 0, 2 * key.bias_axes().count(), stream));
    TE_TRY(FillOutside(stream, call));
    TE_TRY(
        PutSegments(stream, key, call.segments, static_cast<char*>(workspace.data) + bytes, &call.pointers));
  }
  return RunGraph(stream, recipe, std::move(call.pointers), workspace.data, bytes);
}

}  // namespace

Status LaunchAttentionFwd(Stage stage, cudaStream_t stream, Arg q, Arg k, Arg v, Arg kv, Arg qkv, Arg bias,
                          Arg segments, Arg rng, Ret out, Ret lse, Ret drawn, Ret top, Ret workspace,
                          int64_t left, int64_t right, bool bottom_right, bool seq_major, bool interleaved,
                          double scale, double dropout_rate) {
  Call call{"te_attention_fwd"};
  TE_TRY(Describe(
      &call, {q, k, v, kv, qkv},
      {bias, segments, rng, left, right, bottom_right, seq_major, interleaved, scale, dropout_rate}));
  AttentionKey& key = call.key;
  TE_TRY(Expect(call.op, {{"out", out, call.type, key.out_axes()},
                          {"lse", lse, F32, key.lse_axes()},
                          {"drawn", drawn, U32, {}, kAbsent},
                          {"top", top, F32, key.lse_axes(), kOptional},
                          {"workspace", workspace, U8, {Axes(workspace)[0]}}}));
  key.top = Present(top);
  TE_CHECK(key.t > 0 || !Present(lse), "%s: no key to attend to: t is 0", call.op);
  call.pointers[kOut] = out.data, call.pointers[kLse] = lse.data;
  if (key.top) call.pointers[kTop] = top.data;
  return Run(stage, stream, call, {out, lse, top}, workspace);
}

Status LaunchAttentionBwd(Stage stage, cudaStream_t stream, Arg dout, Arg q, Arg k, Arg v, Arg kv, Arg qkv,
                          Arg bias, Arg segments, Arg out, Arg lse, Arg rng, Ret dq, Ret dk, Ret dv, Ret dkv,
                          Ret dqkv, Ret dbias, Ret workspace, int64_t left, int64_t right, bool bottom_right,
                          bool seq_major, bool interleaved, double scale, double dropout_rate,
                          bool deterministic) {
  Call call{"te_attention_bwd"};
  AttentionKey& key = call.key;
  key.backward = true;
  TE_TRY(Describe(&call, {q, k, v, kv, qkv},
                  {bias, segments, rng, left, right, bottom_right, seq_major, interleaved, scale,
                   dropout_rate, deterministic}));
  TE_TRY(SetArrays(&call, kDQ, {"dq", "dk", "dv", "dkv", "dqkv"}, {dq, dk, dv, dkv, dqkv}));
  TE_TRY(Expect(call.op, {{"dout", dout, call.type, key.out_axes()},
                          {"out", out, call.type, key.out_axes()},
                          {"lse", lse, F32, key.lse_axes()},
                          {"dbias", dbias, call.type, key.bias_axes(), AbsentIf(!key.bias_b)},
                          {"workspace", workspace, U8, {Axes(workspace)[0]}}}));
  key.dbias = Present(dbias);
  call.pointers[kDOut] = dout.data, call.pointers[kOut] = out.data, call.pointers[kLse] = lse.data;
  if (key.dbias) call.pointers[kDBias] = dbias.data;
  return Run(stage, stream, call, {dq, dk, dv, dkv, dqkv, dbias}, workspace);
}

int64_t AttentionWorkspace(const std::string& kind, const std::string& dtype, int64_t b, int64_t s, int64_t t,
                           int64_t h, int64_t g, int64_t d, int64_t e, int64_t joined, bool interleaved,
                           bool seq_major, int64_t segments, int64_t left, int64_t right, bool bottom_right,
                           int64_t bias_b, int64_t bias_h, bool bias_f32, bool dbias, double scale,
                           double dropout_rate, bool deterministic, bool top) {
  if ((kind != "fwd" && kind != "bwd") || (dtype != "bf16" && dtype != "f16"))
    throw std::runtime_error("attention_workspace: kind must be fwd or bwd, dtype bf16 or f16, got " + kind +
                             ", " + dtype);
  AttentionKey key;
  key.backward = kind == "bwd";
  key.bf16 = dtype == "bf16";
  key.b = b, key.s = s, key.t = t, key.h = h, key.g = g, key.d = d, key.e = e;
  key.joined = joined, key.interleaved = interleaved && joined > 1, key.seq_major = seq_major;
  key.segments = segments, key.left = left, key.right = right, key.bottom_right = bottom_right;
  key.bias_b = bias_b, key.bias_h = bias_h, key.bias_f32 = bias_f32, key.dbias = key.backward && dbias;
  key.scale = float(scale), key.dropout_rate = float(dropout_rate);
  key.deterministic = key.backward && deterministic;
  key.top = !key.backward && top;
  if (key.empty()) return 0;
  return (GraphWorkspace(AttentionRecipe(key)) + 255) / 256 * 256 + SegmentBytes(key);
}

}  // namespace te
