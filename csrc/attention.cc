// te_attention_fwd, te_attention_bwd: softmax(scale * q k^T + bias, masked) v in bf16 or f16 through cuDNN
// (FlashAttention, arXiv:2205.14135); te_attention_kv_*, te_attention_packed_*: the same on k and v, or q, k
// and v, side by side in one array. The plans are built in the initialize stage; execution only looks them
// up.
#include <stdexcept>

#include "attention_call.h"
#include "attention_segments.h"
#include "module.h"

namespace te {
namespace {

// ---- the handlers, kRun: execute, else initialize ------------------------------------------------

template <bool kRun>
ffi::Error Forward(cudaStream_t stream, Arg q, Arg k, Arg v, Arg bias_bh, Arg bias_b, Arg bias_h, Arg bias,
                   Arg segments, Arg rng, Ret out, Ret lse, Ret drawn, Ret workspace, int64_t left,
                   int64_t right, bool bottom_right, bool seq_major, double scale, double dropout_rate) {
  Call call{"te_attention_fwd"};
  TE_TRY(SetOperands(&call, q, k, v));
  TE_TRY(SetForward(&call, {left, right, bottom_right, seq_major, scale, dropout_rate},
                    {{bias_bh, bias_b, bias_h, bias}, segments, rng}, {*out, *lse, *drawn, *workspace}));
  return kRun ? Run(stream, call, {&*out, &*lse}, *workspace) : Build(stream, call);
}

template <bool kRun>
ffi::Error KvForward(cudaStream_t stream, Arg q, Arg kv, Arg bias_bh, Arg bias_b, Arg bias_h, Arg bias,
                     Arg segments, Arg rng, Ret out, Ret lse, Ret drawn, Ret workspace, int64_t left,
                     int64_t right, bool bottom_right, bool seq_major, bool interleaved, double scale,
                     double dropout_rate) {
  Call call{"te_attention_kv_fwd"};
  TE_TRY(SetJoined(&call, q, kv, interleaved));
  TE_TRY(SetForward(&call, {left, right, bottom_right, seq_major, scale, dropout_rate},
                    {{bias_bh, bias_b, bias_h, bias}, segments, rng}, {*out, *lse, *drawn, *workspace}));
  return kRun ? Run(stream, call, {&*out, &*lse}, *workspace) : Build(stream, call);
}

template <bool kRun>
ffi::Error PackedForward(cudaStream_t stream, Arg qkv, Arg bias_bh, Arg bias_b, Arg bias_h, Arg bias,
                         Arg segments, Arg rng, Ret out, Ret lse, Ret drawn, Ret workspace, int64_t left,
                         int64_t right, bool bottom_right, bool seq_major, bool interleaved, double scale,
                         double dropout_rate) {
  Call call{"te_attention_packed_fwd"};
  TE_TRY(SetJoined(&call, qkv, interleaved));
  TE_TRY(SetForward(&call, {left, right, bottom_right, seq_major, scale, dropout_rate},
                    {{bias_bh, bias_b, bias_h, bias}, segments, rng}, {*out, *lse, *drawn, *workspace}));
  return kRun ? Run(stream, call, {&*out, &*lse}, *workspace) : Build(stream, call);
}

template <bool kRun>
ffi::Error Backward(cudaStream_t stream, Arg dout, Arg q, Arg k, Arg v, Arg bias_bh, Arg bias_b, Arg bias_h,
                    Arg bias, Arg segments, Arg out, Arg lse, Arg rng, Ret dq, Ret dk, Ret dv, Ret dbias_bh,
                    Ret dbias_b, Ret dbias_h, Ret dbias, Ret workspace, int64_t left, int64_t right,
                    bool bottom_right, bool seq_major, double scale, double dropout_rate,
                    bool deterministic) {
  Call call{"te_attention_bwd"};
  TE_TRY(SetOperands(&call, q, k, v));
  TE_TRY(SetBackward(&call, {left, right, bottom_right, seq_major, scale, dropout_rate, deterministic},
                     {{bias_bh, bias_b, bias_h, bias}, segments, rng},
                     {dout, out, lse, {*dbias_bh, *dbias_b, *dbias_h, *dbias}, *workspace}));
  TE_TRY(SetGradient(&call, "dq", kDQ, *dq, q));
  TE_TRY(SetGradient(&call, "dk", kDK, *dk, k));
  TE_TRY(SetGradient(&call, "dv", kDV, *dv, v));
  return kRun ? Run(stream, call, {&*dq, &*dk, &*dv, &*dbias_bh, &*dbias_b, &*dbias_h, &*dbias}, *workspace)
              : Build(stream, call);
}

template <bool kRun>
ffi::Error KvBackward(cudaStream_t stream, Arg dout, Arg q, Arg kv, Arg bias_bh, Arg bias_b, Arg bias_h,
                      Arg bias, Arg segments, Arg out, Arg lse, Arg rng, Ret dq, Ret dkv, Ret dbias_bh,
                      Ret dbias_b, Ret dbias_h, Ret dbias, Ret workspace, int64_t left, int64_t right,
                      bool bottom_right, bool seq_major, bool interleaved, double scale, double dropout_rate,
                      bool deterministic) {
  Call call{"te_attention_kv_bwd"};
  TE_TRY(SetJoined(&call, q, kv, interleaved));
  TE_TRY(SetBackward(&call, {left, right, bottom_right, seq_major, scale, dropout_rate, deterministic},
                     {{bias_bh, bias_b, bias_h, bias}, segments, rng},
                     {dout, out, lse, {*dbias_bh, *dbias_b, *dbias_h, *dbias}, *workspace}));
  TE_TRY(SetGradient(&call, "dq", kDQ, *dq, q));
  TE_TRY(SetGradient(&call, "dkv", kDK, *dkv, kv));
  return kRun ? Run(stream, call, {&*dq, &*dkv, &*dbias_bh, &*dbias_b, &*dbias_h, &*dbias}, *workspace)
              : Build(stream, call);
}

template <bool kRun>
ffi::Error PackedBackward(cudaStream_t stream, Arg dout, Arg qkv, Arg bias_bh, Arg bias_b, Arg bias_h,
                          Arg bias, Arg segments, Arg out, Arg lse, Arg rng, Ret dqkv, Ret dbias_bh,
                          Ret dbias_b, Ret dbias_h, Ret dbias, Ret workspace, int64_t left, int64_t right,
                          bool bottom_right, bool seq_major, bool interleaved, double scale,
                          double dropout_rate, bool deterministic) {
  Call call{"te_attention_packed_bwd"};
  TE_TRY(SetJoined(&call, qkv, interleaved));
  TE_TRY(SetBackward(&call, {left, right, bottom_right, seq_major, scale, dropout_rate, deterministic},
                     {{bias_bh, bias_b, bias_h, bias}, segments, rng},
                     {dout, out, lse, {*dbias_bh, *dbias_b, *dbias_h, *dbias}, *workspace}));
  TE_TRY(SetGradient(&call, "dqkv", kDQ, *dqkv, qkv));
  return kRun ? Run(stream, call, {&*dqkv, &*dbias_bh, &*dbias_b, &*dbias_h, &*dbias}, *workspace)
              : Build(stream, call);
}

}  // namespace

int64_t AttentionWorkspace(const std::string& kind, const std::string& dtype, int64_t b, int64_t s, int64_t t,
                           int64_t h, int64_t g, int64_t d, int64_t e, int64_t joined, bool interleaved,
                           bool seq_major, int64_t segments, int64_t left, int64_t right, bool bottom_right,
                           int64_t bias_b, int64_t bias_h, bool bias_f32, bool dbias, double scale,
                           double dropout_rate, bool deterministic) {
  if ((kind != "fwd" && kind != "bwd") || (dtype != "bf16" && dtype != "f16"))
    throw std::runtime_error("attention_workspace: kind must be fwd or bwd, dtype bf16 or f16, got " + kind +
                             ", " + dtype);
  AttentionKey key;
  key.backward = kind == "bwd";
  key.bf16 = dtype == "bf16";
  key.b = b, key.s = s, key.t = t, key.h = h, key.g = g, key.d = d, key.e = e;
  key.joined = joined, key.interleaved = interleaved, key.seq_major = seq_major, key.segments = segments;
  key.left = left, key.right = right, key.bottom_right = bottom_right;
  key.bias_b = bias_b, key.bias_h = bias_h, key.bias_f32 = bias_f32, key.dbias = key.backward && dbias;
  key.scale = float(scale), key.dropout_rate = float(dropout_rate);
  key.deterministic = key.backward && deterministic;
  if (key.empty()) return 0;
  return (GraphWorkspace(AttentionRecipe(key)) + 255) / 256 * 256 + SegmentBytes(key);
}

TE_HANDLER_INIT(
    te_attention_fwd, Forward<true>, Forward<false>,
    .Ctx<Stream>()
        .Arg<Arg>()  // q [b, s, h, d]
        .Arg<Arg>()  // k [b, t, g, d]
        .Arg<Arg>()  // v [b, t, g, e]
        .Arg<Arg>()  // bias_bh [b, h, s, t], absent as the next three: at most one is there
        .Arg<Arg>()  // bias_b [b, s, t]
        .Arg<Arg>()  // bias_h [h, s, t]
        .Arg<Arg>()  // bias [s, t]
        .Arg<Arg>()  // segments i32 [b, n, 4]; absent: rows are full
        .Arg<Arg>()  // rng u32 [b, h, 4], its first words are seed and offset, i64 each; absent: no dropout
        .Ret<Arg>()  // out [b, s, h, e]
        .Ret<Arg>()  // lse f32 [b, h, s], natural log; with segments [b, s, h] in that place
        .Ret<Arg>()  // drawn, absent: the caller makes it
        .Ret<Arg>()  // workspace, uint8
        .Attr<int64_t>("left")
        .Attr<int64_t>("right")
        .Attr<bool>("bottom_right")
        .Attr<bool>("seq_major")
        .Attr<double>("scale")
        .Attr<double>("dropout_rate"));

TE_HANDLER_INIT(te_attention_kv_fwd, KvForward<true>, KvForward<false>,
                .Ctx<Stream>()
                    .Arg<Arg>()  // q [b, s, h, d]
                    .Arg<Arg>()  // kv [b, t, 2, g, d]; interleaved: as [b, t, g, 2, d]
                    .Arg<Arg>()  // bias_bh, as above
                    .Arg<Arg>()  // bias_b
                    .Arg<Arg>()  // bias_h
                    .Arg<Arg>()  // bias
                    .Arg<Arg>()  // segments
                    .Arg<Arg>()  // rng
                    .Ret<Arg>()  // out [b, s, h, d]
                    .Ret<Arg>()  // lse
                    .Ret<Arg>()  // drawn, absent
                    .Ret<Arg>()  // workspace, uint8
                    .Attr<int64_t>("left")
                    .Attr<int64_t>("right")
                    .Attr<bool>("bottom_right")
                    .Attr<bool>("seq_major")
                    .Attr<bool>("interleaved")
                    .Attr<double>("scale")
                    .Attr<double>("dropout_rate"));

TE_HANDLER_INIT(te_attention_packed_fwd, PackedForward<true>, PackedForward<false>,
                .Ctx<Stream>()
                    .Arg<Arg>()  // qkv [b, s, 3, h, d]; interleaved: as [b, s, h, 3, d]
                    .Arg<Arg>()  // bias_bh, as above
                    .Arg<Arg>()  // bias_b
                    .Arg<Arg>()  // bias_h
                    .Arg<Arg>()  // bias
                    .Arg<Arg>()  // segments
                    .Arg<Arg>()  // rng
                    .Ret<Arg>()  // out [b, s, h, d]
                    .Ret<Arg>()  // lse
                    .Ret<Arg>()  // drawn, absent
                    .Ret<Arg>()  // workspace, uint8
                    .Attr<int64_t>("left")
                    .Attr<int64_t>("right")
                    .Attr<bool>("bottom_right")
                    .Attr<bool>("seq_major")
                    .Attr<bool>("interleaved")
                    .Attr<double>("scale")
                    .Attr<double>("dropout_rate"));

TE_HANDLER_INIT(te_attention_bwd, Backward<true>, Backward<false>,
                .Ctx<Stream>()
                    .Arg<Arg>()  // dout [b, s, h, e]
                    .Arg<Arg>()  // q
                    .Arg<Arg>()  // k
                    .Arg<Arg>()  // v
                    .Arg<Arg>()  // bias_bh
                    .Arg<Arg>()  // bias_b
                    .Arg<Arg>()  // bias_h
                    .Arg<Arg>()  // bias
                    .Arg<Arg>()  // segments
                    .Arg<Arg>()  // out
                    .Arg<Arg>()  // lse
                    .Arg<Arg>()  // rng
                    .Ret<Arg>()  // dq [b, s, h, d]
                    .Ret<Arg>()  // dk [b, t, g, d]
                    .Ret<Arg>()  // dv [b, t, g, e]
                    .Ret<Arg>()  // dbias_bh, of the bias that is there and of q's type, or absent
                    .Ret<Arg>()  // dbias_b
                    .Ret<Arg>()  // dbias_h
                    .Ret<Arg>()  // dbias
                    .Ret<Arg>()  // workspace, uint8
                    .Attr<int64_t>("left")
                    .Attr<int64_t>("right")
                    .Attr<bool>("bottom_right")
                    .Attr<bool>("seq_major")
                    .Attr<double>("scale")
                    .Attr<double>("dropout_rate")
                    .Attr<bool>("deterministic"));

TE_HANDLER_INIT(te_attention_kv_bwd, KvBackward<true>, KvBackward<false>,
                .Ctx<Stream>()
                    .Arg<Arg>()  // dout [b, s, h, d]
                    .Arg<Arg>()  // q
                    .Arg<Arg>()  // kv
                    .Arg<Arg>()  // bias_bh
                    .Arg<Arg>()  // bias_b
                    .Arg<Arg>()  // bias_h
                    .Arg<Arg>()  // bias
                    .Arg<Arg>()  // segments
                    .Arg<Arg>()  // out
                    .Arg<Arg>()  // lse
                    .Arg<Arg>()  // rng
                    .Ret<Arg>()  // dq
                    .Ret<Arg>()  // dkv, as kv
                    .Ret<Arg>()  // dbias_bh
                    .Ret<Arg>()  // dbias_b
                    .Ret<Arg>()  // dbias_h
                    .Ret<Arg>()  // dbias
                    .Ret<Arg>()  // workspace, uint8
                    .Attr<int64_t>("left")
                    .Attr<int64_t>("right")
                    .Attr<bool>("bottom_right")
                    .Attr<bool>("seq_major")
                    .Attr<bool>("interleaved")
                    .Attr<double>("scale")
                    .Attr<double>("dropout_rate")
                    .Attr<bool>("deterministic"));

TE_HANDLER_INIT(te_attention_packed_bwd, PackedBackward<true>, PackedBackward<false>,
                .Ctx<Stream>()
                    .Arg<Arg>()  // dout [b, s, h, d]
                    .Arg<Arg>()  // qkv
                    .Arg<Arg>()  // bias_bh
                    .Arg<Arg>()  // bias_b
                    .Arg<Arg>()  // bias_h
                    .Arg<Arg>()  // bias
                    .Arg<Arg>()  // segments
                    .Arg<Arg>()  // out
                    .Arg<Arg>()  // lse
                    .Arg<Arg>()  // rng
                    .Ret<Arg>()  // dqkv, as qkv
                    .Ret<Arg>()  // dbias_bh
                    .Ret<Arg>()  // dbias_b
                    .Ret<Arg>()  // dbias_h
                    .Ret<Arg>()  // dbias
                    .Ret<Arg>()  // workspace, uint8
                    .Attr<int64_t>("left")
                    .Attr<int64_t>("right")
                    .Attr<bool>("bottom_right")
                    .Attr<bool>("seq_major")
                    .Attr<bool>("interleaved")
                    .Attr<double>("scale")
                    .Attr<double>("dropout_rate")
                    .Attr<bool>("deterministic"));

}  // namespace te
