"""Functions with a backward pass of their own, in every mode of differentiation.

`jax.custom_vjp` serves only reverse mode. Here the tangents of such a function are one linear equation, `te_tangents`,
of the residuals that its forward pass keeps. Where reverse mode transposes the equation, it is the backward pass.
Where it is evaluated, as by `jax.jvp`, it is the transpose of the backward pass, which jax finds: ops have the
derivatives of their meaning in plain JAX. So forward mode needs no second formula, and runs no kernel.
"""

from collections.abc import Callable, Sequence
from functools import partial, update_wrapper
from typing import Any, Generic, TypeVar

import jax
import jax.numpy as jnp
from jax.core import ShapedArray
from jax.custom_batching import custom_vmap
from jax.custom_derivatives import CustomVJPPrimal, SymbolicZero, zero_from_primal
from jax.dtypes import float0
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir
from jax.sharding import PartitionSpec

from te_jax.core.types import on_explicit_mesh

_Result = TypeVar("_Result")
_FIRST_ORDER = (
    "gradients in FP8 are of first order; differentiate once, by jax.grad, jax.value_and_grad or jax.vjp, or leave FP8 "
    "off, as by te_jax.autocast(False)."
)


def _is_fp8(dtype: Any) -> bool:
    """Whether an op with data or scales of this type computes in FP8: it is a float of one byte."""
    return jnp.issubdtype(dtype, jnp.floating) and jnp.dtype(dtype).itemsize == 1


def _refuse_fp8(name: str) -> ValueError:
    """The error where `name` is differentiated in FP8 by another mode than reverse mode, or twice."""
    return ValueError(f"{name}: {_FIRST_ORDER}")


class CustomVjp(Generic[_Result]):
    """`jax.custom_vjp` with a derivative in forward mode, which is differentiable in turn.

    function: what is differentiated.
    static:   the indices of its arguments that are not.
    in_fp8:   (static arguments) -> the name that errors call it, where it computes in FP8 and so has no derivative but
              reverse mode's, of first order; else None.
    """

    def __init__(
        self, function: Callable[..., _Result], static: tuple[int, ...], in_fp8: Callable[..., str | None]
    ) -> None:
        update_wrapper(self, function)
        self._static, self._in_fp8 = static, in_fp8
        self._call = jax.custom_jvp(function, nondiff_argnums=static)

    def __call__(self, *args: Any, **kwargs: Any) -> _Result:
        """The function of these arguments."""
        return self._call(*args, **kwargs)

    def defvjp(self, fwd: Callable[..., Any], bwd: Callable[..., Any], symbolic_zeros: bool = False) -> None:
        """As `jax.custom_vjp.defvjp`."""

        def rule(*args):
            *fixed, primals, tangents = args
            leaves, tree = jax.tree.flatten(primals)
            tangents = tree.flatten_up_to(tangents)
            moved = [not isinstance(t, SymbolicZero) for t in tangents]
            given = map(CustomVJPPrimal, leaves, moved) if symbolic_zeros else leaves
            out, residuals = fwd(*_merge(self._static, fixed, tree.unflatten(given)))
            outs, out_tree = jax.tree.flatten(out)
            residuals, residual_tree = jax.tree.flatten(residuals)
            zeros = [zero_from_primal(o, symbolic_zeros=True) for o in outs]
            floats = [z.aval.dtype != float0 for z in zeros]

            def pull(residuals, cotangents):
                given = iter(cotangents)
                cotangents = [next(given) if is_float else z for z, is_float in zip(zeros, floats)]
                if not symbolic_zeros:
                    cotangents = map(_instantiate, cotangents)
                grads = bwd(*fixed, residual_tree.unflatten(residuals), out_tree.unflatten(cotangents))
                return [g for g, m in zip(_spread(grads, tree), moved) if m]

            types = tuple(z.aval for z, is_float in zip(zeros, floats) if is_float)
            moving = [t for t, m in zip(tangents, moved) if m]
            params = dict(count=len(residuals), pull=pull, types=types, fp8=self._in_fp8(*fixed))
            got = iter(_tangents.bind(*residuals, *moving, **params))
            return out, out_tree.unflatten(next(got) if is_float else z for z, is_float in zip(zeros, floats))

        self._call.defjvp(rule, symbolic_zeros=True)


