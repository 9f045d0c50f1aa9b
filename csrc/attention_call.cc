#include "attention_call.h"

#include <cmath>
#include <utility>

#include "attention_segments.h"

namespace te {
namespace {

ffi::Error SetAttributes(Call* call, const Attributes& a) {
  AttentionKey& key = call->key;
  TE_CHECK(std::isfinite(a.scale), "%s: scale is %g", call->op, a.scale);
  TE_CHECK(a.dropout_rate >= 0 && a.dropout_rate < 1, "%s: dropout_rate is %g", call->op, a.dropout_rate);
  key.bf16 = call->dtype == ffi::BF16;
  key.left = a.left, key.right = a.right, key.bottom_right = a.bottom_right, key.seq_major = a.seq_major;
  key.scale = float(a.scale), key.dropout_rate = float(a.dropout_rate);
  key.deterministic = key.backward && a.deterministic;
  return ffi::Error::Success();
}

// The four shapes of a bias, or of its gradient.
struct BiasAxes {
  Axes bh, b, h, none;
};

BiasAxes AxesOfBias(const AttentionKey& key) {
  const Axes logits{key.s, key.t};
  return {Axes{key.b, key.h} + logits, Axes{key.b} + logits, Axes{key.h} + logits, logits};
}

ffi::Error SetBias(Call* call, const Bias& bias) {
  AttentionKey& key = call->key;
  const Types types = Types(call->dtype) | ffi::F32;
  const BiasAxes axes = AxesOfBias(key);
  TE_TRY(Expect(call->op, {{"bias_bh", &bias.bh, types, axes.bh, kOptional},
                           {"bias_b", &bias.b, types, axes.b, kOptional},
                           {"bias_h", &bias.h, types, axes.h, kOptional},
                           {"bias", &bias.none, types, axes.none, kOptional}}));
  TE_CHECK(Present(bias.bh) + Present(bias.b) + Present(bias.h) + Present(bias.none) <= 1,
           "%s: more than one bias is there; pass the sum of them", call->op);
  const Arg& given = bias.given();
  if (!Present(given)) return ffi::Error::Success();
  key.bias_b = &given == &bias.bh || &given == &bias.b ? key.b : 1;
  key.bias_h = &given == &bias.bh || &given == &bias.h ? key.h : 1;
  key.bias_f32 = given.element_type() == ffi::F32;
  call->pointers[kBias] = given.untyped_data();
  return ffi::Error::Success();
}

ffi::Error SetExtras(Call* call, const Extras& extras) {
  TE_TRY(SetBias(call, extras.bias));
  AttentionKey& key = call->key;
  const bool drops = key.dropout_rate > 0 && !key.empty();
  TE_TRY(Expect(call->op,
                {{"segments", &extras.segments, ffi::S32, {key.b, Axes(extras.segments)[1], 4}, kOptional},
                 {"rng", &extras.rng, ffi::U32, {key.b, key.h, 4}, RequiredIf(drops)}}));
  if (Present(extras.segments)) {
    TE_CHECK(!key.seq_major, "%s: no segments in arrays [s, b, heads, d]", call->op);
    key.segments = Axes(extras.segments)[1];
    call->segments = static_cast<const int32_t*>(extras.segments.untyped_data());
  }
  if (drops) {
    call->pointers[kSeed] = extras.rng.untyped_data();
    call->pointers[kOffset] = static_cast<uint32_t*>(extras.rng.untyped_data()) + 2;
  }
  return ffi::Error::Success();
}

ffi::Error CheckHeads(const Call& call) {
  TE_CHECK(call.key.g > 0 && call.key.h % call.key.g == 0,
           "%s: %ld query heads are no multiple of %ld key heads", call.op, long(call.key.h),
           long(call.key.g));
  return ffi::Error::Success();
}

// The i-th part of what is joined.
void* Part(void* array, const AttentionKey& key, int i) {
  return static_cast<uint16_t*>(array) + i * (key.interleaved ? key.d : key.g * key.d);
}

// The rows of tokens of what the kernels write: they leave out what is in no segment.
ffi::Error FillOutside(cudaStream_t stream, const Call& call) {
  const AttentionKey& key = call.key;
  // heads [.., d] of 2 bytes, in an array of `parts`; interleaved heads lie apart
  const auto halves = [&](AttentionTensor tensor, int64_t heads, int64_t d, bool keys, int64_t parts = 1) {
    const bool apart = key.interleaved && parts > 1;
    return TokenRows{call.pointers.at(tensor), parts * heads * d / 2, (apart ? 1 : heads) * d / 2, keys,
                     apart ? heads : 1,        parts * d / 2};
  };
  if (!key.backward)
    return FillOutside(stream, key, call.segments,
                       {halves(kOut, key.h, key.e, false),
                        TokenRows{call.pointers.at(kLse), key.h, key.h, false, 1, 0, kMinusInfinity}});
  return FillOutside(
      stream, key, call.segments,
      {halves(kDQ, key.h, key.d, false, key.parts_of_q()), halves(kDK, key.g, key.d, true, key.parts_of_k()),
       halves(kDV, key.g, key.e, true, key.parts_of_k())});
}

}  // namespace

ffi::Error SetOperands(Call* call, const Arg& q, const Arg& k, const Arg& v) {
  const Axes q_axes(q), k_axes(k), v_axes(v);
  AttentionKey& key = call->key;
  key.b = q_axes[0], key.s = q_axes[1], key.h = q_axes[2], key.d = q_axes[3];
  key.t = k_axes[1], key.g = k_axes[2], key.e = v_axes[3];
  call->dtype = q.element_type();
  TE_TRY(Expect(call->op, {{"q", &q, kHalves, {key.b, key.s, key.h, key.d}},
                           {"k", &k, call->dtype, {key.b, key.t, key.g, key.d}},
                           {"v", &v, call->dtype, {key.b, key.t, key.g, key.e}}}));
  TE_TRY(CheckHeads(*call));
  call->pointers = {{kQ, q.untyped_data()}, {kK, k.untyped_data()}, {kV, v.untyped_data()}};
  return ffi::Error::Success();
}

ffi::Error SetJoined(Call* call, const Arg& q, const Arg& kv, bool interleaved) {
  const Axes q_axes(q), kv_axes(kv);
  AttentionKey& key = call->key;
  key.joined = 2, key.interleaved = interleaved;
  key.b = q_axes[0], key.s = q_axes[1], key.h = q_axes[2], key.d = key.e = q_axes[3];
  key.t = kv_axes[1], key.g = kv_axes[3];
  call->dtype = q.element_type();
  TE_TRY(Expect(call->op, {{"q", &q, kHalves, {key.b, key.s, key.h, key.d}},
                           {"kv", &kv, call->dtype, {key.b, key.t, 2, key.g, key.d}}}));
  TE_TRY(CheckHeads(*call));
  call->pointers = {{kQ, q.untyped_data()}};
  for (int i = 0; i < 2; ++i) call->pointers[kK + i] = Part(kv.untyped_data(), key, i);
  return ffi::Error::Success();
}

ffi::Error SetJoined(Call* call, const Arg& qkv, bool interleaved) {
  const Axes axes(qkv);
  AttentionKey& key = call->key;
  key.joined = 3, key.interleaved = interleaved;
  key.b = axes[0], key.s = key.t = axes[1], key.h = key.g = axes[3], key.d = key.e = axes[4];
  call->dtype = qkv.element_type();
  TE_TRY(Expect(call->op, {{"qkv", &qkv, kHalves, {key.b, key.s, 3, key.h, key.d}}}));
  for (int i = 0; i < 3; ++i) call->pointers[kQ + i] = Part(qkv.untyped_data(), key, i);
  return ffi::Error::Success();
}

ffi::Error SetForward(Call* call, const Attributes& attributes, const Extras& extras,
                      const Outputs& outputs) {
  TE_TRY(SetAttributes(call, attributes));
  TE_TRY(SetExtras(call, extras));
  const AttentionKey& key = call->key;
  TE_TRY(Expect(call->op, {{"out", &outputs.out, call->dtype, {key.b, key.s, key.h, key.e}},
                           {"lse", &outputs.lse, ffi::F32, {key.b, key.h, key.s}},
                           {"drawn", &outputs.drawn, ffi::U32, {}, kAbsent},
                           {"workspace", &outputs.workspace, ffi::U8, {Axes(outputs.workspace)[0]}}}));
  TE_CHECK(key.t > 0 || !Present(outputs.lse), "%s: no key to attend to: t is 0", call->op);
  call->pointers[kOut] = outputs.out.untyped_data(), call->pointers[kLse] = outputs.lse.untyped_data();
  return ffi::Error::Success();
}

ffi::Error SetBackward(Call* call, const Attributes& attributes, const Extras& extras,
                       const Backprop& backprop) {
  call->key.backward = true;
  TE_TRY(SetAttributes(call, attributes));
  TE_TRY(SetExtras(call, extras));
  AttentionKey& key = call->key;
  const ffi::DataType type = call->dtype;
  const Axes out{key.b, key.s, key.h, key.e};
  const Bias &of = extras.bias, &dbias = backprop.dbias;
  const BiasAxes axes = AxesOfBias(key);
  const auto if_there = [](const Arg& bias) { return Present(bias) ? kOptional : kAbsent; };
  TE_TRY(Expect(call->op, {{"dout", &backprop.dout, type, out},
                           {"out", &backprop.out, type, out},
                           {"lse", &backprop.lse, ffi::F32, {key.b, key.h, key.s}},
                           {"dbias_bh", &dbias.bh, type, axes.bh, if_there(of.bh)},
                           {"dbias_b", &dbias.b, type, axes.b, if_there(of.b)},
                           {"dbias_h", &dbias.h, type, axes.h, if_there(of.h)},
                           {"dbias", &dbias.none, type, axes.none, if_there(of.none)},
                           {"workspace", &backprop.workspace, ffi::U8, {Axes(backprop.workspace)[0]}}}));
  call->pointers[kDOut] = backprop.dout.untyped_data(), call->pointers[kOut] = backprop.out.untyped_data();
  call->pointers[kLse] = backprop.lse.untyped_data();
  if (const Arg& given = dbias.given(); Present(given)) {
    key.dbias = true;
    call->pointers[kDBias] = given.untyped_data();
  }
  return ffi::Error::Success();
}

ffi::Error SetGradient(Call* call, const char* name, AttentionTensor tensor, const Arg& gradient,
                       const Arg& operand) {
  TE_TRY(Expect(call->op, {{name, &gradient, operand.element_type(), Axes(operand)}}));
  const int64_t parts = tensor == kDQ ? call->key.parts_of_q() : call->key.parts_of_k();
  for (int i = 0; i < parts; ++i) call->pointers[tensor + i] = Part(gradient.untyped_data(), call->key, i);
  return ffi::Error::Success();
}

ffi::Error Build(cudaStream_t stream, const Call& call) {
  int64_t bytes = 0;
  return call.key.empty() ? ffi::Error::Success() : FindGraph(stream, AttentionRecipe(call.key), &bytes);
}

ffi::Error Run(cudaStream_t stream, Call& call, std::initializer_list<const Arg*> results,
               const Arg& workspace) {
  const AttentionKey& key = call.key;
  if (key.empty()) return Zero(stream, results);
  const int64_t bytes = (int64_t(workspace.size_bytes()) - SegmentBytes(key)) / 256 * 256;
  if (key.segments) {
    TE_CHECK(bytes >= 0, "%s: the workspace has %zu bytes", call.op, workspace.size_bytes());
    if (key.dbias)
      TE_CUDA(
          cudaMemsetAsync(call.pointers.at(kDBias), 0, key.bias_b * key.bias_h * key.s * key.t * 2, stream));
    TE_TRY(FillOutside(stream, call));
    TE_TRY(PutSegments(stream, key, call.segments, static_cast<char*>(workspace.untyped_data()) + bytes,
                       &call.pointers));
  }
  return RunGraph(stream, AttentionRecipe(key), std::move(call.pointers), workspace.untyped_data(), bytes);
}

}  // namespace te
