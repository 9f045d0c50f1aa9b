// CUDA libraries are found at run time: libte_jax.so links none of them and knows no fixed path. Order:
// already loaded in this process (the JAX CUDA plugin loads the libraries of the nvidia wheels), the path
// that the caller gave (Python gives the wheels' folders), then plain dlopen (LD_LIBRARY_PATH, ldconfig).
#pragma once

#include <cuda_runtime_api.h>
#include <dlfcn.h>

#include <string>

// Of the CUDA that this is compiled with, whose libraries no other one's stand in for.
#if CUDART_VERSION >= 13000
#define TE_CUDA_MAJOR "13"
#else
#define TE_CUDA_MAJOR "12"
#endif
#define TE_CUBLASLT "libcublasLt.so." TE_CUDA_MAJOR
#define TE_NVRTC "libnvrtc.so." TE_CUDA_MAJOR

namespace te::dl {

struct Library {
  void* handle = nullptr;
  std::string error;  // why handle is nullptr

  // F is the function's type: Symbol<decltype(cublasLtCreate)>("cublasLtCreate"). nullptr if there is none.
  template <typename F>
  F* Symbol(const char* name) const {
    return handle ? reinterpret_cast<F*>(dlsym(handle, name)) : nullptr;
  }
};

// Where Open is to look for a library. Returns whether it will: not if it has looked for it before.
__attribute__((visibility("default"))) bool SetLibraryPath(const std::string& soname,
                                                           const std::string& path);

Library Open(const std::string& soname);

}  // namespace te::dl
