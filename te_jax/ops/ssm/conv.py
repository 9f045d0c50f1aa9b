"""Causal convolution of each channel over a few tokens, as state-space models have in front of their scan."""

from typing import Any

import jax
import jax.numpy as jnp
from jax.core import max_dim

from te_jax.core.arrays import as_jax, as_rank
from te_jax.core.check import BOOL, FLOATS_ARRAY, INTEGERS, NONE, check, one_of
from te_jax.core.derivatives import custom_vjp
from te_jax.core.op import Op
from te_jax.core.types import align, like
from te_jax.ops.formats import ceil_div
from te_jax.ops.quantize import activation
from te_jax.ops.ssm.runs import runs_and_rows, runs_of

WIDTHS = (2, 3, 4)
ACTIVATION = one_of("silu") | NONE


def _reference(x, kernel, bias, segments, initial, *, silu, width):
    past, s, wide = width - 1, x.shape[-2], jnp.promote_types(x.dtype, jnp.float32)
    lead = jnp.zeros((*x.shape[:-2], past, x.shape[-1]), wide) if initial is None else initial.astype(wide)
    tokens = jnp.concatenate([lead, x.astype(wide)], -2)
    runs = None
    if segments is not None:  # What came before belongs to the first token's segment.
        runs = jnp.pad(runs_of(segments), [(0, 0)] * (x.ndim - 2) + [(past, 0)])
    in_run_of = lambda a, at, run: a if runs is None else jnp.where((runs[..., at] == run)[..., None], a, 0)
    own = None if runs is None else runs[..., past:]
    y = jnp.zeros(x.shape, wide) if bias is None else as_rank(bias.astype(wide), x.ndim)
    for tap in range(width):
        at = slice(tap, tap + s)
        y = y + as_rank(kernel[tap].astype(wide), x.ndim) * in_run_of(tokens[..., at, :], at, own)
    y = activation.silu(y) if silu else y
    return y.astype(x.dtype), last_inputs(tokens, runs, past).astype(x.dtype)


def last_inputs(tokens: jax.Array, runs: jax.Array | None, count: int) -> jax.Array:
    """The last `count` of tokens [..., s, c], 0 where their run, i32[..., s], is not the last one's. None: one run."""
    last = tokens[..., tokens.shape[-2] - count :, :]
    if runs is None:
        return last
    return jnp.where((runs[..., runs.shape[-1] - count :] == runs[..., -1:])[..., None], last, 0)


def _bwd_reference(dy, dfinal, x, kernel, bias, segments, initial, **attrs):
    def forward(x, kernel, bias, initial):
        return _reference(x, kernel, bias, segments, initial, **attrs)

    (_, final), pull = jax.vjp(forward, x, kernel, bias, initial)
    return pull((dy, jnp.zeros_like(final) if dfinal is None else dfinal))


_TOKENS_PER_CTA = 128  # of csrc/ssm/conv.cu


def _has_conv_kernel(x, kernel, bias, *others):
    """Whether the kernels take such operands. others: as x, or None."""
    sizes_known = all(isinstance(size, int) for size in x.shape)
    of_types = all(a is None or a.dtype == jnp.float32 for a in (kernel, bias)) and all(
        a is None or a.dtype == x.dtype for a in others
    )
    return sizes_known and of_types and x.dtype != jnp.float64 and x.shape[-1] % 8 == 0


def _cuda(call, x, kernel, bias, segments, initial, **attrs):
    if not _has_conv_kernel(x, kernel, bias, initial):
        return _reference(x, kernel, bias, segments, initial, **attrs)
    runs, flat, initial = runs_and_rows(x.ndim - 2, segments, x, initial)
    return [a.reshape(*x.shape[:-2], *a.shape[1:]) for a in call(flat, kernel, bias, runs, initial, **attrs)]


def _conv_bwd_cuda(call, dy, dfinal, x, kernel, bias, segments, initial, **attrs):
    if not _has_conv_kernel(x, kernel, bias, initial, dy, dfinal):
        return _bwd_reference(dy, dfinal, x, kernel, bias, segments, initial, **attrs)
    runs, dy, dfinal, flat, initial = runs_and_rows(x.ndim - 2, segments, dy, dfinal, x, initial)
    dx, dkernel, *rest = call(dy, dfinal, flat, kernel, bias, runs, initial, **attrs)
    of_rows = lambda a: a.reshape(*x.shape[:-2], *a.shape[1:])
    return [of_rows(dx), dkernel, *(a if a.ndim == 1 else of_rows(a) for a in rest)]


def _parts_of_conv(dy, *_, **attrs):
    """Partials of what is summed over tokens."""
    return (dy[0] * max_dim(1, ceil_div(dy[1], _TOKENS_PER_CTA)),)


_OF_CONV = "x: b... s c, kernel: w c, bias?: c, segments?: b... s, initial?: b... v c"
_OF_WIDTH = {"w": lambda *, width, **_: width, "v": lambda *, width, **_: width - 1}

