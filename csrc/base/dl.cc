#include "base/dl.h"

#include <map>
#include <mutex>
#include <set>

namespace te::dl {
namespace {

struct Paths {
  std::mutex mutex;
  std::map<std::string, std::string> by_soname;
  std::set<std::string> opened;
};

Paths& LibraryPaths() {
  static auto* paths = new Paths;  // never destroyed: see Registry()
  return *paths;
}

}  // namespace

bool SetLibraryPath(const std::string& soname, const std::string& path) {
  std::lock_guard<std::mutex> lock(LibraryPaths().mutex);
  if (LibraryPaths().opened.count(soname)) return false;
  LibraryPaths().by_soname[soname] = path;
  return true;
}

Library Open(const std::string& soname) {
  std::lock_guard<std::mutex> lock(LibraryPaths().mutex);
  LibraryPaths().opened.insert(soname);
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
  library.error = "cannot load " + soname + " (" + reasons +
                  "): install jax[cuda" TE_CUDA_MAJOR "] or put it on LD_LIBRARY_PATH";
  return library;
}

}  // namespace te::dl
