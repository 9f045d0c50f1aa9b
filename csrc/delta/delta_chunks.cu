// What the gated delta rule needs of each chunk of tokens and knows before the state: how much queries and
// keys see of each other, and the inverse that makes what tokens write of what each would write without the
// others.

#include "base/check.h"
#include "base/launch.h"
#include "delta/inverse.cuh"

namespace te::delta {
namespace {

// The gates and betas of a chunk's tokens, of one head.
struct Decays {
  alignas(16) float sums[kChunk];  // of the logarithms to base 2 of what is left, up to a token
  float beta[kChunk];              // 0 behind the last token
};

template <int kD, bool kRuns>
struct ChunkShared {
  union {
    ssm::Tile<kChunk, kD> q;
    ssm::Tile<kChunk, kChunk> seen;  // when queries are multiplied
  };
  union {
    ssm::Tile<kChunk, kD> k;
    alignas(16) float system[kChunk * kPitch];  // below its diagonal, then the inverse
  };
  float of_keys[kChunk], of_queries[kChunk];  // 1 over their lengths, or 1
  Decays decays[kWarps];
  ssm::Runs<kRuns> runs;
};

template <int kD, bool kRuns>
struct Chunks {
  const ChunkArgs& a;
  ChunkShared<kD, kRuns>& s;
  const int64_t row;
  const int first, group;  // token

  __device__ __forceinline__ static int Band() { return ssm::kBand * WarpIndex(); }
  __device__ __forceinline__ int Heads() const { return a.h / a.g; }
  __device__ __forceinline__ int Rows() const { return a.s - first; }

  __device__ __forceinline__ void Fetch() {
    const int64_t at = ((row * a.s + first) * a.g + group) * a.d, stride = int64_t(a.g) * a.d;
    s.q.template Fetch<kThreads>(a.q + at, stride, Rows(), a.d);
    s.k.template Fetch<kThreads>(a.k + at, stride, Rows(), a.d);
    CommitPrefetch();
    s.runs.Set(a, row, first, threadIdx.x, kThreads);
  }

  // The products of keys, and of queries and keys, [16, 64]: of a band with itself and those before it; and
  // the lengths of the band's tokens, which follow from their products with themselves.
  __device__ __forceinline__ void Multiply(float (&keys)[kChunk / 8][4], float (&queries)[kChunk / 8][4]) {
    float own[2][4] = {}, own_keys[2][4] = {};
#pragma unroll 2
    for (int d = 0; d < kD; d += 16) {
      uint32_t of_key[4], of_query[4], b[4];
      s.k.A(of_key, Band(), d), s.q.A(of_query, Band(), d);
#pragma unroll
      for (int i = 0; i < kChunk / 16; ++i) {
        if (16 * i > Band()) continue;
        s.k.TransposedB(b, 16 * i, d);
        Multiply2(keys + 2 * i, of_key, b), Multiply2(queries + 2 * i, of_query, b);
      }
      // Eight tokens of the band, transposed, are two words of it as a left factor.
#pragma unroll
      for (int j = 0; j < 2; ++j) MultiplyAdd<false>(own[j], of_query, of_query[j], of_query[j + 2]);
    }
#pragma unroll
    for (int i = 0; i < kChunk / 8; ++i)
#pragma unroll
      for (int j = 0; j < 4; ++j)
        if (16 * (i / 2) == Band()) own_keys[i % 2][j] = keys[i][j];
    PutLengths(s.of_keys, own_keys), PutLengths(s.of_queries, own);
  }
  __device__ __forceinline__ static void Multiply2(float (*d)[4], const uint32_t (&a)[4],
                                                   const uint32_t (&b)[4]) {
    MultiplyAdd<false>(d[0], a, b[0], b[1]);
    MultiplyAdd<false>(d[1], a, b[2], b[3]);
  }
  // 1 over the lengths of the band's tokens, of whose products with each other eight columns each are given.
  __device__ __forceinline__ void PutLengths(float (&lengths)[kChunk], const float (&products)[2][4]) const {
    const int row = ssm::RowOf(0), column = ssm::ColumnOf(0);
    if (row / 2 * 2 != column) return;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float square = row > column ? products[half][2 * half + 1] : products[half][2 * half];
      lengths[Band() + row + 8 * half] = a.normalize ? InverseLength(square) : 1.f;
    }
  }

