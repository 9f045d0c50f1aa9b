"""The gated RMSNorm of Mamba-2, and a dense layer of it: the norm writes FP8 in both layouts."""

import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jax.typing import ArrayLike

from te_jax.core.arrays import as_jax, as_rank
from te_jax.core.check import BOOL, FLOATS_ARRAY, NONE, STRING, check, integer, number, one_of
from te_jax.core.derivatives import custom_vjp
from te_jax.core.types import align, like, on_explicit_mesh
from te_jax.layers.config import Config
from te_jax.layers.linear import check_dense, check_residual, check_shardings, dense
from te_jax.layers.projections import Operands, Static, project
from te_jax.layers.tensor import wide_of
from te_jax.layers.weight import Projection, QuantizedKernel, resolve_weight
from te_jax.ops.formats import format_of
from te_jax.ops.quantize.activation import silu
from te_jax.ops.quantize.array import FLOAT
from te_jax.ops.quantize.gated_norm import GatedNorm, gated_norm
from te_jax.recipe import Recipe
from te_jax.sharding.constraints import entries, split_over
from te_jax.state import fp8

_GATES = one_of("silu", "sigmoid")


def gated_rmsnorm(
    x: ArrayLike,
    z: ArrayLike,
    gamma: ArrayLike,
    *,
    groups: int = 1,
    epsilon: float = 1e-6,
    norm_before_gate: bool = False,
    activation: str = "silu",
    name: str = "te_jax.layers.gated_rmsnorm",
) -> jax.Array:
    """RMSNorm(x silu(z)) gamma over all channels of h heads, as Mamba-2 has it in front of its output projection.

    x, z:   [..., h, p], floating
    gamma:  [h*p]
    groups: a divisor of h: each group of h / groups heads has a norm of its own
    epsilon: above 0, added to the mean square
    norm_before_gate: RMSNorm(x) gamma silu(z) instead
    activation: of z; "sigmoid" instead of "silu" is plain JAX

    Returns an array as x, computed in f32; the backward pass keeps x, z and at most f32[..., groups]. Differentiable in
    x, z and gamma. Raises ValueError for sizes that do not match, TypeError for operands that are not floating.
    """
    x, z, gamma = as_jax(x, z, gamma)
    _check_gated(name, x, z, gamma, groups, epsilon, norm_before_gate)
    check(name, "activation", activation, _GATES)
    if activation == "silu" and _has_op(x, z, gamma, groups):
        options = dict(eps=epsilon, norm_before_gate=norm_before_gate, name=name)
        y = gated_norm(*(_in_groups(a, groups) for a in (x, z)), _gamma_in_groups(gamma, groups), **options)
        return y.reshape(_joined(x)).reshape(x.shape)
    return _gated_norm(*align(x, z, gamma), (int(groups), float(epsilon), bool(norm_before_gate), activation))


def gated_norm_dense(
    x: ArrayLike,
    z: ArrayLike,
    gamma: ArrayLike,
    kernel: jax.Array | QuantizedKernel,
    bias: ArrayLike | None = None,
    residual: ArrayLike | None = None,
    *,
    groups: int = 1,
    epsilon: float = 1e-6,
    norm_before_gate: bool = False,
    recipe: Recipe | None = None,
    metas: fp8.DenseMetas | None = None,
    checkpoint: str | None = None,
    out: ArrayLike | None = None,
    grad_spec: PartitionSpec | None = None,
    tokens: PartitionSpec | None = None,
    name: str = "te_jax.layers.gated_norm_dense",
) -> jax.Array:
    """y[*B, *F] = gated_rmsnorm(x, z)[*B, h*p] . kernel[h*p, *F] + bias[*F] + residual[*B, *F].

    x, z [*B, h, p], gamma [h*p], groups, epsilon, norm_before_gate as in `gated_rmsnorm`; the other arguments are
    described in `dense`.

    Under a recipe the norm's output is quantized from f32, before it is rounded to x's type, and is not written in it;
    under a recipe of block scales it is rounded first. The backward pass keeps x, z and f32[*B, groups]. Where
    `quantizes_gated_norm` says no, the output is written and quantized as `dense` does.

    Returns y of x's type. Raises ValueError for sizes that do not match, TypeError for operands that are not floating.
    """
    x, z, gamma, kernel, bias, residual = as_jax(x, z, gamma, kernel, bias, residual)
    _check_gated(name, x, z, gamma, groups, epsilon, norm_before_gate)
    if not quantizes_gated_norm(x, z, gamma, groups, recipe):
        norm = dict(groups=groups, epsilon=epsilon, norm_before_gate=norm_before_gate)
        y = gated_rmsnorm(x, z, gamma, **norm, name=name)
        of_dense = dict(recipe=recipe, metas=metas, checkpoint=checkpoint, out=out, grad_spec=grad_spec, tokens=tokens)
        return dense(y.reshape(_joined(y)), kernel, bias, residual, **of_dense, name=name)
    weight, flat = resolve_weight(name, kernel, 1, recipe), x.reshape(_joined(x))
    check(name, "checkpoint", checkpoint, NONE | STRING)
    check_dense(name, flat, wide_of(weight), bias, 1, recipe, metas)
    shape = (*flat.shape[:-1], *wide_of(weight).shape[1:])
    check_residual(name, residual, shape, x.dtype)
    check_shardings(name, shape, out, grad_spec=grad_spec, tokens=tokens)
    out = jax.tree.map(jax.typeof, out)
    others = dict(checkpoint=checkpoint, residual=residual, out=out, grad_spec=grad_spec, tokens=tokens)
    config = Config.of(flat, weight, bias, 1, recipe, **others)
    x, z, gamma = *(_in_groups(a, groups) for a in (x, z)), _gamma_in_groups(gamma, groups)
    x, z, gamma, weight, bias, residual = align(x, z, gamma, weight, bias, residual)
    operands = Operands(x, (Projection(weight, bias, metas or fp8.STATELESS),), (z, gamma), residual)
    return project(operands, Static((config,), GatedNorm(float(epsilon), bool(norm_before_gate))))[0][0]


