"""A function of jax's, f32 within, computed in float64: the same equations on wider numbers."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import ClosedJaxpr, Jaxpr, Literal, jaxprs_in_params

from te_jax.core.op import ops

_WIDE = (jnp.float32, jnp.bfloat16, jnp.float16)


def _widened(dtype):
    return jnp.dtype(jnp.float64) if dtype in _WIDE else dtype


def _up(x):
    return jnp.asarray(x, _widened(x.dtype)) if hasattr(x, "dtype") else x


def in_float64(fn, *args):
    """fn(*args), of arrays, with f64 for all floats of 16 bits and more. Bits are those of f32; FP8 stays."""
    closed = jax.make_jaxpr(fn)(*args)
    inner = {}
    _references(closed.jaxpr, inner)
    structure = jax.tree.structure(jax.eval_shape(fn, *args))
    with jax.enable_x64(True):
        run = jax.jit(lambda consts, args: _evaluate(closed.jaxpr, consts, args, inner))

    def call(*args):
        with jax.enable_x64(True):
            up = lambda xs: [x.astype(_widened(x.dtype)) for x in map(np.asarray, xs)]
            return structure.unflatten(jax.device_get(run(up(closed.consts), up(jax.tree.leaves(args)))))

    return call


def _references(jaxpr, found: dict):
    """{id(equation): the jaxpr of the reference} of te_jax's ops."""
    for eqn in jaxpr.eqns:
        if op := ops.get(eqn.primitive.name):
            types = [jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype) for v in eqn.invars]
            found[id(eqn)] = jax.make_jaxpr(partial(op._run_reference, **eqn.params))(*types)
            _references(found[id(eqn)].jaxpr, found)
        else:
            for each in jaxprs_in_params(eqn.params):
                _references(each, found)


def _evaluate(jaxpr, consts, args, inner):
    values = dict(zip((*jaxpr.constvars, *jaxpr.invars), (*consts, *args), strict=True))
    read = lambda v: _up(np.asarray(v.val, v.aval.dtype)) if isinstance(v, Literal) else values[v]
    for eqn in jaxpr.eqns:
        outs = _apply(eqn, [read(v) for v in eqn.invars], inner)
        values.update(zip(eqn.outvars, outs, strict=True))
    return [read(v) for v in jaxpr.outvars]


def _apply(eqn, args, inner):
    name, params = eqn.primitive.name, dict(eqn.params)
    run = lambda closed, args: _evaluate(
        getattr(closed, "jaxpr", closed), map(_up, getattr(closed, "consts", ())), args, inner
    )
    if id(eqn) in inner:
        return run(inner[id(eqn)], args)
    if name == "scan":
        return _scan(eqn, args, run)
    if name == "cond":
        return lax.switch(args[0], [lambda *a, b=b: run(b, a) for b in params["branches"]], *args[1:])
    if name in ("reduce_precision", "optimization_barrier"):
        return args
    if name == "bitcast_convert_type":
        as_bits = args[0].astype(jnp.float32) if args[0].dtype == jnp.float64 else args[0]
        return [_up(lax.bitcast_convert_type(as_bits, params["new_dtype"]))]
    bodies = [p for p in params.values() if isinstance(p, ClosedJaxpr | Jaxpr)]
    if bodies and not name.startswith(("reduce", "scatter")):
        return run(bodies[0], args)
    if name == "scatter-add":
        wide = jax.ShapeDtypeStruct((), args[0].dtype)
        params["update_jaxpr"] = jax.make_jaxpr(lax.add)(wide, wide).jaxpr
    for key, value in params.items():
        if key in ("new_dtype", "dtype", "preferred_element_type", "accumulate_type") and value is not None:
            params[key] = _widened(value)
    out = eqn.primitive.bind(*args, **params)
    return out if eqn.primitive.multiple_results else [out]


def _scan(eqn, args, run):
    params, body_of = eqn.params, eqn.params["jaxpr"].jaxpr
    apart = lambda outer, inner: sum(a.aval.ndim != b.aval.ndim for a, b in zip(outer, inner, strict=True))
    carry = len(eqn.outvars) - apart(eqn.outvars, body_of.outvars)  # what is stacked has one more axis outside
    consts = len(args) - apart(eqn.invars, body_of.invars) - carry

    def body(c, x):
        outs = run(params["jaxpr"], [*args[:consts], *c, *x])
        return outs[:carry], outs[carry:]

    options = dict(length=params["length"], reverse=params["reverse"])
    c, ys = lax.scan(body, list(args[consts : consts + carry]), list(args[consts + carry :]), **options)
    return [*c, *ys]
