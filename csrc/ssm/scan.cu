// te_ssd_fwd: the state-space dual (https://arxiv.org/abs/2405.21060, section 6). A CTA walks over the tokens
// of one head in chunks, with the state in registers: what the tokens of a chunk see of the state before it,
// and of each other, are products on the tensor cores, as is what they add to the state. x, B and C are read
// once for each head, y is written once; states leave the CTA only where they are wanted.

#include "base/ops.h"
#include "ssm/operands.cuh"
#include "ssm/scan.cuh"

namespace te {
namespace ssm {
namespace {

struct ScanArgs {
  StepArgs steps;
  const Bf16 *x, *B, *C, *z;  // x, z? [rows, s, h, p], B, C [rows, s, g, n]
  const float *D, *initial;   // D? [h, channels], initial? [rows, h, p, n]
  Bf16* y;
  float *last, *states;  // last? [rows, h, p, n], states? [rows, s / kKept, h, p, n]
  int g, p, n, channels;
};

template <int kN, int kP, int kStages>
struct Shared {
  Tile<kChunk, kN> B[kStages], C[kStages];
  Tile<kChunk, kP> x[kStages];
  Tile<kP, kN> state;  // before the chunk
  Steps steps[2];
};

// The tokens of one head, from channel `first` of it on.
template <int kN, int kP, int kStages>
struct Scan {
  const ScanArgs& a;
  Shared<kN, kP, kStages>& shared;
  const int64_t row;
  const int head, first;
  State<kN, kP> state;

  __device__ __forceinline__ int64_t Token(int chunk) const {
    return row * a.steps.s + int64_t(chunk) * kChunk;
  }
  __device__ __forceinline__ int64_t Channels(int64_t token) const {
    return (token * a.steps.h + head) * a.p + first;
  }
  __device__ __forceinline__ int64_t States(int64_t index) const {
    return ((index * a.steps.h + head) * a.p + first) * a.n;
  }

  __device__ __forceinline__ void Fetch(int chunk) {
    const int rows = a.steps.s - chunk * kChunk, group = head / (a.steps.h / a.g), stage = chunk % kStages;
    if (rows > 0) {
      const int64_t of_group = (Token(chunk) * a.g + group) * a.n;
      shared.x[stage].Fetch(a.x + Channels(Token(chunk)), int64_t(a.steps.h) * a.p, rows, a.p - first);
      shared.B[stage].Fetch(a.B + of_group, int64_t(a.g) * a.n, rows, a.n);
      shared.C[stage].Fetch(a.C + of_group, int64_t(a.g) * a.n, rows, a.n);
    }
    CommitPrefetch();
  }

  // The tokens of the warp, whose row in the chunk is `band`: what they see of the state, [16, kP], and of
  // tokens, C B^T [16, kChunk] as far as it is seen.
  __device__ __forceinline__ void Look(int chunk, int band, float (&y)[kP / 8][4],
                                       float (&scores)[kChunk / 8][4]) {
    const int stage = chunk % kStages;
#pragma unroll
    for (int k = 0; k < kN; k += 16) {
      uint32_t c[4];
      shared.C[stage].A(c, band, k);
#pragma unroll
      for (int i = 0; i < kP / 16; ++i)
        Multiply2(y[2 * i], y[2 * i + 1], c, [&](auto& b) { shared.state.TransposedB(b, 16 * i, k); });
#pragma unroll
      for (int i = 0; i < kChunk / 16; ++i)
        if (16 * i <= band)
          Multiply2(scores[2 * i], scores[2 * i + 1], c,
                    [&](auto& b) { shared.B[stage].TransposedB(b, 16 * i, k); });
    }
  }

