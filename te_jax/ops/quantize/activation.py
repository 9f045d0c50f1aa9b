"""Activations of the MLP, gated ones among them: in plain JAX, and for the common ones straight to FP8 in both
layouts, forward and backward."""

import math
import operator
from collections.abc import Callable, Mapping, Sequence
from functools import partial, reduce
from typing import Any

import jax
import jax.numpy as jnp

from te_jax.core.arrays import as_jax
from te_jax.core.check import FLOATS_ARRAY, NONE, Kind, check, did_you_mean, number
from te_jax.core.op import Op
from te_jax.ops.formats import ScaleFormat
from te_jax.ops.producers import Producer, declare_all
from te_jax.ops.source import Source

# Clamped SwiGLU of gpt-oss (https://arxiv.org/abs/2508.10925): the defaults of its model card.
CLAMPED_DEFAULTS = {"limit": 7.0, "alpha": 1.702, "glu_linear_offset": 1.0}


@partial(jax.custom_jvp, nondiff_argnums=(1, 2))
def _sigmoid_gated(x, c0, c1=0.0):
    """x * sigmoid(c0 x + c1 x**3). It has a derivative of its own, as in csrc/activation/activation.cuh: autodiff would
    multiply 0 by inf where x is large."""
    return x * _sigmoid(x, c0, c1)


def _sigmoid(x, c0, c1):
    return jax.nn.sigmoid(x * (c0 + c1 * _square(x)) if c1 else x * c0)


def _square(x):
    return jnp.minimum(x * x, 1e30)  # finite; the sigmoid is 0 or 1 long before


@_sigmoid_gated.defjvp
def _sigmoid_gated_jvp(c0, c1, primals, tangents):
    (x,), (dx,) = primals, tangents
    s = _sigmoid(x, c0, c1)
    inner = c0 + 3 * c1 * _square(x) if c1 else c0
    return x * s, dx * (s + x * (s * (1 - s)) * inner)


def silu(x: jax.Array) -> jax.Array:
    """x * sigmoid(x), of any shape; its derivative is a number for each finite x."""
    return _sigmoid_gated(x, 1.0)


def _squared_relu(x):
    y = jax.nn.relu(x)
    return y * y  # of a square autodiff makes 2 * y, which is inf half-way to the largest number


_GELU = 2 * math.sqrt(2 / math.pi)  # (1 + tanh(u)) / 2 = sigmoid(2 u)
_ACTIVATIONS = {
    "gelu": lambda x, p: _sigmoid_gated(x, _GELU, _GELU * 0.044715),
    "silu": lambda x, p: silu(x),
    "swish": lambda x, p: silu(x),
    "relu": lambda x, p: jax.nn.relu(x),
    "quick_gelu": lambda x, p: _sigmoid_gated(x, 1.702),  # Hendrycks & Gimpel 2016, https://arxiv.org/abs/1606.08415
    "squared_relu": lambda x, p: _squared_relu(x),  # So et al. 2021, https://arxiv.org/abs/2109.08668
    "linear": lambda x, p: x,
    "clamped_silu": lambda x, p: _sigmoid_gated(jnp.minimum(x, p["limit"]), p["alpha"]),
    "clamped_linear": lambda x, p: jnp.clip(x, -p["limit"], p["limit"]) + p["glu_linear_offset"],
}

_SMOOTH = _ACTIVATIONS.keys() - {"relu", "squared_relu"}  # The derivative of relu selects, and is no factor of 0.

# What `jax.nn` offers on top, by its own name; functions of one array.
_FROM_JAX_NN = (
    "celu elu hard_sigmoid hard_silu hard_swish hard_tanh leaky_relu log_sigmoid log_softmax mish relu6 selu "
    "sigmoid soft_sign softmax softplus sparse_plus squareplus standardize tanh"
).split()


# Names that others have for a pair of these.
_PAIRS = {
    "swiglu": ("silu", "linear"),
    "geglu": ("gelu", "linear"),
    "reglu": ("relu", "linear"),
    "glu": ("sigmoid", "linear"),
}
_NAMES = (*_ACTIVATIONS, *_FROM_JAX_NN)


def _is_known(name) -> bool:
    return callable(name) or (isinstance(name, str) and name.lower() in _NAMES)


