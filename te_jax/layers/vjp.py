"""What the custom_vjps of the layers share: which gradients are asked for, what is kept for them, a weight's gradient.

Where the weight is not differentiated, such as a frozen one with LoRA, no wgrad runs, and nothing is written or kept
for it. Autodiff says so by the `symbolic_zeros` of the custom_vjps.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.custom_batching import custom_vmap
from jax.custom_derivatives import SymbolicZero

from te_jax.core.policies import QUANTIZED
from te_jax.core.types import like, varying_axes
from te_jax.layers.config import Config
from te_jax.layers.gemms import wgrad as wgrad_gemm
from te_jax.layers.produce import Role, produce, tag
from te_jax.layers.tensor import Accumulator, Fp8Tensor, LayerUses, is_held_for_fprop, wide_of
from te_jax.layers.weight import Projection
from te_jax.ops.source import Source
from te_jax.state.fp8 import DenseMetas, cotangent


def jit_layer(layer: Any, static: int) -> Callable[..., Any]:
    """A custom_vjp with symbolic zeros, under jit: without jit `jax.shard_map` has no rule for one.

    static: index of the static argument.
    """
    return jax.jit(layer, static_argnums=static, inline=True)


def has_gradient(weight: Any) -> bool:
    """Whether a layer's weight, as its custom_vjp gets it, is differentiated.

    Raises ValueError if its array is, but not the accumulator that the gradient would go to.
    """
    differentiated = wide_of(weight).perturbed
    if not isinstance(weight, Fp8Tensor) or weight.onto is None:
        return differentiated
    if differentiated and not weight.onto.grad.perturbed:
        raise ValueError(
            "te_jax.layers: a kernel is differentiated, but not its entry in the collection wgrads, which its gradient "
            "would go to; differentiate with respect to the collection, or leave it out."
        )
    return weight.onto.grad.perturbed


def instantiate(cotangent: Any) -> jax.Array:
    """The cotangent as an array of zeros where autodiff passes a `SymbolicZero`, else as it is."""
    if not isinstance(cotangent, SymbolicZero):
        return cotangent
    aval = cotangent.aval
    zeros, varies = jnp.zeros(aval.shape), tuple(sorted(varying_axes(aval)))
    return like(lax.pcast(zeros, varies, to="varying") if varies else zeros, aval)


def tag_for_wgrad(x: Fp8Tensor, config: Config) -> Fp8Tensor:
    """What wgrad may read of x, for `save_for_backward`, named for `jax.checkpoint` policies.

    Call it once for all layers that read x: each name makes one more array that a policy may keep.
    """
    x = x._replace(data=None, scale_inv=None, scale_inv_t=x.columns[1])
    return tag(x, QUANTIZED, config, leave=("onto",))


class Saved(NamedTuple):
    """What the backward pass of one GEMM reads."""

    x: Fp8Tensor
    weight: Fp8Tensor
    metas: DenseMetas

    @property
    def needs_wgrad(self) -> bool:
        """Whether the weight has a gradient, so that wgrad runs."""
        return (self.x.wide if self.x.data_t is None else self.x.data_t).size > 0


def save_for_backward(
    x: Fp8Tensor, w: Fp8Tensor, metas: DenseMetas, config: Config, needs_wgrad: bool, given: Any = None
) -> Saved:
    """What dgrad and wgrad read of x, as `tag_for_wgrad` gives it, and of w.

    given: as `kept_for_dgrad` has it.

    Without wgrad there are empty arrays instead of what it would read, and an amax of 0 where nothing else needs one:
    jax remembers one structure of a traced function's residuals, whatever it is differentiated by.
    """
    fprop_wide, _, wgrad_wide = config.recipe.override_linear_precision
    for_wgrad = lambda a, read: (a if needs_wgrad else jnp.zeros((0,))) if read else None
    observed = config.recipe.has_state and not (fprop_wide and wgrad_wide)
    kept = x._replace(
        data_t=for_wgrad(x.data_t, not wgrad_wide),
        wide=for_wgrad(x.wide, wgrad_wide),
        scale_inv_t=for_wgrad(x.scale_inv_t, not wgrad_wide),
        amax=jnp.zeros(()) if observed and x.amax is None else x.amax,
    )
    onto = w.onto and w.onto._replace(grad=for_wgrad(w.onto.grad, True))
    return Saved(kept, kept_for_dgrad(w, given, config)._replace(onto=onto), metas)


def kept_for_dgrad(w: Fp8Tensor, given: Any, config: Config) -> Fp8Tensor:
    """What dgrad reads of the weight w.

    given: the weight as the layer got it. One that was quantized before, as fprop reads it, is kept so, for it is in
    memory anyway, and dgrad transposes it; not where what was gathered of it is to be kept.
    """
    wide = w.wide if config.recipe.override_linear_precision[1] else None
    if w.data is None or config.kept_along is not None or not is_held_for_fprop(given):
        return w._replace(data_t=None, scale_inv_t=None, wide=wide)
    return w._replace(
        data=None, scale_inv=given.scale_inv, data_t=given.data_t, scale_inv_t=given.scale_inv_t, wide=wide
    )


@custom_vmap
def _once(total, before):
    """`total`, a sum that began with `before`. Examples must not share `before`: autodiff would add it up as often."""
    return total


@_once.def_vmap
def _once_vmap(size, batched, total, before):
    if batched[0] and not batched[1]:
        raise ValueError(
            f"te_jax.layers: jax.vmap of {size} examples shares an entry of the collection wgrads; map the collection "
            "too, or leave it out."
        )
    return _once(total, before), batched[0]


def accumulator_cotangent(total: jax.Array | None, onto: Accumulator) -> Accumulator:
    """The cotangent of `onto`, where a wgrad GEMM made `total` of it."""
    return Accumulator(_once(like(total, onto.grad), onto.grad), onto.uses * 0 + 1)


def finish_first(gradient: Projection, then: jax.Array, config: Config) -> tuple[jax.Array, Projection]:
    """(then, gradient), where `then` is there after the kernel's gradient: what that is made of is free before the
    largest tensors of the layer are made of `then`. On a mesh the compiler is left free, but where tokens are in
    pieces."""
    if config.on_mesh and not (config.pieces and config.pieces.whole_mesh):
        return then, gradient
    then, kernel = lax.optimization_barrier((then, gradient.kernel))
    return then, gradient._replace(kernel=kernel)


def sum_meanwhile(
    gradients: Sequence[Projection], then: jax.Array, config: Config
) -> tuple[jax.Array, Sequence[Projection]]:
    """(then, gradients), where tokens are in pieces: `then`, whose last sum travels, is there after the kernels'
    gradients, under which it can hide. Not on meshes over whose other axes these would have to be added up before."""
    if config.pieces is None or not config.pieces.whole_mesh:
        return then, gradients
    then, kernels = lax.optimization_barrier((then, [gradient.kernel for gradient in gradients]))
    return then, [gradient._replace(kernel=kernel) for gradient, kernel in zip(gradients, kernels)]


def gather_after(first: jax.Array, saved: Sequence[Saved], config: Config) -> tuple[jax.Array, Sequence[Saved]]:
    """(first, saved), where tokens are in pieces: what wgrad reads of x, which all of `saved` share, is gathered once
    `first` is there, so that it isn't in the way of pieces that products wait for."""
    x = next((each.x for each in saved if each.needs_wgrad), None)
    if config.pieces is None or not config.pieces.gathers or x is None:
        return first, saved
    first, x = lax.optimization_barrier((first, x))
    if x.data_t is not None and x.scale_inv_t is not None and not x.scale_inv_t.ndim:
        x = x._replace(data_t=config.pieces.gather_columns(x.data_t, config.contract))
    return first, [each._replace(x=x) if each.needs_wgrad else each for each in saved]


