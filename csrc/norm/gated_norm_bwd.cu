// The gated RMSNorm (gated_norm.cuh), backward. With s = silu(z), u = x s, dv = dy, or with the norm before
// the gate u = x, dv = dy s; xhat = u rstd, dxhat = dv gamma and core = dxhat - xhat mean(dxhat xhat):
//   dx = core rstd s,  dz = core rstd x silu'(z), or with the norm before the gate
//   dx = core rstd,    dz = dy xhat gamma silu'(z)
//   dgamma = sum over rows of dv xhat
// rstd meets its factor first: with a huge gate, products of core with either would be 0. dgamma is partials
// first, one for each CTA, which are added in a fixed order. Bytes per element of bf16: 6 read, 4 written; a
// CTA's partials add 4 per column.

#include <algorithm>

#include "base/finish.h"
#include "base/ops.h"
#include "base/reduce.cuh"
#include "base/silu.cuh"
#include "norm/norm.cuh"

namespace te {
namespace {

constexpr int kThreads = 512;  // of a CTA at most: 128 registers each
constexpr int kStages = 4;     // rows on their way or in work, of those that share a threadIdx.y

struct GatedBwdArgs {
  const void *dy, *x, *z;  // [rows, g, c] of one type
  const float* rstd;       // [rows, g]
  Weights gamma;           // [g, c]
  void *dx, *dz;           // as x
  float* dgamma_partials;  // [gridDim.x / g, g, c]
  int64_t rows;
  int g, c;
  bool before_gate;
};

// The rows of a CTA, all in one group: consecutive CTAs have the groups of the same rows.
struct Share {
  int64_t first, step;  // row
  int group;

  __device__ __forceinline__ Share(const GatedBwdArgs& a, int rows_at_once, int row)
      : first(int64_t{blockIdx.x / a.g} * rows_at_once + row),
        step(int64_t{gridDim.x / a.g} * rows_at_once),
        group(blockIdx.x % a.g) {}

  __device__ __forceinline__ int64_t Norm(const GatedBwdArgs& a, int64_t row) const {
    return row * a.g + group;
  }
  // rstd of a row; zero beyond the last.
  __device__ __forceinline__ float Rstd(const GatedBwdArgs& a, int64_t row) const {
    return row < a.rows ? a.rstd[Norm(a, row)] : 0.f;
  }
};

// What a column has in a row. kept of it between the two passes: sigmoid, xhat and dxhat.
struct Column {
  float sigmoid, xhat, dxhat, dv;
};

__device__ __forceinline__ Column ColumnOf(float dy, float x, float z, float gamma, float rstd,
                                           bool before_gate) {
  Column out;
  out.sigmoid = Sigmoid(z);
  const float gate = z * out.sigmoid;
  out.dv = before_gate ? dy * gate : dy;
  out.xhat = (before_gate ? x : x * gate) * rstd;
  out.dxhat = out.dv * gamma;
  return out;
}

// dx and dz of a column, from the row's mean of dxhat xhat.
__device__ __forceinline__ float2 Gradients(float dy, float x, float z, float gamma, float rstd, float mean,
                                            const Column& of, bool before_gate) {
  const float core = fmaf(-of.xhat, mean, of.dxhat), slope = SiluSlope(z, of.sigmoid);
  if (before_gate) return make_float2(core * rstd, dy * (of.xhat * gamma) * slope);
  return make_float2(core * (rstd * (z * of.sigmoid)), core * (rstd * x) * slope);
}

// What a thread of te_gated_norm_bwd_rows has of its rows: 8 * kVecs columns, `stride` apart, in slots of
// shared memory T [3, width] (x, z and dy), and gamma of these columns.
template <typename T, int kVecs>
struct RowShare {
  static constexpr bool kKeep = kVecs < 4;  // registers suffice for gamma and what the second pass needs
  static constexpr int kKept = kKeep ? kVecs : 1;
  struct Kept {
    float gamma[kKept][8], sigmoid[kKept][8], xhat[kKept][8], dxhat[kKept][8];
  };
  const GatedBwdArgs& a;
  const Share& share;
  int c, stride;  // c: of the first column
  uint32_t row_bytes;

