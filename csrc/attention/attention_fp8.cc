// te_attention_fp8_fwd, te_attention_fp8_bwd: softmax(scale * q k^T) v on FP8 operands through cuDNN.
#include <algorithm>
#include <cmath>
#include <utility>
#include <vector>

#include "attention/attention_fp8_plan.h"
#include "base/finish.h"
#include "base/module.h"
#include "base/ops.h"

namespace te {
namespace {

using namespace fp8;

constexpr int64_t kAmaxes = 4;  // of the backward pass: kAmaxDQ and the next three

// Into how many parts cuDNN computes a call: its rows are cut, or the key heads of each row, with their query
// heads.
struct Parts {
  int64_t rows = 1, groups = 1;

  int64_t count() const { return rows * groups; }
};

// Into how many parts of up to `most` (and not less than 1) n things are cut: as few as can be, or less than
// twice as many, where these are alike.
int64_t CutsOf(int64_t n, int64_t most) {
  const int64_t fewest = CeilDiv(n, std::max<int64_t>(most, 1));
  for (int64_t parts = fewest; parts < 2 * fewest; ++parts)
    if (n % parts == 0) return parts;
  return fewest;
}

// Causal gradients of 64 and more heads of rows at once take 1.1 to 1.4 times as long as cuDNN's bf16 ones,
// of 48 and fewer 0.81 to 0.97 times from 2048 tokens on (9.19 and 9.28 on an H200, results/log.md). Full
// attention has no such step. Few heads do not fill a GPU: rather than have those, parts are unlike.
Parts PartsOf(const Fp8Attention& call) {
  constexpr int64_t kMostHeads = 48;
  if (!call.backward || !call.causal || call.empty()) return {};
  const int64_t groups = CutsOf(call.g, kMostHeads / (call.h / call.g));
  return {groups > 1 ? call.b : CutsOf(call.b, kMostHeads / call.h), groups};
}

struct Part {
  Fp8Attention attention;
  int64_t row, head;  // of the call, the first ones: the head is a key head
};

// Of unlike parts the first is of the smaller ones and the last is of the larger ones, by one row or head.
Part PartAt(const Fp8Attention& call, const Parts& parts, int64_t i) {
  const int64_t r = i / parts.groups, c = i % parts.groups;
  Part part{call, call.b * r / parts.rows, call.g * c / parts.groups};
  Fp8Attention& a = part.attention;
  a.b = call.b * (r + 1) / parts.rows - part.row;
  a.g = call.g * (c + 1) / parts.groups - part.head, a.h = a.g * (call.h / call.g);
  return part;
}

// One part of each kind.
std::vector<Fp8Attention> KindsOf(const Fp8Attention& call, const Parts& parts) {
  const auto at = [&](int64_t i) { return PartAt(call, parts, i).attention; };
  const int64_t last = parts.count() - 1;
  if (last == 0) return {call};
  return {at(0), at(last)};
}

// The workspace begins with the amax of the probabilities, which cuDNN writes and nobody reads, or with the
// amaxes of several parts of a backward pass, f32 [kAmaxes, parts]. Then comes the plans' workspace, aligned
// as an allocation.
int64_t ScratchOf(const Parts& parts) {
  constexpr int64_t kAlignment = 256;
  return CeilDiv(kAmaxes * parts.count() * int64_t{sizeof(float)}, kAlignment) * kAlignment;
}

// What both launchers have; `count` scales.
struct Operands {
  const Tensor &q, &k, &v, &scales;
  int64_t count;
  const Tensor& workspace;
  bool causal;
  double scale;
};

Status Describe(const Operands& given, Fp8Attention* a) {
  const Axes q(given.q), k(given.k);
  a->b = q[0], a->s = q[1], a->h = q[2], a->d = q[3];
  a->t = k[1], a->g = k[2];
  a->line_h = a->h, a->line_g = a->g;
  TE_TRY(Expect(a->op(), {{"q", given.q, F8E4M3FN, a->query_axes()},
                          {"k", given.k, F8E4M3FN, a->key_axes()},
                          {"v", given.v, F8E4M3FN, a->key_axes()},
                          {"scales", given.scales, F32, {given.count}},
                          {"workspace", given.workspace, U8, {Axes(given.workspace)[0]}}}));
  TE_CHECK(a->g > 0 && a->h % a->g == 0, "%s: %ld query heads are no multiple of %ld key heads", a->op(),
           long(a->h), long(a->g));
  TE_CHECK(std::isfinite(given.scale), "%s: scale is %g", a->op(), given.scale);
  a->causal = given.causal;
  a->scale = float(given.scale);
  return {};
}

// The pointers of a part, from the pointers of the call.
GraphPointers PointersOf(const Part& part, const Fp8Attention& call, GraphPointers pointers) {
  const int64_t head = part.head * (call.h / call.g), query = part.row * call.h + head;
  const int64_t queries = (part.row * call.s * call.h + head) * call.d;
  const int64_t keys = (part.row * call.t * call.g + part.head) * call.d;
  const auto move = [&](std::initializer_list<int64_t> uids, int64_t bytes) {
    for (const int64_t uid : uids) pointers[uid] = static_cast<char*>(pointers[uid]) + bytes;
  };
  move({kQ, kOut, kDOut, kDQ}, queries);
  move({kK, kV, kDK, kDV}, keys);
  move({kLse}, query * call.s * int64_t{sizeof(float)});
  return pointers;
}

// Runs a plan for each part of a backward pass. An amax is of one run: cuDNN 9.19 does not take the maximum
// with what an earlier run wrote.
Status RunParts(cudaStream_t stream, const Fp8Attention& call, const Parts& parts,
                const GraphPointers& pointers, std::initializer_list<Tensor> amaxes, char* workspace,
                int64_t size) {
  const int64_t count = parts.count(), scratch = ScratchOf(parts);
  auto* partials = reinterpret_cast<float*>(workspace);
  TE_CUDA(cudaMemsetAsync(partials, 0, scratch, stream));
  for (int64_t i = 0; i < count; ++i) {
    const Part part = PartAt(call, parts, i);
    GraphPointers own = PointersOf(part, call, pointers);
    for (int64_t amax = 0; amax < kAmaxes; ++amax) own[kAmaxDQ + amax] = partials + amax * count + i;
    TE_TRY(RunGraph(stream, Fp8AttentionRecipe(part.attention), std::move(own), workspace + scratch, size));
  }
  const auto ending = [&](int64_t amax) -> Ending {
    return {Reduce::kMaxOfBits, {partials + amax * count, F32, &count, 1}, amaxes.begin()[amax]};
  };
  TE_TRY(FinishPartials(stream, ending(0), ending(1)));
  return FinishPartials(stream, ending(2), ending(3));
}

// pointers: of all but q, k, v and the scales.
Status Run(Stage stage, cudaStream_t stream, const Fp8Attention& a, const Operands& given,
           GraphPointers pointers, std::initializer_list<Tensor> results,
           std::initializer_list<Tensor> amaxes) {
  const Parts parts = PartsOf(a);
  if (stage == Stage::kInitialize) {
    if (a.empty()) return {};
    for (const Fp8Attention& kind : KindsOf(a, parts)) TE_TRY(FindGraph(stream, Fp8AttentionRecipe(kind)));
    return {};
  }
  if (a.empty()) {
    TE_TRY(Zero(stream, results));
    return Zero(stream, amaxes);
  }
  const int64_t scratch = ScratchOf(parts), size = given.workspace.bytes() - scratch;
  TE_CHECK(size >= 0, "%s: the workspace has %ld bytes, needs %ld and more", a.op(),
           long(given.workspace.bytes()), long(scratch));
  pointers.insert({{kQ, given.q.data}, {kK, given.k.data}, {kV, given.v.data}});
  for (int64_t i = 0; i < given.count; ++i)
    pointers[kScales + i] = static_cast<float*>(given.scales.data) + i;
  auto* bytes = static_cast<char*>(given.workspace.data);
  if (parts.count() > 1) return RunParts(stream, a, parts, pointers, amaxes, bytes, size);
  TE_TRY(Zero(stream, amaxes));
  if (!a.backward) pointers[kAmaxS] = bytes;
  return RunGraph(stream, Fp8AttentionRecipe(a), std::move(pointers), bytes + scratch, size);
}

}  // namespace

Status LaunchAttentionFp8Fwd(Stage stage, cudaStream_t stream, Arg q, Arg k, Arg v, Arg scales, Ret out,
                             Ret lse, Ret amax, Ret workspace, bool causal, double scale) {
  Fp8Attention a;
  const Operands given{q, k, v, scales, kForwardScales, workspace, causal, scale};
  TE_TRY(Describe(given, &a));
  TE_TRY(Expect(
      a.op(),
      {{"out", out, F8E4M3FN, a.query_axes()}, {"lse", lse, F32, a.lse_axes()}, {"amax", amax, F32, {}}}));
  TE_CHECK(a.t > 0 || !Present(lse), "%s: no key to attend to: t is 0", a.op());
  return Run(stage, stream, a, given, {{kOut, out.data}, {kLse, lse.data}, {kAmaxOut, amax.data}}, {out, lse},
             {amax});
}

Status LaunchAttentionFp8Bwd(Stage stage, cudaStream_t stream, Arg dout, Arg q, Arg k, Arg v, Arg out,
                             Arg lse, Arg scales, Ret dq, Ret dk, Ret dv, Ret dq_amax, Ret dk_amax,
                             Ret dv_amax, Ret dp_amax, Ret workspace, bool causal, double scale) {
  Fp8Attention a;
  a.backward = true;
  const Operands given{q, k, v, scales, kBackwardScales, workspace, causal, scale};
  TE_TRY(Describe(given, &a));
  const Type type = dout.type;
  a.e5m2 = type == F8E5M2;
  TE_TRY(Expect(a.op(), {{"dout", dout, kFp8, a.query_axes()},
                         {"out", out, F8E4M3FN, a.query_axes()},
                         {"lse", lse, F32, a.lse_axes()},
                         {"dq", dq, type, a.query_axes()},
                         {"dk", dk, type, a.key_axes()},
                         {"dv", dv, type, a.key_axes()},
                         {"dq_amax", dq_amax, F32, {}},
                         {"dk_amax", dk_amax, F32, {}},
                         {"dv_amax", dv_amax, F32, {}},
                         {"dp_amax", dp_amax, F32, {}}}));
  return Run(stage, stream, a, given,
             {{kOut, out.data},
              {kLse, lse.data},
              {kDOut, dout.data},
              {kDQ, dq.data},
              {kDK, dk.data},
              {kDV, dv.data},
              {kAmaxDQ, dq_amax.data},
              {kAmaxDK, dk_amax.data},
              {kAmaxDV, dv_amax.data},
              {kAmaxDP, dp_amax.data}},
             {dq, dk, dv}, {dq_amax, dk_amax, dv_amax, dp_amax});
}

int64_t AttentionFp8Workspace(const std::string& kind, bool e5m2, int64_t b, int64_t s, int64_t t, int64_t h,
                              int64_t g, int64_t d, bool causal, double scale) {
  const Fp8Attention a{kind == "bwd", e5m2, b, s, t, h, g, d, causal, float(scale)};
  const Parts parts = PartsOf(a);
  int64_t of_plans = 0;
  if (!a.empty())
    for (const Fp8Attention& kind : KindsOf(a, parts))
      of_plans = std::max(of_plans, GraphWorkspace(Fp8AttentionRecipe(kind)));
  return ScratchOf(parts) + of_plans;
}

}  // namespace te
