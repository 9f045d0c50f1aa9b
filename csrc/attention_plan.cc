#include "attention_plan.h"

#include <cudnn_frontend.h>

#include <map>
#include <memory>
#include <mutex>
#include <utility>

#include "dl.h"
#include "module.h"

namespace te {
namespace {

namespace fe = cudnn_frontend;
using Tensor = std::shared_ptr<fe::graph::Tensor_attributes>;

constexpr size_t kOldestCudnn = 91200;  // 9.12, the first for CUDA 13

struct Plan {
  std::shared_ptr<fe::graph::Graph> graph;
  int64_t workspace = 0;  // bytes
};

// A cuDNN handle carries its stream, so each device's is used under a lock (host-side work alone). It is not
// thread_local: cudnnCreate allocates, and a new thread's first call may come while its stream is being
// captured.
struct Device {
  std::mutex mutex;
  cudnnHandle_t handle = nullptr;  // never destroyed: XLA may run handlers while the process exits
  std::map<AttentionKey, Plan> plans;
};

std::string Describe(const AttentionKey& key) {
  return Format("%s%s %s q[%ld, %ld, %ld, %ld], k[%ld, %ld, %ld, %ld], v[.., %ld]%s%s%s",
                key.packed ? "packed " : "", key.backward ? "te_attention_bwd" : "te_attention_fwd",
                key.bf16 ? "bf16" : "f16", long(key.b), long(key.s), long(key.h), long(key.d), long(key.b),
                long(key.t), long(key.g), long(key.d), long(key.e), key.causal ? ", causal" : "",
                key.dropout_rate > 0 ? ", dropout" : "", key.deterministic ? ", deterministic" : "");
}

// Kept with the plan's failure, so that the user knows the way out.
ffi::Error NoPlan(const AttentionKey& key, const std::string& reason) {
  return ffi::Error(ffi::ErrorCode::kUnimplemented,
                    Describe(key) + ": cuDNN: " + reason + "; implementation=\"xla\" does not need cuDNN.");
}

// The current device's state, locked, its handle on `stream`.
struct Locked {
  Device* device = nullptr;
  std::unique_lock<std::mutex> lock;
};

ffi::Error LockDevice(cudaStream_t stream, Locked* out) {
  if (!Cudnn().handle) return ffi::Error::Internal("te_attention: " + Cudnn().error);
  if (const size_t version = cudnnGetVersion(); version < kOldestCudnn)
    return ffi::Error(ffi::ErrorCode::kUnimplemented,
                      Format("te_attention: cuDNN is %zu, needs %zu or later", version, kOldestCudnn));
  int ordinal = 0;
  TE_CUDA(cudaGetDevice(&ordinal));
  static auto* mutex = new std::mutex;
  static auto* devices = new std::map<int, Device>;
  {
    std::lock_guard<std::mutex> lock(*mutex);
    out->device = &(*devices)[ordinal];
  }
  out->lock = std::unique_lock<std::mutex>(out->device->mutex);
  cudnnHandle_t& handle = out->device->handle;
  if (!handle)
    if (const cudnnStatus_t status = cudnnCreate(&handle); status != CUDNN_STATUS_SUCCESS)
      return ffi::Error::Internal(std::string("te_attention: cudnnCreate: ") + cudnnGetErrorString(status));
  if (const cudnnStatus_t status = cudnnSetStream(handle, stream); status != CUDNN_STATUS_SUCCESS)
    return ffi::Error::Internal(std::string("te_attention: cudnnSetStream: ") + cudnnGetErrorString(status));
  return ffi::Error::Success();
}

// cuDNN names the axes [b, h, s, d]; the strides say that they lie as [b, s, h, d], or as one of the `parts`
// of [b, s, parts, h, d].
struct Layout {
  std::vector<int64_t> dims, strides;
};

Layout Bshd(int64_t b, int64_t s, int64_t h, int64_t d, int64_t parts = 1) {
  return {{b, h, s, d}, {s * parts * h * d, d, parts * h * d, 1}};
}
Layout Lse(const AttentionKey& key) { return {{key.b, key.h, key.s, 1}, {key.h * key.s, key.s, 1, 1}}; }

struct Layouts {
  Layout q, k, v, out, lse;

