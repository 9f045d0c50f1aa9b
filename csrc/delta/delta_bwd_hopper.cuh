// The walks of the backward pass on Hopper: as delta_hopper.cuh has the forward pass.
#pragma once

#include "delta/delta_bwd_walk.cuh"
#include "delta/delta_hopper.cuh"

namespace te::delta {

struct HopperGradWalkArgs {
  GradArgs a;
  CUtensorMap q, k, v, dy, written, gradients_written, states, gradients;
};
// Where keys have more than kMostKeys channels.
Status RunGradHalves(cudaStream_t stream, const HopperGradWalkArgs& given);

// The tensor maps of the CTA's walk.
__device__ __forceinline__ WalkMaps MapsOfGradWalk(const HopperGradWalkArgs& given) {
  const bool is_back = int(blockIdx.z) < given.a.part.rows;
  return {&given.q, &given.k, is_back ? &given.dy : &given.v,
          is_back ? &given.gradients_written : &given.written, is_back ? &given.gradients : &given.states};
}

template <int kD, typename Gate, int kGroups>
__global__ void __launch_bounds__(kWalkThreads<kGroups>, 1)
    te_gated_delta_bwd_walk_hopper(const __grid_constant__ HopperGradWalkArgs given) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  extern __shared__ __align__(1024) uint8_t shared[];
  auto& s = *reinterpret_cast<HopperShared<kD, Gate, kGroups, true>*>(shared);
  LetNextStart();
  const WalkMaps maps = MapsOfGradWalk(given);
  constexpr int kStages = kHopperStages<Gate, kGroups, true>;
  const int group = WalkingGroup();
  RunGradWalk<GradSteps<kD, kStages, GroupProducts, true, Gate, kGroups>,
              GradSteps<kD, kStages, GroupProducts, false, Gate, kGroups>>(
      given.a, s.tiles, group, (int(blockIdx.y) * kGroups + group) * kSlab,
      [&](auto&& walk) { TakePart<kGroups, Gate::kByChannel ? 208 : 192>(s, walk, maps); });
#else
  __trap();  // compiled only for Hopper
#endif
}

}  // namespace te::delta
