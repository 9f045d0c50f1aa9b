"""The type of amaxes: f32 whose sum under autodiff is the max.

jax has the sum of this type and the gradients of some operations that move its elements, but not of all: the gradient
of `x[i]` pads with a zero that jax cannot make, the gradient of a broadcast is a sum. `movable` traces a function and
replaces operations that move amaxes by operations with a gradient of their own, also in loops, branches and on manual
meshes.
"""

import contextlib
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import ShapeDtypeStruct, lax
from jax.extend import core
from jax.sharding import AxisType, NamedSharding, PartitionSpec, use_abstract_mesh

from te_jax.core.amax import amax, amax_across
from te_jax.core.derivatives import custom_vjp
from te_jax.core.jaxprs import has_jaxprs, run_rewritten
from te_jax.core.types import like, varying_axes

# Operations whose gradients jax has for this type, and functions with a gradient of their own.
_OF_JAX = {
    *("add_any", "convert_element_type", "custom_jvp_call", "custom_vjp_call", "from_edtype", "to_edtype"),
    *("concatenate", "copy", "dynamic_slice", "optimization_barrier", "reshape", "reshard", "rev", "select_n"),
    *("sharding_constraint", "squeeze", "transpose"),
}
_TO_ONE_PLACE = {"dynamic_update_slice", "pad", "slice", "split", "unstack"}  # They move no element to two places.
_TO_VARYING = {"pcast", "pvary"}


def amax_type() -> Any:
    """The dtype of amaxes."""
    from flax.linen.fp8_ops import fm32  # Imported here, since Flax takes a second to import.

    return fm32


def to_amaxes(x: jax.Array) -> jax.Array:
    """x, f32[...], in the type of amaxes."""
    return lax.convert_element_type(x, amax_type())


def from_amaxes(x: jax.Array) -> jax.Array:
    """x, of the type of amaxes, as f32[...]; -inf, the gradient of a value without uses, becomes 0."""
    return jnp.maximum(lax.convert_element_type(x, jnp.float32), 0.0)


def is_amaxes(x: Any) -> bool:
    """Whether x, an array or the type of one, has the type of amaxes."""
    return getattr(x, "dtype", None) == amax_type()


def _bits(amaxes):  # Bits of non-negative floats have the order of the floats.
    return lax.bitcast_convert_type(jnp.abs(amaxes), jnp.uint32)


def _of_bits(bits):
    return lax.bitcast_convert_type(bits, jnp.float32)


@contextlib.contextmanager
def errors_of_amaxes(what: str, way_out: str):
    """Rewords errors of jax about the type of amaxes as errors about FP8 state. what, way_out: For the text."""
    try:
        yield
    except (TypeError, ValueError, NotImplementedError) as error:
        text = str(error).partition("\n")[0]
        if amax_type().name not in text or not type(error).__module__.startswith("builtins"):
            raise
        raise TypeError(
            f"{what}: FP8 state is computed with between the arguments and the modules, or moved within what cannot be "
            f"traced first ({text}); {way_out}, and compute with it outside of the differentiated function."
        ) from error


def movable(f: Callable) -> Callable:
    """A function of the arguments of f that returns what f returns, and which arrays f reads.

    In it any operation that does not compute with amaxes may move them. f is traced once, and its results are arrays.
    Which arrays f reads is a list of booleans, one for each leaf of the arguments that is an array. Where f computes
    with amaxes, jax raises an error for `errors_of_amaxes` to reword.
    """

    def run(*args, **kwargs):
        results, jaxpr = run_rewritten(f, _moves, _moved, args, kwargs)
        uses = [*jaxpr.outvars, *(v for eqn in jaxpr.eqns for v in eqn.invars)]
        read = {v for v in uses if not isinstance(v, core.Literal)}
        return results, [v in read for v in jaxpr.invars]

    return run


def _moves(eqn: core.JaxprEqn) -> bool:
    """Whether the operation may have no gradient for this type, or what it calls."""
    return eqn.primitive.name not in _OF_JAX and any(is_amaxes(v.aval) for v in eqn.invars)


