"""y = norm(x) . kernel + bias: the norm writes FP8 in both layouts, its output is never read back to be quantized."""

from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

import jax
from jax.custom_derivatives import SymbolicZero
from jax.custom_derivatives import custom_vjp_primal_tree_values as values_of

from te_jax import fp8
from te_jax._arrays import as_jax
from te_jax._check import BOOL, NONE, STRING, Kind, check, tuple_of
from te_jax._types import align, like
from te_jax.checkpoint_policies import STATISTICS, named
from te_jax.layers._specs import explicit_spec
from te_jax.layers.config import Config
from te_jax.layers.dense import check_dense, dense
from te_jax.layers.gemms import dgrad, fprop
from te_jax.layers.produce import Role, produce, quantize_grad, quantize_weight
from te_jax.layers.tensor import LayerUses, wide_of
from te_jax.layers.vjp import (
    differentiate_weight,
    has_gradient,
    instantiate,
    jit_layer,
    reads_wgrad,
    save,
    tag_for_wgrad,
)
from te_jax.layers.weight import QuantizedKernel, resolve_weight
from te_jax.ops import norm as norm_op
from te_jax.ops.gemm import gemm_sum


def layernorm(
    x,
    gamma,
    beta=None,
    *,
    norm="layernorm",
    zero_centered_gamma=False,
    epsilon=1e-6,
    name: str = "te_jax.layers.layernorm",
) -> jax.Array:
    """LayerNorm or RMSNorm ("rmsnorm", beta None) over the last axis of x [..., h]; gamma, beta [h]. -> x's type.

    zero_centered_gamma: gamma + 1 is applied. epsilon: above 0. name: what errors call this layer. Raises ValueError or
    TypeError as `te_jax.ops.norm.norm`.
    """
    return norm_op.norm(x, gamma, beta, kind=norm, zero_centered=zero_centered_gamma, eps=epsilon, name=name)


class Projection(NamedTuple):
    """One of several dense layers that read the same norm."""

    kernel: jax.Array | QuantizedKernel  # [h, *F]
    bias: jax.Array | None  # [*F]
    metas: fp8.DenseMetas | None  # under a recipe with state


_ALSO = tuple_of(Kind("a Projection", lambda p: isinstance(p, Projection)))


def layernorm_dense(
    x,
    kernel,
    gamma,
    beta=None,
    bias=None,
    *,
    norm="layernorm",
    zero_centered_gamma=False,
    epsilon=1e-6,
    return_layernorm_output=False,
    return_input=False,
    also: Sequence[Projection] = (),
    recipe=None,
    metas: fp8.DenseMetas | None = None,
    checkpoint=None,
    name: str = "te_jax.layers.layernorm_dense",
) -> tuple[jax.Array, ...]:
    """(y, ln_out or None): ln_out = norm(x), y[*B, *F] = ln_out[*B, h] . kernel[h, *F] + bias[*F].

    x [*B, h]; gamma, beta [h]; the other arguments as in `layernorm` and `dense`. Under a recipe ln_out is quantized
    from f32, before it is rounded to x's type; after that under one of block scales. Raises ValueError or TypeError as
    they do.

    return_input: a third result is x itself, for a residual connection: the gradient that comes back through it is
                  added in the norm's backward kernel, not in a pass of its own.
    also:         more kernels that read ln_out, as those of keys and values beside that of queries. y is then the tuple
                  of all products, and under a recipe ln_out is quantized once, with the scale of the first. ln_out's
                  gradient through all of them crosses devices as one sum.
    """
    check(name, "also", also, _ALSO)
    check(name, "checkpoint", checkpoint, NONE | STRING)
    x, gamma, beta = as_jax(x, gamma, beta)
    projections = [Projection(*as_jax(*p)) for p in ((kernel, bias, metas), *also)]
    projections = [p._replace(kernel=resolve_weight(name, p.kernel, 1, recipe)) for p in projections]
    norm_op.check(name, x, gamma, beta, norm, epsilon, zero_centered_gamma)
    check(name, "return_layernorm_output", return_layernorm_output, BOOL)
    check(name, "return_input", return_input, BOOL)
    for p in projections:
        check_dense(name, x, wide_of(p.kernel), p.bias, 1, recipe, p.metas)
    if recipe is None:
        ln_out = layernorm(
            x, gamma, beta, norm=norm, zero_centered_gamma=zero_centered_gamma, epsilon=epsilon, name=name
        )
        each = _dense_of_one_sum if also else _dense_each
        y = each(*align(ln_out, *(w for p in projections for w in (p.kernel, p.bias))))
    else:
        attrs = norm_attrs(norm, zero_centered_gamma, epsilon)
        configs = tuple(Config.of(x, p.kernel, p.bias, 1, recipe, checkpoint=checkpoint) for p in projections)
        x, gamma, beta, *weights = align(x, gamma, beta, *(w for p in projections for w in (p.kernel, p.bias)))
        metas = [p.metas or fp8.STATELESS for p in projections]
        aligned = tuple(map(Projection, weights[::2], weights[1::2], metas))
        static = configs, attrs, bool(return_layernorm_output), bool(return_input)
        y, ln_out, x = _run_norm_dense(x, gamma, beta, aligned, static)
    out = y if also else y[0], ln_out if return_layernorm_output else None
    return (*out, x) if return_input else out


