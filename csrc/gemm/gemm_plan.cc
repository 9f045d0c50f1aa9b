#include <atomic>
#include <cstring>
#include <map>
#include <mutex>
#include <stdexcept>
#include <thread>

#include "base/device.h"
#include "base/module.h"
#include "gemm/gemm.h"

namespace te {
namespace {

struct Plan {
  Algo algo;
  int64_t algos = 0;   // candidates; 0: the choice was loaded
  int64_t chosen = 0;  // index of the one in use
  double ms = 0;       // its median time; 0: not timed
  bool tuned = true;   // timed or loaded, not the heuristic's first
};

std::atomic<bool> tune_all = false;  // see TuneAllGemms

// All devices of a kind (model) take the same algorithms, so that replicas agree bit for bit. Never
// destroyed: XLA may run handlers while the process exits.
struct Kind {
  std::string name;
  std::mutex mutex;
  std::map<GemmKey, Plan> plans;
  std::map<std::string, Plan> loaded;  // by Describe(key)
};

struct Device {
  cublasLtHandle_t handle = nullptr;  // thread-safe
  Kind* kind = nullptr;
};

struct Kinds {
  std::mutex mutex;
  std::map<std::string, Kind> by_name;  // no entry moves or goes
};

Kinds& AllKinds() {
  static auto* kinds = new Kinds;
  return *kinds;
}

Status KindName(int ordinal, std::string* name) {
  cudaDeviceProp properties;
  TE_CUDA(cudaGetDeviceProperties(&properties, ordinal));
  *name = Format("%s, %d SMs", properties.name, properties.multiProcessorCount);
  return {};
}

Kind* FindKind(const std::string& name) {
  std::lock_guard<std::mutex> lock(AllKinds().mutex);
  Kind* kind = &AllKinds().by_name[name];
  kind->name = name;
  return kind;
}

// Every call of the handler passes here: once a device is known, two loads.
Status CurrentDevice(const Device** out) {
  constexpr int kMost = 64;
  static std::atomic<const Device*> devices[kMost];
  static auto* mutex = new std::mutex;
  int ordinal = 0;
  TE_CUDA(cudaGetDevice(&ordinal));
  TE_CHECK(ordinal < kMost, "te_gemm: device %d; it knows %d of them", ordinal, kMost);
  *out = devices[ordinal].load(std::memory_order_acquire);
  if (*out) return {};
  std::lock_guard<std::mutex> lock(*mutex);
  if ((*out = devices[ordinal].load(std::memory_order_relaxed))) return {};
  std::string name;
  TE_TRY(KindName(ordinal, &name));
  Device device;
  TE_TRY(CreateHandle(&device.handle));
  device.kind = FindKind(name);
  *out = new Device(device);
  devices[ordinal].store(*out, std::memory_order_release);
  return {};
}

// The loaded choice for `key`, if there is one.
bool TakeLoaded(const Device& device, const GemmKey& key, Plan* plan) {
  std::lock_guard<std::mutex> lock(device.kind->mutex);
  const auto it = device.kind->loaded.find(Describe(key));
  if (it == device.kind->loaded.end()) return false;
  *plan = it->second;
  return true;
}

Status MakePlan(cudaStream_t stream, const Device& device, const GemmKey& asked, Plan* plan) {
  if (TakeLoaded(device, asked, plan)) return {};
  GemmKey key = asked;
  key.tune = asked.tune || tune_all;
  Algos algos;
  TE_TRY(Candidates(device.handle, key, &algos));
  plan->algos = int64_t(algos.size());
  plan->tuned = key.tune;
  if (key.tune && algos.size() > 1) {
    const auto run = [&](int64_t i, const GemmOperands& operands) {
      return Matmul(stream, device.handle, key, algos[i], operands).code == Status::kOk;
    };
    const Timing timing = TuneGemm(stream, key, plan->algos, run);
    plan->chosen = timing.fastest;
    plan->ms = timing.ms;
  }
  plan->algo = algos[plan->chosen];
  return {};
}

// The 64 opaque bytes of an algorithm, which NVIDIA lets one store for the same version of cuBLASLt.
std::string Hex(const Algo& algo) {
  std::string text;
  const auto* bytes = reinterpret_cast<const unsigned char*>(&algo);
  for (size_t i = 0; i < sizeof(algo); ++i) text += Format("%02x", bytes[i]);
  return text;
}

bool FromHex(const std::string& text, Algo* algo) {
  if (text.size() != 2 * sizeof(*algo) || text.find_first_not_of("0123456789abcdef") != std::string::npos)
    return false;
  auto* bytes = reinterpret_cast<unsigned char*>(algo);
  for (size_t i = 0; i < sizeof(*algo); ++i)
    bytes[i] = static_cast<unsigned char>(std::stoi(text.substr(2 * i, 2), nullptr, 16));
  return true;
}

}  // namespace

Status FindGemm(cudaStream_t stream, const GemmKey& key, GemmChoice* choice) {
  const Device* device = nullptr;
  TE_TRY(CurrentDevice(&device));
  choice->handle = device->handle;
  Kind& kind = *device->kind;
  {
    std::lock_guard<std::mutex> lock(kind.mutex);
    if (const auto it = kind.plans.find(key); it != kind.plans.end()) {
      choice->algo = it->second.algo;
      return {};
    }
  }
  cudaStreamCaptureStatus capture = cudaStreamCaptureStatusNone;
  TE_CUDA(cudaStreamIsCapturing(stream, &capture));
  if (capture != cudaStreamCaptureStatusNone)
    return {Status::kInternal,
            "te_gemm: no plan for " + Describe(key) + " while its stream is being captured"};
  // Outside the lock: one device must not wait for the work queued on another. Where two finish, the first
  // counts.
  Plan plan;
  TE_TRY(MakePlan(stream, *device, key, &plan));
  std::lock_guard<std::mutex> lock(kind.mutex);
  choice->algo = kind.plans.emplace(key, plan).first->second.algo;
  return {};
}

std::vector<GemmPlan> GemmPlans() {
  std::vector<GemmPlan> out;
  std::lock_guard<std::mutex> lock(AllKinds().mutex);
  for (auto& [name, kind] : AllKinds().by_name) {
    std::lock_guard<std::mutex> kind_lock(kind.mutex);
    for (const auto& [key, plan] : kind.plans)
      out.push_back({name, Describe(key), plan.tuned, Hex(plan.algo), plan.algos, plan.chosen, plan.ms});
  }
  return out;
}

void TuneAllGemms(bool on) { tune_all = on; }

namespace {

// The device of this kind that a question from Python is asked of; -1: there is none. One that this process
// uses, if it uses one.
int DeviceOfKind(const std::string& kind) {
  int count = 0, found = -1;
  if (cudaGetDeviceCount(&count) != cudaSuccess) return -1;
  for (int i = 0; i < count; ++i) {
    std::string name;
    if (KindName(i, &name).failure() || name != kind) continue;
    if (HasContext(i)) return i;
    if (found < 0) found = i;
  }
  return found;
}

// An error unless the tuner itself might choose `algo` on the device.
Status CheckChoice(int ordinal, const GemmKey& key, const Algo& algo) {
  TE_CUDA(cudaSetDevice(ordinal));
  const Device* device = nullptr;
  TE_TRY(CurrentDevice(&device));
  Algos algos;
  TE_TRY(Candidates(device->handle, key, &algos));
  TE_CHECK(Has(algos, algo), "algo is none of the %zu that the tuner would try here", algos.size());
  return {};
}

}  // namespace

bool CheckGemmPlan(const std::string& device, const std::string& gemm, const std::string& algo) {
  Algo found;
  if (!FromHex(algo, &found)) throw std::runtime_error("algo must be 128 hexadecimal digits");
  GemmKey key;
  if (!FindKey(gemm, &key)) throw std::runtime_error("gemm names no product of te_gemm or te_gemm_block");
  const int ordinal = DeviceOfKind(device);
  if (ordinal < 0) return false;
  Status error;
  // A thread of its own has a current device of its own.
  std::thread([&] { error = CheckChoice(ordinal, key, found); }).join();
  if (error.failure()) throw std::runtime_error(error.message);
  return true;
}

bool LoadGemmPlan(const std::string& device, const std::string& gemm, const std::string& algo, double ms) {
  Plan loaded;
  loaded.ms = ms;
  if (!FromHex(algo, &loaded.algo)) return false;
  Kind& kind = *FindKind(device);
  std::lock_guard<std::mutex> lock(kind.mutex);
  for (const auto& [known, plan] : kind.plans)
    if (Describe(known) == gemm && std::memcmp(&plan.algo, &loaded.algo, sizeof(Algo)) != 0) return false;
  kind.loaded[gemm] = loaded;
  return true;
}

}  // namespace te
