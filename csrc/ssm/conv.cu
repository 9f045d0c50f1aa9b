// te_causal_conv1d_fwd and te_causal_conv1d_bwd: each channel by itself, over a few tokens. A thread has
// four channels of some tokens and keeps in registers what the next token sees; x is read once, y written
// once.

#include "base/finish.h"
#include "base/fp8.cuh"
#include "base/ops.h"
#include "base/ptx.cuh"
#include "base/silu.cuh"

namespace te {
namespace {

constexpr int kChannels = 4, kTokens = 32;  // of a thread
constexpr int kColumns = 32, kBands = 4;    // of threads of a CTA: in each of kBands the tokens of a thread
constexpr int kAhead = 4;                   // tokens that a thread loads at a time, while it computes others

struct ConvArgs {
  const float *kernel, *bias;  // [width, c], [c] or nullptr
  const int* runs;             // [b, s] or nullptr
  int s, c, width;
  bool silu;
};

// What a thread knows: its channels and tokens, and the kernel. kRuns: tokens see only those of their run.
template <typename T, int kWidth, bool kRuns>
struct Conv {
  static constexpr int kPast = kWidth - 1;
  using Vector = Vec<T, kChannels>;
  using Vectors = Vec<T, kChannels>[kAhead];
  const ConvArgs& a;
  const int64_t row;
  const int channel, first;  // the first token
  Vec<float, kChannels> kernel[kWidth], bias;

  __device__ __forceinline__ Conv(const ConvArgs& a)
      : a(a),
        row(blockIdx.z),
        channel((blockIdx.x * kColumns + threadIdx.x) * kChannels),
        first((blockIdx.y * kBands + threadIdx.y) * kTokens) {
#pragma unroll
    for (int tap = 0; tap < kWidth; ++tap)
      kernel[tap] =
          IsInside() ? Load<kChannels>(a.kernel + int64_t(tap) * a.c + channel) : Vec<float, kChannels>{};
    bias = IsInside() && a.bias ? Load<kChannels>(a.bias + channel) : Vec<float, kChannels>{};
  }

  __device__ __forceinline__ bool IsInside() const { return channel < a.c; }
  __device__ __forceinline__ int End() const { return min(first + kTokens, a.s); }
  __device__ __forceinline__ int64_t At(int64_t token) const { return (row * a.s + token) * a.c + channel; }
  // In an array [b, width - 1, c], whose last token is that before the row's first.
  __device__ __forceinline__ int64_t Before(int token) const {
    return (row * kPast + token + kPast) * a.c + channel;
  }
  // The run of a token; what is before the row belongs to its first token's.
  __device__ __forceinline__ int Run(int token) const {
    return kRuns ? a.runs[row * a.s + min(max(token, 0), a.s - 1)] : 0;
  }
  __device__ __forceinline__ Vector Input(const T* x, const T* initial, int token) const {
    if (token >= 0) return token < a.s ? Load<kChannels>(x + At(token)) : Vector{};
    return initial && token > -kWidth ? Load<kChannels>(initial + Before(token)) : Vector{};
  }
  // What the first token sees.
  __device__ __forceinline__ void Begin(const T* x, const T* initial, Vector (&inputs)[kWidth],
                                        int (&runs)[kWidth]) const {
#pragma unroll
    for (int i = 1; i < kWidth; ++i)
      inputs[i] = Input(x, initial, first - kWidth + i), runs[i] = Run(first - kWidth + i);
  }
  // Tokens from `token` on; zeros behind the row.
  __device__ __forceinline__ void LoadAhead(const T* from, int token, Vectors& ahead) const {
#pragma unroll
    for (int i = 0; i < kAhead; ++i)
      ahead[i] = token + i < a.s ? Load<kChannels>(from + At(token + i)) : Vector{};
  }

