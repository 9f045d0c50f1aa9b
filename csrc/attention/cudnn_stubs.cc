// The cuDNN entry points that cudnn-frontend (header-only) calls, as forwarders that look the function up at
// first use: the extension has no DT_NEEDED on cuDNN. NV_CUDNN_FRONTEND_USE_DYNAMIC_LOADING would do the
// same, but it also opens libcudart.so.12 and .13 and throws if it finds both.

#include <cudnn.h>

#include "base/dl.h"
#include "base/module.h"

namespace te {

const dl::Library& Cudnn() {
  static auto* library = [] {
    // cuDNN looks these up by soname when it builds a plan: a wheel's copy must be loaded before. If one is
    // missing, the plan's error says so.
    dl::Open(TE_NVRTC);
    dl::Open(TE_CUBLASLT);
    return new dl::Library(dl::Open("libcudnn.so.9"));
  }();
  return *library;
}

}  // namespace te

// `missing` is returned where cuDNN, or this function of it, is absent.
#define TE_FORWARD(ret, name, missing, params, args)                           \
  extern "C" __attribute__((visibility("hidden"))) ret name params {           \
    static auto* const function = te::Cudnn().Symbol<decltype(::name)>(#name); \
    return function ? function args : missing;                                 \
  }
#define TE_FORWARD_STATUS(name, params, args) \
  TE_FORWARD(cudnnStatus_t, name, CUDNN_STATUS_NOT_INITIALIZED, params, args)

TE_FORWARD_STATUS(cudnnCreate, (cudnnHandle_t * h), (h))
TE_FORWARD_STATUS(cudnnSetStream, (cudnnHandle_t h, cudaStream_t s), (h, s))
TE_FORWARD_STATUS(cudnnGetStream, (cudnnHandle_t h, cudaStream_t* s), (h, s))
TE_FORWARD_STATUS(cudnnBackendCreateDescriptor, (cudnnBackendDescriptorType_t t, cudnnBackendDescriptor_t* d),
                  (t, d))
TE_FORWARD_STATUS(cudnnBackendDestroyDescriptor, (cudnnBackendDescriptor_t d), (d))
TE_FORWARD_STATUS(cudnnBackendFinalize, (cudnnBackendDescriptor_t d), (d))
TE_FORWARD_STATUS(cudnnBackendSetAttribute,
                  (cudnnBackendDescriptor_t d, cudnnBackendAttributeName_t n, cudnnBackendAttributeType_t t,
                   int64_t count, const void* p),
                  (d, n, t, count, p))
TE_FORWARD_STATUS(cudnnBackendGetAttribute,
                  (cudnnBackendDescriptor_t const d, cudnnBackendAttributeName_t n,
                   cudnnBackendAttributeType_t t, int64_t requested, int64_t* count, void* p),
                  (d, n, t, requested, count, p))
TE_FORWARD_STATUS(cudnnBackendExecute,
                  (cudnnHandle_t h, cudnnBackendDescriptor_t p, cudnnBackendDescriptor_t v), (h, p, v))
TE_FORWARD(size_t, cudnnGetVersion, 0, (void), ())
TE_FORWARD(const char*, cudnnGetErrorString, "cuDNN is not loaded", (cudnnStatus_t s), (s))

extern "C" __attribute__((visibility("hidden"))) void cudnnGetLastErrorString(char* message, size_t size) {
  static auto* const function =
      te::Cudnn().Symbol<decltype(::cudnnGetLastErrorString)>("cudnnGetLastErrorString");
  if (function) {
    function(message, size);
  } else if (size) {
    message[0] = '\0';
  }
}