def quantizes_gated_norm(x: Any, z: Any, gamma: Any, groups: int, recipe: Recipe | None) -> bool:
    """Whether `gated_norm_dense` quantizes the norm's output from f32, and does not write it.

    It does so under a recipe, for x and z of one type that FP8 is made of, where each device has whole groups of heads.
    Blocks that share a scale lie within a group, as they do in the kernel: so where there are several groups, blocks
    must divide their channels.
    """
    if not isinstance(recipe, Recipe) or not _has_op(x, z, gamma, groups):
        return False  # `dense` says what is wrong with another value
    form = format_of(recipe, "x")
    whole_blocks = not form.block or groups == 1 or math.prod(x.shape[-2:]) // groups % form.block == 0
    return whole_blocks and not form.square


def _check_gated(name, x, z, gamma, groups, epsilon, norm_before_gate):
    for what, a in (("x", x), ("z", z), ("gamma", gamma)):
        check(name, what, a, FLOATS_ARRAY)
    if x.ndim < 2 or z.shape != x.shape or gamma.shape != (math.prod(x.shape[-2:]),):
        raise ValueError(
            f"{name}: x has shape {x.shape}, z {z.shape}, gamma {gamma.shape}; pass [..., h, p] twice, and [h*p]."
        )
    check(name, "groups", groups, integer(1))
    if x.shape[-2] % groups:
        raise ValueError(f"{name}: groups is {groups}, which does not divide the {x.shape[-2]} heads of x.")
    check(name, "epsilon", epsilon, number(above=0))
    check(name, "norm_before_gate", norm_before_gate, BOOL)


# -- whole groups: the op -----------------------------------------------------------------------------------------


def _has_op(x, z, gamma, groups):
    """Whether te_gated_norm_fwd takes these types, and each device has whole groups: the op would gather others."""
    if not all(map(FLOAT.accepts, (x, z, gamma))) or z.dtype != x.dtype:
        return False
    if any(groups % split_over(a, axis)[1] for a, axis in ((x, -2), (z, -2), (gamma, -1))):
        return False
    return not any(on_explicit_mesh(aval := jax.typeof(a)) and entries(aval)[-1] for a in (x, z))


def _joined(a):
    """The shape [..., h*p] of a [..., h, p]."""
    return *a.shape[:-2], math.prod(a.shape[-2:])


def _in_groups(a, groups):
    """a [..., h, p] as [..., g, c]. An axis is merged and split, which types of Explicit meshes follow; they follow no
    other change of two axes."""
    return a.reshape(_joined(a)).reshape(*a.shape[:-2], groups, math.prod(a.shape[-2:]) // groups)


def _gamma_in_groups(gamma, groups):
    return gamma.reshape(groups, gamma.shape[0] // groups)


# -- groups that devices share: plain JAX -------------------------------------------------------------------------


def _gated(x, z, gamma, groups, epsilon, norm_before_gate, activation):
    wide = jnp.promote_types(x.dtype, jnp.float32)
    gate = (silu if activation == "silu" else jax.nn.sigmoid)(z.astype(wide))
    x = x.astype(wide) if norm_before_gate else x.astype(wide) * gate
    of_heads = jnp.mean(jnp.square(x), -1)
    if on_explicit_mesh(aval := jax.typeof(of_heads)):  # Devices that share a group's heads exchange these numbers.
        of_heads = jax.sharding.reshard(of_heads, PartitionSpec(*aval.sharding.spec[:-1], None))
    heads = x.shape[-2] // groups
    mean_square = jnp.mean(of_heads.reshape(*of_heads.shape[:-1], groups, heads), -1)
    rstd = jnp.repeat(jax.lax.rsqrt(mean_square + epsilon), heads, -1)
    normed = x * rstd[..., None] * as_rank(gamma.astype(wide).reshape(x.shape[-2:]), x.ndim)
    return normed * gate if norm_before_gate else normed


@custom_vjp(3)
def _gated_norm(x, z, gamma, static):
    return _gated(x, z, gamma, *static).astype(x.dtype)


def _gated_norm_bwd(static, residuals, dy):
    _, pull = jax.vjp(lambda *args: _gated(*args, *static).astype(dy.dtype), *residuals)
    return tuple(map(like, pull(dy), residuals))


_gated_norm.defvjp(lambda x, z, gamma, static: (_gated_norm(x, z, gamma, static), (x, z, gamma)), _gated_norm_bwd)
