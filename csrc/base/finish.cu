#include "base/device.h"
#include "base/finish.h"
#include "base/fp8.cuh"
#include "base/reduce.cuh"

namespace te {
namespace {

constexpr int kColumns = 32, kRows = 16;  // of a CTA's threads

struct Parts {
  const void* parts;  // [count, n], f32, or i32 of an i32 result
  void* result;       // [n], of `type`
  int64_t count, n;
  unsigned ctas;
  Reduce reduce;
  Type type;
};

struct FinishArgs {
  Parts each[kMostEndings];
  const float* scale;
  float* scale_inv;  // or nullptr
};

__device__ void StoreAs(Type type, void* result, int64_t i, float value) {
  if (type == F32) static_cast<float*>(result)[i] = value;
  if (type == BF16) static_cast<__nv_bfloat16*>(result)[i] = static_cast<__nv_bfloat16>(value);
  if (type == F16) static_cast<__half*>(result)[i] = static_cast<__half>(value);
}

// A thread sums every kRows-th part of its column; these kRows sums are then added in their order.
__device__ void FinishSums(const Parts& a, unsigned cta) {
  __shared__ float sums[kRows][kColumns];
  const float* parts = static_cast<const float*>(a.parts);
  const int64_t column = int64_t{cta} * kColumns + threadIdx.x;
  float sum = 0.f;
  if (column < a.n)
#pragma unroll 8
    for (int64_t i = threadIdx.y; i < a.count; i += kRows) sum += parts[i * a.n + column];
  sums[threadIdx.y][threadIdx.x] = sum;
  __syncthreads();
  if (threadIdx.y != 0 || column >= a.n) return;
  for (int row = 1; row < kRows; ++row) sum += sums[row][threadIdx.x];
  StoreAs(a.type, a.result, column, sum);
}

// A column of counts or of the bits of maxima, which come to the same in any order.
template <typename Take, typename OfWarp>
__device__ __forceinline__ void FinishColumn(const Parts& a, unsigned column, Take take, OfWarp of_warp) {
  __shared__ unsigned of_warps[kMostWarps];
  const unsigned* parts = static_cast<const unsigned*>(a.parts);
  const int first = threadIdx.y * kColumns + threadIdx.x;
  unsigned total = 0;
#pragma unroll 8
  for (int64_t i = first; i < a.count; i += kColumns * kRows) total = take(total, parts[i * a.n + column]);
  total = OfCta(total, of_warps, of_warp);
  if (first == 0) static_cast<unsigned*>(a.result)[column] = total;
}

__device__ void FinishOne(const Parts& a, unsigned cta) {
  const auto larger = [](unsigned total, unsigned part) { return max(total, part); };
  const auto sum = [](unsigned total, unsigned part) { return total + part; };
  if (a.reduce == Reduce::kMax) return FinishColumn(a, cta, larger, WarpMax);
  if (a.type == S32) return FinishColumn(a, cta, sum, WarpSumOfInts);
  FinishSums(a, cta);
}

__global__ void __launch_bounds__(kColumns* kRows) te_finish(const __grid_constant__ FinishArgs a) {
  AwaitPrevious();
  if (a.scale_inv && blockIdx.x == 0 && threadIdx.x == 0 && threadIdx.y == 0) *a.scale_inv = 1.f / *a.scale;
  unsigned cta = blockIdx.x;
#pragma unroll
  for (int i = 0; i < kMostEndings; ++i) {
    const Parts& mine = a.each[i];
    if (cta < mine.ctas) return FinishOne(mine, cta);
    cta -= mine.ctas;
  }
}

// On Hopper, with code that awaits the kernel ahead, te_finish starts before that is over, if it lets it:
// half of te_finish's time is that of a start.
Status LaunchBehind(cudaStream_t stream, unsigned ctas, const FinishArgs& args) {
  const dim3 threads(kColumns, kRows);
  bool early = false;
#ifdef TE_HAS_90A
  early = IsHopper();
#endif
  if (!early) {
    te_finish<<<ctas, threads, 0, stream>>>(args);
    TE_LAUNCHED();
  }
  cudaLaunchAttribute behind = {};
  behind.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  behind.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config = {};
  config.gridDim = ctas, config.blockDim = threads, config.stream = stream;
  config.attrs = &behind, config.numAttrs = 1;
  TE_CUDA(cudaLaunchKernelEx(&config, te_finish, args));
  return {};
}

}  // namespace

Status FinishParts(cudaStream_t stream, const std::vector<Ending>& endings, const Tensor& scale,
                   const Tensor& scale_inv) {
  FinishArgs args{{}, Data<float>(scale), Data<float>(scale_inv)};
  unsigned ctas = 0;
  int used = 0;
  for (const Ending& ending : endings) {
    const int64_t n = ending.result.count();
    if (n == 0) continue;
    const int64_t count = ending.parts.count() / n;
    const bool any_order = ending.reduce == Reduce::kMax || ending.result.type == S32;
    const unsigned mine = unsigned(any_order ? n : CeilDiv(n, kColumns));
    args.each[used++] = {ending.parts.data, ending.result.data, count, n, mine,
                         ending.reduce,     ending.result.type};
    ctas += mine;
  }
  if (ctas == 0 && args.scale_inv) ctas = 1;
  if (ctas == 0) return {};
  return LaunchBehind(stream, ctas, args);
}

Status ExpectTotals(const char* op, bool has_parts, const Totals& of, const Axes& n, const Axes& e) {
  TE_TRY(Expect(op, {{"amax", of.amax, F32, e, kOptional},
                     {"dbias", of.dbias, F32, n, kOptional},
                     {"scale_inv", of.scale_inv, F32, {}, AbsentIf(!Present(of.scale))}}));
  const std::pair<const Tensor&, const Tensor&> all[] = {{of.amax, of.amax_parts},
                                                         {of.dbias, of.dbias_parts}};
  for (const auto& [result, parts] : all)
    TE_CHECK(!has_parts || Present(result) == Present(parts),
             "%s: %s is %s, and its parts are %s; pass both or neither", op,
             &result == &of.amax ? "amax" : "dbias", result.shape().c_str(), parts.shape().c_str());
  return {};
}

Status Finish(cudaStream_t stream, const Totals& of) {
  return FinishParts(stream,
                     {{Reduce::kMax, of.amax_parts, of.amax}, {Reduce::kSum, of.dbias_parts, of.dbias}},
                     of.scale, of.scale_inv);
}

}  // namespace te
