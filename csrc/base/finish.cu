#include "base/device.h"
#include "base/finish.h"
#include "base/fp8.cuh"
#include "base/launch.h"
#include "base/reduce.cuh"

namespace te {
namespace {

constexpr int kColumns = 32, kRows = 16;  // of a CTA's threads

struct Task {
  const void* partials;  // [count, n]
  void* result;          // [n], of `type`
  int64_t count, n;
  unsigned ctas;
  Reduce reduce;
  Type type;
};

constexpr int kMostTasks = 2;

struct FinishArgs {
  Task each[kMostTasks];
  const float* scale;
  float* scale_inv;  // or nullptr
};

__device__ void StoreAs(Type type, void* result, int64_t i, float value) {
  if (type == F32) static_cast<float*>(result)[i] = value;
  if (type == BF16) static_cast<__nv_bfloat16*>(result)[i] = static_cast<__nv_bfloat16>(value);
  if (type == F16) static_cast<__half*>(result)[i] = static_cast<__half>(value);
}

// A thread sums every kRows-th partial of its column; these kRows sums are then added in their order.
__device__ void FinishSums(const Task& a, unsigned cta) {
  __shared__ float sums[kRows][kColumns];
  const float* partials = static_cast<const float*>(a.partials);
  const int64_t column = int64_t{cta} * kColumns + threadIdx.x;
  float sum = 0.f;
  if (column < a.n)
#pragma unroll 8
    for (int64_t i = threadIdx.y; i < a.count; i += kRows) sum += partials[i * a.n + column];
  sums[threadIdx.y][threadIdx.x] = sum;
  __syncthreads();
  if (threadIdx.y != 0 || column >= a.n) return;
  for (int row = 1; row < kRows; ++row) sum += sums[row][threadIdx.x];
  StoreAs(a.type, a.result, column, sum);
}

// A column of ints or of the bits of maxima, which come to the same in any order.
template <typename Take, typename OfWarp>
__device__ __forceinline__ void FinishColumn(const Task& a, unsigned column, Take take, OfWarp of_warp) {
  __shared__ unsigned of_warps[kMostWarps];
  const unsigned* partials = static_cast<const unsigned*>(a.partials);
  const int first = threadIdx.y * kColumns + threadIdx.x;
  unsigned total = 0;
#pragma unroll 8
  for (int64_t i = first; i < a.count; i += kColumns * kRows) total = take(total, partials[i * a.n + column]);
  total = OfCta(total, of_warps, of_warp);
  if (first == 0) static_cast<unsigned*>(a.result)[column] = total;
}

// The columns of a CTA.
constexpr int ColumnsOf(Reduce reduce) { return reduce == Reduce::kSumOfFloats ? kColumns : 1; }

__device__ void FinishOne(const Task& a, unsigned cta) {
  const auto larger = [](unsigned total, unsigned partial) { return max(total, partial); };
  const auto sum = [](unsigned total, unsigned partial) { return total + partial; };
  if (a.reduce == Reduce::kMaxOfBits) return FinishColumn(a, cta, larger, WarpMax);
  if (a.reduce == Reduce::kSumOfInts) return FinishColumn(a, cta, sum, WarpSumOfInts);
  FinishSums(a, cta);
}

__global__ void __launch_bounds__(kColumns* kRows) te_finish(const __grid_constant__ FinishArgs a) {
  AwaitPrevious();
  if (a.scale_inv && blockIdx.x == 0 && threadIdx.x == 0 && threadIdx.y == 0) *a.scale_inv = 1.f / *a.scale;
  unsigned cta = blockIdx.x;
#pragma unroll
  for (int i = 0; i < kMostTasks; ++i) {
    const Task& mine = a.each[i];
    if (cta < mine.ctas) return FinishOne(mine, cta);
    cta -= mine.ctas;
  }
}

// Half of te_finish's time goes into its start.
Status Launch(cudaStream_t stream, unsigned ctas, const FinishArgs& args) {
  bool early = false;
#ifdef TE_HAS_90A
  TE_TRY(IsHopper(&early));
#endif
  return LaunchBehind(stream, early, te_finish, ctas, dim3(kColumns, kRows), 0, args);
}

}  // namespace

Status FinishPartials(cudaStream_t stream, const Ending& first, const Ending& second, const Tensor& scale,
                      const Tensor& scale_inv) {
  FinishArgs args{{}, Data<float>(scale), Data<float>(scale_inv)};
  unsigned ctas = 0;
  Task* task = args.each;
  for (const Ending* ending : {&first, &second}) {
    const int64_t n = ending->result.count(), mine = CeilDiv(n, ColumnsOf(ending->reduce));
    if (n == 0) continue;
    TE_CHECK(mine <= INT32_MAX - int64_t{ctas}, "te_finish: a result is %s; pass one of less than 2^31",
             ending->result.shape().c_str());
    *task++ = {ending->partials.data, ending->result.data, ending->partials.count() / n, n,
               unsigned(mine),        ending->reduce,      ending->result.type};
    ctas += unsigned(mine);
  }
  if (ctas == 0 && args.scale_inv) ctas = 1;
  return ctas == 0 ? Status{} : Launch(stream, ctas, args);
}

Status ExpectTotals(const char* op, const Totals& of, const Axes& e, const Axes& amax_partials, const Axes& n,
                    const Axes& dbias_partials) {
  const auto with = [](const Tensor& result, const Axes& partials) {
    return partials.count() == 0 ? kOptional : Present(result) ? kRequired : kAbsent;
  };
  return Expect(op,
                {{"amax", of.amax, F32, e, kOptional},
                 {"dbias", of.dbias, F32, n, kOptional},
                 {"scale_inv", of.scale_inv, F32, {}, AbsentIf(!Present(of.scale))},
                 {"amax_partials", of.amax_partials, F32, amax_partials, with(of.amax, amax_partials)},
                 {"dbias_partials", of.dbias_partials, F32, dbias_partials, with(of.dbias, dbias_partials)}});
}

Status Finish(cudaStream_t stream, const Totals& of) {
  return FinishPartials(stream, {Reduce::kMaxOfBits, of.amax_partials, of.amax},
                        {Reduce::kSumOfFloats, of.dbias_partials, of.dbias}, of.scale, of.scale_inv);
}

}  // namespace te
