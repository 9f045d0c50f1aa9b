"""FP8 of both layouts in one array: against the two arrays, bit for bit, and in a layer of experts."""

import sys
from dataclasses import replace
from functools import partial

import grouped_oracle as oracle
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from arrays import on_device

from te_jax import checkpoint_policies as policies
from te_jax import recipe
from te_jax.layers import MoEOptions, QuantizedKernel, moe, quantize_experts
from te_jax.layers.experts import mlp as layer_of_experts
from te_jax.layers.tensor import Accumulator, Fp8Tensor
from te_jax.layers.weight import GradientTarget
from te_jax.ops.activation import attributes
from te_jax.ops.experts.paired import (
    activation_grouped_paired_bwd,
    columns_of,
    gemm_grouped_paired,
    gemm_grouped_paired_wgrad,
    in_squares,
    pair,
    rows_of,
)
from te_jax.ops.gemm_grouped import gemm_grouped, gemm_grouped_wgrad
from te_jax.ops.grouped import activation_grouped_bwd
from te_jax.ops.permute import buffer_rows
from te_jax.ops.router import RouterOptions
from te_jax.state import fp8

bf16, f16, f32, E4M3, E5M2 = jnp.bfloat16, jnp.float16, jnp.float32, jnp.float8_e4m3fn, jnp.float8_e5m2
raw = lambda a: np.asarray(a).reshape(-1).view(np.uint8)
SWIGLU = attributes(("silu", "linear"))


def same_bits(got, want, what=""):
    np.testing.assert_array_equal(raw(got), raw(want), str(what))


def test_layout(rng):
    """Each byte where the module says that it lies, of all values of a byte, NaN too."""
    data = rng.integers(0, 256, (256, 2, 384), np.uint8)
    for kind, dtype in ((E5M2, bf16), (E4M3, f16)):
        paired = jax.jit(partial(pair, dtype=dtype))(data.view(kind))
        assert paired.shape == (256, 2, 3, 128) and paired.dtype == dtype
        lines = raw(paired).reshape(2, 128, 2, 3, 256)
        for square in np.ndindex(2, 2, 3):
            r, a, f = square
            mine = data[128 * r : 128 * r + 128, a, 128 * f : 128 * f + 128]
            same_bits(lines[r, :, a, f, :128], mine, square)
            same_bits(lines[r, :, a, f, 128:], mine.T, square)
        same_bits(rows_of(paired, kind), data)
        same_bits(columns_of(paired, kind), np.ascontiguousarray(data.transpose(1, 2, 0)))


# experts, tokens, activations, columns, x's type, FP8 type, one scale for each expert
ACTIVATIONS = [
    (3, 300, ("silu", "linear"), 256, bf16, E5M2, True),
    (1, 130, ("gelu",), 128, f16, E4M3, False),
    (8, 500, ("relu", "linear"), 384, bf16, E4M3, True),
]


@pytest.mark.parametrize("case", ACTIVATIONS, ids=str)
def test_gradient_of_an_activation(case, rng):
    """Both layouts and the amax are those of the op with two arrays, where groups have rows. x, which holds NaN where
    no token is, is written over."""
    experts, tokens, names, features, dtype, kind, each = case
    rows, attrs = buffer_rows(tokens, experts), dict(attributes(names), dtype=jnp.dtype(kind))
    run = jax.jit(partial(activation_grouped_paired_bwd, **attrs), donate_argnums=1)
    squares = lambda x: in_squares(jnp.array(x))
    plain = jax.jit(partial(activation_grouped_bwd, outputs=("data", "data_t", "amax"), **attrs))
    for name, counts in oracle.loads(rng, experts, tokens).items():
        offsets = oracle.groups_of(counts)
        real, used = oracle.is_token(rows, offsets, counts), slice(offsets[-1])
        x, dy = rng.standard_normal((rows, len(names), features)), rng.standard_normal((rows, features))
        x = oracle.spoiled(2 * x, rng, np.flatnonzero(real))
        x, dy = (jnp.asarray(oracle.poisoned(a, ~real).astype(dtype)) for a in (x, dy))
        scale = rng.uniform(1, 100, experts if each else 1).astype(np.float32)
        data, data_t, amax = plain(dy, x, offsets, counts, None, scale)
        paired, got_amax = run(dy, squares(x), offsets, counts, scale)
        same_bits(rows_of(paired, kind)[used], data[used], name)
        same_bits(columns_of(paired, kind)[..., used], np.ascontiguousarray(data_t[..., used]), name)
        np.testing.assert_array_equal(got_amax, amax, name)


