// LayerNorm and RMSNorm, backward. With xhat = (x - mean) * rstd and dxhat = dy * gamma:
//   dx = rstd * (dxhat - mean(dxhat) - xhat * mean(dxhat * xhat)), for RMSNorm without the first mean
//   dgamma = sum over rows of dy * xhat, dbeta = sum over rows of dy
// dres, the gradient that comes by the residual connection around the norm, is added to dx in f32. dgamma and
// dbeta are partials first, one for each CTA, which are added in a fixed order: no atomics, the same bits
// every time. Bytes per element of bf16: 4 read (6 with dres), 2 written; a CTA's partials add 4 or 8 per
// column.

#include <algorithm>

#include "base/finish.h"
#include "base/ops.h"
#include "base/reduce.cuh"
#include "norm/norm.cuh"

namespace te {
namespace {

constexpr int kThreads = 512;  // of a CTA at most: 128 registers each
constexpr int kStages = 4;     // rows on their way or in work, of those that share a threadIdx.y

struct NormBwdArgs {
  const void* dy;          // [rows, h]
  const void* x;           // [rows, h] of dy's type
  const float* mean;       // [rows] or nullptr (RMSNorm)
  const float* rstd;       // [rows]
  Weights gamma;           // [h]
  const void* dres;        // [rows, h] of dy's type, or nullptr
  void* dx;                // [rows, h] of dy's type
  float* dgamma_partials;  // [gridDim.x, h]
  float* dbeta_partials;   // [gridDim.x, h] or nullptr
  int64_t rows, h;
  bool zero_centered;
};

// What a row's dx needs; RMSNorm has mean = mean_dxhat = 0.
struct RowStats {
  float mean, rstd, mean_dxhat, mean_dxhat_xhat;
};

// mean and rstd of a row; zeros beyond the last.
template <bool kRms>
__device__ __forceinline__ float2 StatsOf(const NormBwdArgs& a, int64_t row) {
  return row < a.rows ? make_float2(kRms ? 0.f : a.mean[row], a.rstd[row]) : make_float2(0.f, 0.f);
}

// rstd * (dxhat - mean_dxhat - xhat * mean_dxhat_xhat)
__device__ __forceinline__ float InputGradient(float dxhat, float xhat, const RowStats& s) {
  return fmaf(dxhat, s.rstd, -fmaf(xhat, s.rstd * s.mean_dxhat_xhat, s.rstd * s.mean_dxhat));
}

template <typename T, int N>
__device__ __forceinline__ void AddTo(float (&sums)[N], const Vec<T, N>& v) {
#pragma unroll
  for (int i = 0; i < N; ++i) sums[i] += v[i];
}

// Adds 8 columns of a row to the row's sums, which will be its means, and to the columns' sums over rows.
template <bool kRms>
__device__ __forceinline__ void AddColumns(const float (&g)[8], const float (&xhat)[8],
                                           const float (&dxhat)[8], RowStats& s, float (&dgamma)[8],
                                           float (&dbeta)[8]) {
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    if (!kRms) s.mean_dxhat += dxhat[i], dbeta[i] += g[i];
    s.mean_dxhat_xhat += dxhat[i] * xhat[i];
    dgamma[i] += g[i] * xhat[i];
  }
}

// Turns the sums that each thread has of a row into the row's means.
template <bool kRms>
__device__ __forceinline__ void FinishMeans(RowStats& s, float inv_h, float2* scratch) {
  if constexpr (kRms) {
    s.mean_dxhat_xhat = RowSum(s.mean_dxhat_xhat, scratch) * inv_h;
  } else {
    const float2 sums = RowSum(s.mean_dxhat, s.mean_dxhat_xhat, scratch);
    s.mean_dxhat = sums.x * inv_h, s.mean_dxhat_xhat = sums.y * inv_h;
  }
}

// What a thread of te_norm_bwd_rows has of its rows: 8 * kVecs columns, `stride` apart, in slots of
// shared memory T [2 or 3, width] (x, dy and, if there, dres), and gamma of these columns.
template <typename T, int kVecs>
struct RowShare {
  static constexpr bool kKeep = kVecs < 4;  // registers suffice for gamma
  const NormBwdArgs& a;
  int h, c, stride, width;  // c: of the first column
  uint32_t row_bytes;
  uint32_t gamma_at;  // f32 [width] in shared memory, if `staged`
  bool staged;

