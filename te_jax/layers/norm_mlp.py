"""y = act(norm(x) . wi + bi) . wo + bo: the activation is computed where its input and output are quantized."""

from collections.abc import Sequence
from functools import partial

import jax
import jax.numpy as jnp
from jax import lax
from jax.core import ShapedArray
from jax.custom_derivatives import custom_vjp_primal_tree_values as values_of
from jax.sharding import PartitionSpec

from te_jax import fp8
from te_jax._arrays import as_jax
from te_jax._check import NONE, STRING, check, tuple_of
from te_jax._types import align, like
from te_jax.checkpoint_policies import STATISTICS, named
from te_jax.layers import _fp8
from te_jax.layers._fp8 import Config, Fp8Tensor, wide_of
from te_jax.layers.dense import METAS, check_dense, check_residual, dense
from te_jax.layers.kernel import QuantizedKernel, taken
from te_jax.layers.norm_dense import layernorm_dense, norm_attrs, norm_backward, quantize_norm
from te_jax.ops import activation as act_op
from te_jax.ops import norm as norm_op
from te_jax.ops.activation_block import activation_block_bwd, activation_block_fwd
from te_jax.sharding import with_sharding_constraint_by_logical_axes as constrain

_METAS = NONE | tuple_of(METAS, 2)  # of wi and of wo


def split_residual(residual: bool | jax.Array):
    """-> whether it is the layer's own input, and the array that it is else, or None."""
    added = None if isinstance(residual, bool) else residual
    return added is None and residual, added


def layernorm_mlp(
    x,
    gamma,
    beta,
    wi: jax.Array | QuantizedKernel,
    wo: jax.Array | QuantizedKernel,
    wi_bias=None,
    wo_bias=None,
    *,
    activations: Sequence[str] = ("gelu",),
    activation_params=None,
    norm="layernorm",
    zero_centered_gamma=False,
    epsilon=1e-6,
    residual: bool | jax.Array = False,
    recipe=None,
    metas: tuple[fp8.DenseMetas, fp8.DenseMetas] | None = None,
    checkpoint=None,
    middle_name: str | None = None,
    middle_axes: tuple[str | None, ...] | None = None,
    grad_axes: tuple[str | None, ...] | None = None,
    name: str = "te_jax.layers.layernorm_mlp",
) -> jax.Array:
    """y[*B, o] = act(norm(x)[*B, h] . wi[h, A, F] + wi_bias[A, F])[*B, F] . wo[F, o] + wo_bias[o].

    x [*B, h]; gamma, beta [h] as in `layernorm`.

    activations, activation_params: as in `te_jax.ops.activation.activation`.
    residual:    True: x is added to y; both directions of it are done inside of kernels. An array of y's shape and type
                 is added in the GEMM, before it rounds.
    recipe:      None for plain JAX in x's type, else a recipe, and if it has state `metas` of wi and of wo. The norm's
                 output, the activation and the gradient of its input are quantized from f32, without being written in
                 x's type; under a recipe of block scales they are rounded to it first.
    checkpoint:  name of the quantized residuals, for `jax.checkpoint` policies; middle_name: of the activation's input.
    middle_axes: logical axes [*B, F] that the activation's output is constrained to; under FP8 its input is, and the
                 gradient of its output.
    grad_axes:   of `dense`, for the second GEMM.

    Returns y of x's type. Raises ValueError for sizes that do not match and activations that `supported` does not
    know, TypeError for operands that are not float.
    """
    x, gamma, beta, wi, wo, wi_bias, wo_bias, residual = as_jax(x, gamma, beta, wi, wo, wi_bias, wo_bias, residual)
    norm_op.check(name, x, gamma, beta, norm, epsilon, zero_centered_gamma)
    check(name, "activations", activations, act_op.ACTIVATIONS)
    act_op.check_params(name, "activation_params", activations, activation_params)
    wi, wo = (taken(name, kernel, 1, recipe) for kernel in (wi, wo))
    check(name, "metas", metas, _METAS)
    check(name, "checkpoint", checkpoint, NONE | STRING)
    check_dense(name, x, wide_of(wi), wi_bias, 1, recipe, metas and metas[0])
    if wide_of(wi).ndim != 3 or wide_of(wi).shape[1] != len(activations):
        raise ValueError(
            f"{name}: wi has shape {wide_of(wi).shape}; pass [h, A, F], with A = {len(activations)} slots for "
            f"{len(activations)} activations."
        )
    middle_type = ShapedArray((*x.shape[:-1], wide_of(wi).shape[-1]), x.dtype)
    check_dense(name, middle_type, wide_of(wo), wo_bias, 1, recipe, metas and metas[1])
    through, added = split_residual(residual)
    check_residual(name, x if through else added, (*x.shape[:-1], *wide_of(wo).shape[1:]), x.dtype)
    if recipe is None:
        options = dict(norm=norm, zero_centered_gamma=zero_centered_gamma, epsilon=epsilon)
        z, _ = layernorm_dense(x, wi, gamma, beta, wi_bias, name=name, **options)
        z = named(z, middle_name)
        a = constrain(act_op.activation(z, activations, activation_params), middle_axes)
        return dense(a, wo, wo_bias, x if through else added, out=x if added is None else None, name=name)
    first = Config.of(x, wi, wi_bias, 1, recipe, checkpoint)
    if first.spec is not None:  # an Explicit mesh
        middle_type = _typed(middle_type, jax.typeof(x), (*first.spec[:-2], first.spec[-1]))
    out = jax.typeof(x if added is None else added)
    configs = first, Config.of(middle_type, wo, wo_bias, 1, recipe, checkpoint, added, out, grad_axes)
    act = tuple(act_op.attributes(activations, activation_params).items())
    attrs = norm_attrs(norm, zero_centered_gamma, epsilon)
    static = (configs, attrs, act, through, middle_name, middle_axes and tuple(middle_axes))
    first_metas, second_metas = (m or fp8.STATELESS for m in metas or (None, None))
    operands = align(x, gamma, beta, wi, wo, wi_bias, wo_bias, added)
    return _staged_norm_mlp(*operands, (first_metas, second_metas), static)


