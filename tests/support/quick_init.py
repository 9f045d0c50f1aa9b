"""Variables of modules without their initializers, whose program takes as long to compile as a training step."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

_ONES = ("scale", "scalar", "var", "D")  # gamma, the scales of FP8 state, and statistics of batches
_ZEROS = ("bias", "mean", "amax_history", "index", "count", "offset", "lora_b_kernel", "lora_b", "A_log")
_NORMAL = ("kernel", "embedding", "lora_a", "wi_0", "wi_1", "wo")


def quick_init(init, seed=0):
    """-> a function like `jax.jit(init)` of a module's `init`. It traces `init` for the tree, the shapes and the boxes;
    what initializers draw numpy draws, normal numbers over the root of a kernel's longest axis but the last, and what
    they fill with 0 or 1 is 0 or 1. A leaf of another name is an error: it may hold something else at first."""

    @functools.wraps(init)
    def run(*args, **kwargs):
        rng = np.random.default_rng(seed)
        shapes = jax.eval_shape(functools.partial(init, **kwargs), *args)
        return jax.tree.map_with_path(lambda path, leaf: _value(path, leaf, rng), shapes)

    return run


def _value(path, leaf, rng):
    if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        return jax.random.key(0)
    name = [key.key for key in path if isinstance(key, jax.tree_util.DictKey)][-1]
    has = lambda endings: any(name == end or name.endswith(f"_{end}") for end in endings)
    if has(_ZEROS):
        return _put(np.zeros(leaf.shape, leaf.dtype))
    if has(_ONES):
        return _put(np.ones(leaf.shape, leaf.dtype))
    if has(_NORMAL):
        deviation = 1 if name.endswith("embedding") else 1 / math.sqrt(max(leaf.shape[:-1], default=1))
        return _put((deviation * rng.standard_normal(leaf.shape)).astype(leaf.dtype))
    where = jax.tree_util.keystr(path)
    raise KeyError(f"quick_init: how does the leaf {where} begin? Say so in tests/support/quick_init.py")


def quick_nnx(make, seed=0):
    """The NNX module that `make()` constructs, with such values."""
    rng, model = np.random.default_rng(seed), nnx.eval_shape(make)
    nnx.update(model, jax.tree.map_with_path(lambda path, leaf: _value(path, leaf, rng), nnx.state(model)))
    return model


def _put(values):
    """Where a mesh is set, on all of it, as what a program makes there; else without a program."""
    return jax.device_put(values) if jax.sharding.get_abstract_mesh().empty else jnp.asarray(values)
