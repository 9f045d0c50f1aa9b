// Quantize to FP8 in both layouts: one reading of x writes data [m, n], data_t [n, m], the amax and the
// column sums. Bytes per element: 2 read (bf16) and 2 written; partial sums add 8 f32 for every 1024 elements
// of a column at most.

#include "fp8.cuh"
#include "reduce.cuh"

namespace te {
namespace {

constexpr int kTile =
    128;  // rows and columns of the tile of a CTA: both layouts are written in lines of 128 bytes
constexpr int kThreads = 256;  // 16 column groups x 16 row groups
constexpr int kBands = 2;      // a thread has 4 rows x 8 columns in each of two bands of 64 rows

// The transposed tile: kTile columns of kTile / 4 words of 4 rows. The xor spreads the 16 column groups that
// a warp writes at once over all banks; it moves words by pairs, so 16-byte reads stay in one piece up to a
// swap of halves.
__device__ __forceinline__ int Word(int column, int word) {
  return column * (kTile / 4) + (word ^ (column / 8 * 2));
}

template <typename T>
struct QuantizeArgs {
  const T* x;          // [m, n]
  const float* scale;  // []
  uint8_t* data;       // [m, n] or nullptr
  uint8_t* data_t;     // [n, m] or nullptr
  float* amax;         // [chunks, strips] = [ceil(m / kTile), ceil(n / kTile)]
  float* dbias;        // [chunks, n] or nullptr
  int64_t m, n;
  unsigned strips;
};

// 8 columns of one row; zeros outside of the tile. kVectors: the 8 are inside or outside together.
template <bool kVectors, typename T>
__device__ __forceinline__ Vec<T, 8> LoadRow(const T* p, int columns) {
  if constexpr (kVectors) {
    return LoadOnce<8>(p, columns > 0);
  } else {
    Vec<T, 8> out{};
#pragma unroll
    for (int i = 0; i < 8; ++i)
      if (i < columns) out.Set(i, p[i]);
    return out;
  }
}

// tile -> data where rows of n bytes are not aligned to 8: lanes write neighbouring bytes.
__device__ void StoreRowBytes(const uint32_t* tile, uint8_t* data, int64_t n, int rows, int columns) {
  for (int i = threadIdx.x; i < kTile * kTile; i += kThreads) {
    const int r = i / kTile, c = i % kTile;
    if (r < rows && c < columns) data[r * n + c] = tile[Word(c, r / 4)] >> r % 4 * 8;
  }
}

// tile -> data_t, 128 bytes of a column by 8 threads; byte by byte where columns of m bytes are not aligned
// to 16.
__device__ void StoreColumns(const uint32_t* tile, uint8_t* data_t, int64_t m, int rows, int columns) {
  if (m % 16 == 0) {
#pragma unroll
    for (int i = threadIdx.x; i < kTile * kTile / 16; i += kThreads) {
      const int c = i / (kTile / 16), r = i % (kTile / 16) * 16;
      if (r >= rows || c >= columns) continue;
      const uint4 q = *reinterpret_cast<const uint4*>(tile + (Word(c, r / 4) & ~3));
      *reinterpret_cast<uint4*>(data_t + c * m + r) = c / 8 % 2 ? make_uint4(q.z, q.w, q.x, q.y) : q;
    }
    return;
  }
  for (int i = threadIdx.x; i < kTile * kTile; i += kThreads) {
    const int c = i / kTile, r = i % kTile;
    if (r < rows && c < columns) data_t[c * m + r] = tile[Word(c, r / 4)] >> r % 4 * 8;
  }
}

// Column sums of the tile from those of every thread's 8 rows. scratch: [kThreads / 32, kTile].
__device__ void StoreColumnSums(float (&sums)[8], float* scratch, float* dbias, int columns) {
#pragma unroll
  for (int j = 0; j < 8; ++j) sums[j] += __shfl_xor_sync(~0u, sums[j], 16);  // the warp's other row group
  if (Lane() < 16) {
#pragma unroll
    for (int j = 0; j < 8; ++j) scratch[WarpIndex() * kTile + Lane() * 8 + j] = sums[j];
  }
  __syncthreads();
  const int c = threadIdx.x;
  if (c >= columns) return;
  float sum = 0.f;
#pragma unroll
  for (int w = 0; w < kThreads / 32; ++w) sum += scratch[w * kTile + c];
  dbias[c] = sum;
}

// kVectors: n % 8 == 0 and x, data aligned. All 16-byte loads of the tile (32 KiB of bf16) are issued before
// the first is used; the three CTAs of a multiprocessor hide each other's stores.
template <typename T, typename Q, bool kVectors>
__global__ void __launch_bounds__(kThreads, sizeof(T) == 2 ? 3 : 2) QuantizeTile(const QuantizeArgs<T> a) {
  alignas(16) __shared__ uint32_t tile[kTile * kTile / 4];
  __shared__ float sums_of_warps[kThreads / 32 * kTile];
  __shared__ unsigned amax_of_warps[kMostWarps];
  const int64_t chunk = blockIdx.x / a.strips, strip = blockIdx.x % a.strips;
  const int64_t row0 = chunk * kTile, column0 = strip * kTile, start = row0 * a.n + column0;
  const int rows = min(a.m - row0, int64_t{kTile}), columns = min(a.n - column0, int64_t{kTile});
  const int c = threadIdx.x % 16 * 8, r = threadIdx.x / 16 * 4;  // of the thread in the first band
  constexpr int kBandRows = kTile / kBands;

  Vec<T, 8> x[kBands][4];
#pragma unroll
  for (int band = 0; band < kBands; ++band)
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int row = band * kBandRows + r + i;
      x[band][i] = LoadRow<kVectors>(a.x + start + row * a.n + c, row < rows ? columns - c : 0);
    }

