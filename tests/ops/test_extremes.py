"""Ops, layers and losses at the ends of f32's range: finite where float64 is, and equal within the types' roundings.

A result counts where float64's has a number of the result's type. What is f32 by definition on the way has to have
one too: logits of attention and the gradients of its probabilities, a norm's gamma times a cotangent, the product of
two slots. So no case takes both factors of these to the same end.
"""

import itertools
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from in_float64 import in_float64

from benchmarks.op_case import bf16, f32
from benchmarks.op_cases import CASES
from te_jax import layers
from te_jax.ops.activation import activation
from te_jax.ops.attention import dot_product_attention
from te_jax.ops.norm import gated_norm, norm, norm_fwd
from te_jax.ops.router import RouterOptions, load_balancing_loss, route, z_loss

HUGE, TINY = 1e30, 1e-30
# Factors of the floating operands, in turn; None: rows of equal numbers.
ENDS = [(HUGE,), (TINY,), (HUGE, TINY), (TINY, HUGE), (HUGE, TINY, TINY), (45.0,), (100.0,), (0.0,), (1e-40,), None]
OPPOSITE = [(HUGE, TINY), (TINY, HUGE), (3.0,), (TINY,), (0.0,), (1e-40,), None]
ONE_HUGE = [(HUGE, 1.0), (1.0, HUGE, 1.0, TINY), (TINY, 1.0), (TINY,), (45.0,), (100.0,), (0.0,), (1e-40,), None]
GATED = [end for end in ENDS if end != (TINY, HUGE)]
# Sums of products of x, the initial state and weights, and then silu; no factor takes both to the same end.
CONVOLVED = [(HUGE, TINY), (1.0, TINY), (TINY,), (45.0, 1.0), (0.0,), (1e-40,)]
# Their operands are results of another op, which random numbers are not; have signs (tests/ops/test_ssm.py and
# test_gated_delta.py have their ends); or are bits of FP8 in 16.
NOT_RANDOM = (
    "te_ssd",
    "te_gated_delta",
    "te_norm_bwd",
    "te_gated_norm_bwd",
    "te_attention_bwd",
    "te_attention_fp8_bwd",
    "te_scale_update",
    "te_group",
    "paired",
)


def at(end, args, is_given):
    """`args` as numpy's, their floating arrays taken to an end."""
    moved, out = 0, []
    for i, a in enumerate(map(np.asarray, args)):
        if a.dtype in (jnp.float32, jnp.bfloat16) and not is_given(i):
            factor = 1.0 if end is None else end[moved % len(end)]
            a = (np.full(a.shape, 3.0) if end is None else a.astype(np.float64) * factor).astype(f32).astype(a.dtype)
            moved += 1
        out.append(a)
    return out


def normal(a):
    """`a` with f32's denormals as 0, which they are to XLA on a CPU."""
    return np.where(np.abs(a) < 2.0**-126, 0, a).astype(a.dtype) if a.dtype in (jnp.float32, jnp.bfloat16) else a


def failures(got, want, equal):
    """How many of the numbers are not `want`, f64, where that has one of got's type. equal: what went in is 3s, and the
    differences of sums of some hundred products may be all that there is."""
    got, info = np.asarray(got), jnp.finfo(got.dtype)
    want, numbers = np.asarray(want).astype(np.float64), got.astype(np.float64)
    counts = np.abs(want) <= 0.99 * float(info.max)
    # Sums of a few hundred terms of any sign, and of numbers that bf16 has rounded: of the size of the largest result.
    top = np.abs(want, where=counts, out=np.zeros(want.shape)).max(initial=0)
    few_bits = info.bits == 8  # a neighbour
    atol = float(info.smallest_subnormal) if few_bits else 2.0**-13 * top + (2.0**-16 if equal else 2.0**-126)
    rtol = 2 * float(info.eps) + (0 if few_bits else 2.0**-13)
    with np.errstate(invalid="ignore"):
        return int((counts & ~(np.abs(numbers - want) <= rtol * np.abs(want) + atol)).sum())


def sweep(call, args, ends, is_given=lambda i: False):
    """{end: failures} of call(*args), which gives a list of arrays."""
    run, due, found = jax.jit(call), in_float64(call, *args), {}
    for end in ends:
        here = at(end, args, is_given)
        pairs = zip(jax.device_get(run(*here)), due(*map(normal, here)), strict=True)
        if bad := sum(
            failures(got, want, end is None) for got, want in pairs if got.dtype.kind not in "iub" and got.size
        ):
            found[end] = bad
    return found


ONE_OF_EACH = {case.op: case for case in CASES if not any(part in case.op for part in NOT_RANDOM)}


@pytest.mark.parametrize("op", ONE_OF_EACH)
def test_ops(op, rng):
    case = ONE_OF_EACH[op].small()
    args, declared = case.args(rng), case.declared
    names = [o.name for o, a in zip(declared.rule.inputs, args) if a is not None]
    in_blocks = [
        "block" in op and (d is bf16 or "fp8" in op) for d in case.dtypes
    ]  # quantized from bf16: of other bits than f64's
    if any(in_blocks):
        pytest.skip("blocks of numbers that are rounded to bf16 on the way")

    def call(*present):
        rest = iter(present)
        results = declared.reference(*(None if a is None else next(rest) for a in args), **case.attrs)
        chosen = lambda name: case.outputs is None or name in case.outputs
        return [r for o, r in zip(declared.rule.outputs, results) if chosen(o.name) and r is not None]

    is_given = lambda i: "scale" in names[i] or names[i].endswith("_inv") or names[i] in ("positions", "inv_freq")
    ends = OPPOSITE if "attention" in op or "rope" in op else ENDS
    if "gated_norm" in op:
        ends = ONE_HUGE
    if op == "te_gated_norm_mx_fwd":  # Gates whose f32 is 0 may be all of a cut block, which then has no scale.
        ends = [end for end in ends if end != (100.0,)]
    if "conv1d" in op:
        ends = CONVOLVED
    if "_block" in op:  # whatever the scale of such a block, its numbers are 0
        ends = [end for end in ends if end != (1e-40,)]
    assert not sweep(call, [a for a in args if a is not None], ends, is_given)


