#include "gemm_plan.h"

#include <algorithm>
#include <map>
#include <mutex>
#include <utility>
#include <vector>

#include "dl.h"
#include "gemm_tune.h"
#include "module.h"

namespace te {

#define TE_LT_FUNCTIONS(X)                \
  X(cublasLtCreate)                       \
  X(cublasLtMatmul)                       \
  X(cublasLtMatmulAlgoGetHeuristic)       \
  X(cublasLtMatmulDescCreate)             \
  X(cublasLtMatmulDescDestroy)            \
  X(cublasLtMatmulDescSetAttribute)       \
  X(cublasLtMatmulPreferenceCreate)       \
  X(cublasLtMatmulPreferenceDestroy)      \
  X(cublasLtMatmulPreferenceSetAttribute) \
  X(cublasLtMatrixLayoutCreate)           \
  X(cublasLtMatrixLayoutDestroy)

namespace {

struct Functions {
#define TE_DECLARE(name) decltype(&::name) name = nullptr;
  TE_LT_FUNCTIONS(TE_DECLARE)
#undef TE_DECLARE
  std::string error;  // why they cannot be called

  Functions() {
    const dl::Library& library = CublasLt();
    error = library.error;
#define TE_LOOK_UP(name)                          \
  name = library.Symbol<decltype(::name)>(#name); \
  if (!name && error.empty()) error = "libcublasLt.so.13 lacks " #name;
    TE_LT_FUNCTIONS(TE_LOOK_UP)
#undef TE_LOOK_UP
  }
};

const Functions& Lt() {
  static auto* functions = new Functions;
  return *functions;
}

const char* StatusName(cublasStatus_t status) {
  switch (status) {
    case CUBLAS_STATUS_NOT_INITIALIZED:
      return "not initialized";
    case CUBLAS_STATUS_ALLOC_FAILED:
      return "allocation failed";
    case CUBLAS_STATUS_INVALID_VALUE:
      return "invalid value";
    case CUBLAS_STATUS_ARCH_MISMATCH:
      return "this GPU's architecture lacks it";
    case CUBLAS_STATUS_EXECUTION_FAILED:
      return "execution failed";
    case CUBLAS_STATUS_NOT_SUPPORTED:
      return "not supported";
    default:
      return "internal error";
  }
}

#define TE_LT(expr)                                                              \
  do {                                                                           \
    if (cublasStatus_t s_ = (expr); s_ != CUBLAS_STATUS_SUCCESS)                 \
      return ::xla::ffi::Error::Internal(                                        \
          Format("te_gemm: %s: status %d, %s", #expr, int(s_), StatusName(s_))); \
  } while (0)

std::string Describe(const GemmKey& key) {
  return Format("m%ld n%ld k%ld %s x %s -> %s%s%s%s%s", long(key.m), long(key.n), long(key.k),
                TypeName(key.lhs), TypeName(key.rhs), TypeName(key.out), key.bias < 0 ? "" : " + bias ",
                key.bias < 0 ? "" : TypeName(key.bias), key.c ? " + c" : "", key.fast_accum ? " fast" : "");
}

// One per device. The kind (model) keys the plans: all devices of a kind take the same algorithm, so that
// replicas agree bit for bit.
struct Device {
  cublasLtHandle_t handle =
      nullptr;  // thread-safe; never destroyed: XLA may run handlers while the process exits
  std::string kind;
};

ffi::Error CurrentDevice(Device* out) {
  static auto* mutex = new std::mutex;
  static auto* devices = new std::map<int, Device>;
  if (!Lt().error.empty()) return ffi::Error::Internal("te_gemm: " + Lt().error);
  int ordinal = 0;
  TE_CUDA(cudaGetDevice(&ordinal));
  std::lock_guard<std::mutex> lock(*mutex);
  Device& device = (*devices)[ordinal];
  if (!device.handle) {
    cudaDeviceProp properties;
    TE_CUDA(cudaGetDeviceProperties(&properties, ordinal));
    device.kind = Format("%s, %d SMs", properties.name, properties.multiProcessorCount);
    TE_LT(Lt().cublasLtCreate(&device.handle));
  }
  *out = device;
  return ffi::Error::Success();
}

// The host-side descriptors of one call (about 1 us): they hold the scale and bias pointers, which change
// from call to call. cuBLASLt is column-major: our row-major out[m, n] is its [n, m], so its A is our rhs.
class Descriptors {
 public:
  Descriptors() = default;
  Descriptors(const Descriptors&) = delete;
  ~Descriptors() {
    if (matmul) Lt().cublasLtMatmulDescDestroy(matmul);
    for (cublasLtMatrixLayout_t layout : {a, b, d})
      if (layout) Lt().cublasLtMatrixLayoutDestroy(layout);
  }

  ffi::Error Make(const GemmKey& key, const GemmOperands& operands) {
    TE_LT(Lt().cublasLtMatmulDescCreate(&matmul, CUBLAS_COMPUTE_32F, CUDA_R_32F));  // f32 operands: no TF32
    TE_TRY(Set(CUBLASLT_MATMUL_DESC_TRANSA, CUBLAS_OP_T));
    TE_TRY(Set(CUBLASLT_MATMUL_DESC_TRANSB, CUBLAS_OP_N));
    if (key.fp8()) TE_TRY(Set(CUBLASLT_MATMUL_DESC_FAST_ACCUM, int8_t(key.fast_accum)));
    if (operands.rhs_scale_inv) TE_TRY(Set(CUBLASLT_MATMUL_DESC_A_SCALE_POINTER, operands.rhs_scale_inv));
    if (operands.lhs_scale_inv) TE_TRY(Set(CUBLASLT_MATMUL_DESC_B_SCALE_POINTER, operands.lhs_scale_inv));
    if (key.bias >= 0) {
      TE_TRY(Set(CUBLASLT_MATMUL_DESC_EPILOGUE, CUBLASLT_EPILOGUE_BIAS));
      TE_TRY(Set(CUBLASLT_MATMUL_DESC_BIAS_DATA_TYPE, int32_t(key.bias)));
      TE_TRY(Set(CUBLASLT_MATMUL_DESC_BIAS_POINTER, operands.bias));
    }
    TE_LT(Lt().cublasLtMatrixLayoutCreate(&a, cudaDataType_t(key.rhs), key.k, key.n, key.k));
    TE_LT(Lt().cublasLtMatrixLayoutCreate(&b, cudaDataType_t(key.lhs), key.k, key.m, key.k));
    TE_LT(Lt().cublasLtMatrixLayoutCreate(&d, cudaDataType_t(key.out), key.n, key.m, key.n));
    return ffi::Error::Success();
  }

  cublasLtMatmulDesc_t matmul = nullptr;
  cublasLtMatrixLayout_t a = nullptr, b = nullptr, d = nullptr;

 private:
  template <typename T>
  ffi::Error Set(cublasLtMatmulDescAttributes_t attribute, T value) {
    TE_LT(Lt().cublasLtMatmulDescSetAttribute(matmul, attribute, &value, sizeof(value)));
    return ffi::Error::Success();
  }
};

cublasStatus_t Matmul(cudaStream_t stream, const GemmKey& key, const Descriptors& descriptors,
                      const GemmChoice& choice, const GemmOperands& operands) {
  const float one = 1.f, beta = key.c ? 1.f : 0.f;
  const void* c = key.c ? operands.c : operands.out;  // not read where beta is 0, but it must be an address
  return Lt().cublasLtMatmul(choice.handle, descriptors.matmul, &one, operands.rhs, descriptors.a,
                             operands.lhs, descriptors.b, &beta, c, descriptors.d, operands.out,
                             descriptors.d, &choice.algo, operands.workspace, key.workspace, stream);
}

using Algos = std::vector<cublasLtMatmulAlgo_t>;

// The heuristic's candidates, best guess first.
ffi::Error Candidates(const Device& device, const GemmKey& key, Algos* algos) {
  constexpr int kMost = 16;
  Descriptors descriptors;
  TE_TRY(descriptors.Make(key, {}));
  cublasLtMatmulPreference_t preference = nullptr;
  TE_LT(Lt().cublasLtMatmulPreferenceCreate(&preference));
  cublasLtMatmulHeuristicResult_t results[kMost];
  int count = 0;
  cublasStatus_t status = Lt().cublasLtMatmulPreferenceSetAttribute(
      preference, CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, &key.workspace, sizeof(key.workspace));
  // Partial sums of a split k stay f32: the other schemes round each of them to the type of out.
  const uint32_t reductions = CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE;
  if (status == CUBLAS_STATUS_SUCCESS)
    status = Lt().cublasLtMatmulPreferenceSetAttribute(preference, CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK,
                                                       &reductions, sizeof(reductions));
  if (status == CUBLAS_STATUS_SUCCESS)
    status =
        Lt().cublasLtMatmulAlgoGetHeuristic(device.handle, descriptors.matmul, descriptors.a, descriptors.b,
                                            descriptors.d, descriptors.d, preference, kMost, results, &count);
  Lt().cublasLtMatmulPreferenceDestroy(preference);
  for (int i = 0; i < count && status == CUBLAS_STATUS_SUCCESS; ++i)
    if (results[i].state == CUBLAS_STATUS_SUCCESS) algos->push_back(results[i].algo);
  if (!algos->empty()) return ffi::Error::Success();
  return ffi::Error(ffi::ErrorCode::kUnimplemented,
                    Format("te_gemm: cuBLASLt has no algorithm for %s on %s (status %d, %s)",
                           Describe(key).c_str(), device.kind.c_str(), int(status), StatusName(status)));
}

struct Plan {
  cublasLtMatmulAlgo_t algo;
  int64_t algos = 0;   // candidates
  int64_t chosen = 0;  // index of the one in use
  double ms = 0;       // its median time; 0: not timed
};

using PlanKey = std::pair<std::string, GemmKey>;  // device kind, GEMM

struct Plans {
  std::mutex mutex;
  std::map<PlanKey, Plan> by_key;
};

Plans& AllPlans() {
  static auto* plans = new Plans;
  return *plans;
}

ffi::Error MakePlan(cudaStream_t stream, const Device& device, const GemmKey& key, Plan* plan) {
  Algos algos;
  TE_TRY(Candidates(device, key, &algos));
  plan->algos = int64_t(algos.size());
  if (key.tune && algos.size() > 1) {
    const auto run = [&](int64_t i, const GemmOperands& operands) {
      Descriptors descriptors;
      return descriptors.Make(key, operands).success() &&
             Matmul(stream, key, descriptors, {device.handle, algos[i]}, operands) == CUBLAS_STATUS_SUCCESS;
    };
    const Timing timing = TuneGemm(stream, key, plan->algos, run);
    plan->chosen = timing.fastest;
    plan->ms = timing.ms;
  }
  plan->algo = algos[plan->chosen];
  return ffi::Error::Success();
}

}  // namespace

const char* TypeName(int type) {
  switch (type) {
    case CUDA_R_32F:
      return "f32";
    case CUDA_R_16BF:
      return "bf16";
    case CUDA_R_16F:
      return "f16";
    case CUDA_R_8F_E4M3:
      return "f8e4m3fn";
    case CUDA_R_8F_E5M2:
      return "f8e5m2";
    default:
      return "?";
  }
}

ffi::Error FindGemm(cudaStream_t stream, const GemmKey& key, GemmChoice* choice) {
  Device device;
  TE_TRY(CurrentDevice(&device));
  choice->handle = device.handle;
  const PlanKey plan_key{device.kind, key};
  Plans& plans = AllPlans();
  {
    std::lock_guard<std::mutex> lock(plans.mutex);
    if (const auto it = plans.by_key.find(plan_key); it != plans.by_key.end()) {
      choice->algo = it->second.algo;
      return ffi::Error::Success();
    }
  }
  cudaStreamCaptureStatus capture = cudaStreamCaptureStatusNone;
  TE_CUDA(cudaStreamIsCapturing(stream, &capture));
  if (capture != cudaStreamCaptureStatusNone)
    return ffi::Error::Internal("te_gemm: no plan for " + Describe(key) +
                                " while its stream is being captured");
  // Outside the lock: one device must not wait for the work queued on another. Of two that finish, the first
  // counts.
  Plan plan;
  TE_TRY(MakePlan(stream, device, key, &plan));
  std::lock_guard<std::mutex> lock(plans.mutex);
  choice->algo = plans.by_key.emplace(plan_key, plan).first->second.algo;
  return ffi::Error::Success();
}

ffi::Error RunGemm(cudaStream_t stream, const GemmKey& key, const GemmChoice& choice,
                   const GemmOperands& operands) {
  Descriptors descriptors;
  TE_TRY(descriptors.Make(key, operands));
  const cublasStatus_t status = Matmul(stream, key, descriptors, choice, operands);
  if (status == CUBLAS_STATUS_SUCCESS) return ffi::Error::Success();
  return ffi::Error::Internal(
      Format("te_gemm: %s: status %d, %s", Describe(key).c_str(), int(status), StatusName(status)));
}

std::vector<GemmPlan> GemmPlans() {
  std::vector<GemmPlan> out;
  Plans& plans = AllPlans();
  std::lock_guard<std::mutex> lock(plans.mutex);
  for (const auto& [key, plan] : plans.by_key)
    out.push_back({key.first + ": " + Describe(key.second) + (key.second.tune ? "" : " untuned"), plan.algos,
                   plan.chosen, plan.ms});
  return out;
}

}  // namespace te