  const float scale = *a.scale;
  unsigned amax = 0;
  float sums[8] = {};
#pragma unroll
  for (int band = 0; band < kBands; ++band) {
    uint32_t q[2][4];  // columns 0..3 and 4..7: first a row in a word, after the transpose a column
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      float f[8];
#pragma unroll
      for (int j = 0; j < 8; ++j) {
        f[j] = x[band][i][j];
        amax = max(amax, AbsBits(f[j]));
        sums[j] += f[j];
        f[j] *= scale;
      }
      q[0][i] = Saturate4<Q>(f[0], f[1], f[2], f[3]);
      q[1][i] = Saturate4<Q>(f[4], f[5], f[6], f[7]);
      const int row = band * kBandRows + r + i;
      if (kVectors && a.data && row < rows && c < columns)
        *reinterpret_cast<uint2*>(a.data + start + row * a.n + c) = make_uint2(q[0][i], q[1][i]);
    }
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      Transpose4x4(q[half][0], q[half][1], q[half][2], q[half][3]);
#pragma unroll
      for (int j = 0; j < 4; ++j) tile[Word(c + half * 4 + j, (band * kBandRows + r) / 4)] = q[half][j];
    }
  }
  amax = CtaMax(amax, amax_of_warps);  // its barrier completes the tile
  if (threadIdx.x == 0) a.amax[blockIdx.x] = __uint_as_float(amax);
  if (!kVectors && a.data) StoreRowBytes(tile, a.data + start, a.n, rows, columns);
  if (a.data_t) StoreColumns(tile, a.data_t + column0 * a.m + row0, a.m, rows, columns);
  if (a.dbias) StoreColumnSums(sums, sums_of_warps, a.dbias + chunk * a.n + column0, columns);
}

ffi::Error LaunchQuantize(cudaStream_t stream, Arg x, Arg scale, Ret data, Ret data_t, Ret amax, Ret dbias,
                          int64_t split) {
  const auto dims = x.dimensions();
  TE_CHECK(split >= 0 && split <= int64_t(dims.size()), "te_quantize: split is %ld, x is %s", long(split),
           Shape(x).c_str());
  int64_t m = 1, n = 1;
  for (int64_t i = 0; i < int64_t(dims.size()); ++i) (i < split ? m : n) *= dims[i];
  const int64_t chunks = (m + kTile - 1) / kTile, strips = (n + kTile - 1) / kTile;
  if (x.element_count() == 0) {  // the partial results are there nevertheless
    if (Present(amax)) TE_CUDA(cudaMemsetAsync(amax->untyped_data(), 0, amax->size_bytes(), stream));
    if (Present(dbias)) TE_CUDA(cudaMemsetAsync(dbias->untyped_data(), 0, dbias->size_bytes(), stream));
    return ffi::Error::Success();
  }
  TE_CHECK(scale.element_type() == ffi::F32 && scale.element_count() == 1,
           "te_quantize: scale must be f32 []");
  TE_CHECK(!Present(data) || !Present(data_t) || data->element_type() == data_t->element_type(),
           "te_quantize: data and data_t differ in type");
  TE_CHECK(!Present(data) || int64_t(data->element_count()) == m * n, "te_quantize: data is %s, x is %s",
           Shape(*data).c_str(), Shape(x).c_str());
  TE_CHECK(!Present(data_t) || int64_t(data_t->element_count()) == m * n,
           "te_quantize: data_t is %s, x is %s", Shape(*data_t).c_str(), Shape(x).c_str());
  TE_CHECK(int64_t(amax->element_count()) == chunks * strips,
           "te_quantize: partial amax is %s, expected [%ld, %ld]", Shape(*amax).c_str(), long(chunks),
           long(strips));
  TE_CHECK(!Present(dbias) || int64_t(dbias->element_count()) == chunks * n,
           "te_quantize: partial dbias is %s, expected [%ld, %ld]", Shape(*dbias).c_str(), long(chunks),
           long(n));

  const auto type = Present(data)     ? data->element_type()
                    : Present(data_t) ? data_t->element_type()
                                      : ffi::F8E4M3FN;
  return DispatchFloat(x.element_type(), [&]<typename T>() -> ffi::Error {
    return DispatchFp8(type, [&]<typename Q>() -> ffi::Error {
      const QuantizeArgs<T> args{Data<T>(x),
                                 Data<float>(scale),
                                 Data<uint8_t>(data),
                                 Data<uint8_t>(data_t),
                                 Data<float>(amax),
                                 Data<float>(dbias),
                                 m,
                                 n,
                                 unsigned(strips)};
      const bool vectors = n % 8 == 0 && Aligned(args.x) && Aligned(args.data);
      const auto kernel = vectors ? QuantizeTile<T, Q, true> : QuantizeTile<T, Q, false>;
      TE_CHECK(Aligned(args.data_t), "te_quantize: data_t is not aligned to 16 bytes");
      kernel<<<chunks * strips, kThreads, 0, stream>>>(args);
      TE_LAUNCHED();
    });
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
               .Ret<Arg>()  // amax: partial [ceil(m / 128), ceil(n / 128)]
               .Ret<Arg>()  // dbias?: partial [ceil(m / 128), n...]
               .Attr<int64_t>("split"));

}  // namespace te
