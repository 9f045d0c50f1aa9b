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
  const char* op = "te_quantize_block";
  const Axes all(x);
  TE_CHECK(lead >= 0 && lead + 2 <= all.rank(), "%s: lead is %ld, x is %s; pass 0 to the axes of x less 2",
           op, long(lead), Shape(x).c_str());
  const Axes rows = all.First(lead + 1), columns = all.From(lead + 1);
  TE_TRY(Expect(
      op, {{"x", &x, kFloats, all},
           {square ? "scale_inv" : "block_inv", &*(square ? scale_inv : block_inv), ffi::F32, {}, kAbsent},
           {square ? "scale_inv_t" : "block_inv_t",
            &*(square ? scale_inv_t : block_inv_t),
            ffi::F32,
            {},
            kAbsent}}));
  BlockArgs a;
  const BlockBuffers buffers =
      square ? BlockBuffers{data, data_t, block_inv, block_inv_t, &dbias, "block_inv", "block_inv_t"}
             : BlockBuffers{data, data_t, scale_inv, scale_inv_t, &dbias};
  TE_TRY(GetBlockArgs(op, rows, columns.Without(1), columns.last(), buffers, &a, square));
  a.power_2 = power_2, a.epsilon = float(epsilon);
  if (x.element_count() == 0) return ffi::Error::Success();
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
