// te_gemm: out[m, n] = lhs[m, k] @ rhs[n, k]^T * lhs_scale_inv * rhs_scale_inv (+ bias[n]) (+ c[m, n]),
// through cuBLASLt. te_gemm_block: the same of FP8 with a scale for each block of 128 along k.
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

ffi::Error ScalesOfTensors(const Arg& lhs_scale_inv, const Arg& rhs_scale_inv, const GemmKey& key) {
  for (const Arg* scale : {&lhs_scale_inv, &rhs_scale_inv}) {
    if (!Present(*scale)) continue;
    TE_CHECK(key.fp8(), "te_gemm: scale_inv is for FP8 operands alone");
    TE_CHECK(scale->element_type() == ffi::F32 && scale->element_count() == 1,
             "te_gemm: scale_inv must be one f32, got %s", Shape(*scale).c_str());
  }
  return ffi::Error::Success();
}

// The scales as gemm_lt.h says.
ffi::Error ScalesOfBlocks(const Arg& lhs, const Arg& rows, const Arg& squares, GemmKey* key) {
  TE_CHECK(key->k % 128 == 0 && key->m % 4 == 0,
           "te_gemm_block: k must be a multiple of 128 and m one of 4, got %ld, %ld", long(key->k),
           long(key->m));
  TE_CHECK(Present(lhs) && Present(rows) != Present(squares),
           "te_gemm_block: pass lhs_scale_inv and one of rhs_scale_inv and rhs_block_inv");
  const int64_t blocks = key->k / 128;
  const auto is = [](const Arg& scale, int64_t count) {
    return !Present(scale) || (scale.element_type() == ffi::F32 && int64_t(scale.element_count()) == count &&
                               reinterpret_cast<uintptr_t>(scale.untyped_data()) % 16 == 0);
  };
  TE_CHECK(is(lhs, blocks * key->m) && is(rows, blocks * key->n) &&
               is(squares, (key->n + 127) / 128 * ((blocks + 3) / 4 * 4)),
           "te_gemm_block: lhs_scale_inv %s, rhs_scale_inv %s, rhs_block_inv %s do not go with m %ld, n %ld, "
           "k %ld",
           Shape(lhs).c_str(), Shape(rows).c_str(), Shape(squares).c_str(), long(key->m), long(key->n),
           long(key->k));
  key->scales = Present(squares) ? Scales::kRowsBySquares : Scales::kRows;
  return ffi::Error::Success();
}

// Operands and results of both handlers.
struct Call {
  const Arg &lhs, &rhs, &bias, &c;
  Ret &out, &workspace;
  int64_t contract;
  bool tune;
};

// All of `key` but the scales and how to accumulate.
ffi::Error MakeKey(const Call& call, GemmKey* key) {
  TE_TRY(Sizes(call.lhs, call.rhs, call.out, call.contract, key));
  if (key->empty()) return ffi::Error::Success();
  TE_TRY(Types(call.lhs, call.rhs, call.bias, call.c, call.out, key));
  key->workspace = call.workspace->size_bytes();
  key->tune = call.tune;
  return ffi::Error::Success();
}

ffi::Error Plan(cudaStream_t stream, const GemmKey& key) {
  if (key.empty()) return ffi::Error::Success();
  GemmChoice choice;
  return FindGemm(stream, key, &choice);
}

ffi::Error Run(cudaStream_t stream, const Call& call, const GemmKey& key, const Arg& lhs_scale_inv,
               const Arg& rhs_scale_inv) {
  if (key.empty()) return Zero(stream, {&*call.out});  // k == 0 sums nothing; m == 0 or n == 0 has no result
  GemmChoice choice;
  TE_TRY(FindGemm(stream, key, &choice));
  GemmOperands operands;
  operands.lhs = call.lhs.untyped_data();
  operands.rhs = call.rhs.untyped_data();
  operands.lhs_scale_inv = Data<float>(lhs_scale_inv);
  operands.rhs_scale_inv = Data<float>(rhs_scale_inv);
  operands.bias = Data<void>(call.bias);
  operands.c = Data<void>(call.c);
  operands.out = call.out->untyped_data();
  operands.workspace = Data<void>(call.workspace);
  return Matmul(stream, choice.handle, key, choice.algo, operands);
}

