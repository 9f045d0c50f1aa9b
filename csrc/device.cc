#include "device.h"

#include "module.h"

namespace te {

int DriverVersion() {
  int version = 0;
  return cudaDriverGetVersion(&version) == cudaSuccess ? version : 0;
}

namespace {
Status Capability(int* major, int* minor) {
  int device = 0;
  TE_CUDA(cudaGetDevice(&device));
  TE_CUDA(cudaDeviceGetAttribute(major, cudaDevAttrComputeCapabilityMajor, device));
  TE_CUDA(cudaDeviceGetAttribute(minor, cudaDevAttrComputeCapabilityMinor, device));
  return {};
}
}  // namespace

Status IsHopper(bool* out) {
  int major = 0, minor = 0;
  TE_TRY(Capability(&major, &minor));
  *out = major == 9 && minor == 0;
  return {};
}

Status ExpectHopper(const char* op) {
  int major = 0, minor = 0;
  TE_TRY(Capability(&major, &minor));
  if (major == 9 && minor == 0) return {};
  return {Status::kUnimplemented,
          Format("%s: needs compute capability 9.0 (Hopper), this GPU has %d.%d", op, major, minor)};
}

}  // namespace te
