// A call of the C interface: its arrays become arrays of a launcher, which checks them. What a launcher takes
// for granted is checked here.
#pragma once

#include <deque>
#include <string>
#include <vector>

#include "base/check.h"
#include "include/te_jax.h"

namespace te::c_api {

enum class Ask { kBytes, kPlan, kRun };  // how much workspace; only the plan; the call

constexpr int64_t kAlignment = 16, kMatrixAlignment = 128, kWorkspaceAlignment = 256;  // bytes

class Call {
 public:
  Call(const char* op, Ask ask, cudaStream_t stream, void* workspace, int64_t workspace_bytes)
      : op_(op),
        ask_(ask),
        stream_(stream),
        workspace_(static_cast<char*>(workspace)),
        workspace_bytes_(workspace_bytes) {}

  // The caller's array. A bad array makes the call fail, with the first bad one that was met.
  Tensor Array(const char* name, const te_jax_array& a, Need need, int64_t alignment = kAlignment);

  // Room in the workspace for partials that a launcher finishes into the caller's array; none where
  // that is absent.
  Tensor Partials(const te_jax_array& result, const Axes& axes) {
    return result.type == TE_JAX_NONE ? kNone : Reserve(F32, axes);
  }

  // Bytes of the workspace for the launcher itself.
  Tensor Workspace(int64_t bytes) { return Reserve(U8, {bytes}); }

  // Only Hopper has the op's kernels.
  void NeedsHopper() { needs_hopper_ = true; }

  // An error unless it is a finite number, `least` or more, or above it.
  void Expect(const char* name, double value, double least, bool above = false);

  template <typename... P, typename... Given>
  Status Launch(Status (*launch)(cudaStream_t, P...), const Given&... given) {
    TE_TRY(Ready());
    if (ask_ == Ask::kBytes) return {};
    return launch(stream_, As<P>(given)...);
  }
  template <typename... P, typename... Given>
  Status Launch(Status (*launch)(Stage, cudaStream_t, P...), const Given&... given) {
    TE_TRY(Ready());
    if (ask_ == Ask::kBytes) return {};
    return launch(ask_ == Ask::kPlan ? Stage::kInitialize : Stage::kExecute, stream_, As<P>(given)...);
  }

  int64_t bytes() const { return bytes_; }  // of workspace that the call needs

 private:
  template <typename P, typename Given>
  static P As(const Given& given) {
    if constexpr (std::is_base_of_v<Tensor, P>)
      return P{given};
    else
      return static_cast<P>(given);
  }

  Status Check(const char* name, const te_jax_array& a, int64_t alignment) const;
  Tensor Reserve(Type type, const Axes& axes);
  Status Ready() const;
  Status ExpectWorkspace() const;
  void Fail(Status status) {
    if (!status_.failure()) status_ = std::move(status);
  }

  const char* op_;
  Ask ask_;
  cudaStream_t stream_;
  char* workspace_;
  int64_t workspace_bytes_, bytes_ = 0;
  bool needs_hopper_ = false;
  Status status_;
  std::deque<std::vector<int64_t>> sizes_;  // of the arrays in the workspace
};

}  // namespace te::c_api