  // Sends the row on its way to the slot where the thread has `at`.
  __device__ void Prefetch(int64_t row, uint32_t at) const {
    const int64_t from = row * h + c;
#pragma unroll
    for (int k = 0; k < kVecs; ++k) {
      const bool inside = row < a.rows && c + k * stride < h;
      const uint32_t to = at + k * stride * sizeof(T);
      Prefetch8(to, static_cast<const T*>(a.x) + from + k * stride, inside);
      Prefetch8(to + row_bytes, static_cast<const T*>(a.dy) + from + k * stride, inside);
      if (a.dres) Prefetch8(to + 2 * row_bytes, static_cast<const T*>(a.dres) + from + k * stride, inside);
    }
    CommitPrefetch();
  }

  // Fetches gamma, into registers or shared memory. To be called once, before Normalize.
  __device__ __forceinline__ void FetchGamma(float (&kept_gamma)[kKeep ? kVecs : 1][8]) const {
    if constexpr (kKeep) {
#pragma unroll
      for (int k = 0; k < kVecs; ++k)
        if (c + k * stride < h) LoadGamma(a.gamma, a.zero_centered, c + k * stride, kept_gamma[k]);
    } else if (staged) {  // each thread its own columns; blockDim.y is 1
      for (int i = c; i < width; i += stride) {
        float gamma[8] = {};
        if (i < h) LoadGamma(a.gamma, a.zero_centered, i, gamma);
        Stage8(gamma_at, width, i, gamma);
      }
    }
  }

