// The gradient of the MLP's activation over rows in groups, as FP8 of both layouts where x was, which is as
// many bytes. Bytes per element of x: 2 read and 2 written, and the bytes of dy.
//
// A CTA has a square of 128 x 128 of each slot: it has read all of x there before it writes. Line i of a
// square has the FP8 of its row i, then the FP8 of its column i (te_jax/ops/experts/paired.py).

#include "activation/activation.cuh"
#include "base/groups.cuh"
#include "base/ops.h"
#include "quantize/transposed.cuh"

namespace te {
namespace {

constexpr int kSquare = kGroupRows;
constexpr int kThreads = 256;
constexpr int kPassRows = 64, kPasses = kSquare / kPassRows;  // of a square's rows, 4 neighbours a thread

struct SquareResults {
  const float* scale;    // f32 [experts] or [1]
  uint8_t* paired;       // [m, slots, n], numbers of 2 bytes
  float* amax_partials;  // [m / kSquare, strips] or nullptr
  int64_t n;
  unsigned strips;  // squares of a slot's columns
  bool e5m2;
};

template <typename Source>
__global__ void __launch_bounds__(kThreads, Source::kCtas)
    te_activation_grouped_paired_bwd(const Source source, const SquareResults a) {
  constexpr int kSlots = Source::kSlots, kWindow = Source::kWindow, kRows = 4 * kPasses;
  __shared__ Transposed<kSquare, kSquare> columns[kSlots];
  __shared__ unsigned amax_of_warps[kMostWarps];
  const int64_t row0 = int64_t{blockIdx.x / a.strips} * kSquare;
  const unsigned strip = blockIdx.x % a.strips;
  const auto bands = source.groups.At(row0, a.scale);
  if (bands.unused) return;
  // A warp has 64 columns of 16 rows.
  const int warp = WarpIndex(), lane = Lane();
  const int c = (warp % 2 * 8 + lane % 8) * 8, r = (warp / 2 * 4 + lane / 8) * 4;  // in the first pass
  const auto row_of = [=](int k) { return k / 4 * kPassRows + r + k % 4; };
  const auto load = [&](int k) {
    return source.template Load<true>(row0 + row_of(k), strip * kSquare + c,
                                      row_of(k) < bands.ends[0] ? 8 : 0);
  };
  typename Source::Raw window[kWindow];
#pragma unroll
  for (int k = 0; k < kWindow; ++k) window[k] = load(k);
  float amax = 0.f;
  uint2 q[kSlots][kPasses][4];
#pragma unroll
  for (int k = 0; k < kRows; ++k) {
    const float factor = row_of(k) < bands.ends[0] ? bands.scales[0] : 0.f;  // for it may not be finite
    float f[kSlots][8];
    source.Values(window[k % kWindow], f);
    if (k + kWindow < kRows) window[k % kWindow] = load(k + kWindow);
#pragma unroll
    for (int s = 0; s < kSlots; ++s) {
#pragma unroll
      for (int j = 0; j < 8; ++j) amax = MaxNan(amax, fabsf(f[s][j])), f[s][j] *= factor;
      uint2(&rows)[4] = q[s][k / 4];
      Quantize8(f[s], a.e5m2, rows[k % 4].x, rows[k % 4].y);
      if (k % 4 < 3) continue;
      uint32_t words[2][4];
#pragma unroll
      for (int i = 0; i < 4; ++i) words[0][i] = rows[i].x, words[1][i] = rows[i].y;
      columns[s].Store(words, c, row_of(k) / 4);
    }
  }
  const unsigned peak = CtaMax(__float_as_uint(amax), amax_of_warps);  // its barrier: all is read, all stored
  if (a.amax_partials && threadIdx.x == 0) a.amax_partials[blockIdx.x] = __uint_as_float(peak);
#pragma unroll
  for (int s = 0; s < kSlots; ++s) {
    const int64_t line = 2 * a.n * kSlots;  // bytes
    uint8_t* const square = a.paired + row0 * line + 2 * (s * a.n + int64_t{strip} * kSquare);
#pragma unroll
    for (int k = 0; k < kRows; ++k)
      __stcs(reinterpret_cast<uint2*>(square + row_of(k) * line + c), q[s][k / 4][k % 4]);
#pragma unroll
    for (int i = threadIdx.x; i < kSquare * kSquare / 16; i += kThreads) {
      const int column = i / (kSquare / 16), row = i % (kSquare / 16) * 16;
      __stcs(reinterpret_cast<uint4*>(square + column * line + kSquare + row),
             columns[s].Rows16(column, row));
    }
  }
}

}  // namespace

Status LaunchActivationGroupedPairedBwd(cudaStream_t stream, Arg dy, Arg x, Arg offsets, Arg counts,
                                        Arg scale, Ret paired, Ret amax, Ret workspace, int64_t kind,
                                        double limit, double alpha, double glu_linear_offset, bool e5m2) {
  const char* op = "te_activation_grouped_paired_bwd";
  TE_TRY(ExpectRank(op, "x", x, 4, true));
  TE_TRY(Expect(op, {{"x", x, kHalves, Axes(x).First(3) + Axes{kSquare}}}));
  const int64_t sizes[] = {x.sizes[0], x.sizes[1], x.sizes[2] * kSquare};
  ActivationCall<true> of{op, {x.data, x.type, sizes, 3}, dy, {kind, limit, alpha, glu_linear_offset}};
  TE_TRY(of.Check(3));
  const int64_t m = of.m.count(), strips = x.sizes[2], squares = m / kSquare * strips;
  Totals totals{scale, amax};
  GroupRows groups;
  TE_TRY(ExpectGroups(op, {offsets, counts}, totals, true, m, {}, &groups));
  TE_CHECK(squares <= INT32_MAX, "%s: x has too many elements", op);
  TE_TRY(Expect(op, {{"paired", paired, x.type, Axes(x)},
                     {"workspace", workspace, U8, {Present(amax) ? squares * 4 : 0}}}));
  TE_CHECK(of.aligned() && Aligned(Data<void>(paired)), "%s: arrays must be aligned to 16 bytes", op);
  if (squares == 0) return Zero(stream, {amax});
  totals.amax_partials = {workspace.data, F32, &squares, 1};
  const SquareResults results{
      Data<float>(scale), Data<uint8_t>(paired), Data<float>(workspace), of.f, unsigned(strips), e5m2};
  TE_TRY(of.Dispatch([&]<typename Source>(const Source& source) -> Status {
    if constexpr (sizeof(typename Source::Type) == 2)  // as x is
      te_activation_grouped_paired_bwd<<<unsigned(squares), kThreads, 0, stream>>>(
          GroupSource<Source>{source, groups}, results);
    TE_LAUNCHED();
  }));
  return FinishGroups(stream, groups, m, totals);
}

}  // namespace te
