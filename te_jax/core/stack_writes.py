"""Steps of a loop that write entries of their row of a stack into the stack.

A scan hands a step its row, and takes a whole new one. Both are copies. A step that changes few entries of the row, as
of a cache of keys and values, needs neither where the steps hand on the stack.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import chain
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.core import ShapedArray
from jax.extend.core import Jaxpr, Var, jaxpr_as_fun

from te_jax.core.jaxprs import equation_of, without_constants


def with_stacks(
    body: Any, first: tuple[int, int], stacks: Sequence[ShapedArray], results: Sequence[ShapedArray]
) -> tuple[Callable[..., Any], dict[int, int]]:
    """The step `body` of a scan as a function of (its number, *operands), and where that has stacks instead of rows:
    {place among the rows that it reads: place among those that it writes}.

    Such a row has no reader but a write of entries (`x.at[...].set`), and the written row is a result. The function
    takes the stack, and returns it with that row.

    body: a ClosedJaxpr or Jaxpr. first: the places of the first row among its operands and its results. stacks,
    results: the types of the stacks of these rows.
    """
    inner = without_constants(body)
    rows, new = inner.invars[first[0] :], inner.outvars[first[1] :]
    written = {x: y for x, y in _written(inner, rows, new).items() if stacks[x].sharding == results[y].sharding}
    (number,) = jax.make_jaxpr(lambda i: i)(jnp.array(0)).jaxpr.invars
    places, eqns = {rows[x]: x for x in written}, []
    for eqn in inner.eqns:
        if (x := places.get(_first_operand(eqn))) is not None:
            types = [stacks[x], number.aval, *(v.aval for v in eqn.invars[1:])]
            call = equation_of(jax.jit(partial(_write, eqn.params)), types, eqn)
            rows[x], new[written[x]] = call.invars[0], call.outvars[0]
            eqn = call.replace(
                invars=[call.invars[0], number, *eqn.invars[1:]], outvars=[call.outvars[0], *eqn.outvars]
            )
        eqns.append(eqn)
    invars, outvars = [number, *inner.invars[: first[0]], *rows], [*inner.outvars[: first[1]], *new]
    changed = inner.replace(invars=invars, outvars=outvars, eqns=eqns)
    return jaxpr_as_fun(changed if body is inner else body.replace(jaxpr=changed)), written


def _first_operand(eqn):
    """The first operand of an equation, None if that is a literal."""
    return eqn.invars[0] if eqn.invars and isinstance(eqn.invars[0], Var) else None


def _written(inner: Jaxpr, rows: Sequence[Any], results: Sequence[Any]) -> dict[int, int]:
    """{place of a row that only a write of entries reads: place of the result that it gives}."""
    reads = Counter(v for v in chain(inner.outvars, *(eqn.invars for eqn in inner.eqns)) if isinstance(v, Var))
    places = {row: x for x, row in enumerate(rows) if reads[row] == 1}
    became = {}  # the place of a row, of what it became
    for eqn in inner.eqns:
        operand = _first_operand(eqn)
        if operand in places and _is_write(eqn):
            became[eqn.outvars[0]] = places[operand]
        elif operand in became and eqn.primitive.name == "sharding_constraint":
            became[eqn.outvars[0]] = became[operand]
    return {became[v]: y for y, v in enumerate(results) if isinstance(v, Var) and v in became}


def _is_write(eqn) -> bool:
    """Whether an equation overwrites entries of its first operand, by indices that can count the rows of a stack too;
    not all of it, `x.at[...].set(new)`. `x.at[...].apply(f)` is a scatter as well, of f."""
    if eqn.primitive.name != "scatter" or eqn.params["update_jaxpr"] is not None:
        return False
    indices = eqn.invars[1].aval
    return indices.shape[-1] > 0 and indices.dtype.itemsize >= 4


def _write(params: Mapping[str, Any], stack, number, indices, updates):
    """(the stack, of which row `number` has `updates` where a scatter with these parameters puts them; that row)"""
    of_row = params["dimension_numbers"]
    behind = lambda axes: tuple(axis + 1 for axis in axes)
    of_stack = lax.ScatterDimensionNumbers(
        update_window_dims=of_row.update_window_dims,
        inserted_window_dims=(0, *behind(of_row.inserted_window_dims)),
        scatter_dims_to_operand_dims=(0, *behind(of_row.scatter_dims_to_operand_dims)),
        operand_batching_dims=behind(of_row.operand_batching_dims),
        scatter_indices_batching_dims=of_row.scatter_indices_batching_dims,
    )
    numbers = jnp.zeros_like(indices[..., :1]) + number.astype(indices.dtype)
    kept = {name: params[name] for name in ("indices_are_sorted", "unique_indices", "mode")}
    stack = lax.scatter(stack, lax.concatenate([numbers, indices], indices.ndim - 1), updates, of_stack, **kept)
    return stack, lax.dynamic_index_in_dim(stack, number, keepdims=False, allow_negative_indices=False)
