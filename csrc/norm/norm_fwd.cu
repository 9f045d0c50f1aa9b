// LayerNorm (Ba et al. 2016, https://arxiv.org/abs/1607.06450) and RMSNorm (Zhang & Sennrich 2019,
// https://arxiv.org/abs/1910.07467), forward:
//   y = (x - mean) * rstd * gamma + beta, rstd = (mean((x - mean)^2) + eps)^-1/2, for RMSNorm with mean = 0
// and straight to FP8. Statistics are f32; the variance is a second pass over registers, so it does not
// cancel. Bytes per element of bf16: 2 read, 2 written (y), or 1 (data), or 2 (data and data_t, in
// norm_fwd_t.cu).

#include <algorithm>

#include "base/finish.h"
#include "base/ops.h"
#include "base/reduce.cuh"
#include "base/tensor_sums.cuh"
#include "norm/norm.cuh"

namespace te {
namespace {

constexpr int kThreads = 768;      // of a CTA at most: 85 registers each
constexpr int kMostThreads = 512;  // of a row
constexpr int kStagedVecs = 4;     // of a thread: up to then gamma and beta are in shared memory
constexpr int kStages = 4;         // rows on their way or in work, of those that share a threadIdx.y

// mean (0 for RMSNorm) and rstd of a row, from kVecs vectors of each of its threads, `stride` columns apart;
// zeros beyond h. columns: from the thread's first to the row's end. turn: which scratch was the last in use.
//
// The second pass over registers does not cancel. Numbers of 16 bits the tensor cores add up, with their
// squares, in one pass with one barrier; where the mean is as large as what varies around it that is not
// enough.
template <typename T, int kVecs>
__device__ __forceinline__ float2 RowStats(const NormFwdArgs& a, const Vec<T, 8> (&x)[kVecs], int columns,
                                           int stride, float inv_h, float2 (*scratch)[kMostWarps],
                                           int& turn) {
  if constexpr (sizeof(T) == 2) {
    TensorSums<T> sums;
#pragma unroll
    for (int k = 0; k < kVecs; ++k) sums.Add(x[k], a.rms);
    const float2 of_row = RowSum(sums.Sum(), sums.Squares(), scratch[turn ^= 1]);
    float2 stats;
    if (StatsOfSums(of_row.x, of_row.y, inv_h, a.eps, a.rms, &stats)) return stats;
  }
  float mean = 0.f, sum = 0.f;
#pragma unroll
  for (int k = 0; k < kVecs; ++k) {
    float some = 0.f;  // a chain of additions for every vector
#pragma unroll
    for (int i = 0; i < 8; ++i) some += x[k][i];
    sum += some;
  }
  if (!a.rms) mean = RowSum(sum, scratch[turn ^= 1]) * inv_h;
  const auto mean_square = [&](float factor) {
    float sum = 0.f;
#pragma unroll
    for (int k = 0; k < kVecs; ++k) {
      float some = 0.f;
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        const float centered = fmaf(x[k][i], factor, -mean * factor);
        some += centered * centered;
      }
      sum += k * stride < columns ? some : 0.f;
    }
    return RowSum(sum, scratch[turn ^= 1]) * inv_h;
  };
  return make_float2(mean, Rstd(a.eps, mean_square));
}

// gamma and beta, by all threads, to `staged`, where StagedAffine finds them; zeros from h to `width`.
__device__ __forceinline__ void StageAffine(const NormFwdArgs& a, uint32_t staged, int width, int h,
                                            int stride) {
  for (int i = (threadIdx.y * blockDim.x + threadIdx.x) * 8; i < width; i += blockDim.y * stride) {
    const Affine<8> affine = i < h ? LoadAffine<8>(a, i) : Affine<8>{};
    Stage8(staged, width, i, affine.gamma), Stage8(staged + width * 4, width, i, affine.beta);
  }
  __syncthreads();
}

// blockDim.x threads have a row, 8 * kVecs columns each: their next rows are on their way to shared memory,
// in places of their own, so that no barrier is needed; in registers x is f32, unpacked once. blockDim.y such
// rows are in work at once and wait for nobody. Beyond h, rows are filled up with zeros to `width`. Q: the
// FP8 type, void without FP8 results.
template <typename T, typename Q, int kVecs>
__global__ void __launch_bounds__(kVecs > 4 ? kMostThreads : kThreads, 1)
    te_norm_fwd_rows(const NormFwdArgs a, int stages) {
  LetNextStart();
  constexpr bool kStaged = kVecs <= kStagedVecs;
  extern __shared__ uint4 dynamic[];  // gamma, beta f32 [width] each; ring T [blockDim.y, stages, width]
  __shared__ float2 scratch[2][kMostWarps];
  const int h = a.h, c = threadIdx.x * 8, stride = blockDim.x * 8, width = stride * kVecs;
  const uint32_t affine_at = SharedAddress(dynamic), slot_bytes = width * sizeof(T);
  const uint32_t ring =
      affine_at + (kStaged ? width * 8 : 0) + threadIdx.y * stages * slot_bytes + c * sizeof(T);
  const int64_t step = int64_t{gridDim.x} * blockDim.y;
  const float scale = a.scale ? *a.scale : 1.f, inv_h = 1.f / a.h;

  const auto prefetch = [&](int64_t row, uint32_t at) {
    const T* p = static_cast<const T*>(a.x) + row * h + c;
#pragma unroll
    for (int k = 0; k < kVecs; ++k)
      Prefetch8(at + k * stride * sizeof(T), p + k * stride, row < a.rows && c + k * stride < h);
    CommitPrefetch();
  };
  int64_t row = int64_t{blockIdx.x} * blockDim.y + threadIdx.y;
  for (int s = 0; s < stages; ++s) {
    for (int k = 0; k < kVecs; ++k)
      for (int i = 0; i < int(sizeof(T) / 2) && c + k * stride >= h; ++i)
        StoreShared(ring + s * slot_bytes + k * stride * sizeof(T) + i * 16, 0.f, 0.f, 0.f, 0.f);
    if (s + 1 < stages) prefetch(row + s * step, ring + s * slot_bytes);
  }
  if constexpr (kStaged) {
    StageAffine(a, affine_at, width, h, stride);
  }

  float amax = 0.f;
  int turn = 0;
  const uint32_t ring_end = ring + stages * slot_bytes;
  uint32_t now = ring, last = ring_end - slot_bytes;  // the slots of this row and of the one before
  for (; row < a.rows; row += step) {
    prefetch(row + (stages - 1) * step, last);
    WaitForPrefetch(stages - 1);
    Vec<T, 8> x[kVecs];
#pragma unroll
    for (int k = 0; k < kVecs; ++k) x[k] = LoadShared<T, 8>(now + k * stride * sizeof(T));
    const auto [mean, rstd] =
        a.known_rstd ? KnownStats(a, row) : RowStats(a, x, h - c, stride, inv_h, scratch, turn);
    if (threadIdx.x == 0) WriteStats(a, row, mean, rstd);
#pragma unroll
    for (int k = 0; k < kVecs; ++k) {
      const int column = c + k * stride;
      Affine<8> affine{};
      if (kStaged)
        affine = StagedAffine(affine_at, width, column);
      else if (column < h)
        affine = LoadAffine<8>(a, column);
      float y[8];
#pragma unroll
      for (int i = 0; i < 8; ++i) y[i] = x[k][i] - mean;
      amax = Normalize(y, rstd, affine, amax);  // beyond h gamma and beta are 0
      if (column < h) StoreRow<T, Q>(a, y, scale, row * h + column);
    }
    last = now, now = now + slot_bytes < ring_end ? now + slot_bytes : ring;
  }
  if (!std::is_void_v<Q>) StoreCtaAmax(a.amax_partials, a.rows, a.h, amax);
}

// RowStats of a row in memory, read twice (LayerNorm) or once (RMSNorm).
template <typename T, int N>
__device__ float2 LongRowStats(const NormFwdArgs& a, const T* x, int64_t stride, float inv_h,
                               float2 (*scratch)[kMostWarps], int& turn) {
  float mean = 0.f, sum = 0.f;
  if (!a.rms) {
    for (int64_t c = threadIdx.x * N; c < a.h; c += stride) {
      const Vec<T, N> v = Load<N>(x + c);
#pragma unroll
      for (int i = 0; i < N; ++i) sum += v[i];
    }
    mean = RowSum(sum, scratch[turn ^= 1]) * inv_h;
  }
  const auto mean_square = [&](float factor) {
    float sum = 0.f;
    for (int64_t c = threadIdx.x * N; c < a.h; c += stride) {
      const Vec<T, N> v = Load<N>(x + c);
#pragma unroll
      for (int i = 0; i < N; ++i) {
        const float centered = fmaf(v[i], factor, -mean * factor);
        sum += centered * centered;
      }
    }
    return RowSum(sum, scratch[turn ^= 1]) * inv_h;
  };
  return make_float2(mean, Rstd(a.eps, mean_square));
}

// Rows too long for registers (N = 8), or of a length that is no multiple of 8 (N = 1): kAmaxRows rows for a
// CTA, one after the other, read three times (LayerNorm) or twice (RMSNorm), after the first time from L1 or
// L2; once where the statistics are known.
template <typename T, typename Q, int N>
__global__ void __launch_bounds__(kMostThreads) te_norm_fwd_long_rows(const NormFwdArgs a) {
  LetNextStart();
  __shared__ float2 scratch[2][kMostWarps];
  const int64_t first_row = int64_t{blockIdx.x} * kAmaxRows, end = min(first_row + kAmaxRows, a.rows);
  const float scale = a.scale ? *a.scale : 1.f, inv_h = 1.f / a.h;
  const int64_t stride = blockDim.x * N;
  float amax = 0.f;
  int turn = 0;
  for (int64_t row = first_row; row < end; ++row) {
    const T* x = static_cast<const T*>(a.x) + row * a.h;
    const auto [mean, rstd] =
        a.known_rstd ? KnownStats(a, row) : LongRowStats<T, N>(a, x, stride, inv_h, scratch, turn);
    if (threadIdx.x == 0) WriteStats(a, row, mean, rstd);
    for (int64_t c = threadIdx.x * N; c < a.h; c += stride) {
      float y[N];
      const Vec<T, N> v = Load<N>(x + c);
#pragma unroll
      for (int i = 0; i < N; ++i) y[i] = v[i] - mean;
      amax = Normalize(y, rstd, LoadAffine<N>(a, c), amax);
      StoreRow<T, Q>(a, y, scale, row * a.h + c);
    }
  }
  if (!std::is_void_v<Q>) StoreCtaAmax(a.amax_partials, a.rows, a.h, amax);
}

// How te_norm_fwd_rows cuts a row.
struct Cut {
  int vecs_of_thread, x;            // x threads
  int64_t affine_bytes, row_bytes;  // of shared memory
  int64_t room;                     // rows in shared memory at most: one in work and one on its way, or more
};

template <typename T, typename Q>
Status LaunchRows(cudaStream_t stream, const NormFwdArgs& a) {
  Gpu gpu;
  TE_TRY(CurrentGpu(&gpu));
  const bool vectors = a.vectors();
  const int64_t vecs = (a.h + 7) / 8, bytes = gpu.shared_bytes - kStaticBytes;
  const auto cut = [&](int vecs_of_thread) {
    const int64_t x = (vecs + vecs_of_thread * 32 - 1) / (vecs_of_thread * 32) * 32,
                  width = x * vecs_of_thread * 8;
    const int64_t affine_bytes = vecs_of_thread <= kStagedVecs ? 2 * sizeof(float) * width : 0;
    const int64_t row_bytes = width * sizeof(T);
    return Cut{vecs_of_thread, int(x), affine_bytes, row_bytes, (bytes - affine_bytes) / row_bytes};
  };
  Cut of = cut(vecs <= 32 ? 1 : vecs <= 64 ? 2 : 4);
  if (of.x > kMostThreads || of.room < 2) of = cut(8);
  if (!vectors || of.x > kMostThreads || of.room < 2) {
    const int threads = a.h / (vectors ? 8 : 1) <= kThreads / 3 ? kThreads / 3 : kMostThreads;
    const auto kernel = vectors ? te_norm_fwd_long_rows<T, Q, 8> : te_norm_fwd_long_rows<T, Q, 1>;
    kernel<<<(a.rows + kAmaxRows - 1) / kAmaxRows, threads, 0, stream>>>(a);
    TE_LAUNCHED();
  }
  const auto launch = [&]<auto kKernel>() -> Status {
    TE_TRY(Prepare<kKernel>(gpu));
    const int64_t rows_of_sm = (a.rows + gpu.sms - 1) / gpu.sms;
    const int64_t most = (of.vecs_of_thread > 4 ? kMostThreads : kThreads) / of.x;
    const int y = std::min({most, of.room / 2, rows_of_sm});  // rows at once; at most 12 of more than a warp
    const int stages = std::min(of.room / y, int64_t{kStages});
    int64_t ctas = std::min((a.rows + y - 1) / y, int64_t{gpu.sms});
    if (a.amax_partials) ctas = std::min(ctas, AmaxPlaces(a.rows, a.h));
    kKernel<<<ctas, dim3(of.x, y), of.affine_bytes + y * stages * of.row_bytes, stream>>>(a, stages);
    TE_LAUNCHED();
  };
  if (of.vecs_of_thread == 1) return launch.template operator()<te_norm_fwd_rows<T, Q, 1>>();
  if (of.vecs_of_thread == 2) return launch.template operator()<te_norm_fwd_rows<T, Q, 2>>();
  if (of.vecs_of_thread == 4) return launch.template operator()<te_norm_fwd_rows<T, Q, 4>>();
  return launch.template operator()<te_norm_fwd_rows<T, Q, 8>>();
}

}  // namespace

