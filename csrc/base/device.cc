#include "base/device.h"

#include "base/module.h"

namespace te {

int DriverVersion() {
  int version = 0;
  return cudaDriverGetVersion(&version) == cudaSuccess ? version : 0;
}

bool PeerAccess() {
  int devices = 0, can = 1;
  if (cudaGetDeviceCount(&devices) != cudaSuccess) return false;
  for (int i = 0; i < devices * devices; ++i)
    if (i / devices != i % devices &&
        (cudaDeviceCanAccessPeer(&can, i / devices, i % devices) != cudaSuccess || !can))
      return false;
  return true;
}

Status IsHopper(bool* is_hopper) {
  int number = 0;
  TE_CUDA(GetCapability(&number));
  *is_hopper = number == 90;
  return {};
}

Status Multiprocessors(int* count) {
  int device = 0;
  TE_CUDA(cudaGetDevice(&device));
  TE_CUDA(cudaDeviceGetAttribute(count, cudaDevAttrMultiProcessorCount, device));
  return {};
}

Status ExpectHopper(const char* op) {
  bool is_hopper = false;
  TE_TRY(IsHopper(&is_hopper));
  if (is_hopper) return {};
  return {Status::kUnimplemented,
          Format("%s: needs compute capability 9.0 (Hopper), this GPU has %s", op, Capability().c_str())};
}

}  // namespace te
