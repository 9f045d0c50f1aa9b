// te_gemm: out[m, n] = lhs[m, k] @ rhs[n, k]^T * lhs_scale_inv * rhs_scale_inv (+ bias[n]) (+ c[m, n]),
// through cuBLASLt. te_gemm_block: the same of FP8 with a scale for each block of 128 along k.
// A plan (the algorithm for one shape) is made in the initialize stage; execution only looks it up.
#include "dl.h"
#include "expect.h"
#include "gemm_empty.h"
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

// Operands and results of both handlers.
struct Call {
  const char* op;
  const Arg &lhs, &rhs, &bias, &c;
  Ret &out, &workspace;
  int64_t contract;
  bool tune;
};

// The axes of lhs and rhs: the last `contract` are k, those before m and n.
struct GemmAxes {
  Axes m, n, k;
};

// The shapes and types of all but the scales.
ffi::Error CheckArrays(const Call& call, GemmAxes* axes) {
  const Axes lhs(call.lhs), rhs(call.rhs);
  TE_CHECK(call.contract >= 0 && call.contract <= lhs.rank() && call.contract <= rhs.rank(),
           "%s: %ld axes are contracted, lhs is %s, rhs is %s; pass arrays that have them", call.op,
           long(call.contract), Shape(call.lhs).c_str(), Shape(call.rhs).c_str());
  *axes = {lhs.Without(call.contract), rhs.Without(call.contract), lhs.From(lhs.rank() - call.contract)};
  const auto type = call.lhs.element_type();
  const bool fp8 = kFp8.Have(type);
  const Types out = fp8 ? kFloats : Types(type) | ffi::F32;
  const ffi::DataType result = call.out->element_type();
  // cuBLASLt multiplies no E5M2 by E5M2, and has no f32 bias behind FP8 operands.
  const Types rhs_types = !fp8 ? Types(type) : type == ffi::F8E5M2 ? Types(ffi::F8E4M3FN) : kFp8;
  const ffi::DataType bias = fp8 && result == ffi::F32 ? ffi::BF16 : result;
  return Expect(call.op, {{"lhs", &call.lhs, kFloats | kFp8, lhs},
                          {"rhs", &call.rhs, rhs_types, axes->n + axes->k},
                          {"out", &*call.out, out, axes->m + axes->n},
                          {"bias", &call.bias, bias, axes->n, kOptional},
                          {"c", &call.c, result, axes->m + axes->n, kOptional},
                          {"workspace", &*call.workspace, ffi::U8, {Axes(call.workspace)[0]}}});
}

