// Kernels that start before the one ahead on the stream is over.
#pragma once

#include <type_traits>

#include "base/status.h"

namespace te {

// Launches a kernel that awaits the one ahead (AwaitPrevious). early: it starts before that one is over,
// where that one lets it (LetNextStart); only on Hopper, with code that does both. cluster: how many CTAs are
// one, along x.
template <typename Args>
Status LaunchBehind(cudaStream_t stream, bool early, void (*kernel)(Args), dim3 grid, dim3 block,
                    size_t shared, const std::type_identity_t<Args>& args, unsigned cluster = 1) {
  cudaLaunchAttribute attributes[2]{};
  attributes[0].id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attributes[0].val.programmaticStreamSerializationAllowed = early;
  attributes[1].id = cudaLaunchAttributeClusterDimension;
  attributes[1].val.clusterDim = {cluster, 1, 1};
  cudaLaunchConfig_t config{};
  config.gridDim = grid, config.blockDim = block, config.dynamicSmemBytes = shared, config.stream = stream;
  config.attrs = attributes, config.numAttrs = cluster > 1 ? 2 : 1;
  TE_CUDA(cudaLaunchKernelEx(&config, kernel, args));
  return {};
}

}  // namespace te
