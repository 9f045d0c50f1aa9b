// What module.cc shows to Python next to the FFI handlers, and the files of libte_jax.so that define it.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "base/dl.h"

#pragma GCC visibility push(default)
namespace te {

// device.cc: the newest CUDA version that the driver supports; 0: there is no driver.
int DriverVersion();

// device.cc: whether each GPU can read the memory of all others.
bool PeerAccess();

// cudnn_stubs.cc: libcudnn.so.9, opened at first use.
const dl::Library& Cudnn();

// gemm.cc: cuBLASLt, opened at first use.
const dl::Library& CublasLt();

// gemm_plan.cc: the plans made so far in this process.
struct GemmPlan {
  std::string device;  // its kind
  std::string key;     // m, n, k, dtypes, epilogue, accumulation, workspace
  bool tuned;          // timed or loaded, not the heuristic's first
  std::string algo;    // cuBLASLt's opaque 64 bytes, hexadecimal
  int64_t algos;       // candidates; 0 where it was loaded
  int64_t chosen;      // index of the one in use
  double ms;           // its median time; 0 where it was not timed
};
std::vector<GemmPlan> GemmPlans();

// gemm_plan.cc: whether GEMMs that run for the first time from here on are timed, whatever they ask for.
void TuneAllGemms(bool on);

// gemm_plan.cc: whether a device here is of that kind. Throws std::runtime_error where `key` or `algo` is not
// as GemmPlan has it, or where the tuner would not choose `algo` for it on that device: other algorithms of
// cuBLASLt may add up in fewer bits.
bool CheckGemmPlan(const std::string& device, const std::string& key, const std::string& algo);

// gemm_plan.cc: the choice, as CheckGemmPlan takes it, that a GEMM of this key takes when it first runs.
// Returns whether it will: not if it has run with another.
bool LoadGemmPlan(const std::string& device, const std::string& key, const std::string& algo, double ms);

// cudnn_graph.cc: how many cuDNN plans this process has built, failures included.
int64_t CudnnPlanBuilds();

// attention.cc: bytes of workspace that te_attention_fwd (kind "fwd") or te_attention_bwd ("bwd"), or one of
// their joined forms, needs on the current device; the arguments are what AttentionKey has. Builds and keeps
// the plan. Throws std::runtime_error with cuDNN's reason if there is none.
int64_t AttentionWorkspace(const std::string& kind, const std::string& dtype, int64_t b, int64_t s, int64_t t,
                           int64_t h, int64_t g, int64_t d, int64_t e, int64_t joined, bool interleaved,
                           bool seq_major, int64_t segments, int64_t left, int64_t right, bool bottom_right,
                           int64_t bias_b, int64_t bias_h, bool bias_f32, bool dbias, double scale,
                           double dropout_rate, bool deterministic, bool top);

// attention_fp8.cc: the same of te_attention_fp8_fwd ("fwd") or te_attention_fp8_bwd ("bwd"), whose gradients
// are E5M2, else E4M3.
int64_t AttentionFp8Workspace(const std::string& kind, bool e5m2, int64_t b, int64_t s, int64_t t, int64_t h,
                              int64_t g, int64_t d, bool causal, double scale);

}  // namespace te
#pragma GCC visibility pop
