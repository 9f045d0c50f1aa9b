"""y = act(norm(x) . wi + bi) . wo + bo: the activation is computed where its input and output are quantized."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
from jax.core import ShapedArray
from jax.custom_derivatives import custom_vjp_primal_tree_values as values_of
from jax.sharding import PartitionSpec
from jax.typing import ArrayLike

from te_jax.core import extension
from te_jax.core.arrays import as_jax
from te_jax.core.check import NONE, STRING, check, tuple_of, warn_once
from te_jax.core.derivatives import custom_vjp
from te_jax.core.policies import STATISTICS, with_names
from te_jax.core.types import align, like
from te_jax.layers import projections
from te_jax.layers.config import Config
from te_jax.layers.gemms import dgrad, dgrad_and_read, fprop
from te_jax.layers.linear import METAS, OperandNames, check_dense, check_residual, check_shardings, dense
from te_jax.layers.norm_dense import layernorm_dense
from te_jax.layers.produce import Role, produce, quantize_grad, quantize_weight
from te_jax.layers.tensor import LayerUses, wide_of
from te_jax.layers.vjp import (
    differentiate_weight,
    finish_first,
    gather_after,
    has_gradient,
    instantiate,
    jit_layer,
    quantize_activation_grad,
    save_for_backward,
    sum_meanwhile,
    tag_for_wgrad,
)
from te_jax.layers.weight import Projection, QuantizedKernel, resolve_weight
from te_jax.ops.quantize import activation as act_op
from te_jax.ops.quantize import norm as norm_op
from te_jax.recipe import Recipe
from te_jax.sharding.constraints import constrain_to_spec
from te_jax.state import fp8

_OF_WI = OperandNames("x", "wi", "wi_bias", "metas[0]")
_OF_WO = OperandNames("the activation's output", "wo", "wo_bias", "metas[1]")
_METAS_OF_TWO = NONE | tuple_of(METAS, 2)  # of wi and of wo
_PAYS_FROM = 2**21  # elements of x: GPT layers of widths 1024 to 4096 under delayed scaling, on H100 and H200
_TOO_SMALL = (
    "a layer with less than 2**21 elements (tokens times features) in a pass takes longer to train in FP8 than in "
    "bf16; give it more tokens at once, or leave FP8 off."
)


def split_residual(residual: bool | jax.Array) -> tuple[bool, jax.Array | None]:
    """Whether the residual is the layer's own input, and the array that it is otherwise, or None."""
    added = None if isinstance(residual, bool) else residual
    return added is None and residual, added


