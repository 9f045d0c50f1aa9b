#include "finish.h"
#include "fp8.cuh"
#include "reduce.cuh"

namespace te {
namespace {

constexpr int kColumns = 32, kRows = 16;  // of a CTA's threads
constexpr int kMaxThreads = 1024;

// A thread sums every kRows-th part of its column; these kRows sums are then added in their order.
template <typename T>
__global__ void __launch_bounds__(kColumns* kRows)
    te_finish_sum(const float* parts, T* result, int64_t count, int64_t n) {
  __shared__ float sums[kRows][kColumns];
  const int64_t column = int64_t{blockIdx.x} * kColumns + threadIdx.x;
  float sum = 0.f;
  for (int64_t i = threadIdx.y; column < n && i < count; i += kRows) sum += parts[i * n + column];
  sums[threadIdx.y][threadIdx.x] = sum;
  __syncthreads();
  if (threadIdx.y != 0 || column >= n) return;
  for (int row = 1; row < kRows; ++row) sum += sums[row][threadIdx.x];
  result[column] = static_cast<T>(sum);
}

__global__ void __launch_bounds__(kMaxThreads)
    te_finish_max(const float* parts, float* result, int64_t count) {
  __shared__ unsigned of_warps[kMostWarps];
  unsigned peak = 0;
  for (int64_t i = threadIdx.x; i < count; i += kMaxThreads) peak = max(peak, __float_as_uint(parts[i]));
  peak = CtaMax(peak, of_warps);
  if (threadIdx.x == 0) *result = __uint_as_float(peak);
}

}  // namespace

Status FinishParts(cudaStream_t stream, Reduce reduce, const Tensor& parts, const Tensor& result) {
  const int64_t n = result.count(), count = n > 0 ? parts.count() / n : 0;
  if (n == 0) return {};
  if (reduce == Reduce::kMax) {
    te_finish_max<<<1, kMaxThreads, 0, stream>>>(Data<float>(parts), Data<float>(result), count);
    TE_LAUNCHED();
  }
  return DispatchFloat(result.type, [&]<typename T>() -> Status {
    const auto kernel = te_finish_sum<T>;
    kernel<<<unsigned(CeilDiv(n, kColumns)), dim3(kColumns, kRows), 0, stream>>>(Data<float>(parts),
                                                                                 Data<T>(result), count, n);
    TE_LAUNCHED();
  });
}

}  // namespace te
