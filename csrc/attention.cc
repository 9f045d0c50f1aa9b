// te_attention_fwd, te_attention_bwd: softmax(scale * q k^T + bias, masked) v in bf16 or f16 through cuDNN
// (FlashAttention, arXiv:2205.14135); te_attention_packed_*: the same on q, k, v side by side in one array.
// The plans are built in the initialize stage; execution only looks them up.
#include <cmath>
#include <stdexcept>
#include <utility>

#include "attention_plan.h"
#include "attention_segments.h"
#include "module.h"

namespace te {
namespace {

// The masks and the dropout of a call.
struct Attributes {
  int64_t left, right;
  bool bottom_right, seq_major;
  double scale, dropout_rate;
  bool deterministic = false;  // backward
};

// Of the four shapes of a bias at most one is present: [b, h, s, t], [b, s, t], [h, s, t], [s, t].
struct Bias {
  const Arg &bh, &b, &h, &none;
  template <typename Fn>
  static auto& Pick(auto& bh, auto& b, auto& h, auto& none, Fn&& present) {
    return present(bh) ? bh : present(b) ? b : present(h) ? h : none;
  }
  const Arg& given() const {
    return Pick(bh, b, h, none, [](const Arg& a) { return Present(a); });
  }
};

// A call, its operands checked: what its plan depends on, and where its arrays are.
struct Call {
  const char* op;
  AttentionKey key = {};
  ffi::DataType dtype = ffi::BF16;
  GraphPointers pointers = {};
  const int32_t* segments = nullptr;
};

ffi::Error SetAttributes(Call* call, const Attributes& a) {
  AttentionKey& key = call->key;
  TE_CHECK(call->dtype == ffi::BF16 || call->dtype == ffi::F16, "%s: q, k and v must all be bf16, or all f16",
           call->op);
  TE_CHECK(std::isfinite(a.scale), "%s: scale is %g", call->op, a.scale);
  TE_CHECK(a.dropout_rate >= 0 && a.dropout_rate < 1, "%s: dropout_rate is %g", call->op, a.dropout_rate);
  key.bf16 = call->dtype == ffi::BF16;
  key.left = a.left, key.right = a.right, key.bottom_right = a.bottom_right, key.seq_major = a.seq_major;
  key.scale = float(a.scale), key.dropout_rate = float(a.dropout_rate);
  key.deterministic = key.backward && a.deterministic;
  return ffi::Error::Success();
}

// q [b, s, h, d], k [b, t, g, d], v [b, t, g, e].
ffi::Error SetOperands(Call* call, const Arg& q, const Arg& k, const Arg& v) {
  const auto qd = q.dimensions(), kd = k.dimensions(), vd = v.dimensions();
  TE_CHECK(qd.size() == 4 && kd.size() == 4 && vd.size() == 4, "%s: q%s, k%s, v%s must have 4 axes", call->op,
           Shape(q).c_str(), Shape(k).c_str(), Shape(v).c_str());
  TE_CHECK(kd[0] == qd[0] && vd[0] == qd[0] && kd[3] == qd[3] && vd[1] == kd[1] && vd[2] == kd[2],
           "%s: q%s, k%s, v%s do not match", call->op, Shape(q).c_str(), Shape(k).c_str(), Shape(v).c_str());
  TE_CHECK(kd[2] > 0 && qd[2] % kd[2] == 0, "%s: %ld query heads are no multiple of %ld key heads", call->op,
           long(qd[2]), long(kd[2]));
  TE_CHECK(k.element_type() == q.element_type() && v.element_type() == q.element_type(),
           "%s: q, k and v must all be bf16, or all f16", call->op);
  AttentionKey& key = call->key;
  key.b = qd[0], key.s = qd[1], key.t = kd[1], key.h = qd[2], key.g = kd[2], key.d = qd[3], key.e = vd[3];
  call->dtype = q.element_type();
  call->pointers = {{kQ, q.untyped_data()}, {kK, k.untyped_data()}, {kV, v.untyped_data()}};
  return ffi::Error::Success();
}

// q, k or v (0, 1, 2) inside of a packed array.
void* Part(void* packed, const AttentionKey& key, int i) {
  return static_cast<uint16_t*>(packed) + i * key.h * key.d;
}

// qkv [b, s, 3, h, d].
ffi::Error SetOperands(Call* call, const Arg& qkv) {
  const auto dims = qkv.dimensions();
  TE_CHECK(dims.size() == 5 && dims[2] == 3, "%s: qkv%s must be [b, s, 3, h, d]", call->op,
           Shape(qkv).c_str());
  AttentionKey& key = call->key;
  key.packed = true;
  key.b = dims[0], key.s = key.t = dims[1], key.h = key.g = dims[3], key.d = key.e = dims[4];
  call->dtype = qkv.element_type();
  for (int i = 0; i < 3; ++i) call->pointers[kQ + i] = Part(qkv.untyped_data(), key, i);
  return ffi::Error::Success();
}

ffi::Error SetExtras(Call* call, const Bias& bias, const Arg& segments, const Arg& rng) {
  AttentionKey& key = call->key;
  if (const Arg& given = bias.given(); Present(given)) {
    key.bias_b = &given == &bias.bh || &given == &bias.b ? key.b : 1;
    key.bias_h = &given == &bias.bh || &given == &bias.h ? key.h : 1;
    key.bias_f32 = given.element_type() == ffi::F32;
    TE_CHECK(key.bias_f32 || given.element_type() == call->dtype, "%s: the bias must be f32 or of q's type",
             call->op);
    TE_CHECK(int64_t(given.element_count()) == key.bias_b * key.bias_h * key.s * key.t,
             "%s: bias%s must be [%ld, %ld, %ld, %ld]", call->op, Shape(given).c_str(), long(key.bias_b),
             long(key.bias_h), long(key.s), long(key.t));
    call->pointers[kBias] = given.untyped_data();
  }
  if (Present(segments)) {
    const auto dims = segments.dimensions();
    TE_CHECK(dims.size() == 3 && dims[0] == key.b && dims[2] == 4 && segments.element_type() == ffi::S32,
             "%s: segments%s must be i32 [%ld, n, 4]", call->op, Shape(segments).c_str(), long(key.b));
    TE_CHECK(!key.seq_major, "%s: no segments in arrays [s, b, heads, d]", call->op);
    key.segments = dims[1];
    call->segments = static_cast<const int32_t*>(segments.untyped_data());
  }
  if (key.dropout_rate > 0 && !key.empty()) {
    TE_CHECK(rng.element_type() == ffi::U32 && rng.element_count() >= 4,
             "%s: dropout_rate is %g, but rng%s holds no u32 seed and offset", call->op, key.dropout_rate,
             Shape(rng).c_str());
    call->pointers[kSeed] = rng.untyped_data();
    call->pointers[kOffset] = static_cast<uint32_t*>(rng.untyped_data()) + 2;
  }
  return ffi::Error::Success();
}

ffi::Error SetForward(Call* call, Ret& out, Ret& lse) {
  const AttentionKey& key = call->key;
  const auto is = [](Ret& ret, std::initializer_list<int64_t> dims) {
    const auto got = ret->dimensions();
    return std::equal(got.begin(), got.end(), dims.begin(), dims.end());
  };
  TE_CHECK(is(out, {key.b, key.s, key.h, key.e}) && out->element_type() == call->dtype,
           "%s: out must be [%ld, %ld, %ld, %ld] of q's type", call->op, long(key.b), long(key.s),
           long(key.h), long(key.e));
  TE_CHECK(is(lse, {key.b, key.h, key.s}) && lse->element_type() == ffi::F32,
           "%s: lse must be f32 [%ld, %ld, %ld]", call->op, long(key.b), long(key.h), long(key.s));
  TE_CHECK(key.t > 0 || !Present(lse), "%s: no key to attend to: t is 0", call->op);
  call->pointers[kOut] = out->untyped_data(), call->pointers[kLse] = lse->untyped_data();
  return ffi::Error::Success();
}

ffi::Error SetBackward(Call* call, const Arg& dout, const Arg& out, const Arg& lse, const Bias& bias,
                       Ret& dbias_bh, Ret& dbias_b, Ret& dbias_h, Ret& dbias) {
  AttentionKey& key = call->key;
  const size_t elements = size_t(key.b * key.s * key.h * key.e);
  for (const Arg* a : {&dout, &out})
    TE_CHECK(a->element_count() == elements && a->element_type() == call->dtype,
             "%s: out and dout must be [%ld, %ld, %ld, %ld] of q's type, one is %s", call->op, long(key.b),
             long(key.s), long(key.h), long(key.e), Shape(*a).c_str());
  TE_CHECK(lse.element_count() == size_t(key.b * key.h * key.s) && lse.element_type() == ffi::F32,
           "%s: lse%s must be f32 [%ld, %ld, %ld]", call->op, Shape(lse).c_str(), long(key.b), long(key.h),
           long(key.s));
  call->pointers[kDOut] = dout.untyped_data(), call->pointers[kOut] = out.untyped_data();
  call->pointers[kLse] = lse.untyped_data();
  if (Ret& given = Bias::Pick(dbias_bh, dbias_b, dbias_h, dbias, [](Ret& r) { return Present(r); });
      Present(given)) {
    const Arg& of = bias.given();
    TE_CHECK(given->element_count() == of.element_count() && given->element_type() == call->dtype,
             "%s: the gradient of the bias %s must be of its shape and q's type", call->op,
             Shape(of).c_str());
    key.dbias = true;
    call->pointers[kDBias] = given->untyped_data();
  }
  return ffi::Error::Success();
}

ffi::Error SetGradient(Call* call, AttentionTensor tensor, Ret& gradient, const Arg& operand) {
  TE_CHECK(gradient->size_bytes() == operand.size_bytes(), "%s: the gradient of an operand %s has %zu bytes",
           call->op, Shape(operand).c_str(), gradient->size_bytes());
  call->pointers[tensor] = gradient->untyped_data();
  return ffi::Error::Success();
}

// The rows of tokens of what the kernels write: they leave out what is in no segment.
ffi::Error FillOutside(cudaStream_t stream, const Call& call) {
  const AttentionKey& key = call.key;
  const int64_t parts = key.packed ? 3 : 1;
  const auto halves = [&](AttentionTensor tensor, int64_t elements, bool keys, int64_t of = 1) {
    return TokenRows{call.pointers.at(tensor), of * elements / 2, elements / 2, keys};  // 2 bytes each
  };
  if (!key.backward)
    return FillOutside(stream, key, call.segments,
                       {halves(kOut, key.h * key.e, false),
                        TokenRows{call.pointers.at(kLse), key.h, key.h, false, kMinusInfinity}});
  return FillOutside(stream, key, call.segments,
                     {halves(kDQ, key.h * key.d, false, parts), halves(kDK, key.g * key.d, true, parts),
                      halves(kDV, key.g * key.e, true, parts)});
}

// The stages: builds the plan, or runs it.
template <bool kRun>
ffi::Error Finish(cudaStream_t stream, Call& call, std::initializer_list<const Arg*> results,
                  Ret& workspace) {
  const AttentionKey& key = call.key;
  if constexpr (!kRun) {
    int64_t bytes = 0;
    return key.empty() ? ffi::Error::Success() : FindGraph(stream, AttentionRecipe(key), &bytes);
  }
  if (key.empty()) return Zero(stream, results);
  const int64_t bytes = (int64_t(workspace->size_bytes()) - SegmentBytes(key)) / 256 * 256;
  if (key.segments) {
    TE_CHECK(bytes >= 0, "%s: the workspace has %zu bytes", call.op, workspace->size_bytes());
    if (key.dbias)
      TE_CUDA(
          cudaMemsetAsync(call.pointers.at(kDBias), 0, key.bias_b * key.bias_h * key.s * key.t * 2, stream));
    TE_TRY(FillOutside(stream, call));
    TE_TRY(PutSegments(stream, key, call.segments, static_cast<char*>(workspace->untyped_data()) + bytes,
                       &call.pointers));
  }
  return RunGraph(stream, AttentionRecipe(key), std::move(call.pointers), workspace->untyped_data(), bytes);
}

// ---- the handlers, kRun: execute, else initialize ------------------------------------------------

template <bool kRun>
ffi::Error Forward(cudaStream_t stream, Arg q, Arg k, Arg v, Arg bias_bh, Arg bias_b, Arg bias_h, Arg bias,
                   Arg segments, Arg rng, Ret out, Ret lse, Ret drawn, Ret workspace, int64_t left,
                   int64_t right, bool bottom_right, bool seq_major, double scale, double dropout_rate) {
  Call call{"te_attention_fwd"};
  TE_TRY(SetOperands(&call, q, k, v));
  TE_TRY(SetAttributes(&call, {left, right, bottom_right, seq_major, scale, dropout_rate}));
  TE_TRY(SetExtras(&call, {bias_bh, bias_b, bias_h, bias}, segments, rng));
  TE_TRY(SetForward(&call, out, lse));
  return Finish<kRun>(stream, call, {&*out, &*lse}, workspace);
}

template <bool kRun>
ffi::Error PackedForward(cudaStream_t stream, Arg qkv, Arg bias_bh, Arg bias_b, Arg bias_h, Arg bias,
                         Arg segments, Arg rng, Ret out, Ret lse, Ret drawn, Ret workspace, int64_t left,
                         int64_t right, bool bottom_right, bool seq_major, double scale,
                         double dropout_rate) {
  Call call{"te_attention_packed_fwd"};
  TE_TRY(SetOperands(&call, qkv));
  TE_TRY(SetAttributes(&call, {left, right, bottom_right, seq_major, scale, dropout_rate}));
  TE_TRY(SetExtras(&call, {bias_bh, bias_b, bias_h, bias}, segments, rng));
  TE_TRY(SetForward(&call, out, lse));
  return Finish<kRun>(stream, call, {&*out, &*lse}, workspace);
}

template <bool kRun>
ffi::Error Backward(cudaStream_t stream, Arg dout, Arg q, Arg k, Arg v, Arg bias_bh, Arg bias_b, Arg bias_h,
                    Arg bias, Arg segments, Arg out, Arg lse, Arg rng, Ret dq, Ret dk, Ret dv, Ret dbias_bh,
                    Ret dbias_b, Ret dbias_h, Ret dbias, Ret workspace, int64_t left, int64_t right,
                    bool bottom_right, bool seq_major, double scale, double dropout_rate,
                    bool deterministic) {
  Call call{"te_attention_bwd"};
  call.key.backward = true;
  TE_TRY(SetOperands(&call, q, k, v));
  TE_TRY(SetAttributes(&call, {left, right, bottom_right, seq_major, scale, dropout_rate, deterministic}));
  TE_TRY(SetExtras(&call, {bias_bh, bias_b, bias_h, bias}, segments, rng));
  TE_TRY(
      SetBackward(&call, dout, out, lse, {bias_bh, bias_b, bias_h, bias}, dbias_bh, dbias_b, dbias_h, dbias));
  TE_TRY(SetGradient(&call, kDQ, dq, q));
  TE_TRY(SetGradient(&call, kDK, dk, k));
  TE_TRY(SetGradient(&call, kDV, dv, v));
  return Finish<kRun>(stream, call, {&*dq, &*dk, &*dv, &*dbias_bh, &*dbias_b, &*dbias_h, &*dbias}, workspace);
}

template <bool kRun>
ffi::Error PackedBackward(cudaStream_t stream, Arg dout, Arg qkv, Arg bias_bh, Arg bias_b, Arg bias_h,
                          Arg bias, Arg segments, Arg out, Arg lse, Arg rng, Ret dqkv, Ret dbias_bh,
                          Ret dbias_b, Ret dbias_h, Ret dbias, Ret workspace, int64_t left, int64_t right,
                          bool bottom_right, bool seq_major, double scale, double dropout_rate,
                          bool deterministic) {
  Call call{"te_attention_packed_bwd"};
  call.key.backward = true;
  TE_TRY(SetOperands(&call, qkv));
  TE_TRY(SetAttributes(&call, {left, right, bottom_right, seq_major, scale, dropout_rate, deterministic}));
  TE_TRY(SetExtras(&call, {bias_bh, bias_b, bias_h, bias}, segments, rng));
  TE_TRY(
      SetBackward(&call, dout, out, lse, {bias_bh, bias_b, bias_h, bias}, dbias_bh, dbias_b, dbias_h, dbias));
  TE_TRY(SetGradient(&call, kDQ, dqkv, qkv));
  for (int i = 0; i < 3; ++i) call.pointers[kDQ + i] = Part(dqkv->untyped_data(), call.key, i);
  return Finish<kRun>(stream, call, {&*dqkv, &*dbias_bh, &*dbias_b, &*dbias_h, &*dbias}, workspace);
}

}  // namespace

int64_t AttentionWorkspace(const std::string& kind, const std::string& dtype, int64_t b, int64_t s, int64_t t,
                           int64_t h, int64_t g, int64_t d, int64_t e, bool packed, bool seq_major,
                           int64_t segments, int64_t left, int64_t right, bool bottom_right, int64_t bias_b,
                           int64_t bias_h, bool bias_f32, bool dbias, double scale, double dropout_rate,
                           bool deterministic) {
  if ((kind != "fwd" && kind != "bwd") || (dtype != "bf16" && dtype != "f16"))
    throw std::runtime_error("attention_workspace: kind must be fwd or bwd, dtype bf16 or f16, got " + kind +
                             ", " + dtype);
  AttentionKey key;
  key.backward = kind == "bwd";
  key.bf16 = dtype == "bf16";
  key.b = b, key.s = s, key.t = t, key.h = h, key.g = g, key.d = d, key.e = e;
  key.packed = packed, key.seq_major = seq_major, key.segments = segments;
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

TE_HANDLER_INIT(te_attention_packed_fwd, PackedForward<true>, PackedForward<false>,
                .Ctx<Stream>()
                    .Arg<Arg>()  // qkv [b, s, 3, h, d]
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
                    .Ret<Arg>()  // dqkv [b, s, 3, h, d]
                    .Ret<Arg>()  // dbias_bh
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

}  // namespace te
