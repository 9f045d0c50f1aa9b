// Stands for NVIDIA's header: the types that handlers name.
#pragma once
#include <library_types.h>

#include <cstdint>

struct cublasLtContext;
using cublasLtHandle_t = cublasLtContext*;
struct cublasLtMatmulAlgo_t {
  uint64_t data[8];
};