def _dense_each(x, *weights):
    """Dense layers of one x, of kernel, bias, kernel, bias, ..."""
    return tuple(dense(x, *w) for w in zip(weights[::2], weights[1::2]))


# What autodiff gives, but x's gradient crosses devices as one sum: XLA would sum over devices what each layer adds.
_dense_of_one_sum = jax.custom_vjp(_dense_each)


def _dense_bwd(residuals, dy):
    x, *weights = residuals
    _, weight_grads = jax.vjp(partial(_dense_each, x), *weights)
    terms = [(d, kernel, None, None) for d, kernel in zip(dy, weights[::2])]
    terms.reverse()  # autodiff's order: the same bits
    dx = gemm_sum(terms, lead=x.ndim - 1, out_dtype=x.dtype, out_spec=explicit_spec(jax.typeof(x)))
    return like(dx, x), *weight_grads(dy)


_dense_of_one_sum.defvjp(lambda *args: (_dense_each(*args), args), _dense_bwd)


def norm_attrs(norm, zero_centered_gamma, epsilon) -> tuple:
    """The static attributes of te_norm_fwd, hashable."""
    return (("eps", float(epsilon)), ("rms", norm == "rmsnorm"), ("zero_centered", bool(zero_centered_gamma)))


def quantize_norm(x, gamma, beta, role: Role, config: Config, attrs, with_ln_out=False):
    """norm(x) as its GEMMs read it, norm(x) of x's type if asked for, and the statistics (mean or None, rstd)."""
    attrs = dict(attrs)
    others = (*(["y"] if with_ln_out else []), *([] if attrs["rms"] else ["mean"]), "rstd")
    q, got = produce(norm_op.source(x, gamma, beta, attrs), role, config, others)
    return q, got["y"] if with_ln_out else None, (got.get("mean"), got["rstd"])


def norm_backward(dnorm, x, stats, gamma, beta, attrs, dresidual=None):
    """-> dx + dresidual, dgamma, dbeta."""
    attrs = dict(attrs)
    kind = dict(rms=attrs["rms"], zero_centered=attrs["zero_centered"])
    return norm_op.backward(dnorm, x, *stats, gamma, beta, dres=dresidual, **kind)


def _forward(x, gamma, beta, projections, static, train, wgrad):
    configs, attrs, with_ln_out, _ = static
    uses = LayerUses.of(configs[0].recipe, train, wgrad)
    role = Role("x", projections[0].metas.x, uses.x, configs[0].x)
    q, ln_out, stats = quantize_norm(x, gamma, beta, role, configs[0], attrs, with_ln_out)
    each = list(zip(projections, configs))
    weights = [quantize_weight(p.kernel, p.metas.kernel, uses.weight, config) for p, config in each]
    y = tuple(fprop(q, w, p.bias, config) for w, (p, config) in zip(weights, each))
    return y, ln_out, q, weights, stats


@partial(jax.custom_vjp, nondiff_argnums=(4,))
def _norm_dense(x, gamma, beta, projections, static):
    y, ln_out, *_ = _forward(x, gamma, beta, projections, static, train=False, wgrad=False)
    return y, ln_out, x if static[-1] else None


def _norm_dense_fwd(x, gamma, beta, projections, static):
    wgrads = [has_gradient(p.kernel) for p in projections]
    x, gamma, beta, projections = values_of((x, gamma, beta, projections))
    y, ln_out, q, weights, stats = _forward(x, gamma, beta, projections, static, train=True, wgrad=any(wgrads))
    q = tag_for_wgrad(q, static[0][0])
    operands = [save(q, w, *rest) for w, *rest in zip(weights, static[0], wgrads)]
    out = y, ln_out, x if static[-1] else None
    return out, (operands, [p.metas for p in projections], (x, named(stats, STATISTICS), gamma, beta))


def _norm_dense_bwd(static, residuals, cotangents):
    operands, metas, (x, stats, gamma, beta) = residuals
    configs, attrs, *_ = static
    dy, *others = cotangents
    dln_out, dx_out = (None if isinstance(d, SymbolicZero) else d for d in others)  # None also if it is no result
    grads, dbiases = zip(
        *(
            quantize_grad(instantiate(d), m.grad, config, reads_wgrad(q))
            for d, m, config, (q, _) in zip(dy, metas, configs, operands)
        )
    )
    dnorm = dgrad([(grad, w, config) for grad, (_, w), config in zip(grads, operands, configs)], dln_out)
    dprojections = []
    for (q, w), grad, m, dbias, config in zip(operands, grads, metas, dbiases, configs):
        dkernel, dmetas = differentiate_weight(q, w, grad, m, config)
        dprojections.append(Projection(dkernel, dbias, dmetas))
    dx, dgamma, dbeta = norm_backward(like(dnorm, x), x, stats, gamma, beta, attrs, dx_out)
    return dx, dgamma, dbeta, tuple(dprojections)


_norm_dense.defvjp(_norm_dense_fwd, _norm_dense_bwd, symbolic_zeros=True)
_run_norm_dense = jit_layer(_norm_dense, 4)
