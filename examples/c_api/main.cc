// Half of a transformer's MLP in FP8, without JAX and without Python: RMSNorm straight to FP8, weights to
// FP8, their product, SwiGLU; and a grouped product. Each step is compared with the same math in double, of
// what the step before it gave.
//
//   te_jax_example [path of libcublasLt.so.13]
#include <algorithm>
#include <random>

#include "device.h"

namespace {

constexpr int64_t kRows = 300, kWidth = 512, kHidden = 256;  // of x [rows, width]; the product has 2 hidden
constexpr double kEps = 1e-6;
constexpr float kScaleX = 64, kScaleW = 128;
constexpr double kBf16 = 1.01 / 256;  // a rounding to bf16 and the f32 math before it, relative

std::vector<float> Random(int64_t count, double sigma, unsigned seed) {
  std::mt19937 generator(seed);
  std::normal_distribution<float> normal(0, sigma);
  std::vector<float> values(count);
  for (float& value : values) value = normal(generator);
  return values;
}

int failures = 0;

// error and bound of element i
template <typename Error>
void Check(const char* what, int64_t count, Error&& error) {
  double worst = 0;
  for (int64_t i = 0; i < count; ++i) {
    const auto [off, bound] = error(i);
    worst = std::max(worst, off <= bound ? off / std::max(bound, 1e-300) : INFINITY);
  }
  std::printf("%-28s %s, at most %.2f of the bound\n", what, worst <= 1 ? "agrees" : "DIFFERS", worst);
  failures += !(worst <= 1);
}
using Pair = std::pair<double, double>;

void CheckNorm(const Array& x, const Array& y, const Array& data, const Array& amax) {
  const std::vector<double> xs = x.Get(), ys = y.Get(), bytes = data.Get();
  std::vector<double> exact(xs.size());
  double largest = 0;
  for (int64_t row = 0; row < kRows; ++row) {
    double squares = 0;
    for (int64_t i = 0; i < kWidth; ++i) squares += xs[row * kWidth + i] * xs[row * kWidth + i];
    for (int64_t i = row * kWidth; i < (row + 1) * kWidth; ++i) {
      exact[i] = xs[i] / std::sqrt(squares / kWidth + kEps);
      largest = std::max(largest, std::fabs(exact[i]));
    }
  }
  Check("norm: y", exact.size(),
        [&](int64_t i) { return Pair(std::fabs(ys[i] - exact[i]), kBf16 * std::fabs(exact[i])); });
  // Half a step: of 3 bits of mantissa, or of 2^-9; and the f32 math before it.
  Check("norm: data", exact.size(), [&](int64_t i) {
    const double value = exact[i] * kScaleX;
    return Pair(std::fabs(bytes[i] - value), 1.001 * std::max(std::fabs(value) / 16, 1.0 / 1024));
  });
  Check("norm: amax", 1, [&](int64_t) { return Pair(std::fabs(amax.Get()[0] - largest), 1e-5 * largest); });
}

// Tensor cores align the products of 32 numbers to the largest, and keep 13 bits behind it.
void CheckGemm(const Array& left, const Array& right, const Array& out) {
  const std::vector<double> a = left.Get(), b = right.Get(), got = out.Get();
  const double scale = 1.0 / (kScaleX * kScaleW);
  Check("gemm: out", kRows * 2 * kHidden, [&](int64_t i) {
    const int64_t row = i / (2 * kHidden), column = i % (2 * kHidden);
    double sum = 0, largest = 0;
    for (int64_t k0 = 0; k0 < kWidth; k0 += 32) {
      double of_group = 0;
      for (int64_t k = k0; k < k0 + 32; ++k) {
        const double product = a[row * kWidth + k] * b[column * kWidth + k] * scale;
        sum += product, of_group = std::max(of_group, std::fabs(product));
      }
      largest += of_group;
    }
    return Pair(std::fabs(got[i] - sum), 32 * std::ldexp(largest, -13) + kBf16 * std::fabs(sum));
  });
}

void CheckActivation(const Array& in, const Array& y) {
  const std::vector<double> x = in.Get(), got = y.Get();
  Check("activation: y", kRows * kHidden, [&](int64_t i) {
    const double* slots = x.data() + i / kHidden * 2 * kHidden + i % kHidden;
    const double exact = slots[0] / (1 + std::exp(-slots[0])) * slots[kHidden];
    return Pair(std::fabs(got[i] - exact), kBf16 * std::fabs(exact) + 1e-30);
  });
}

// Rows of experts times the weight of their expert: groups of 100 and of 200 rows, which begin at multiples
// of 128, in a buffer of 384.
void RunGroups() {
  constexpr int64_t kBuffer = 384, kExperts = 2;
  const int32_t offsets[] = {0, 128, 384}, counts[] = {100, 200};
  Array lhs(TE_JAX_BF16, {kBuffer, kWidth}), rhs(TE_JAX_BF16, {kExperts, kHidden, kWidth});
  Array starts(TE_JAX_I32, {kExperts + 1}), sizes(TE_JAX_I32, {kExperts});
  Array out(TE_JAX_F32, {kBuffer, kHidden});
  lhs.Put(Random(kBuffer * kWidth, 1, 2)), rhs.Put(Random(kExperts * kHidden * kWidth, 1, 3));
  starts.Copy(offsets), sizes.Copy(counts);
  te_jax_gemm_grouped_args grouped = {};
  grouped.lhs = lhs, grouped.rhs = rhs, grouped.offsets = starts, grouped.counts = sizes, grouped.out = out;
  RUN(gemm_grouped, grouped);
  const std::vector<double> a = lhs.Get(), b = rhs.Get(), got = out.Get();
  Check("gemm_grouped: out", kBuffer * kHidden, [&](int64_t i) {
    const int64_t row = i / kHidden, expert = row >= offsets[1];
    if (row >= offsets[expert] + counts[expert]) return Pair(std::fabs(got[i]), 0);  // pads its group
    const double *left = &a[row * kWidth], *right = &b[(expert * kHidden + i % kHidden) * kWidth];
    double sum = 0, size = 0;
    for (int64_t k = 0; k < kWidth; ++k) sum += left[k] * right[k], size += std::fabs(left[k] * right[k]);
    // Products of bf16 are exact; an addition loses at most 2^-23 of what is summed, where f32 is cut off.
    return Pair(std::fabs(got[i] - sum), std::ldexp(kWidth * size, -23));
  });
}

}  // namespace

