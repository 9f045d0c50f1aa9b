// TO BE DELETED with expect.h: attention*.cc and cudnn_*.cc alone include these two. tensor.h, status.h,
// check.h and handler.h stand in their place. Shared by every op: operands, error returns, dtype dispatch,
// registration. Host code that loads a CUDA library or shows a function to Python declares it in module.h.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>
#include <cuda_runtime.h>

#include <cstdarg>
#include <cstdint>
#include <cstdio>
#include <initializer_list>
#include <string>

#include "registry.h"
#include "xla/ffi/api/ffi.h"

namespace te {
inline namespace old {

namespace ffi = xla::ffi;
using Stream = ffi::PlatformStream<cudaStream_t>;
using Arg = ffi::AnyBuffer;               // operand
using Ret = ffi::Result<ffi::AnyBuffer>;  // result; bound as .Ret<Arg>()

// An optional operand or result that is absent arrives with 0 elements.
inline bool Present(const Arg& a) { return a.element_count() != 0; }
inline bool Present(Ret& r) { return r->element_count() != 0; }

// The pointer as T, nullptr where absent. (typed_data<__nv_bfloat16>() does not compile: XLA knows no CUDA
// types.)
template <typename T>
T* Data(const Arg& a) {
  return Present(a) ? static_cast<T*>(a.untyped_data()) : nullptr;
}
template <typename T>
T* Data(Ret& r) {
  return Present(r) ? static_cast<T*>(r->untyped_data()) : nullptr;
}

// printf into a string; the compiler checks the arguments.
__attribute__((format(printf, 1, 2))) inline std::string Format(const char* format, ...) {
  char text[512];
  va_list args;
  va_start(args, format);
  std::vsnprintf(text, sizeof(text), format, args);
  va_end(args);
  return text;
}

// "[4, 2048, 4096]", for error messages.
inline std::string Shape(const Arg& a) {
  std::string text = "[";
  for (int64_t dim : a.dimensions()) text += (text.size() > 1 ? ", " : "") + std::to_string(dim);
  return text + "]";
}

// Returns InvalidArgument from the handler:
//   TE_CHECK(k % 16 == 0, "te_gemm: k is %ld, FP8 needs a multiple of 16", k);
#define TE_CHECK(cond, ...)                                                            \
  do {                                                                                 \
    if (!(cond)) return ::xla::ffi::Error::InvalidArgument(::te::Format(__VA_ARGS__)); \
  } while (0)

// Returns the error of an expression of type ffi::Error, if it is one.
#define TE_TRY(expr)                                            \
  do {                                                          \
    if (::xla::ffi::Error e_ = (expr); e_.failure()) return e_; \
  } while (0)

// Returns Internal if a CUDA runtime call fails.
#define TE_CUDA(expr)                                                                        \
  do {                                                                                       \
    if (cudaError_t e_ = (expr); e_ != cudaSuccess)                                          \
      return ::xla::ffi::Error::Internal(                                                    \
          ::te::Format("%s:%d: %s: %s", __FILE__, __LINE__, #expr, cudaGetErrorString(e_))); \
  } while (0)

// Fills these with zero bytes.
inline ffi::Error Zero(cudaStream_t stream, std::initializer_list<const Arg*> arrays) {
  for (const Arg* array : arrays)
    if (Present(*array)) TE_CUDA(cudaMemsetAsync(array->untyped_data(), 0, array->size_bytes(), stream));
  return ffi::Error::Success();
}

// Ends a launcher: returns Success, or the error of its last kernel launch and where it happened.
#define TE_LAUNCHED()                    \
  do {                                   \
    TE_CUDA(cudaGetLastError());         \
    return ::xla::ffi::Error::Success(); \
  } while (0)

// Runs `fn.operator()<T>()` with the CUDA type of `dtype`: float, __nv_bfloat16 or __half.
template <typename Fn>
ffi::Error DispatchFloat(ffi::DataType dtype, Fn&& fn) {
  switch (dtype) {
    case ffi::F32:
      return fn.template operator()<float>();
    case ffi::BF16:
      return fn.template operator()<__nv_bfloat16>();
    case ffi::F16:
      return fn.template operator()<__half>();
    default:
      return ffi::Error::InvalidArgument(Format("expected f32, bf16 or f16, got dtype %d", int(dtype)));
  }
}

}  // namespace old
}  // namespace te

// Defines the FFI handler `name` and registers it. In namespace te, at file scope:
//   TE_HANDLER(te_norm_fwd, Launch, Bind().Ctx<Stream>().Arg<Arg>().Ret<Arg>().Attr<double>("eps"));
// Every handler may be captured into a CUDA graph: it does not allocate, synchronize or build plans.
#define TE_HANDLER(name, execute, ...)                                \
  XLA_FFI_DEFINE_HANDLER(name, execute, ::xla::ffi::Ffi::__VA_ARGS__, \
                         {::xla::ffi::Traits::kCmdBufferCompatible}); \
  [[maybe_unused]] static const bool name##_registered = ::te::Register({#name, name, nullptr})

// The same with an initialize stage, which runs before execution, is never captured and may build plans. Both
// functions take the same operands, results and attributes; the binding starts after Bind():
//   TE_HANDLER_INIT(te_gemm, Execute, Initialize, .Ctx<Stream>().Arg<Arg>().Ret<Arg>());
#define TE_HANDLER_INIT(name, execute, initialize, ...)                                                 \
  XLA_FFI_DEFINE_HANDLER(name, execute, ::xla::ffi::Ffi::Bind() __VA_ARGS__,                            \
                         {::xla::ffi::Traits::kCmdBufferCompatible});                                   \
  XLA_FFI_DEFINE_HANDLER(name##_initialize, initialize, ::xla::ffi::Ffi::BindInitialize() __VA_ARGS__); \
  [[maybe_unused]] static const bool name##_registered = ::te::Register({#name, name, name##_initialize})
