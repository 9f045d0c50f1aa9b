// te_gated_delta_bwd's last kernel of a slab on Hopper, with its tensor maps.
#include "base/check.h"
#include "base/launch.h"
#include "delta/delta_bwd_chunks_hopper.cuh"
#include "delta/maps.h"

namespace te::delta {
namespace {

// So many as there would else be no CTA of for each SM of a Hopper, and as a cluster may have everywhere.
int PartsOf(const GradArgs& a, int halves) {
  const int kMost = 8 / halves, kCtas = 132;
  const int heads = a.again.h / a.again.g;
  const int64_t ctas = int64_t(a.of.g) * a.part.chunks * a.part.rows * halves;
  int parts = int(std::min<int64_t>(kMost, std::max<int64_t>(1, kCtas / ctas)));
  while (heads % parts != 0) --parts;
  return parts;
}

Status MakeMaps(const GradArgs& a, int64_t rows, int halves, HopperGradArgs* out) {
  constexpr const char* kOp = "te_gated_delta_bwd";
  const WalkArgs& of = a.again;
  const TokenSizes keys = KeysOf(of, rows), of_slab = ValuesOfSlab(a);
  out->a = a, out->parts = PartsOf(a, halves), out->heads = of.h / of.g / out->parts;
  TE_TRY(MapOfTokens(kOp, &out->q, of.q, keys, kChunk));
  TE_TRY(MapOfTokens(kOp, &out->k, of.k, keys, kChunk));
  TE_TRY(MapOfTokens(kOp, &out->dq, a.dq, keys, kBand));
  TE_TRY(MapOfTokens(kOp, &out->dk, a.dk, keys, kBand));
  TE_TRY(MapOfTokens(kOp, &out->dy, a.back.v, ValuesOf(of, rows), kChunk));
  TE_TRY(MapOfTokens(kOp, &out->written, a.written, of_slab, kChunk));
  TE_TRY(MapOfTokens(kOp, &out->gradients_written, a.gradients_written, of_slab, kChunk));
  TE_TRY(MapOfStates(kOp, &out->states, a.states, StatesOf(a), kSlab));
  return MapOfStates(kOp, &out->gradients, a.gradients, StatesOf(a), kSlab);
}

template <int kD, bool kRuns, int kHalves = 1>
Status Run(cudaStream_t stream, const GradArgs& a, int64_t rows) {
  HopperGradArgs given{};
  TE_TRY(MakeMaps(a, rows, kHalves, &given));
  const auto kernel = te_gated_delta_bwd_chunks_hopper<kD, kRuns, kHalves>;
  constexpr size_t kBytes = sizeof(HopperGradShared<kD, kRuns>);
  static_assert(kBytes <= 227 * 1024);
  TE_TRY(ssm::AllowShared(kernel, kBytes));
  const unsigned ctas = given.parts * kHalves;
  const dim3 grid(a.of.g * ctas, a.part.There(a.of.s), a.part.rows);
  return LaunchBehind(stream, true, kernel, grid, ssm::kHopperThreads, kBytes, given, ctas);
}

}  // namespace

Status RunGradChunksOnHopper(cudaStream_t stream, const GradArgs& a, int64_t rows) {
  return DispatchKeys(a.of.d, a.of.runs, [&]<int kD, bool kRuns>() {
    if constexpr (kD > kMostKeys)
      return Run<kMostKeys, kRuns, kD / kMostKeys>(stream, a, rows);
    else
      return Run<kD, kRuns>(stream, a, rows);
  });
}

}  // namespace te::delta