def custom_vjp(
    *static: int, in_fp8: Callable[..., str | None] = lambda *_: None
) -> Callable[[Callable[..., _Result]], CustomVjp[_Result]]:
    """`CustomVjp` as a decorator."""
    return lambda function: CustomVjp(function, static, in_fp8)


def _merge(static: Sequence[int], fixed, others):
    """The arguments in their order: `fixed` at the indices `static`."""
    args, others = [None] * (len(fixed) + len(others)), iter(others)
    at = dict(zip(static, fixed))
    return [at[i] if i in at else next(others) for i in range(len(args))]


def _spread(grads, tree) -> list:
    """The leaves of the cotangents of a tree of arguments, None for each that a None stands for."""
    leaves = []
    whole = tree.unflatten([object()] * tree.num_leaves)
    is_none = lambda x: x is None
    jax.tree.map(lambda g, of: leaves.extend([g] * len(jax.tree.leaves(of))), tuple(grads), whole, is_leaf=is_none)
    return leaves


def _instantiate(ct):
    return ad.instantiate_zeros(ad.Zero(ct.aval)) if isinstance(ct, SymbolicZero) else ct


# -- ops ------------------------------------------------------------------------------------------------------


def with_derivative_of(
    function: Callable[..., Sequence[jax.Array]], meaning: Callable[..., Sequence[jax.Array]], name: str
) -> Callable[..., Sequence[jax.Array]]:
    """`function`, called `name`, with the derivatives of `meaning`, the same function of arrays in plain JAX."""
    call = jax.custom_jvp(function)

    def rule(primals, tangents):
        outs = call(*primals)
        plain = lambda *args: tuple(meaning(*args))
        if outs and on_explicit_mesh(jax.typeof(outs[0])):  # jax finds no shardings in the middle of a meaning
            plain = jax.sharding.auto_axes(plain, out_sharding=tuple(jax.typeof(o).sharding for o in outs))
        return outs, type(outs)(_tangents_of_op(name, plain, outs, primals, tangents))

    call.defjvp(rule, symbolic_zeros=True)
    return call


def differentiate_primitive(primitive: Primitive, meaning: Callable[..., Sequence[jax.Array]]) -> None:
    """Gives a primitive of several results the derivatives of `meaning`, which takes its parameters too."""

    def rule(primals, tangents, **params):
        outs = primitive.bind(*primals, **params)
        touts = _tangents_of_op(primitive.name, partial(meaning, **params), outs, primals, tangents)
        return outs, [ad.Zero(t.aval) if isinstance(t, SymbolicZero) else t for t in touts]

    ad.primitive_jvps[primitive] = rule


def _tangents_of_op(name, meaning, outs, primals, tangents) -> list:
    """In FP8 they are an equation that raises ValueError when it is evaluated or transposed."""
    if not any(_is_fp8(a.dtype) for a in (*primals, *outs)):
        return _tangents_of(meaning, primals, tangents)
    zeros = [zero_from_primal(o, symbolic_zeros=True) for o in outs]
    types = tuple(z.aval for z in zeros if z.aval.dtype != float0)
    moving = [t for t in tangents if not isinstance(t, ad.Zero | SymbolicZero)]

    def refuse(*_):
        raise _refuse_fp8(name)

    got = iter(_tangents.bind(*moving, count=0, pull=refuse, types=types, fp8=name))
    return [z if z.aval.dtype == float0 else next(got) for z in zeros]


# -- the equation ---------------------------------------------------------------------------------------------


def _evaluate(*args, count, pull, types, fp8):
    """The transpose of the backward pass, applied to the tangents."""
    if fp8:
        raise _refuse_fp8(fp8)
    residuals, tangents = args[:count], args[count:]

    def back(cotangents):
        zeros = [ad.Zero(jax.typeof(t)) for t in tangents]
        return [ad.instantiate_zeros(z) if g is None else g for g, z in zip(pull(residuals, cotangents), zeros)]

    _, transpose = jax.vjp(back, [ad.instantiate_zeros(ad.Zero(t)) for t in types])
    return transpose(list(tangents))[0]