def layernorm_mlp(
    x: ArrayLike,
    gamma: ArrayLike,
    beta: ArrayLike | None,
    wi: jax.Array | QuantizedKernel,
    wo: jax.Array | QuantizedKernel,
    wi_bias: ArrayLike | None = None,
    wo_bias: ArrayLike | None = None,
    *,
    activations: Sequence[str] = ("gelu",),
    activation_params: Mapping[str, Any] | None = None,
    norm: str = "layernorm",
    zero_centered_gamma: bool = False,
    epsilon: float = 1e-6,
    residual: bool | jax.Array = False,
    recipe: Recipe | None = None,
    metas: tuple[fp8.DenseMetas, fp8.DenseMetas] | None = None,
    checkpoint: str | None = None,
    middle_name: str | None = None,
    middle_spec: PartitionSpec | None = None,
    grad_spec: PartitionSpec | None = None,
    tokens: PartitionSpec | None = None,
    name: str = "te_jax.layers.layernorm_mlp",
) -> jax.Array:
    """y[*B, o] = act(norm(x)[*B, h] . wi[h, A, F] + wi_bias[A, F])[*B, F] . wo[F, o] + wo_bias[o].

    x [*B, h]; gamma, beta [h] as in `layernorm`.

    activations, activation_params: as in `te_jax.ops.activation.activation`.
    residual:    True: x is added to y, forward and backward inside of kernels. An array of y's shape and type is added
                 in the GEMM, before it rounds.
    recipe:      None for plain JAX in x's type, else a recipe, and if it has state `metas` of wi and of wo. The norm's
                 output, the activation and the gradient of its input are quantized from f32, without being written in
                 x's type; under a recipe of block scales they are rounded to it first.
    checkpoint:  name of the quantized tensors that are kept for the backward pass, for `jax.checkpoint` policies.
    middle_name: name of the activation's input, for the same policies.
    middle_spec: under Auto mesh axes, the sharding [*B, F] that the activation's output is constrained to; under FP8
                 its input is, and the gradient of its output.
    grad_spec:   as in `dense`, for the second GEMM.
    tokens:      under Auto mesh axes, the sharding [*B] of x and y outside, as in `dense` and `layernorm_dense`.

    Returns y of x's type. Raises ValueError for sizes that do not match and activations that `is_fused` does not
    know, TypeError for operands that are not float.
    """
    x, gamma, beta, wi, wo, wi_bias, wo_bias, residual = as_jax(x, gamma, beta, wi, wo, wi_bias, wo_bias, residual)
    norm_op.check_norm(name, x, gamma, beta, norm, epsilon, zero_centered_gamma)
    check(name, "activations", activations, act_op.ACTIVATIONS)
    act_op.check_params(name, "activation_params", activations, activation_params)
    wi, wo = (resolve_weight(name, w, 1, recipe, argument) for argument, w in (("wi", wi), ("wo", wo)))
    for what, text in (("checkpoint", checkpoint), ("middle_name", middle_name)):
        check(name, what, text, NONE | STRING)
    middle_type = _check_kernels_of_two(name, x, (wi, wi_bias), (wo, wo_bias), len(activations), recipe, metas)
    through, added = split_residual(residual)
    shape, stream = (*x.shape[:-1], *wide_of(wo).shape[1:]), x if added is None else added
    check_residual(name, x if through else added, shape, x.dtype)
    check_shardings(name, shape, middle_spec=middle_spec, grad_spec=grad_spec, tokens=tokens)
    if recipe is None:
        options = dict(norm=norm, zero_centered_gamma=zero_centered_gamma, epsilon=epsilon)
        z, _ = layernorm_dense(x, wi, gamma, beta, wi_bias, name=name, **options)
        z = with_names(z, middle_name)
        a = constrain_to_spec(act_op.activation(z, activations, activation_params), middle_spec)
        return dense(a, wo, wo_bias, x if through else added, out=stream if stream.shape == shape else None, name=name)
    first = Config.of(x, wi, wi_bias, 1, recipe, checkpoint=checkpoint, tokens=tokens, gathers=True)
    if first.spec is not None:  # an Explicit mesh
        middle_type = _type_on_mesh(middle_type, jax.typeof(x), (*first.spec[:-2], first.spec[-1]))
    others = dict(residual=added, out=jax.typeof(stream), grad_spec=grad_spec, tokens=tokens)
    second = Config.of(middle_type, wo, wo_bias, 1, recipe, checkpoint=checkpoint, **others)
    act = tuple(act_op.attributes(activations, activation_params).items())
    norm = norm_op.Norm.of(norm, zero_centered_gamma, epsilon)
    static = _Static(first, second, norm, act, through, middle_name, middle_spec)
    metas = (m or fp8.STATELESS for m in metas or (None, None))
    x, gamma, beta, wi, wo, wi_bias, wo_bias, added = align(x, gamma, beta, wi, wo, wi_bias, wo_bias, added)
    both = map(Projection, (wi, wo), (wi_bias, wo_bias), metas)
    return _run_norm_mlp(_Operands(x, gamma, beta, *both, added), static)


def _check_kernels_of_two(name: str, x, wi, wo, count: int, recipe, metas) -> ShapedArray:
    """The type of the activation [*B, F]. wi, wo: (kernel, bias) each.

    Raises ValueError or TypeError, naming the layer, for operands that make no MLP with `count` activations.
    """
    (wi, wi_bias), (wo, wo_bias) = wi, wo
    check_metas_of_two(name, recipe, metas)
    check_dense(name, x, wide_of(wi), wi_bias, 1, recipe, metas and metas[0], _OF_WI)
    shape = wide_of(wi).shape
    if len(shape) != 3 or shape[1] != count:
        raise ValueError(
            f"{name}: wi has shape {shape}; pass [h, A, F], with A = {count} slots for {count} activations."
        )
    middle = ShapedArray((*x.shape[:-1], shape[-1]), x.dtype)
    check_dense(name, middle, wide_of(wo), wo_bias, 1, recipe, metas and metas[1], _OF_WO)
    return middle


def check_metas_of_two(name: str, recipe: Any, metas: Any) -> None:
    """Raises TypeError or ValueError, naming the layer, where `metas` are not of two kernels, or not given to a recipe
    that has state."""
    check(name, "metas", metas, _METAS_OF_TWO)
    if metas is None and isinstance(recipe, Recipe):
        fp8.check_metas(name, "metas", None, recipe, "pass a tuple of 2 fp8.DenseMetas")


class _Operands(NamedTuple):
    """What is differentiated."""

    x: jax.Array
    gamma: jax.Array
    beta: jax.Array | None
    wi: Projection
    wo: Projection
    added: jax.Array | None  # a residual that is not x


class _Static(NamedTuple):
    """What is static."""

    wi: Config
    wo: Config
    norm: norm_op.Norm
    act: tuple  # (name, value) pairs of `act_op.attributes`
    through: bool  # x is the residual
    middle_name: str | None
    middle_spec: PartitionSpec | None

    @property
    def slots_spec(self) -> PartitionSpec | None:
        """`middle_spec`, [*B, F], for the activation's input [*B, A, F]."""
        if self.middle_spec is None:
            return None
        *lead, last = (*self.middle_spec, *[None] * self.wi.x.ndim)[: self.wi.x.ndim]
        return PartitionSpec(*lead, None, last)


