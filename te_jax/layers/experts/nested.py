"""A `jax.shard_map` that can be differentiated inside of another one.

jax gives a residual the mesh axes that its type varies over, those of the outer `jax.shard_map` among them, which the
inner one may not name. Here the forward and the backward pass are each a `jax.shard_map`, and what is kept between them
is stacked along the inner one's axes only.
"""

from collections.abc import Callable
from itertools import combinations
from typing import Any

import jax
from jax.custom_batching import custom_vmap
from jax.sharding import PartitionSpec
from jax.tree_util import Partial

from te_jax.core.derivatives import custom_vjp
from te_jax.core.types import align, varying_axes
from te_jax.layers.vjp import instantiate


def run_inside_shard_map(part: Callable[..., Any], args: Any, specs: Any, results: Any, axes: frozenset[str]) -> Any:
    """`jax.shard_map(part, in_specs=(specs,), out_specs=results, axis_names=axes)(args)`, where some mesh axes are
    Manual.

    part:  args -> (y, other results, which have no gradient).
    specs: of all leaves of args. results: of y, and of the others.
    """
    (args,) = align(args)
    shared = dict(axis_names=axes)

    @custom_vjp(in_fp8=lambda: "te_jax.layers.moe inside jax.shard_map")
    def run(args):
        return jax.shard_map(part, in_specs=(specs,), out_specs=results, **shared)(args)

    def fwd(args):
        leaves, tree = jax.tree.flatten(args)
        of_leaves = tree.flatten_up_to(specs)
        moves, values = [a.perturbed for a in leaves], [a.value for a in leaves]
        static = []  # what is kept: its structure, and for each leaf its axes

        def of_device(*values):
            def of_moving(*moving):
                moving = iter(moving)
                return part(tree.unflatten(next(moving) if m else v for m, v in zip(moves, values)))

            y, pull, others = jax.vjp(of_moving, *(v for m, v in zip(moves, values) if m), has_aux=True)
            kept, structure = jax.tree.flatten(pull)
            each = [tuple(sorted(varying_axes(a) & axes)) for a in kept]
            static[:] = [structure, each]
            return (y, others), {key: [a[None] for a, k in zip(kept, each) if k == key] for key in stacks}

        stacks = {key: PartitionSpec(key) for n in range(len(axes) + 1) for key in combinations(sorted(axes), n)}
        run = jax.shard_map(of_device, in_specs=tuple(of_leaves), out_specs=(results, stacks), **shared)
        out, kept = _as_one(run)(*values)
        structure, each = static

        def pull(kept, dy):
            def of_device(kept, dy):
                kept = {key: iter(group) for key, group in kept.items()}
                return structure.unflatten(next(kept[key])[0] for key in each)(dy)

            moving = tuple(spec for m, spec in zip(moves, of_leaves) if m)
            run = jax.shard_map(of_device, in_specs=(stacks, results[0]), out_specs=moving, **shared)
            grads = iter(run(kept, dy))
            return tree.unflatten(next(grads) if m else None for m in moves)

        return out, Partial(pull, kept)

    run.defvjp(fwd, lambda pull, cotangents: (pull(instantiate(cotangents[0])),), symbolic_zeros=True)
    return jax.jit(run, inline=True)(args)


def _as_one(function: Callable[..., Any]) -> Callable[..., Any]:
    """`function` as one equation, into which no policy of `jax.checkpoint` looks: what it kept would have the axes of
    the outer `jax.shard_map`, too."""
    run = custom_vmap(function)

    @run.def_vmap
    def rule(size, batched, *args):
        axes = tuple(0 if b else None for b in batched)
        out = jax.vmap(function, axes)(*args)
        return out, jax.tree.map(lambda _: True, out)

    return run
