"""A mixture of experts as a loop over experts of dense layers, whose rows are all tokens: zeros where they are not the
expert's."""

import jax
import jax.numpy as jnp

from te_jax.layers import dense
from te_jax.ops.activation import activation
from te_jax.ops.router import route
from te_jax.state import fp8


def shapes(experts, width, hidden, slots=2):
    """Of gate_kernel, wi, wo, wi_bias, wo_bias."""
    each = lambda *shape: (shape,) * slots
    return (
        (width, experts),
        each(experts, width, hidden),
        (experts, hidden, width),
        each(experts, hidden),
        (
            experts,
            width,
        ),
    )


def metas_of(scales, tokens):
    """The metas of wi and of wo, of trees (x, kernel, grad) of each."""
    return tuple(
        fp8.DenseMetas(*(fp8.TensorMeta(*pair) for pair in zip(scale, token))) for scale, token in zip(scales, tokens)
    )


def loop(
    x, gate_kernel, wi, wo, wi_bias=None, wo_bias=None, *, options, recipe=None, metas=None, expert_bias=None, kept=True
):
    """y of `te_jax.layers.moe` without a norm. metas: with an axis of experts each. kept: bool[T, k], True for all."""
    weights, experts, _ = route(jnp.dot(x, gate_kernel, precision="highest"), options.router, expert_bias=expert_bias)
    count = wo.shape[0]

    def add(pairs, expert):
        e, wi, wo, wi_bias, wo_bias, metas = expert
        first, second = metas or (None, None)
        mine = (experts == e) & kept
        of_expert = jnp.any(mine, -1, keepdims=True)
        zeros = lambda rows: jnp.where(jnp.expand_dims(of_expert, tuple(range(2, rows.ndim))), rows, 0)
        z = dense(zeros(x), jnp.stack(wi, 1), stacked(wi_bias), recipe=recipe, metas=first)
        a = activation(zeros(z), options.activations, options.activation_params)
        rows = dense(a, wo, wo_bias, recipe=recipe, metas=second)
        return pairs + jnp.where(mine[..., None], rows[:, None], 0), None

    stacked = lambda bias: None if bias is None else jnp.stack(bias)
    start = jnp.zeros((*experts.shape, x.shape[-1]), x.dtype)
    pairs, _ = jax.lax.scan(add, start, (jnp.arange(count), wi, wo, wi_bias, wo_bias, metas))
    return jnp.sum(pairs.astype(jnp.float32) * weights[..., None], -2).astype(x.dtype)
