"""Functions that are traced, whose equations are replaced, and which then run."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.core import ShapedArray
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, jaxpr_as_fun

from te_jax.core.types import on_explicit_mesh

ARRAYS = jax.Array | np.ndarray | np.generic


def run_rewritten(
    fun: Callable[..., Any],
    enters: Callable[[JaxprEqn], bool],
    replace: Callable[[JaxprEqn], JaxprEqn],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
) -> tuple[Any, Jaxpr]:
    """fun(*args, **kwargs), with replace(equation) for each equation of its jaxpr, and that jaxpr.

    enters: whether the jaxprs among an equation's parameters are rewritten first. fun is traced once. Arrays among the
    leaves of its arguments are traced, others are static. Its results are arrays.
    """
    leaves, treedef = jax.tree.flatten((args, kwargs))
    is_array = [isinstance(leaf, ARRAYS) for leaf in leaves]
    arrays = [leaf for leaf, is_so in zip(leaves, is_array) if is_so]

    def of_arrays(*arrays):
        given = iter(arrays)
        args, kwargs = treedef.unflatten([next(given) if a else leaf for a, leaf in zip(is_array, leaves)])
        return fun(*args, **kwargs)

    closed, shapes = jax.make_jaxpr(of_arrays, return_shape=True)(*arrays)
    closed = _rewritten(closed, enters, replace, {})
    results = jaxpr_as_fun(closed)(*arrays)
    return jax.tree.unflatten(jax.tree.structure(shapes), results), without_constants(closed)


def without_constants(jaxpr: Any) -> Jaxpr:
    """The Jaxpr of a ClosedJaxpr; a Jaxpr itself."""
    return jaxpr if isinstance(jaxpr, Jaxpr) else jaxpr.jaxpr


def _rewritten(jaxpr, enters, replace, seen):
    """`jaxpr`, a Jaxpr or ClosedJaxpr, with other equations; itself where all stay. seen: {id: (a jaxpr, what became of
    it)}, so that what is called twice stays one function."""
    if id(jaxpr) not in seen:
        inner = without_constants(jaxpr)
        eqns = [replace(_with_rewritten(eqn, enters, replace, seen) if enters(eqn) else eqn) for eqn in inner.eqns]
        new = jaxpr
        if any(a is not b for a, b in zip(eqns, inner.eqns)):
            new = inner.replace(eqns=eqns)
            new = new if jaxpr is inner else jaxpr.replace(jaxpr=new)
        seen[id(jaxpr)] = jaxpr, new
    return seen[id(jaxpr)][1]


def equation_of(fun: Callable[..., Any], types: Sequence[ShapedArray], old: JaxprEqn) -> JaxprEqn:
    """The one equation of `fun`, called with arrays of these types where the equation `old` is."""
    sharding = lambda aval: aval.sharding if on_explicit_mesh(aval) else None
    with old.ctx.manager:
        called = jax.make_jaxpr(fun)(*(jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=sharding(a)) for a in types))
    (eqn,) = called.jaxpr.eqns
    return eqn.replace(ctx=old.ctx, source_info=old.source_info)


def has_jaxprs(eqn: JaxprEqn) -> bool:
    """Whether jaxprs are among an equation's parameters."""
    return any(_is_jaxpr(each) for value in eqn.params.values() for each in _listed(value))


def _is_jaxpr(value: Any) -> bool:
    return isinstance(value, ClosedJaxpr | Jaxpr)


def _listed(value: Any) -> tuple:
    return value if isinstance(value, tuple) else (value,)


def _with_rewritten(eqn, *how):
    def of(value):
        if _is_jaxpr(value):
            return _rewritten(value, *how)
        new = tuple(map(of, value)) if isinstance(value, tuple) else value
        return new if any(a is not b for a, b in zip(_listed(new), _listed(value))) else value

    params = {name: of(value) for name, value in eqn.params.items()}
    return eqn.replace(params=params) if any(params[name] is not eqn.params[name] for name in params) else eqn