  // The sum at a token, of the inputs from kPast tokens before it on.
  __device__ __forceinline__ void Sum(const Vector (&inputs)[kWidth], const int (&runs)[kWidth],
                                      float (&sum)[kChannels]) const {
#pragma unroll
    for (int i = 0; i < kChannels; ++i) sum[i] = bias[i];
#pragma unroll
    for (int tap = 0; tap < kWidth; ++tap)
      if (!kRuns || runs[tap] == runs[kPast])
#pragma unroll
        for (int i = 0; i < kChannels; ++i) sum[i] += kernel[tap][i] * inputs[tap][i];
  }
};

template <typename T, int kCount>
__device__ __forceinline__ void Shift(T (&all)[kCount], const T& next) {
#pragma unroll
  for (int i = 0; i + 1 < kCount; ++i) all[i] = all[i + 1];
  all[kCount - 1] = next;
}

template <typename T, int kWidth, bool kRuns>
__global__ void __launch_bounds__(kColumns* kBands)
    te_causal_conv1d_fwd(const ConvArgs a, const T* x, const T* initial, T* y, T* last) {
  const Conv<T, kWidth, kRuns> conv(a);
  if (!conv.IsInside()) return;
  Vec<T, kChannels> inputs[kWidth] = {}, ahead[kAhead];
  int runs[kWidth] = {};
  conv.LoadAhead(x, conv.first, ahead);
  conv.Begin(x, initial, inputs, runs);
#pragma unroll 2
  for (int from = conv.first; from < conv.End(); from += kAhead) {
    Vec<T, kChannels> now[kAhead];
#pragma unroll
    for (int i = 0; i < kAhead; ++i) now[i] = ahead[i];
    if (from + kAhead < conv.End()) conv.LoadAhead(x, from + kAhead, ahead);
#pragma unroll
    for (int i = 0; i < kAhead; ++i) {
      if (from + i >= conv.End()) break;
      Shift(inputs, now[i]);
      Shift(runs, conv.Run(from + i));
      float sum[kChannels];
      conv.Sum(inputs, runs, sum);
      if (a.silu)
#pragma unroll
        for (float& each : sum) each *= Sigmoid(each);
      Store(y + conv.At(from + i), Round<T, kChannels>(sum));
    }
  }
  if (last && blockIdx.y == 0 && threadIdx.y == 0)
    for (int token = a.s - kWidth + 1; token < a.s; ++token) {
      const bool stays = conv.Run(token) == conv.Run(a.s - 1);
      Store(last + conv.Before(token - a.s), stays ? conv.Input(x, initial, token) : Vec<T, kChannels>{});
    }
}

template <typename T>
struct ConvGradients {
  const T *dy, *dlast, *x, *initial;
  T *dx, *dinitial;
  float *dkernel_parts, *dbias_parts;  // [b ceil(s / (kBands kTokens)), width, c], [.., c] or nullptr
};

// The gradient to the sum at each token goes to the inputs that it is made of; a thread makes the inputs'
// gradients of its tokens, and so computes again the sums of the next kPast.
template <typename T, int kWidth, bool kRuns>
struct Backward {
  static constexpr int kPast = kWidth - 1;
  const ConvArgs& a;
  const ConvGradients<T>& of;
  const Conv<T, kWidth, kRuns> conv;
  Vec<T, kChannels> inputs[kWidth] = {};
  int runs[kWidth] = {};
  float sums[kWidth][kChannels] = {};  // gradients to the last sums
  float dkernel[kWidth][kChannels] = {}, dbias[kChannels] = {};

  __device__ __forceinline__ void Run() {
    const int end = conv.End(), last_run = conv.Run(a.s - 1);
    // The inputs before the row are the first thread's.
    const int begin = conv.first == 0 ? -kPast : conv.first;
    Vec<T, kChannels> x_ahead[kAhead], dy_ahead[kAhead];
    conv.LoadAhead(of.x, conv.first, x_ahead);
    conv.LoadAhead(of.dy, conv.first, dy_ahead);
    conv.Begin(of.x, of.initial, inputs, runs);
#pragma unroll 1
    for (int from = conv.first; from < end + kPast; from += kAhead) {
      Vec<T, kChannels> x[kAhead], dy[kAhead];
#pragma unroll
      for (int i = 0; i < kAhead; ++i) x[i] = x_ahead[i], dy[i] = dy_ahead[i];
      if (from + kAhead < end + kPast) {
        conv.LoadAhead(of.x, from + kAhead, x_ahead);
        conv.LoadAhead(of.dy, from + kAhead, dy_ahead);
      }
#pragma unroll
      for (int i = 0; i < kAhead; ++i) {
        const int token = from + i, input = token - kPast;
        if (token >= end + kPast) break;
        Shift(inputs, x[i]);
        Shift(runs, token < a.s ? conv.Run(token) : -1);
        Differentiate(dy[i], token, token < end);
        // The oldest input is now in all sums that it was to be in.
        if (begin <= input && input < end) WriteInput(input, last_run);
      }
    }
  }

  // The sum at the token, and what it gives to the kernel, if the token is the thread's.
  __device__ __forceinline__ void Differentiate(const Vec<T, kChannels>& dy, int token, bool is_own) {
#pragma unroll
    for (int i = 0; i < kPast; ++i)
#pragma unroll
      for (int j = 0; j < kChannels; ++j) sums[i][j] = sums[i + 1][j];
    float (&gradient)[kChannels] = sums[kPast];
#pragma unroll
    for (float& each : gradient) each = 0;
    if (token >= a.s) return;
    float sum[kChannels];
    conv.Sum(inputs, runs, sum);
#pragma unroll
    for (int i = 0; i < kChannels; ++i) {
      const float sigmoid = Sigmoid(sum[i]);
      gradient[i] = a.silu ? dy[i] * sigmoid * (1.f + sum[i] * (1.f - sigmoid)) : dy[i];
    }
    if (!is_own) return;
#pragma unroll
    for (int i = 0; i < kChannels; ++i) dbias[i] += gradient[i];
#pragma unroll
    for (int tap = 0; tap < kWidth; ++tap)
      if (!kRuns || runs[tap] == runs[kPast])
#pragma unroll
        for (int i = 0; i < kChannels; ++i) dkernel[tap][i] += gradient[i] * inputs[tap][i];
  }

