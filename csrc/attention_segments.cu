#include <algorithm>
#include <cmath>

#include "attention_segments.h"

namespace te {
namespace {

constexpr int kThreads = 256;

struct Segments {
  const int4* segments;  // [rows, n]: first query, queries, first key, keys
  int64_t rows, n, s, t, h;
  int64_t q_token, k_token, v_token, out_token;  // elements from one token to the next
  int64_t left, right;
  bool bottom_right;
  int32_t* lens;  // out: [2, rows * n]
  int64_t* at;    // out: q, k, v, out, lse [5, rows * n + 1]
};

struct Span {
  int64_t first = 0, tokens = 0;
};

// What a row of `size` tokens has of a segment.
__device__ __forceinline__ Span Inside(int64_t first, int64_t tokens, int64_t size) {
  const bool used = first >= 0 && first < size && tokens > 0;
  return used ? Span{first, min(tokens, size - first)} : Span{};
}

__global__ void __launch_bounds__(kThreads) PutSegmentsKernel(const Segments a) {
  const int64_t i = int64_t{blockIdx.x} * kThreads + threadIdx.x, count = a.rows * a.n;
  if (i > count) return;
  Span q, k;
  if (i < count) {
    const int4 segment = a.segments[i];
    q = Inside(segment.x, segment.y, a.s), k = Inside(segment.z, segment.w, a.t);
    if (a.bottom_right && a.right >= 0) {  // the first queries are before all keys
      const int64_t blind = min(max(q.tokens - k.tokens - a.right, int64_t{0}), q.tokens);
      q.first += blind, q.tokens -= blind;
    } else if (!a.bottom_right && a.left >= 0) {  // the last ones are too far behind
      q.tokens = min(q.tokens, k.tokens + a.left);
    }
    if (q.tokens == 0 || k.tokens == 0) q.tokens = k.tokens = 0;
    a.lens[i] = int32_t(q.tokens), a.lens[count + i] = int32_t(k.tokens);
  }
  const int64_t row = i / a.n, q_token = row * a.s + q.first, k_token = row * a.t + k.first;
  int64_t* at = a.at + i;
  const int64_t step = count + 1;
  at[0] = q_token * a.q_token, at[step] = k_token * a.k_token, at[2 * step] = k_token * a.v_token;
  at[3 * step] = q_token * a.out_token, at[4 * step] = q_token * a.h;
}

__global__ void __launch_bounds__(kThreads) FillKernel(float* x, int64_t n) {
  for (int64_t i = int64_t{blockIdx.x} * kThreads + threadIdx.x; i < n; i += int64_t{gridDim.x} * kThreads)
    x[i] = -INFINITY;
}

int64_t Align(int64_t bytes) { return (bytes + 255) / 256 * 256; }

}  // namespace

int64_t SegmentBytes(const AttentionKey& key) {
  const int64_t count = key.sequences();
  return key.segments ? Align(8 * 5 * (count + 1)) + Align(4 * 2 * count) : 0;
}

ffi::Error PutSegments(cudaStream_t stream, const AttentionKey& key, const int32_t* segments, void* scratch,
                       GraphPointers* pointers) {
  const int64_t count = key.sequences(), parts = key.packed ? 3 : 1;
  auto* at = static_cast<int64_t*>(scratch);
  auto* lens = reinterpret_cast<int32_t*>(static_cast<char*>(scratch) + Align(8 * 5 * (count + 1)));
  const Segments a{reinterpret_cast<const int4*>(segments),
                   key.b,
                   key.segments,
                   key.s,
                   key.t,
                   key.h,
                   parts * key.h * key.d,
                   parts * key.g * key.d,
                   parts * key.g * key.e,
                   key.h * key.e,
                   key.left,
                   key.right,
                   key.bottom_right,
                   lens,
                   at};
  PutSegmentsKernel<<<unsigned(count / kThreads + 1), kThreads, 0, stream>>>(a);
  (*pointers)[kQLens] = lens, (*pointers)[kKLens] = lens + count;
  for (int i = 0; i < 5; ++i) (*pointers)[kQAt + i] = at + i * (count + 1);
  TE_LAUNCHED();
}

ffi::Error FillMinusInfinity(cudaStream_t stream, float* x, int64_t n) {
  FillKernel<<<unsigned(std::min<int64_t>((n + kThreads - 1) / kThreads, 1024)), kThreads, 0, stream>>>(x, n);
  TE_LAUNCHED();
}

}  // namespace te