  // Sends the row on its way to the slot where the thread has `at`.
  __device__ void Prefetch(int64_t row, uint32_t at) const {
    const int64_t from = share.Norm(a, row) * a.c + c;
    const void* arrays[] = {a.x, a.z, a.dy};
#pragma unroll
    for (int k = 0; k < kVecs; ++k)
#pragma unroll
      for (int i = 0; i < 3; ++i)
        Prefetch8(at + i * row_bytes + k * stride * sizeof(T),
                  static_cast<const T*>(arrays[i]) + from + k * stride, row < a.rows && c + k * stride < a.c);
    CommitPrefetch();
  }

  // Fills a slot with zeros beyond c, where nothing is fetched.
  __device__ void Pad(uint32_t at) const {
    for (int k = 0; k < kVecs; ++k)
      for (int i = 0; i < int(3 * sizeof(T) / 2) && c + k * stride >= a.c; ++i)
        StoreShared(
            at + i / int(sizeof(T) / 2) * row_bytes + k * stride * sizeof(T) + i % int(sizeof(T) / 2) * 16,
            0.f, 0.f, 0.f, 0.f);
  }

  __device__ __forceinline__ void Gamma(int k, float (&gamma)[8]) const {
    if (c + k * stride < a.c) LoadWeights(a.gamma, int64_t{share.group} * a.c + c + k * stride, gamma);
  }

  // The arrays' k-th 8 columns of the row at `at`.
  __device__ __forceinline__ void Read(uint32_t at, int k, Vec<T, 8> (&x_z_dy)[3]) const {
#pragma unroll
    for (int i = 0; i < 3; ++i) x_z_dy[i] = LoadShared<T, 8>(at + i * row_bytes + k * stride * sizeof(T));
  }

  // The second pass: dx and dz of the k-th 8 columns of the row at `at`.
  __device__ __forceinline__ void Differentiate(uint32_t at, int64_t row, int k, float rstd, float mean,
                                                Kept& kept) const {
    const int j = kKeep ? k : 0;
    Vec<T, 8> in[3];  // x, z, dy
    Read(at, k, in);
    if (!kKeep) Gamma(k, kept.gamma[0]);
    float dx[8], dz[8];
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const float dy = in[2][i], x = in[0][i], z = in[1][i], gamma = kept.gamma[j][i];
      const Column of = kKeep ? Column{kept.sigmoid[j][i], kept.xhat[j][i], kept.dxhat[j][i], 0.f}
                              : ColumnOf(dy, x, z, gamma, rstd, a.before_gate);
      const float2 both = Gradients(dy, x, z, gamma, rstd, mean, of, a.before_gate);
      dx[i] = both.x, dz[i] = both.y;
    }
    if (c + k * stride >= a.c) return;
    const int64_t to = share.Norm(a, row) * a.c + c + k * stride;
    Store(static_cast<T*>(a.dx) + to, Round<T>(dx)), Store(static_cast<T*>(a.dz) + to, Round<T>(dz));
  }
};

// blockDim.x threads have a group's row, 8 * kVecs columns each: its and the next rows' x, z and dy are on
// their way to shared memory, in places of their own, so that no barrier is needed. Registers hold the sums
// of the thread's columns over all rows of the CTA, and gamma, xhat, dxhat and the sigmoid where they
// suffice; else these are computed twice, and gamma is read again, from L1 or L2. blockDim.y rows are in work
// at once and wait for nobody. Beyond c, rows are filled up with zeros.
template <typename T, int kVecs>
__global__ void __launch_bounds__(kThreads, 1) te_gated_norm_bwd_rows(const GatedBwdArgs a, int stages) {
  LetNextStart();
  constexpr bool kKeep = RowShare<T, kVecs>::kKeep;
  extern __shared__ uint4 dynamic[];  // ring T [blockDim.y, stages, 3, width]
  __shared__ float2 scratch[2][kMostWarps];
  const float inv_c = 1.f / a.c;
  const int c = threadIdx.x * 8, stride = blockDim.x * 8;
  const uint32_t row_bytes = stride * kVecs * sizeof(T), slot_bytes = 3 * row_bytes;
  const uint32_t ring = SharedAddress(dynamic) + threadIdx.y * stages * slot_bytes + c * sizeof(T);
  const Share share(a, blockDim.y, threadIdx.y);
  const RowShare<T, kVecs> mine{a, share, c, stride, row_bytes};
  int64_t row = share.first;
  for (int s = 0; s < stages; ++s) {
    mine.Pad(ring + s * slot_bytes);
    if (s + 1 < stages) mine.Prefetch(row + s * share.step, ring + s * slot_bytes);
  }
  typename RowShare<T, kVecs>::Kept kept = {};
  float dgamma[kVecs][8] = {};
  if constexpr (kKeep)
#pragma unroll
    for (int k = 0; k < kVecs; ++k) mine.Gamma(k, kept.gamma[k]);

  float next = share.Rstd(a, row), after = share.Rstd(a, row + share.step);
  int turn = 0;
  const uint32_t ring_end = ring + stages * slot_bytes;
  uint32_t now = ring, last = ring_end - slot_bytes;  // the slots of this row and of the one before
  for (; row < a.rows; row += share.step) {
    mine.Prefetch(row + (stages - 1) * share.step, last);
    const float rstd = next;
    next = after, after = share.Rstd(a, row + 2 * share.step);
    WaitForPrefetch(stages - 1);
    float sum = 0.f;
    Vec<T, 8> in[3];  // x, z, dy
#pragma unroll
    for (int k = 0; k < kVecs; ++k) {
      const int j = kKeep ? k : 0;
      mine.Read(now, k, in);
      if (!kKeep) mine.Gamma(k, kept.gamma[0]);
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        const Column of = ColumnOf(in[2][i], in[0][i], in[1][i], kept.gamma[j][i], rstd, a.before_gate);
        sum = fmaf(of.dxhat, of.xhat, sum), dgamma[k][i] = fmaf(of.dv, of.xhat, dgamma[k][i]);
        kept.sigmoid[j][i] = of.sigmoid, kept.xhat[j][i] = of.xhat, kept.dxhat[j][i] = of.dxhat;
      }
    }
    const float mean = RowSum(sum, scratch[turn ^= 1]) * inv_c;
#pragma unroll
    for (int k = 0; k < kVecs; ++k) mine.Differentiate(now, row, k, rstd, mean, kept);
    last = now, now = now + slot_bytes < ring_end ? now + slot_bytes : ring;
  }
  WaitForPrefetch(0);
  // The ring, no longer needed, has room for the sums of each row: at least one slot, of three rows.
  StoreRowsSums(dgamma, reinterpret_cast<float*>(dynamic), stages * slot_bytes / sizeof(float),
                a.dgamma_partials + int64_t{blockIdx.x} * a.c, a.c);
}