ffi::Error KeyOfTensors(const Call& call, const Arg& lhs_scale_inv, const Arg& rhs_scale_inv, bool fast_accum,
                        GemmKey* key) {
  TE_TRY(MakeKey(call, key));
  if (key->empty()) return ffi::Error::Success();
  key->fast_accum = fast_accum && key->fp8();  // of no effect on other types: one plan for both
  return ScalesOfTensors(lhs_scale_inv, rhs_scale_inv, *key);
}

ffi::Error Initialize(cudaStream_t stream, Arg lhs, Arg rhs, Arg lhs_scale_inv, Arg rhs_scale_inv, Arg bias,
                      Arg c, Ret out, Ret workspace, int64_t contract, bool fast_accum, bool tune) {
  GemmKey key;
  const Call call{lhs, rhs, bias, c, out, workspace, contract, tune};
  TE_TRY(KeyOfTensors(call, lhs_scale_inv, rhs_scale_inv, fast_accum, &key));
  return Plan(stream, key);
}

ffi::Error Execute(cudaStream_t stream, Arg lhs, Arg rhs, Arg lhs_scale_inv, Arg rhs_scale_inv, Arg bias,
                   Arg c, Ret out, Ret workspace, int64_t contract, bool fast_accum, bool tune) {
  GemmKey key;
  const Call call{lhs, rhs, bias, c, out, workspace, contract, tune};
  TE_TRY(KeyOfTensors(call, lhs_scale_inv, rhs_scale_inv, fast_accum, &key));
  return Run(stream, call, key, lhs_scale_inv, rhs_scale_inv);
}

ffi::Error KeyOfBlocks(const Call& call, const Arg& lhs_scale_inv, const Arg& rhs_scale_inv,
                       const Arg& rhs_block_inv, GemmKey* key) {
  TE_TRY(MakeKey(call, key));
  if (key->empty()) return ffi::Error::Success();
  TE_CHECK(key->fp8(), "te_gemm_block: operands must be FP8");
  return ScalesOfBlocks(lhs_scale_inv, rhs_scale_inv, rhs_block_inv, key);
}

ffi::Error InitializeBlock(cudaStream_t stream, Arg lhs, Arg rhs, Arg lhs_scale_inv, Arg rhs_scale_inv,
                           Arg rhs_block_inv, Arg bias, Arg c, Ret out, Ret workspace, int64_t outer,
                           bool tune) {
  GemmKey key;
  const Call call{lhs, rhs, bias, c, out, workspace, outer + 1, tune};
  TE_TRY(KeyOfBlocks(call, lhs_scale_inv, rhs_scale_inv, rhs_block_inv, &key));
  return Plan(stream, key);
}

ffi::Error ExecuteBlock(cudaStream_t stream, Arg lhs, Arg rhs, Arg lhs_scale_inv, Arg rhs_scale_inv,
                        Arg rhs_block_inv, Arg bias, Arg c, Ret out, Ret workspace, int64_t outer,
                        bool tune) {
  GemmKey key;
  const Call call{lhs, rhs, bias, c, out, workspace, outer + 1, tune};
  TE_TRY(KeyOfBlocks(call, lhs_scale_inv, rhs_scale_inv, rhs_block_inv, &key));
  return Run(stream, call, key, lhs_scale_inv, Present(rhs_block_inv) ? rhs_block_inv : rhs_scale_inv);
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

TE_HANDLER_INIT(te_gemm_block, ExecuteBlock, InitializeBlock,
                .Ctx<Stream>()
                    .Arg<Arg>()  // lhs [m..., k..., k]
                    .Arg<Arg>()  // rhs [n..., n, k..., k]
                    .Arg<Arg>()  // lhs_scale_inv f32 [k..., k/128, m...]
                    .Arg<Arg>()  // rhs_scale_inv? f32 [k..., k/128, n..., n]
                    .Arg<Arg>()  // rhs_block_inv? f32 [n..., n/128, k..., k/128 up to a multiple of 4]
                    .Arg<Arg>()  // bias? [n..., n]
                    .Arg<Arg>()  // c? [m..., n..., n]
                    .Ret<Arg>()  // out [m..., n..., n]
                    .Ret<Arg>()  // workspace, uint8
                    .Attr<int64_t>("outer")
                    .Attr<bool>("tune"));

}  // namespace te