def _typed(aval, beside, spec):
    """`aval` as an array on the mesh of the type `beside`, of this sharding."""
    return ShapedArray(aval.shape, aval.dtype, sharding=beside.sharding.update(spec=PartitionSpec(*spec)))


def _quantize_activation(z, meta, use, config: Config, act):
    """act(z) as its GEMMs read it."""
    run = partial(act_op.activation_fwd, dtype=_fp8.fp8_type("x", config), **dict(act))
    if config.recipe.block_scaled:
        if _fp8.fuses_blocks(use, config):
            return _fp8.fused_blocks("x", partial(activation_block_fwd, z, **dict(act)), use, config)[0]
        (y,) = run(z, None, outputs=("y",))
        return _fp8.quantize_blocks("x", y, y.ndim - 1, use, config)[0]
    scale = _fp8.scale_of("x", meta, lambda: run(z, None, outputs=("amax",))[0], jax.typeof(z), use, config)
    outputs = (*(("y",) if use.wide else ()), *use.layouts, *_fp8.statistics(use, config))
    got = dict(zip(outputs, run(z, scale if use.layouts else None, outputs=outputs)))
    wide = lambda: run(z.astype(jnp.float32), None, outputs=("y",))[0]
    got = _fp8.probed(got, "x", meta, scale, wide, config)
    return Fp8Tensor.of(got, got.get("y"), scale)


def _quantize_activation_grad(da, z, meta, config: Config, act, wgrad: bool):
    """The gradient of act's input z from that of its output, as the GEMMs read it, and the gradient of the bias."""
    use = _fp8.uses(config.recipe, train=True, wgrad=wgrad)["grad"]
    run = partial(act_op.activation_bwd, dtype=_fp8.fp8_type("grad", config), **dict(act))
    has_bias = config.bias is not None
    if config.recipe.block_scaled:
        others = ("dbias",) if has_bias else ()
        if _fp8.fuses_blocks(use, config):
            op = partial(activation_block_bwd, da, z, **dict(act))
            grad, got = _fp8.fused_blocks("grad", op, use, config, others)
            return grad, like(got["dbias"], config.bias) if has_bias else None
        dz, *sums = run(da, z, None, outputs=("dx", *others))
        grad, _ = _fp8.quantize_blocks("grad", dz, dz.ndim - config.features, use, config)
        return grad, like(sums[0], config.bias) if has_bias else None
    measure = lambda: run(da, z, None, outputs=("amax",))[0]
    scale = _fp8.scale_of("grad", meta, measure, jax.typeof(z), use, config)
    outputs = (
        *(("dx",) if use.wide else ()),
        *use.layouts,
        *_fp8.statistics(use, config),
        *(("dbias",) if has_bias else ()),
    )
    got = dict(zip(outputs, run(da, z, scale if use.layouts else None, outputs=outputs)))
    wide = lambda: run(da.astype(jnp.float32), z.astype(jnp.float32), None, outputs=("dx",))[0]
    got = _fp8.probed(got, "grad", meta, scale, wide, config)
    return Fp8Tensor.of(got, got.get("dx"), scale), like(got["dbias"], config.bias) if has_bias else None


