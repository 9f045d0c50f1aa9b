#include <algorithm>

#include "base/fp8.cuh"
#include "gemm/gemm.h"

namespace te {
namespace {

constexpr int kThreads = 256;
constexpr int64_t kMostCtas = 1024;

template <typename T, typename B>
__global__ void __launch_bounds__(kThreads)
    te_gemm_empty(const B* bias, const T* c, T* out, int64_t count, int64_t n) {
  for (int64_t i = blockIdx.x * int64_t{kThreads} + threadIdx.x; i < count;
       i += gridDim.x * int64_t{kThreads}) {
    const float b = bias ? static_cast<float>(bias[i % n]) : 0.f;
    out[i] = static_cast<T>(b + (c ? static_cast<float>(c[i]) : 0.f));
  }
}

template <typename T, typename B>
Status Launch(cudaStream_t stream, const Tensor& bias, const Tensor& c, const Tensor& out, int64_t n) {
  const int64_t count = out.count(), ctas = std::min((count + kThreads - 1) / kThreads, kMostCtas);
  const auto kernel = te_gemm_empty<T, B>;
  kernel<<<unsigned(ctas), kThreads, 0, stream>>>(Data<B>(bias), Data<T>(c), Data<T>(out), count, n);
  TE_LAUNCHED();
}

}  // namespace

Status BiasPlusC(cudaStream_t stream, const Tensor& bias, const Tensor& c, const Tensor& out, int64_t n) {
  return DispatchFloat(out.type, [&]<typename T>() -> Status {
    if (bias.type == BF16) return Launch<T, __nv_bfloat16>(stream, bias, c, out, n);
    return Launch<T, T>(stream, bias, c, out, n);
  });
}

}  // namespace te