  // Computes g (dy in f32), xhat and dxhat of the k-th 8 columns of the row at `at`; beyond h g and dxhat are
  // 0.
  __device__ __forceinline__ void Normalize(uint32_t at, int k, const RowStats& s,
                                            const float (&kept_gamma)[8], float (&g)[8], float (&xhat)[8],
                                            float (&dxhat)[8]) const {
    const Vec<T, 8> x = LoadShared<T, 8>(at + k * stride * sizeof(T));
    const Vec<T, 8> dy = LoadShared<T, 8>(at + k * stride * sizeof(T) + row_bytes);
    float gamma[8] = {};
    if constexpr (kKeep) {
#pragma unroll
      for (int i = 0; i < 8; ++i) gamma[i] = kept_gamma[i];
    } else if (staged) {
      LoadStaged8(gamma_at, width, c + k * stride, gamma);
    } else if (c + k * stride < h) {
      LoadGamma(a.gamma, a.zero_centered, c + k * stride, gamma);
    }
#pragma unroll
    for (int i = 0; i < 8; ++i) g[i] = dy[i], xhat[i] = (x[i] - s.mean) * s.rstd, dxhat[i] = g[i] * gamma[i];
  }
};

// blockDim.x threads have a row, 8 * kVecs columns each: its and the next rows' x, dy and dres are on their
// way to shared memory, in places of their own, so that no barrier is needed. Registers hold the sums of the
// thread's columns over all rows of the CTA, and gamma, xhat and dxhat where they suffice (kVecs < 4); else
// gamma is in shared memory, if `staged`, and xhat and dxhat are computed twice. blockDim.y rows are in work
// at once and wait for nobody. Beyond h, rows are filled up with zeros to `width`.
template <typename T, int kVecs, bool kRms>
__global__ void __launch_bounds__(kThreads, 1)
    te_norm_bwd_rows(const NormBwdArgs a, int stages, bool staged) {
  LetNextStart();
  constexpr bool kKeep = RowShare<T, kVecs>::kKeep;
  extern __shared__ uint4 dynamic[];  // gamma f32 [width]; ring T [blockDim.y, stages, 2 or 3, width]
  __shared__ float2 scratch[2][kMostWarps];
  const float inv_h = 1.f / a.h;
  const int h = a.h, c = threadIdx.x * 8, stride = blockDim.x * 8, width = stride * kVecs;
  const uint32_t row_bytes = width * sizeof(T), slot_bytes = (a.dres ? 3 : 2) * row_bytes;
  const uint32_t gamma_at = SharedAddress(dynamic);
  const uint32_t ring =
      gamma_at + (staged ? width * 4 : 0) + threadIdx.y * stages * slot_bytes + c * sizeof(T);
  const RowShare<T, kVecs> share{a, h, c, stride, width, row_bytes, gamma_at, staged};
  int64_t row = int64_t{blockIdx.x} * blockDim.y + threadIdx.y, step = int64_t{gridDim.x} * blockDim.y;
  for (int s = 0; s < stages; ++s) {
    for (int k = 0; k < kVecs; ++k)
      for (int i = 0; i < int(sizeof(T) / 2) && c + k * stride >= h; ++i) {
        const uint32_t to = ring + s * slot_bytes + k * stride * sizeof(T) + i * 16;
        StoreShared(to, 0.f, 0.f, 0.f, 0.f), StoreShared(to + row_bytes, 0.f, 0.f, 0.f, 0.f);
      }
    if (s + 1 < stages) share.Prefetch(row + s * step, ring + s * slot_bytes);
  }
  float kept_gamma[kKeep ? kVecs : 1][8] = {}, dgamma[kVecs][8] = {}, dbeta[kVecs][8] = {};
  share.FetchGamma(kept_gamma);

  float2 next = StatsOf<kRms>(a, row), after = StatsOf<kRms>(a, row + step);
  int turn = 0;
  const uint32_t ring_end = ring + stages * slot_bytes;
  uint32_t now = ring, last = ring_end - slot_bytes;  // the slots of this row and of the one before
  for (; row < a.rows; row += step) {
    share.Prefetch(row + (stages - 1) * step, last);
    RowStats s{next.x, next.y, 0.f, 0.f};
    next = after, after = StatsOf<kRms>(a, row + 2 * step);
    WaitForPrefetch(stages - 1);
    float g[8], xhat[kKeep ? kVecs : 1][8], dxhat[kKeep ? kVecs : 1][8];
#pragma unroll
    for (int k = 0; k < kVecs; ++k) {
      const int kept = kKeep ? k : 0;
      share.Normalize(now, k, s, kept_gamma[kept], g, xhat[kept], dxhat[kept]);
      AddColumns<kRms>(g, xhat[kept], dxhat[kept], s, dgamma[k], dbeta[k]);
    }
    FinishMeans<kRms>(s, inv_h, scratch[turn ^= 1]);
#pragma unroll
    for (int k = 0; k < kVecs; ++k) {
      const int kept = kKeep ? k : 0;
      float dx[8];
      if (!kKeep) share.Normalize(now, k, s, kept_gamma[kept], g, xhat[kept], dxhat[kept]);
#pragma unroll
      for (int i = 0; i < 8; ++i) dx[i] = InputGradient(dxhat[kept][i], xhat[kept][i], s);
      if (a.dres) AddTo(dx, LoadShared<T, 8>(now + k * stride * sizeof(T) + 2 * row_bytes));
      const int column = c + k * stride;
      if (column < h) Store(static_cast<T*>(a.dx) + row * h + column, Round<T>(dx));
    }
    last = now, now = now + slot_bytes < ring_end ? now + slot_bytes : ring;
  }
  WaitForPrefetch(0);
  // The ring, no longer needed, has room for two sums of each row: at least two slots of two rows each.
  float* of_rows = reinterpret_cast<float*>(dynamic);
  const int pitch = stages * slot_bytes / sizeof(float);
  StoreRowsSums(dgamma, of_rows, pitch, a.dgamma_partials + int64_t{blockIdx.x} * h, h);
  if (!kRms && a.dbeta_partials)
    StoreRowsSums(dbeta, of_rows + width, pitch, a.dbeta_partials + int64_t{blockIdx.x} * h, h);
}

// Rows too long for registers (N = 8), or of a length that is no multiple of 8 (N = 1). A CTA takes its rows
// by kLongRows: each row's means first, then columns by columns dx and the sums, added to the CTA's partial
// sums in memory. x and dy are read twice, the second time from L2 as far as it holds them.
constexpr int kLongRows = 8;

template <typename T, bool kRms, int N>
__device__ RowStats LongRowStats(const NormBwdArgs& a, int64_t row, float2 (&scratch)[2][kMostWarps],
                                 int* turn) {
  RowStats s{kRms ? 0.f : a.mean[row], a.rstd[row], 0.f, 0.f};
  for (int64_t c = threadIdx.x * N; c < a.h; c += kThreads * N) {
    const Vec<T, N> x = Load<N>(static_cast<const T*>(a.x) + row * a.h + c);
    const Vec<T, N> dy = Load<N>(static_cast<const T*>(a.dy) + row * a.h + c);
    float gamma[N];
    LoadGamma(a.gamma, a.zero_centered, c, gamma);
#pragma unroll
    for (int i = 0; i < N; ++i) {
      const float dxhat = dy[i] * gamma[i];
      if (!kRms) s.mean_dxhat += dxhat;
      s.mean_dxhat_xhat += dxhat * ((x[i] - s.mean) * s.rstd);
    }
  }
  const float2 sums = RowSum(s.mean_dxhat, s.mean_dxhat_xhat, scratch[*turn ^= 1]);
  s.mean_dxhat = sums.x / a.h, s.mean_dxhat_xhat = sums.y / a.h;
  return s;
}

template <typename T, bool kRms, int N>
__global__ void __launch_bounds__(kThreads) te_norm_bwd_long_rows(const NormBwdArgs a) {
  LetNextStart();
  __shared__ float2 scratch[2][kMostWarps];
  __shared__ RowStats stats[kLongRows];
  float* partial_dgamma = a.dgamma_partials + blockIdx.x * a.h;
  float* partial_dbeta = kRms || !a.dbeta_partials ? nullptr : a.dbeta_partials + blockIdx.x * a.h;
  int turn = 0;
  bool first = true;
  for (int64_t row0 = int64_t{blockIdx.x} * kLongRows; row0 < a.rows || first;
       row0 += int64_t{gridDim.x} * kLongRows) {
    const int rows = max(min(a.rows - row0, int64_t{kLongRows}), int64_t{0});
    __syncthreads();  // stats is free
    for (int r = 0; r < rows; ++r) {
      const RowStats s = LongRowStats<T, kRms, N>(a, row0 + r, scratch, &turn);
      if (threadIdx.x == 0) stats[r] = s;
    }
    __syncthreads();
    for (int64_t c = threadIdx.x * N; c < a.h; c += kThreads * N) {
      float gamma[N], dgamma[N] = {}, dbeta[N] = {};
      if (!first) AddTo(dgamma, Load<N>(partial_dgamma + c));
      if (!first && partial_dbeta) AddTo(dbeta, Load<N>(partial_dbeta + c));
      LoadGamma(a.gamma, a.zero_centered, c, gamma);
      for (int r = 0; r < rows; ++r) {
        const int64_t offset = (row0 + r) * a.h + c;
        const Vec<T, N> x = LoadOnce<N>(static_cast<const T*>(a.x) + offset);
        const Vec<T, N> dy = LoadOnce<N>(static_cast<const T*>(a.dy) + offset);
        const RowStats s = stats[r];
        float dx[N];
#pragma unroll
        for (int i = 0; i < N; ++i) {
          const float g = dy[i], xhat = (x[i] - s.mean) * s.rstd;
          dx[i] = InputGradient(g * gamma[i], xhat, s);
          dgamma[i] += g * xhat, dbeta[i] += g;
        }
        if (a.dres) AddTo(dx, LoadOnce<N>(static_cast<const T*>(a.dres) + offset));
        Store(static_cast<T*>(a.dx) + offset, Round<T>(dx));
      }
      Store(partial_dgamma + c, Round<float>(dgamma));
      if (partial_dbeta) Store(partial_dbeta + c, Round<float>(dbeta));
    }
    first = false;
  }
}

template <typename T, bool kRms>
Status LaunchRows(cudaStream_t stream, const NormBwdArgs& a, int64_t ctas) {
  Gpu gpu;
  TE_TRY(CurrentGpu(&gpu));
  const bool vectors = a.h % 8 == 0 && Aligned(a.x) && Aligned(a.dy) && Aligned(a.dx) &&
                       Aligned(a.gamma.data) && Aligned(a.dres) && Aligned(a.dgamma_partials) &&
                       Aligned(a.dbeta_partials);
  const int64_t vecs = (a.h + 7) / 8;
  const int vecs_of_thread = vecs <= 32 ? 1 : vecs <= kThreads * 2 ? 2 : 4;
  const int64_t x = (vecs + vecs_of_thread * 32 - 1) / (vecs_of_thread * 32) * 32;  // threads of a row
  const int64_t width = x * vecs_of_thread * 8, row_bytes = width * sizeof(T) * (a.dres ? 3 : 2);
  const int64_t bytes = gpu.shared_bytes - kStaticBytes, gamma_bytes = sizeof(float) * width;
  const bool staged = vecs_of_thread == 4 && gamma_bytes + 2 * row_bytes <= bytes;
  const int64_t room = (bytes - (staged ? gamma_bytes : 0)) / row_bytes;  // rows
  if (!vectors || x > kThreads || room < 1) {
    const auto kernel = vectors ? te_norm_bwd_long_rows<T, kRms, 8> : te_norm_bwd_long_rows<T, kRms, 1>;
    kernel<<<ctas, kThreads, 0, stream>>>(a);
    TE_LAUNCHED();
  }
  const auto launch = [&]<auto kKernel>() -> Status {
    TE_TRY(Prepare<kKernel>(gpu));
    const int64_t y = std::max(int64_t{1}, std::min(kThreads / x, room / 2));  // rows at once
    const int64_t stages = std::min(room / y, int64_t{kStages});
    const int64_t ring_bytes = (staged ? gamma_bytes : 0) + y * stages * row_bytes;
    kKernel<<<ctas, dim3(x, y), ring_bytes, stream>>>(a, stages, staged);
    TE_LAUNCHED();
  };
  if (vecs_of_thread == 1) return launch.template operator()<te_norm_bwd_rows<T, 1, kRms>>();
  if (vecs_of_thread == 2) return launch.template operator()<te_norm_bwd_rows<T, 2, kRms>>();
  return launch.template operator()<te_norm_bwd_rows<T, 4, kRms>>();
}

}  // namespace

