// What a launcher returns, and the macros that leave it with an error.
#pragma once

#include <cuda_runtime.h>

#include <cstdarg>
#include <cstdio>
#include <cstring>
#include <string>

namespace te {

struct [[nodiscard]] Status {
  enum Code { kOk = 0, kInvalidArgument = 3, kUnimplemented = 12, kInternal = 13 };  // XLA's numbers
  Code code = kOk;
  std::string message;

  bool failure() const { return code != kOk; }
};

// printf into a string; the compiler checks the arguments.
__attribute__((format(printf, 1, 2))) inline std::string Format(const char* format, ...) {
  char text[512];
  va_list args;
  va_start(args, format);
  std::vsnprintf(text, sizeof(text), format, args);
  va_end(args);
  return text;
}

// The compute capability of the current device, 90 of 9.0.
inline cudaError_t GetCapability(int* number) {
  int device = 0, major = 0, minor = 0;
  cudaError_t error = cudaGetDevice(&device);
  if (!error) error = cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device);
  if (!error) error = cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device);
  *number = major * 10 + minor;
  return error;
}

// As in 9.0; "unknown" where CUDA does not say.
inline std::string Capability() {
  int number = 0;
  if (GetCapability(&number) == cudaSuccess) return Format("%d.%d", number / 10, number % 10);
  (void)cudaGetLastError();
  return "unknown";
}

// What a call of the CUDA runtime that failed ends as.
inline Status CudaFailure(cudaError_t error, const char* file, int line, const char* call) {
  (void)cudaGetLastError();                     // said here: the next launch of this thread is not to blame
  const char* slash = std::strrchr(file, '/');  // the folders are of the machine that compiled it
  const std::string text =
      Format("%s:%d: %s: %s", slash ? slash + 1 : file, line, call, cudaGetErrorString(error));
  if (error != cudaErrorNoKernelImageForDevice) return {Status::kInternal, text};
  return {Status::kUnimplemented,
          text + "; te_jax was built without code of this kernel for compute capability " + Capability()};
}

}  // namespace te

// Returns InvalidArgument from the launcher:
//   TE_CHECK(k % 16 == 0, "te_gemm: k is %ld, FP8 needs a multiple of 16", k);
#define TE_CHECK(cond, ...)                                                                      \
  do {                                                                                           \
    if (!(cond)) return ::te::Status{::te::Status::kInvalidArgument, ::te::Format(__VA_ARGS__)}; \
  } while (0)

// Returns the Status of an expression if it is an error.
#define TE_TRY(expr)                                       \
  do {                                                     \
    if (::te::Status s_ = (expr); s_.failure()) return s_; \
  } while (0)

// Returns Internal if a CUDA runtime call fails; Unimplemented if it is for want of code for this GPU.
#define TE_CUDA(expr)                                                                                        \
  do {                                                                                                       \
    if (cudaError_t e_ = (expr); e_ != cudaSuccess) return ::te::CudaFailure(e_, __FILE__, __LINE__, #expr); \
  } while (0)

// Ends a launcher: returns success, or the error of its last kernel launch and where it happened.
#define TE_LAUNCHED()            \
  do {                           \
    TE_CUDA(cudaGetLastError()); \
    return ::te::Status{};       \
  } while (0)