  // Of a head; the warp's lanes have two tokens each.
  __device__ __forceinline__ void Sum(int head, Decays& out) {
    float logs[2], betas[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int token = 2 * Lane() + i;
      const bool inside = token < Rows();
      const int64_t at = (row * a.s + first + token) * a.h + head;
      const float gate = inside ? a.gate[at] : 0.f, log = gate * kLog2E;
      // A NaN goes to beta, for in the sums it would be of later runs, too.
      const bool is_number = gate < INFINITY;
      logs[i] = is_number && log > kLeast ? log : kLeast;
      betas[i] = !inside ? 0.f : is_number ? a.beta[at] : NAN;
    }
    float sum = logs[0] + logs[1];
#pragma unroll
    for (int by = 1; by < 32; by *= 2) {
      const float other = __shfl_sync(~0u, sum, max(Lane() - by, 0));
      if (Lane() >= by) sum += other;
    }
    const float before = __shfl_sync(~0u, sum, max(Lane() - 1, 0));
    const float first_sum = (Lane() > 0 ? before : 0.f) + logs[0];
    *reinterpret_cast<float2*>(out.sums + 2 * Lane()) = make_float2(first_sum, sum);
    *reinterpret_cast<float2*>(out.beta + 2 * Lane()) = make_float2(betas[0], betas[1]);
  }

  // The system, which counts below its diagonal, and how much is seen, of the warp's band.
  __device__ __forceinline__ void Put(const Decays& of, const float (&keys)[kChunk / 8][4],
                                      const float (&queries)[kChunk / 8][4]) {
    const int row = ssm::RowOf(0), column = ssm::ColumnOf(0);
    const uint32_t triangle = (column <= row ? 0xffffu : 0u) | (column < row ? 0xffff0000u : 0u);
    float sums[2], of_keys[2], of_queries[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int to = Band() + row + 8 * half;
      sums[half] = of.sums[to], of_keys[half] = of.beta[to] * s.of_keys[to];
      of_queries[half] = a.scale * s.of_queries[to];
    }
#pragma unroll
    for (int i = 0; i < kChunk / 8; ++i) {
      const int from = 8 * i + column;
      if (16 * (i / 2) > Band()) break;
      const bool is_diagonal = 16 * (i / 2) == Band();
      const float2 sums_from = LoadTwo(of.sums + from), lengths = LoadTwo(s.of_keys + from);
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int to = Band() + row + 8 * half;
        const float weights[2] = {Exp2(sums[half] - sums_from.x) * lengths.x,
                                  Exp2(sums[half] - sums_from.y) * lengths.y};
        float below[2], seen[2];
#pragma unroll
        for (int j = 0; j < 2; ++j) {
          const bool is_one = s.runs.AreOne(from + j, to);
          below[j] = is_one ? keys[i][2 * half + j] * weights[j] * of_keys[half] : 0.f;
          seen[j] = is_one ? queries[i][2 * half + j] * weights[j] * of_queries[half] : 0.f;
        }
        uint32_t word = ssm::Pack(seen[0], seen[1]);
        if (is_diagonal) word &= i % 2 < half ? ~0u : i % 2 > half ? 0u : triangle;
        *reinterpret_cast<float2*>(s.system + to * kPitch + from) = make_float2(below[0], below[1]);
        *reinterpret_cast<uint32_t*>(s.seen.At(to, from)) = word;
      }
    }
  }