def _meant(names) -> str:
    """Which of the names is none, and what may have been meant."""
    for name in (names,) if isinstance(names, str) else names if isinstance(names, Sequence) else ():
        if not isinstance(name, str) and not callable(name):
            return f"{name!r} is neither a name nor a function"
        if isinstance(name, str) and name.lower() in _PAIRS:
            return f"{name!r} is {_PAIRS[name.lower()]}"
        if not _is_known(name):
            return f"{name!r} is not known; {did_you_mean(name, _NAMES) or 'pass one of ' + ', '.join(_NAMES)}"
    return ""


ACTIVATIONS = Kind(
    'a tuple of names and functions, one for each slot, such as ("gelu",) or ("silu", "linear")',
    lambda names: (
        isinstance(names, str)
        or (isinstance(names, Sequence) and all(isinstance(name, str) or callable(name) for name in names))
    ),
    lambda names: not isinstance(names, str) and len(names) > 0 and all(map(_is_known, names)),
    _meant,
)

PARAMS = NONE | Kind("a dict of their parameters", lambda value: isinstance(value, Mapping))
_FINITE = Kind("a finite number", lambda value: True, number().accepts)


def slots(names: Sequence[str | Callable[..., Any]]) -> tuple[str | Callable[..., Any], ...]:
    """The activation of each slot of the A axis.

    As named, in lower case; but reversed if the first is "linear" or "clamped_linear", so that ("linear",
    "silu") and ("silu", "linear") are one and the same, and so are their weights.

    Raises ValueError for an unknown name, TypeError for what is neither a name nor a function.
    """
    check("activation", "names", names, ACTIVATIONS)
    lower = tuple(name.lower() if isinstance(name, str) else name for name in names)
    return lower[::-1] if lower[0] in ("linear", "clamped_linear") else lower


def check_params(
    where: str, argument: str, names: Sequence[str | Callable[..., Any]], params: Mapping[str, Any] | None
) -> None:
    """Raises ValueError or TypeError, naming `where` and its `argument`, for parameters that these activations lack."""
    check(where, argument, params, PARAMS)
    clamped = any(isinstance(name, str) and name.lower().startswith("clamped_") for name in names)
    known = tuple(CLAMPED_DEFAULTS) if clamped else ()
    for key, value in (params or {}).items():
        if key not in known:
            takes = did_you_mean(key, known) or ", ".join(known) or "none (they belong to clamped_silu, clamped_linear)"
            raise ValueError(f"{where}: {argument} has {key!r}, but {tuple(map(str, names))} takes {takes}.")
        check(where, f"{argument}[{key!r}]", value, _FINITE)


def _parameters(names: Sequence[str | Callable], params: Mapping | None) -> dict[str, float]:
    check_params("activation", "params", names, params)
    return {**CLAMPED_DEFAULTS, **(params or {})}


def activation(
    x: jax.Array, names: Sequence[str | Callable[..., Any]], params: Mapping[str, Any] | None = None
) -> jax.Array:
    """The product over a of names[a](x[..., a, :]).

    x:      [..., A, F] of a floating dtype, A = len(names)
    names:  one per slot, see `slots`; a function maps an array [..., F] to one of the same shape
    params: `limit`, `alpha`, `glu_linear_offset` of clamped_silu and clamped_linear

    Returns [..., F] of x.dtype; computed in float32. The gradient keeps only x and computes the rest again; of
    activations that are not `jax.nn`'s own it is right up to the largest finite x.
    Raises ValueError for unknown names or params and for a wrong A, TypeError for a dtype that is not
    floating.
    """
    (x,), order = as_jax(x), slots(names)
    values = _parameters(order, params)
    check("activation", "x", x, FLOATS_ARRAY)
    if x.ndim < 2 or x.shape[-2] != len(order):
        raise ValueError(
            f"activation: axis A of x[... A, F] is {x.shape[-2] if x.ndim > 1 else 'missing'} in x of shape "
            f"{x.shape}, but {len(order)} activations are named: {tuple(map(str, names))}."
        )

    return _activated(_each_slot, x, order, values)


def activation_of_slots(
    xs: Sequence[jax.Array], names: Sequence[str | Callable[..., Any]], params: Mapping[str, Any] | None = None
) -> jax.Array:
    """`activation` of A slots that are arrays of their own, [..., F] of one floating dtype each."""
    order = slots(names)
    return _activated(lambda xs: xs, tuple(xs), order, _parameters(order, params))


def _activated(split, x, order, values):
    """The product over the arrays that split(x) is a list of, computed in f32."""

    def product(x):
        xs = split(x)
        return _product([a.astype(jnp.float32) for a in xs], order, values).astype(xs[0].dtype)

    # Without it autodiff would keep float32 copies of x for the backward pass.
    return jax.checkpoint(product, prevent_cse=False)(x)