  __device__ __forceinline__ void Results(int chunk, bool has_runs) {
    const Steps& steps = shared.steps[chunk % 2];
    const int band = (WarpIndex() + head) % kWarps * kBand;  // the later ones have more to do
    float y[kP / 8][4] = {}, scores[kChunk / 8][4] = {};
    Look(chunk, band, y, scores);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int to = band + RowOf(2 * half);
      const float since = steps.Since(to);
      const bool continues = steps.Continues(to, has_runs);
#pragma unroll
      for (auto& four : y)
#pragma unroll
        for (int j = 2 * half; j < 2 * half + 2; ++j) four[j] = continues ? four[j] * since : 0.f;
    }
#pragma unroll
    for (int i = 0; i < kChunk / 16; ++i)
      if (16 * i <= band) {
        const auto weighed = [&](int tile, int j) {
          const int from = 16 * i + 8 * tile + ColumnOf(j), to = band + RowOf(j);
          const float score = scores[2 * i + tile][j] * steps.Between(from, to) * steps.sizes[from];
          return steps.IsSeen(from, to, has_runs) ? score : 0.f;
        };
        uint32_t m[4];
#pragma unroll
        for (int word = 0; word < 4; ++word) {
          const int tile = word / 2, j = word % 2 * 2;
          m[word] = Pack(weighed(tile, j), weighed(tile, j + 1));
        }
#pragma unroll
        for (int k = 0; k < kP / 16; ++k)
          Multiply2(y[2 * k], y[2 * k + 1], m,
                    [&](auto& b) { shared.x[chunk % kStages].B(b, 16 * i, 16 * k); });
      }
    Write(chunk, band, y);
  }

  __device__ __forceinline__ void Write(int chunk, int band, const float (&y)[kP / 8][4]) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int token = band + RowOf(2 * half);
      if (chunk * kChunk + token >= a.steps.s) continue;
      const int64_t at = Channels(Token(chunk) + token);
#pragma unroll
      for (int i = 0; i < kP / 8; ++i) {
        const int channel = 8 * i + ColumnOf(0);
        if (first + channel >= a.p) continue;
        float2 out = make_float2(y[i][2 * half], y[i][2 * half + 1]);
        if (a.D) {
          const float2 x =
              Unpack(*reinterpret_cast<const uint32_t*>(shared.x[chunk % kStages].At(token, channel)));
          const float* D = a.D + head * a.channels + (a.channels > 1 ? first + channel : 0);
          out.x += D[0] * x.x, out.y += D[a.channels > 1] * x.y;
        }
        if (a.z) {
          const float2 z = Unpack(*reinterpret_cast<const uint32_t*>(a.z + at + channel));
          out.x *= z.x / (1.f + expf(-z.x)), out.y *= z.y / (1.f + expf(-z.y));
        }
        *reinterpret_cast<uint32_t*>(a.y + at + channel) = Pack(out.x, out.y);
      }
    }
  }

  __device__ __forceinline__ void Advance(int chunk, bool has_runs) {
    const Steps& steps = shared.steps[chunk % 2];
    constexpr int kLast = Steps::kLast;
    state.Add(
        has_runs, steps.Continues(kLast, has_runs), steps.Since(kLast), shared.x[chunk % kStages],
        shared.B[chunk % kStages],
        [&](int token) { return steps.Between(token, kLast) * steps.sizes[token]; },
        [&](int token) { return steps.IsSeen(token, kLast, has_runs); });
  }

  __device__ __forceinline__ void Run() {
    const bool has_runs = a.steps.runs;
    const int chunks = (a.steps.s + kChunk - 1) / kChunk;
    Fetch(0);
    state.Load(a.initial ? a.initial + States(row) : nullptr, a.p - first, a.n);
    state.Put(shared.state);
    if (WarpIndex() == 0) shared.steps[0].Set(a.steps, row, head, 0);
    for (int chunk = 0; chunk < chunks; ++chunk) {
      WaitForPrefetch<0>();
      __syncthreads();  // what was fetched and put is there for all
      if (kStages > 1) Fetch(chunk + 1);
      if (a.states && chunk * kChunk % kKept == 0) {
        const int64_t index = row * ((a.steps.s + kKept - 1) / kKept) + chunk * kChunk / kKept;
        state.Store(a.states + States(index), a.p - first, a.n);
      }
      Results(chunk, has_runs);
      if (WarpIndex() == chunk % kWarps)
        shared.steps[(chunk + 1) % 2].Set(a.steps, row, head, (chunk + 1) * kChunk);
      Advance(chunk, has_runs);
      __syncthreads();  // none reads the state before the chunk, or its tokens, any more
      state.Put(shared.state);
      if (kStages == 1) Fetch(chunk + 1);
    }
    if (a.last) state.Store(a.last + States(row), a.p - first, a.n);
  }
};

