// What the buffers of a call must be: a handler declares it for each of them in one Expect, before it looks
// at any memory. XLA checks nothing of an FFI call, and a kernel that trusts it writes beyond what it was
// given.
#pragma once

#include <algorithm>
#include <cstddef>

#include "common.h"

namespace te {
inline namespace old {

// The sizes of a buffer's axes: single ones, and runs of those of another buffer.
class Axes {
 public:
  Axes() = default;  // of a scalar
  Axes(std::initializer_list<int64_t> sizes) {
    for (int64_t size : sizes) Append(size);
  }
  explicit Axes(const Arg& a) {
    for (int64_t size : a.dimensions()) Append(size);
  }
  explicit Axes(Ret& r) : Axes(*r) {}

  int64_t rank() const { return rank_; }
  int64_t operator[](int64_t i) const { return i < rank_ ? sizes_[i] : 0; }
  int64_t last() const { return rank_ > 0 ? sizes_[rank_ - 1] : 0; }

  // The product of the sizes.
  int64_t count() const {
    int64_t product = 1;
    for (int64_t i = 0; i < rank_; ++i) product *= sizes_[i];
    return product;
  }

  // The axes before axis i, those from it on, and all but the last n.
  Axes First(int64_t i) const { return Range(0, i); }
  Axes From(int64_t i) const { return Range(i, rank_); }
  Axes Without(int64_t n) const { return Range(0, rank_ - n); }

  friend Axes operator+(Axes left, const Axes& right) {
    for (int64_t i = 0; i < right.rank_; ++i) left.Append(right.sizes_[i]);
    return left;
  }

  bool AreThoseOf(const Arg& a) const {
    const auto sizes = a.dimensions();
    return int64_t(sizes.size()) == rank_ && std::equal(sizes.begin(), sizes.end(), sizes_);
  }

  std::string text() const {
    std::string out = "[";
    for (int64_t i = 0; i < rank_; ++i) out += (i > 0 ? ", " : "") + std::to_string(sizes_[i]);
    return out + "]";
  }

 private:
  static constexpr int64_t kMost = 32;  // an array of more is none that a kernel takes

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
  constexpr Types(ffi::DataType type) : bits_(uint64_t{1} << int(type)) {}
  friend constexpr Types operator|(Types a, Types b) {
    a.bits_ |= b.bits_;
    return a;
  }

  constexpr bool Have(ffi::DataType type) const { return bits_ >> int(type) & 1; }
  std::string text() const {
    std::string out;
    for (int i = 0; i < 64; ++i)
      if (bits_ >> i & 1) out += (out.empty() ? "" : " or ") + Name(ffi::DataType(i));
    return out;
  }
  static std::string Name(ffi::DataType type) {
    switch (type) {
      case ffi::F32:
        return "f32";
      case ffi::BF16:
        return "bf16";
      case ffi::F16:
        return "f16";
      case ffi::F8E4M3FN:
        return "f8e4m3fn";
      case ffi::F8E5M2:
        return "f8e5m2";
      case ffi::U8:
        return "u8";
      case ffi::S32:
        return "i32";
      case ffi::U32:
        return "u32";
      default:
        return "type " + std::to_string(int(type));
    }
  }

 private:
  uint64_t bits_;
};
constexpr Types kHalves = Types(ffi::BF16) | ffi::F16, kFloats = kHalves | ffi::F32;
constexpr Types kFp8 = Types(ffi::F8E4M3FN) | ffi::F8E5M2;

// data_t has the type of data, where that is there.
inline Types Fp8Like(Ret& data) { return Present(data) ? Types(data->element_type()) : kFp8; }

// An optional buffer that is absent has no elements, and any type and rank.
enum Need { kRequired, kOptional, kAbsent };
inline Need RequiredIf(bool needed) { return needed ? kRequired : kOptional; }
inline Need AbsentIf(bool refused) { return refused ? kAbsent : kOptional; }

struct Expected {
  const char* name;
  const Arg* buffer;  // nullptr: the op has none
  Types types;
  Axes axes;
  Need need = kRequired;
};

// An error that names op, buffer, what it is and what it must be, unless all of them are as expected.
inline ffi::Error Expect(const char* op, std::initializer_list<Expected> all) {
  for (const Expected& e : all) {
    if (!e.buffer || (e.need != kRequired && !Present(*e.buffer))) continue;
    const ffi::DataType type = e.buffer->element_type();
    if (e.need != kAbsent && e.types.Have(type) && e.axes.AreThoseOf(*e.buffer)) continue;
    const std::string wanted = e.types.text() + e.axes.text(), none = "a buffer without elements";
    return ffi::Error::InvalidArgument(std::string(op) + ": " + e.name + " is " + Types::Name(type) +
                                       Shape(*e.buffer) + "; pass " +
                                       (e.need == kAbsent     ? none
                                        : e.need == kOptional ? wanted + ", or " + none
                                                              : wanted) +
                                       ".");
  }
  return ffi::Error::Success();
}

// An error unless the buffer has `least` axes or more; with `exactly`, that many.
inline ffi::Error ExpectRank(const char* op, const char* name, const Arg& a, size_t least,
                             bool exactly = false) {
  const size_t rank = a.dimensions().size();
  TE_CHECK(rank == least || (rank > least && !exactly), "%s: %s is %s%s; pass an array of %zu axes%s.", op,
           name, Types::Name(a.element_type()).c_str(), Shape(a).c_str(), least, exactly ? "" : " or more");
  return ffi::Error::Success();
}

}  // namespace old
}  // namespace te