// All of `key` but the scales and how to accumulate.
ffi::Error MakeKey(const Call& call, GemmKey* key) {
  GemmAxes axes;
  TE_TRY(CheckArrays(call, &axes));
  key->m = axes.m.count(), key->n = axes.n.count(), key->k = axes.k.count();
  key->lhs = CudaType(call.lhs.element_type());
  key->rhs = CudaType(call.rhs.element_type());
  key->out = CudaType(call.out->element_type());
  if (Present(call.bias)) key->bias = CudaType(call.bias.element_type());
  key->c = Present(call.c);
  TE_CHECK(!key->fp8() || (key->k % 16 == 0 && key->n % 16 == 0),
           "%s: FP8 needs k and n to be multiples of 16, got %ld, %ld", call.op, long(key->k), long(key->n));
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
  if (key.empty()) {  // a sum of no products, if there is a result at all
    if (key.m == 0 || key.n == 0) return ffi::Error::Success();
    return BiasPlusC(stream, call.bias, call.c, *call.out, key.n);
  }
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

// Without scales FP8 operands are taken as they are.
ffi::Error KeyOfTensors(const Call& call, const Arg& lhs_scale_inv, const Arg& rhs_scale_inv, bool fast_accum,
                        GemmKey* key) {
  TE_TRY(MakeKey(call, key));
  const Need need = AbsentIf(!key->fp8());
  key->fast_accum = fast_accum && key->fp8();  // of no effect on other types: one plan for both
  return Expect(call.op, {{"lhs_scale_inv", &lhs_scale_inv, ffi::F32, {}, need},
                          {"rhs_scale_inv", &rhs_scale_inv, ffi::F32, {}, need}});
}

ffi::Error Initialize(cudaStream_t stream, Arg lhs, Arg rhs, Arg lhs_scale_inv, Arg rhs_scale_inv, Arg bias,
                      Arg c, Ret out, Ret workspace, int64_t contract, bool fast_accum, bool tune) {
  GemmKey key;
  const Call call{"te_gemm", lhs, rhs, bias, c, out, workspace, contract, tune};
  TE_TRY(KeyOfTensors(call, lhs_scale_inv, rhs_scale_inv, fast_accum, &key));
  return Plan(stream, key);
}

ffi::Error Execute(cudaStream_t stream, Arg lhs, Arg rhs, Arg lhs_scale_inv, Arg rhs_scale_inv, Arg bias,
                   Arg c, Ret out, Ret workspace, int64_t contract, bool fast_accum, bool tune) {
  GemmKey key;
  const Call call{"te_gemm", lhs, rhs, bias, c, out, workspace, contract, tune};
  TE_TRY(KeyOfTensors(call, lhs_scale_inv, rhs_scale_inv, fast_accum, &key));
  return Run(stream, call, key, lhs_scale_inv, rhs_scale_inv);
}

// Of matrices. The scales are as gemm_lt.h says.
ffi::Error KeyOfBlocks(const Call& call, const Arg& lhs_scale_inv, const Arg& rhs_scale_inv,
                       const Arg& rhs_block_inv, GemmKey* key) {
  TE_TRY(ExpectRank(call.op, "lhs", call.lhs, 2, true));
  TE_TRY(ExpectRank(call.op, "rhs", call.rhs, 2, true));
  TE_CHECK(call.contract == 1, "%s: outer is %ld; pass 0: lhs and rhs are matrices", call.op,
           long(call.contract - 1));
  TE_TRY(MakeKey(call, key));
  TE_CHECK(key->fp8(), "%s: lhs is %s; pass FP8 operands", call.op,
           Types::Name(call.lhs.element_type()).c_str());
  TE_CHECK(key->k % 128 == 0 && key->m % 4 == 0,
           "%s: k must be a multiple of 128 and m one of 4, got %ld, %ld", call.op, long(key->k),
           long(key->m));
  const int64_t blocks = key->k / 128;
  const bool squares = Present(rhs_block_inv);
  key->scales = squares ? Scales::kRowsBySquares : Scales::kRows;
  TE_TRY(Expect(call.op,
                {{"lhs_scale_inv", &lhs_scale_inv, ffi::F32, {blocks, key->m}},
                 {"rhs_scale_inv", &rhs_scale_inv, ffi::F32, {blocks, key->n}, squares ? kAbsent : kRequired},
                 {"rhs_block_inv",
                  &rhs_block_inv,
                  ffi::F32,
                  {CeilDiv(key->n, 128), CeilDiv(blocks, 4) * 4},
                  kOptional}}));
  for (const Arg* scale : {&lhs_scale_inv, &rhs_scale_inv, &rhs_block_inv})
    TE_CHECK(reinterpret_cast<uintptr_t>(Data<float>(*scale)) % 16 == 0,
             "%s: scales must be aligned to 16 bytes", call.op);
  return ffi::Error::Success();
}

ffi::Error InitializeBlock(cudaStream_t stream, Arg lhs, Arg rhs, Arg lhs_scale_inv, Arg rhs_scale_inv,
                           Arg rhs_block_inv, Arg bias, Arg c, Ret out, Ret workspace, int64_t outer,
                           bool tune) {
  GemmKey key;
  const Call call{"te_gemm_block", lhs, rhs, bias, c, out, workspace, outer + 1, tune};
  TE_TRY(KeyOfBlocks(call, lhs_scale_inv, rhs_scale_inv, rhs_block_inv, &key));
  return Plan(stream, key);
}

ffi::Error ExecuteBlock(cudaStream_t stream, Arg lhs, Arg rhs, Arg lhs_scale_inv, Arg rhs_scale_inv,
                        Arg rhs_block_inv, Arg bias, Arg c, Ret out, Ret workspace, int64_t outer,
                        bool tune) {
  GemmKey key;
  const Call call{"te_gemm_block", lhs, rhs, bias, c, out, workspace, outer + 1, tune};
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
                    .Arg<Arg>()  // lhs [m, k]
                    .Arg<Arg>()  // rhs [n, k]
                    .Arg<Arg>()  // lhs_scale_inv f32 [k/128, m]
                    .Arg<Arg>()  // rhs_scale_inv? f32 [k/128, n]
                    .Arg<Arg>()  // rhs_block_inv? f32 [n/128, k/128 up to a multiple of 4]
                    .Arg<Arg>()  // bias? [n]
                    .Arg<Arg>()  // c? [m, n]
                    .Ret<Arg>()  // out [m, n]
                    .Ret<Arg>()  // workspace, uint8
                    .Attr<int64_t>("outer")
                    .Attr<bool>("tune"));

}  // namespace te