Status LaunchNormBwd(cudaStream_t stream, Arg dy, Arg x, Arg mean, Arg rstd, Arg gamma, Arg dres, Ret dx,
                     Ret dgamma, Ret dbeta, Ret dgamma_partials, Ret dbeta_partials, bool rms,
                     bool zero_centered) {
  const char* op = "te_norm_bwd";
  TE_TRY(ExpectRank(op, "x", x, 1));
  const Axes all(x), of_rows = all.Without(1), h{all.last()};
  const Axes partial = Axes{std::max<int64_t>(Axes(dgamma_partials)[0], 1)} + h;
  const auto type = x.type;
  TE_TRY(
      Expect(op, {{"x", x, kFloats, all},
                  {"dy", dy, type, all},
                  {"mean", mean, F32, of_rows, rms ? kAbsent : kRequired},
                  {"rstd", rstd, F32, of_rows},
                  {"gamma", gamma, kFloats, h},
                  {"dres", dres, type, all, kOptional},
                  {"dx", dx, type, all},
                  {"dgamma", dgamma, gamma.type, h},
                  {"dbeta", dbeta, gamma.type, h, AbsentIf(rms)},
                  {"dgamma_partials", dgamma_partials, F32, partial},
                  {"dbeta_partials", dbeta_partials, F32, partial, Present(dbeta) ? kRequired : kAbsent}}));
  if (!Present(x)) return Zero(stream, {dgamma, dbeta});
  const int64_t ctas = partial[0];
  const NormBwdArgs args(Data<void>(dy), Data<void>(x), Data<float>(mean), Data<float>(rstd),
                         WeightsOf(gamma), Data<void>(dres), Data<void>(dx), Data<float>(dgamma_partials),
                         Data<float>(dbeta_partials), of_rows.count(), h[0], zero_centered);
  TE_TRY(DispatchFloat(x.type, [&]<typename T>() -> Status {
    return rms ? LaunchRows<T, true>(stream, args, ctas) : LaunchRows<T, false>(stream, args, ctas);
  }));
  return FinishPartials(stream, {Reduce::kSumOfFloats, dgamma_partials, dgamma},
                        {Reduce::kSumOfFloats, dbeta_partials, dbeta});
}

}  // namespace te
