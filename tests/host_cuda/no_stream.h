// Stands for XLA's stream of a call: jax's CPU has none.
#pragma once
#include <optional>

#include "xla/ffi/api/ffi.h"

namespace host_cuda {
struct NoStream {};
}  // namespace host_cuda

template <>
struct xla::ffi::CtxDecoding<host_cuda::NoStream> {
  using Type = cudaStream_t;
  static std::optional<Type> Decode(const XLA_FFI_Api*, XLA_FFI_ExecutionContext*, DiagnosticEngine&) {
    return Type{};
  }
};
