"""Quantization of stacked weights, and activations over the rows of groups: against a float64 oracle by loops over
experts, many loads of the experts in one compilation."""

from functools import partial

import grouped_oracle as oracle
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from te_jax.layers import grouped_dense
from te_jax.ops.activation import attributes
from te_jax.ops.gemm_grouped import gemm_grouped, gemm_grouped_wgrad
from te_jax.ops.grouped import (
    activation_grouped_block_bwd,
    activation_grouped_block_fwd,
    activation_grouped_bwd,
    activation_grouped_fwd,
    quantize_stacked,
    quantize_stacked_block,
)
from te_jax.ops.permute import buffer_rows
from te_jax.ops.quantize import quantize, quantize_block

f32, bf16, f16 = map(jnp.dtype, (jnp.float32, jnp.bfloat16, jnp.float16))
E4M3, E5M2 = map(jnp.dtype, (jnp.float8_e4m3fn, jnp.float8_e5m2))
wide = partial(np.asarray, dtype=np.float64)

# E, tokens, type, activations, FP8 type, bias, a scale for each expert; columns, with whole vectors of 8 and without
CASES = [
    (1, 129, f32, ("gelu",), E4M3, False, False, 72),
    (3, 301, bf16, ("silu", "linear"), E4M3, True, True, 13),
    (8, 301, f16, ("relu",), E5M2, False, False, 67),
    (8, 301, f32, ("gelu", "linear"), E5M2, False, True, 13),
    (128, 19, bf16, ("silu", "linear"), E4M3, False, True, 72),
]


def fetching(fn):
    """`fn` as one program, with numpy's results: jax compiles a program for each slice of its own."""
    run = jax.jit(fn)
    return lambda *operands: jax.device_get(run(*operands))


def fp8(values, bounds, factor, dtype):
    """What `oracle.near` compares FP8 with: the values times the scale, saturated."""
    top = float(jnp.finfo(dtype).max)
    return np.clip(values * factor, -top, top), bounds * factor


@pytest.mark.parametrize("case", CASES, ids=str)
def test_activation(case, rng):
    """Rows that pad a group and the tail hold NaN: the first become zeros, the tail of a result is read by nobody. NaN
    and inf of a token stay with its expert."""
    experts, tokens, dtype, names, kind, has_bias, each, features = case
    rows, attrs = buffer_rows(tokens, experts), dict(attributes(names), dtype=kind)

    def with_amax_alone(op, *operands):
        return op(*operands, **attrs), op(*operands[:-1], None, outputs=("amax",), **attrs)

    fwd, bwd = (fetching(partial(with_amax_alone, op)) for op in (activation_grouped_fwd, activation_grouped_bwd))
    for name, counts in oracle.loads(rng, experts, tokens).items():
        offsets = oracle.groups_of(counts)
        real = oracle.is_token(rows, offsets, counts)
        x, dy = rng.standard_normal((rows, len(names), features)), rng.standard_normal((rows, features))
        x = oracle.spoiled(2 * x, rng, np.flatnonzero(real))
        x, dy = (oracle.poisoned(a, ~real).astype(dtype) for a in (x, dy))
        bias = rng.standard_normal((experts, len(names), features)).astype(np.float32) if has_bias else None
        scale = rng.uniform(1, 100, experts if each else 1).astype(np.float32)
        of_row = np.zeros(rows)
        for e in range(experts):
            of_row[oracle.tokens_of(offsets, counts, e)] = scale[e if each else 0]
        inputs = wide(x), offsets, counts, names, None if bias is None else wide(bias)
        found = (
            (fwd(x, offsets, counts, bias, scale), oracle.activations(*inputs)),
            (bwd(dy, x, offsets, counts, bias, scale), oracle.activations(*inputs, wide(dy))),
        )
        for ((y, data, data_t, amax, *dbias), alone), (want, bound) in found:
            factor, used = of_row.reshape(-1, *[1] * (want.ndim - 1)), slice(offsets[-1])
            oracle.near(y[used], want[used], bound[used], dtype, name)
            oracle.near(data[used], *(a[used] for a in fp8(want, bound, factor, kind)), kind, name)
            np.testing.assert_array_equal(wide(data_t)[..., used], np.moveaxis(wide(data)[used], 0, -1))
            of_amax, of_dbias = oracle.of_experts(want, bound, offsets, counts)
            for found_amax in (amax, *alone):
                oracle.near(found_amax, *of_amax, f32, name)
            if dbias:
                oracle.near(*dbias, *of_dbias, f32, name)