def test_an_input_that_is_read_later(rng):
    """It keeps its values, and so does an argument that is not donated."""
    counts = np.array([100, 128, 3], np.int32)
    offsets, dtypes = oracle.groups_of(counts), dict(dtype=jnp.dtype(E5M2))
    x, dy = (on_device(rng.standard_normal(shape), bf16) for shape in ((384, 2, 1, 128), (384, 128)))
    kept = np.array(x)

    @jax.jit
    def run(dy, x):
        y = x + x  # in the program, not an argument
        op = lambda x: activation_grouped_paired_bwd(dy, x, offsets, counts, np.ones(3, np.float32), **dtypes, **SWIGLU)
        return op(x)[0], op(y)[0], y

    *_, y = run(dy, x)
    same_bits(x, kept)
    same_bits(y, kept + kept)


# experts, tokens, n, columns, type of the paired array and of its FP8, of the other factor, of the result, fast
PRODUCTS = [
    (3, 700, 72, 256, bf16, E5M2, E4M3, bf16, True),
    (8, 900, 264, 384, bf16, E5M2, E4M3, f32, False),
    (1, 300, 37, 128, f16, E4M3, E4M3, f16, False),
    (3, 300, 136, 128, bf16, E4M3, E5M2, bf16, True),
    pytest.param(3, 2000, 2056, 2048, bf16, E5M2, E4M3, bf16, True, marks=pytest.mark.gpu),  # CTAs take several tiles
]


def paired_gradient(rng, rows, real, tail, features, dtype, kind):
    """(both arrays, the pair) of two slots; the tail is NaN."""
    values = np.where(real[:, None, None], rng.standard_normal((rows, 2, features)), 0)
    data = jnp.asarray(oracle.poisoned(values, tail).astype(kind))
    return data, jnp.asarray(np.ascontiguousarray(np.moveaxis(np.asarray(data), 0, -1))), pair(data, dtype)


@pytest.mark.parametrize("experts, tokens, n, features, dtype, kind, other, out, fast", PRODUCTS)
def test_products(experts, tokens, n, features, dtype, kind, other, out, fast, rng):
    """Those of two arrays, of both slots and of one: dgrad where groups have rows, wgrad with a sum and without."""
    rows, options = buffer_rows(tokens, experts), dict(out_dtype=out, fast_accum=fast)
    dgrad = jax.jit(partial(gemm_grouped_paired, dtype=kind, **options), static_argnames="slot")
    wgrad = jax.jit(partial(gemm_grouped_paired_wgrad, dtype=kind, slot=1, **options))
    onto = jax.jit(partial(gemm_grouped_paired_wgrad, dtype=kind, slot=1, in_place=True, **options), donate_argnums=6)
    want_dgrad = jax.jit(partial(gemm_grouped, contract=2, **options))
    want_wgrad = jax.jit(partial(gemm_grouped_wgrad, slot=1, **options))
    for name, counts in oracle.loads(rng, experts, tokens).items():
        offsets = oracle.groups_of(counts)
        real, tail = oracle.is_token(rows, offsets, counts), np.arange(rows) >= offsets[-1]
        data, data_t, paired = paired_gradient(rng, rows, real, tail, features, dtype, kind)
        groups, end = (offsets, counts), offsets[-1]
        weight = rng.standard_normal((experts, n, 2, features)).astype(np.float32).astype(other)
        scales = [rng.uniform(0.5, 2, size).astype(np.float32) for size in ((), (experts,))]
        want = want_dgrad(data, weight, *groups, *scales)
        same_bits(dgrad(paired, weight, *groups, *scales)[:end], want[:end], name)
        one = np.ascontiguousarray(weight[:, :, 1:])
        want = want_dgrad(data[:, 1:], one, *groups, *scales)
        same_bits(dgrad(paired, one, *groups, *scales, slot=1)[:end], want[:end], name)
        x = np.where(real, rng.standard_normal((n, rows)), 0)
        x = oracle.poisoned(x, tail, 1).astype(other)
        c = rng.standard_normal((experts, n, features)).astype(np.float32).astype(out)
        for added in (None, c):
            got, want = wgrad(x, paired, *groups, *scales, added), want_wgrad(x, data_t, *groups, *scales, added)
            same_bits(got, want, name)
        same_bits(onto(x, paired, *groups, *scales, jnp.array(c)), got, name)


