// Quantize to FP8 with a scale for each block of 128 (block_tile.cuh). Bytes per element: 2 read (bf16) and 2
// written.

#include "base/ops.h"
#include "quantize/block_tile.cuh"

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

// The weights of experts lie one after the other, each with as many bands. A strip belongs to one of two
// arrays side by side.
template <typename T>
struct StackedBlockSource : BlockQuantizeSource<T> {
  const T* y;  // as x, or nullptr
  Divisor by_bands;
};

// The arguments of an expert, from the first expert's. Blocks are 128 x 128.
__device__ __forceinline__ BlockArgs OfExpert(BlockArgs a, unsigned expert) {
  const uint64_t elements = uint64_t{expert} * a.rows() * a.columns(),
                 blocks = uint64_t{expert} * (a.m * a.ps) * (a.n * a.qs);
  if (a.data) a.data += elements;
  if (a.data_t) a.data_t += elements;
  if (a.inv) a.inv += blocks;
  if (a.inv_t) a.inv_t += blocks;
  return a;
}

template <typename Source, bool kVectors>
__global__ void __launch_bounds__(kBlockThreads, Source::kCtas)
    te_quantize_stacked_block(const Source source, const BlockArgs all, const Divisor by_strips) {
  __shared__ BlockShared shared;
  const Split at = by_strips.Of(blockIdx.x), band = source.by_bands.Of(at.quotient);
  const uint64_t first = uint64_t{band.quotient} * all.rows() * source.columns;
  Source one = source;
  // Columns count on from x to y.
  const bool in_y = source.y && at.rest >= all.n / 2 * all.qs;
  one.x = in_y ? source.y + first - source.columns : source.x + first;
  WriteBlockTile<kVectors, true>(one, OfExpert(all, band.quotient), band.rest, at.rest, shared);
}
struct te_quantize_stacked_block_kernels {
  template <typename Source, bool>
  static constexpr BlockKernel<Source> of[2] = {te_quantize_stacked_block<Source, false>,
                                                te_quantize_stacked_block<Source, true>};
};

}  // namespace

Status LaunchQuantizeBlock(cudaStream_t stream, Arg x, Ret data, Ret data_t, Ret scale_inv, Ret scale_inv_t,
                           Ret block_inv, Ret block_inv_t, Ret dbias, Ret dbias_partials, int64_t lead,
                           bool square, bool power_2, double epsilon) {
  const char* op = "te_quantize_block";
  const Axes all(x);
  TE_CHECK(lead >= 0 && lead + 2 <= all.rank(), "%s: lead is %ld, x is %s; pass 0 to the axes of x less 2",
           op, long(lead), x.shape().c_str());
  const Axes rows = all.First(lead + 1), columns = all.From(lead + 1);
  const Totals totals{.dbias = dbias, .dbias_partials = dbias_partials};
  const BlockArrays of_rows{data, data_t, scale_inv, scale_inv_t, totals};
  const BlockArrays of_squares{data, data_t, block_inv, block_inv_t, totals, "block_inv", "block_inv_t"};
  const BlockArrays &arrays = square ? of_squares : of_rows, &others = square ? of_rows : of_squares;
  TE_TRY(Expect(op, {{"x", x, kFloats, all},
                     {others.inv_name, others.inv, F32, {}, kAbsent},
                     {others.inv_t_name, others.inv_t, F32, {}, kAbsent}}));
  BlockArgs a;
  TE_TRY(GetBlockArgs(op, rows, columns.Without(1), columns.last(), arrays, power_2, epsilon, &a, square));
  if (!Present(x)) return Finish(stream, totals);
  TE_TRY(DispatchFloat(x.type, [&]<typename T>() -> Status {
    const BlockQuantizeSource<T> source{Data<T>(x), a.columns()};
    const bool aligned = Aligned(source.x);
    return square ? LaunchBlocks<te_quantize_block_kernels, true>(stream, source, a, aligned)
                  : LaunchBlocks<te_quantize_block_kernels>(stream, source, a, aligned);
  }));
  return Finish(stream, totals);
}

Status LaunchQuantizeStackedBlock(cudaStream_t stream, Arg x, Arg y, Ret data, Ret data_t, Ret block_inv,
                                  Ret block_inv_t, int64_t stack, int64_t slots, int64_t lead, bool power_2,
                                  double epsilon) {
  const char* op = "te_quantize_stacked_block";
  const Axes all(x), e = all.First(stack), one = all.From(stack);
  TE_CHECK(stack >= 0 && lead >= 0 && stack <= all.rank() && lead <= all.rank() - stack - 2,
           "%s: stack is %ld, lead %ld, x is %s; pass numbers of axes, of which x has 2 more.", op,
           long(stack), long(lead), x.shape().c_str());
  TE_CHECK(slots == 0 || slots == 1, "%s: slots is %ld; pass 1 with y, else 0", op, long(slots));
  const Axes rows = one.First(lead + 1), columns = one.From(lead + 1);
  const Axes outer = (slots ? Axes{2} : Axes{}) + columns.Without(1);
  TE_TRY(Expect(op, {{"x", x, kFloats, all}, {"y", y, x.type, all, slots ? kRequired : kAbsent}}));
  const BlockArrays arrays{data, data_t, block_inv, block_inv_t, {}, "block_inv", "block_inv_t"};
  BlockArgs a;
  TE_TRY(GetBlockArgs(op, rows, outer, columns.last(), arrays, power_2, epsilon, &a, true, e));
  if (!Present(x)) return {};
  return DispatchFloat(x.type, [&]<typename T>() -> Status {
    const StackedBlockSource<T> source{
        {Data<T>(x), unsigned(columns.count())}, Data<T>(y), Divisor(a.m * a.ps)};
    return LaunchBlocks<te_quantize_stacked_block_kernels>(
        stream, source, a, Aligned(source.x) && Aligned(source.y), unsigned(e.count()));
  });
}

}  // namespace te
