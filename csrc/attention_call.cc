#include "attention_call.h"

#include <cmath>
#include <utility>

#include "attention_segments.h"

namespace te {
namespace {

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

ffi::Error SetJoined(Call* call, const Arg& q, const Arg& kv, bool interleaved) {
  const auto qd = q.dimensions(), kd = kv.dimensions();
  TE_CHECK(qd.size() == 4 && kd.size() == 5 && kd[0] == qd[0] && kd[2] == 2 && kd[4] == qd[3],
           "%s: q%s, kv%s must be [b, s, h, d], [b, t, 2, g, d]", call->op, Shape(q).c_str(),
           Shape(kv).c_str());
  TE_CHECK(kd[3] > 0 && qd[2] % kd[3] == 0, "%s: %ld query heads are no multiple of %ld key heads", call->op,
           long(qd[2]), long(kd[3]));
  TE_CHECK(kv.element_type() == q.element_type(), "%s: q and kv must both be bf16, or both f16", call->op);
  AttentionKey& key = call->key;
  key.joined = 2, key.interleaved = interleaved;
  key.b = qd[0], key.s = qd[1], key.t = kd[1], key.h = qd[2], key.g = kd[3], key.d = key.e = qd[3];
  call->dtype = q.element_type();
  call->pointers = {{kQ, q.untyped_data()}};
  for (int i = 0; i < 2; ++i) call->pointers[kK + i] = Part(kv.untyped_data(), key, i);
  return ffi::Error::Success();
}

ffi::Error SetJoined(Call* call, const Arg& qkv, bool interleaved) {
  const auto dims = qkv.dimensions();
  TE_CHECK(dims.size() == 5 && dims[2] == 3, "%s: qkv%s must be [b, s, 3, h, d]", call->op,
           Shape(qkv).c_str());
  AttentionKey& key = call->key;
  key.joined = 3, key.interleaved = interleaved;
  key.b = dims[0], key.s = key.t = dims[1], key.h = key.g = dims[3], key.d = key.e = dims[4];
  call->dtype = qkv.element_type();
  for (int i = 0; i < 3; ++i) call->pointers[kQ + i] = Part(qkv.untyped_data(), key, i);
  return ffi::Error::Success();
}

ffi::Error SetForward(Call* call, const Attributes& attributes, const Bias& bias, const Arg& segments,
                      const Arg& rng, Ret& out, Ret& lse) {
  TE_TRY(SetAttributes(call, attributes));
  TE_TRY(SetExtras(call, bias, segments, rng));
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

ffi::Error SetBackward(Call* call, const Attributes& attributes, const Bias& bias, const Arg& segments,
                       const Arg& rng, const Arg& dout, const Arg& out, const Arg& lse, Ret& dbias_bh,
                       Ret& dbias_b, Ret& dbias_h, Ret& dbias) {
  call->key.backward = true;
  TE_TRY(SetAttributes(call, attributes));
  TE_TRY(SetExtras(call, bias, segments, rng));
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
  const int64_t parts = tensor == kDQ ? call->key.parts_of_q() : call->key.parts_of_k();
  for (int i = 0; i < parts; ++i) call->pointers[tensor + i] = Part(gradient->untyped_data(), call->key, i);
  return ffi::Error::Success();
}

ffi::Error Build(cudaStream_t stream, const Call& call) {
  int64_t bytes = 0;
  return call.key.empty() ? ffi::Error::Success() : FindGraph(stream, AttentionRecipe(call.key), &bytes);
}

ffi::Error Run(cudaStream_t stream, Call& call, std::initializer_list<const Arg*> results, Ret& workspace) {
  const AttentionKey& key = call.key;
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

}  // namespace te
