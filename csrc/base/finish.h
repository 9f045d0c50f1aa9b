// How a call ends whose kernel leaves partials: one launch makes all results of them, and inverts the scale.
#pragma once

#include "base/check.h"

namespace te {

// How a result follows from its partials. Maxima are taken of the bits of f32, for no partial is negative:
// inf stands above all numbers and NaN above inf. Sums are of i32, or of f32 in a fixed order, rounded once
// to the result's type. Only the last depends on the order.
enum class Reduce { kMaxOfBits, kSumOfInts, kSumOfFloats };

// result [n...] of partials [count, n...], 0 where count is 0. Without a result nothing is done.
struct Ending {
  Reduce reduce = Reduce::kMaxOfBits;
  Tensor partials = kNone, result = kNone;
};

// scale_inv f32 []: 1 / scale, where it is there.
Status FinishPartials(cudaStream_t stream, const Ending& first, const Ending& second = {},
                      const Tensor& scale = kNone, const Tensor& scale_inv = kNone);

// What a call has next to the tensor that it makes, for all of it or, of the amax, for each expert; and the
// partials that its kernel leaves. kNone where the op has none.
struct Totals {
  Tensor scale = kNone, amax = kNone, dbias = kNone, scale_inv = kNone;
  Tensor amax_partials = kNone, dbias_partials = kNone;
};

// An error unless amax has axes e, dbias axes n and their partials the given axes, where they are there. A
// result and its partials are there together, unless there is nothing to leave partials of.
Status ExpectTotals(const char* op, const Totals& of, const Axes& e, const Axes& amax_partials,
                    const Axes& n = {}, const Axes& dbias_partials = {});

Status Finish(cudaStream_t stream, const Totals& of);

}  // namespace te
