// The activation of the MLP and its derivative, in x's type, straight to FP8 with a scale for each block of
// 128, in both layouts (block_tile.cuh). Bytes per element are those of te_activation_* without a wide
// result.

#include "activation.cuh"
#include "block_tile.cuh"

namespace te {
namespace {

// The values of a source of activation.cuh, rounded to its type.
template <typename Source>
struct Rounded : Source {
  using T = typename Source::Type;
  // Both slots' gradients stay in registers: room for one row on its way, and of f32 for half as many
  // threads.
  static constexpr int kInFlight = Source::kSlots > 1                  ? 1
                                   : sizeof(typename Source::Raw) > 32 ? 2
                                                                       : kBlockRows;
  static constexpr int kCtas = Source::kSlots * sizeof(T) > 4 ? 1 : 2;
  static constexpr bool kSquare = false;

  __device__ __forceinline__ void Results(const typename Source::Raw& raw,
                                          Vec<T, 8> (&x)[Source::kSlots]) const {
    float f[Source::kSlots][8];
    Source::Values(raw, f);
#pragma unroll
    for (int s = 0; s < Source::kSlots; ++s) x[s] = Round<T>(f[s]);
  }
};

ffi::Error LaunchActivation(cudaStream_t stream, Arg x, Ret data, Ret data_t, Ret scale_inv, Ret scale_inv_t,
                            int64_t kind, double limit, double alpha, double glu_linear_offset, bool power_2,
                            double epsilon) {
  const char* op = "te_activation_block_fwd";
  SlotAxes of;
  TE_TRY(GetSlotAxes(op, x, 3, &of));
  Activation act;
  TE_TRY(MakeActivation(op, kind, of.a, limit, alpha, glu_linear_offset, &act));
  BlockArgs a;
  const BlockBuffers buffers{data, data_t, scale_inv, scale_inv_t, nullptr};
  TE_TRY(GetBlockArgs(op, of.m, {}, of.f, buffers, &a));
  a.power_2 = power_2, a.epsilon = float(epsilon);
  if (x.element_count() == 0) return ffi::Error::Success();
  return DispatchSlots(x, of.a, [&]<typename T, int kA>() -> ffi::Error {
    const Rounded<ActivationSource<T, kA>> source{{Data<T>(x), a.q, act}};
    return LaunchBlocks(stream, source, a, Aligned(source.x));
  });
}

ffi::Error LaunchGradient(cudaStream_t stream, Arg dy, Arg x, Ret data, Ret data_t, Ret scale_inv,
                          Ret scale_inv_t, Ret dbias, int64_t kind, double limit, double alpha,
                          double glu_linear_offset, bool power_2, double epsilon) {
  const char* op = "te_activation_block_bwd";
  SlotAxes of;
  TE_TRY(GetSlotAxes(op, x, 3, &of));
  TE_TRY(Expect(op, {{"dy", &dy, x.element_type(), of.m + Axes{of.f}}}));
  Activation act;
  TE_TRY(MakeActivation(op, kind, of.a, limit, alpha, glu_linear_offset, &act));
  BlockArgs a;
  const BlockBuffers buffers{data, data_t, scale_inv, scale_inv_t, &dbias};
  TE_TRY(GetBlockArgs(op, of.m, {of.a}, of.f, buffers, &a));
  a.power_2 = power_2, a.epsilon = float(epsilon);
  if (x.element_count() == 0) return ffi::Error::Success();
  return DispatchSlots(x, of.a, [&]<typename T, int kA>() -> ffi::Error {
    const Rounded<GradientSource<T, kA>> source{{Data<T>(dy), Data<T>(x), a.q, act}};
    return LaunchBlocks(stream, source, a, Aligned(source.dy) && Aligned(source.x));
  });
}

}  // namespace

TE_HANDLER(te_activation_block_fwd, LaunchActivation,
           Bind()
               .Ctx<Stream>()
               .Arg<Arg>()  // x: m... m a f
               .Ret<Arg>()  // data?: m... m f
               .Ret<Arg>()  // data_t?: f m... m
               .Ret<Arg>()  // scale_inv?: f32 f/128 m... m
               .Ret<Arg>()  // scale_inv_t?: f32 m... m/128 f
               .Attr<int64_t>("kind")
               .Attr<double>("limit")
               .Attr<double>("alpha")
               .Attr<double>("glu_linear_offset")
               .Attr<bool>("power_2")
               .Attr<double>("epsilon"));

TE_HANDLER(te_activation_block_bwd, LaunchGradient,
           Bind()
               .Ctx<Stream>()
               .Arg<Arg>()  // dy: m... m f
               .Arg<Arg>()  // x: m... m a f
               .Ret<Arg>()  // data?: m... m a f
               .Ret<Arg>()  // data_t?: a f m... m
               .Ret<Arg>()  // scale_inv?: f32 a f/128 m... m
               .Ret<Arg>()  // scale_inv_t?: f32 m... m/128 a f
               .Ret<Arg>()  // dbias?: partial [*m * m/128, a, f]
               .Attr<int64_t>("kind")
               .Attr<double>("limit")
               .Attr<double>("alpha")
               .Attr<double>("glu_linear_offset")
               .Attr<bool>("power_2")
               .Attr<double>("epsilon"));

}  // namespace te
