"""What tests of several recipes share: steps of a layer, data whose parts have amaxes of their own, nearness."""

import functools

import flax
import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn
from jax.sharding import AxisType
from layer_cases import data, qdq
from quick_init import quick_init

import te_jax as te
import te_jax.flax as te_flax


def results(layer, *args):
    """y, and the gradients of all arguments; of one program. On a mesh the gradient of y is placed as y is."""

    @jax.jit
    def run(*args):
        y, vjp = jax.vjp(layer, *args)
        (dy,) = data(np.random.default_rng(1), y.shape, dtype=y.dtype)
        explicit = AxisType.Explicit in jax.typeof(y).sharding.mesh.axis_types
        return y, vjp(jax.sharding.reshard(dy, jax.typeof(y).sharding) if explicit else dy)

    return run(*args)


def near(got, want):
    """Equal but for what two programs of the same ops round otherwise: where f32 noise, or a bf16 number that it moved
    by a step of 2**-8, crosses an edge of FP8, a byte differs by a step, 2**-3 of itself (2**-2 in E5M2). Of 300 bytes
    one or two do, each 1 / sqrt(300) of the norm. A scale that is off by a tenth moves most: some 2**-5."""
    got, want = np.asarray(got, np.float64), np.asarray(want, np.float64)
    assert np.linalg.norm(got - want) <= 2.0**-6 * np.linalg.norm(want) + 1e-30


@functools.cache
def losses_of_steps(recipe):
    """Of five steps of a layer without FP8 state, or without FP8."""
    fields = dict(hidden_size=16, mlp_hidden_size=144, num_attention_heads=2, hidden_dropout=0.0)
    module = te_flax.TransformerLayer(**fields, attention_dropout=0.0)
    (x,) = data(np.random.default_rng(0), (1, 140, 16))
    with te.autocast(recipe is not None, recipe):
        state, params = flax.core.pop(nn.meta.unbox(quick_init(module.init)(jax.random.key(0), x)), "params")
        assert state == {}

        @jax.jit
        def step(params):
            loss = lambda params: jnp.mean(module.apply({"params": params}, x) ** 2)
            value, grads = te.value_and_grad(loss)(params)
            return value, jax.tree.map(lambda p, g: p - 3e-2 * g, params, grads)

        found = []
        for _ in range(5):
            loss, params = step(params)
            found.append(float(loss))
    return np.array(found)


@functools.partial(jax.jit, static_argnums=(1, 2))
def own(x, direction, recipe):
    """What FP8 makes of x [...], with x's own scale; f32."""
    top, amax = recipe.fp8_format.max(direction), jnp.max(jnp.abs(x.astype(jnp.float32)))
    scale = top / jnp.maximum(amax, recipe.amax_epsilon)
    scale = jnp.exp2(jnp.floor(jnp.log2(scale))) if recipe.power_2_scale else scale
    return qdq(x, jnp.where(jnp.isfinite(amax) & (amax > 0), scale, 1.0), recipe.fp8_format.dtype(direction))


def uneven(rng, *shape):
    """Over many binades, so that blocks have amaxes of their own; a part is zero."""
    x = rng.standard_normal(shape) * np.exp2(rng.integers(-20, 8, shape))
    x[tuple(slice(size // 2) for size in shape)] *= 0
    return x.astype(np.float32)
