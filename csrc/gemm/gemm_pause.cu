// A pause in front of a product. Its kernels take all multiprocessors as soon as the stream comes to them,
// and keep them to their end: a collective that is due at the same time, on another stream, would start
// behind them. One that has begun leaves them the rest, and they take its multiprocessors when it ends.
#include "base/ptx.cuh"
#include "gemm/gemm.h"

namespace te {
namespace {

constexpr int64_t kMost = 1000;  // us: a longer one is a mistake

__global__ void te_gemm_pause(uint64_t ns) {
  for (const uint64_t begin = GlobalTimer(); GlobalTimer() - begin < ns;) __nanosleep(100);
}

}  // namespace

Status Pause(cudaStream_t stream, int64_t microseconds) {
  TE_CHECK(microseconds >= 0 && microseconds <= kMost, "te_gemm: pause is %ld; pass 0 to %ld microseconds",
           long(microseconds), long(kMost));
  if (microseconds == 0) return {};
  const uint64_t ns = uint64_t(microseconds) * 1000;
  const auto kernel = te_gemm_pause;
  kernel<<<1, 1, 0, stream>>>(ns);
  TE_LAUNCHED();
}

}  // namespace te