# -- a layer of experts ------------------------------------------------------------------------------------------------

T, H, F, E, K = 40, 32, 128, 3, 2
OPTIONS = MoEOptions(RouterOptions(K))


def metas():
    one = lambda *shape: fp8.TensorMeta(jnp.full(shape, 4.0), jnp.zeros(shape))
    return fp8.DenseMetas(one(), one(E), one(E)), fp8.DenseMetas(one(E), one(E), one())


def operands(rng, dtype=bf16, features=F):
    normal = lambda *shape: on_device(rng.standard_normal(shape) / 4, dtype)
    weights = normal(H, E), (normal(E, H, features), normal(E, H, features)), normal(E, features, H)
    return normal(T, H), *weights


def gradients(rule, of_metas, x, gate, wi, wo, dy, weights_of=lambda *w: w, around=lambda f: f, **options):
    """All cotangents."""

    def layer(x, gate, wi, wo, metas):
        return moe(x, gate, *weights_of(wi, wo), options=OPTIONS, recipe=rule, metas=metas, **options)[0]

    return jax.vjp(around(layer), x, gate, wi, wo, of_metas)[1](dy)


def in_fp8(rule, wi, wo):
    """-> what makes of arrays FP8 weights as parameters are, in one layout and each with scales of its own, whose
    gradients go where the arrays are."""
    made = [quantize_experts(a, recipe=rule) for a in (*wi, wo)]
    made = [replace(q, tensor=q.tensor._replace(data=None)) for q in made]

    def weights(wi, wo):
        *wi, wo = (q.with_wide(GradientTarget(a)) for q, a in zip(made, (*wi, wo)))
        return tuple(wi), wo

    return weights


def keep_two_arrays(monkeypatch):
    """In layers that are traced from here on: by a function of their own, for jax keeps the traces of the other."""
    monkeypatch.setattr(layer_of_experts, "is_pairable", lambda *_: False)
    layer = jax.jit(lambda *args: layer_of_experts._experts(*args), static_argnums=2, inline=True)
    monkeypatch.setattr(sys.modules["te_jax.layers.experts.run"], "run_experts", layer)


RULES = {
    "delayed": (recipe.DelayedScaling(), metas),
    "current": (recipe.Float8CurrentScaling(), lambda: None),
}


@pytest.mark.parametrize("name", RULES)
@pytest.mark.parametrize("quantized", (False, True))
def test_layer(name, quantized, rng, monkeypatch):
    """A layer's gradients are, bit for bit, those of a layer that keeps two arrays."""
    rule, of_metas = RULES[name]
    if quantized and of_metas() is not None:
        pytest.skip("FP8 weights have no state of their own")
    x, gate, wi, wo = operands(rng)
    dy = on_device(rng.standard_normal((T, H)), bf16)

    def run(x, gate, wi, wo):
        options = dict(weights_of=in_fp8(rule, wi, wo)) if quantized else {}
        return gradients(rule, of_metas(), x, gate, wi, wo, dy, **options)

    traced = jax.jit(run).trace(x, gate, wi, wo)
    assert str(traced.jaxpr).count("te_gemm_grouped_paired[") == 1 + quantized
    assert str(traced.jaxpr).count("te_gemm_grouped_paired_wgrad[") == 2
    got = jax.jit(run)(x, gate, wi, wo)
    keep_two_arrays(monkeypatch)
    plain = jax.jit(lambda *args: run(*args))
    assert "paired" not in str(plain.trace(x, gate, wi, wo).jaxpr)
    jax.tree.map(same_bits, got, plain(x, gate, wi, wo))