  __device__ __forceinline__ void Write(const Decays& of, Chunk& out) {
    for (int i = threadIdx.x; i < kChunk * kChunk / 8; i += kThreads) {
      const int to = i / (kChunk / 8), from = i % (kChunk / 8) * 8;
      const uint4 inverse = LoadInverse(s.system, s.runs, to, from);
      const uint4 seen = from <= to ? *reinterpret_cast<const uint4*>(s.seen.At(to, from)) : uint4{};
      *reinterpret_cast<uint4*>(out.inverse.At(to, from)) = inverse;
      *reinterpret_cast<uint4*>(out.seen.At(to, from)) = seen;
    }
    if (threadIdx.x >= kChunk) return;
    const int token = threadIdx.x;
    const bool goes_on = s.runs.Continues(token);
    const float since = goes_on ? Exp2(of.sums[token]) : 0.f, last = of.sums[kLast];
    Weights& weights = out.weights;
    weights.keys[token] = goes_on ? since * s.of_keys[token] : 0.f;
    weights.says[token] = goes_on && since > 0 ? weights.keys[token] * of.beta[token] : 0.f;
    weights.queries[token] = goes_on ? since * s.of_queries[token] * a.scale : 0.f;
    const bool is_of_last = s.runs.AreOne(token, kLast);
    weights.left[token] = is_of_last ? Exp2(last - of.sums[token]) * s.of_keys[token] : 0.f;
    if (is_of_last && (token == 0 || !s.runs.AreOne(token - 1, kLast))) weights.last = token;
    weights.betas[token] = of.beta[token];
    out.pairs.sums[token] = of.sums[token];
    out.pairs.of_keys[token] = s.of_keys[token], out.pairs.of_queries[token] = s.of_queries[token];
    if (token == kLast) weights.keeps = since, weights.several = !s.runs.AreOne(0, kLast);
    if (!goes_on && (token == 0 || s.runs.Continues(token - 1))) weights.continues = token;
    if (goes_on && token == kLast) weights.continues = kChunk;
  }

  __device__ __forceinline__ void Run(Chunk* chunks) {
    Fetch();
    float keys[kChunk / 8][4] = {}, queries[kChunk / 8][4] = {};
    for (int i = 0; i < Heads(); ++i) {
      const int head = group * Heads() + i;
      if (i % kWarps == 0) {  // all have met behind the last ones
        if (i + WarpIndex() < Heads()) Sum(head + WarpIndex(), s.decays[WarpIndex()]);
        if (i == 0) WaitForPrefetch<0>();
        __syncthreads();
      }
      if (i == 0) {
        Multiply(keys, queries);
        __syncthreads();  // none reads q or k any more
      }
      const Decays& decays = s.decays[i % kWarps];
      Put(decays, keys, queries);
      __syncwarp();
      InvertBlock<kRuns>(s.system);
      __syncthreads();
      Merge<16>(s.system);
      Merge<32>(s.system);
      if (i == 0) AwaitPrevious();  // which may read the chunks before
      Write(decays, chunks[head]);
      __syncthreads();
    }
  }
};

struct ChunksArgs {
  ChunkArgs a;
  ChunkPart part;
  Chunk* chunks;
};

template <int kD, bool kRuns>
__global__ void __launch_bounds__(kThreads, 4) te_gated_delta_chunks(const ChunksArgs of) {
  LetNextStart();
  extern __shared__ uint4 memory[];
  auto& shared = *reinterpret_cast<ChunkShared<kD, kRuns>*>(memory);
  const int64_t row = of.part.first_row + blockIdx.z;
  const int chunk = of.part.first_chunk + blockIdx.x;
  Chunks<kD, kRuns> all{of.a, shared, row, chunk * kChunk, int(blockIdx.y)};
  all.Run(of.chunks + of.part.At(row, chunk, 0, of.a.h));
}

template <int kD, bool kRuns>
Status Run(cudaStream_t stream, const ChunksArgs& of, bool early) {
  const auto kernel = te_gated_delta_chunks<kD, kRuns>;
  constexpr size_t kBytes = sizeof(ChunkShared<kD, kRuns>);
  TE_TRY(ssm::AllowShared(kernel, kBytes));
  const dim3 grid(unsigned(of.part.There(of.a.s)), unsigned(of.a.g), unsigned(of.part.rows));
  return LaunchBehind(stream, early, kernel, grid, kThreads, kBytes, of);
}

}  // namespace

Status LaunchChunks(cudaStream_t stream, const ChunkArgs& a, const ChunkPart& part, Chunk* chunks,
                    bool early) {
  return DispatchKeys(a.d, a.runs,
                      [&]<int kD, bool kRuns>() { return Run<kD, kRuns>(stream, {a, part, chunks}, early); });
}

}  // namespace te::delta
