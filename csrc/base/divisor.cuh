// Division by a number that the host knows.
#pragma once

#include <cuda_runtime.h>

#include <bit>
#include <cstdint>

namespace te {

struct Split {
  unsigned quotient, rest;
};

// Divides numbers below 2^31 by d in 1 .. 2^31, in a multiplication and a shift: with 2^l >= d > 2^(l-1) and
// m = floor(2^(31+l) / d) + 1, n m / 2^(31+l) exceeds n / d by at most n 2^-(31+l) < 1 / d. A division takes
// some 20 instructions.
class Divisor {
 public:
  Divisor() = default;
  explicit Divisor(unsigned d)
      : d_(d), shift_(31 + std::bit_width(d - 1)), multiplier_((uint64_t{1} << shift_) / d + 1) {}

  __device__ __forceinline__ Split Of(unsigned n) const {
    const unsigned quotient = uint64_t{n} * multiplier_ >> shift_;
    return {quotient, n - quotient * d_};
  }
  __device__ __forceinline__ unsigned divisor() const { return d_; }

 private:
  unsigned d_, shift_, multiplier_;
};

}  // namespace te
