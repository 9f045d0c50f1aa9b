// Quantize to FP8 with a scale for each block of 128 (block_tile.cuh). Bytes per element: 2 read (bf16) and 2
// written.

#include "block_tile.cuh"

namespace te {
namespace {

template <typename T>
struct BlockQuantizeSource {
  using Type = T;
  using Raw = Vec<T, 8>;
  static constexpr int kSlots = 1, kCtas = 2, kInFlight = kBlockRows;
  static constexpr bool kSquare = true;
  const T* x;        // [m, p, n, q]
  unsigned columns;  // n q

  template <bool kVectors>
  __device__ __forceinline__ Raw Load(unsigned row, unsigned column, int inside) const {
    return LoadRow<kVectors>(x + (uint64_t{row} * columns + column), inside);
  }

  __device__ __forceinline__ void Results(const Raw& raw, Vec<T, 8> (&x)[1]) const { x[0] = raw; }
};

ffi::Error LaunchQuantizeBlock(cudaStream_t stream, Arg x, Ret data, Ret data_t, Ret scale_inv,
                               Ret scale_inv_t, Ret block_inv, Ret block_inv_t, Ret dbias, int64_t lead,
                               bool square, bool power_2, double epsilon) {
  const auto dims = x.dimensions();
  const int64_t axes = dims.size();
  TE_CHECK(lead >= 0 && lead + 2 <= axes, "te_quantize_block: lead is %ld, x is %s", long(lead),
           Shape(x).c_str());
  int64_t m = 1, n = 1;
  for (int64_t i = 0; i < axes - 1; ++i)
    if (i != lead) (i < lead ? m : n) *= dims[i];
  BlockArgs a;
  TE_TRY(GetBlockArgs("te_quantize_block", m, dims[lead], n, dims[axes - 1], data, data_t,
                      square ? block_inv : scale_inv, square ? block_inv_t : scale_inv_t, &dbias, square,
                      &a));
  a.power_2 = power_2, a.epsilon = float(epsilon);
  if (x.element_count() == 0) return Zero(stream, {&*dbias});
  return DispatchFloat(x.element_type(), [&]<typename T>() -> ffi::Error {
    const BlockQuantizeSource<T> source{Data<T>(x), a.columns()};
    return LaunchBlocks(stream, source, a, Aligned(source.x), square);
  });
}

}  // namespace

TE_HANDLER(te_quantize_block, LaunchQuantizeBlock,
           Bind()
               .Ctx<Stream>()
               .Arg<Arg>()  // x: m... m n... n
               .Ret<Arg>()  // data?: m... m n... n
               .Ret<Arg>()  // data_t?: n... n m... m
               .Ret<Arg>()  // scale_inv?: f32 n... n/128 m... m
               .Ret<Arg>()  // scale_inv_t?: f32 m... m/128 n... n
               .Ret<Arg>()  // block_inv?: f32 m... m/128 n... n/128
               .Ret<Arg>()  // block_inv_t?: f32 n... n/128 m... m/128
               .Ret<Arg>()  // dbias?: partial [*m * m/128, n... n]
               .Attr<int64_t>("lead")
               .Attr<bool>("square")
               .Attr<bool>("power_2")
               .Attr<double>("epsilon"));

}  // namespace te
