// How a call ends whose kernel leaves partial results: all are finished by one launch, which also inverts the
// scale.
#pragma once

#include "base/check.h"

namespace te {

enum class Reduce { kMax, kSum };

// result [n...] from parts [parts, n...], 0 of no parts: the sums of each column in a fixed order, of f32 in
// any float type, rounded once, or of i32; or the maxima, in f32, of their bits, for no part is negative: inf
// stands above all numbers and NaN above inf. Without a result nothing is done.
struct Ending {
  Reduce reduce;
  Tensor parts, result;
};
constexpr int kMostEndings = 2;

// scale_inv f32 []: 1 / scale, where it is there.
Status FinishParts(cudaStream_t stream, const std::vector<Ending>& endings, const Tensor& scale = kNone,
                   const Tensor& scale_inv = kNone);

// What a call has beside the tensor that it makes: for all of it, or the amax for each expert.
struct Totals {
  Tensor scale, amax, dbias, scale_inv, amax_parts, dbias_parts;
};

constexpr const char *kAmaxParts = "amax_parts", *kDbiasParts = "dbias_parts";

// An error unless amax, of axes e, and dbias, of axes n, have parts exactly where they are there, if results
// have any (has_parts); the parts' axes are looked at elsewhere.
Status ExpectTotals(const char* op, bool has_parts, const Totals& of, const Axes& n, const Axes& e = {});

Status Finish(cudaStream_t stream, const Totals& of);

}  // namespace te
