"""The type of amaxes, f32 whose sum under autodiff is the max, and how values of it may be moved about.

jax has the sum of that type, and the gradients of some operations that move elements; those of others it does not have
(`x[i]` pads with a zero that it cannot make, what was broadcast is summed). `movable` traces a function, and where it
moves amaxes it puts an operation with a gradient of its own, in loops, branches and on manual meshes too.
"""

import contextlib
from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax import ShapeDtypeStruct, lax
from jax.extend import core
from jax.sharding import AxisType, NamedSharding, PartitionSpec, use_abstract_mesh

from te_jax._amax import amax, amax_across
from te_jax._types import like, varying

# Operations whose gradients jax has for this type, and functions that bring their own.
_OF_JAX = {
    *("add_any", "convert_element_type", "custom_jvp_call", "custom_vjp_call", "from_edtype", "to_edtype"),
    *("concatenate", "copy", "dynamic_slice", "optimization_barrier", "reshape", "reshard", "rev", "select_n"),
    *("sharding_constraint", "squeeze", "transpose"),
}
_TO_ONE_PLACE = {"dynamic_update_slice", "pad", "slice", "split", "unstack"}  # that move no element to several
_TO_VARYING = {"pcast", "pvary"}

ARRAYS = jax.Array | np.ndarray | np.generic


def amax_type():
    """The dtype. Imported here, for Flax takes a second to import."""
    from flax.linen.fp8_ops import fm32

    return fm32


def to_amaxes(x: jax.Array) -> jax.Array:
    """x, f32[...], in the type of amaxes."""
    return lax.convert_element_type(x, amax_type())


def from_amaxes(x: jax.Array) -> jax.Array:
    """x, of the type of amaxes, as f32[...], where -inf was the gradient of what nothing used: there 0."""
    return jnp.maximum(lax.convert_element_type(x, jnp.float32), 0.0)


def is_amaxes(x) -> bool:
    """Whether x, an array or the type of one, is of the type of amaxes."""
    return getattr(x, "dtype", None) == amax_type()


def _bits(amaxes):  # of numbers that are not negative, as those the larger one is the larger
    return lax.bitcast_convert_type(jnp.abs(amaxes), jnp.uint32)


def _of_bits(bits):
    return lax.bitcast_convert_type(bits, jnp.float32)


@contextlib.contextmanager
def errors_of_amaxes(what: str, way_out: str):
    """Says in the words of FP8 state what jax says of the type of amaxes."""
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
    """f, in which amaxes may be moved by whatever does not compute with them, and a list of booleans: which of the
    arrays among its arguments, by their leaves, anything in f reads.

    It is traced once, and returns arrays. Where f computes with amaxes, jax raises what `errors_of_amaxes` words.
    """

    def moved(*args, **kwargs):
        leaves, treedef = jax.tree.flatten((args, kwargs))
        is_array = [isinstance(leaf, ARRAYS) for leaf in leaves]
        arrays = [leaf for leaf, is_so in zip(leaves, is_array) if is_so]

        def flat(*arrays):
            arrays = iter(arrays)
            args, kwargs = treedef.unflatten([next(arrays) if a else leaf for a, leaf in zip(is_array, leaves)])
            return f(*args, **kwargs)

        closed, out = jax.make_jaxpr(flat, return_shape=True)(*arrays)
        jaxpr = _rewritten(closed.jaxpr)
        uses = [*jaxpr.outvars, *(v for eqn in jaxpr.eqns for v in eqn.invars)]
        read = {v for v in uses if not isinstance(v, core.Literal)}
        results = core.jaxpr_as_fun(closed.replace(jaxpr=jaxpr))(*arrays)
        return jax.tree.unflatten(jax.tree.structure(out), results), [v in read for v in jaxpr.invars]

    return moved


def _rewritten(jaxpr: core.Jaxpr) -> core.Jaxpr:
    eqns = [_rewritten_eqn(eqn) for eqn in jaxpr.eqns]
    return jaxpr.replace(eqns=eqns) if any(a is not b for a, b in zip(eqns, jaxpr.eqns)) else jaxpr


