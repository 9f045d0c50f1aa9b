// Quantize to FP8 in both layouts: one reading of x writes data [m, n], data_t [n, m], the amax and the
// column sums. Bytes per element: 2 read (bf16) and 2 written.

#include "ops.h"
#include "tile.cuh"

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

}  // namespace

Status LaunchQuantize(cudaStream_t stream, Arg x, Arg scale, Ret data, Ret data_t, Ret amax, Ret dbias,
                      int64_t split) {
  const char* op = "te_quantize";
  const Axes all(x), m = all.First(split), n = all.From(split);
  TE_CHECK(split >= 0 && split <= all.rank(), "%s: split is %ld; pass 0 to %ld, the axes of x", op,
           long(split), long(all.rank()));
  const TileArrays arrays{scale, nullptr, kNone, data, data_t, amax, dbias};
  TE_TRY(Expect(op, {{"x", x, kFloats, all}}));
  TE_TRY(ExpectTiles(op, x, m, n, 1, arrays));
  if (!Present(x)) return {};
  return DispatchFloat(x.type, [&]<typename T>() -> Status {
    const QuantizeSource<T> source{Data<T>(x), n.count()};
    return LaunchTiles(op, stream, te_quantize_kernels<QuantizeSource<T>>, source, Aligned(source.x),
                       m.count(), n.count(), arrays);
  });
}

}  // namespace te
