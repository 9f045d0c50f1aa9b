#include "base/device.h"

#include "interface/module.h"

namespace te {

int DriverVersion() {
  int version = 0;
  return cudaDriverGetVersion(&version) == cudaSuccess ? version : 0;
}

bool IsHopper() {
  int number = 0;
  return GetCapability(&number) == cudaSuccess && number == 90;
}

Status ExpectHopper(const char* op) {
  int number = 0;
  TE_CUDA(GetCapability(&number));
  if (number == 90) return {};
  return {Status::kUnimplemented,
          Format("%s: needs compute capability 9.0 (Hopper), this GPU has %s", op, Capability().c_str())};
}

}  // namespace te
