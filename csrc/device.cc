#include "device.h"

#include "module.h"

namespace te {

int DriverVersion() {
  int version = 0;
  return cudaDriverGetVersion(&version) == cudaSuccess ? version : 0;
}

Status ExpectHopper(const char* op) {
  int device = 0, major = 0, minor = 0;
  TE_CUDA(cudaGetDevice(&device));
  TE_CUDA(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device));
  TE_CUDA(cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device));
  if (major == 9 && minor == 0) return {};
  return {Status::kUnimplemented,
          Format("%s: needs compute capability 9.0 (Hopper), this GPU has %d.%d", op, major, minor)};
}

}  // namespace te
