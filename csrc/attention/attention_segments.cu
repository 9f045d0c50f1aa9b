#include <algorithm>

#include "attention/attention_segments.h"

namespace te {
namespace {

constexpr int kThreads = 256;

struct Segments {
  const int4* all;  // [rows, n]: first query, queries, first key, keys
  int64_t rows, n, s, t, left, right;
  bool bottom_right;
};

struct Span {
  int64_t first = 0, tokens = 0;
};

// What a row of `size` tokens has of a segment.
__device__ __forceinline__ Span Inside(int64_t first, int64_t tokens, int64_t size) {
  const bool used = first >= 0 && first < size && tokens > 0;
  return used ? Span{first, min(tokens, size - first)} : Span{};
}

// The queries of segment i that see a key, and the keys; none of both if there is no such query.
__device__ __forceinline__ void Spans(const Segments& a, int64_t i, Span* q, Span* k) {
  const int4 segment = a.all[i];
  *q = Inside(segment.x, segment.y, a.s), *k = Inside(segment.z, segment.w, a.t);
  if (a.bottom_right && a.right >= 0) {  // the first queries are before all keys
    const int64_t blind = min(max(q->tokens - k->tokens - a.right, int64_t{0}), q->tokens);
    q->first += blind, q->tokens -= blind;
  } else if (!a.bottom_right && a.left >= 0) {  // the last ones are too far behind
    q->tokens = min(q->tokens, k->tokens + a.left);
  }
  if (q->tokens == 0 || k->tokens == 0) q->tokens = k->tokens = 0;
}

struct Places {
  int64_t q_token, k_token, v_token, out_token, h;  // elements from one token to the next
  int32_t* lens;                                    // [2, rows * n]
  int64_t* at;                                      // q, k, v, out, lse [5, rows * n + 1]
};

__global__ void __launch_bounds__(kThreads) PutSegmentsKernel(const Segments a, const Places out) {
  const int64_t i = int64_t{blockIdx.x} * kThreads + threadIdx.x, count = a.rows * a.n;
  if (i > count) return;
  Span q, k;
  if (i < count) {
    Spans(a, i, &q, &k);
    out.lens[i] = int32_t(q.tokens), out.lens[count + i] = int32_t(k.tokens);
  }
  const int64_t row = i / a.n, q_token = row * a.s + q.first, k_token = row * a.t + k.first;
  int64_t* at = out.at + i;
  const int64_t step = count + 1;
  at[0] = q_token * out.q_token, at[step] = k_token * out.k_token, at[2 * step] = k_token * out.v_token;
  at[3 * step] = q_token * out.out_token, at[4 * step] = q_token * out.h;
}

struct Arrays {
  TokenRows rows[3];
};

// A warp for each token of blockIdx.y's array.
__global__ void __launch_bounds__(kThreads) FillOutsideKernel(const Segments a, const Arrays arrays) {
  const TokenRows& array = arrays.rows[blockIdx.y];
  const int64_t size = array.keys ? a.t : a.s,
                token = int64_t{blockIdx.x} * (kThreads / 32) + threadIdx.x / 32;
  if (token >= a.rows * size) return;
  const int64_t row = token / size, place = token - row * size;
  bool inside = false;
  for (int64_t i = threadIdx.x % 32; i < a.n; i += 32) {
    Span q, k;
    Spans(a, row * a.n + i, &q, &k);
    const Span span = array.keys ? k : q;
    inside |= place >= span.first && place < span.first + span.tokens;
  }
  if (__any_sync(~0u, inside)) return;
  auto* words = static_cast<uint32_t*>(array.data) + token * array.token;
  for (int64_t head = 0; head < array.count; ++head, words += array.stride)
    for (int64_t i = threadIdx.x % 32; i < array.words; i += 32) words[i] = array.fill;
}

Segments SegmentsOf(const AttentionKey& key, const int32_t* segments) {
  return {reinterpret_cast<const int4*>(segments),
          key.b,
          key.segments,
          key.s,
          key.t,
          key.left,
          key.right,
          key.bottom_right};
}

int64_t Align(int64_t bytes) { return (bytes + 255) / 256 * 256; }

}  // namespace

int64_t SegmentBytes(const AttentionKey& key) {
  const int64_t count = key.sequences();
  return key.segments ? Align(8 * 5 * (count + 1)) + Align(4 * 2 * count) : 0;
}

Status PutSegments(cudaStream_t stream, const AttentionKey& key, const int32_t* segments, void* scratch,
                   GraphPointers* pointers) {
  const int64_t count = key.sequences();
  auto* at = static_cast<int64_t*>(scratch);
  auto* lens = reinterpret_cast<int32_t*>(static_cast<char*>(scratch) + Align(8 * 5 * (count + 1)));
  const Places places{key.arrays_of_q() * key.h * key.d,
                      key.arrays_of_k() * key.g * key.d,
                      key.arrays_of_k() * key.g * key.e,
                      key.h * key.e,
                      key.h,
                      lens,
                      at};
  PutSegmentsKernel<<<unsigned(count / kThreads + 1), kThreads, 0, stream>>>(SegmentsOf(key, segments),
                                                                             places);
  (*pointers)[kQLens] = lens, (*pointers)[kKLens] = lens + count;
  for (int i = 0; i < 5; ++i) (*pointers)[kQAt + i] = at + i * (count + 1);
  TE_LAUNCHED();
}

Status FillOutside(cudaStream_t stream, const AttentionKey& key, const int32_t* segments,
                   std::initializer_list<TokenRows> arrays) {
  Arrays all{};
  std::copy(arrays.begin(), arrays.end(), all.rows);
  const bool keys =
      std::any_of(arrays.begin(), arrays.end(), [](const TokenRows& rows) { return rows.keys; });
  const int64_t tokens = key.b * (keys ? std::max(key.s, key.t) : key.s), warps = kThreads / 32;
  const dim3 grid(unsigned((tokens + warps - 1) / warps), unsigned(arrays.size()));
  FillOutsideKernel<<<grid, kThreads, 0, stream>>>(SegmentsOf(key, segments), all);
  TE_LAUNCHED();
}

}  // namespace te
