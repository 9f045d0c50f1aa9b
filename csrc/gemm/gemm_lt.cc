#include <algorithm>
#include <cstdio>
#include <cstring>

#include "base/dl.h"
#include "base/module.h"
#include "gemm/gemm.h"

namespace te {

#define TE_LT_FUNCTIONS(X)                \
  X(cublasLtCreate)                       \
  X(cublasLtMatmul)                       \
  X(cublasLtMatmulAlgoCheck)              \
  X(cublasLtMatmulAlgoConfigSetAttribute) \
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
  if (!name && error.empty()) error = TE_CUBLASLT " lacks " #name;
    TE_LT_FUNCTIONS(TE_LOOK_UP)
#undef TE_LOOK_UP
  }
};

const Functions& Lt() {
  static auto* functions = new Functions;
  return *functions;
}

const char* StatusName(cublasStatus_t status) {
  constexpr std::pair<cublasStatus_t, const char*> kNames[] = {
      {CUBLAS_STATUS_NOT_INITIALIZED, "not initialized"},
      {CUBLAS_STATUS_ALLOC_FAILED, "allocation failed"},
      {CUBLAS_STATUS_INVALID_VALUE, "invalid value"},
      {CUBLAS_STATUS_ARCH_MISMATCH, "this GPU's architecture lacks it"},
      {CUBLAS_STATUS_EXECUTION_FAILED, "execution failed"},
      {CUBLAS_STATUS_NOT_SUPPORTED, "not supported"}};
  for (const auto& [known, name] : kNames)
    if (known == status) return name;
  return "internal error";
}

cudaDataType_t CudaType(Type type) {
  switch (type) {
    case BF16:
      return CUDA_R_16BF;
    case F16:
      return CUDA_R_16F;
    case F8E4M3FN:
      return CUDA_R_8F_E4M3;
    case F8E5M2:
      return CUDA_R_8F_E5M2;
    default:
      return CUDA_R_32F;
  }
}

// What a call of cuBLASLt that failed ends as.
Status LtFailure(cublasStatus_t status, const char* call) {
  const std::string text = Format("te_gemm: %s: status %d, %s", call, int(status), StatusName(status));
  if (status != CUBLAS_STATUS_ARCH_MISMATCH && status != CUBLAS_STATUS_NOT_SUPPORTED)
    return {Status::kInternal, text};
  return {Status::kUnimplemented, text + "; this GPU has compute capability " + Capability()};
}

#define TE_LT(expr)                                                                           \
  do {                                                                                        \
    if (cublasStatus_t s_ = (expr); s_ != CUBLAS_STATUS_SUCCESS) return LtFailure(s_, #expr); \
  } while (0)

// The host-side descriptors of one call (made in 0.1 us): they hold the scale and bias pointers, which change
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

  Status Make(const GemmKey& key, const GemmOperands& operands) {
    TE_LT(Lt().cublasLtMatmulDescCreate(&matmul, CUBLAS_COMPUTE_32F, CUDA_R_32F));  // f32 operands: no TF32
    TE_TRY(Set(CUBLASLT_MATMUL_DESC_TRANSA, CUBLAS_OP_T));
    TE_TRY(Set(CUBLASLT_MATMUL_DESC_TRANSB, CUBLAS_OP_N));
    if (key.fp8()) TE_TRY(Set(CUBLASLT_MATMUL_DESC_FAST_ACCUM, int8_t(key.fast_accum)));
    if (operands.rhs_scale_inv) TE_TRY(Set(CUBLASLT_MATMUL_DESC_A_SCALE_POINTER, operands.rhs_scale_inv));
    if (operands.lhs_scale_inv) TE_TRY(Set(CUBLASLT_MATMUL_DESC_B_SCALE_POINTER, operands.lhs_scale_inv));
    if (key.scales != Scales::kTensor) TE_TRY(SetBlocks(key, operands));
    if (key.bias != kNoType) {
      TE_TRY(Set(CUBLASLT_MATMUL_DESC_EPILOGUE, CUBLASLT_EPILOGUE_BIAS));
      TE_TRY(Set(CUBLASLT_MATMUL_DESC_BIAS_DATA_TYPE, int32_t(CudaType(key.bias))));
      TE_TRY(Set(CUBLASLT_MATMUL_DESC_BIAS_POINTER, operands.bias));
    }
    TE_LT(Lt().cublasLtMatrixLayoutCreate(&a, CudaType(key.rhs), key.k, key.n, key.k));
    TE_LT(Lt().cublasLtMatrixLayoutCreate(&b, CudaType(key.lhs), key.k, key.m, key.k));
    TE_LT(Lt().cublasLtMatrixLayoutCreate(&d, CudaType(key.out), key.n, key.m, key.n));
    return {};
  }

  cublasLtMatmulDesc_t matmul = nullptr;
  cublasLtMatrixLayout_t a = nullptr, b = nullptr, d = nullptr;

 private:
  Status SetBlocks(const GemmKey& key, const GemmOperands& operands) {
    const bool squares = key.scales == Scales::kRowsBySquares;
    TE_TRY(
        Set(CUBLASLT_MATMUL_DESC_A_SCALE_MODE, int32_t(squares ? CUBLASLT_MATMUL_MATRIX_SCALE_BLK128x128_32F
                                                               : CUBLASLT_MATMUL_MATRIX_SCALE_VEC128_32F)));
    TE_TRY(Set(CUBLASLT_MATMUL_DESC_B_SCALE_MODE, int32_t(CUBLASLT_MATMUL_MATRIX_SCALE_VEC128_32F)));
    if (operands.lhs_scale_inv) return {};
    // To look for algorithms the modes want pointers; nothing is read there.
    const auto* some = reinterpret_cast<const float*>(uintptr_t{256});
    TE_TRY(Set(CUBLASLT_MATMUL_DESC_A_SCALE_POINTER, some));
    return Set(CUBLASLT_MATMUL_DESC_B_SCALE_POINTER, some);
  }

  template <typename T>
  Status Set(cublasLtMatmulDescAttributes_t attribute, T value) {
    TE_LT(Lt().cublasLtMatmulDescSetAttribute(matmul, attribute, &value, sizeof(value)));
    return {};
  }
};

