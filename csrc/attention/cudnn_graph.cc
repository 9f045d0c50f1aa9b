#include "attention/cudnn_graph.h"

#include <cudnn_frontend.h>

#include <atomic>
#include <map>
#include <memory>
#include <mutex>
#include <stdexcept>
#include <thread>
#include <utility>

#include "base/device.h"
#include "base/dl.h"
#include "base/module.h"

namespace te {
namespace {

namespace fe = cudnn_frontend;

constexpr size_t kOldestCudnn = 91501;  // as te_jax/core/extension.py has it, with the reason

struct Plan {
  std::shared_ptr<fe::graph::Graph> graph;
  int64_t workspace = 0;  // bytes
};

// A cuDNN handle carries its stream, so each device's is used under a lock (only work of the host). It is not
// thread_local: cudnnCreate allocates, and a new thread's first call may come while its stream is being
// captured.
struct Device {
  std::mutex mutex;
  cudnnHandle_t handle = nullptr;  // never destroyed: XLA may run handlers while the process exits
  std::map<std::string, Plan> plans;
};

std::atomic<int64_t> builds = 0;

// Kept with the plan's failure, so that the user knows the way out.
Status NoPlan(const GraphRecipe& recipe, const std::string& reason) {
  return {Status::kUnimplemented, recipe.text + ": cuDNN on compute capability " + Capability() + ": " +
                                      reason + "; implementation=\"xla\" does not need cuDNN."};
}
Status Failure(const std::string& message) { return {Status::kInternal, message}; }

// The current device's state, locked, its handle on `stream`.
struct Locked {
  Device* device = nullptr;
  std::unique_lock<std::mutex> lock;
};

Status LockDevice(cudaStream_t stream, Locked* out) {
  if (!Cudnn().handle) return Failure("cuDNN graphs: " + Cudnn().error);
  if (const size_t version = cudnnGetVersion(); version < kOldestCudnn)
    return {Status::kUnimplemented,
            Format("cuDNN graphs: cuDNN is %zu, needs %zu or later", version, kOldestCudnn)};
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
      return Failure(std::string("cudnnCreate: ") + cudnnGetErrorString(status));
  if (const cudnnStatus_t status = cudnnSetStream(handle, stream); status != CUDNN_STATUS_SUCCESS)
    return Failure(std::string("cudnnSetStream: ") + cudnnGetErrorString(status));
  return {};
}

Status Build(cudnnHandle_t handle, const GraphRecipe& recipe, Plan* plan) {
  ++builds;
  auto graph = std::make_shared<fe::graph::Graph>();
  recipe.add(*graph);
  if (auto status = graph->build(handle, {fe::HeurMode_t::A}); status.is_bad())
    return NoPlan(recipe, status.get_message());
  if (auto status = graph->get_workspace_size(plan->workspace); status.is_bad())
    return NoPlan(recipe, status.get_message());
  plan->graph = std::move(graph);
  return {};
}

// The plan of `recipe`, built if there is none yet. A plan, once made, stays where it is: a captured graph
// may read its host-side constants.
Status FindPlan(cudaStream_t stream, const GraphRecipe& recipe, Device& device, const Plan** plan) {
  if (const auto it = device.plans.find(recipe.text); it != device.plans.end()) {
    *plan = &it->second;
    return {};
  }
  cudaStreamCaptureStatus capture = cudaStreamCaptureStatusNone;
  if (stream) TE_CUDA(cudaStreamIsCapturing(stream, &capture));  // a host query has none
  if (capture != cudaStreamCaptureStatusNone)
    return Failure(recipe.text + ": no plan while its stream is being captured");
  Plan built;
  TE_TRY(Build(device.handle, recipe, &built));
  *plan = &device.plans.emplace(recipe.text, std::move(built)).first->second;
  return {};
}

// The device that answers a host query: the current one, or else the first that this process already uses. A
// process that drives only GPU 3 must not open a context, and hundreds of MB, on GPU 0.
int QueryDevice() {
  int current = 0, count = 0;
  if (cudaGetDevice(&current) != cudaSuccess || cudaGetDeviceCount(&count) != cudaSuccess) return current;
  for (int device = 0; device < count && !HasContext(current); ++device)
    if (HasContext(device)) return device;
  return current;
}

}  // namespace

int64_t CudnnPlanBuilds() { return builds; }

// The frontend throws where its containers or the standard library do: no exception may reach XLA.
Status FindGraph(cudaStream_t stream, const GraphRecipe& recipe, int64_t* workspace) try {
  Locked locked;
  TE_TRY(LockDevice(stream, &locked));
  const Plan* plan = nullptr;
  TE_TRY(FindPlan(stream, recipe, *locked.device, &plan));
  if (workspace) *workspace = plan->workspace;
  return {};
} catch (const std::exception& e) {
  return NoPlan(recipe, e.what());
}

Status RunGraph(cudaStream_t stream, const GraphRecipe& recipe, GraphPointers pointers, void* workspace,
                int64_t workspace_bytes) try {
  Locked locked;
  TE_TRY(LockDevice(stream, &locked));
  const Plan* plan = nullptr;
  TE_TRY(FindPlan(stream, recipe, *locked.device, &plan));
  if (plan->workspace > workspace_bytes)
    return Failure(recipe.text + Format(": the workspace has %ld bytes, needs %ld: compile on the GPU that "
                                        "runs it",
                                        long(workspace_bytes), long(plan->workspace)));
  if (auto status = plan->graph->execute(locked.device->handle, pointers, workspace); status.is_bad())
    return Failure(recipe.text + ": cuDNN: " + status.get_message());
  return {};
} catch (const std::exception& e) {
  return Failure(recipe.text + ": cuDNN: " + e.what());
}

int64_t GraphWorkspace(const GraphRecipe& recipe) {
  int64_t workspace = 0;
  Status error;
  // A thread of its own has a current device of its own.
  std::thread([&, device = QueryDevice()] {
    if (const cudaError_t status = cudaSetDevice(device); status != cudaSuccess)
      error = Failure(std::string("cudaSetDevice: ") + cudaGetErrorString(status));
    else
      error = FindGraph(nullptr, recipe, &workspace);
  }).join();
  if (error.failure()) throw std::runtime_error(error.message);
  return workspace;
}

}  // namespace te
