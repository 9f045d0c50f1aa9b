"""FP8 GEMMs of weights that read one tensor, or its norm, under one custom_vjp: `dense`, `layernorm_dense` and
`gated_norm_dense`."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
from jax.custom_derivatives import SymbolicZero
from jax.custom_derivatives import custom_vjp_primal_tree_values as values_of

from te_jax.core.derivatives import custom_vjp
from te_jax.core.policies import STATISTICS, with_names
from te_jax.core.types import like
from te_jax.layers.config import Config
from te_jax.layers.gemms import dgrad_and_read, fprop_each
from te_jax.layers.produce import Role, produce, quantize_grad, quantize_tensor, quantize_weight
from te_jax.layers.tensor import LayerUses
from te_jax.layers.vjp import (
    differentiate_weight,
    gather_after,
    has_gradient,
    instantiate,
    jit_layer,
    save_for_backward,
    sum_meanwhile,
    tag_for_wgrad,
)
from te_jax.layers.weight import Projection
from te_jax.ops.quantize.gated_norm import GatedNorm
from te_jax.ops.quantize.norm import Norm


class Operands(NamedTuple):
    """What is differentiated."""

    x: jax.Array  # [*B, *C]; of a gated norm [*B, g, c], of which the product contracts g*c
    projections: tuple[Projection, ...]
    of_norm: tuple[jax.Array | None, ...] = ()  # what the norm reads besides x: gamma and beta, or z and gamma
    residual: jax.Array | None = None  # of the one projection's result


class Static(NamedTuple):
    """What is not differentiated."""

    configs: tuple[Config, ...]  # of the projections
    norm: Norm | GatedNorm | None = None
    with_ln_out: bool = False
    with_input: bool = False


def multiply(operands: Operands, static: Static, train: bool, need_wgrad: Sequence[bool]) -> tuple[Any, ...]:
    """The results, and for the backward pass x or its norm in FP8, the weights, and the norm's statistics.

    need_wgrad: whether the weight of each projection has a gradient.
    """
    x, projections, of_norm, residual = operands
    config = static.configs[0]
    uses = LayerUses.of(config.recipe, train, any(need_wgrad))
    role = Role("x", projections[0].metas.x, uses.x, config.x)
    if static.norm is None:
        (q, _), got = quantize_tensor(x, config.lead, role, config), {}
    else:
        others = (*(["y"] if static.with_ln_out else []), *static.norm.statistics)
        source = static.norm.source(x, *of_norm)
        q, got = produce(source, role, config, others)
        q = q.with_one_column_axis(source.split)
    each = list(zip(projections, static.configs))
    weights = [quantize_weight(p.kernel, p.metas.kernel, uses.weight, config) for p, config in each]
    y = fprop_each(q, [(w, p.bias, config) for w, (p, config) in zip(weights, each)], residual)
    results = y, got["y"] if static.with_ln_out else None, x if static.with_input else None
    return results, q, weights, tuple(got[name] for name in (static.norm.statistics if static.norm else ()))


_NAMES_OF_LAYERS = {type(None): "dense", Norm: "layernorm_dense", GatedNorm: "gated_norm_dense"}


def _name_of_layer(static: Static) -> str:
    return f"te_jax.layers.{_NAMES_OF_LAYERS[type(static.norm)]}"


@custom_vjp(1, in_fp8=_name_of_layer)
def _project(operands, static):
    return multiply(operands, static, train=False, need_wgrad=())[0]


def _project_fwd(operands, static):
    need_wgrad = [has_gradient(p.kernel) for p in operands.projections]
    x, projections, of_norm, _ = operands = values_of(operands)
    out, q, weights, stats = multiply(operands, static, train=True, need_wgrad=need_wgrad)
    q = tag_for_wgrad(q, static.configs[0])
    each = zip(weights, projections, static.configs, need_wgrad)
    saved = [save_for_backward(q, w, p.metas, config, needs_wgrad, p.kernel) for w, p, config, needs_wgrad in each]
    return out, (saved, None if static.norm is None else (x, with_names(stats, STATISTICS), of_norm))


def _project_bwd(static, residuals, cotangents):
    saved, kept = residuals
    dy = list(map(instantiate, cotangents[0]))
    dln_out, dx_out = (None if isinstance(d, SymbolicZero) else d for d in cotangents[1:])  # None also if no result
    config = static.configs[0]
    dy[0], saved = gather_after(dy[0], saved, config)
    each = list(zip(saved, static.configs))
    grads, dbiases = zip(*(quantize_grad(d, s.metas.grad, c, s.needs_wgrad) for d, (s, c) in zip(dy, each)))
    dx, grads = dgrad_and_read([(grad, s.weight, c) for grad, (s, c) in zip(grads, each)], dln_out)
    dx = like(dx, config.x)
    dprojections = (differentiate_weight(s, *g, c) for g, (s, c) in zip(zip(grads, dbiases), each))
    dx, dprojections = sum_meanwhile(list(dprojections), dx, config)
    dnorm = ()
    if kept is not None:
        x, stats, of_norm = kept
        through = {} if dx_out is None else dict(dres=dx_out)
        dx, dnorm = static.norm.backward(dx.reshape(x.shape), x, stats, of_norm, **through)
    dresidual = None if config.residual is None else like(dy[0], config.residual)
    return (Operands(dx, tuple(dprojections), dnorm, dresidual),)


_project.defvjp(_project_fwd, _project_bwd, symbolic_zeros=True)
project: Callable[..., Any] = jit_layer(_project, 1)
