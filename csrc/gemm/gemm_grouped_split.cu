#include "gemm/gemm_grouped.cuh"

namespace te::grouped {

Status RunSplit(cudaStream_t stream, const KernelArgs& args) { return LaunchFp8<Sums::kSplit>(stream, args); }

}  // namespace te::grouped
