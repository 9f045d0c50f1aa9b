// What both passes of the gated delta rule take.
#pragma once

#include "base/check.h"
#include "base/device.h"
#include "delta/channel.cuh"

namespace te::delta {

struct DeltaOperands {
  const char* op;
  Tensor q, k, v, beta, gate, runs;
  double scale;
  bool normalize;
  int64_t shared;  // heads of values of a key, or 1 where one key is for all, wherever these are
};

// Sizes and shapes.
struct DeltaCall {
  Axes values, keys, heads, state, kept;  // of v, of k, of beta, of a state, of the states that are kept
  int64_t rows, e;
  ChunkArgs chunks;
  int64_t chunk_bytes;  // of a chunk of a head
  Axes gates;           // of gate
  bool by_channel;      // whether each channel of keys has one
  bool on_hopper;       // whether its kernels take the call
};

inline Status ExpectDelta(const DeltaOperands& of, DeltaCall* call) {
  TE_TRY(ExpectRank(of.op, "k", of.k, 4, true));
  TE_TRY(ExpectRank(of.op, "v", of.v, 4, true));
  const Axes values(of.v), of_keys(of.k);
  const int64_t rows = values[0], s = values[1], h = values[2], e = values[3], g = of_keys[2], d = of_keys[3];
  const Axes keys = values.First(2) + Axes{g, d}, heads = values.First(3), state{rows, h, d, e};
  const bool by_channel = of.gate.rank == 4 && of.gate.sizes[3] != 1;
  const Axes gates = heads + Axes{by_channel ? d : 1};
  TE_TRY(Expect(of.op, {{"q", of.q, BF16, keys},
                        {"k", of.k, BF16, keys},
                        {"v", of.v, BF16, values},
                        {"beta", of.beta, F32, heads},
                        {"gate", of.gate, F32, gates},
                        {"segments", of.runs, S32, values.First(2), kOptional}}));
  constexpr int64_t kMostValues = 512;
  const int64_t most = by_channel ? kMostKeys : kManyKeys;
  const std::string k = of.k.shape(), v = of.v.shape();
  TE_CHECK(g >= 1 && h % g == 0 && (of.shared == h / g || (g == 1 && of.shared == 1)),
           "%s: k is %s, v %s, shared %ld", of.op, k.c_str(), v.c_str(), long(of.shared));
  TE_CHECK(d % 8 == 0 && e % 8 == 0 && d >= 8 && d <= most && e <= kMostValues,
           "%s: k is %s, v %s; pass multiples of 8, up to %ld channels of k and %ld of v", of.op, k.c_str(),
           v.c_str(), long(most), long(kMostValues));
  TE_CHECK(s <= INT32_MAX - kKept && h * d * e <= INT32_MAX && rows <= 65535 && g <= 65535,
           "%s: v is %s, too large for one call", of.op, v.c_str());
  const Axes kept{rows, CeilDiv(s, kKept), h, d, e};
  const int64_t of_chunk = by_channel ? ChannelBytes(d) : int64_t(sizeof(Chunk));
  *call = {values, keys, heads, state, kept, rows, e, {}, of_chunk, gates, by_channel, false};
  call->chunks = {Data<const Bf16>(of.q),
                  Data<const Bf16>(of.k),
                  Data<const float>(of.beta),
                  Data<const float>(of.gate),
                  Data<const int>(of.runs),
                  int(s),
                  int(h),
                  int(g),
                  int(d),
                  float(of.scale),
                  of.normalize};
  return {};
}

// Which kernels take the call.
inline Status ChooseKernels(const char* op, DeltaCall* call) {
#ifdef TE_HAS_90A
  TE_TRY(IsHopper(&call->on_hopper));
  call->on_hopper = call->on_hopper && call->chunks.s > 0;  // no tensor map is empty
#endif
  TE_CHECK(call->on_hopper || call->chunks.d <= kMostKeys,
           "%s: k has %d channels; more than %d need compute capability 9.0 and at least one token", op,
           call->chunks.d, kMostKeys);
  return {};
}

// What chunks of the part need that does not depend on the state. early: as LaunchChunks has it.
inline Status MakeChunks(cudaStream_t stream, const DeltaCall& call, const ChunkPart& part, void* chunks,
                         bool early = false) {
  if (call.chunks.s == 0) return {};
  if (call.by_channel) return LaunchChannelChunks(stream, call.chunks, part, chunks);
  return LaunchChunks(stream, call.chunks, part, static_cast<Chunk*>(chunks), early);
}

}  // namespace te::delta
