// The activations and their derivatives as sources of tiles with scales of blocks.
#pragma once

#include "activation/activation.cuh"
#include "quantize/block_tile.cuh"

namespace te {

// The values of a source of activation.cuh, rounded to its type.
template <typename Source>
struct Rounded : Source {
  using T = typename Source::Type;
  // The gradients of both slots stay in registers. There is room for one row on its way, and with f32 for
  // half as many threads.
  static constexpr int kInFlight = Source::kSlots > 1                  ? 1
                                   : sizeof(typename Source::Raw) > 32 ? 2
                                                                       : kBlockRows;
  static constexpr int kCtas = Source::kSlots * sizeof(T) > 4 ? 1 : 2;

  __device__ __forceinline__ void Results(const typename Source::Raw& raw,
                                          Vec<T, 8> (&x)[Source::kSlots]) const {
    float f[Source::kSlots][8];
    Source::Values(raw, f);
#pragma unroll
    for (int s = 0; s < Source::kSlots; ++s) x[s] = Round<T>(f[s]);
  }
};

}  // namespace te