def _with_slots(axes):
    """Logical axes of [*B, F] -> of [*B, A, F]."""
    return axes and (*axes[:-1], None, axes[-1])


def _forward(x, gamma, beta, wi, wo, wi_bias, wo_bias, added, metas, static, train, wgrads):
    (config0, config1), attrs, act, through, middle_name, middle_axes = static
    use0, use1 = (_fp8.uses(config0.recipe, train, wgrad) for wgrad in wgrads)
    q0, _, stats = quantize_norm(x, gamma, beta, metas[0].x, use0["x"], config0, attrs)
    w0 = _fp8.quantize_kernel(wi, metas[0].kernel, use0["kernel"], config0)
    z = _fp8.fprop(q0, w0, wi_bias, config0)
    z = named(z, middle_name)
    z = constrain(z, _with_slots(middle_axes))
    q1 = _quantize_activation(z, metas[1].x, use1["x"], config1, act)
    w1 = _fp8.quantize_kernel(wo, metas[1].kernel, use1["kernel"], config1)
    y = _fp8.fprop(q1, w1, wo_bias, config1, x if through else added)
    return y, (q0, w0), (q1, w1), z, stats


@partial(jax.custom_vjp, nondiff_argnums=(9,))
def _norm_mlp(x, gamma, beta, wi, wo, wi_bias, wo_bias, added, metas, static):
    operands = x, gamma, beta, wi, wo, wi_bias, wo_bias, added, metas
    return _forward(*operands, static, train=False, wgrads=(False, False))[0]


def _norm_mlp_fwd(*args):
    *operands, static = args
    wgrads = tuple(map(_fp8.has_gradient, operands[3:5]))
    x, gamma, beta, *_, metas = operands = values_of(operands)
    y, first, second, z, stats = _forward(*operands, static, train=True, wgrads=wgrads)
    each = zip((first, second), static[0], wgrads)
    saved = [_fp8.saved(_fp8.by_name(q, config), w, config, wgrad) for (q, w), config, wgrad in each]
    return y, (saved, z, metas, (x, named(stats, STATISTICS), gamma, beta))


def _norm_mlp_bwd(static, residuals, dy):
    (config0, config1), attrs, act, through, _, middle_axes = static
    (first, second), z, metas, (x, stats, gamma, beta) = residuals
    dy = _fp8.materialized(dy)
    grad1, dwo_bias = _fp8.quantize_grad(dy, metas[1].grad, config1, second[0].for_wgrad)
    da = constrain(_fp8.dgrad([(grad1, second[1], config1)]), middle_axes)
    dwo, dmetas1 = _fp8.kernel_grads(*second, grad1, metas[1], config1)
    if not config1.on_mesh:  # what dwo is made of is free before the largest tensors of the layer are there
        da, dwo = lax.optimization_barrier((da, dwo))
    grad0, dwi_bias = _quantize_activation_grad(da, z, metas[0].grad, config0, act, first[0].for_wgrad)
    dnorm = like(_fp8.dgrad([(grad0, first[1], config0)]), config0.x)
    dwi, dmetas0 = _fp8.kernel_grads(*first, grad0, metas[0], config0)
    dx, dgamma, dbeta = norm_backward(dnorm, x, stats, gamma, beta, attrs, dy if through else None)
    dadded = None if config1.residual is None else like(dy, config1.residual)
    return dx, dgamma, dbeta, dwi, dwo, dwi_bias, dwo_bias, dadded, (dmetas0, dmetas1)


_norm_mlp.defvjp(_norm_mlp_fwd, _norm_mlp_bwd, symbolic_zeros=True)
_staged_norm_mlp = _fp8.staged(_norm_mlp, 9)
