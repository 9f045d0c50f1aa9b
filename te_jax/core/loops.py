"""Loops whose stacked results begin as memory that nothing filled.

`lax.scan` makes the arrays of its stacked results of zeros, and its steps write over all of them. On a GPU the zeros
are a pass over memory: for what autodiff keeps of layers, and for their gradients, 0.9 ms of 15 for each layer of Llama
3 8B on an H200. Memory from `lax.empty` needs none, but it is autodiff that makes these loops. So `without_fill` goes
over a function that is differentiated already, and puts a `lax.while_loop` in place of each scan.
"""

from collections.abc import Callable, Sequence
from functools import partial
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.core import ShapedArray
from jax.experimental.custom_partitioning import custom_partitioning
from jax.extend.core import Jaxpr, JaxprEqn, jaxpr_as_fun
from jax.sharding import NamedSharding, PartitionSpec

from te_jax.core.placement import mesh_axes, spec_of_sharding
from te_jax.core.types import on_explicit_mesh, splittable_axes, varying_axes

_ARRAYS = jax.Array | np.ndarray | np.generic
_LEAST = 2**20  # bytes of a result whose zeros take longer than a kernel's launch
_NESTED = {"jit", "pjit", "scan", "while", "cond", "checkpoint", "remat"}  # what may hold a scan


def without_fill(fun: Callable[..., Any]) -> Callable[..., Any]:
    """`fun`, whose scans do not fill their results with zeros first, where one of these has a MiB or more.

    fun: a function that returns arrays in trees. Of its arguments, arrays are traced, and other leaves are static.

    All of a result is written, so no number changes. Derivatives are those of the scans. Left as they are: scans within
    `shard_map`, with an unroll other than 1, of symbolic sizes, and all under jax_debug_nans, which would look into
    what is not written yet.
    """

    def call(*args, **kwargs):
        if jax.config.jax_debug_nans:
            return fun(*args, **kwargs)
        leaves, treedef = jax.tree.flatten((args, kwargs))
        traced = [isinstance(leaf, _ARRAYS) for leaf in leaves]

        def of_arrays(*arrays):
            given = iter(arrays)
            args, kwargs = treedef.unflatten([next(given) if t else leaf for leaf, t in zip(leaves, traced)])
            return fun(*args, **kwargs)

        arrays = [leaf for leaf, t in zip(leaves, traced) if t]
        closed, shapes = jax.make_jaxpr(of_arrays, return_shape=True)(*arrays)
        return jax.tree.unflatten(jax.tree.structure(shapes), jaxpr_as_fun(_rewritten(closed, {}))(*arrays))

    return call


def _rewritten(closed: Any, seen: dict[int, tuple]) -> Any:
    """`closed`, a jaxpr, with other loops; itself where it has none to change. seen: {id: (jaxpr, its result)}."""
    if id(closed) not in seen:
        inner = _without_constants(closed)
        eqns = [_rewrite(eqn, seen) for eqn in inner.eqns]
        new = closed
        if any(new is not old for new, old in zip(eqns, inner.eqns)):
            new = inner.replace(eqns=eqns)
            new = new if closed is inner else closed.replace(jaxpr=new)
        seen[id(closed)] = closed, new
    return seen[id(closed)][1]


def _without_constants(closed: Any) -> Jaxpr:
    return closed if isinstance(closed, Jaxpr) else closed.jaxpr


def _rewrite(eqn: JaxprEqn, seen: dict[int, tuple]) -> JaxprEqn:
    if eqn.primitive.name not in _NESTED:
        return eqn
    found = {name: _in_parameter(value, seen) for name, value in eqn.params.items()}
    if any(new is not eqn.params[name] for name, new in found.items()):
        eqn = eqn.replace(params=found)
    if eqn.primitive.name != "scan" or not _is_worth_a_loop(eqn):
        return eqn
    sharding = lambda aval: aval.sharding if on_explicit_mesh(aval) else None
    types = [jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=sharding(a)) for a in _types(eqn.invars)]
    (loop,) = jax.make_jaxpr(_loop(eqn))(*types).jaxpr.eqns
    return loop.replace(invars=eqn.invars, outvars=eqn.outvars, source_info=eqn.source_info)


def _in_parameter(value: Any, seen: dict[int, tuple]) -> Any:
    if isinstance(value, tuple):
        new = tuple(_in_parameter(each, seen) for each in value)
        return value if all(a is b for a, b in zip(new, value)) else new
    return _rewritten(value, seen) if hasattr(value, "eqns") else value