def _each_slot(x):
    return [x[..., a, :] for a in range(x.shape[-2])]


def _product(xs, order, values):
    """f32, of each slot [..., F] -> f32 [..., F]"""
    if order == ("squared_relu", "linear"):
        return _squared_gated(*xs)
    if len(xs) == 2 and all(isinstance(name, str) and name in _SMOOTH for name in order):
        return _gated_product(*xs, order, tuple(values.items()))
    return reduce(operator.mul, [_apply(name, x, values) for x, name in zip(xs, order, strict=True)])


# The products of two slots have derivatives of their own, in the order of csrc/activation/activation.cuh: what autodiff
# multiplies first may be inf in f32 where the whole product is not, and inf times a slope of 0 is NaN.


@partial(jax.custom_jvp, nondiff_argnums=(2, 3))
def _gated_product(x, gate, order, values):
    y, z = (_apply(name, each, dict(values)) for name, each in zip(order, (x, gate)))
    return y * z


@_gated_product.defjvp
def _gated_product_jvp(order, values, primals, tangents):
    of_slot = lambda name, x: jax.jvp(lambda x: _apply(name, x, dict(values)), (x,), (jnp.ones_like(x),))
    (y, y_slope), (z, z_slope) = (of_slot(name, x) for name, x in zip(order, primals))
    factor, other = _in_order(y_slope, z)
    return y * z, tangents[0] * factor * other + tangents[1] * (y * z_slope)


def _in_order(a, b):
    """Two factors to multiply by, one after the other: the product a b and 1, or b and a where that is inf."""
    product = a * b
    fits = jnp.abs(product) <= jnp.finfo(product.dtype).max
    return jnp.where(fits, product, b), jnp.where(fits, 1.0, a)


@jax.custom_jvp
def _squared_gated(x, gate):
    f = jax.nn.relu(x)
    return f * (f * gate)


@_squared_gated.defjvp
def _squared_gated_jvp(primals, tangents):
    (x, gate), (dx, dgate) = primals, tangents
    f, gate_larger = jax.nn.relu(x), jnp.abs(gate) > jax.nn.relu(x)
    factor, other = _in_order(jnp.where(gate_larger, f, gate), jnp.where(gate_larger, gate, f))  # The larger one first.
    half = jnp.where(x > 0, dx, 0) * factor * other
    return f * (f * gate), half + half + f * (f * dgate)


def _apply(name: str | Callable, x: jax.Array, values: dict[str, float]) -> jax.Array:
    if callable(name):
        return name(x)
    if name in _ACTIVATIONS:
        return _ACTIVATIONS[name](x, values)
    return (jnp.tanh if name == "tanh" else getattr(jax.nn, name))(x)


# -- straight to FP8 ------------------------------------------------------------------------------------------

# The kernels of csrc/activation/activation.cu: of slot 0; slot 1, where there is one, is linear (clamped_linear behind
# clamped_silu).
_KINDS = ("gelu", "silu", "relu", "quick_gelu", "squared_relu", "clamped_silu")
_FUSED = {
    **{(name,): kind for kind, name in enumerate(_KINDS[:-1])},
    **{(name, "linear"): kind for kind, name in enumerate(_KINDS[:-1])},
    ("clamped_silu", "clamped_linear"): _KINDS.index("clamped_silu"),
}


def is_fused(names: Sequence[str | Callable[..., Any]]) -> bool:
    """Whether `te_activation_fwd` and `te_activation_bwd` offer these activations, else there is only `activation`.

    Raises as `slots` does.
    """
    return slots(names) in _FUSED