def _moved(eqn: core.JaxprEqn) -> core.JaxprEqn:
    """`_move` instead of an operation that moves amaxes and has no gradient."""
    if has_jaxprs(eqn) or not _moves(eqn):
        return eqn
    call = _trace_call(partial(_move, eqn), [v.aval for v in eqn.invars])
    return call.replace(invars=eqn.invars, outvars=eqn.outvars, ctx=eqn.ctx, source_info=eqn.source_info)


def _trace_call(f, types: list) -> core.JaxprEqn:
    """The one call that f makes, traced for values of `types`.

    Values in a `shard_map` vary over mesh axes; for them f is traced within a `shard_map` too.
    """
    inner = types[0].sharding.mesh
    manual = set(inner.manual_axes)
    mesh = inner.update_axis_types(dict.fromkeys(manual, AxisType.Auto)) if manual else inner

    def body(*values):
        over = [tuple(sorted(varying_axes(t))) for t in types]
        f(*(lax.pcast(x, axes, to="varying") if axes else x for x, axes in zip(values, over)))
        return ()

    # Specs name no manual axis: in a `shard_map` a type is the type of each device's value.
    values = [ShapeDtypeStruct(t.shape, t.dtype, sharding=NamedSharding(mesh, t.sharding.spec)) for t in types]
    with use_abstract_mesh(mesh):
        if not manual:
            return jax.make_jaxpr(body)(*values).eqns[-1]
        mapped = jax.shard_map(body, in_specs=PartitionSpec(), out_specs=PartitionSpec(), axis_names=manual)
        return jax.make_jaxpr(mapped)(*values).eqns[-1].params["jaxpr"].eqns[-1]


def _move(eqn: core.JaxprEqn, *operands):
    """The results of `eqn`. The gradient of an amax is the largest over the places that it is moved to."""
    are = [is_amaxes(x) for x in operands]

    def run(operands):
        out = eqn.primitive.bind(*operands, **eqn.params)
        return tuple(out) if eqn.primitive.multiple_results else (out,)

    move = custom_vjp(in_fp8=lambda: "te_jax.value_and_grad")(lambda *operands: run(operands))

    def bwd(operands, grads):
        values = [lax.convert_element_type(x, jnp.float32) for x, is_so in zip(operands, are) if is_so]

        def run_with(values):
            values = iter(values)
            return run([next(values) if is_so else x for x, is_so in zip(operands, are)])

        found = iter(_gradients(eqn, run_with, values, tuple(map(from_amaxes, grads))))
        return tuple(to_amaxes(next(found)) if is_so else None for is_so in are)

    move.defvjp(lambda *operands: (run(operands), operands), bwd)
    return move(*operands)


def _gradients(eqn, run_with, values, grads):
    """The gradients of `values`, f32, from `grads`, the gradients of the results of `run_with(values)`."""
    if eqn.primitive.name in _TO_VARYING:
        return [amax_across(grads[0], tuple(eqn.params["axes"]))]
    if eqn.primitive.name in _TO_ONE_PLACE:  # Sums in the gradient have one term that is not 0.
        return jax.vjp(lambda *values: run_with(values), *values)[1](grads)
    if eqn.primitive.name == "broadcast_in_dim":
        (x,), (grad,) = values, grads
        kept = [to for to, size in zip(eqn.params["broadcast_dimensions"], x.shape) if size == grad.shape[to]]
        return [like(amax(grad, tuple(i for i in range(grad.ndim) if i not in kept)).reshape(x.shape), x)]
    # Any other operation moves the numbers of the elements to where their gradients are.
    ends = np.cumsum([x.size for x in values])
    numbers = [jnp.arange(end - x.size, end, dtype=jnp.int32).reshape(x.shape) for x, end in zip(values, ends)]
    of_all = jnp.zeros(ends[-1], jnp.uint32)
    for places, grad in zip(run_with(numbers), grads):
        of_all = of_all.at[jnp.where(places < 0, ends[-1], places)].max(_bits(grad), mode="drop")
    each = jnp.split(_of_bits(of_all), ends[:-1])
    return [like(grad.reshape(x.shape), x) for grad, x in zip(each, values)]