// The heuristic's algorithms within `workspace` bytes, best guess first; none if it knows none.
cublasStatus_t Heuristic(cublasLtHandle_t handle, const Descriptors& descriptors, size_t workspace,
                         Algos* algos) {
  constexpr int kMost = 16;  // it gives 8 at most
  cublasLtMatmulPreference_t preference = nullptr;
  cublasStatus_t status = Lt().cublasLtMatmulPreferenceCreate(&preference);
  if (status != CUBLAS_STATUS_SUCCESS) return status;
  status = Lt().cublasLtMatmulPreferenceSetAttribute(preference, CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES,
                                                     &workspace, sizeof(workspace));
  // Partial sums of a split k stay f32: the other schemes round each of them to the type of out.
  const uint32_t reductions = CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE;
  if (status == CUBLAS_STATUS_SUCCESS)
    status = Lt().cublasLtMatmulPreferenceSetAttribute(preference, CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK,
                                                       &reductions, sizeof(reductions));
  // Asked for one it may answer otherwise than with the first of many; one is what most frameworks ask for.
  for (const int most : {1, kMost}) {
    cublasLtMatmulHeuristicResult_t results[kMost] = {};  // algorithms are compared byte by byte
    int count = 0;
    if (status == CUBLAS_STATUS_SUCCESS)
      status = Lt().cublasLtMatmulAlgoGetHeuristic(handle, descriptors.matmul, descriptors.a, descriptors.b,
                                                   descriptors.d, descriptors.d, preference, most, results,
                                                   &count);
    for (int i = 0; i < count && status == CUBLAS_STATUS_SUCCESS; ++i) {
      const Algo& algo = results[i].algo;
      if (results[i].state == CUBLAS_STATUS_SUCCESS && !Has(*algos, algo)) algos->push_back(algo);
    }
  }
  Lt().cublasLtMatmulPreferenceDestroy(preference);
  return status;
}

cublasStatus_t CheckStatus(cublasLtHandle_t handle, const GemmKey& key, const Descriptors& descriptors,
                           const Algo& algo) {
  cublasLtMatmulHeuristicResult_t result = {};
  const cublasStatus_t status = Lt().cublasLtMatmulAlgoCheck(
      handle, descriptors.matmul, descriptors.a, descriptors.b, descriptors.d, descriptors.d, &algo, &result);
  if (status == CUBLAS_STATUS_SUCCESS && result.workspaceSize > key.workspace)
    return CUBLAS_STATUS_NOT_SUPPORTED;
  return status;
}

// Adds what the heuristic does not offer for this GEMM but runs it: its guesses for a GEMM without bias, for
// the other accumulation and without workspace, and all of them with every custom option. On an H200 the
// fastest is among these for most large FP8 GEMMs with fast accumulation, by up to 9 % with a bias.
Status AddRelatives(cublasLtHandle_t handle, const GemmKey& key, const Descriptors& descriptors,
                    Algos* algos) {
  constexpr size_t kMost = 96;
  constexpr uint32_t kLastOption = 7;  // what they mean is cuBLASLt's; on Hopper there are 8
  const auto add = [&](const Algo& algo) {
    if (algos->size() < kMost && !Has(*algos, algo) &&
        CheckStatus(handle, key, descriptors, algo) == CUBLAS_STATUS_SUCCESS)
      algos->push_back(algo);
  };
  for (const bool other_accumulation : {false, true}) {
    if (other_accumulation && (!key.fp8() || key.scales != Scales::kTensor)) continue;
    GemmKey like = key;
    like.bias = kNoType;
    if (other_accumulation) like.fast_accum = !key.fast_accum;
    Descriptors related;
    TE_TRY(related.Make(like, {}));
    Algos guesses;
    Heuristic(handle, related, key.workspace, &guesses);  // none: nothing to add
    Heuristic(handle, related, 0, &guesses);
    for (const Algo& algo : guesses) add(algo);
  }
  const Algos roots = *algos;
  for (uint32_t option = 0; option <= kLastOption; ++option)
    for (Algo algo : roots)  // a copy
      if (Lt().cublasLtMatmulAlgoConfigSetAttribute(&algo, CUBLASLT_ALGO_CONFIG_CUSTOM_OPTION, &option,
                                                    sizeof(option)) == CUBLAS_STATUS_SUCCESS)
        add(algo);  // which leaves out what is not supported
  return {};
}

}  // namespace

