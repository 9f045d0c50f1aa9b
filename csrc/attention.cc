// te_attention_fwd, te_attention_bwd: softmax(scale * q k^T) v in bf16 or f16 through cuDNN (FlashAttention,
// arXiv:2205.14135); te_attention_packed_*: the same on q, k, v side by side in one array. The plans are
// built in the initialize stage; execution only looks them up.
#include <cmath>
#include <stdexcept>
#include <thread>
#include <utility>

#include "attention_plan.h"
#include "common.h"
#include "module.h"

namespace te {
namespace {

// What the handlers share of an operation's name, operands and attributes: all checks, and the key.

struct Attributes {
  bool causal;
  double scale, dropout_rate;
};

ffi::Error SetKey(const char* op, ffi::DataType dtype, const Arg& rng, const Attributes& attributes,
                  AttentionKey* key) {
  const auto [causal, scale, dropout_rate] = attributes;
  TE_CHECK(dtype == ffi::BF16 || dtype == ffi::F16, "%s: q, k and v must all be bf16, or all f16", op);
  TE_CHECK(std::isfinite(scale), "%s: scale is %g", op, scale);
  key->bf16 = dtype == ffi::BF16;
  TE_CHECK(dropout_rate >= 0 && dropout_rate < 1, "%s: dropout_rate is %g", op, dropout_rate);
  TE_CHECK(dropout_rate == 0 || key->empty() || (rng.element_type() == ffi::U32 && rng.element_count() >= 4),
           "%s: dropout_rate is %g, but rng%s holds no u32 seed and offset", op, dropout_rate,
           Shape(rng).c_str());
  key->causal = causal;
  key->scale = float(scale);
  key->dropout_rate = float(dropout_rate);
  return ffi::Error::Success();
}

// q [b, s, h, d], k [b, t, g, d], v [b, t, g, e].
ffi::Error MakeKey(const char* op, const Arg& q, const Arg& k, const Arg& v, const Arg& rng,
                   const Attributes& attributes, AttentionKey* key) {
  const auto qd = q.dimensions(), kd = k.dimensions(), vd = v.dimensions();
  TE_CHECK(qd.size() == 4 && kd.size() == 4 && vd.size() == 4, "%s: q%s, k%s, v%s must have 4 axes", op,
           Shape(q).c_str(), Shape(k).c_str(), Shape(v).c_str());
  TE_CHECK(kd[0] == qd[0] && vd[0] == qd[0] && kd[3] == qd[3] && vd[1] == kd[1] && vd[2] == kd[2],
           "%s: q%s, k%s, v%s do not match", op, Shape(q).c_str(), Shape(k).c_str(), Shape(v).c_str());
  TE_CHECK(kd[2] > 0 && qd[2] % kd[2] == 0, "%s: %ld query heads are no multiple of %ld key heads", op,
           long(qd[2]), long(kd[2]));
  TE_CHECK(k.element_type() == q.element_type() && v.element_type() == q.element_type(),
           "%s: q, k and v must all be bf16, or all f16", op);
  key->b = qd[0], key->s = qd[1], key->t = kd[1], key->h = qd[2], key->g = kd[2], key->d = qd[3],
  key->e = vd[3];
  return SetKey(op, q.element_type(), rng, attributes, key);
}

// qkv [b, s, 3, h, d].
ffi::Error MakeKey(const char* op, const Arg& qkv, const Arg& rng, const Attributes& attributes,
                   AttentionKey* key) {
  const auto dims = qkv.dimensions();
  TE_CHECK(dims.size() == 5 && dims[2] == 3, "%s: qkv%s must be [b, s, 3, h, d]", op, Shape(qkv).c_str());
  key->packed = true;
  key->b = dims[0], key->s = key->t = dims[1], key->h = key->g = dims[3], key->d = key->e = dims[4];
  return SetKey(op, qkv.element_type(), rng, attributes, key);
}

bool IsShape(Ret& ret, std::initializer_list<int64_t> dims) {
  const auto got = ret->dimensions();
  return std::equal(got.begin(), got.end(), dims.begin(), dims.end());
}

ffi::Error CheckForward(const char* op, const AttentionKey& key, ffi::DataType dtype, Ret& out, Ret& lse) {
  TE_CHECK(IsShape(out, {key.b, key.s, key.h, key.e}) && out->element_type() == dtype,
           "%s: out must be [%ld, %ld, %ld, %ld] of q's type", op, long(key.b), long(key.s), long(key.h),
           long(key.e));
  TE_CHECK(IsShape(lse, {key.b, key.h, key.s}) && lse->element_type() == ffi::F32,
           "%s: lse must be f32 [%ld, %ld, %ld]", op, long(key.b), long(key.h), long(key.s));
  TE_CHECK(key.t > 0 || !Present(lse), "%s: no key to attend to: t is 0", op);
  return ffi::Error::Success();
}

ffi::Error CheckBackward(const char* op, const AttentionKey& key, ffi::DataType dtype, const Arg& dout,
                         const Arg& out, const Arg& lse) {
  const size_t elements = size_t(key.b * key.s * key.h * key.e);
  for (const Arg* a : {&dout, &out})
    TE_CHECK(a->element_count() == elements && a->element_type() == dtype,
             "%s: out and dout must be [%ld, %ld, %ld, %ld] of q's type, one is %s", op, long(key.b),
             long(key.s), long(key.h), long(key.e), Shape(*a).c_str());
  TE_CHECK(lse.element_count() == size_t(key.b * key.h * key.s) && lse.element_type() == ffi::F32,
           "%s: lse%s must be f32 [%ld, %ld, %ld]", op, Shape(lse).c_str(), long(key.b), long(key.h),
           long(key.s));
  return ffi::Error::Success();
}

ffi::Error CheckGradient(const char* op, Ret& gradient, const Arg& operand) {
  TE_CHECK(gradient->size_bytes() == operand.size_bytes(), "%s: the gradient of an operand %s has %zu bytes",
           op, Shape(operand).c_str(), gradient->size_bytes());
  return ffi::Error::Success();
}

ffi::Error Initialize(cudaStream_t stream, const AttentionKey& key) {
  int64_t bytes = 0;
  return key.empty() ? ffi::Error::Success() : FindAttention(stream, key, &bytes);
}

ffi::Error Zero(cudaStream_t stream, std::initializer_list<Ret*> results) {
  for (Ret* result : results)
    if (Present(*result))
      TE_CUDA(cudaMemsetAsync((*result)->untyped_data(), 0, (*result)->size_bytes(), stream));
  return ffi::Error::Success();
}

ffi::Error Run(cudaStream_t stream, const AttentionKey& key, const Arg& rng, AttentionPointers pointers,
               Ret& workspace) {
  if (key.dropout_rate > 0) {
    pointers[kSeed] = rng.untyped_data();
    pointers[kOffset] = static_cast<uint32_t*>(rng.untyped_data()) + 2;
  }
  return RunAttention(stream, key, std::move(pointers), workspace->untyped_data(),
                      int64_t(workspace->size_bytes()));
}

// q, k or v (0, 1, 2) inside of a packed array.
void* Part(void* packed, const AttentionKey& key, int i) {
  return static_cast<uint16_t*>(packed) + i * key.h * key.d;
}

// ---- te_attention_fwd ----------------------------------------------------------------------------

ffi::Error ForwardKey(const Arg& q, const Arg& k, const Arg& v, const Arg& rng, Ret& out, Ret& lse,
                      const Attributes& attributes, AttentionKey* key) {
  constexpr char op[] = "te_attention_fwd";
  TE_TRY(MakeKey(op, q, k, v, rng, attributes, key));
  return CheckForward(op, *key, q.element_type(), out, lse);
}

ffi::Error InitializeForward(cudaStream_t stream, Arg q, Arg k, Arg v, Arg rng, Ret out, Ret lse, Ret drawn,
                             Ret workspace, bool causal, double scale, double dropout_rate) {
  AttentionKey key;
  TE_TRY(ForwardKey(q, k, v, rng, out, lse, {causal, scale, dropout_rate}, &key));
  return Initialize(stream, key);
}

ffi::Error ExecuteForward(cudaStream_t stream, Arg q, Arg k, Arg v, Arg rng, Ret out, Ret lse, Ret drawn,
                          Ret workspace, bool causal, double scale, double dropout_rate) {
  AttentionKey key;
  TE_TRY(ForwardKey(q, k, v, rng, out, lse, {causal, scale, dropout_rate}, &key));
  if (key.empty()) return Zero(stream, {&out, &lse});
  return Run(stream, key, rng,
             {{kQ, q.untyped_data()},
              {kK, k.untyped_data()},
              {kV, v.untyped_data()},
              {kOut, out->untyped_data()},
              {kLse, lse->untyped_data()}},
             workspace);
}

// ---- te_attention_packed_fwd ---------------------------------------------------------------------

ffi::Error PackedForwardKey(const Arg& qkv, const Arg& rng, Ret& out, Ret& lse, const Attributes& attributes,
                            AttentionKey* key) {
  constexpr char op[] = "te_attention_packed_fwd";
  TE_TRY(MakeKey(op, qkv, rng, attributes, key));
  return CheckForward(op, *key, qkv.element_type(), out, lse);
}

ffi::Error InitializePackedForward(cudaStream_t stream, Arg qkv, Arg rng, Ret out, Ret lse, Ret drawn,
                                   Ret workspace, bool causal, double scale, double dropout_rate) {
  AttentionKey key;
  TE_TRY(PackedForwardKey(qkv, rng, out, lse, {causal, scale, dropout_rate}, &key));
  return Initialize(stream, key);
}

ffi::Error ExecutePackedForward(cudaStream_t stream, Arg qkv, Arg rng, Ret out, Ret lse, Ret drawn,
                                Ret workspace, bool causal, double scale, double dropout_rate) {
  AttentionKey key;
  TE_TRY(PackedForwardKey(qkv, rng, out, lse, {causal, scale, dropout_rate}, &key));
  if (key.empty()) return Zero(stream, {&out, &lse});
  return Run(stream, key, rng,
             {{kQ, Part(qkv.untyped_data(), key, 0)},
              {kK, Part(qkv.untyped_data(), key, 1)},
              {kV, Part(qkv.untyped_data(), key, 2)},
              {kOut, out->untyped_data()},
              {kLse, lse->untyped_data()}},
             workspace);
}

// ---- te_attention_bwd ----------------------------------------------------------------------------

ffi::Error BackwardKey(const Arg& dout, const Arg& q, const Arg& k, const Arg& v, const Arg& out,
                       const Arg& lse, const Arg& rng, Ret& dq, Ret& dk, Ret& dv,
                       const Attributes& attributes, bool deterministic, AttentionKey* key) {
  constexpr char op[] = "te_attention_bwd";
  TE_TRY(MakeKey(op, q, k, v, rng, attributes, key));
  key->backward = true;
  key->deterministic = deterministic;
  TE_TRY(CheckBackward(op, *key, q.element_type(), dout, out, lse));
  TE_TRY(CheckGradient(op, dq, q));
  TE_TRY(CheckGradient(op, dk, k));
  return CheckGradient(op, dv, v);
}

ffi::Error InitializeBackward(cudaStream_t stream, Arg dout, Arg q, Arg k, Arg v, Arg out, Arg lse, Arg rng,
                              Ret dq, Ret dk, Ret dv, Ret workspace, bool causal, double scale,
                              double dropout_rate, bool deterministic) {
  AttentionKey key;
  TE_TRY(BackwardKey(dout, q, k, v, out, lse, rng, dq, dk, dv, {causal, scale, dropout_rate}, deterministic,
                     &key));
  return Initialize(stream, key);
}

ffi::Error ExecuteBackward(cudaStream_t stream, Arg dout, Arg q, Arg k, Arg v, Arg out, Arg lse, Arg rng,
                           Ret dq, Ret dk, Ret dv, Ret workspace, bool causal, double scale,
                           double dropout_rate, bool deterministic) {
  AttentionKey key;
  TE_TRY(BackwardKey(dout, q, k, v, out, lse, rng, dq, dk, dv, {causal, scale, dropout_rate}, deterministic,
                     &key));
  if (key.empty()) return Zero(stream, {&dq, &dk, &dv});
  return Run(stream, key, rng,
             {{kDOut, dout.untyped_data()},
              {kQ, q.untyped_data()},
              {kK, k.untyped_data()},
              {kV, v.untyped_data()},
              {kOut, out.untyped_data()},
              {kLse, lse.untyped_data()},
              {kDQ, dq->untyped_data()},
              {kDK, dk->untyped_data()},
              {kDV, dv->untyped_data()}},
             workspace);
}

// ---- te_attention_packed_bwd ---------------------------------------------------------------------

ffi::Error PackedBackwardKey(const Arg& dout, const Arg& qkv, const Arg& out, const Arg& lse, const Arg& rng,
                             Ret& dqkv, const Attributes& attributes, bool deterministic, AttentionKey* key) {
  constexpr char op[] = "te_attention_packed_bwd";
  TE_TRY(MakeKey(op, qkv, rng, attributes, key));
  key->backward = true;
  key->deterministic = deterministic;
  TE_TRY(CheckBackward(op, *key, qkv.element_type(), dout, out, lse));
  return CheckGradient(op, dqkv, qkv);
}

ffi::Error InitializePackedBackward(cudaStream_t stream, Arg dout, Arg qkv, Arg out, Arg lse, Arg rng,
                                    Ret dqkv, Ret workspace, bool causal, double scale, double dropout_rate,
                                    bool deterministic) {
  AttentionKey key;
  TE_TRY(
      PackedBackwardKey(dout, qkv, out, lse, rng, dqkv, {causal, scale, dropout_rate}, deterministic, &key));
  return Initialize(stream, key);
}

ffi::Error ExecutePackedBackward(cudaStream_t stream, Arg dout, Arg qkv, Arg out, Arg lse, Arg rng, Ret dqkv,
                                 Ret workspace, bool causal, double scale, double dropout_rate,
                                 bool deterministic) {
  AttentionKey key;
  TE_TRY(
      PackedBackwardKey(dout, qkv, out, lse, rng, dqkv, {causal, scale, dropout_rate}, deterministic, &key));
  if (key.empty()) return Zero(stream, {&dqkv});
  return Run(stream, key, rng,
             {{kDOut, dout.untyped_data()},
              {kQ, Part(qkv.untyped_data(), key, 0)},
              {kK, Part(qkv.untyped_data(), key, 1)},
              {kV, Part(qkv.untyped_data(), key, 2)},
              {kOut, out.untyped_data()},
              {kLse, lse.untyped_data()},
              {kDQ, Part(dqkv->untyped_data(), key, 0)},
              {kDK, Part(dqkv->untyped_data(), key, 1)},
              {kDV, Part(dqkv->untyped_data(), key, 2)}},
             workspace);
}

// The device that answers a host query: the current one, or else the first that this process already uses. A
// process that drives GPU 3 alone must not open a context, and hundreds of MB, on GPU 0.
int QueryDevice() {
  int current = 0, count = 0;
  if (cudaGetDevice(&current) != cudaSuccess || cudaGetDeviceCount(&count) != cudaSuccess) return current;
  using GetState = int (*)(int device, unsigned* flags, int* active);  // cuDevicePrimaryCtxGetState
  void* symbol = nullptr;
  cudaDriverEntryPointQueryResult found;
  if (cudaGetDriverEntryPointByVersion("cuDevicePrimaryCtxGetState", &symbol, 12000, cudaEnableDefault,
                                       &found) != cudaSuccess ||
      !symbol)
    return current;
  const auto is_active = [&](int device) {
    unsigned flags = 0;
    int active = 0;
    return reinterpret_cast<GetState>(symbol)(device, &flags, &active) == 0 && active;
  };
  for (int device = 0; device < count && !is_active(current); ++device)
    if (is_active(device)) return device;
  return current;
}

}  // namespace

int64_t AttentionWorkspace(const std::string& kind, const std::string& dtype, int64_t b, int64_t s, int64_t t,
                           int64_t h, int64_t g, int64_t d, int64_t e, bool packed, bool causal, double scale,
                           double dropout_rate, bool deterministic) {
  if ((kind != "fwd" && kind != "bwd") || (dtype != "bf16" && dtype != "f16"))
    throw std::runtime_error("attention_workspace: kind must be fwd or bwd, dtype bf16 or f16, got " + kind +
                             ", " + dtype);
  AttentionKey key;
  key.backward = kind == "bwd";
  key.bf16 = dtype == "bf16";
  key.b = b, key.s = s, key.t = t, key.h = h, key.g = g, key.d = d, key.e = e;
  key.packed = packed;
  key.causal = causal;
  key.scale = float(scale);
  key.dropout_rate = float(dropout_rate);
  key.deterministic = key.backward && deterministic;
  if (key.empty()) return 0;
  int64_t workspace = 0;
  ffi::Error error = ffi::Error::Success();
  // A thread of its own has a current device of its own.
  std::thread([&, device = QueryDevice()] {
    if (const cudaError_t status = cudaSetDevice(device); status != cudaSuccess)
      error = ffi::Error::Internal(std::string("cudaSetDevice: ") + cudaGetErrorString(status));
    else
      error = FindAttention(nullptr, key, &workspace);
  }).join();
  if (error.failure()) throw std::runtime_error(error.message());
  return workspace;
}

TE_HANDLER_INIT(
    te_attention_fwd, ExecuteForward, InitializeForward,
    .Ctx<Stream>()
        .Arg<Arg>()  // q [b, s, h, d]
        .Arg<Arg>()  // k [b, t, g, d]
        .Arg<Arg>()  // v [b, t, g, e]
        .Arg<Arg>()  // rng u32 [b, h, 4], its first words are seed and offset, i64 each; absent: no dropout
        .Ret<Arg>()  // out [b, s, h, e]
        .Ret<Arg>()  // lse f32 [b, h, s], natural log
        .Ret<Arg>()  // drawn, absent: the caller makes it
        .Ret<Arg>()  // workspace, uint8
        .Attr<bool>("causal")
        .Attr<double>("scale")
        .Attr<double>("dropout_rate"));

TE_HANDLER_INIT(te_attention_bwd, ExecuteBackward, InitializeBackward,
                .Ctx<Stream>()
                    .Arg<Arg>()  // dout [b, s, h, e]
                    .Arg<Arg>()  // q
                    .Arg<Arg>()  // k
                    .Arg<Arg>()  // v
                    .Arg<Arg>()  // out
                    .Arg<Arg>()  // lse
                    .Arg<Arg>()  // rng
                    .Ret<Arg>()  // dq [b, s, h, d]
                    .Ret<Arg>()  // dk [b, t, g, d]
                    .Ret<Arg>()  // dv [b, t, g, e]
                    .Ret<Arg>()  // workspace, uint8
                    .Attr<bool>("causal")
                    .Attr<double>("scale")
                    .Attr<double>("dropout_rate")
                    .Attr<bool>("deterministic"));

TE_HANDLER_INIT(te_attention_packed_fwd, ExecutePackedForward, InitializePackedForward,
                .Ctx<Stream>()
                    .Arg<Arg>()  // qkv [b, s, 3, h, d]
                    .Arg<Arg>()  // rng, as above
                    .Ret<Arg>()  // out [b, s, h, d]
                    .Ret<Arg>()  // lse f32 [b, h, s], natural log
                    .Ret<Arg>()  // drawn, absent: the caller makes it
                    .Ret<Arg>()  // workspace, uint8
                    .Attr<bool>("causal")
                    .Attr<double>("scale")
                    .Attr<double>("dropout_rate"));

TE_HANDLER_INIT(te_attention_packed_bwd, ExecutePackedBackward, InitializePackedBackward,
                .Ctx<Stream>()
                    .Arg<Arg>()  // dout [b, s, h, d]
                    .Arg<Arg>()  // qkv
                    .Arg<Arg>()  // out
                    .Arg<Arg>()  // lse
                    .Arg<Arg>()  // rng
                    .Ret<Arg>()  // dqkv [b, s, 3, h, d]
                    .Ret<Arg>()  // workspace, uint8
                    .Attr<bool>("causal")
                    .Attr<double>("scale")
                    .Attr<double>("dropout_rate")
                    .Attr<bool>("deterministic"));

}  // namespace te