// Rows too long for shared memory, or of a length that is no multiple of 8. A CTA takes its rows by
// kLongRows: each row's mean first, then column by column dx, dz and the sums, added to the CTA's partial
// sums in memory.
constexpr int kLongRows = 8;

template <typename T>
__global__ void __launch_bounds__(kThreads) te_gated_norm_bwd_long_rows(const GatedBwdArgs a) {
  LetNextStart();
  __shared__ float2 scratch[2][kMostWarps];
  __shared__ float means[kLongRows];
  const T *dy = static_cast<const T*>(a.dy), *x = static_cast<const T*>(a.x), *z = static_cast<const T*>(a.z);
  float* dgamma = a.dgamma_partials + int64_t{blockIdx.x} * a.c;
  const Share share(a, kLongRows, 0);
  const int64_t of_group = int64_t{share.group} * a.c;
  const auto gamma_of = [&](int c) {
    float gamma[1];
    LoadWeights(a.gamma, of_group + c, gamma);
    return gamma[0];
  };
  int turn = 0;
  for (int c = threadIdx.x; c < a.c; c += kThreads) dgamma[c] = 0.f;
  for (int64_t row0 = share.first; row0 < a.rows; row0 += share.step) {
    const int rows = min(a.rows - row0, int64_t{kLongRows});
    __syncthreads();  // means are free
    for (int r = 0; r < rows; ++r) {
      const int64_t norm = share.Norm(a, row0 + r), at = norm * a.c;
      const float rstd = a.rstd[norm];
      float sum = 0.f;
      for (int c = threadIdx.x; c < a.c; c += kThreads) {
        const Column of = ColumnOf(dy[at + c], x[at + c], z[at + c], gamma_of(c), rstd, a.before_gate);
        sum = fmaf(of.dxhat, of.xhat, sum);
      }
      sum = RowSum(sum, scratch[turn ^= 1]);
      if (threadIdx.x == 0) means[r] = sum / a.c;
    }
    __syncthreads();
    for (int c = threadIdx.x; c < a.c; c += kThreads) {
      const float gamma = gamma_of(c);
      float of_column = dgamma[c];
      for (int r = 0; r < rows; ++r) {
        const int64_t norm = share.Norm(a, row0 + r), at = norm * a.c + c;
        const float g = dy[at], x_at = x[at], z_at = z[at], rstd = a.rstd[norm];
        const Column of = ColumnOf(g, x_at, z_at, gamma, rstd, a.before_gate);
        const float2 both = Gradients(g, x_at, z_at, gamma, rstd, means[r], of, a.before_gate);
        of_column = fmaf(of.dv, of.xhat, of_column);
        static_cast<T*>(a.dx)[at] = static_cast<T>(both.x),
        static_cast<T*>(a.dz)[at] = static_cast<T>(both.y);
      }
      dgamma[c] = of_column;
    }
  }
}

