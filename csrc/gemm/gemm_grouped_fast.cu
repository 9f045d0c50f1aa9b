#include "gemm/gemm_grouped.cuh"

namespace te::grouped {

Status RunFast(cudaStream_t stream, const KernelArgs& args) {
  if (args.p.lhs == BF16) return Launch<Factors::kBF16, Sums::kFast>(stream, args);
  if (args.p.lhs == F16) return Launch<Factors::kF16, Sums::kFast>(stream, args);
  return LaunchFp8<Sums::kFast>(stream, args);
}

}  // namespace te::grouped