def _type_on_mesh(aval, on, spec):
    """`aval` as an array of this sharding on the mesh of the type `on`."""
    return ShapedArray(aval.shape, aval.dtype, sharding=on.sharding.update(spec=PartitionSpec(*spec)))


def _mlp_forward(operands: _Operands, static: _Static, train: bool, need_wgrad):
    x, gamma, beta, wi, wo, added = operands
    first = projections.Operands(x, (wi,), (gamma, beta)), projections.Static((static.wi,), static.norm)
    ((z,), *_), q0, (w0,), stats = projections.multiply(*first, train, need_wgrad[:1])
    z = with_names(z, static.middle_name)
    z = constrain_to_spec(z, static.slots_spec)
    uses = LayerUses.of(static.wo.recipe, train, need_wgrad[1])
    role = Role("x", wo.metas.x, uses.x, jax.typeof(z))
    q1, _ = produce(act_op.activation_source(z, dict(static.act)), role, static.wo)
    w1 = quantize_weight(wo.kernel, wo.metas.kernel, uses.weight, static.wo)
    y = fprop(q1, w1, wo.bias, static.wo, x if static.through else added)
    return y, (q0, w0), (q1, w1), z, stats


@custom_vjp(1, in_fp8=lambda static: "te_jax.layers.layernorm_mlp")
def _norm_mlp(operands, static):
    return _mlp_forward(operands, static, train=False, need_wgrad=(False, False))[0]


def _heed_size(config: Config) -> None:
    """Warns, once, where an MLP trains on a GPU with so little data that FP8 does not pay: its GEMMs gain less time
    than quantizing the weights and starting more kernels takes (docs/performance.md, Small layers).

    The size of x is as it is traced: of all devices of a mesh, of one example under `jax.vmap`. Only MLPs are judged,
    since they have the size of their layer; single projections and heads may be smaller.
    """
    size, device = config.x.size, jax.config.jax_default_device  # a dimension may be a symbol of `jax.export`
    if not isinstance(size, int) or not 0 < size < _PAYS_FROM:
        return
    if config.stored or all(config.recipe.override_linear_precision) or not extension.is_built():
        return
    # This is asked last, for it looks for a GPU.
    if (jax.default_backend() if device is None else getattr(device, "platform", device)) in ("gpu", "cuda"):
        warn_once(f"te_jax.layers.layernorm_mlp: x is {config.x.str_short()}", _TOO_SMALL)


def _norm_mlp_fwd(operands, static):
    need_wgrad = has_gradient(operands.wi.kernel), has_gradient(operands.wo.kernel)
    x, gamma, beta, wi, wo, _ = operands = values_of(operands)
    if any(need_wgrad):
        _heed_size(static.wi)
    y, *pairs, z, stats = _mlp_forward(operands, static, train=True, need_wgrad=need_wgrad)
    each = zip(pairs, (wi, wo), (static.wi, static.wo), need_wgrad)
    saved = [
        save_for_backward(tag_for_wgrad(q, config), w, p.metas, config, need, p.kernel)
        for (q, w), p, config, need in each
    ]
    return y, (saved, z, (x, with_names(stats, STATISTICS), gamma, beta))


def _norm_mlp_bwd(static: _Static, residuals, dy):
    (first, second), z, (x, stats, gamma, beta) = residuals
    dy = instantiate(dy)
    grad, dbias = quantize_grad(dy, second.metas.grad, static.wo, second.needs_wgrad)
    da, (grad,) = dgrad_and_read([(grad, second.weight, static.wo)])
    da = constrain_to_spec(da, static.middle_spec)
    dwo = differentiate_weight(second, grad, dbias, static.wo)
    da, (first,) = gather_after(da, [first], static.wi)
    da, dwo = finish_first(dwo, da, static.wo)
    source = act_op.activation_grad_source(da, z, dict(static.act))
    grad, dbias = quantize_activation_grad(source, z, first, static.wi)
    dnorm = like(dgrad([(grad, first.weight, static.wi)]), static.wi.x)
    dwi = differentiate_weight(first, grad, dbias, static.wi)
    dnorm, (dwi,) = sum_meanwhile([dwi], dnorm, static.wi)
    dres = dy if static.through else None
    dx, (dgamma, dbeta) = static.norm.backward(dnorm, x, stats, (gamma, beta), dres)
    dadded = None if static.wo.residual is None else like(dy, static.wo.residual)
    return (_Operands(dx, dgamma, dbeta, dwi, dwo, dadded),)


_norm_mlp.defvjp(_norm_mlp_fwd, _norm_mlp_bwd, symbolic_zeros=True)
_run_norm_mlp = jit_layer(_norm_mlp, 1)
