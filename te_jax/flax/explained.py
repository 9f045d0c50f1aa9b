"""`te_jax.explain_sharding`: how a module of Flax Linen becomes the program of a training step."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn
from flax.core import DenyList
from jax.sharding import Mesh, NamedSharding

from te_jax.sharding.logical_axes import extend_logical_axis_rules
from te_jax.sharding.resource import current_mesh_resource


def step_of(
    model: nn.Module, variables: Any, call: Callable[..., Any], arrays: Sequence[Any], mesh: Mesh
) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """-> a function that differentiates the sum of all outputs by parameters, state and floating arguments, each
    gradient sharded as what it belongs to, and its arguments.

    call, arrays: the call of the module, as `te_jax.core.arrays.arrays_apart` has it.
    """
    key = jax.eval_shape(jax.random.key, 0)
    if variables is None:
        variables = _initial(model, call, key, arrays, mesh)
    leaves, tree = jax.tree.flatten((variables, list(arrays)))
    moving = [i for i, leaf in enumerate(leaves) if jnp.issubdtype(jnp.result_type(leaf), jnp.floating)]

    def step(key, *leaves):
        def loss(*floats):
            whole = list(leaves)
            for i, value in zip(moving, floats):
                whole[i] = value
            variables, arrays = jax.tree.unflatten(tree, whole)
            apply = partial(model.apply, variables, rngs={"params": key}, mutable=DenyList("params"))
            out, _ = call(apply, arrays)
            return sum(jnp.sum(a.astype(jnp.float32)) for a in jax.tree.leaves(out))

        floats = [leaves[i] for i in moving]
        return jax.value_and_grad(loss, argnums=tuple(range(len(moving))))(*floats)

    own = tuple(_sharding_on(mesh, leaves[i]) for i in moving)
    return jax.jit(step, out_shardings=(None, own)), (key, *leaves)


def _sharding_on(mesh, leaf):
    sharding = getattr(leaf, "sharding", None)
    return sharding if isinstance(sharding, NamedSharding) and sharding.mesh.size == mesh.size else None


def _initial(model, call, key, arrays, mesh):
    """The types of the variables that `init` makes, sharded by their logical axes."""
    boxed = jax.eval_shape(lambda key, arrays: call(partial(model.init, key), arrays), key, arrays)
    rules = nn.get_logical_axis_rules()
    rules = rules if current_mesh_resource() is None else extend_logical_axis_rules(rules)
    shardings = nn.logical_to_mesh_sharding(nn.get_partition_spec(boxed), mesh, rules)
    place = lambda a, sharding: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=sharding)
    return jax.tree.map(place, jax.eval_shape(nn.meta.unbox, boxed), shardings)
