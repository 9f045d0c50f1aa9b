// te_gemm: out[m, n] = lhs[m, k] @ rhs[n, k]^T * lhs_scale_inv * rhs_scale_inv (+ bias[n]) (+ c[m, n]).
// te_gemm_block: the same of FP8 with a scale for each block of 128 along k. Both through cuBLASLt, or where
// that is faster (gemm_own.cc) through the kernel of grouped products, as te_gemm_block where m, n or k are
// several axes, along the last of which blocks may be cut. A plan (the algorithm for one shape) is made in
// the initialize stage; execution only looks it up.
#include "gemm/gemm.h"

#include "base/dl.h"
#include "base/module.h"
#include "base/ops.h"
#include "gemm/gemm_own.h"

namespace te {

const dl::Library& CublasLt() {
  static auto* library = new dl::Library(dl::Open(TE_CUBLASLT));
  return *library;
}

namespace {

constexpr int64_t kEntryAligned = 256;  // bytes: what algorithms are chosen for

// The arrays of both ops but the scales; the last `contract` axes of lhs and rhs are k.
struct Call {
  const char* op;
  Tensor lhs, rhs, bias, c, out, workspace;
  int64_t contract;
};

// Checks all but the scales -> all of the key but the scales and how to accumulate.
Status MakeKey(const Call& call, bool tune, GemmKey* key) {
  const Axes lhs(call.lhs), rhs(call.rhs);
  TE_CHECK(call.contract >= 0 && call.contract <= lhs.rank() && call.contract <= rhs.rank(),
           "%s: %ld axes are contracted, lhs is %s, rhs is %s; pass arrays that have them", call.op,
           long(call.contract), lhs.text().c_str(), rhs.text().c_str());
  const Axes m = lhs.Without(call.contract), n = rhs.Without(call.contract), k = lhs.From(m.rank());
  const Type type = call.lhs.type, result = call.out.type;
  const bool fp8 = kFp8.Have(type);
  // cuBLASLt multiplies no E5M2 by E5M2, and has no f32 bias behind FP8 operands.
  const Types rhs_types = !fp8 ? Types(type) : type == F8E5M2 ? Types(F8E4M3FN) : kFp8;
  TE_TRY(Expect(call.op, {{"lhs", call.lhs, kFloats | kFp8, lhs},
                          {"rhs", call.rhs, rhs_types, n + k},
                          {"out", call.out, fp8 ? kFloats : Types(type) | F32, m + n},
                          {"bias", call.bias, fp8 && result == F32 ? BF16 : result, n, kOptional},
                          {"c", call.c, result, m + n, kOptional},
                          {"workspace", call.workspace, U8, {Axes(call.workspace)[0]}}}));
  key->m = m.count(), key->n = n.count(), key->k = k.count();
  key->lhs = type, key->rhs = call.rhs.type, key->out = result;
  if (Present(call.bias)) key->bias = call.bias.type;
  key->c = Present(call.c);
  TE_CHECK(!key->fp8() || (key->k % 16 == 0 && key->n % 16 == 0),
           "%s: FP8 needs k and n to be multiples of 16, got %ld, %ld", call.op, long(key->k), long(key->n));
  key->workspace = size_t(call.workspace.bytes());
  key->tune = tune;
  return {};
}

Status Run(Stage stage, cudaStream_t stream, const Call& call, const GemmKey& key,
           const Tensor& lhs_scale_inv, const Tensor& rhs_scale_inv) {
  const bool runs = stage == Stage::kExecute;
  if (key.empty())  // a sum of no products, if there is a result at all
    return runs && Present(call.out) ? BiasPlusC(stream, call.bias, call.c, call.out, key.n) : Status{};
  GemmChoice choice;
  TE_TRY(FindGemm(stream, key, &choice));
  if (!runs) return {};
  return Matmul(stream, choice.handle, key, choice.algo,
                {call.lhs.data, call.rhs.data, Data<float>(lhs_scale_inv), Data<float>(rhs_scale_inv),
                 Data<void>(call.bias), Data<void>(call.c), call.out.data, Data<void>(call.workspace)});
}

// Entry i of `out`, whose other entries are those of `whole`, if it is there: copied only where it does not
// lie in the same buffer.
Status EntryOf(Stage stage, cudaStream_t stream, const Tensor& out, const Tensor& whole, int64_t i,
               Tensor* entry) {
  TE_CHECK(out.rank > 0 && i < out.sizes[0], "te_gemm: entry is %ld, out is %s; pass one that out has",
           long(i), out.shape().c_str());
  TE_TRY(Expect("te_gemm", {{"c", whole, out.type, Axes(out), kOptional}}));
  *entry = {out.data, out.type, out.sizes + 1, out.rank - 1};
  const int64_t bytes = entry->bytes();
  TE_CHECK(bytes % kEntryAligned == 0, "te_gemm: an entry of out has %ld bytes; pass a multiple of %ld",
           long(bytes), long(kEntryAligned));
  if (out.data) entry->data = static_cast<char*>(out.data) + i * bytes;
  if (stage == Stage::kExecute && Present(whole) && whole.data != out.data)
    TE_CUDA(cudaMemcpyAsync(out.data, whole.data, size_t(out.bytes()), cudaMemcpyDeviceToDevice, stream));
  return {};
}

}  // namespace

// Without scales FP8 operands are taken as they are.
Status LaunchGemm(Stage stage, cudaStream_t stream, Arg lhs, Arg rhs, Arg lhs_scale_inv, Arg rhs_scale_inv,
                  Arg bias, Arg c, Ret out, Ret workspace, int64_t contract, bool fast_accum, bool tune,
                  int64_t entry) {
  GemmKey key;
  Call call{"te_gemm", lhs, rhs, bias, c, out, workspace, contract};
  if (entry >= 0) {
    call.c = kNone;
    TE_TRY(EntryOf(stage, stream, out, c, entry, &call.out));
  }
  TE_TRY(MakeKey(call, tune, &key));
  key.fast_accum = fast_accum && key.fp8();  // of no effect on other types: one plan for both
  TE_TRY(Expect(call.op, {{"lhs_scale_inv", lhs_scale_inv, F32, {}, AbsentIf(!key.fp8())},
                          {"rhs_scale_inv", rhs_scale_inv, F32, {}, AbsentIf(!key.fp8())}}));
  return Run(stage, stream, call, key, lhs_scale_inv, rhs_scale_inv);
}

namespace {

// By the kernel of grouped products, as the product of one group: what has scales of squares, and more axes
// than matrices. n, k: the axes of these.
Status RunOneGroup(cudaStream_t stream, const Call& call, const GemmKey& key, const Axes& n, const Axes& k,
                   const Tensor& row_inv, const Tensor& block_inv) {
  using grouped::kMost;
  const bool few = std::max({key.m, key.n, key.k, row_inv.count(), block_inv.count()}) <= kMost &&
                   CeilDiv(key.m, 128) * CeilDiv(key.n, 256) <= kMost;
  TE_CHECK(
      few && n.last() % 8 == 0 && k.last() % 16 == 0,
      "%s: lhs is %s, rhs %s; pass less than 2^31 rows, columns, scales and tiles, and a last axis of n of a "
      "multiple of 8, of k of 16.",
      call.op, call.lhs.shape().c_str(), call.rhs.shape().c_str());
  for (const Tensor& a : {call.lhs, call.rhs, call.bias, call.c, call.out})
    TE_CHECK(Aligned(Data<void>(a)), "%s: arrays must be aligned to 16 bytes", call.op);
  TE_CHECK(call.workspace.bytes() >= kGroupedWorkspace, "%s: workspace has %ld bytes, pass %ld", call.op,
           long(call.workspace.bytes()), long(kGroupedWorkspace));
  grouped::Problem p =
      OneGroup(key, {call.lhs.data, call.rhs.data, Data<float>(row_inv), Data<float>(block_inv),
                     Data<void>(call.bias), Data<void>(call.c), call.out.data, Data<void>(call.workspace)});
  p.column_slots = int(grouped::SlotsOf(n)), p.k_slots = int(grouped::SlotsOf(k));
  return grouped::Run(stream, call.op, p);
}

}  // namespace

// The scales are as gemm.h says, or of more axes.
Status LaunchGemmBlock(Stage stage, cudaStream_t stream, Arg lhs, Arg rhs, Arg lhs_scale_inv,
                       Arg rhs_scale_inv, Arg rhs_block_inv, Arg bias, Arg c, Ret out, Ret workspace,
                       int64_t outer, bool tune) {
  GemmKey key;
  const Call call{"te_gemm_block", lhs, rhs, bias, c, out, workspace, outer + 1};
  TE_CHECK(outer >= 0, "%s: outer is %ld; pass 0 or more", call.op, long(outer));
  TE_TRY(ExpectRank(call.op, "lhs", lhs, outer + 2));
  TE_TRY(ExpectRank(call.op, "rhs", rhs, outer + 2));
  TE_TRY(MakeKey(call, tune, &key));
  TE_CHECK(key.fp8(), "%s: lhs is %s; pass FP8 operands", call.op, Name(lhs.type).c_str());
  const Axes m = Axes(lhs).Without(call.contract), n = Axes(rhs).Without(call.contract),
             k = Axes(lhs).From(m.rank());
  const bool squares = Present(rhs_block_inv), matrices = m.rank() == 1 && n.rank() == 1 && k.rank() == 1;
  TE_CHECK((squares && !matrices) || (matrices && key.k % 128 == 0 && key.m % 4 == 0),
           "%s: lhs is %s, rhs %s; pass matrices, k a multiple of 128 and m one of 4, or more axes and "
           "rhs_block_inv.",
           call.op, lhs.shape().c_str(), rhs.shape().c_str());
  const int64_t blocks = key.k / 128;
  key.scales = squares ? Scales::kRowsBySquares : Scales::kRows;
  const Axes square_axes = !matrices ? grouped::InBlocks(n) + grouped::InBlocks(k)
                                     : Axes{CeilDiv(key.n, 128), CeilDiv(blocks, 4) * 4};
  TE_TRY(
      Expect(call.op, {{"lhs_scale_inv", lhs_scale_inv, F32, grouped::InBlocks(k) + m},
                       {"rhs_scale_inv", rhs_scale_inv, F32, {blocks, key.n}, squares ? kAbsent : kRequired},
                       {"rhs_block_inv", rhs_block_inv, F32, square_axes, kOptional}}));
  for (const Tensor& scale : {Tensor(lhs_scale_inv), Tensor(rhs_scale_inv), Tensor(rhs_block_inv)})
    TE_CHECK(Aligned(Data<float>(scale)), "%s: scales must be aligned to 16 bytes", call.op);
  if (!matrices && !key.empty())
    return stage == Stage::kExecute ? RunOneGroup(stream, call, key, n, k, lhs_scale_inv, rhs_block_inv)
                                    : Status{};
  return Run(stage, stream, call, key, lhs_scale_inv, squares ? Tensor(rhs_block_inv) : rhs_scale_inv);
}

}  // namespace te
