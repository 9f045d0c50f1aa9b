"""`te_jax.explain_sharding`: how a module of Flax Linen becomes the program of a training step."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn
from flax.core import DenyList
from jax.sharding import Mesh

from te_jax.sharding.logical_axes import extend_logical_axis_rules


def step_of(
    model: nn.Module, variables: Any, args: tuple[Any, ...], kwargs: dict[str, Any], mesh: Mesh
) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """-> a function that differentiates the sum of all outputs by parameters, state and floating arguments, each
    gradient sharded as what it belongs to, and its arguments."""
    key = jax.eval_shape(jax.random.key, 0)
    if variables is None:
        boxed = jax.eval_shape(lambda key, *args: model.init(key, *args, **kwargs), key, *args)
        rules = extend_logical_axis_rules(nn.get_logical_axis_rules())
        shardings = nn.logical_to_mesh_sharding(nn.get_partition_spec(boxed), mesh, rules)
        place = lambda a, sharding: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=sharding)
        variables = jax.tree.map(place, jax.eval_shape(nn.meta.unbox, boxed), shardings)
    leaves, tree = jax.tree.flatten((variables, args))
    moving = [i for i, leaf in enumerate(leaves) if jnp.issubdtype(jnp.result_type(leaf), jnp.floating)]

    def step(key, *leaves):
        def loss(*floats):
            whole = list(leaves)
            for i, value in zip(moving, floats):
                whole[i] = value
            variables, args = jax.tree.unflatten(tree, whole)
            out, _ = model.apply(variables, *args, **kwargs, rngs={"params": key}, mutable=DenyList("params"))
            return sum(jnp.sum(a.astype(jnp.float32)) for a in jax.tree.leaves(out))

        floats = [leaves[i] for i in moving]
        return jax.value_and_grad(loss, argnums=tuple(range(len(moving))))(*floats)

    own = [getattr(leaves[i], "sharding", None) for i in moving]
    return jax.jit(step, out_shardings=(None, tuple(own))), (key, *leaves)
