// The activation of the MLP and its derivative, straight to FP8 in both layouts. Bytes per element of the
// result in bf16: forward 2 read (4 where gated), 2 written; backward 4 read (3 where gated, for there are
// twice as many results), 2 written; 2 more where the result is wanted in x's type too.

#include "activation.cuh"
#include "tile.cuh"

namespace te {
namespace {

ffi::Error LaunchActivation(cudaStream_t stream, Arg x, Arg scale, Ret y, Ret data, Ret data_t, Ret amax,
                            int64_t kind, double limit, double alpha, double glu_linear_offset) {
  const char* op = "te_activation_fwd";
  SlotAxes of;
  TE_TRY(GetSlotAxes(op, x, 2, &of));
  const TileBuffers buffers{scale, "y", &y, data, data_t, amax, nullptr};
  TE_TRY(ExpectTiles(op, x, of.m, {of.f}, 1, buffers));
  Activation act;
  TE_TRY(MakeActivation(op, kind, of.a, limit, alpha, glu_linear_offset, &act));
  if (x.element_count() == 0) return ffi::Error::Success();
  return DispatchSlots(x, of.a, [&]<typename T, int kA>() -> ffi::Error {
    const ActivationSource<T, kA> source{Data<T>(x), unsigned(of.f), act};
    const auto results = TileResultsOf<T>(of.m.count(), of.f, buffers);
    return LaunchTiles(op, stream, source, results, Aligned(source.x));
  });
}

ffi::Error LaunchGradient(cudaStream_t stream, Arg dy, Arg x, Arg scale, Ret dx, Ret data, Ret data_t,
                          Ret amax, Ret dbias, int64_t kind, double limit, double alpha,
                          double glu_linear_offset) {
  const char* op = "te_activation_bwd";
  SlotAxes of;
  TE_TRY(GetSlotAxes(op, x, 2, &of));
  const TileBuffers buffers{scale, "dx", &dx, data, data_t, amax, &dbias};
  TE_TRY(Expect(op, {{"dy", &dy, x.element_type(), of.m + Axes{of.f}}}));
  TE_TRY(ExpectTiles(op, x, of.m, {of.a, of.f}, of.a, buffers));
  Activation act;
  TE_TRY(MakeActivation(op, kind, of.a, limit, alpha, glu_linear_offset, &act));
  if (x.element_count() == 0) return ffi::Error::Success();
  return DispatchSlots(x, of.a, [&]<typename T, int kA>() -> ffi::Error {
    const GradientSource<T, kA> source{Data<T>(dy), Data<T>(x), unsigned(of.f), act};
    const auto results = TileResultsOf<T>(of.m.count(), of.f, buffers);
    const bool aligned = Aligned(source.dy) && Aligned(source.x);
    return LaunchTiles(op, stream, source, results, aligned);
  });
}

}  // namespace

TE_HANDLER(te_activation_fwd, LaunchActivation,
           Bind()
               .Ctx<Stream>()
               .Arg<Arg>()  // x: m... a f
               .Arg<Arg>()  // scale?: f32 []
               .Ret<Arg>()  // y?: m... f
               .Ret<Arg>()  // data?: m... f
               .Ret<Arg>()  // data_t?: f m...
               .Ret<Arg>()  // amax?: partial [ceil(m / 256), ceil(f / 64)]
               .Attr<int64_t>("kind")
               .Attr<double>("limit")
               .Attr<double>("alpha")
               .Attr<double>("glu_linear_offset"));

TE_HANDLER(te_activation_bwd, LaunchGradient,
           Bind()
               .Ctx<Stream>()
               .Arg<Arg>()  // dy: m... f
               .Arg<Arg>()  // x: m... a f
               .Arg<Arg>()  // scale?: f32 []
               .Ret<Arg>()  // dx?: m... a f
               .Ret<Arg>()  // data?: m... a f
               .Ret<Arg>()  // data_t?: a f m...
               .Ret<Arg>()  // amax?: partial [ceil(m / 256), ceil(f / 64)]
               .Ret<Arg>()  // dbias?: partial [ceil(m / 256), a, f]
               .Attr<int64_t>("kind")
               .Attr<double>("limit")
               .Attr<double>("alpha")
               .Attr<double>("glu_linear_offset"));

}  // namespace te
