// te_jax._cuda, libte_jax.so for Python: hands every registered FFI handler to Python as a capsule, and
// answers what this machine has. Importing it needs no driver, no GPU and no CUDA library.

#include "base/module.h"

#include <cuda_runtime.h>
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>

#include "base/registry.h"
#include "xla/ffi/api/c_api.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace te {
namespace {

nb::capsule Capsule(XLA_FFI_Handler* handler) { return nb::capsule(reinterpret_cast<void*>(handler)); }

// {target name: {stage: capsule}}, the form that jax.ffi.register_ffi_target takes.
nb::dict Registrations() {
  nb::dict targets;
  for (const Handler& handler : Registry()) {
    nb::dict stages;
    stages["execute"] = Capsule(handler.execute);
    if (handler.initialize) stages["initialize"] = Capsule(handler.initialize);
    targets[handler.name] = stages;
  }
  return targets;
}

// Library versions as these libraries number them; None with a reason in "<name>_error" where one cannot be
// loaded. The architectures of the kernels, as in "80-real,90a-real".
nb::dict Versions() {
  nb::dict versions;
  versions["architectures"] = TE_JAX_CUDA_ARCHS;
  versions["cudart"] = CUDART_VERSION;  // linked in
  versions["driver"] = DriverVersion();
  const auto add = [&](const char* name, const dl::Library& library, const char* symbol) {
    auto* version = library.Symbol<size_t()>(symbol);
    versions[name] = version ? nb::object(nb::int_(version())) : nb::object(nb::none());
    versions[(std::string(name) + "_error").c_str()] =
        library.handle && !version ? std::string("no symbol ") + symbol : library.error;
  };
  add("cublaslt", CublasLt(), "cublasLtGetVersion");
  add("cudnn", Cudnn(), "cudnnGetVersion");
  return versions;
}

nb::list GemmPlanDicts() {
  nb::list plans;
  for (const GemmPlan& plan : GemmPlans()) {
    nb::dict d;
    d["device"] = plan.device;
    d["key"] = plan.key;
    d["tuned"] = plan.tuned;
    d["algo"] = plan.algo;
    d["algos"] = plan.algos;
    d["chosen"] = plan.chosen;
    d["ms"] = plan.ms;
    plans.append(d);
  }
  return plans;
}

}  // namespace
}  // namespace te

NB_MODULE(_cuda, m) {
  m.def("registrations", &te::Registrations);
  m.def("ffi_api_version", [] { return nb::make_tuple(XLA_FFI_API_MAJOR, XLA_FFI_API_MINOR); });
  m.def("set_library_path", &te::dl::SetLibraryPath, "soname"_a, "path"_a);
  m.def("versions", &te::Versions);
  m.def("peer_access", &te::PeerAccess);
  m.def("gemm_plans", &te::GemmPlanDicts);
  m.def("tune_all_gemms", &te::TuneAllGemms, "on"_a);
  m.def("check_gemm_plan", &te::CheckGemmPlan, "device"_a, "key"_a, "algo"_a);
  m.def("load_gemm_plan", &te::LoadGemmPlan, "device"_a, "key"_a, "algo"_a, "ms"_a);
  m.def("cudnn_plan_builds", &te::CudnnPlanBuilds);
  m.def("attention_workspace", &te::AttentionWorkspace, "kind"_a, "dtype"_a, "b"_a, "s"_a, "t"_a, "h"_a,
        "g"_a, "d"_a, "e"_a, "joined"_a, "interleaved"_a, "seq_major"_a, "segments"_a, "left"_a, "right"_a,
        "bottom_right"_a, "bias_b"_a, "bias_h"_a, "bias_f32"_a, "dbias"_a, "scale"_a, "dropout_rate"_a,
        "deterministic"_a, "top"_a);
  m.def("attention_fp8_workspace", &te::AttentionFp8Workspace, "kind"_a, "e5m2"_a, "b"_a, "s"_a, "t"_a, "h"_a,
        "g"_a, "d"_a, "causal"_a, "scale"_a);
}