template <typename T>
Status LaunchRows(cudaStream_t stream, const GatedBwdArgs& a, int64_t ctas) {
  Gpu gpu;
  TE_TRY(CurrentGpu(&gpu));
  const bool vectors = a.c % 8 == 0 && Aligned(a.x) && Aligned(a.z) && Aligned(a.dy) && Aligned(a.dx) &&
                       Aligned(a.dz) && Aligned(a.gamma.data) && Aligned(a.dgamma_partials);
  const int64_t vecs = CeilDiv(a.c, 8), of_thread = vecs <= 32 ? 1 : vecs <= kThreads * 2 ? 2 : 4;
  const int64_t x = CeilDiv(vecs, of_thread * 32) * 32;  // threads of a row
  const int64_t slot_bytes = 3 * x * of_thread * 8 * sizeof(T);
  const int64_t room = (gpu.shared_bytes - kStaticBytes) / slot_bytes;  // rows
  if (!vectors || x > kThreads || room < 1) {
    const auto kernel = te_gated_norm_bwd_long_rows<T>;
    kernel<<<unsigned(ctas), kThreads, 0, stream>>>(a);
    TE_LAUNCHED();
  }
  const auto launch = [&]<auto kKernel>() -> Status {
    TE_TRY(Prepare<kKernel>(gpu));
    const int64_t y = std::max(int64_t{1}, std::min(kThreads / x, room / 2));  // rows at once
    const int64_t stages = std::min(room / y, int64_t{kStages});
    kKernel<<<unsigned(ctas), dim3(x, y), y * stages * slot_bytes, stream>>>(a, stages);
    TE_LAUNCHED();
  };
  if (of_thread == 1) return launch.template operator()<te_gated_norm_bwd_rows<T, 1>>();
  if (of_thread == 2) return launch.template operator()<te_gated_norm_bwd_rows<T, 2>>();
  return launch.template operator()<te_gated_norm_bwd_rows<T, 4>>();
}

}  // namespace

Status LaunchGatedNormBwd(cudaStream_t stream, Arg dy, Arg x, Arg z, Arg rstd, Arg gamma, Ret dx, Ret dz,
                          Ret dgamma, Ret dgamma_partials, bool norm_before_gate) {
  const char* op = "te_gated_norm_bwd";
  TE_TRY(ExpectRank(op, "x", x, 2));
  const Axes all(x), rows = all.Without(2), columns = all.From(rows.rank());
  const Axes partial = Axes{std::max<int64_t>(Axes(dgamma_partials)[0], 1)} + columns;
  TE_TRY(Expect(op, {{"x", x, kFloats, all},
                     {"dy", dy, x.type, all},
                     {"z", z, x.type, all},
                     {"rstd", rstd, F32, all.Without(1)},
                     {"gamma", gamma, kFloats, columns},
                     {"dx", dx, x.type, all},
                     {"dz", dz, x.type, all},
                     {"dgamma", dgamma, gamma.type, columns},
                     {"dgamma_partials", dgamma_partials, F32, partial}}));
  if (!Present(x)) return Zero(stream, {dgamma});
  const int64_t g = columns[0], c = all.last();
  TE_CHECK(g * c <= INT32_MAX && partial[0] * g <= INT32_MAX, "%s: x %s is too large", op, x.shape().c_str());
  const GatedBwdArgs args(Data<void>(dy), Data<void>(x), Data<void>(z), Data<float>(rstd), WeightsOf(gamma),
                          Data<void>(dx), Data<void>(dz), Data<float>(dgamma_partials), rows.count(), int(g),
                          int(c), norm_before_gate);
  TE_TRY(DispatchFloat(x.type,
                       [&]<typename T>() -> Status { return LaunchRows<T>(stream, args, partial[0] * g); }));
  return FinishPartials(stream, {Reduce::kSumOfFloats, dgamma_partials, dgamma});
}

}  // namespace te
