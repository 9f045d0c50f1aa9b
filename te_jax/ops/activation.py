"""Activations of the MLP, gated ones among them, in plain JAX: XLA fuses them into one pass."""

import functools
import math
import operator
from collections.abc import Callable, Mapping, Sequence

import jax
import jax.numpy as jnp

# Clamped SwiGLU of gpt-oss (https://arxiv.org/abs/2508.10925): the defaults of its model card.
CLAMPED_DEFAULTS = {"limit": 7.0, "alpha": 1.702, "glu_linear_offset": 1.0}


def _clamped_silu(x, p):
    x = jnp.minimum(x, p["limit"])
    return x * jax.nn.sigmoid(p["alpha"] * x)


_ACTIVATIONS = {
    "gelu": lambda x, p: jax.nn.gelu(x, approximate=True),
    "silu": lambda x, p: jax.nn.silu(x),
    "relu": lambda x, p: jax.nn.relu(x),
    "quick_gelu": lambda x, p: (
        x * jax.nn.sigmoid(1.702 * x)
    ),  # Hendrycks & Gimpel 2016, https://arxiv.org/abs/1606.08415
    "squared_relu": lambda x, p: jnp.square(jax.nn.relu(x)),  # So et al. 2021, https://arxiv.org/abs/2109.08668
    "linear": lambda x, p: x,
    "clamped_silu": _clamped_silu,
    "clamped_linear": lambda x, p: jnp.clip(x, -p["limit"], p["limit"]) + p["glu_linear_offset"],
}

# What `jax.nn` offers on top, by its own name; functions of one array.
_FROM_JAX_NN = (
    "celu elu hard_sigmoid hard_silu hard_swish hard_tanh leaky_relu log_sigmoid log_softmax mish relu6 selu "
    "sigmoid soft_sign softmax softplus sparse_plus squareplus standardize swish tanh"
).split()


def slots(names: Sequence[str | Callable]) -> tuple[str | Callable, ...]:
    """The activation of each slot of the A axis.

    As named, in lower case; but reversed if the first is "linear" or "clamped_linear", so that ("linear",
    "silu") and ("silu", "linear") are one and the same, and so are their weights.

    Raises ValueError for an unknown name, TypeError for what is neither a name nor a function.
    """
    if isinstance(names, str) or not names:
        raise ValueError(f'activation: names is {names!r}; pass a tuple such as ("gelu",) or ("silu", "linear").')
    lower = tuple(name.lower() if isinstance(name, str) else name for name in names)
    for name in lower:
        if not isinstance(name, str) and not callable(name):
            raise TypeError(f"activation: {name!r} is neither a name nor a function.")
        if isinstance(name, str) and name not in _ACTIVATIONS and name not in _FROM_JAX_NN:
            known = ", ".join([*_ACTIVATIONS, *_FROM_JAX_NN])
            raise ValueError(f"activation: {name!r} is not known; pass one of {known}, or a function.")
    return lower[::-1] if lower[0] in ("linear", "clamped_linear") else lower


def _parameters(names: Sequence[str | Callable], params: Mapping | None) -> dict[str, float]:
    given = dict(params or {})
    clamped = any(isinstance(name, str) and name.startswith("clamped_") for name in names)
    known = tuple(CLAMPED_DEFAULTS) if clamped else ()
    for key, value in given.items():
        if key not in known:
            raise ValueError(
                f"activation: activation_params has {key!r}, but {tuple(map(str, names))} takes "
                f"{', '.join(known) or 'none (they belong to clamped_silu and clamped_linear)'}."
            )
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            raise ValueError(f"activation: activation_params[{key!r}] is {value!r}; pass a finite number.")
    return {**CLAMPED_DEFAULTS, **given}


def activation(x: jax.Array, names: Sequence[str | Callable], params: Mapping | None = None) -> jax.Array:
    """The product over a of names[a](x[..., a, :]).

    x:      [..., A, F] of a floating dtype, A = len(names)
    names:  one per slot, see `slots`; a function maps an array [..., F] to one of the same shape
    params: `limit`, `alpha`, `glu_linear_offset` of clamped_silu and clamped_linear

    Returns [..., F] of x.dtype; computed in float32. The gradient keeps x alone and computes the rest again.
    Raises ValueError for unknown names or params and for a wrong A, TypeError for a dtype that is not
    floating.
    """
    order = slots(names)
    values = _parameters(order, params)
    if not jnp.issubdtype(x.dtype, jnp.floating):
        raise TypeError(f"activation: x is {x.dtype}; pass a floating dtype.")
    if x.ndim < 2 or x.shape[-2] != len(order):
        raise ValueError(
            f"activation: axis A of x[... A, F] is {x.shape[-2] if x.ndim > 1 else 'missing'} in x of shape "
            f"{x.shape}, but {len(order)} activations are named: {tuple(map(str, names))}."
        )

    def product(x):
        f32 = x.astype(jnp.float32)
        parts = [_apply(name, f32[..., a, :], values) for a, name in enumerate(order)]
        return functools.reduce(operator.mul, parts).astype(x.dtype)

    # Without it autodiff would keep float32 copies of x for the backward pass.
    return jax.checkpoint(product, prevent_cse=False)(x)


def _apply(name: str | Callable, x: jax.Array, values: dict[str, float]) -> jax.Array:
    if callable(name):
        return name(x)
    if name in _ACTIVATIONS:
        return _ACTIVATIONS[name](x, values)
    return (jnp.tanh if name == "tanh" else getattr(jax.nn, name))(x)
