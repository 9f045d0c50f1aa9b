// Launchers as handlers of XLA's FFI. Nothing but the files that register handlers includes this header.
#pragma once

#include <utility>

#include "base/registry.h"
#include "base/tensor.h"
#include "xla/ffi/api/ffi.h"

namespace te::ffi_adapter {

namespace ffi = xla::ffi;
using Stream = ffi::PlatformStream<cudaStream_t>;

// A launcher's parameter from what XLA gives for it.
inline Tensor TensorOf(const ffi::AnyBuffer& b) {
  return {b.untyped_data(), Type(b.element_type()), b.dimensions().begin(), int64_t(b.dimensions().size())};
}
inline Arg Parameter(ffi::AnyBuffer& b) { return {TensorOf(b)}; }
inline Ret Parameter(ffi::Result<ffi::AnyBuffer>& b) { return {TensorOf(*b)}; }
inline Rets Parameter(ffi::RemainingRets& rets) {
  Rets all;
  for (size_t i = 0; i < rets.size(); ++i) all.push_back({TensorOf(**rets.get<ffi::AnyBuffer>(i))});
  return all;
}
template <typename T>
T Parameter(T& other) {
  return other;
}

inline ffi::Error ErrorOf(const Status& status) {
  return status.failure() ? ffi::Error(ffi::ErrorCode(status.code), status.message) : ffi::Error::Success();
}

// Binds the launcher's parameters P in turn, attributes to the next of `names`.
template <ffi::ExecutionStage kStage>
auto* Bind(auto&& binding, const char* const*, auto run) {
  if constexpr (kStage == ffi::ExecutionStage::kExecute)
    return binding.To(run, {ffi::Traits::kCmdBufferCompatible}).release();
  else
    return binding.To(run).release();
}
template <ffi::ExecutionStage kStage, typename P, typename... Rest>
auto* Bind(auto&& binding, const char* const* names, auto run) {
  if constexpr (std::is_same_v<P, cudaStream_t>)
    return Bind<kStage, Rest...>(std::move(binding).template Ctx<Stream>(), names, run);
  else if constexpr (std::is_same_v<P, Arg>)
    return Bind<kStage, Rest...>(std::move(binding).template Arg<ffi::AnyBuffer>(), names, run);
  else if constexpr (std::is_same_v<P, Ret>)
    return Bind<kStage, Rest...>(std::move(binding).template Ret<ffi::AnyBuffer>(), names, run);
  else if constexpr (std::is_same_v<P, Rets>)
    return Bind<kStage, Rest...>(std::move(binding).RemainingRets(), names, run);
  else
    return Bind<kStage, Rest...>(std::move(binding).template Attr<P>(*names), names + 1, run);
}

template <ffi::ExecutionStage kStage, typename... P>
auto* MakeHandler(Status (*launch)(P...), std::initializer_list<const char*> names) {
  return Bind<kStage, P...>(ffi::Ffi::Bind<kStage>(), names.begin(),
                            [launch](auto... given) { return ErrorOf(launch(Parameter(given)...)); });
}
template <ffi::ExecutionStage kStage, typename... P>
auto* MakeHandler(Status (*launch)(Stage, P...), std::initializer_list<const char*> names) {
  const auto run = [launch](auto... given) {
    const Stage stage = kStage == ffi::ExecutionStage::kExecute ? Stage::kExecute : Stage::kInitialize;
    return ErrorOf(launch(stage, Parameter(given)...));
  };
  return Bind<kStage, P...>(ffi::Ffi::Bind<kStage>(), names.begin(), run);
}

}  // namespace te::ffi_adapter

#define TE_FFI_HANDLER(stage, launch, ...)                                                        \
  +[](XLA_FFI_CallFrame* frame) {                                                                 \
    static auto* handler =                                                                        \
        ::te::ffi_adapter::MakeHandler<::xla::ffi::ExecutionStage::stage>(launch, {__VA_ARGS__}); \
    return handler->Call(frame);                                                                  \
  }

// Registers a launcher as the FFI target `name`, its parameters as stream, operands, results and attributes
// of the names that follow. At file scope:
//   TE_HANDLER(te_rope, LaunchRope, "consecutive", "inverse", "turned");
// Every handler may be captured into a CUDA graph: it does not allocate, synchronize or build plans.
#define TE_HANDLER(name, launch, ...)                    \
  [[maybe_unused]] static const bool name##_registered = \
      ::te::Register({#name, TE_FFI_HANDLER(kExecute, launch, __VA_ARGS__), nullptr})

// Registers a launcher whose first parameter is a Stage, as TE_HANDLER does, and its kInitialize as the FFI's
// stage of that name.
#define TE_HANDLER_INIT(name, launch, ...)                                  \
  [[maybe_unused]] static const bool name##_registered =                    \
      ::te::Register({#name, TE_FFI_HANDLER(kExecute, launch, __VA_ARGS__), \
                      TE_FFI_HANDLER(kInitialize, launch, __VA_ARGS__)})
