// te_gemm: out[m, n] = lhs[m, k] @ rhs[n, k]^T * lhs_scale_inv * rhs_scale_inv (+ bias[n]) (+ c[m, n]),
// through cuBLASLt.
// A plan (the algorithm for one shape) is made in the initialize stage; execution only looks it up.
#include <cublasLt.h>

#include "common.h"
#include "dl.h"
#include "gemm_plan.h"
#include "module.h"

namespace te {

const dl::Library& CublasLt() {
  static auto* library = new dl::Library(dl::Open("libcublasLt.so.13"));
  return *library;
}

namespace {

// -1: cuBLASLt does not multiply this type here.
int CudaType(ffi::DataType dtype) {
  switch (dtype) {
    case ffi::F32:
      return CUDA_R_32F;
    case ffi::BF16:
      return CUDA_R_16BF;
    case ffi::F16:
      return CUDA_R_16F;
    case ffi::F8E4M3FN:
      return CUDA_R_8F_E4M3;
    case ffi::F8E5M2:
      return CUDA_R_8F_E5M2;
    default:
      return -1;
  }
}

int64_t Product(Arg::Dimensions dims, size_t begin, size_t end) {
  int64_t product = 1;
  for (size_t i = begin; i < end; ++i) product *= dims[i];
  return product;
}

// Fills the sizes of `key`: the last `contract` axes of lhs and rhs are k, those before m and n.
ffi::Error Sizes(const Arg& lhs, const Arg& rhs, Ret& out, int64_t contract, GemmKey* key) {
  const auto l = lhs.dimensions(), r = rhs.dimensions();
  TE_CHECK(contract >= 0 && contract <= int64_t(l.size()) && contract <= int64_t(r.size()),
           "te_gemm: contract = %ld does not fit lhs%s, rhs%s", long(contract), Shape(lhs).c_str(),
           Shape(rhs).c_str());
  const size_t l_free = l.size() - contract, r_free = r.size() - contract;
  key->m = Product(l, 0, l_free);
  key->n = Product(r, 0, r_free);
  key->k = Product(l, l_free, l.size());
  const int64_t rhs_k = Product(r, r_free, r.size());
  TE_CHECK(key->k == rhs_k, "te_gemm: k is %ld in lhs%s, but %ld in rhs%s", long(key->k), Shape(lhs).c_str(),
           long(rhs_k), Shape(rhs).c_str());
  TE_CHECK(int64_t(out->element_count()) == key->m * key->n, "te_gemm: out has %zu elements, needs %ld x %ld",
           out->element_count(), long(key->m), long(key->n));
  return ffi::Error::Success();
}

// Fills the types of `key`, or says which combination cuBLASLt lacks.
ffi::Error Types(const Arg& lhs, const Arg& rhs, const Arg& bias, const Arg& c, Ret& out, GemmKey* key) {
  key->lhs = CudaType(lhs.element_type());
  key->rhs = CudaType(rhs.element_type());
  key->out = CudaType(out->element_type());
  TE_CHECK(key->lhs >= 0 && key->rhs >= 0, "te_gemm: operands must be f32, bf16, f16, f8e4m3fn or f8e5m2");
  TE_CHECK(key->out == CUDA_R_32F || key->out == CUDA_R_16BF || key->out == CUDA_R_16F,
           "te_gemm: out must be f32, bf16 or f16");
  if (key->fp8()) {
    TE_CHECK(IsFp8(key->lhs) && IsFp8(key->rhs), "te_gemm: both operands must be FP8, or none");
    TE_CHECK(key->lhs != CUDA_R_8F_E5M2 || key->rhs != CUDA_R_8F_E5M2,
             "te_gemm: cuBLASLt multiplies no f8e5m2 by f8e5m2; quantize one operand to f8e4m3fn");
    TE_CHECK(key->k % 16 == 0 && key->n % 16 == 0,
             "te_gemm: FP8 needs k and n to be multiples of 16, got %ld, %ld", long(key->k), long(key->n));
  } else {
    TE_CHECK(key->lhs == key->rhs, "te_gemm: lhs and rhs must have one type");
    TE_CHECK(key->out == key->lhs || key->out == CUDA_R_32F,
             "te_gemm: out must have the type of lhs, or be f32");
  }
  key->c = Present(c);
  if (key->c)
    TE_CHECK(c.element_type() == out->element_type() && c.element_count() == out->element_count(),
             "te_gemm: c must be as out, [%ld, %ld] of %s", long(key->m), long(key->n), TypeName(key->out));
  if (!Present(bias)) return ffi::Error::Success();
  key->bias = CudaType(bias.element_type());
  // cuBLASLt has no f32 bias behind FP8 operands.
  const int wanted = key->fp8() && key->out == CUDA_R_32F ? CUDA_R_16BF : key->out;
  TE_CHECK(key->bias == wanted, "te_gemm: bias must be %s", TypeName(wanted));
  TE_CHECK(int64_t(bias.element_count()) == key->n, "te_gemm: bias has %zu elements, n is %ld",
           bias.element_count(), long(key->n));
  return ffi::Error::Success();
}

ffi::Error Scales(const Arg& lhs_scale_inv, const Arg& rhs_scale_inv, const GemmKey& key) {
  for (const Arg* scale : {&lhs_scale_inv, &rhs_scale_inv}) {
    if (!Present(*scale)) continue;
    TE_CHECK(key.fp8(), "te_gemm: scale_inv is for FP8 operands alone");
    TE_CHECK(scale->element_type() == ffi::F32 && scale->element_count() == 1,
             "te_gemm: scale_inv must be one f32, got %s", Shape(*scale).c_str());
  }
  return ffi::Error::Success();
}

ffi::Error MakeKey(const Arg& lhs, const Arg& rhs, const Arg& lhs_scale_inv, const Arg& rhs_scale_inv,
                   const Arg& bias, const Arg& c, Ret& out, Ret& workspace, int64_t contract, bool fast_accum,
                   bool tune, GemmKey* key) {
  TE_TRY(Sizes(lhs, rhs, out, contract, key));
  if (key->empty()) return ffi::Error::Success();
  TE_TRY(Types(lhs, rhs, bias, c, out, key));
  TE_TRY(Scales(lhs_scale_inv, rhs_scale_inv, *key));
  key->workspace = workspace->size_bytes();
  key->fast_accum = fast_accum && key->fp8();  // of no effect on other types: one plan for both
  key->tune = tune;
  return ffi::Error::Success();
}

ffi::Error Initialize(cudaStream_t stream, Arg lhs, Arg rhs, Arg lhs_scale_inv, Arg rhs_scale_inv, Arg bias,
                      Arg c, Ret out, Ret workspace, int64_t contract, bool fast_accum, bool tune) {
  GemmKey key;
  TE_TRY(MakeKey(lhs, rhs, lhs_scale_inv, rhs_scale_inv, bias, c, out, workspace, contract, fast_accum, tune,
                 &key));
  if (key.empty()) return ffi::Error::Success();
  GemmChoice choice;
  return FindGemm(stream, key, &choice);
}

ffi::Error Execute(cudaStream_t stream, Arg lhs, Arg rhs, Arg lhs_scale_inv, Arg rhs_scale_inv, Arg bias,
                   Arg c, Ret out, Ret workspace, int64_t contract, bool fast_accum, bool tune) {
  GemmKey key;
  TE_TRY(MakeKey(lhs, rhs, lhs_scale_inv, rhs_scale_inv, bias, c, out, workspace, contract, fast_accum, tune,
                 &key));
  if (key.empty()) return Zero(stream, {&*out});  // k == 0 sums nothing; m == 0 or n == 0 has no result
  GemmChoice choice;
  TE_TRY(FindGemm(stream, key, &choice));
  GemmOperands operands;
  operands.lhs = lhs.untyped_data();
  operands.rhs = rhs.untyped_data();
  operands.lhs_scale_inv = Data<float>(lhs_scale_inv);
  operands.rhs_scale_inv = Data<float>(rhs_scale_inv);
  operands.bias = Data<void>(bias);
  operands.c = Data<void>(c);
  operands.out = out->untyped_data();
  operands.workspace = Data<void>(workspace);
  return Matmul(stream, choice.handle, key, choice.algo, operands);
}

}  // namespace

TE_HANDLER_INIT(te_gemm, Execute, Initialize,
                .Ctx<Stream>()
                    .Arg<Arg>()  // lhs [m..., k...]
                    .Arg<Arg>()  // rhs [n..., k...]
                    .Arg<Arg>()  // lhs_scale_inv? f32
                    .Arg<Arg>()  // rhs_scale_inv? f32
                    .Arg<Arg>()  // bias? [n...]
                    .Arg<Arg>()  // c? [m..., n...]
                    .Ret<Arg>()  // out [m..., n...]
                    .Ret<Arg>()  // workspace, uint8
                    .Attr<int64_t>("contract")
                    .Attr<bool>("fast_accum")
                    .Attr<bool>("tune"));

}  // namespace te