  // Of the oldest input; sums[i] is of the token i behind it.
  __device__ __forceinline__ void WriteInput(int input, int last_run) const {
    float dx[kChannels] = {};
#pragma unroll
    for (int i = 0; i < kWidth; ++i)
      if (!kRuns || runs[i] == runs[0])
#pragma unroll
        for (int j = 0; j < kChannels; ++j) dx[j] += conv.kernel[kPast - i][j] * sums[i][j];
    if (of.dlast && input >= a.s - kPast && (!kRuns || runs[0] == last_run)) {
      const auto dlast = Load<kChannels>(of.dlast + conv.Before(input - a.s));
#pragma unroll
      for (int j = 0; j < kChannels; ++j) dx[j] += dlast[j];
    }
    if (input >= 0)
      Store(of.dx + conv.At(input), Round<T, kChannels>(dx));
    else if (of.dinitial)
      Store(of.dinitial + conv.Before(input), Round<T, kChannels>(dx));
  }

  // All threads of the CTA call it.
  __device__ __forceinline__ void LeaveParts() const {
    __shared__ float parts[kBands][kWidth + 1][kColumns * kChannels];
#pragma unroll
    for (int i = 0; i < kChannels; ++i) {
      const int column = threadIdx.x * kChannels + i;
#pragma unroll
      for (int tap = 0; tap < kWidth; ++tap) parts[threadIdx.y][tap][column] = dkernel[tap][i];
      parts[threadIdx.y][kWidth][column] = dbias[i];
    }
    __syncthreads();
    const int64_t part = int64_t(blockIdx.z) * gridDim.y + blockIdx.y;
    constexpr int kAll = kColumns * kChannels;
    for (int i = threadIdx.y * kColumns + threadIdx.x; i < (kWidth + 1) * kAll; i += kColumns * kBands) {
      const int tap = i / kAll, column = i % kAll, channel = blockIdx.x * kAll + column;
      if (channel >= a.c) continue;
      float sum = 0;
#pragma unroll
      for (int band = 0; band < kBands; ++band) sum += parts[band][tap][column];
      if (tap < kWidth) of.dkernel_parts[(part * kWidth + tap) * a.c + channel] = sum;
      if (tap == kWidth && of.dbias_parts) of.dbias_parts[part * a.c + channel] = sum;
    }
  }
};

template <typename T, int kWidth, bool kRuns>
__global__ void __launch_bounds__(kColumns* kBands)
    te_causal_conv1d_bwd(const ConvArgs a, const ConvGradients<T> of) {
  Backward<T, kWidth, kRuns> backward{a, of, Conv<T, kWidth, kRuns>(a)};
  if (backward.conv.IsInside()) backward.Run();
  backward.LeaveParts();
}

// Calls `run<T, width, whether there are runs>()`.
template <typename Fn>
Status Dispatch(const ConvArgs& a, Type type, Fn&& run) {
  return DispatchFloat(type, [&]<typename T>() -> Status {
    const auto of_width = [&]<int kWidth>() {
      return a.runs ? run.template operator()<T, kWidth, true>()
                    : run.template operator()<T, kWidth, false>();
    };
    if (a.width == 2) return of_width.template operator()<2>();
    return a.width == 3 ? of_width.template operator()<3>() : of_width.template operator()<4>();
  });
}

dim3 GridOf(const ConvArgs& a, int64_t rows) {
  return {unsigned(CeilDiv(a.c, kColumns * kChannels)),
          unsigned(std::max<int64_t>(1, CeilDiv(a.s, kBands * kTokens))), unsigned(rows)};
}

struct ConvShapes {
  Axes all, state, of_kernel, channels;
  int64_t rows, s, c;
};

ConvArgs ArgsOf(const ConvShapes& of, const Tensor& kernel, const Tensor& bias, const Tensor& runs,
                int64_t width, bool silu) {
  return {Data<const float>(kernel),
          Data<const float>(bias),
          Data<const int>(runs),
          int(of.s),
          int(of.c),
          int(width),
          silu};
}

Status ExpectConv(const char* op, const Tensor& x, const Tensor& kernel, const Tensor& bias,
                  const Tensor& runs, const Tensor& initial, int64_t width, ConvShapes* shapes) {
  TE_TRY(ExpectRank(op, "x", x, 3, true));
  const Axes all(x);
  const int64_t rows = all[0], s = all[1], c = all[2];
  *shapes = {all, {rows, width - 1, c}, {width, c}, {c}, rows, s, c};
  TE_TRY(Expect(op, {{"x", x, kFloats, all},
                     {"kernel", kernel, F32, shapes->of_kernel},
                     {"bias", bias, F32, shapes->channels, kOptional},
                     {"segments", runs, S32, all.First(2), kOptional},
                     {"initial", initial, x.type, shapes->state, kOptional}}));
  TE_CHECK(width >= 2 && width <= 4 && c % 8 == 0, "%s: x is %s, width %ld; pass a multiple of 8 channels",
           op, x.shape().c_str(), long(width));
  TE_CHECK(s <= INT32_MAX / 2 && c <= INT32_MAX / 2 && rows <= 65535 && CeilDiv(s, kBands * kTokens) <= 65535,
           "%s: x is %s, too large for one call", op, x.shape().c_str());
  return {};
}

}  // namespace

Status LaunchConvFwd(cudaStream_t stream, Arg x, Arg kernel, Arg bias, Arg runs, Arg initial, Ret y, Ret last,
                     bool silu, int64_t width) {
  constexpr const char* kOp = "te_causal_conv1d_fwd";
  ConvShapes shapes;
  TE_TRY(ExpectConv(kOp, x, kernel, bias, runs, initial, width, &shapes));
  TE_TRY(Expect(kOp, {{"y", y, x.type, shapes.all}, {"final", last, x.type, shapes.state, kOptional}}));
  if (shapes.rows * shapes.c == 0) return {};
  const ConvArgs args = ArgsOf(shapes, kernel, bias, runs, width, silu);
  return Dispatch(args, x.type, [&]<typename T, int kWidth, bool kRuns>() -> Status {
    const auto run = te_causal_conv1d_fwd<T, kWidth, kRuns>;
    run<<<GridOf(args, shapes.rows), dim3(kColumns, kBands), 0, stream>>>(
        args, Data<const T>(x), Data<const T>(initial), Data<T>(y), Data<T>(last));
    TE_LAUNCHED();
  });
}

Status LaunchConvBwd(cudaStream_t stream, Arg dy, Arg dlast, Arg x, Arg kernel, Arg bias, Arg runs,
                     Arg initial, Ret dx, Ret dkernel, Ret dbias, Ret dinitial, Ret dkernel_partials,
                     Ret dbias_partials, bool silu, int64_t width) {
  constexpr const char* kOp = "te_causal_conv1d_bwd";
  ConvShapes shapes;
  TE_TRY(ExpectConv(kOp, x, kernel, bias, runs, initial, width, &shapes));
  const Axes parts = {shapes.rows * std::max<int64_t>(1, CeilDiv(shapes.s, kBands * kTokens))};
  TE_TRY(Expect(
      kOp, {{"dy", dy, x.type, shapes.all},
            {"dfinal", dlast, x.type, shapes.state, kOptional},
            {"dx", dx, x.type, shapes.all},
            {"dkernel", dkernel, F32, shapes.of_kernel},
            {"dbias", dbias, F32, shapes.channels, Present(bias) ? kRequired : kAbsent},
            {"dinitial", dinitial, x.type, shapes.state, kOptional},
            {"dkernel_partials", dkernel_partials, F32, parts + shapes.of_kernel},
            {"dbias_partials", dbias_partials, F32, parts + shapes.channels, RequiredIf(Present(dbias))}}));
  if (shapes.c == 0) return {};
  const ConvArgs args = ArgsOf(shapes, kernel, bias, runs, width, silu);
  if (shapes.rows > 0)
    TE_TRY(Dispatch(args, x.type, [&]<typename T, int kWidth, bool kRuns>() -> Status {
      const ConvGradients<T> of{Data<const T>(dy),
                                Data<const T>(dlast),
                                Data<const T>(x),
                                Data<const T>(initial),
                                Data<T>(dx),
                                Data<T>(dinitial),
                                Data<float>(dkernel_partials),
                                Data<float>(dbias_partials)};
      const auto run = te_causal_conv1d_bwd<T, kWidth, kRuns>;
      run<<<GridOf(args, shapes.rows), dim3(kColumns, kBands), 0, stream>>>(args, of);
      TE_LAUNCHED();
    }));
  return FinishPartials(stream, {Reduce::kSumOfFloats, dkernel_partials, dkernel},
                        {Reduce::kSumOfFloats, dbias_partials, dbias});
}

}  // namespace te
