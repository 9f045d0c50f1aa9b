// The C interface of include/te_jax.h: each op by its launcher, its partials, and its workspace.
#include "interface/c_api.h"

#include <unistd.h>

#include <exception>
#include <limits>

#include "base/dl.h"
#include "base/ops.h"
#include "base/partials.h"

namespace te::c_api {
namespace {

// WORKSPACE of te_jax/ops/gemm/dense.py: so plans are jax's.
constexpr int64_t kGemmWorkspace = int64_t{32} << 20;

// The caller's arrays by the names of their fields, and room for partials.
#define TE_ARRAY(name) call.Array(#name, a.name, kRequired)
#define TE_MAYBE(name) call.Array(#name, a.name, kOptional)
#define TE_MATRIX(name, need) call.Array(#name, a.name, need, kMatrixAlignment)

Status Quantize(Call& call, const te_jax_quantize_args& a) {
  const Tensor x = TE_ARRAY(x);
  const Axes m = Axes(x).First(a.split), n = Axes(x).From(a.split),
             partials = TilePartials(m.count(), n.count());
  return call.Launch(LaunchQuantize, x, TE_MAYBE(scale), TE_MAYBE(data), TE_MAYBE(data_t), TE_MAYBE(amax),
                     TE_MAYBE(dbias), TE_MAYBE(scale_inv), call.Partials(a.amax, partials),
                     call.Partials(a.dbias, partials.First(1) + n), a.split);
}

Status QuantizeBlock(Call& call, const te_jax_quantize_block_args& a) {
  call.NeedsHopper();
  const Tensor x = TE_ARRAY(x);
  const Axes rows = Axes(x).First(a.lead + 1), columns = Axes(x).From(a.lead + 1);
  call.Expect("epsilon", a.epsilon, 0);
  return call.Launch(LaunchQuantizeBlock, x, TE_MAYBE(data), TE_MAYBE(data_t), TE_MAYBE(scale_inv),
                     TE_MAYBE(scale_inv_t), TE_MAYBE(block_inv), TE_MAYBE(block_inv_t), TE_MAYBE(dbias),
                     call.Partials(a.dbias, Axes{BlockPartials(rows)} + columns), a.lead, a.square, a.power_2,
                     a.epsilon);
}

// The axes of x [m..., a, f], and of its partials.
Axes Rows(const Tensor& x) { return Axes(x).Without(2); }
Axes Slots(const Tensor& x) { return Axes(x).From(x.rank - 2); }
Axes SlotPartials(const Tensor& x) { return TilePartials(Rows(x).count(), Axes(x).last()); }

template <typename Args>
void ExpectActivation(Call& call, const Args& a) {
  const double any = std::numeric_limits<double>::lowest();
  call.Expect("limit", a.limit, any);
  call.Expect("alpha", a.alpha, any);
  call.Expect("glu_linear_offset", a.glu_linear_offset, any);
}

Status ActivationFwd(Call& call, const te_jax_activation_fwd_args& a) {
  const Tensor x = TE_ARRAY(x);
  ExpectActivation(call, a);
  return call.Launch(LaunchActivationFwd, x, TE_MAYBE(scale), TE_MAYBE(y), TE_MAYBE(data), TE_MAYBE(data_t),
                     TE_MAYBE(amax), TE_MAYBE(scale_inv), call.Partials(a.amax, SlotPartials(x)), a.kind,
                     a.limit, a.alpha, a.glu_linear_offset);
}

Status ActivationBwd(Call& call, const te_jax_activation_bwd_args& a) {
  const Tensor x = TE_ARRAY(x);
  const Axes partials = SlotPartials(x);
  ExpectActivation(call, a);
  return call.Launch(LaunchActivationBwd, TE_ARRAY(dy), x, TE_MAYBE(scale), TE_MAYBE(dx), TE_MAYBE(data),
                     TE_MAYBE(data_t), TE_MAYBE(amax), TE_MAYBE(dbias), TE_MAYBE(scale_inv),
                     call.Partials(a.amax, partials), call.Partials(a.dbias, partials.First(1) + Slots(x)),
                     a.kind, a.limit, a.alpha, a.glu_linear_offset);
}

Status ActivationBlockFwd(Call& call, const te_jax_activation_block_fwd_args& a) {
  call.NeedsHopper();
  ExpectActivation(call, a);
  call.Expect("epsilon", a.epsilon, 0);
  return call.Launch(LaunchActivationBlockFwd, TE_ARRAY(x), TE_MAYBE(data), TE_MAYBE(data_t),
                     TE_MAYBE(scale_inv), TE_MAYBE(scale_inv_t), a.kind, a.limit, a.alpha,
                     a.glu_linear_offset, a.power_2, a.epsilon);
}

Status ActivationBlockBwd(Call& call, const te_jax_activation_block_bwd_args& a) {
  call.NeedsHopper();
  const Tensor x = TE_ARRAY(x);
  ExpectActivation(call, a);
  call.Expect("epsilon", a.epsilon, 0);
  return call.Launch(LaunchActivationBlockBwd, TE_ARRAY(dy), x, TE_MAYBE(data), TE_MAYBE(data_t),
                     TE_MAYBE(scale_inv), TE_MAYBE(scale_inv_t), TE_MAYBE(dbias),
                     call.Partials(a.dbias, Axes{BlockPartials(Rows(x))} + Slots(x)), a.kind, a.limit,
                     a.alpha, a.glu_linear_offset, a.power_2, a.epsilon);
}

// Mean and rstd of a row, as CTAs hand them to others.
int64_t StatisticsBytes(const Tensor& x) { return 8 * Axes(x).Without(1).count(); }

Status NormFwd(Call& call, const te_jax_norm_fwd_args& a) {
  const Tensor x = TE_ARRAY(x), data_t = TE_MAYBE(data_t);
  const int64_t rows = Axes(x).Without(1).count(), h = Axes(x).last();
  call.Expect("eps", a.eps, 0, true);
  const Tensor known_rstd = TE_MAYBE(known_rstd);
  const bool hands_over = Present(data_t) && !Present(known_rstd);
  return call.Launch(LaunchNormFwd, x, TE_ARRAY(gamma), TE_MAYBE(beta), TE_MAYBE(known_mean), known_rstd,
                     TE_MAYBE(scale), TE_MAYBE(y), TE_MAYBE(data), data_t, TE_MAYBE(mean), TE_MAYBE(rstd),
                     TE_MAYBE(amax), TE_MAYBE(scale_inv), call.Workspace(hands_over ? StatisticsBytes(x) : 0),
                     call.Partials(a.amax, (Axes{CeilDiv(rows, kTileRows), AmaxStrips(h)})), a.eps, a.rms,
                     a.zero_centered);
}

Status NormBlockFwd(Call& call, const te_jax_norm_block_fwd_args& a) {
  call.NeedsHopper();
  const Tensor x = TE_ARRAY(x);
  call.Expect("eps", a.eps, 0, true);
  call.Expect("epsilon", a.epsilon, 0);
  return call.Launch(LaunchNormBlockFwd, x, TE_ARRAY(gamma), TE_MAYBE(beta), TE_MAYBE(data), TE_MAYBE(data_t),
                     TE_MAYBE(scale_inv), TE_MAYBE(scale_inv_t), TE_MAYBE(mean), TE_ARRAY(rstd),
                     call.Workspace(StatisticsBytes(x)), a.eps, a.rms, a.zero_centered, a.power_2, a.epsilon);
}

Status NormBwd(Call& call, const te_jax_norm_bwd_args& a) {
  const Tensor x = TE_ARRAY(x), gamma = TE_ARRAY(gamma);
  const Axes partials{NormBwdPartials(Axes(x).Without(1).count()), Axes(x).last()};
  return call.Launch(LaunchNormBwd, TE_ARRAY(dy), x, TE_MAYBE(mean), TE_ARRAY(rstd), gamma, TE_MAYBE(dres),
                     TE_ARRAY(dx), TE_ARRAY(dgamma), TE_MAYBE(dbeta), call.Partials(a.dgamma, partials),
                     call.Partials(a.dbeta, partials), a.rms, a.zero_centered);
}

constexpr int64_t kNoEntry = -1;  // the result is a matrix, not one of several

Status Gemm(Call& call, const te_jax_gemm_args& a) {
  return call.Launch(LaunchGemm, TE_MATRIX(lhs, kRequired), TE_MATRIX(rhs, kRequired),
                     TE_MAYBE(lhs_scale_inv), TE_MAYBE(rhs_scale_inv), TE_MAYBE(bias),
                     TE_MATRIX(c, kOptional), TE_MATRIX(out, kRequired), call.Workspace(kGemmWorkspace),
                     a.contract, a.fast_accum, a.tune, kNoEntry);
}

constexpr int64_t kOuter = 0;  // axes of k without blocks: there is one axis
constexpr int64_t kSlots = 0;  // axes of buffers side by side, and which of them: there is one buffer

Status GemmBlock(Call& call, const te_jax_gemm_block_args& a) {
  call.NeedsHopper();
  return call.Launch(LaunchGemmBlock, TE_MATRIX(lhs, kRequired), TE_MATRIX(rhs, kRequired),
                     TE_ARRAY(lhs_scale_inv), TE_MAYBE(rhs_scale_inv), TE_MAYBE(rhs_block_inv),
                     TE_MAYBE(bias), TE_MATRIX(c, kOptional), TE_MATRIX(out, kRequired),
                     call.Workspace(kGemmWorkspace), kOuter, a.tune);
}

Status GemmGrouped(Call& call, const te_jax_gemm_grouped_args& a) {
  return call.Launch(LaunchGemmGrouped, TE_ARRAY(lhs), TE_ARRAY(rhs), TE_ARRAY(offsets), TE_ARRAY(counts),
                     TE_MAYBE(lhs_scale_inv), TE_MAYBE(rhs_scale_inv), TE_MAYBE(lhs_row_inv),
                     TE_MAYBE(rhs_block_inv), TE_MAYBE(bias), TE_ARRAY(out),
                     call.Workspace(kGroupedWorkspace), a.lhs.rank - 2, a.fast_accum);
}

Status GemmGroupedWgrad(Call& call, const te_jax_gemm_grouped_wgrad_args& a) {
  return call.Launch(LaunchGemmGroupedWgrad, TE_ARRAY(lhs), TE_ARRAY(rhs), TE_ARRAY(offsets),
                     TE_ARRAY(counts), TE_MAYBE(lhs_scale_inv), TE_MAYBE(rhs_scale_inv),
                     TE_MAYBE(lhs_row_inv), TE_MAYBE(rhs_row_inv), TE_MAYBE(c), TE_ARRAY(out),
                     call.Workspace(kGroupedWorkspace), a.fast_accum, kSlots, kSlots);
}

// ---- what is visible ----

thread_local char last_error[1024] = "";

// Nothing is thrown into C.
te_jax_status Report(auto run) {
  Status status;
  try {
    status = run();
  } catch (const std::exception& error) {
    std::snprintf(last_error, sizeof(last_error), "te_jax: %s", error.what());
    return TE_JAX_INTERNAL;
  }
  if (status.failure()) std::snprintf(last_error, sizeof(last_error), "%s", status.message.c_str());
  return te_jax_status(status.code);
}

template <typename Args>
te_jax_status Make(const char* op, Status (*make)(Call&, const Args&), const Args* args, Ask ask,
                   void* stream, int64_t* bytes = nullptr) {
  return Report([&]() -> Status {
    TE_CHECK(args, "%s: args is null", op);
    TE_CHECK(bytes || ask != Ask::kBytes, "%s: bytes is null", op);
    Call call(op, ask, static_cast<cudaStream_t>(stream), args->workspace, args->workspace_bytes);
    TE_TRY(make(call, *args));
    if (bytes) *bytes = call.bytes();
    return {};
  });
}

}  // namespace
}  // namespace te::c_api

