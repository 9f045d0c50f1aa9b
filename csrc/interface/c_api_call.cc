#include <cmath>

#include "base/device.h"
#include "interface/c_api.h"

namespace te::c_api {
namespace {

constexpr Types kTypes = kFloats | kFp8 | S32;
constexpr int64_t kMostBytes = int64_t{1} << 56;  // of an array: sums of a few such numbers are no overflow

// The bytes of an array if none of its axes were empty; -1: too many.
int64_t MostBytes(const te_jax_array& a) {
  int64_t bytes = Width(Type(a.type));
  for (int i = 0; i < a.rank; ++i)
    if (__builtin_mul_overflow(bytes, std::max<int64_t>(a.shape[i], 1), &bytes) || bytes > kMostBytes)
      return -1;
  return bytes;
}

Tensor TensorOf(const te_jax_array& a) { return {a.data, Type(a.type), a.shape, a.rank}; }

}  // namespace

Status Call::Check(const char* name, const te_jax_array& a, int64_t alignment) const {
  TE_CHECK(a.type > 0 && a.type < 64 && kTypes.Have(Type(a.type)), "%s: %s.type is %d; pass a te_jax_type",
           op_, name, int(a.type));
  TE_CHECK(a.rank >= 0 && a.rank <= TE_JAX_MAX_RANK, "%s: %s.rank is %d; pass 0 to %d", op_, name,
           int(a.rank), TE_JAX_MAX_RANK);
  for (int i = 0; i < a.rank; ++i)
    TE_CHECK(a.shape[i] >= 0, "%s: %s.shape[%d] is %ld; pass 0 or more", op_, name, i, long(a.shape[i]));
  TE_CHECK(MostBytes(a) >= 0, "%s: %s %s is too large", op_, name, TensorOf(a).shape().c_str());
  if (ask_ != Ask::kRun || !Present(TensorOf(a))) return {};
  TE_CHECK(a.data, "%s: %s.data is null; pass memory of the device", op_, name);
  const int64_t needed = a.rank == 0 ? Width(Type(a.type)) : alignment;
  TE_CHECK(reinterpret_cast<uintptr_t>(a.data) % needed == 0, "%s: %s.data is %p; align it to %ld bytes", op_,
           name, a.data, long(needed));
  return {};
}

Tensor Call::Array(const char* name, const te_jax_array& a, Need need, int64_t alignment) {
  if (a.type == TE_JAX_NONE) {
    if (need == kRequired)
      Fail({Status::kInvalidArgument, Format("%s: %s is absent; pass an array", op_, name)});
    else if (a.data)
      Fail({Status::kInvalidArgument,
            Format("%s: %s.type is TE_JAX_NONE, but it has data; pass its type", op_, name)});
    return kNone;
  }
  Status status = Check(name, a, alignment);
  if (!status.failure()) return TensorOf(a);
  Fail(std::move(status));
  return kNone;
}

Tensor Call::Reserve(Type type, const Axes& axes) {
  std::vector<int64_t>& sizes = sizes_.emplace_back();
  for (int64_t i = 0; i < axes.rank(); ++i) sizes.push_back(axes[i]);
  Tensor array{workspace_ ? workspace_ + bytes_ : nullptr, type, sizes.data(), axes.rank()};
  bytes_ += CeilDiv(array.bytes(), kWorkspaceAlignment) * kWorkspaceAlignment;
  return array;
}

void Call::Expect(const char* name, double value, double least, bool above) {
  if (std::isfinite(value) && (above ? value > least : value >= least)) return;
  Fail({Status::kInvalidArgument, Format("%s: %s is %g; pass a finite number %s %g", op_, name, value,
                                         above ? "above" : "from", least)});
}

Status Call::Ready() const {
  TE_TRY(status_);
  TE_TRY(ExpectWorkspace());
  return needs_hopper_ && ask_ != Ask::kBytes ? ExpectHopper(op_) : Status{};
}

Status Call::ExpectWorkspace() const {
  if (ask_ == Ask::kBytes || bytes_ == 0) return {};
  TE_CHECK(workspace_bytes_ >= bytes_, "%s: workspace_bytes is %ld; te_jax_%s_workspace says %ld", op_,
           long(workspace_bytes_), op_ + sizeof("te_") - 1, long(bytes_));
  if (ask_ == Ask::kPlan) return {};
  TE_CHECK(workspace_, "%s: workspace is null; pass memory of the device", op_);
  TE_CHECK(reinterpret_cast<uintptr_t>(workspace_) % kWorkspaceAlignment == 0,
           "%s: workspace is %p; align it to %ld bytes", op_, static_cast<void*>(workspace_),
           long(kWorkspaceAlignment));
  return {};
}

}  // namespace te::c_api