def _types(variables: Sequence[Any]) -> list[ShapedArray]:
    return [variable.aval for variable in variables]


def _stacked(of_loop: Sequence[Any], of_step: Sequence[Any]) -> int:
    """How many of a scan's variables, from the last on, have an axis of steps, which those of one step lack."""
    ranks = [[len(a.shape) for a in _types(variables)] for variables in (of_loop, of_step)]
    same = [i for i, (loop, step) in enumerate(zip(*(reversed(each) for each in ranks))) if loop == step]
    return min(same, default=min(map(len, ranks)))


def _is_worth_a_loop(eqn: JaxprEqn) -> bool:
    results = _types(eqn.outvars)[len(eqn.outvars) - _stacked(eqn.outvars, _without_constants(eqn.params["jaxpr"]).outvars) :]
    sizes = [n for a in _types([*eqn.invars, *eqn.outvars]) for n in a.shape]
    is_plain = eqn.params["unroll"] == 1 and all(isinstance(n, int) for n in sizes)
    return is_plain and not any(map(varying_axes, results)) and any(map(_is_large, results))


def _is_large(aval: ShapedArray) -> bool:
    return not jnp.issubdtype(aval.dtype, jax.dtypes.extended) and prod(aval.shape) * aval.dtype.itemsize >= _LEAST


def _loop(eqn: JaxprEqn) -> Callable[..., list[jax.Array]]:
    """What the scan `eqn` computes of its operands."""
    length, reverse, body = (eqn.params[name] for name in ("length", "reverse", "jaxpr"))
    step_of, inner = jaxpr_as_fun(body), _without_constants(body)
    carried = len(eqn.outvars) - _stacked(eqn.outvars, inner.outvars)
    shared = len(eqn.invars) - _stacked(eqn.invars, inner.invars) - carried

    @jax.custom_jvp
    def loop(*args):
        consts, carry, xs = args[:shared], args[shared : shared + carried], args[shared + carried :]

        def step(state):
            i, carry, ys = state
            at = length - 1 - i if reverse else i
            given = [lax.dynamic_index_in_dim(x, at, keepdims=False, allow_negative_indices=False) for x in xs]
            out = step_of(*consts, *carry, *given)
            write = partial(lax.dynamic_update_index_in_dim, index=at, axis=0, allow_negative_indices=False)
            return i + 1, out[:carried], [write(y, new) for y, new in zip(ys, out[carried:])]

        start = jnp.array(0), [*carry], list(map(_unfilled, _types(eqn.outvars[carried:])))
        _, carry, ys = lax.while_loop(lambda state: state[0] < length, step, start)
        return [*carry, *ys]

    @loop.defjvp
    def derivative(primals, tangents):
        return jax.jvp(lambda *args: eqn.primitive.bind(*args, **eqn.params), primals, tangents)

    return loop


def _unfilled(aval: ShapedArray) -> jax.Array:
    """An array of any numbers. XLA's partitioner has each device make all of it: of a large one, it makes its part."""
    if on_explicit_mesh(aval):
        sharding = aval.sharding
        make = lambda: lax.empty(sharding.shard_shape(aval.shape), aval.dtype)
        axes = splittable_axes(sharding.mesh)
        return jax.shard_map(make, in_specs=(), out_specs=sharding.spec, axis_names=axes)()
    if not _is_large(aval):
        return lax.empty(aval.shape, aval.dtype)

    def partition(mesh, arg_infos, out_info):
        spec = [*spec_of_sharding(mesh, out_info), *[None] * len(aval.shape)]
        parts = [prod(mesh.shape[name] for name in mesh_axes(names)) for names in spec]
        spec = [names if size % n == 0 else None for names, n, size in zip(spec, parts, aval.shape)]
        sharding = NamedSharding(mesh, PartitionSpec(*spec))
        make = lambda _: lax.empty(sharding.shard_shape(aval.shape), aval.dtype)
        return mesh, make, sharding, (NamedSharding(mesh, PartitionSpec()),)

    call = custom_partitioning(lambda _: lax.empty(aval.shape, aval.dtype))
    axes = " ".join(f"a{i}" for i in range(len(aval.shape)))
    call.def_partition(partition=partition, decode_shardings=False, sharding_rule=f"-> {axes}")
    return call(jnp.array(0))
