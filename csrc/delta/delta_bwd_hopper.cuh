// The walks of the backward pass on Hopper: as delta_hopper.cuh has the forward pass.
#pragma once

#include "delta/delta_bwd_walk.cuh"
#include "delta/delta_hopper.cuh"

namespace te::delta {

template <int kD, typename Gate, int kGroups>
__global__ void __launch_bounds__(kWalkThreads<kGroups>, 1) te_gated_delta_bwd_walk_hopper(const GradArgs a) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  extern __shared__ __align__(1024) uint8_t shared[];
  auto& s = *reinterpret_cast<HopperShared<kD, Gate, kGroups>*>(shared);
  LetNextStart();
  RunGradWalk<kD, kHopperStages<Gate, kGroups>, GroupProducts, Gate, kGroups>(
      a, s.tiles, WalkingGroup(),
      [&](auto&& walk) { TakePart<kGroups, Gate::kByChannel ? 208 : 192>(s, walk); });
#else
  __trap();  // compiled only for Hopper
#endif
}

}  // namespace te::delta
