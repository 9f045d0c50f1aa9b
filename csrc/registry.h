// The list of FFI handlers. A TE_HANDLER line fills it when the library is loaded, module.cc reads it:
// a new op needs no other entry.
#pragma once

#include <vector>

#include "xla/ffi/api/ffi.h"

namespace te {

struct Handler {
  const char* name;  // FFI target, primitive and HLO name
  XLA_FFI_Handler* execute;
  XLA_FFI_Handler* initialize;  // nullptr: no such stage
};

// Never destroyed: XLA may still run a handler while the process exits.
inline std::vector<Handler>& Registry() {
  static auto* handlers = new std::vector<Handler>;
  return *handlers;
}

inline bool Register(const Handler& handler) {
  Registry().push_back(handler);
  return true;
}

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
