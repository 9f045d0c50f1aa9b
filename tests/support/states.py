"""What tests of parameters and training states share: inputs, a state, equality, and a way through a checkpoint."""

import flax
import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import orbax_whole  # noqa: F401
from arrays import on_device
from quick_init import quick_init

import te_jax as te
import te_jax.flax as te_flax


def data(rng: np.random.Generator, *shape: int) -> jax.Array:
    return on_device(rng.standard_normal(shape), jnp.float32)


def state_of(model, recipe, x) -> te_flax.TrainState:
    """Before the first step of gradient descent; parameters are boxed with their logical axes."""
    with te.autocast(True, recipe):
        others, params = flax.core.pop(quick_init(model.init)(jax.random.key(0), x), "params")
        return te_flax.TrainState.create(apply_fn=model.apply, params=params, tx=optax.sgd(0.1), collections=others)


def assert_equal(got, want):
    """Trees, bit for bit."""
    jax.tree.map(np.testing.assert_array_equal, got, want)


def saved(path, tree):
    with ocp.StandardCheckpointer() as checkpointer:  # leaving it waits until all is written
        checkpointer.save(path, tree)


def restored(path, like):
    """like: the tree that was saved, of arrays or their types."""
    with ocp.StandardCheckpointer() as checkpointer:
        return checkpointer.restore(path, like)