def onto(rule, x, gate, wi, wo, sums, dy):
    """The sums of the gradients of weights, added to in the products."""

    def layer(sums):
        of = jax.tree.map(lambda total: Accumulator(total, jnp.zeros(())), sums)
        kernel = lambda a, total, features: QuantizedKernel(Fp8Tensor(wide=a, onto=total), 1, features, jnp.dtype(bf16))
        weights = kernel(wi, of[0], 2), kernel(wo, of[1], 1)
        return moe(x, gate, *weights, options=OPTIONS, recipe=rule)[0]

    return jax.vjp(layer, sums)[1](dy)[0]


def test_layer_under_transformations(rng, monkeypatch):
    """Of several x by vmap, computed again by jax.checkpoint, and with gradients added onto sums: bit for bit a layer's
    that keeps two arrays."""
    rule = recipe.Float8CurrentScaling()
    x, gate, wi, wo = operands(rng)
    both = jnp.stack((x, x[::-1]))
    dy = on_device(rng.standard_normal((2, T, H)), bf16)
    sums = jax.tree.map(lambda a: on_device(rng.standard_normal(a.shape), f32), (wi, wo))

    def run(both, gate, wi, wo, dy, sums):
        one = lambda x, dy: gradients(rule, None, x, gate, wi, wo, dy)
        again = lambda x, dy: gradients(rule, None, x, gate, wi, wo, dy, around=jax.checkpoint)
        of_one = both[0], gate, wi, wo
        return jax.vmap(one)(both, dy), again(both[0], dy[0]), onto(rule, *of_one, sums, dy[0])

    args = both, gate, wi, wo, dy, sums
    assert str(jax.jit(run).trace(*args).jaxpr).count("te_activation_grouped_paired_bwd") >= 3
    got = jax.jit(run)(*args)
    keep_two_arrays(monkeypatch)
    jax.tree.map(same_bits, got, jax.jit(lambda *args: run(*args))(*args))


def test_recomputation_keeps_no_weights(rng):
    """Where the weights in FP8 are kept, their bf16 arrays, which may be casts of parameters, are not kept too."""
    policy = policies.save(policies.GEMM, policies.QUANTIZED, policies.KERNEL)
    layer = lambda *args: moe(*args, options=OPTIONS, recipe=recipe.Float8CurrentScaling())[0]
    run = lambda *args: jax.vjp(jax.checkpoint(layer, policy=policy), *args)[1]
    kept = jax.tree.leaves(jax.eval_shape(run, *operands(rng)))
    assert any(a.dtype == E4M3 and a.shape == (E, F, H) for a in kept)
    assert not any(a.dtype == bf16 and a.shape in ((E, F, H), (E, H, F)) for a in kept)


def test_weights_cut_over_devices_without_a_mesh_in_force(rng):
    """Devices hold whole squares: the activation's input, its gradient and the weights stay where they are."""
    devices = jax.devices("cpu")[:2]
    mesh = jax.make_mesh((2,), ("tp",), axis_types=(jax.sharding.AxisType.Auto,), devices=devices)
    on = lambda a, *spec: jax.device_put(a, jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(*spec)))
    x, gate, wi, wo = operands(rng, features=2 * F)
    args = on(x), on(gate), tuple(on(a, None, None, "tp") for a in wi), on(wo, None, "tp")
    with jax.default_device(devices[0]):
        run = jax.jit(partial(gradients, recipe.Float8CurrentScaling(), None))
        traced = run.trace(*args, on(jnp.ones((T, H), bf16)))
        text = traced.lower().compile().as_text()
    assert "te_activation_grouped_paired_bwd" in str(traced.jaxpr)
    assert "all-reduce" in text and "all-gather" not in text


UNPAIRED = {
    "f32": (recipe.DelayedScaling(), metas, dict(dtype=f32), {}),
    "no whole squares": (recipe.DelayedScaling(), metas, dict(features=136), {}),
    "blocks": (recipe.Float8BlockScaling(), lambda: None, {}, {}),
    "a wgrad in x's type": (
        recipe.DelayedScaling(override_linear_precision=(False, False, True)), metas, {}, {},
    ),
    "a bias": (recipe.DelayedScaling(), metas, {}, dict(wi_bias=(jnp.zeros((E, F), bf16),) * 2)),
}  # fmt: skip