def _transpose(cotangents, *args, count, pull, types, fp8):
    cotangents = [SymbolicZero(ct.aval) if isinstance(ct, ad.Zero) else ct for ct in cotangents]
    grads = pull(args[:count], cotangents)
    zero = lambda x: ad.Zero(x.aval if ad.is_undefined_primal(x) else jax.typeof(x))
    return [None] * count + [zero(x) if g is None else g for x, g in zip(args[count:], grads)]


def _tangents_of(function, primals, tangents) -> list:
    """The tangents of `function(*primals)`, a sequence of arrays. Tangents that are zeros of autodiff cost nothing."""
    moved = [not isinstance(t, ad.Zero | SymbolicZero) for t in tangents]

    def of_moved(*moving):
        moving = iter(moving)
        return list(function(*(next(moving) if m else p for p, m in zip(primals, moved))))

    moving = ([x for x, m in zip(all_, moved) if m] for all_ in (primals, tangents))
    outs, touts = jax.jvp(of_moved, *moving)
    zeros = (zero_from_primal(o, symbolic_zeros=True) for o in outs)
    return [z if z.aval.dtype == float0 else t for z, t in zip(zeros, touts)]


def _jvp(primals, tangents, *, count, **params):
    outs = _tangents.bind(*primals, count=count, **params)
    if all(isinstance(t, ad.Zero) for t in tangents[:count]):
        linear = map(ad.instantiate_zeros, tangents[count:])
        return outs, _tangents.bind(*primals[:count], *linear, count=count, **params)
    return outs, _tangents_of(partial(_evaluate, count=count, **params), primals, tangents)


@custom_vmap
def _total(gradient):
    """The gradient of what examples share."""
    return gradient


@_total.def_vmap
def _total_vmap(size, batched, gradient):
    return jnp.sum(gradient, 0), False


def _batch(axis, args, dims, *, count, pull, types, fp8):
    """One equation of all examples, whose backward pass is mapped. What examples share has one gradient."""
    if all(d is None for d in dims):
        outs = _tangents.bind(*args, count=count, pull=pull, types=types, fp8=fp8)
        return outs, [None] * len(outs)
    args = [*args[:count], *(a if d is None else jnp.moveaxis(a, d, 0) for a, d in zip(args[count:], dims[count:]))]
    shared = [d is None for d in dims[count:]]

    def pull_all(residuals, cotangents):
        zeros = [isinstance(ct, SymbolicZero) for ct in cotangents]

        def one(residuals, given):
            given = iter(given)
            each = pull(residuals, [SymbolicZero(t) if is_zero else next(given) for t, is_zero in zip(types, zeros)])
            return [g if g is None or not s else _total(g) for g, s in zip(each, shared)]

        given = [ct for ct, is_zero in zip(cotangents, zeros) if not is_zero]
        names = dict(axis_name=axis.name, axis_size=axis.size, spmd_axis_name=axis.spmd_name)
        mapped = jax.vmap(one, (list(dims[:count]), 0), [None if s else 0 for s in shared], **names)
        return mapped(list(residuals), given)

    outs = _tangents.bind(*args, count=count, pull=pull_all, types=tuple(_type_of_all(t, axis) for t in types), fp8=fp8)
    return outs, [0] * len(outs)


def _type_of_all(t: ShapedArray, axis) -> ShapedArray:
    """The type of the arrays of all examples."""
    lead = axis.explicit_mesh_axis
    spec = PartitionSpec(lead, *t.sharding.spec, *[None] * (t.ndim - len(t.sharding.spec)))
    return t.update(shape=(axis.size, *t.shape), sharding=t.sharding.update(spec=spec))


def _lower(ctx, *args, **params):
    return mlir.lower_fun(partial(_evaluate, **params), multiple_results=True)(ctx, *args)


_tangents = Primitive("te_tangents")
_tangents.multiple_results = True
_tangents.def_impl(_evaluate)
_tangents.def_abstract_eval(lambda *_, types, **__: types)
ad.primitive_jvps[_tangents] = _jvp
ad.primitive_transposes[_tangents] = _transpose
batching.fancy_primitive_batchers[_tangents] = _batch
mlir.register_lowering(_tangents, _lower)