conv_fwd: Op = Op(
    "te_causal_conv1d_fwd",
    f"{_OF_CONV} -> y: b... s c, final?: b... v c",
    replicated="s w v",
    dtypes=lambda x, *_, **attrs: (x, x),
    reference=_reference,
    sizes=_OF_WIDTH,
    cuda=_cuda,
)
"""x of a floating type [b..., s, c], kernel [w, c], bias [c], segments i32[b..., s], initial [b..., w-1, c] -> y [b...,
s, c], final [b..., w-1, c], of x's type: `causal_conv1d`. Computed in f32. silu: bool. width: w.
"""

conv_bwd: Op = Op(
    "te_causal_conv1d_bwd",
    f"dy: b... s c, dfinal?: b... v c, {_OF_CONV} -> dx: =x, dkernel: =kernel, dbias?: =bias, dinitial?: =initial",
    replicated="s w v",
    combine={"dkernel": "sum", "dbias": "sum"},
    dtypes=lambda dy, dfinal, x, kernel, bias, segments, initial, **attrs: (x, kernel, bias, initial),
    reference=_bwd_reference,
    sizes=_OF_WIDTH,
    partials={"dkernel": _parts_of_conv, "dbias": _parts_of_conv},
    cuda=_conv_bwd_cuda,
)
"""The backward pass of te_causal_conv1d_fwd, of its operands: results of their types, sums in f32."""


def causal_conv1d(
    x: jax.Array,
    kernel: jax.Array,
    bias: jax.Array | None = None,
    *,
    activation: str | None = None,
    segments: jax.Array | None = None,
    initial_state: jax.Array | None = None,
    return_final_state: bool = False,
) -> Any:
    """y[t] = activation(bias + sum_i kernel[i] x[t - w + 1 + i]), for each channel by itself.

    x:             [b..., s, c], floating
    kernel, bias:  [w, c], w from 2 to 4, and [c] or None
    activation:    "silu" or None
    segments:      integers [b..., s] or None. Tokens that are not in the same run of equal numbers are 0 to each other
    initial_state: [b..., w-1, c], the inputs before the first token, which belong to its segment; None: zeros

    Returns y as x, computed in f32; with return_final_state (y, final_state [b..., w-1, c] of x's type): the last w - 1
    inputs, 0 where they are not of the last token's segment. Differentiable in all floating arguments. On a GPU a
    kernel computes it where c is a multiple of 8, else plain JAX. Raises ValueError for wrong shapes or activation,
    TypeError for dtypes.
    """
    name = "causal_conv1d"
    x, kernel, bias, segments, initial_state = as_jax(x, kernel, bias, segments, initial_state)
    check(name, "activation", activation, ACTIVATION)
    check(name, "return_final_state", return_final_state, BOOL)
    for what, a in (("x", x), ("kernel", kernel), ("bias", bias), ("initial_state", initial_state)):
        check(name, what, a, FLOATS_ARRAY if what in ("x", "kernel") else FLOATS_ARRAY | NONE)
    check(name, "segments", segments, INTEGERS | NONE)
    if x.ndim < 2:
        raise ValueError(f"{name}: x has shape {x.shape}; pass [b..., s, c].")
    if kernel.ndim != 2 or kernel.shape[0] not in WIDTHS or kernel.shape[1] != x.shape[-1]:
        raise ValueError(f"{name}: kernel has shape {kernel.shape}; pass [w, {x.shape[-1]}] with w from 2 to 4.")
    wide = jnp.promote_types(x.dtype, jnp.float32)
    kernel, bias = (None if a is None else a.astype(wide) for a in (kernel, bias))
    width = kernel.shape[0]
    check_shape(name, "bias", bias, x.shape[-1:])
    check_shape(name, "segments", segments, x.shape[:-1])
    check_shape(name, "initial_state", initial_state, (*x.shape[:-2], width - 1, x.shape[-1]))
    operands = align(x, kernel, bias, segments, initial_state)
    y, *final = _conv(*operands, (activation is not None, width, bool(return_final_state)))
    return (y, *final) if return_final_state else y


def check_shape(caller: str, name: str, array: Any, *shapes: tuple[int, ...]) -> None:
    """Raises ValueError unless `array` is None or has one of `shapes`."""
    if array is not None and array.shape not in shapes:
        ways = " or ".join(str(list(shape)) for shape in shapes)
        raise ValueError(f"{caller}: {name} has shape {array.shape}; pass {ways}.")


@custom_vjp(5)
def _conv(x, kernel, bias, segments, initial, static):
    silu, width, final = static
    return conv_fwd(
        x, kernel, bias, segments, initial, outputs=("y", "final") if final else ("y",), silu=silu, width=width
    )


def _conv_fwd(*args):
    return _conv(*args), args[:5]


def _conv_bwd(static, operands, cotangents):
    silu, width, _ = static
    x, kernel, bias, segments, initial = operands
    dy, *dfinal = cotangents
    floats = dict(dx=x, dkernel=kernel, dbias=bias, dinitial=initial)
    names = tuple(name for name, of in floats.items() if of is not None)
    grads = conv_bwd(dy, dfinal[0] if dfinal else None, *operands, outputs=names, silu=silu, width=width)
    got = {name: like(grad, floats[name]) for name, grad in zip(names, grads)}
    return got["dx"], got["dkernel"], got.get("dbias"), None, got.get("dinitial")


_conv.defvjp(_conv_fwd, _conv_bwd)