@pytest.mark.parametrize("name", UNPAIRED)
def test_two_arrays_where_one_cannot_be(name, rng):
    rule, of_metas, sizes, options = UNPAIRED[name]
    args = operands(rng, **sizes)
    run = jax.jit(partial(gradients, rule, **options))
    text = str(run.trace(of_metas(), *args, jnp.ones((T, H), args[0].dtype)).jaxpr)
    assert "te_activation_grouped" in text and "paired" not in text


def test_takes_the_place_of_the_input(rng):
    """On CUDA the gradient's one array is that of the activation's input."""
    args = operands(rng)
    run = jax.jit(partial(gradients, recipe.DelayedScaling()))
    traced = run.trace(metas(), *args, jnp.ones((T, H), bf16))
    text = traced.lower(lowering_platforms=("cuda",)).as_text()
    calls = [line for line in text.splitlines() if "custom_call @te_activation_grouped_paired_bwd" in line]
    assert len(calls) == 1 and "output_operand_alias" in calls[0] and "operand_index = 1" in calls[0]


ROWS = (np.zeros((128, 2, 1, 128), bf16), np.zeros((3, 16, 2, 128), E4M3))
GROUPS = np.zeros(4, np.int32), np.zeros(3, np.int32)
ONES = np.ones(3, np.float32)


def product(paired=ROWS[0], other=ROWS[1], offsets=GROUPS[0], out_dtype=bf16, **options):
    options |= dict(dtype=E5M2, out_dtype=out_dtype)
    return gemm_grouped_paired(paired, other, offsets, GROUPS[1], ONES, ONES, **options)


BAD = {
    "columns": (lambda: pair(jnp.zeros((128, 2, 100), E5M2), bf16), ValueError, "multiple of 128 columns"),
    "rows": (lambda: pair(jnp.zeros((100, 2, 128), E5M2), bf16), ValueError, "multiple of 128 rows"),
    "slot": (lambda: product(slot=1), ValueError, "slot is 1, but the pair has the shape"),
    "a slot of a float": (lambda: product(slot=0.5), (TypeError, ValueError), "slot is 0.5"),
    "out_dtype": (lambda: product(out_dtype=jnp.int32), (TypeError, ValueError), "out_dtype"),
    "f32": (lambda: product(ROWS[0].astype(f32)), TypeError, "lhs is float32; pass bf16 or f16"),
    "int16": (lambda: product(ROWS[0].astype(np.int16)), TypeError, "lhs is int16; pass bf16 or f16"),
    "three axes": (lambda: product(ROWS[0][:, :, 0]), ValueError, "the pair has the shape"),
    "rows of a product": (lambda: product(ROWS[0][:100]), ValueError, "has 100 rows"),
    "offsets": (lambda: product(offsets=GROUPS[0][1:]), ValueError, "offsets has the shape"),
    "x of f32": (
        lambda: activation_grouped_paired_bwd(
            ROWS[0][:, 0, 0].astype(f32), ROWS[0].astype(f32), *GROUPS, ONES, dtype=jnp.dtype(E5M2), **SWIGLU
        ),
        TypeError, "x is float32; pass bf16 or f16",
    ),
    "dy of other columns": (
        lambda: activation_grouped_paired_bwd(
            ROWS[0][:, 0, 0, :64], ROWS[0], *GROUPS, ONES, dtype=jnp.dtype(E5M2), **SWIGLU
        ),
        ValueError, "pass .R, a, f / 128, 128. and .R, f.",
    ),
    "E5M2 twice": (lambda: product(other=ROWS[1].astype(E5M2)), TypeError, "both float8_e5m2"),
    "columns of the other factor": (
        lambda: product(other=np.zeros((3, 16, 2, 64), E4M3)), ValueError, "as many columns of both",
    ),
    "FP8 type": (
        lambda: activation_grouped_paired_bwd(
            ROWS[0][:, 0, 0], ROWS[0], *GROUPS, ONES, dtype=jnp.dtype(f32), **SWIGLU
        ),
        ValueError, "dtype is",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD)
def test_bad_input(case):
    call, error, text = BAD[case]
    with pytest.raises(error, match=text):
        call()
