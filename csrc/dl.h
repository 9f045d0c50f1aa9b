// CUDA libraries are found at run time: the extension links none of them and knows no fixed path.
// Order: already loaded in this process (the JAX CUDA plugin loads those of the nvidia wheels), the path
// given from Python (the wheels' folders), then plain dlopen (LD_LIBRARY_PATH, ldconfig).
#pragma once

#include <dlfcn.h>

#include <map>
#include <mutex>
#include <string>

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

struct Paths {
  std::mutex mutex;
  std::map<std::string, std::string> by_soname;
};

inline Paths& LibraryPaths() {
  static auto* paths = new Paths;  // never destroyed: see Registry()
  return *paths;
}

inline void SetLibraryPath(const std::string& soname, const std::string& path) {
  std::lock_guard<std::mutex> lock(LibraryPaths().mutex);
  LibraryPaths().by_soname[soname] = path;
}

inline Library Open(const std::string& soname) {
  std::lock_guard<std::mutex> lock(LibraryPaths().mutex);
  Library library;
  library.handle = dlopen(soname.c_str(), RTLD_NOW | RTLD_LOCAL | RTLD_NOLOAD);
  if (library.handle) return library;

  std::string reasons;
  const auto try_open = [&](const std::string& path) {
    library.handle = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
    if (!library.handle) reasons += std::string(reasons.empty() ? "" : "; ") + dlerror();
    return library.handle != nullptr;
  };
  const auto& by_soname = LibraryPaths().by_soname;
  const auto path = by_soname.find(soname);
  if (path != by_soname.end() && try_open(path->second)) return library;
  if (try_open(soname)) return library;
  library.error =
      "cannot load " + soname + " (" + reasons + "): install jax[cuda13] or put it on LD_LIBRARY_PATH";
  return library;
}

}  // namespace te::dl