#define TE_C_OP(op, make)                                                                             \
  te_jax_status te_jax_##op##_workspace(const te_jax_##op##_args* args, int64_t* bytes) {             \
    return te::c_api::Make("te_" #op, te::c_api::make, args, te::c_api::Ask::kBytes, nullptr, bytes); \
  }                                                                                                   \
  te_jax_status te_jax_##op(const te_jax_##op##_args* args, void* stream) {                           \
    return te::c_api::Make("te_" #op, te::c_api::make, args, te::c_api::Ask::kRun, stream);           \
  }
#define TE_C_OP_PLAN(op, make)                                                               \
  TE_C_OP(op, make)                                                                          \
  te_jax_status te_jax_##op##_plan(const te_jax_##op##_args* args, void* stream) {           \
    return te::c_api::Make("te_" #op, te::c_api::make, args, te::c_api::Ask::kPlan, stream); \
  }

TE_C_OP(quantize, Quantize)
TE_C_OP(quantize_block, QuantizeBlock)
TE_C_OP(activation_fwd, ActivationFwd)
TE_C_OP(activation_bwd, ActivationBwd)
TE_C_OP(activation_block_fwd, ActivationBlockFwd)
TE_C_OP(activation_block_bwd, ActivationBlockBwd)
TE_C_OP(norm_fwd, NormFwd)
TE_C_OP(norm_block_fwd, NormBlockFwd)
TE_C_OP(norm_bwd, NormBwd)
TE_C_OP_PLAN(gemm, Gemm)
TE_C_OP_PLAN(gemm_block, GemmBlock)
TE_C_OP(gemm_grouped, GemmGrouped)
TE_C_OP(gemm_grouped_wgrad, GemmGroupedWgrad)

int te_jax_api_version() { return TE_JAX_API_VERSION; }

const char* te_jax_error() { return te::c_api::last_error; }

te_jax_status te_jax_set_library_path(const char* soname, const char* path) {
  return te::c_api::Report([&]() -> te::Status {
    const char* op = "te_jax_set_library_path";
    TE_CHECK(soname && path, "%s: soname or path is null", op);
    TE_CHECK(std::string(soname) == TE_CUBLASLT, "%s: soname is %s; pass " TE_CUBLASLT, op, soname);
    TE_CHECK(access(path, R_OK) == 0, "%s: %s cannot be read", op, path);
    TE_CHECK(te::dl::SetLibraryPath(soname, path), "%s: %s was looked for before; set its path first", op,
             soname);
    return {};
  });
}