  explicit Layouts(const AttentionKey& key)
      : q(Bshd(key.b, key.s, key.h, key.d, key.packed ? 3 : 1)),
        k(Bshd(key.b, key.t, key.g, key.d, key.packed ? 3 : 1)),
        v(Bshd(key.b, key.t, key.g, key.e, key.packed ? 3 : 1)),
        out(Bshd(key.b, key.s, key.h, key.e)),
        lse(Lse(key)) {}
};

Tensor Input(fe::graph::Graph& graph, const char* name, AttentionTensor uid, const Layout& layout) {
  auto attributes = fe::graph::Tensor_attributes();
  attributes.set_name(name).set_uid(uid).set_dim(layout.dims).set_stride(layout.strides);
  if (uid == kLse) attributes.set_data_type(fe::DataType_t::FLOAT);
  return graph.tensor(attributes);
}

void Output(const Tensor& tensor, AttentionTensor uid, const Layout& layout) {
  tensor->set_output(true).set_uid(uid).set_dim(layout.dims).set_stride(layout.strides);
  if (uid == kLse) tensor->set_data_type(fe::DataType_t::FLOAT);
}

Tensor Scalar(fe::graph::Graph& graph, const char* name, AttentionTensor uid) {
  return graph.tensor(fe::graph::Tensor_attributes()
                          .set_name(name)
                          .set_uid(uid)
                          .set_dim({1, 1, 1, 1})
                          .set_stride({1, 1, 1, 1})
                          .set_data_type(fe::DataType_t::INT64));  // compute capability 10.0 takes no INT32
}

// The mask, and dropout: cuDNN draws with Philox, and draws the same again in the backward pass.
template <typename Attributes>
void SetOptions(fe::graph::Graph& graph, Attributes& attributes, const AttentionKey& key) {
  if (key.causal) {
    attributes.set_diagonal_alignment(fe::DiagonalAlignment_t::TOP_LEFT);
    attributes.set_diagonal_band_right_bound(0);
  }
  if (key.dropout_rate > 0)
    attributes.set_dropout(key.dropout_rate, Scalar(graph, "seed", kSeed), Scalar(graph, "offset", kOffset));
}

void AddForward(fe::graph::Graph& graph, const AttentionKey& key) {
  const Layouts layouts(key);
  const Tensor q = Input(graph, "q", kQ, layouts.q), k = Input(graph, "k", kK, layouts.k),
               v = Input(graph, "v", kV, layouts.v);
  auto attributes = fe::graph::SDPA_attributes();
  attributes.set_name("te_attention_fwd").set_generate_stats(true).set_attn_scale(key.scale);
  SetOptions(graph, attributes, key);
  const auto [out, lse] = graph.sdpa(q, k, v, attributes);
  Output(out, kOut, layouts.out);
  Output(lse, kLse, layouts.lse);
}

// dk and dv have the g heads of k and v: cuDNN sums over the query heads of a group.
void AddBackward(fe::graph::Graph& graph, const AttentionKey& key) {
  const Layouts layouts(key);
  const Tensor q = Input(graph, "q", kQ, layouts.q), k = Input(graph, "k", kK, layouts.k),
               v = Input(graph, "v", kV, layouts.v), out = Input(graph, "out", kOut, layouts.out),
               dout = Input(graph, "dout", kDOut, layouts.out), lse = Input(graph, "lse", kLse, layouts.lse);
  auto attributes = fe::graph::SDPA_backward_attributes();
  attributes.set_name("te_attention_bwd")
      .set_attn_scale(key.scale)
      .set_deterministic_algorithm(key.deterministic);
  SetOptions(graph, attributes, key);
  const auto [dq, dk, dv] = graph.sdpa_backward(q, k, v, out, dout, lse, attributes);
  Output(dq, kDQ, layouts.q);
  Output(dk, kDK, layouts.k);
  Output(dv, kDV, layouts.v);
}

ffi::Error Build(cudnnHandle_t handle, const AttentionKey& key, Plan* plan) {
  auto graph = std::make_shared<fe::graph::Graph>();
  graph->set_io_data_type(key.bf16 ? fe::DataType_t::BFLOAT16 : fe::DataType_t::HALF)
      .set_intermediate_data_type(fe::DataType_t::FLOAT)
      .set_compute_data_type(fe::DataType_t::FLOAT);
  key.backward ? AddBackward(*graph, key) : AddForward(*graph, key);
  if (auto status = graph->build(handle, {fe::HeurMode_t::A}); status.is_bad())
    return NoPlan(key, status.get_message());
  if (auto status = graph->get_workspace_size(plan->workspace); status.is_bad())
    return NoPlan(key, status.get_message());
  plan->graph = std::move(graph);
  return ffi::Error::Success();
}

// The plan of `key`, built if there is none yet. A plan, once made, stays where it is: a captured graph may
// read its host-side constants.
ffi::Error FindPlan(cudaStream_t stream, const AttentionKey& key, Device& device, const Plan** plan) {
  if (const auto it = device.plans.find(key); it != device.plans.end()) {
    *plan = &it->second;
    return ffi::Error::Success();
  }
  cudaStreamCaptureStatus capture = cudaStreamCaptureStatusNone;
  if (stream) TE_CUDA(cudaStreamIsCapturing(stream, &capture));  // a host query has none
  if (capture != cudaStreamCaptureStatusNone)
    return ffi::Error::Internal(Describe(key) + ": no plan while its stream is being captured");
  Plan built;
  TE_TRY(Build(device.handle, key, &built));
  *plan = &device.plans.emplace(key, std::move(built)).first->second;
  return ffi::Error::Success();
}

}  // namespace

// The frontend throws where its containers or the standard library do: no exception may reach XLA.
ffi::Error FindAttention(cudaStream_t stream, const AttentionKey& key, int64_t* workspace) try {
  Locked locked;
  TE_TRY(LockDevice(stream, &locked));
  const Plan* plan = nullptr;
  TE_TRY(FindPlan(stream, key, *locked.device, &plan));
  *workspace = plan->workspace;
  return ffi::Error::Success();
} catch (const std::exception& e) {
  return NoPlan(key, e.what());
}

ffi::Error RunAttention(cudaStream_t stream, const AttentionKey& key, AttentionPointers pointers,
                        void* workspace, int64_t workspace_bytes) try {
  Locked locked;
  TE_TRY(LockDevice(stream, &locked));
  const Plan* plan = nullptr;
  TE_TRY(FindPlan(stream, key, *locked.device, &plan));
  if (plan->workspace > workspace_bytes)
    return ffi::Error::Internal(Describe(key) +
                                Format(": the workspace has %ld bytes, needs %ld: compile on the "
                                       "GPU that runs it",
                                       long(workspace_bytes), long(plan->workspace)));
  if (auto status = plan->graph->execute(locked.device->handle, pointers, workspace); status.is_bad())
    return ffi::Error::Internal(Describe(key) + ": cuDNN: " + status.get_message());
  return ffi::Error::Success();
} catch (const std::exception& e) {
  return ffi::Error::Internal(Describe(key) + ": cuDNN: " + e.what());
}

}  // namespace te
