// What the arrays of a call must be: a launcher declares it for each of them in one Expect, before it looks
// at any memory. XLA checks nothing of an FFI call, and a kernel that trusts it writes beyond what it was
// given.
#pragma once

#include "base/tensor.h"

namespace te {

// The sizes of an array's axes: single ones, and runs of another array's axes.
class Axes {
 public:
  Axes() = default;  // of a scalar
  Axes(std::initializer_list<int64_t> sizes) {
    for (int64_t size : sizes) Append(size);
  }
  explicit Axes(const Tensor& a) {
    for (int64_t i = 0; i < a.rank; ++i) Append(a.sizes[i]);
  }

  int64_t rank() const { return rank_; }
  int64_t operator[](int64_t i) const { return i < rank_ ? sizes_[i] : 0; }
  int64_t last() const { return rank_ > 0 ? sizes_[rank_ - 1] : 0; }
  int64_t count() const { return tensor().count(); }  // the product of the sizes
  std::string text() const { return tensor().shape(); }

  // The axes before axis i, those from it on, and all but the last n.
  Axes First(int64_t i) const { return Range(0, i); }
  Axes From(int64_t i) const { return Range(i, rank_); }
  Axes Without(int64_t n) const { return Range(0, rank_ - n); }

  friend Axes operator+(Axes left, const Axes& right) {
    for (int64_t i = 0; i < right.rank_; ++i) left.Append(right.sizes_[i]);
    return left;
  }

  bool AreThoseOf(const Tensor& a) const {
    return a.rank == rank_ && std::equal(sizes_, sizes_ + rank_, a.sizes);
  }

 private:
  static constexpr int64_t kMost = 32;  // no kernel takes an array of more axes

  Tensor tensor() const { return {nullptr, F32, sizes_, rank_}; }
  void Append(int64_t size) {
    if (rank_ < kMost) sizes_[rank_++] = size;
  }
  Axes Range(int64_t first, int64_t end) const {
    Axes out;
    for (int64_t i = std::max<int64_t>(first, 0); i < end && i < rank_; ++i) out.Append(sizes_[i]);
    return out;
  }

  int64_t rank_ = 0, sizes_[kMost];
};

inline int64_t CeilDiv(int64_t n, int64_t by) { return (n + by - 1) / by; }

// A set of element types.
class Types {
 public:
  constexpr Types(Type type) : bits_(uint64_t{1} << int(type)) {}
  friend constexpr Types operator|(Types a, Types b) {
    a.bits_ |= b.bits_;
    return a;
  }

  constexpr bool Have(Type type) const { return bits_ >> int(type) & 1; }
  std::string text() const {
    std::string out;
    for (int i = 0; i < 64; ++i)
      if (Have(Type(i))) out += (out.empty() ? "" : " or ") + Name(Type(i));
    return out;
  }

 private:
  uint64_t bits_;
};
constexpr Types kHalves = Types(BF16) | F16, kFloats = kHalves | F32, kFp8 = Types(F8E4M3FN) | F8E5M2;

// data_t has the type of data, where that is there.
inline Types Fp8Like(const Tensor& data) { return Present(data) ? Types(data.type) : kFp8; }

enum Need { kRequired, kOptional, kAbsent };
inline Need RequiredIf(bool needed) { return needed ? kRequired : kOptional; }
inline Need AbsentIf(bool refused) { return refused ? kAbsent : kOptional; }

struct Expected {
  const char* name;
  Tensor array;
  Types types;
  Axes axes;
  Need need = kRequired;
};

// An error that names the op, the array, what it is and what it must be, unless all arrays are as expected.
inline Status Expect(const char* op, std::initializer_list<Expected> all) {
  for (const Expected& e : all) {
    if (e.need != kRequired && !Present(e.array)) continue;
    if (e.need != kAbsent && e.types.Have(e.array.type) && e.axes.AreThoseOf(e.array)) continue;
    std::string wanted = e.need == kAbsent ? "" : e.types.text() + e.axes.text();
    if (e.need == kOptional) wanted += ", or ";
    if (e.need != kRequired) wanted += "a buffer without elements";
    return {Status::kInvalidArgument, std::string(op) + ": " + e.name + " is " + Name(e.array.type) +
                                          e.array.shape() + "; pass " + wanted + "."};
  }
  return {};
}

// An error unless the array has `least` axes or more; with `exactly`, that many.
inline Status ExpectRank(const char* op, const char* name, const Tensor& a, int64_t least,
                         bool exactly = false) {
  TE_CHECK(a.rank == least || (a.rank > least && !exactly), "%s: %s is %s%s; pass an array of %ld axes%s.",
           op, name, Name(a.type).c_str(), a.shape().c_str(), long(least), exactly ? "" : " or more");
  return {};
}

}  // namespace te
