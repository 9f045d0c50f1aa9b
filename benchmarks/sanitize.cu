// Calls of launchers on random numbers, without jax: compute-sanitizer ends in a segmentation fault where jax
// runs these kernels. on_gpu.sh compiles it with the sources that it calls, and runs it under memcheck and
// racecheck.
#include <cuda_bf16.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <random>

#include "base/check.h"
#include "base/ops.h"
#include "delta/channel.cuh"

namespace te {
namespace {

std::mt19937 generator(1);

// An array in device memory that is never freed, with shape.
Tensor Array(Type type, std::initializer_list<int64_t> shape, const void* values = nullptr) {
  auto* sizes = new std::vector<int64_t>(shape);
  Tensor a{nullptr, type, sizes->data(), int64_t(sizes->size())};
  cudaMalloc(&a.data, std::max<int64_t>(a.bytes(), 1));
  values ? cudaMemcpy(a.data, values, a.bytes(), cudaMemcpyHostToDevice)
         : cudaMemset(a.data, 0xff, a.bytes());
  return a;
}

// Normally distributed.
Arg Drawn(Type type, std::initializer_list<int64_t> shape, float scale = 1, float mean = 0) {
  int64_t count = 1;
  for (int64_t size : shape) count *= size;
  std::normal_distribution<float> draw(mean, scale);
  std::vector<char> bytes(count * Width(type));
  for (int64_t i = 0; i < count; ++i) {
    const float value = draw(generator);
    const __nv_bfloat16 rounded = __float2bfloat16(value);
    const void* from = type == F32 ? static_cast<const void*>(&value) : &rounded;
    std::memcpy(&bytes[i * Width(type)], from, Width(type));
  }
  return {Array(type, shape, bytes.data())};
}

// The tokens of rows, each in runs of `length`; absent where that is 0.
Arg Runs(int64_t rows, int64_t s, int64_t length) {
  if (length == 0) return {kNone};
  std::vector<int> runs(rows * s);
  for (int64_t i = 0; i < rows * s; ++i) runs[i] = int(i % s / length);
  return {Array(S32, {rows, s}, runs.data())};
}

Ret Written(Type type, std::initializer_list<int64_t> shape) { return {Array(type, shape)}; }

int64_t Padded(int64_t bytes) { return CeilDiv(bytes, 256) * 256; }

void Check(const char* what, const Status& status) {
  const cudaError_t error = cudaDeviceSynchronize();
  std::printf("%s: %s %s\n", what, status.message.c_str(), cudaGetErrorString(error));
  if (status.failure() || error != cudaSuccess) std::exit(1);
}

struct Sizes {
  int64_t rows, s, h, g, p, n, run;  // run: tokens of each, 0: one
  int64_t slab_rows, slab_tokens, slab_heads;
};

void Scan(const Sizes& of, bool gate, bool backward) {
  const auto [rows, s, h, g, p, n, run, slab_rows, slab_tokens, slab_heads] = of;
  const Arg none{kNone}, x = Drawn(BF16, {rows, s, h, p}), dt = Drawn(BF16, {rows, s, h});
  const Arg A = Drawn(F32, {h}, 0.3f, -2), B = Drawn(BF16, {rows, s, g, n}, 0.1f);
  const Arg C = Drawn(BF16, {rows, s, g, n}), D = Drawn(F32, {h, 1}), bias = Drawn(F32, {h}, 1, -3);
  const Arg z = gate ? Drawn(BF16, {rows, s, h, p}) : none, initial = Drawn(F32, {rows, h, p, n});
  const Arg runs = Runs(rows, s, run), dy = Drawn(BF16, {rows, s, h, p}), dlast = Drawn(F32, {rows, h, p, n});
  const int64_t shared = g == 1 ? 1 : h / g, chunks = CeilDiv(s, 64), of_steps = rows * chunks * h * 512;
  const Ret states = Written(F32, {rows, CeilDiv(s, 512), h, p, n});
  Check("te_ssd_fwd", LaunchSsdFwd(nullptr, x, dt, A, B, C, D, z, bias, runs, initial,
                                   Written(BF16, {rows, s, h, p}), Written(F32, {rows, h, p, n}), states,
                                   Written(U8, {of_steps}), true, 0.001, 45, shared));
  if (!backward) return;
  const int64_t of_slab = slab_rows * (slab_tokens / 64), parts = CeilDiv(h / g, slab_heads);
  const int64_t bytes = Padded(of_steps) + Padded(of_slab * h * (6 * 64 + 4) * 4) +
                        Padded(2 * of_slab * h * p * n * 2) + Padded(2 * of_slab * 64 * g * parts * n * 4);
  Check("te_ssd_bwd",
        LaunchSsdBwd(nullptr, dy, dlast, x, dt, A, B, C, D, bias, runs, Arg{states},
                     Written(BF16, {rows, s, h, p}), Written(BF16, {rows, s, h}), Written(F32, {h}),
                     Written(BF16, {rows, s, g, n}), Written(BF16, {rows, s, g, n}), Written(F32, {h, 1}),
                     Written(F32, {h}), Written(F32, {rows, h, p, n}), Written(U8, {bytes}),
                     Written(F32, {rows * chunks, h}), Written(F32, {rows * chunks, h, 1}),
                     Written(F32, {rows * chunks, h}), true, 0.001, 45, shared, slab_rows, slab_tokens,
                     slab_heads));
}

// p: channels of values, n: of keys. by_channel: whether each of these has a gate.
void Delta(const Sizes& of, bool by_channel = false) {
  const auto [rows, s, h, g, p, n, run, slab_rows, slab_tokens, slab_heads] = of;
  const Arg q = Drawn(BF16, {rows, s, g, n}), k = Drawn(BF16, {rows, s, g, n});
  const Arg v = Drawn(BF16, {rows, s, h, p}), beta = Drawn(F32, {rows, s, h}, 0.1f, 0.5f);
  const int64_t gates = by_channel ? n : 1;
  const Arg gate = Drawn(F32, {rows, s, h, gates}, 0.02f, -0.1f), initial = Drawn(F32, {rows, h, n, p});
  const Arg runs = Runs(rows, s, run), dy = Drawn(BF16, {rows, s, h, p}), dlast = Drawn(F32, {rows, h, n, p});
  const int64_t shared = g == 1 ? 1 : h / g;
  const int64_t of_chunk = by_channel ? delta::ChannelBytes(n) : sizeof(delta::Chunk);
  const int64_t of_chunks = rows * CeilDiv(s, 64) * h * of_chunk;
  const int64_t of_slab = slab_rows * slab_tokens * h * p * 2;
  const Ret states = Written(F32, {rows, CeilDiv(s, 1024), h, n, p});
  Check("te_gated_delta_fwd",
        LaunchGatedDeltaFwd(nullptr, q, k, v, beta, gate, runs, initial, Written(BF16, {rows, s, h, p}),
                            Written(F32, {rows, h, n, p}), states, Written(U8, {of_chunks}), 0.1, true,
                            shared));
  const int64_t of_part = slab_rows * slab_tokens / 64 * h * of_chunk;
  const int64_t exchanged = Padded(2 * of_slab / 64 * n) + Padded(2 * of_slab);
  const int64_t bytes = Padded(of_part) + exchanged;
  Check("te_gated_delta_bwd",
        LaunchGatedDeltaBwd(nullptr, dy, dlast, q, k, v, beta, gate, runs, Arg{states},
                            Written(BF16, {rows, s, g, n}), Written(BF16, {rows, s, g, n}),
                            Written(BF16, {rows, s, h, p}), Written(F32, {rows, s, h}),
                            Written(F32, {rows, s, h, gates}), Written(F32, {rows, h, n, p}),
                            Written(U8, {bytes}), 0.1, true, shared, slab_rows, slab_tokens));
}

void Convolution(int64_t rows, int64_t s, int64_t c, int64_t width, int64_t run, Type type) {
  const Arg x = Drawn(type, {rows, s, c}), kernel = Drawn(F32, {width, c}), bias = Drawn(F32, {c});
  const Arg initial = Drawn(type, {rows, width - 1, c}), dy = Drawn(type, {rows, s, c}),
            runs = Runs(rows, s, run);
  const Arg dlast = Drawn(type, {rows, width - 1, c});
  const int64_t parts = rows * std::max<int64_t>(1, CeilDiv(s, 128));
  Check("te_causal_conv1d_fwd",
        LaunchConvFwd(nullptr, x, kernel, bias, runs, initial, Written(type, {rows, s, c}),
                      Written(type, {rows, width - 1, c}), true, width));
  Check("te_causal_conv1d_bwd",
        LaunchConvBwd(nullptr, dy, dlast, x, kernel, bias, runs, initial, Written(type, {rows, s, c}),
                      Written(F32, {width, c}), Written(F32, {c}), Written(type, {rows, width - 1, c}),
                      Written(F32, {parts, width, c}), Written(F32, {parts, c}), true, width));
}

void GatedNorm(int64_t rows, int64_t g, int64_t c, bool before_gate) {
  const Arg none{kNone}, x = Drawn(BF16, {rows, g, c}), z = Drawn(BF16, {rows, g, c}),
                         gamma = Drawn(F32, {g, c});
  const Arg scale = Drawn(F32, {}, 0, 2), dy = Drawn(BF16, {rows, g, c});
  const Ret rstd = Written(F32, {rows, g}), data = Written(F8E4M3FN, {rows, g, c}), absent{kNone};
  const Ret partials = Written(F32, {CeilDiv(rows, 256), std::max<int64_t>(64, CeilDiv(g * c, 64))});
  for (const Ret& data_t : {absent, Written(F8E4M3FN, {g, c, rows})})
    Check("te_gated_norm_fwd",
          LaunchGatedNormFwd(nullptr, x, z, gamma, none, scale, absent, data, data_t, rstd, Written(F32, {}),
                             Written(F32, {}), Written(U8, {8 * rows * g}), partials, 1e-5, before_gate));
  Check("te_gated_norm_block_fwd",
        LaunchGatedNormBlockFwd(nullptr, x, z, gamma, data, Written(F8E4M3FN, {g, c, rows}),
                                Written(F32, {g, CeilDiv(c, 128), rows}),
                                Written(F32, {CeilDiv(rows, 128), g, c}), rstd, Written(U8, {8 * rows * g}),
                                1e-5, before_gate, false, 0));
  Check("te_gated_norm_bwd", LaunchGatedNormBwd(nullptr, dy, x, z, Arg{rstd}, gamma,
                                                Written(BF16, {rows, g, c}), Written(BF16, {rows, g, c}),
                                                Written(F32, {g, c}), Written(F32, {3, g, c}), before_gate));
}

void All() {
  for (bool before_gate : {false, true}) {
    GatedNorm(130, 3, 200, before_gate), GatedNorm(70, 2, 1024, before_gate),
        GatedNorm(5, 2, 33, before_gate);
  }
  Scan({2, 200, 3, 1, 64, 128, 0, 1, 256, 2}, false, true);
  Scan({2, 700, 2, 1, 64, 128, 150, 2, 512, 1}, false, true);
  Scan({1, 130, 4, 2, 24, 40, 50, 1, 192, 2}, false, true);
  Scan({3, 70, 4, 1, 64, 64, 0, 2, 128, 4}, false, true);
  Scan({1, 150, 2, 1, 72, 128, 40, 1, 192, 2}, true, true);  // not wgmma: a gate, and more than 64 channels
  Scan({1, 90, 1, 1, 32, 256, 0, 1, 64, 1}, true, false);
  Delta({2, 200, 3, 1, 64, 128, 0, 1, 256, 1}), Delta({1, 1100, 2, 2, 72, 24, 150, 1, 1024, 1});
  Delta({3, 70, 4, 2, 128, 64, 30, 2, 128, 1}), Delta({2, 200, 2, 1, 264, 256, 70, 1, 256, 1});
  Delta({2, 200, 2, 1, 64, 128, 0, 1, 256, 1}, true), Delta({1, 1100, 2, 2, 72, 24, 150, 1, 1024, 1}, true);
  Delta({3, 70, 4, 2, 128, 64, 30, 2, 128, 1}, true);
  Convolution(2, 66, 264, 2, 0, F32), Convolution(2, 99, 264, 3, 20, F32),
      Convolution(2, 132, 264, 4, 0, BF16);
}

}  // namespace
}  // namespace te

int main() { te::All(); }