def _rewritten_eqn(eqn: core.JaxprEqn) -> core.JaxprEqn:
    if eqn.primitive.name in _OF_JAX or not any(is_amaxes(v.aval) for v in eqn.invars):
        return eqn
    if any(map(_jaxprs_in, eqn.params.values())):
        return eqn.replace(params={name: _of_param(value) for name, value in eqn.params.items()})
    call = _traced(partial(_move, eqn), [v.aval for v in eqn.invars])
    return call.replace(invars=eqn.invars, outvars=eqn.outvars, ctx=eqn.ctx, source_info=eqn.source_info)


def _traced(f, types: list) -> core.JaxprEqn:
    """The one call that f, of values of `types`, makes. Within a `shard_map` jax says over what they vary, so there it
    is traced within one too."""
    inner = types[0].sharding.mesh
    manual = set(inner.manual_axes)
    mesh = inner.update_axis_types(dict.fromkeys(manual, AxisType.Auto)) if manual else inner

    def body(*values):
        over = [tuple(sorted(varying(t))) for t in types]
        f(*(lax.pcast(x, axes, to="varying") if axes else x for x, axes in zip(values, over)))
        return ()

    # Specs name no manual axis: the types are those of values that each device has one of.
    values = [ShapeDtypeStruct(t.shape, t.dtype, sharding=NamedSharding(mesh, t.sharding.spec)) for t in types]
    with use_abstract_mesh(mesh):
        if not manual:
            return jax.make_jaxpr(body)(*values).eqns[-1]
        mapped = jax.shard_map(body, in_specs=PartitionSpec(), out_specs=PartitionSpec(), axis_names=manual)
        return jax.make_jaxpr(mapped)(*values).eqns[-1].params["jaxpr"].eqns[-1]


def _jaxprs_in(param) -> bool:
    params = param if isinstance(param, tuple) else (param,)
    return any(isinstance(p, core.ClosedJaxpr | core.Jaxpr) for p in params)


def _of_param(param):
    if isinstance(param, core.ClosedJaxpr):
        return param.replace(jaxpr=_rewritten(param.jaxpr))
    if isinstance(param, core.Jaxpr):
        return _rewritten(param)
    return tuple(map(_of_param, param)) if _jaxprs_in(param) else param


def _move(eqn: core.JaxprEqn, *operands):
    """What eqn makes of its operands. The gradient of an amax is the largest of those of all places it is moved to."""
    are = [is_amaxes(x) for x in operands]

    def run(operands):
        out = eqn.primitive.bind(*operands, **eqn.params)
        return tuple(out) if eqn.primitive.multiple_results else (out,)

    move = jax.custom_vjp(lambda *operands: run(operands))

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
    """The gradients of `values`, f32, by those of the results that `run_with(values)` has."""
    if eqn.primitive.name in _TO_VARYING:
        return [amax_across(grads[0], tuple(eqn.params["axes"]))]
    if eqn.primitive.name in _TO_ONE_PLACE:  # so that no sum has more than one term that is not 0
        return jax.vjp(lambda *values: run_with(values), *values)[1](grads)
    if eqn.primitive.name == "broadcast_in_dim":
        (x,), (grad,) = values, grads
        kept = [to for to, size in zip(eqn.params["broadcast_dimensions"], x.shape) if size == grad.shape[to]]
        return [like(amax(grad, tuple(i for i in range(grad.ndim) if i not in kept)).reshape(x.shape), x)]
    # Any other: where the numbers of the elements went, their gradients are.
    ends = np.cumsum([x.size for x in values])
    numbers = [jnp.arange(end - x.size, end, dtype=jnp.int32).reshape(x.shape) for x, end in zip(values, ends)]
    of_all = jnp.zeros(ends[-1], jnp.uint32)
    for places, grad in zip(run_with(numbers), grads):
        of_all = of_all.at[jnp.where(places < 0, ends[-1], places)].max(_bits(grad), mode="drop")
    parts = jnp.split(_of_bits(of_all), ends[:-1])
    return [like(part.reshape(x.shape), x) for part, x in zip(parts, values)]
