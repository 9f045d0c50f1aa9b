// What a launcher returns, and the macros that leave it with an error.
#pragma once

#include <cuda_runtime.h>

#include <cstdarg>
#include <cstdio>
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

// Returns Internal if a CUDA runtime call fails.
#define TE_CUDA(expr)                                                                                        \
  do {                                                                                                       \
    if (cudaError_t e_ = (expr); e_ != cudaSuccess) {                                                        \
      (void)cudaGetLastError(); /* said here: the next launch of this thread is not to blame */              \
      return ::te::Status{::te::Status::kInternal,                                                           \
                          ::te::Format("%s:%d: %s: %s", __FILE__, __LINE__, #expr, cudaGetErrorString(e_))}; \
    }                                                                                                        \
  } while (0)

// Ends a launcher: returns success, or the error of its last kernel launch and where it happened.
#define TE_LAUNCHED()            \
  do {                           \
    TE_CUDA(cudaGetLastError()); \
    return ::te::Status{};       \
  } while (0)
