// What is asked of the devices without touching them.
#pragma once

#include "base/status.h"

namespace te {

// Whether the current device is a Hopper (9.0).
Status IsHopper(bool* is_hopper);

// How many multiprocessors it has.
Status Multiprocessors(int* count);

// Unimplemented, naming the op, unless the current device is a Hopper.
Status ExpectHopper(const char* op);

// Whether this process uses the device. To open a context on another takes it hundreds of MB.
inline bool HasContext(int device) {
  using GetState = int (*)(int device, unsigned* flags, int* active);  // cuDevicePrimaryCtxGetState
  void* symbol = nullptr;
  cudaDriverEntryPointQueryResult found;
  if (cudaGetDriverEntryPointByVersion("cuDevicePrimaryCtxGetState", &symbol, 12000, cudaEnableDefault,
                                       &found) != cudaSuccess ||
      !symbol)
    return false;
  unsigned flags = 0;
  int active = 0;
  return reinterpret_cast<GetState>(symbol)(device, &flags, &active) == 0 && active;
}

}  // namespace te