template <int kN, int kP, int kStages>
__global__ void __launch_bounds__(kThreads) te_ssd_fwd(const ScanArgs a) {
  extern __shared__ uint4 memory[];
  auto& shared = *reinterpret_cast<Shared<kN, kP, kStages>*>(memory);
  Scan<kN, kP, kStages>{a, shared, blockIdx.z, int(blockIdx.x), int(blockIdx.y) * kP}.Run();
}

template <int kN, int kP, int kStages>
Status Run(cudaStream_t stream, const ScanArgs& a, int64_t rows) {
  const auto kernel = te_ssd_fwd<kN, kP, kStages>;
  constexpr size_t kBytes = sizeof(Shared<kN, kP, kStages>);
  TE_TRY(AllowShared(kernel, kBytes));
  const dim3 grid(a.steps.h, unsigned(CeilDiv(a.p, kP)), unsigned(rows));
  kernel<<<grid, kThreads, kBytes, stream>>>(a);
  TE_LAUNCHED();
}

template <int kN, int kP>
Status RunWithin(cudaStream_t stream, const ScanArgs& a, int64_t rows) {
  int64_t bytes = 0;
  TE_TRY(SharedBytes(&bytes));
  if (int64_t(sizeof(Shared<kN, kP, 2>)) <= bytes) return Run<kN, kP, 2>(stream, a, rows);
  return Run<kN, kP, 1>(stream, a, rows);
}

}  // namespace
}  // namespace ssm

Status LaunchSsdFwd(cudaStream_t stream, Arg x, Arg dt, Arg A, Arg B, Arg C, Arg D, Arg z, Arg dt_bias,
                    Arg runs, Arg initial, Ret y, Ret last, Ret states, bool softplus, double least,
                    double most, int64_t shared) {
  constexpr const char* kOp = "te_ssd_fwd";
  ssm::ScanCall call;
  TE_TRY(ssm::ExpectScan({kOp, x, dt, A, B, C, dt_bias, runs, softplus, least, most, shared, 256}, &call));
  const int64_t channels = Present(D) ? Axes(D).last() : 1;
  TE_TRY(Expect(kOp, {{"D", D, F32, {call.h, channels}, kOptional},
                      {"z", z, BF16, call.all, kOptional},
                      {"initial", initial, F32, call.state, kOptional},
                      {"y", y, BF16, call.all},
                      {"final", last, F32, call.state, kOptional},
                      {"states", states, F32, call.kept, kOptional}}));
  TE_CHECK(channels == 1 || channels == call.p, "%s: D is %s, x %s", kOp, D.shape().c_str(),
           x.shape().c_str());
  if (call.rows * call.h * call.p == 0) return {};
  using ssm::Bf16;
  ssm::ScanArgs args{};
  args.steps = call.steps;
  args.x = Data<const Bf16>(x), args.B = Data<const Bf16>(B), args.C = Data<const Bf16>(C);
  args.z = Data<const Bf16>(z), args.D = Data<const float>(D), args.initial = Data<const float>(initial);
  args.y = Data<Bf16>(y), args.last = Data<float>(last), args.states = Data<float>(states);
  args.g = int(call.g), args.p = int(call.p), args.n = int(call.n), args.channels = int(channels);
  if (call.n <= 64) return ssm::RunWithin<64, 64>(stream, args, call.rows);
  if (call.n <= 128) return ssm::RunWithin<128, 64>(stream, args, call.rows);
  return ssm::RunWithin<256, 32>(stream, args, call.rows);
}

}  // namespace te
