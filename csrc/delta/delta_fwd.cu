// te_gated_delta_fwd: the gated delta rule (https://arxiv.org/abs/2412.06464), a gate for each head. One
// kernel has all chunks of tokens at the same time, and makes what they need that does not depend on the
// state (delta_chunks.cu). In the other one a CTA walks over the chunks of a head with the state of some
// channels of values in registers.

#include "base/device.h"
#include "base/ops.h"
#include "delta/delta_walk.cuh"

namespace te {
namespace delta {
namespace {

template <int kD, int kStages>
Status Run(cudaStream_t stream, const WalkArgs& a, int64_t rows) {
  const auto kernel = te_gated_delta_fwd<kD, kStages>;
  constexpr size_t kBytes = sizeof(WalkShared<kD, kStages>);
  TE_TRY(ssm::AllowShared(kernel, kBytes));
  const dim3 grid(a.h, unsigned(CeilDiv(a.e, kSlab)), unsigned(rows));
  kernel<<<grid, kThreads, kBytes, stream>>>(a);
  TE_LAUNCHED();
}

template <int kD>
Status RunWithin(cudaStream_t stream, const WalkArgs& a, int64_t rows) {
  int64_t bytes = 0;
  TE_TRY(ssm::SharedBytes(&bytes));
  return (int64_t(sizeof(WalkShared<kD, 2>)) <= bytes ? Run<kD, 2> : Run<kD, 1>)(stream, a, rows);
}

// Of k [rows, s, g, d] and v [rows, s, h, e].
Status ExpectSizes(const char* op, const Tensor& k, const Tensor& v, int64_t shared) {
  constexpr int64_t kMost = 128;
  const int64_t rows = v.sizes[0], s = v.sizes[1], h = v.sizes[2], e = v.sizes[3];
  const int64_t g = k.sizes[2], d = k.sizes[3];
  const std::string of_k = k.shape(), of_v = v.shape();
  TE_CHECK(g >= 1 && h % g == 0 && (shared == h / g || (g == 1 && shared == 1)),
           "%s: k is %s, v %s, shared %ld", op, of_k.c_str(), of_v.c_str(), long(shared));
  TE_CHECK(d % 8 == 0 && e % 8 == 0 && d >= 8 && d <= kMost && e <= kMost,
           "%s: k is %s, v %s; pass multiples of 8, up to %ld channels", op, of_k.c_str(), of_v.c_str(),
           long(kMost));
  TE_CHECK(s <= INT32_MAX - kKept && h * d * e <= INT32_MAX && rows <= 65535 && g <= 65535,
           "%s: v is %s, too large for one call", op, of_v.c_str());
  return {};
}

}  // namespace
}  // namespace delta

Status LaunchGatedDeltaFwd(cudaStream_t stream, Arg q, Arg k, Arg v, Arg beta, Arg gate, Arg runs,
                           Arg initial, Ret y, Ret last, Ret states, Ret workspace, double scale,
                           bool normalize, int64_t shared) {
  constexpr const char* kOp = "te_gated_delta_fwd";
  TE_TRY(ExpectRank(kOp, "k", k, 4, true));
  TE_TRY(ExpectRank(kOp, "v", v, 4, true));
  const Axes keys(k), values(v);
  const int64_t rows = values[0], s = values[1], h = values[2], e = values[3], g = keys[2], d = keys[3];
  const Axes of_groups = values.First(2) + Axes{g, d}, of_heads = values.First(3), state{rows, h, d, e};
  const int64_t chunks = CeilDiv(s, delta::kChunk);
  TE_TRY(Expect(kOp, {{"q", q, BF16, of_groups},
                      {"k", k, BF16, of_groups},
                      {"v", v, BF16, values},
                      {"beta", beta, F32, of_heads},
                      {"gate", gate, F32, of_heads + Axes{1}},
                      {"segments", runs, S32, values.First(2), kOptional},
                      {"initial", initial, F32, state, kOptional},
                      {"y", y, BF16, values},
                      {"final", last, F32, state, kOptional},
                      {"states", states, F32, Axes{rows, CeilDiv(s, delta::kKept), h, d, e}, kOptional},
                      {"workspace", workspace, U8, {rows * chunks * h * int64_t(sizeof(delta::Chunk))}}}));
  TE_TRY(delta::ExpectSizes(kOp, k, v, shared));
  if (rows * h * e == 0) return {};
  using ssm::Bf16;
  const delta::ChunkArgs args{Data<const Bf16>(q),
                              Data<const Bf16>(k),
                              Data<const float>(beta),
                              Data<const float>(gate),
                              Data<const int>(runs),
                              int(s),
                              int(h),
                              int(g),
                              int(d),
                              float(scale),
                              normalize};
  delta::Chunk* const of_chunks = static_cast<delta::Chunk*>(workspace.data);
  if (s > 0) TE_TRY(delta::LaunchChunks(stream, args, rows, of_chunks));
  const delta::WalkArgs walk{args.q,
                             args.k,
                             Data<const Bf16>(v),
                             of_chunks,
                             Data<const float>(initial),
                             Data<Bf16>(y),
                             Data<float>(last),
                             Data<float>(states),
                             args.s,
                             args.h,
                             args.g,
                             args.d,
                             int(e)};
#ifdef TE_HAS_90A
  bool is_hopper = false;
  TE_TRY(IsHopper(&is_hopper));
  if (is_hopper) return delta::RunHopper(stream, walk, rows);
#endif
  return (d <= 64 ? delta::RunWithin<64> : delta::RunWithin<128>)(stream, walk, rows);
}

}  // namespace te
