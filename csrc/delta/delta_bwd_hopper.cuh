// The walks of the backward pass on Hopper: as delta_hopper.cuh has the forward pass.
#pragma once

#include "delta/delta_bwd_walk.cuh"
#include "delta/delta_hopper.cuh"

namespace te::delta {

struct HopperGradWalkArgs {
  GradArgs a;
  CUtensorMap q, k, v, dy, written, gradients_written, states, gradients;
};

template <int kD, typename Gate, int kGroups>
__global__ void __launch_bounds__(kWalkThreads<kGroups>, 1)
    te_gated_delta_bwd_walk_hopper(const __grid_constant__ HopperGradWalkArgs given) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  extern __shared__ __align__(1024) uint8_t shared[];
  auto& s = *reinterpret_cast<HopperShared<kD, Gate, kGroups, true>*>(shared);
  LetNextStart();
  const bool is_back = int(blockIdx.z) < given.a.part.rows;
  const WalkMaps maps{&given.q, &given.k, is_back ? &given.dy : &given.v,
                      is_back ? &given.gradients_written : &given.written,
                      is_back ? &given.gradients : &given.states};
  RunGradWalk<kD, kHopperStages<Gate, kGroups, true>, GroupProducts, Gate, kGroups>(
      given.a, s.tiles, WalkingGroup(),
      [&](auto&& walk) { TakePart<kGroups, Gate::kByChannel ? 208 : 192>(s, walk, maps); });
#else
  __trap();  // compiled only for Hopper
#endif
}

}  // namespace te::delta