@pytest.mark.parametrize("case", [CASES[1], CASES[3], CASES[4]], ids=str)
def test_activation_in_blocks(case, rng):
    """Each block has the scale of its own amax; no block of rows has those of two experts, or what pads them."""
    experts, tokens, dtype, names, kind, has_bias, *_ = case
    rows, features, top = buffer_rows(tokens, experts), 150, float(jnp.finfo(kind).max)
    attrs = dict(attributes(names), dtype=kind, power_2=False, epsilon=0.0)
    fwd = fetching(partial(activation_grouped_block_fwd, **attrs))
    bwd = fetching(partial(activation_grouped_block_bwd, **attrs))
    for name, counts in oracle.loads(rng, experts, tokens).items():
        offsets = oracle.groups_of(counts)
        real = oracle.is_token(rows, offsets, counts)
        x, dy = rng.standard_normal((rows, len(names), features)), rng.standard_normal((rows, features))
        x, dy = (oracle.poisoned(a, ~real).astype(dtype) for a in (x, dy))
        bias = rng.standard_normal((experts, len(names), features)).astype(np.float32) if has_bias else None
        inputs = wide(x), offsets, counts, names, None if bias is None else wide(bias)
        found = (
            (fwd(x, offsets, counts, bias), oracle.activations(*inputs)),
            (bwd(dy, x, offsets, counts, bias), oracle.activations(*inputs, wide(dy))),
        )
        for (data, data_t, inverse, inverse_t, *dbias), (want, bound) in found:
            bound = bound + float(jnp.finfo(dtype).eps) / 2 * (np.abs(want) + bound)  # values in the type of x
            last, used = want.ndim - 1, slice(offsets[-1])
            for at, got, scales in (
                (last, data, np.moveaxis(wide(inverse), -1, 0)),
                (0, np.moveaxis(wide(data_t), -1, 0), wide(inverse_t)),
            ):
                each = oracle.blocks(scales, at, want.shape[at])[used]
                oracle.near(got[used], *fp8(want[used], bound[used], 1 / each, kind), kind, name)
                parts = [np.s_[:128], np.s_[128:]] if at == last else [np.s_[i : i + 128] for i in range(0, rows, 128)]
                amaxes, bounds = (
                    np.stack([np.max(a[..., part] if at == last else a[part], at) for part in parts], at)
                    for a in (np.abs(want), bound)
                )
                of_amax = np.where(amaxes > 0, amaxes, top), bounds + 4 * oracle.U * amaxes  # the scale of zeros is 1
                there = used if at == last else slice(offsets[-1] // 128)
                oracle.near((scales * top)[there], *(a[there] for a in of_amax), f32, name)
            if dbias:
                oracle.near(*dbias, *oracle.of_experts(want, bound, offsets, counts)[1], f32, name)


def test_stacked_weights(rng):
    """The results of te_quantize and te_quantize_block for each expert by itself; one launch's worth of a call. Two
    arrays are those of one in which they lie side by side."""
    for experts, dtype, kind, shape in ((1, f32, E4M3, (2, 131, 140)), (3, bf16, E4M3, (3, 112, 72)),
                                        (8, f16, E5M2, (2, 131, 140))):  # fmt: skip
        x = np.array(rng.standard_normal((experts, *shape)), np.float32).astype(dtype)
        x[0, 0, 0, 0], scale = np.nan, rng.uniform(1, 100, experts).astype(np.float32)
        of_tensor, law = dict(split=2, dtype=kind), dict(lead=1, dtype=kind, power_2=True, epsilon=0.0)
        y = (x[:, ::-1] * np.arange(1, experts + 1)[:, None, None, None]).astype(dtype)
        stacked, singly = (fetching(partial(fn, of_tensor, law)) for fn in (stacked_in_both_ways, singly_in_both_ways))
        for beside in (None, y):
            both = x if beside is None else np.stack([x, y], 3)
            got, amax = stacked(x, beside, scale)
            for e in range(experts):
                for a, b in zip(got, singly(both[e], scale[e]), strict=True):
                    np.testing.assert_array_equal(a[e].astype(np.float32), b.astype(np.float32))
            np.testing.assert_array_equal(np.isnan(got[2]), np.arange(experts) == 0)
            np.testing.assert_array_equal(amax, got[2])


def stacked_in_both_ways(of_tensor, law, x, beside, scale):
    """The results of the ops of a tensor and of blocks; the amaxes by themselves."""
    slots = dict(stack=1, slots=0 if beside is None else 1)
    (amax,) = quantize_stacked(x, beside, None, outputs=("amax",), **slots, **of_tensor)
    got = quantize_stacked(x, beside, scale, **slots, **of_tensor)
    return (*got, *quantize_stacked_block(x, beside, **slots, **law)), amax


def singly_in_both_ways(of_tensor, law, x, scale):
    names = ("data", "data_t", "block_inv", "block_inv_t")
    got = quantize(x, scale, outputs=("data", "data_t", "amax"), **of_tensor)
    return *got, *quantize_block(x, outputs=names, square=True, **law)


def test_stacked_amaxes():
    """Of more tiles than te_finish has threads, the largest element in the last of them."""
    x = np.tile(np.linspace(-1, 1, 33000, dtype=np.float32), (3, 1, 1))
    x[:, 0, -1] = 2, np.inf, np.nan
    of_three, of_none = (
        quantize_stacked(a, None, None, outputs=("amax",), stack=1, slots=0, split=1, dtype=E4M3)[0]
        for a in (x, x[:, :0])
    )
    np.testing.assert_array_equal(of_three, [2, np.inf, np.nan])
    np.testing.assert_array_equal(of_none, np.zeros(3))


def test_no_rows():
    """T = 0: a buffer without rows."""
    offsets, counts, scale = np.zeros(4, np.int32), np.zeros(3, np.int32), np.ones(3, np.float32)
    x, dy, attrs = np.ones((0, 2, 5), np.float32), np.ones((0, 5), np.float32), attributes(("silu", "linear"))
    law, c = dict(dtype=E4M3, power_2=False, epsilon=0.0), np.ones((3, 5, 5), np.float32)

    @fetching
    def run(x, dy, offsets, counts, scale, c):
        loss = lambda kernel: jnp.sum(grouped_dense(dy, kernel, counts))
        return dict(
            fwd=activation_grouped_fwd(x, offsets, counts, None, scale, dtype=E4M3, **attrs),
            bwd=activation_grouped_bwd(dy, x, offsets, counts, None, scale, dtype=E4M3, **attrs)[-2:],
            block=activation_grouped_block_fwd(x, offsets, counts, None, **attrs, **law)[3],
            rows=gemm_grouped(dy, jnp.ones((3, 7, 5)), offsets, counts),
            wgrad=gemm_grouped_wgrad(dy.T, dy.T, offsets, counts, c=c),
            grad=jax.grad(loss)(c),
        )

    got = run(x, dy, offsets, counts, scale, c)
    *of_rows, amax = got["fwd"]
    assert [a.shape for a in of_rows] == [(0, 5), (0, 5), (5, 0)] and not amax.any()
    amax, dbias = got["bwd"]
    assert not amax.any() and not dbias.any() and dbias.shape == (3, 2, 5)
    assert got["block"].shape == (0, 5) and got["rows"].shape == (0, 7)
    np.testing.assert_array_equal(got["wgrad"], c)
    assert got["grad"].shape == c.shape and not got["grad"].any()


BAD = {
    "counts": (activation_grouped_fwd, dict(counts=np.ones(3, np.float32)), TypeError, "counts is float32"),
    "slots": (activation_grouped_fwd, dict(x=np.ones((128, 3, 4), np.float32)), ValueError, "axis `a` of x"),
    "bias of another E": (activation_grouped_fwd, dict(bias=np.ones((2, 2, 4), np.float32)), ValueError, "axis `e` is"),
    "scale of another E": (activation_grouped_fwd, dict(scale=np.ones(4, np.float32)), ValueError, "axis `e` is"),
    "dy's type": (activation_grouped_bwd, dict(dy=np.ones((128, 4), bf16)), TypeError, "dy is bfloat16"),
    "dy's rows": (activation_grouped_bwd, dict(dy=np.ones((256, 4), np.float32)), ValueError, "axis `r` is"),
    "type": (activation_grouped_block_fwd, dict(dtype=f32), ValueError, "dtype is"),
    "offsets": (activation_grouped_block_bwd, dict(offsets=np.zeros(4, np.int16)), TypeError, "offsets is int16"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input(name):
    """Refused before anything runs."""
    op, bad, error, words = BAD[name]
    one = np.ones((128, 4), np.float32)
    good = dict(dy=one, x=np.stack([one, one], 1), offsets=np.zeros(4, np.int32), counts=np.zeros(3, np.int32))
    attrs = dict(attributes(("silu", "linear")), dtype=E4M3)
    if "block" in op.name:
        attrs |= dict(power_2=False, epsilon=0.0)
    operands = [({**good, **bad}).get(o.name) for o in op.rule.inputs]
    attrs |= {key: value for key, value in bad.items() if key in attrs}
    with pytest.raises(error, match=words) as raised:
        jax.jit(lambda: op(*operands, **attrs)).lower()
    assert str(raised.value).startswith("te_activation")


@pytest.mark.parametrize("op", [quantize_stacked, quantize_stacked_block], ids=lambda op: op.name)
def test_bad_pairs(op):
    """A second array of another type or shape, and one that `slots` does not tell of."""
    one, law = np.ones((2, 8, 8), np.float32), dict(stack=1, dtype=E4M3)
    law |= dict(lead=0, power_2=True, epsilon=0.0) if "block" in op.name else dict(split=1)
    scale = () if "block" in op.name else (np.ones(2, np.float32),)
    for y, slots, error, words in ((one, 0, ValueError, "slots is 0"), (None, 1, ValueError, "slots is 1"),
                                   (one.astype(bf16), 1, TypeError, "y is bfloat16"),
                                   (one[:1], 1, ValueError, "axis `e...0` is 1 in y")):  # fmt: skip
        with pytest.raises(error, match=f"{op.name}: .*{words}"):
            jax.jit(lambda y=y, slots=slots: op(one, y, *scale, slots=slots, **law)).lower()