std::string Describe(const GemmKey& key) {
  const char* scales = key.scales == Scales::kTensor ? ""
                       : key.scales == Scales::kRows ? " 1x128 by 1x128"
                                                     : " 1x128 by 128x128";
  const std::string bias = key.bias == kNoType ? "" : " + bias " + Name(key.bias);
  return Format("m%ld n%ld k%ld %s x %s -> %s%s%s%s%s, %zu bytes of workspace", long(key.m), long(key.n),
                long(key.k), Name(key.lhs).c_str(), Name(key.rhs).c_str(), Name(key.out).c_str(),
                bias.c_str(), key.c ? " + c" : "", key.fast_accum ? " fast" : "", scales, key.workspace);
}

bool FindKey(const std::string& text, GemmKey* key) {
  char lhs[16], rhs[16], out[16];
  GemmKey found;
  found.tune = true;
  const size_t comma = text.find(", ");
  if (std::sscanf(text.c_str(), "m%ld n%ld k%ld %15s x %15s -> %15[^ ,]", &found.m, &found.n, &found.k, lhs,
                  rhs, out) != 6 ||
      comma == std::string::npos || std::sscanf(text.c_str() + comma, ", %zu", &found.workspace) != 1 ||
      std::min({found.m, found.n, found.k}) < 1)
    return false;
  constexpr Type kTypes[] = {kNoType, F32, BF16, F16, F8E4M3FN, F8E5M2};
  for (const Type type : kTypes) {
    if (Name(type) == lhs) found.lhs = type;
    if (Name(type) == rhs) found.rhs = type;
    if (Name(type) == out) found.out = type;
  }
  // What is left to know are a few flags: that one key of all has the text, Describe says itself.
  for (const Type bias : kTypes)
    for (const Scales scales : {Scales::kTensor, Scales::kRows, Scales::kRowsBySquares})
      for (const int flags : {0, 1, 2, 3}) {
        found.bias = bias, found.scales = scales, found.c = flags & 1, found.fast_accum = flags & 2;
        if (Describe(*key = found) == text) return true;
      }
  return false;
}

bool Has(const Algos& algos, const Algo& algo) {
  return std::any_of(algos.begin(), algos.end(),
                     [&](const Algo& a) { return std::memcmp(&a, &algo, sizeof(algo)) == 0; });
}

Status CreateHandle(cublasLtHandle_t* handle) {
  if (!Lt().error.empty()) return {Status::kInternal, "te_gemm: " + Lt().error};
  TE_LT(Lt().cublasLtCreate(handle));
  return {};
}

Status Matmul(cudaStream_t stream, cublasLtHandle_t handle, const GemmKey& key, const Algo& algo,
              const GemmOperands& operands) {
  if (IsOwn(algo)) return MatmulOwn(stream, key, operands);
  Descriptors descriptors;
  TE_TRY(descriptors.Make(key, operands));
  const float one = 1.f, beta = key.c ? 1.f : 0.f;
  const void* c = key.c ? operands.c : operands.out;  // not read where beta is 0, but it must be an address
  const cublasStatus_t status = Lt().cublasLtMatmul(
      handle, descriptors.matmul, &one, operands.rhs, descriptors.a, operands.lhs, descriptors.b, &beta, c,
      descriptors.d, operands.out, descriptors.d, &algo, operands.workspace, key.workspace, stream);
  if (status == CUBLAS_STATUS_SUCCESS) return {};
  return LtFailure(status, Describe(key).c_str());
}

Status Candidates(cublasLtHandle_t handle, const GemmKey& key, Algos* algos) {
  bool has_own;
  TE_TRY(HasOwn(key, &has_own));
  if (has_own && !key.tune) {
    algos->push_back(OwnAlgo());
    return {};
  }
  Descriptors descriptors;
  TE_TRY(descriptors.Make(key, {}));
  const cublasStatus_t status = Heuristic(handle, descriptors, key.workspace, algos);
  if (algos->empty())
    return {
        Status::kUnimplemented,
        Format(
            "te_gemm: cuBLASLt has no algorithm for %s on this GPU, of compute capability %s (status %d, %s)",
            Describe(key).c_str(), Capability().c_str(), int(status), StatusName(status))};
  if (key.tune) TE_TRY(AddRelatives(handle, key, descriptors, algos));
  if (has_own) algos->insert(algos->begin(), OwnAlgo());  // behind the rest, whose relatives it has not
  return {};
}

}  // namespace te
