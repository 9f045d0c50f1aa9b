#include "base/groups.cuh"

namespace te {
namespace {

constexpr int kFinishThreads = 256;

// The bands of an expert, of `bands` in all.
struct BandRange {
  int64_t first, end;
};
__device__ __forceinline__ BandRange BandsOf(const int* offsets, int expert, int64_t bands) {
  const auto band = [=](int offset) { return max(int64_t{0}, min(int64_t{offset} / kGroupRows, bands)); };
  return {band(offsets[expert]), band(offsets[expert + 1])};
}

// A CTA for each expert: the partials of its bands are neighbours.
__global__ void __launch_bounds__(kFinishThreads)
    te_group_amax(const int* offsets, const float* partials, float* amax, int64_t bands, int64_t strips) {
  __shared__ unsigned of_warps[kMostWarps];
  const BandRange range = BandsOf(offsets, blockIdx.x, bands);
  unsigned peak = 0;
#pragma unroll 8
  for (int64_t i = range.first * strips + threadIdx.x; i < range.end * strips; i += kFinishThreads)
    peak = max(peak, __float_as_uint(partials[i]));
  peak = CtaMax(peak, of_warps);
  if (threadIdx.x == 0) amax[blockIdx.x] = __uint_as_float(peak);
}

// CTAs of `strips` strips of columns for each expert.
__global__ void __launch_bounds__(kFinishThreads)
    te_group_sum(const int* offsets, const float* partials, float* sums, int64_t bands, int64_t columns,
                 unsigned strips) {
  const int expert = blockIdx.x / strips;
  const int64_t column = int64_t{blockIdx.x % strips} * kFinishThreads + threadIdx.x;
  if (column >= columns) return;
  const BandRange range = BandsOf(offsets, expert, bands);
  float sum = 0.f;
#pragma unroll 8
  for (int64_t i = range.first; i < range.end; ++i) sum += partials[i * columns + column];
  sums[expert * columns + column] = sum;
}

}  // namespace

Status FinishGroups(cudaStream_t stream, const GroupRows& groups, int64_t rows, const Totals& of) {
  const int64_t bands = rows / kGroupRows;
  if (Present(of.amax)) {
    te_group_amax<<<unsigned(groups.experts), kFinishThreads, 0, stream>>>(
        groups.offsets, Data<float>(of.amax_partials), Data<float>(of.amax), bands,
        of.amax_partials.count() / bands);
  }
  if (Present(of.dbias)) {
    const int64_t columns = of.dbias.count() / groups.experts;
    const unsigned strips = unsigned(CeilDiv(columns, kFinishThreads));
    te_group_sum<<<groups.experts * strips, kFinishThreads, 0, stream>>>(
        groups.offsets, Data<float>(of.dbias_partials), Data<float>(of.dbias), bands, columns, strips);
  }
  TE_LAUNCHED();
}

Status ExpectGroups(const char* op, const GroupArrays& b, const Totals& of, bool needs_scale, int64_t rows,
                    const Axes& columns, GroupRows* groups) {
  TE_TRY(ExpectRank(op, "counts", b.counts, 1, true));
  const int64_t experts = b.counts.count();
  TE_CHECK(experts >= 1 && experts <= kMostExperts, "%s: counts%s; pass the counts of 1 to %d experts.", op,
           b.counts.shape().c_str(), kMostExperts);
  TE_CHECK(rows % kGroupRows == 0 && rows <= INT32_MAX,
           "%s: x has %ld rows; pass a multiple of %d below 2^31.", op, long(rows), kGroupRows);
  const bool one_scale = of.scale.rank == 1 && of.scale.count() == 1;
  TE_TRY(Expect(op, {{"offsets", b.offsets, S32, {experts + 1}},
                     {"counts", b.counts, S32, {experts}},
                     {"bias", b.bias, F32, {}, kAbsent},
                     {"scale", of.scale, F32, {one_scale ? 1 : experts}, RequiredIf(needs_scale)},
                     {"amax", of.amax, F32, {experts}, kOptional},
                     {"dbias", of.dbias, F32, Axes{experts} + columns, kOptional}}));
  *groups = {Data<int>(b.offsets), Data<int>(b.counts), int(experts), one_scale};
  return {};
}

}  // namespace te
