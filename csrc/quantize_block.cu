// Quantize to FP8 with a scale for each block of 128 (block_tile.cuh). Bytes per element: 2 read (bf16) and 2
// written.

#include "block_tile.cuh"
#include "ops.h"

namespace te {
namespace {

template <typename T>
struct BlockQuantizeSource {
  using Type = T;
  using Raw = Vec<T, 8>;
  static constexpr int kSlots = 1, kCtas = 2, kInFlight = kBlockRows;
  const T* x;        // [m, p, n, q]
  unsigned columns;  // n q

  template <bool kVectors>
  __device__ __forceinline__ Raw Load(unsigned row, unsigned column, int inside) const {
    return LoadRow<kVectors>(x + (uint64_t{row} * columns + column), inside);
  }

  __device__ __forceinline__ void Results(const Raw& raw, Vec<T, 8> (&x)[1]) const { x[0] = raw; }
};

TE_BLOCK_KERNELS(te_quantize_block);

}  // namespace

Status LaunchQuantizeBlock(cudaStream_t stream, Arg x, Ret data, Ret data_t, Ret scale_inv, Ret scale_inv_t,
                           Ret block_inv, Ret block_inv_t, Ret dbias, int64_t lead, bool square, bool power_2,
                           double epsilon) {
  const char* op = "te_quantize_block";
  const Axes all(x);
  TE_CHECK(lead >= 0 && lead + 2 <= all.rank(), "%s: lead is %ld, x is %s; pass 0 to the axes of x less 2",
           op, long(lead), x.shape().c_str());
  const Axes rows = all.First(lead + 1), columns = all.From(lead + 1);
  const BlockArrays of_rows{data, data_t, scale_inv, scale_inv_t, dbias};
  const BlockArrays of_squares{data, data_t, block_inv, block_inv_t, dbias, "block_inv", "block_inv_t"};
  const BlockArrays &arrays = square ? of_squares : of_rows, &others = square ? of_rows : of_squares;
  TE_TRY(Expect(op, {{"x", x, kFloats, all},
                     {others.inv_name, others.inv, F32, {}, kAbsent},
                     {others.inv_t_name, others.inv_t, F32, {}, kAbsent}}));
  BlockArgs a;
  TE_TRY(GetBlockArgs(op, rows, columns.Without(1), columns.last(), arrays, power_2, epsilon, &a, square));
  if (!Present(x)) return {};
  return DispatchFloat(x.type, [&]<typename T>() -> Status {
    using Source = BlockQuantizeSource<T>;
    const Source source{Data<T>(x), a.columns()};
    const auto& kernels =
        square ? te_quantize_block_kernels<Source, true> : te_quantize_block_kernels<Source>;
    return LaunchBlocks(stream, kernels, source, a, Aligned(source.x));
  });
}

}  // namespace te