def attributes(names: Sequence[str | Callable[..., Any]], params: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """The attributes `names`, `limit`, `alpha` and `glu_linear_offset` of the two ops, as `activation` reads its
    arguments. Raises ValueError where the ops do not offer `names`, else as `activation`."""
    order = slots(names)
    if order not in _FUSED:
        known = ", ".join(map(str, _FUSED))
        raise ValueError(f"te_activation: {order} is not fused with quantize; use one of {known}, or `activation`.")
    return dict(names=order, **{key: float(value) for key, value in _parameters(order, params).items()})


def _check_slots(x, names):
    if x.shape[-2] != len(names):
        raise ValueError(
            f"te_activation: axis `a` of x[m... a f] is {x.shape[-2]}, but {len(names)} activations are named: {names}."
        )


def activate(x: jax.Array, *, names: tuple[str, ...], **params: Any) -> tuple[jax.Array, dict[str, Any]]:
    """`Producer.value` of an activation of x [*m, a, f]."""
    _check_slots(x, names)
    return _product(_each_slot(x.astype(jnp.float32)), names, params), {}


def activation_gradient(
    dy: jax.Array, x: jax.Array, *, names: tuple[str, ...], **params: Any
) -> tuple[jax.Array, dict[str, Any]]:
    """`Producer.value` of the gradient of x from dy [*m, f]."""
    _check_slots(x, names)
    _, vjp = jax.vjp(lambda x: _product(_each_slot(x), names, params), x.astype(jnp.float32))
    return vjp(dy.astype(jnp.float32))[0], {}


def check_same_dtype(op: str, dy: Any, x: Any, *types: Any, **attrs: Any) -> None:
    """Raises TypeError, naming `op`, where the types of a gradient and of its operand differ."""
    if dy != x:
        raise TypeError(f"{op}: dy is {dy}, x is {x}; cast one to the other.")


def kind_of(x: jax.Array, names: tuple[str, ...]) -> int:
    """The number that the kernels know `names` by. Raises ValueError unless x [..., a, f] has a slot for each."""
    _check_slots(x, names)
    return _FUSED[names]


def _cuda(op, form: ScaleFormat, reference):
    """The kernel, which knows activations by a number. Behind x stands the scale, in formats that have one."""

    def run(call, *operands, names, **attrs):
        if form.block:
            form.check_gpu(op)
        return call(*operands, kind=kind_of(operands[-1 if form.block else -2], names), **attrs)

    return run


def _matrix_of_slots(x: tuple[Any, ...]) -> tuple[Any, Any, Any]:
    """`Producer.matrix` of x [*m, a, f]: kernels cut f into tiles, for all slots at once."""
    return math.prod(x[:-3]), x[-3] if len(x) > 2 else 1, x[-1]


ACTIVATION = Producer(
    name="te_activation{}_fwd",
    operands="x: {m} a f",
    rows="m...",
    columns="f",
    value=activate,
    split=lambda y, **_: (0, y.ndim - 1),
    tensor="y",
    inverse=True,
    matrix=lambda x, *_, **__: _matrix_of_slots(x),
    op=dict(replicated="a"),
    kernels={"": dict(fenced="y scale_inv", cuda=_cuda), "_block": dict(cuda=_cuda)},
)
activation_fwd: Op
activation_block_fwd: Op
activation_fwd, activation_block_fwd = declare_all(ACTIVATION)[:2]
"""x f32|bf16|f16 [*m, a, f], scale f32[] (with FP8 results) -> y [*m, f], the product over a of names[a](x[..., a, :]),
data, data_t, .. as `te_jax.ops.producers` says.

Attributes as `attributes` makes them. The kernel's sigmoid is right to 2**-22 (tests/ops/test_cuda_ops.py): a byte may
differ from the reference's by a step now and then. relu and squared_relu are exact.
"""

ACTIVATION_GRAD = Producer(
    name="te_activation{}_bwd",
    operands="dy: {m} f, x: {m} a f",
    rows="m...",
    columns="a f",
    value=activation_gradient,
    split=lambda y, **_: (0, y.ndim - 2),
    tensor="dx",
    dbias=True,
    inverse=True,
    check=check_same_dtype,
    matrix=lambda dy, x, *_, **__: _matrix_of_slots(x),
    op=dict(replicated="a"),
    kernels={"": dict(cuda=_cuda), "_block": dict(cuda=_cuda)},
)
activation_bwd: Op
activation_block_bwd: Op
activation_bwd, activation_block_bwd = declare_all(ACTIVATION_GRAD)[:2]
"""The backward pass of te_activation_fwd: dy [*m, f] of x's type, x, scale f32[] (with FP8 results) -> dx [*m, a, f],
dy times the derivative by x, data, data_t, .. as `te_jax.ops.producers` says."""


def activation_source(x: jax.Array, attrs: dict[str, Any]) -> Source:
    """act(x) [*m, f] of x [*m, a, f]. attrs: as `attributes` returns them."""
    return Source(ACTIVATION, attrs, (x,), x.ndim - 2)


def activation_grad_source(dy: jax.Array, x: jax.Array, attrs: dict[str, Any]) -> Source:
    """The gradient [*m, a, f] of x from dy [*m, f], the gradient of act(x). attrs: as `attributes` returns them."""
    return Source(ACTIVATION_GRAD, attrs, (dy, x), x.ndim - 2)