def gradients(f, count):
    """The result of f, and its gradients by the first `count` arguments for the last one, the cotangent."""

    def both(*args):
        *args, dy = args
        y, vjp = jax.vjp(lambda *wrt: f(*wrt, *args[count:]), *args[:count])
        return [y, *vjp(dy)]

    return both


def of_scalar(f):
    return lambda *args: [*(lambda value, grads: (value, grads))(*jax.value_and_grad(f)(*args))]


OPTIONS = RouterOptions(2, "sigmoid")
HEAD = dict(label_smoothing=0.1, z_loss=1e-3)
LABELS = jnp.arange(8) % 16
SHAPES = {
    "norm": [(6, 24), (24,), (24,), (6, 24)],
    "gated_norm": [(6, 2, 24), (6, 2, 24), (2, 24), (6, 2, 24)],
    "gated": [(4, 2, 24), (4, 24)],
    "router": [(8, 6)],
}


def cross_entropy(**options):
    return lambda x, kernel: layers.linear_cross_entropy(x, kernel, LABELS, **HEAD, **options)


WHOLE = {
    "layernorm": (gradients(norm, 3), SHAPES["norm"], ONE_HUGE),
    "rmsnorm": (gradients(partial(norm, kind="rmsnorm"), 2), [(6, 24), (24,), (6, 24)], ONE_HUGE),
    "gated_norm": (gradients(gated_norm, 3), SHAPES["gated_norm"], ONE_HUGE),
    "norm_before_gate": (gradients(partial(gated_norm, norm_before_gate=True), 3), SHAPES["gated_norm"], ONE_HUGE),
    **{
        f"gated_{name}": (gradients(partial(activation, names=(name, "linear")), 1), SHAPES["gated"], GATED)
        for name in ("silu", "gelu", "quick_gelu", "relu", "squared_relu")
    },
    "attention": (
        gradients(lambda q, k, v: dot_product_attention(q, k, v, attn_mask_type="causal"), 3),
        [(1, 6, 2, 8)] * 4,
        OPPOSITE,
    ),
    "softcap": (
        gradients(lambda q, k, v: dot_product_attention(q, k, v, logit_softcap=20.0), 3),
        [(1, 6, 2, 8)] * 4,
        OPPOSITE,
    ),
    "cross_entropy": (of_scalar(cross_entropy()), [(8, 12), (12, 16)], OPPOSITE),
    "cross_entropy_softcap": (of_scalar(cross_entropy(logit_softcap=20.0)), [(8, 12), (12, 16)], OPPOSITE),
    "z_loss": (of_scalar(z_loss), SHAPES["router"], ENDS[1:]),
    "route": (gradients(lambda logits: route(logits, OPTIONS).weights, 1), [(8, 6), (8, 2)], ENDS),
    "balance": (
        of_scalar(lambda x: load_balancing_loss(x, jnp.zeros((8, 2), jnp.int32), OPTIONS)),
        SHAPES["router"],
        ENDS,
    ),
    "mlp": (
        lambda x, gamma, up, down: list(
            jax.vjp(lambda x: layers.layernorm_mlp(x, gamma, None, up, down, norm="rmsnorm"), x)[0:1]
        ),
        [(6, 16), (16,), (16, 1, 24), (24, 16)],
        [(HUGE, 1.0), (TINY, 1.0), (0.0,), (1e-40,), None],
    ),
}


@pytest.mark.parametrize("name", WHOLE)
def test_layers_and_losses(name, rng):
    """Values and gradients."""
    call, shapes, ends = WHOLE[name]
    assert not sweep(call, [rng.standard_normal(shape).astype(np.float32) for shape in shapes], ends)


@pytest.mark.parametrize("width", [20, 24, 640])
def test_statistics_of_huge_rows(width, rng):
    """By each kernel that computes them: of rows in registers, of rows of odd length, and ahead of tiles."""
    base, gamma = rng.standard_normal((5, width)) + 0.5, np.ones(width, np.float32)
    options = dict(eps=1e-6, zero_centered=False, dtype=jnp.dtype(jnp.float8_e4m3fn))
    ways = list(itertools.product((True, False), ((("y", "rstd"), None), (("data", "data_t", "rstd"), jnp.float32(1)))))

    @jax.jit
    def run(xs):
        of = lambda x, rms, outputs, scale: norm_fwd(
            x, gamma, None, None, None, scale, rms=rms, outputs=outputs, **options
        )[-1]
        return [[of(x, rms, *each) for rms, each in ways] for x in xs]

    xs = [(base * factor).astype(np.float32).astype(dtype)
          for dtype, factor in ((f32, HUGE), (f32, 3e18), (bf16, HUGE), (bf16, 1.0))]  # fmt: skip
    for x, results in zip(xs, run(xs), strict=True):
        wide = x.astype(np.float64)
        for (rms, _), rstd in zip(ways, results, strict=True):
            centered = wide - (0 if rms else wide.mean(-1, keepdims=True))
            want = 1 / np.sqrt((centered**2).mean(-1) + 1e-6)
            # A GPU's rsqrt is right to 2 ulp, and its tensor cores round short sums towards zero.
            np.testing.assert_allclose(rstd, want, rtol=2.0**-14)
