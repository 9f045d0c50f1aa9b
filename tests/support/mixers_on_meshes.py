"""Modules of mixers on several devices, and on one."""

from functools import cache, partial
from typing import Any

import jax
import numpy as np
from flax import linen as nn
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import te_jax.flax as te_flax
from te_jax.ops.attention import SequenceDescriptor
from te_jax.sharding import MeshResource, global_shard_guard

_BY_KIND = {"auto": AxisType.Auto, "explicit": AxisType.Explicit, "manual": AxisType.Auto}


def _with_residual(module, params, x):
    return module.apply({"params": params}, x, residual=True)[0]


def _with_mask(module, params, x, mask):
    return module.apply({"params": params}, x, mask)[0]


def _run_of(apply, weights, params, x, *mask):
    """y and gradients of params and x."""
    y, vjp = jax.vjp(lambda p, x: apply(p, x, *mask), params, x)
    return y, *vjp(weights.astype(y.dtype))


@cache
def _on_one_device(module, apply):
    """One program for all meshes."""
    return jax.jit(partial(_run_of, partial(apply, module)))


def _on_mesh(module, mesh, rules, params, x, spec):
    """Parameters as the rules say, and x; the specs of params."""
    place = lambda a, spec: jax.device_put(np.asarray(a), NamedSharding(mesh, spec))
    boxes = jax.eval_shape(lambda: module.init(jax.random.key(0), x))["params"]
    spec_of = lambda box: nn.logical_to_mesh_axes(box.names, rules)
    specs = jax.tree.map(spec_of, boxes, is_leaf=lambda leaf: isinstance(leaf, nn.Partitioned))
    return (jax.tree.map(place, params, specs), place(x, spec)), specs


def of_rows_and_heads(module: nn.Module, params: Any, x: Any, weights: Any, kind: str, tp: int) -> tuple[Any, ...]:
    """Two devices by rows, tp by heads -> y and gradients of params and x; the same of one device; the specs of
    params; the compiled program."""

    run = partial(_run_of, partial(_with_residual, module), weights)
    want = _on_one_device(module, _with_residual)(weights, params, x)
    mesh = jax.make_mesh((2, tp), ("dp", "tp"), axis_types=(_BY_KIND[kind],) * 2)
    with jax.set_mesh(mesh), global_shard_guard(MeshResource(dp_resource="dp", tp_resource="tp")):
        rules = te_flax.extend_logical_axis_rules(())
        placed, specs = _on_mesh(module, mesh, rules, params, x, PartitionSpec("dp"))
        with nn.logical_axis_rules(rules):
            compiled = jax.jit(run).lower(*placed).compile()
            got = compiled(*placed)
    return got, want, specs, compiled.as_text()


def of_a_sequence(
    module: nn.Module, params: Any, x: Any, weights: Any, mask: Any, kind: str, sizes: tuple[int, int, int]
) -> tuple[Any, ...]:
    """Devices by rows, tokens and heads, as many as `sizes`, which hold x and parameters so -> y and gradients of both;
    the same of one device; the jaxpr. kind "manual": inside a `jax.shard_map` over the axis of tokens."""

    apply = partial(_with_mask, module)
    run = lambda params, x, apply=apply: _run_of(apply, weights, params, x, mask)
    want = _on_one_device(module, _with_mask)(weights, params, x, mask)
    mesh = jax.make_mesh(sizes, ("dp", "cp", "tp"), axis_types=(_BY_KIND[kind],) * 3)
    resource = MeshResource(dp_resource="dp", cp_resource="cp", tp_resource="tp")
    with jax.set_mesh(mesh), global_shard_guard(resource):
        rules = te_flax.extend_logical_axis_rules(())
        placed, _ = _on_mesh(module, mesh, rules, params, x, PartitionSpec("dp", "cp"))
        with nn.logical_axis_rules(rules):
            whole, cut = PartitionSpec(), PartitionSpec(None, "cp")
            shards = jax.shard_map(apply, in_specs=(whole, cut, whole), out_specs=cut, axis_names={"cp"})
            run = partial(run, apply=shards) if kind == "manual" else run
            program = jax.jit(run).trace(*placed)
            got = program.lower().compile()(*placed)
    return got, want, program.jaxpr.jaxpr


def from_a_cache(module: nn.Module, params: Any, x: Any) -> tuple[Any, Any]:
    """Two devices of Explicit axes by rows, two by heads -> a token behind prompts of several lengths, and the cache;
    the same of one device."""
    lengths = SequenceDescriptor.from_seqlens(np.arange(len(x), dtype=np.int32) + 1)
    step = dict(decode=True, mutable=["cache"])

    def run(params, x):
        _, cache = module.apply({"params": params}, x, lengths, **step)
        (y, _), cache = module.apply({"params": params, **cache}, x[:, :1], **step)
        return y, cache

    want = jax.jit(run)(params, x)
    mesh = jax.make_mesh((2, 2), ("dp", "tp"), axis_types=(AxisType.Explicit,) * 2)
    with jax.set_mesh(mesh), global_shard_guard(MeshResource(dp_resource="dp", tp_resource="tp")):
        rules = te_flax.extend_logical_axis_rules(())
        placed, _ = _on_mesh(module, mesh, rules, params, x, PartitionSpec("dp"))
        with nn.logical_axis_rules(rules):
            return jax.jit(run)(*placed), want
