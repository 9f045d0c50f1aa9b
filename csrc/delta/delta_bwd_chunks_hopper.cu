// te_gated_delta_bwd's last kernel of a slab on Hopper, with its tensor maps.
#include "base/check.h"
#include "base/launch.h"
#include "base/tensor_map.h"
#include "delta/delta_bwd_chunks_hopper.cuh"

namespace te::delta {
namespace {

// Tokens of some rows, [rows, a row's tokens, heads, inner], of which the first are there.
struct OfTokens {
  int64_t rows, row_tokens, tokens, heads, inner;
};

Status MapOfTokens(CUtensorMap* map, const Bf16* data, const OfTokens& of, int box) {
  const cuuint64_t head = of.inner * 2, token = of.heads * head;
  return MakeTensorMap<4>(
      "te_gated_delta_bwd", map, BF16, data,
      {cuuint64_t(of.inner), cuuint64_t(of.heads), cuuint64_t(of.tokens), cuuint64_t(of.rows)},
      {head, token, of.row_tokens * token}, {1, cuuint32_t(box), 1});
}
// [count, h, e, d], in boxes of 64 channels of values.
Status MapOfStates(CUtensorMap* map, const Bf16* data, const WalkArgs& of, int64_t count) {
  const cuuint64_t value = of.d * 2, head = of.e * value;
  return MakeTensorMap<4>("te_gated_delta_bwd", map, BF16, data,
                          {cuuint64_t(of.d), cuuint64_t(of.e), cuuint64_t(of.h), cuuint64_t(count)},
                          {value, head, of.h * head}, {kSlab, 1, 1});
}

// So many as there would else be no CTA of for each SM of a Hopper, and as a cluster may have everywhere.
int PartsOf(const GradArgs& a) {
  constexpr int kMost = 8, kCtas = 132;
  const int heads = a.again.h / a.again.g;
  const int64_t ctas = int64_t(a.of.g) * a.part.chunks * a.part.rows;
  int parts = int(std::min<int64_t>(kMost, std::max<int64_t>(1, kCtas / ctas)));
  while (heads % parts != 0) --parts;
  return parts;
}

// Tokens of the slab that lie behind the last one are not there.
Status MakeMaps(const GradArgs& a, int64_t rows, HopperGradArgs* out) {
  const WalkArgs& of = a.again;
  const OfTokens keys{rows, of.s, of.s, of.g, of.d}, values{rows, of.s, of.s, of.h, of.e};
  const int64_t tokens = int64_t(a.part.chunks) * kChunk;
  const int64_t there = std::min(tokens, of.s - int64_t(a.part.first_chunk) * kChunk);
  const OfTokens of_slab{a.part.rows, tokens, there, of.h, of.e};
  const int64_t chunks = int64_t(a.part.rows) * a.part.chunks;
  out->a = a, out->parts = PartsOf(a), out->heads = of.h / of.g / out->parts;
  TE_TRY(MapOfTokens(&out->q, of.q, keys, kChunk));
  TE_TRY(MapOfTokens(&out->k, of.k, keys, kChunk));
  TE_TRY(MapOfTokens(&out->dq, a.dq, keys, kBand));
  TE_TRY(MapOfTokens(&out->dk, a.dk, keys, kBand));
  TE_TRY(MapOfTokens(&out->dy, a.back.v, values, kChunk));
  TE_TRY(MapOfTokens(&out->written, a.written, of_slab, kChunk));
  TE_TRY(MapOfTokens(&out->alone, a.gradients_written, of_slab, kChunk));
  TE_TRY(MapOfStates(&out->states, a.states, of, chunks));
  return MapOfStates(&out->gradients, a.gradients, of, chunks);
}

template <int kD, bool kRuns>
Status Run(cudaStream_t stream, const HopperGradArgs& given) {
  const GradArgs& a = given.a;
  const auto kernel = te_gated_delta_bwd_chunks_hopper<kD, kRuns>;
  constexpr size_t kBytes = sizeof(HopperGradShared<kD, kRuns>);
  static_assert(kBytes <= 227 * 1024);
  TE_TRY(ssm::AllowShared(kernel, kBytes));
  const dim3 grid(a.of.g * given.parts, a.part.There(a.of.s), a.part.rows);
  return LaunchBehind(stream, true, kernel, grid, ssm::kHopperThreads, kBytes, given, given.parts);
}

}  // namespace

Status RunGradChunksOnHopper(cudaStream_t stream, const GradArgs& a, int64_t rows) {
  HopperGradArgs given{};
  TE_TRY(MakeMaps(a, rows, &given));
  return ssm::DispatchStates(a.of.d, a.of.runs,
                             [&]<int kD, bool kRuns>() { return Run<kD, kRuns>(stream, given); });
}

}  // namespace te::delta
