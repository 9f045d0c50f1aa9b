// te_ssd_fwd: the state-space dual (https://arxiv.org/abs/2405.21060, section 6). A CTA walks over the tokens
// of one head in chunks, with the state in registers: what the tokens of a chunk see of the state before it,
// and of each other, are products on the tensor cores, as is what they add to the state. x, B and C are read
// once for each head, y is written once; states leave the CTA only where they are wanted.

#include "base/device.h"
#include "base/ops.h"
#include "ssm/operands.cuh"
#include "ssm/scan.cuh"

namespace te {
namespace ssm {
namespace {

struct ScanArgs : ScanArrays {
  StepArgs steps;
  const Steps* of_chunks;  // [rows, chunks, h]
  int g, p, n;
};

template <int kN, int kP, int kStages, bool kRuns>
struct Shared {
  Tile<kChunk, kN> B[kStages], C[kStages];
  Tile<kChunk, kP> x[kStages];
  Tile<kP, kN> state;  // before the chunk
  Steps steps[kStages];
  Runs<kRuns> runs[kStages];
  alignas(8) float D[kP];
};

// The tokens of one head, from channel `first` of it on. Two warps have a band of 16 tokens, each half of its
// channels.
template <int kN, int kP, int kStages, bool kRuns>
struct Scan {
  static constexpr int kHalf = kP / 2;
  const ScanArgs& a;
  Shared<kN, kP, kStages, kRuns>& shared;
  const int64_t row;
  const int head, first;
  State<kN, kP> state;

  __device__ __forceinline__ int64_t Token(int chunk) const {
    return row * a.steps.s + int64_t(chunk) * kChunk;
  }
  __device__ __forceinline__ int Chunks() const { return (a.steps.s + kChunk - 1) / kChunk; }
  __device__ __forceinline__ int64_t Channels(int64_t token) const {
    return (token * a.steps.h + head) * a.p + first;
  }
  __device__ __forceinline__ int64_t States(int64_t index) const {
    return ((index * a.steps.h + head) * a.p + first) * a.n;
  }
  // Warps that share a scheduler have different bands: the later ones have more to do.
  __device__ __forceinline__ int Band() const { return (WarpIndex() + WarpIndex() / 4 + head) % 4 * kBand; }
  __device__ __forceinline__ static int Side() { return WarpIndex() / 4; }
  // The columns of scores that a warp has, by 16.
  __device__ __forceinline__ static int From(int i) { return 32 * i + 16 * Side(); }

  __device__ __forceinline__ void Fetch(int chunk) {
    const int rows = a.steps.s - chunk * kChunk, group = head / (a.steps.h / a.g), stage = chunk % kStages;
    if (rows > 0) {
      const int64_t of_group = (Token(chunk) * a.g + group) * a.n;
      shared.x[stage].Fetch(a.x + Channels(Token(chunk)), int64_t(a.steps.h) * a.p, rows, a.p - first);
      shared.B[stage].Fetch(a.B + of_group, int64_t(a.g) * a.n, rows, a.n);
      shared.C[stage].Fetch(a.C + of_group, int64_t(a.g) * a.n, rows, a.n);
      shared.steps[stage].Fetch(a.of_chunks + (row * Chunks() + chunk) * a.steps.h + head);
      shared.runs[stage].Set(a.steps, row, chunk * kChunk);
    }
    CommitPrefetch();
  }

  // What the tokens of the band see of the state, [16, kHalf], and of tokens, C B^T [16, 2 * 16] as far as it
  // is seen.
  __device__ __forceinline__ void Look(int stage, int band, float (&y)[kHalf / 8][4], float (&scores)[4][4]) {
#pragma unroll
    for (int k = 0; k < kN; k += 16) {
      uint32_t c[4];
      shared.C[stage].A(c, band, k);
#pragma unroll
      for (int i = 0; i < kHalf / 16; ++i)
        Multiply2(y[2 * i], y[2 * i + 1], c,
                  [&](auto& b) { shared.state.TransposedB(b, Side() * kHalf + 16 * i, k); });
#pragma unroll
      for (int i = 0; i < 2; ++i)
        if (From(i) <= band)
          Multiply2(scores[2 * i], scores[2 * i + 1], c,
                    [&](auto& b) { shared.B[stage].TransposedB(b, From(i), k); });
    }
  }