int main(int argc, char** argv) {
  if (te_jax_api_version() != TE_JAX_API_VERSION) return std::puts("te_jax.h is of another version"), 1;
  if (argc > 1) Ok(te_jax_set_library_path("libcublasLt.so.13", argv[1]));

  Array x(TE_JAX_BF16, {kRows, kWidth}), gamma(TE_JAX_F32, {kWidth}), w(TE_JAX_BF16, {2 * kHidden, kWidth});
  x.Put(Random(kRows * kWidth, 1, 0)), w.Put(Random(2 * kHidden * kWidth, 0.05, 1));
  gamma.Put(std::vector<float>(kWidth, 1.f));
  Array scale_x(TE_JAX_F32, {}), scale_w(TE_JAX_F32, {}), inv_x(TE_JAX_F32, {}), inv_w(TE_JAX_F32, {});
  scale_x.Put({kScaleX}), scale_w.Put({kScaleW});

  Array y(TE_JAX_BF16, {kRows, kWidth}), x8(TE_JAX_E4M3, {kRows, kWidth}), amax(TE_JAX_F32, {});
  Array rstd(TE_JAX_F32, {kRows});
  te_jax_norm_fwd_args norm = {};
  norm.x = x, norm.gamma = gamma, norm.scale = scale_x, norm.eps = kEps, norm.rms = 1;
  norm.y = y, norm.data = x8, norm.rstd = rstd, norm.amax = amax, norm.scale_inv = inv_x;
  RUN(norm_fwd, norm);
  CheckNorm(x, y, x8, amax);

  Array w8(TE_JAX_E4M3, {2 * kHidden, kWidth});
  te_jax_quantize_args quantize = {};
  quantize.x = w, quantize.scale = scale_w, quantize.data = w8, quantize.scale_inv = inv_w;
  quantize.split = 1;
  RUN(quantize, quantize);

  Array out(TE_JAX_BF16, {kRows, 2 * kHidden});
  te_jax_gemm_args gemm = {};
  gemm.lhs = x8, gemm.rhs = w8, gemm.lhs_scale_inv = inv_x, gemm.rhs_scale_inv = inv_w, gemm.out = out;
  gemm.contract = 1;
  RUN(gemm, gemm);
  CheckGemm(x8, w8, out);

  Array z(TE_JAX_BF16, {kRows, kHidden});
  te_jax_activation_fwd_args activation = {};
  activation.x = out.As({kRows, 2, kHidden}), activation.y = z, activation.kind = TE_JAX_SILU;
  RUN(activation_fwd, activation);
  CheckActivation(out, z);
  RunGroups();

  gemm.contract = 3;  // what is wrong is a status, and nothing is launched
  const bool refused = te_jax_gemm(&gemm, nullptr) == TE_JAX_INVALID_ARGUMENT;
  std::printf("refused: %s\n", te_jax_error());
  return failures || !refused;
}
