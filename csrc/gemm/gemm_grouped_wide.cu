#include "gemm/gemm_grouped.cuh"

namespace te::grouped {
namespace {

template <Factors kFactors>
Status LaunchWide(cudaStream_t stream, const KernelArgs& args) {
  return args.p.wgrad ? Launch<kFactors, Sums::kFast, Layout::kBothAcross>(stream, args)
                      : Launch<kFactors, Sums::kFast, Layout::kRightAcross>(stream, args);
}

}  // namespace

Status RunWide(cudaStream_t stream, const KernelArgs& args) {
  return args.p.lhs == BF16 ? LaunchWide<Factors::kBF16>(stream, args)
                            : LaunchWide<Factors::kF16>(stream, args);
}

}  // namespace te::grouped
