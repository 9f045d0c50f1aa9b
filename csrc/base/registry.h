// The list of FFI handlers: a TE_HANDLER line of handlers.cc adds one when the library is loaded, module.cc
// reads it.
#pragma once

#include <vector>

#include "xla/ffi/api/c_api.h"

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
