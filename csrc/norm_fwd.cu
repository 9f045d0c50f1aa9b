// LayerNorm (Ba et al. 2016, https://arxiv.org/abs/1607.06450) and RMSNorm (Zhang & Sennrich 2019,
// https://arxiv.org/abs/1910.07467), forward:
//   y = (x - mean) * rstd * gamma + beta, rstd = (mean((x - mean)^2) + eps)^-1/2, for RMSNorm with mean = 0
// and straight to FP8. Statistics are f32; the variance is a second pass over registers, so it does not
// cancel. Bytes per element of bf16: 2 read, 2 written (y), or 1 (data), or 2 (data and data_t, in
// norm_fwd_t.cu).

#include "norm.cuh"
#include "reduce.cuh"

namespace te {
namespace {

constexpr int kThreads = 256;  // of a CTA, unless one row needs more
constexpr int kMostThreads = 512;

// The amax of the CTA's rows, first_row .. first_row + rows_of_cta: in the first one's place, zeros in the
// others'. The last CTA fills its block of 32 rows to the end.
__device__ void StoreAmax(const NormFwdArgs& a, unsigned amax, int64_t first_row, int rows_of_cta) {
  __shared__ unsigned scratch[kMostWarps];
  amax = CtaMax(amax, scratch);
  const int first = first_row / kAmaxRows % kAmaxesPerBlock;
  const int places = blockIdx.x + 1 < gridDim.x ? rows_of_cta / kAmaxRows : kAmaxesPerBlock - first;
  if (a.amax && WarpIndex() == 0 && Lane() < places)
    a.amax[first_row / kAmaxRows + Lane()] = Lane() == 0 ? __uint_as_float(amax) : 0.f;
}

// blockDim.x threads have a row in registers, 8 * kVecs columns each, while their next row is on its way;
// blockDim.y rows are in work at once. A CTA has rows_of_cta rows. gamma and beta come from L1. The register
// limit lets three CTAs of 256 threads share a multiprocessor, so that three rows are on their way.
// Q: the FP8 type, void without FP8 results.
template <typename T, typename Q, int kVecs>
__global__ void __maxnreg__(kVecs * sizeof(T) <= 8 ? 80 : 128)
    NormFwdRows(const NormFwdArgs a, int rows_of_cta) {
  __shared__ float2 scratch[2][kMostWarps];
  const int64_t first_row = int64_t{blockIdx.x} * rows_of_cta, end = min(first_row + rows_of_cta, a.rows);
  const float scale = a.scale ? *a.scale : 1.f, inv_h = 1.f / a.h;
  const int h = a.h, c = threadIdx.x * 8, stride = blockDim.x * 8;

  Vec<T, 8> next[kVecs];
  const auto fetch = [&](int64_t row) {
    const T* p = static_cast<const T*>(a.x) + row * h;
#pragma unroll
    for (int k = 0; k < kVecs; ++k)
      next[k] = LoadOnce<8>(p + c + k * stride, row < end && c + k * stride < h);
  };

  fetch(first_row + threadIdx.y);
  unsigned amax = 0;
  int turn = 0;
  // All threads go round together: RowSum has barriers.
  for (int64_t row0 = first_row; row0 < end; row0 += blockDim.y) {
    const int64_t row = row0 + threadIdx.y;
    Vec<T, 8> x[kVecs];
#pragma unroll
    for (int k = 0; k < kVecs; ++k) x[k] = next[k];
    fetch(row + blockDim.y);

    float mean = 0.f, sum = 0.f;
    if (!a.rms) {
#pragma unroll
      for (int k = 0; k < kVecs; ++k) {
        float part = 0.f;  // a chain of additions for every vector
#pragma unroll
        for (int i = 0; i < 8; ++i) part += x[k][i];  // zeros beyond h
        sum += part;
      }
      mean = RowSum(sum, scratch[turn ^= 1]) * inv_h, sum = 0.f;
    }
#pragma unroll
    for (int k = 0; k < kVecs; ++k) {
      float part = 0.f;
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        const float centered = x[k][i] - mean;
        part += centered * centered;
      }
      if (c + k * stride < h) sum += part;
    }
    const float rstd = rsqrtf(RowSum(sum, scratch[turn ^= 1]) * inv_h + a.eps);

    if (row >= end) continue;
    if (threadIdx.x == 0) {
      if (a.mean) a.mean[row] = mean;
      a.rstd[row] = rstd;
    }
#pragma unroll
    for (int k = 0; k < kVecs; ++k) {
      const int column = c + k * stride;
      if (column >= h) continue;
      float y[8];
      const unsigned peak = Normalize(x[k], mean, rstd, LoadAffine<8>(a, column), y);
      if (!std::is_void_v<Q>) amax = max(amax, peak);
      StoreRow<T, Q>(a, y, scale, row * h + column);
    }
  }
  if (!std::is_void_v<Q>) StoreAmax(a, amax, first_row, rows_of_cta);
}

// Rows too long for registers (N = 8), or of a length that is no multiple of 8 (N = 1): kAmaxRows rows for a
// CTA, one after the other, read three times (LayerNorm) or twice (RMSNorm), after the first time from L1 or
// L2.
template <typename T, typename Q, int N>
__global__ void __launch_bounds__(kMostThreads) NormFwdLongRows(const NormFwdArgs a) {
  __shared__ float2 scratch[2][kMostWarps];
  const int64_t first_row = int64_t{blockIdx.x} * kAmaxRows, end = min(first_row + kAmaxRows, a.rows);
  const float scale = a.scale ? *a.scale : 1.f, inv_h = 1.f / a.h;
  const int64_t stride = blockDim.x * N;
  unsigned amax = 0;
  int turn = 0;
  for (int64_t row = first_row; row < end; ++row) {
    const T* x = static_cast<const T*>(a.x) + row * a.h;
    float mean = 0.f, sum = 0.f;
    if (!a.rms) {
      for (int64_t c = threadIdx.x * N; c < a.h; c += stride) {
        const Vec<T, N> v = Load<N>(x + c);
#pragma unroll
        for (int i = 0; i < N; ++i) sum += v[i];
      }
      mean = RowSum(sum, scratch[turn ^= 1]) * inv_h, sum = 0.f;
    }
    for (int64_t c = threadIdx.x * N; c < a.h; c += stride) {
      const Vec<T, N> v = Load<N>(x + c);
#pragma unroll
      for (int i = 0; i < N; ++i) {
        const float centered = v[i] - mean;
        sum += centered * centered;
      }
    }
    const float rstd = rsqrtf(RowSum(sum, scratch[turn ^= 1]) * inv_h + a.eps);
    if (threadIdx.x == 0) {
      if (a.mean) a.mean[row] = mean;
      a.rstd[row] = rstd;
    }
    for (int64_t c = threadIdx.x * N; c < a.h; c += stride) {
      float y[N];
      const unsigned peak = Normalize(Load<N>(x + c), mean, rstd, LoadAffine<N>(a, c), y);
      if (!std::is_void_v<Q>) amax = max(amax, peak);
      StoreRow<T, Q>(a, y, scale, row * a.h + c);
    }
  }
  if (!std::is_void_v<Q>) StoreAmax(a, amax, first_row, kAmaxRows);
}

template <typename T, typename Q>
ffi::Error LaunchRows(cudaStream_t stream, const NormFwdArgs& a) {
  const bool vectors = a.h % 8 == 0 && Aligned(a.x) && Aligned(a.y) && Aligned(a.data) &&
                       Aligned(a.gamma.data) && Aligned(a.beta.data);
  const int64_t vecs = a.h / 8, long_ctas = (a.rows + kAmaxRows - 1) / kAmaxRows;
  const int threads_for_long = a.h / (vectors ? 8 : 1) <= kThreads ? kThreads : kMostThreads;
  // f32 has half the columns in as many registers.
  const int64_t most_vecs = kMostThreads * (sizeof(T) == 2 ? 8 : 4);
  if (!vectors || vecs > most_vecs) {
    const auto kernel = vectors ? NormFwdLongRows<T, Q, 8> : NormFwdLongRows<T, Q, 1>;
    kernel<<<long_ctas, threads_for_long, 0, stream>>>(a);
    TE_LAUNCHED();
  }
  auto launch = [&](auto kernel, int vecs_of_thread) -> ffi::Error {
    const int x = (vecs + vecs_of_thread * 32 - 1) / (vecs_of_thread * 32) * 32;  // threads of a row
    int y = 1;                                                                    // rows at once
    while (x * y * 2 <= kThreads) y *= 2;
    // More rows for a CTA as there are more: the next row's load hides behind this one.
    int rows_of_cta = kAmaxRows > y ? kAmaxRows : y;
    while (rows_of_cta < 32 && a.rows / (rows_of_cta * 2) >= 2048) rows_of_cta *= 2;
    kernel<<<(a.rows + rows_of_cta - 1) / rows_of_cta, dim3(x, y), 0, stream>>>(a, rows_of_cta);
    TE_LAUNCHED();
  };
  if (vecs <= 32) return launch(NormFwdRows<T, Q, 1>, 1);
  if (vecs <= 64) return launch(NormFwdRows<T, Q, 2>, 2);
  if (vecs <= kMostThreads * 4) return launch(NormFwdRows<T, Q, 4>, 4);
  if constexpr (sizeof(T) == 2) return launch(NormFwdRows<T, Q, 8>, 8);
  return ffi::Error::Internal("te_norm_fwd: unreachable");
}

// Every operand and result against x [rows, h].
ffi::Error CheckNormFwd(int64_t rows, int64_t h, bool rms, Arg x, Arg gamma, Arg beta, Arg scale, Ret y,
                        Ret data, Ret data_t, Ret mean, Ret rstd, Ret amax) {
  const auto holds = [](const Arg& a, int64_t n) { return !Present(a) || int64_t(a.element_count()) == n; };
  TE_CHECK(int64_t(gamma.element_count()) == h, "te_norm_fwd: gamma is %s, x is %s", Shape(gamma).c_str(),
           Shape(x).c_str());
  TE_CHECK(holds(beta, h), "te_norm_fwd: beta is %s, x is %s", Shape(beta).c_str(), Shape(x).c_str());
  TE_CHECK(holds(*y, rows * h) && (!Present(y) || y->element_type() == x.element_type()),
           "te_norm_fwd: y is %s, x is %s of another type or size", Shape(*y).c_str(), Shape(x).c_str());
  TE_CHECK(holds(*data, rows * h) && holds(*data_t, rows * h), "te_norm_fwd: data is %s, data_t %s, x %s",
           Shape(*data).c_str(), Shape(*data_t).c_str(), Shape(x).c_str());
  TE_CHECK(!Present(data) || !Present(data_t) || data->element_type() == data_t->element_type(),
           "te_norm_fwd: data and data_t differ in type");
  TE_CHECK(Present(scale) || !(Present(data) || Present(data_t)), "te_norm_fwd: FP8 results need a scale");
  TE_CHECK(!Present(scale) || (scale.element_type() == ffi::F32 && scale.element_count() == 1),
           "te_norm_fwd: scale must be f32 []");
  TE_CHECK(holds(*mean, rows) && !(rms && (Present(mean) || Present(beta))),
           "te_norm_fwd: RMSNorm has no mean and no beta; mean is %s, x is %s", Shape(*mean).c_str(),
           Shape(x).c_str());
  TE_CHECK(int64_t(rstd->element_count()) == rows, "te_norm_fwd: rstd is %s, x is %s", Shape(*rstd).c_str(),
           Shape(x).c_str());
  TE_CHECK(holds(*amax, (rows + 31) / 32 * kAmaxesPerBlock),
           "te_norm_fwd: partial amax is %s, expected [%ld, %d]", Shape(*amax).c_str(),
           long((rows + 31) / 32), kAmaxesPerBlock);
  return ffi::Error::Success();
}

ffi::Error LaunchNormFwd(cudaStream_t stream, Arg x, Arg gamma, Arg beta, Arg scale, Ret y, Ret data,
                         Ret data_t, Ret mean, Ret rstd, Ret amax, double eps, bool rms, bool zero_centered) {
  TE_CHECK(x.dimensions().size() >= 1, "te_norm_fwd: x is a scalar, expected [..., h]");
  const int64_t h = x.dimensions().back(), rows = h ? x.element_count() / h : 0;
  if (rows == 0) {  // the partial amax is there nevertheless
    if (Present(amax)) TE_CUDA(cudaMemsetAsync(amax->untyped_data(), 0, amax->size_bytes(), stream));
    return ffi::Error::Success();
  }
  TE_TRY(CheckNormFwd(rows, h, rms, x, gamma, beta, scale, y, data, data_t, mean, rstd, amax));
  const NormFwdArgs args{Data<void>(x),
                         WeightsOf(gamma),
                         WeightsOf(beta),
                         Data<float>(scale),
                         Data<void>(y),
                         Data<uint8_t>(data),
                         Data<uint8_t>(data_t),
                         Data<float>(mean),
                         Data<float>(rstd),
                         Data<float>(amax),
                         rows,
                         h,
                         float(eps),
                         rms,
                         zero_centered};
  const auto type = Present(data)     ? data->element_type()
                    : Present(data_t) ? data_t->element_type()
                                      : ffi::F8E4M3FN;
  if (Present(data_t)) return LaunchNormFwdTransposed(stream, args, x.element_type(), type);
  return DispatchFloat(x.element_type(), [&]<typename T>() -> ffi::Error {
    if (!Present(data) && !Present(amax)) return LaunchRows<T, void>(stream, args);
    return DispatchFp8(type, [&]<typename Q>() -> ffi::Error { return LaunchRows<T, Q>(stream, args); });
  });
}

}  // namespace

TE_HANDLER(te_norm_fwd, LaunchNormFwd,
           Bind()
               .Ctx<Stream>()
               .Arg<Arg>()  // x: ... h
               .Arg<Arg>()  // gamma: h
               .Arg<Arg>()  // beta?: h
               .Arg<Arg>()  // scale?: f32 []
               .Ret<Arg>()  // y?: ... h
               .Ret<Arg>()  // data?: ... h
               .Ret<Arg>()  // data_t?: h ...
               .Ret<Arg>()  // mean?: ...
               .Ret<Arg>()  // rstd: ...
               .Ret<Arg>()  // amax?: partial [ceil(rows / 32), 8]
               .Attr<double>("eps")
               .Attr<bool>("rms")
               .Attr<bool>("zero_centered"));

}  // namespace te