def quantize_activation_grad(
    source: Source, z: jax.Array, saved: Saved, config: Config, *, in_one_array: bool = False
) -> tuple[Fp8Tensor, jax.Array | None]:
    """The gradient of an activation's input z, which `source` computes, as the GEMMs read it, and the gradient of the
    bias, if there is one.

    in_one_array: whether one array holds both layouts (`ops.experts.paired`).
    """
    uses, has_bias = LayerUses.of(config.recipe, train=True, wgrad=saved.needs_wgrad).grad, config.bias is not None
    role = Role("grad", saved.metas.grad, uses._replace(paired=in_one_array), jax.typeof(z))
    grad, got = produce(source, role, config, ("dbias",) if has_bias else ())
    return grad, like(got["dbias"], config.bias) if has_bias else None


def differentiate_metas(saved: Saved, grad: Fp8Tensor, config: Config) -> DenseMetas:
    """The cotangent of the FP8 state. grad: the gradient of y."""
    pairs = zip(saved.metas, (saved.x.amax, saved.weight.amax, grad.amax))
    unshared = lambda m: config.unshared_axes(m is not None and m.scale.ndim > 0)
    return DenseMetas(*(cotangent(m, amax, config.recipe, unshared(m)) for m, amax in pairs))


def differentiate_weight(saved: Saved, grad: Fp8Tensor, dbias: jax.Array | None, config: Config) -> Projection:
    """The cotangents of weight [*C, *F], bias and FP8 state.

    grad, dbias: the gradients of y [*B, *F] and of the bias, as `quantize_grad` returns them.

    The weight's cotangent has the weight's type, and is None without wgrad. Where the weight is an Fp8Tensor, `onto`
    has the cotangent if there is an accumulator, else `wide`.
    """
    x, w, _ = saved
    dmetas = differentiate_metas(saved, grad, config)
    if not saved.needs_wgrad:
        dweight = None
    elif w.onto is None:
        dweight = like(wgrad_gemm(x, grad, config), config.weight)
    else:
        onto = accumulator_cotangent(wgrad_gemm(x, grad, config, w.onto.grad), w.onto)
        return Projection(Fp8Tensor(onto=onto), dbias, dmetas)
    return Projection(Fp8Tensor(wide=dweight) if config.stored else dweight, dbias, dmetas)