  // The band's scores times what is left of what tokens add, rounded, to the first columns of its rows of C,
  // which are not needed any more.
  __device__ __forceinline__ void PutScores(int stage, int band, const float (&scores)[4][4]) {
    const Steps& steps = shared.steps[stage];
    const Runs<kRuns>& runs = shared.runs[stage];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      if (From(i) > band) continue;
#pragma unroll
      for (int tile = 0; tile < 2; ++tile)
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const int to = band + RowOf(2 * half), from = From(i) + 8 * tile + ColumnOf(0);
          const float2 sums = *reinterpret_cast<const float2*>(steps.sums + from);
          const float2 sizes = *reinterpret_cast<const float2*>(steps.sizes + from);
          const float sum = steps.sums[to];
          float low = scores[2 * i + tile][2 * half] * Exp2(sum - sums.x) * sizes.x;
          float high = scores[2 * i + tile][2 * half + 1] * Exp2(sum - sums.y) * sizes.y;
          if (From(i) == band) low = from <= to ? low : 0.f, high = from < to ? high : 0.f;
          if (kRuns) low = runs.AreOne(from, to) ? low : 0.f;
          if (kRuns) high = runs.AreOne(from + 1, to) ? high : 0.f;
          *reinterpret_cast<uint32_t*>(shared.C[stage].At(to, from)) = Pack(low, high);
        }
    }
  }

  __device__ __forceinline__ void Results(int chunk) {
    const int stage = chunk % kStages, band = Band();
    const Steps& steps = shared.steps[stage];
    float y[kHalf / 8][4] = {}, scores[4][4] = {};
    Look(stage, band, y, scores);
    __syncthreads();  // none reads C any more, or the state before the chunk
    PutScores(stage, band, scores);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int to = band + RowOf(2 * half);
      const float since = steps.Since(to);
      const bool continues = shared.runs[stage].Continues(to);
#pragma unroll
      for (auto& four : y)
#pragma unroll
        for (int j = 2 * half; j < 2 * half + 2; ++j) four[j] = continues ? four[j] * since : 0.f;
    }
    NamedBarrier(1 + band / kBand, 64);  // the other half of the scores is there
#pragma unroll
    for (int k = 0; k < kChunk; k += 16) {
      if (k > band) continue;
      uint32_t m[4];
      shared.C[stage].A(m, band, k);
#pragma unroll
      for (int i = 0; i < kHalf / 16; ++i)
        Multiply2(y[2 * i], y[2 * i + 1], m,
                  [&](auto& b) { shared.x[stage].B(b, k, Side() * kHalf + 16 * i); });
    }
    if (a.z)
      Write<true>(chunk, band, y);
    else
      Write<false>(chunk, band, y);
  }

  // y, with D x, and times silu(z) if kGated.
  template <bool kGated>
  __device__ __forceinline__ void Write(int chunk, int band, const float (&y)[kHalf / 8][4]) {
    const int column = Side() * kHalf + ColumnOf(0), left = a.p - first - column;  // channels from there on
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int token = band + RowOf(2 * half);
      if (chunk * kChunk + token >= a.steps.s) continue;
      const int64_t at = Channels(Token(chunk) + token) + column;
      const Bf16* x = shared.x[chunk % kStages].At(token, column);
#pragma unroll
      for (int i = 0; i < kHalf / 8; ++i) {
        if (8 * i >= left) continue;
        const float2 D = *reinterpret_cast<const float2*>(shared.D + column + 8 * i);
        const float2 of_x = Unpack(*reinterpret_cast<const uint32_t*>(x + 8 * i));
        float2 out = make_float2(y[i][2 * half] + D.x * of_x.x, y[i][2 * half + 1] + D.y * of_x.y);
        if constexpr (kGated) {
          const float2 z = Unpack(*reinterpret_cast<const uint32_t*>(a.z + at + 8 * i));
          out.x *= z.x / (1.f + expf(-z.x)), out.y *= z.y / (1.f + expf(-z.y));
        }
        *reinterpret_cast<uint32_t*>(a.y + at + 8 * i) = Pack(out.x, out.y);
      }
    }
  }

  __device__ __forceinline__ void Advance(int stage) {
    const Steps& steps = shared.steps[stage];
    const Runs<kRuns>& runs = shared.runs[stage];
    constexpr int kLast = Steps::kLast;
    state.template Add<kRuns>(
        runs.Continues(kLast), steps.Since(kLast), shared.x[stage], shared.B[stage],
        [&](int token) { return steps.Weight(token, kLast); },
        [&](int token) { return runs.AreOne(token, kLast); });
  }

  __device__ __forceinline__ void Begin() {
    Fetch(0);
    state.Load(a.initial ? a.initial + States(row) : nullptr, a.p - first, a.n);
    state.Put(shared.state);
    for (int i = threadIdx.x; i < kP; i += kThreads)
      shared.D[i] = a.D && first + i < a.p ? a.D[head * a.channels + (a.channels > 1 ? first + i : 0)] : 0.f;
  }

  __device__ __forceinline__ void Run() {
    Begin();
    for (int chunk = 0; chunk < Chunks(); ++chunk) {
      WaitForPrefetch<0>();
      __syncthreads();  // what was fetched and put is there for all
      if (kStages > 1) Fetch(chunk + 1);
      if (a.states && chunk * kChunk % kKept == 0) {
        const int64_t index = row * ((a.steps.s + kKept - 1) / kKept) + chunk * kChunk / kKept;
        state.Store(a.states + States(index), a.p - first, a.n);
      }
      Results(chunk);
      Advance(chunk % kStages);
      state.Put(shared.state);
      if (kStages == 1) {
        __syncthreads();  // none reads the tokens any more
        Fetch(chunk + 1);
      }
    }
    if (a.last) state.Store(a.last + States(row), a.p - first, a.n);
  }
};

