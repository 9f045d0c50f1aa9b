// Quantize to FP8 in both layouts: one reading of x writes data [m, n], data_t [n, m], the amax and the
// column sums. Bytes per element: 2 read (bf16) and 2 written.

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

ffi::Error LaunchQuantize(cudaStream_t stream, Arg x, Arg scale, Ret data, Ret data_t, Ret amax, Ret dbias,
                          int64_t split) {
  const char* op = "te_quantize";
  const Axes all(x), m = all.First(split), n = all.From(split);
  TE_CHECK(split >= 0 && split <= all.rank(), "%s: split is %ld; pass 0 to %ld, the axes of x", op,
           long(split), long(all.rank()));
  const TileBuffers buffers{scale, nullptr, nullptr, data, data_t, amax, &dbias};
  TE_TRY(Expect(op, {{"x", &x, kFloats, all}}));
  TE_TRY(ExpectTiles(op, x, m, n, 1, buffers));
  if (x.element_count() == 0) return ffi::Error::Success();
  return DispatchFloat(x.element_type(), [&]<typename T>() -> ffi::Error {
    const QuantizeSource<T> source{Data<T>(x), n.count()};
    const auto results = TileResultsOf<T>(m.count(), n.count(), buffers);
    return LaunchTiles(op, stream, source, results, Aligned(source.x));
  });
}

}  // namespace

TE_HANDLER(te_quantize, LaunchQuantize,
           Bind()
               .Ctx<Stream>()
               .Arg<Arg>()  // x: m... n...
               .Arg<Arg>()  // scale: f32 []
               .Ret<Arg>()  // data?: m... n...
               .Ret<Arg>()  // data_t?: n... m...
               .Ret<Arg>()  // amax?: partial [ceil(m / 256), ceil(n / 64)]
               .Ret<Arg>()  // dbias?: partial [ceil(m / 256), n...]
               .Attr<int64_t>("split"));

}  // namespace te
