#include "gemm/gemm_grouped.cuh"

namespace te::grouped {

Status RunBlocks(cudaStream_t stream, const KernelArgs& args) {
  return args.p.sums == Sums::kSquares ? LaunchFp8<Sums::kSquares>(stream, args)
                                       : LaunchFp8<Sums::kRows>(stream, args);
}

}  // namespace te::grouped