template <int kN, int kP, int kStages, bool kRuns>
__global__ void __launch_bounds__(kThreads, kN <= 128 ? 2 : 1) te_ssd_fwd(const ScanArgs a) {
  extern __shared__ uint4 memory[];
  auto& shared = *reinterpret_cast<Shared<kN, kP, kStages, kRuns>*>(memory);
  Scan<kN, kP, kStages, kRuns>{a, shared, blockIdx.z, int(blockIdx.x), int(blockIdx.y) * kP}.Run();
}

template <int kN, int kP, int kStages, bool kRuns>
Status Run(cudaStream_t stream, const ScanArgs& a, int64_t rows) {
  const auto kernel = te_ssd_fwd<kN, kP, kStages, kRuns>;
  constexpr size_t kBytes = sizeof(Shared<kN, kP, kStages, kRuns>);
  TE_TRY(AllowShared(kernel, kBytes));
  const dim3 grid(a.steps.h, unsigned(CeilDiv(a.p, kP)), unsigned(rows));
  kernel<<<grid, kThreads, kBytes, stream>>>(a);
  TE_LAUNCHED();
}

template <int kN, int kP>
Status RunWithin(cudaStream_t stream, const ScanArgs& a, int64_t rows) {
  int64_t bytes = 0;
  TE_TRY(SharedBytes(&bytes));
  const bool both = int64_t(sizeof(Shared<kN, kP, 2, true>)) <= bytes, runs = a.steps.runs;
  return both ? (runs ? Run<kN, kP, 2, true> : Run<kN, kP, 2, false>)(stream, a, rows)
              : (runs ? Run<kN, kP, 1, true> : Run<kN, kP, 1, false>)(stream, a, rows);
}

}  // namespace
}  // namespace ssm

Status LaunchSsdFwd(cudaStream_t stream, Arg x, Arg dt, Arg A, Arg B, Arg C, Arg D, Arg z, Arg dt_bias,
                    Arg runs, Arg initial, Ret y, Ret last, Ret states, Ret workspace, bool softplus,
                    double least, double most, int64_t shared) {
  constexpr const char* kOp = "te_ssd_fwd";
  ssm::ScanCall call;
  TE_TRY(ssm::ExpectScan({kOp, x, dt, A, B, C, dt_bias, runs, softplus, least, most, shared, 256}, &call));
  const int64_t channels = Present(D) ? Axes(D).last() : 1;
  TE_TRY(Expect(kOp, {{"D", D, F32, {call.h, channels}, kOptional},
                      {"z", z, BF16, call.all, kOptional},
                      {"initial", initial, F32, call.state, kOptional},
                      {"y", y, BF16, call.all},
                      {"final", last, F32, call.state, kOptional},
                      {"states", states, F32, call.kept, kOptional},
                      {"workspace", workspace, U8, {ssm::StepBytes(call)}}}));
  TE_CHECK(channels == 1 || channels == call.p, "%s: D is %s, x %s", kOp, D.shape().c_str(),
           x.shape().c_str());
  if (call.rows * call.h * call.p == 0) return {};
  using ssm::Bf16;
  ssm::Steps* const steps = static_cast<ssm::Steps*>(workspace.data);
  TE_TRY(ssm::LaunchSteps(stream, call.steps, call.rows, steps));
  const ssm::ScanArrays arrays{Data<const Bf16>(x), Data<const Bf16>(B),  Data<const Bf16>(C),
                               Data<const Bf16>(z), Data<const float>(D), Data<const float>(initial),
                               Data<Bf16>(y),       Data<float>(last),    Data<float>(states),
                               int(channels)};
#ifdef TE_HAS_90A
  bool is_hopper = false;
  TE_TRY(IsHopper(&is_hopper));
  if (is_hopper && !arrays.z && call.n <= 128 && call.s > 0)
    return ssm::RunHopper(stream, call, arrays, steps);
#endif
  const ssm::ScanArgs args{arrays, call.steps, steps, int(call.g), int(call.p), int(call.n)};
  if (call.n <= 64) return ssm::RunWithin<64, 64>(stream, args, call.rows);
  if (call.n <= 128) return ssm::RunWithin<128, 64>(stream, args, call.rows);
  return ssm::RunWithin<256, 32>(stream, args, call.rows);
}

}  // namespace te
