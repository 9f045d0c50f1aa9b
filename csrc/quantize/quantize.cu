// Quantize to FP8 in both layouts: one reading of x writes data [m, n], data_t [n, m], the amax and the
// column sums. Bytes per element: 2 read (bf16) and 2 written.

#include "base/finish.h"
#include "base/ops.h"
#include "quantize/tile.cuh"

namespace te {
namespace {

template <typename T>
struct QuantizeSource {
  using Type = T;
  struct Raw {
    Vec<T, 8> x;
  };
  static constexpr int kSlots = 1, kCtas = sizeof(T) == 2 ? 4 : 3, kWindow = sizeof(T) == 2 ? 8 : 4;
  static constexpr bool kSums = true;
  const T* x;  // [m, n]
  int64_t n;

  template <bool kVectors, bool kAgain = false>
  __device__ __forceinline__ Raw Load(int64_t row, int64_t column, int columns) const {
    return {LoadRow<kVectors, kAgain>(x + row * n + column, columns)};
  }

  __device__ __forceinline__ void Values(const Raw& raw, float (&f)[1][8]) const {
#pragma unroll
    for (int j = 0; j < 8; ++j) f[0][j] = raw.x[j];
  }
};

TE_TILE_KERNELS(te_quantize);

// The weights of experts, each with as many tiles, of kA arrays side by side.
template <typename T, int kA>
struct StackedSource {
  using Type = T;
  struct Raw {
    Vec<T, 8> x[kA];
  };
  static constexpr int kSlots = kA,
                       kCtas = kA == 2          ? 2
                               : sizeof(T) == 2 ? 4
                                                : 3,
                       kWindow = 16 / int(sizeof(T)) / kA;
  static constexpr bool kSums = false;
  const T* x[kA];  // [e, m, n]
  int64_t n;

  template <bool kVectors, bool kAgain = false>
  __device__ __forceinline__ Raw Load(int64_t row, int64_t column, int columns) const {
    Raw raw;
#pragma unroll
    for (int s = 0; s < kA; ++s) raw.x[s] = LoadRow<kVectors, kAgain>(x[s] + row * n + column, columns);
    return raw;
  }

  __device__ __forceinline__ void Values(const Raw& raw, float (&f)[kA][8]) const {
#pragma unroll
    for (int s = 0; s < kA; ++s)
#pragma unroll
      for (int j = 0; j < 8; ++j) f[s][j] = raw.x[s][j];
  }

  template <typename Write>
  __device__ __forceinline__ void Of(const TileResults<T>& all, unsigned index, Write write) const {
    const unsigned tiles = all.chunks * all.strips, expert = index / tiles;
    const int64_t first = expert * (all.m * all.n);
    TileResults<T> a = all;
    if (a.scale) a.scale += expert;
    if (a.data) a.data += first * kA;
    if (a.data_t) a.data_t += first * kA;
    if (a.amax_partials) a.amax_partials += expert;
    StackedSource one = *this;
#pragma unroll
    for (int s = 0; s < kA; ++s) one.x[s] += first;
    write(one, a, index % tiles);
  }
};

template <typename Source, bool kVectors>
__global__ void __launch_bounds__(kTileThreads, Source::kCtas)
    te_quantize_stacked(const Source source, const TileResults<typename Source::Type> all) {
  LetNextStart();
  source.Of(all, blockIdx.x,
            [](const auto& one, const auto& a, unsigned index) { WriteTile<kVectors>(one, a, index); });
}
template <typename Source, bool kVectors>
__global__ void __launch_bounds__(kTileThreads, 4)
    te_quantize_stacked_amax(const Source source, const TileResults<typename Source::Type> all) {
  LetNextStart();
  source.Of(all, gridDim.x - 1 - blockIdx.x,
            [](const auto& one, const auto& a, unsigned index) { WriteAmax<kVectors>(one, a, index); });
}
struct te_quantize_stacked_kernels {
  template <typename Source>
  static constexpr TileKernel<Source> of[2][2] = {
      {te_quantize_stacked<Source, false>, te_quantize_stacked<Source, true>},
      {te_quantize_stacked_amax<Source, false>, te_quantize_stacked_amax<Source, true>}};
};

}  // namespace

Status LaunchQuantize(cudaStream_t stream, Arg x, Arg scale, Ret data, Ret data_t, Ret amax, Ret dbias,
                      Ret scale_inv, Ret amax_partials, Ret dbias_partials, int64_t split) {
  const char* op = "te_quantize";
  const Axes all(x), m = all.First(split), n = all.From(split);
  TE_CHECK(split >= 0 && split <= all.rank(), "%s: split is %ld; pass 0 to %ld, the axes of x", op,
           long(split), long(all.rank()));
  const TileArrays arrays{{scale, amax, dbias, scale_inv, amax_partials, dbias_partials}, data, data_t};
  TE_TRY(Expect(op, {{"x", x, kFloats, all}}));
  TE_TRY(ExpectTiles(op, x, m, n, 1, arrays));
  if (!Present(x)) return Finish(stream, arrays.totals);
  TE_TRY(DispatchFloat(x.type, [&]<typename T>() -> Status {
    const QuantizeSource<T> source{Data<T>(x), n.count()};
    return LaunchTiles<te_quantize_kernels>(op, stream, source, Aligned(source.x), m.count(), n.count(),
                                            arrays);
  }));
  return Finish(stream, arrays.totals);
}

Status LaunchQuantizeStacked(cudaStream_t stream, Arg x, Arg y, Arg scale, Ret data, Ret data_t, Ret amax,
                             Ret amax_partials, int64_t stack, int64_t slots, int64_t split) {
  const char* op = "te_quantize_stacked";
  const Axes all(x), e = all.First(stack), one = all.From(stack), m = one.First(split), n = one.From(split);
  TE_CHECK(stack >= 0 && split >= 0 && stack <= all.rank() && split <= all.rank() - stack,
           "%s: stack is %ld, split %ld; pass numbers of axes of x%s", op, long(stack), long(split),
           x.shape().c_str());
  TE_CHECK(slots == 0 || slots == 1, "%s: slots is %ld; pass 1 with y, else 0", op, long(slots));
  const TileArrays arrays{{scale, amax, kNone, kNone, amax_partials}, data, data_t};
  TE_TRY(Expect(op, {{"x", x, kFloats, all}, {"y", y, x.type, all, slots ? kRequired : kAbsent}}));
  TE_TRY(ExpectTiles(op, x, m, slots ? Axes{2} + n : n, slots + 1, arrays, e));
  if (!Present(x)) return Finish(stream, arrays.totals);
  TE_TRY(DispatchFloat(x.type, [&]<typename T>() -> Status {
    const auto launch = [&]<typename Source>(const Source& source) {
      const bool aligned = Aligned(source.x[0]) && Aligned(source.x[Source::kSlots - 1]);
      return LaunchTiles<te_quantize_stacked_kernels>(op, stream, source, aligned, m.count(), n.count(),
                                                      arrays, e.count());
    };
    if (slots) return launch(StackedSource<T, 2>{{Data<T>(x), Data<T>(y)}, n.count()});
    return launch(StackedSource<T, 1>{{Data<T>(x)}, n.count()});
  }));
  return Finish(stream, arrays.totals);
}

}  // namespace te