Status LaunchNormFwd(cudaStream_t stream, Arg x, Arg gamma, Arg beta, Arg known_mean, Arg known_rstd,
                     Arg scale, Ret y, Ret data, Ret data_t, Ret mean, Ret rstd, Ret amax, Ret scale_inv,
                     Ret workspace, Ret amax_partials, double eps, bool rms, bool zero_centered) {
  const char* op = "te_norm_fwd";
  const NormArrays arrays{x, gamma, beta, mean, rstd, known_mean, known_rstd};
  Totals totals{scale, amax, kNone, scale_inv, amax_partials};
  TE_TRY(ExpectRank(op, "x", x, 1));
  TE_TRY(ExpectNorm(op, arrays, rms, kOptional));
  const Axes all(x), rows = all.Without(1), h{all.last()};
  const bool hands_over = Present(data_t) && !Present(known_rstd);
  const Axes places{CeilDiv(rows.count(), kTileRows), AmaxStrips(all.last())};
  TE_TRY(Expect(op, {{"scale", scale, F32, {}, RequiredIf(Present(data) || Present(data_t))},
                     {"y", y, x.type, all, kOptional},
                     {"data", data, kFp8, all, kOptional},
                     {"data_t", data_t, Fp8Like(data), h + rows, kOptional},
                     {"workspace", workspace, U8, {8 * rows.count()}, RequiredIf(hands_over)}}));
  TE_TRY(ExpectTotals(op, totals, {}, places));
  if (!Present(x)) {
    totals.amax_partials = kNone;  // which may be there nevertheless, and has nothing in it
    TE_TRY(Finish(stream, totals));
    return Fill(stream, 0xff, {mean, rstd});  // rows without columns have undefined statistics
  }
  NormFwdArgs args = NormFwdArgsOf(arrays, eps, rms, zero_centered);
  const bool e5m2 = IsE5M2(data, data_t);
  args.scale = Data<float>(scale), args.y = Data<void>(y), args.amax_partials = Data<float>(amax_partials);
  args.data = Data<uint8_t>(data), args.data_t = Data<uint8_t>(data_t);
  const auto launch_rows = [&]<typename T>() {
    if (!Present(data) && !Present(amax)) return LaunchRows<T, void>(stream, args);
    return e5m2 ? LaunchRows<T, __nv_fp8_e5m2>(stream, args) : LaunchRows<T, __nv_fp8_e4m3>(stream, args);
  };
  TE_TRY(Present(data_t) ? LaunchNormFwdTransposed(stream, args, x.type, e5m2, workspace)
                         : DispatchFloat(x.type, launch_rows));
  return Finish(stream, totals);
}

}  // namespace te
