"""Block scaling: quantize and GEMM against numpy, layers against float64 and their parts, modules; transforms, and
meshes where blocks are cut. Meshes that split whole blocks: the op cases of test_op.py."""

import functools
import math

import block_oracle as oracle
import collectives
import flax
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import test_sharded_layers as sharded
from flax import linen as nn
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from test_layers import close, data

import te_jax as te
import te_jax.flax as te_flax
from te_jax import _lib
from te_jax.layers import Projection, dense, layernorm, layernorm_dense, layernorm_mlp
from te_jax.ops.activation import activation
from te_jax.ops.gemm import gemm, gemm_block_op
from te_jax.ops.quantize import quantize_block
from te_jax.recipe import Float8BlockScaling, Float8CurrentScaling, Format, MXFP8BlockScaling

RECIPE = Float8BlockScaling()
OPTIONS = [RECIPE, Float8BlockScaling(True, Format.HYBRID, amax_epsilon=0.5)]
E4M3, E5M2 = jnp.dtype(jnp.float8_e4m3fn), jnp.dtype(jnp.float8_e5m2)
f32, bf16 = jnp.float32, jnp.bfloat16
options = pytest.mark.parametrize("recipe", OPTIONS, ids=["default", "f32-hybrid"])


@pytest.mark.parametrize(
    "error,text,kwargs",
    [
        (ValueError, "Float8BlockScaling: fp8_format is .*E5M2 has too few bits", dict(fp8_format=Format.E5M2)),
        (ValueError, "use_f32_scales is 1; pass a bool", dict(use_f32_scales=1)),
        *((ValueError, "amax_epsilon is", dict(amax_epsilon=e)) for e in (-1e-6, math.nan, "0", True)),
        (ValueError, "override_linear_precision is", dict(override_linear_precision=True)),
        (ValueError, r"fp8_dpa is True; .*DelayedScaling\(fp8_dpa=True\)", dict(fp8_dpa=True)),
        (ValueError, "fp8_mha is True", dict(fp8_mha=True)),
        (TypeError, "split_accumulator", dict(split_accumulator=(False, False, False))),
    ],
)
def test_refused(error, text, kwargs):
    with pytest.raises(error, match=text):
        Float8BlockScaling(**kwargs)


def test_value_semantics():
    assert Float8BlockScaling(amax_epsilon=0) == RECIPE and hash(Float8BlockScaling()) == hash(RECIPE)
    assert RECIPE not in (Float8CurrentScaling(), OPTIONS[1])


# -- quantize ------------------------------------------------------------------------------------------------


def uneven(rng, *shape):
    """Over many binades, so that blocks have amaxes of their own; a part is zero."""
    x = rng.standard_normal(shape) * np.exp2(rng.integers(-20, 8, shape))
    x[tuple(slice(size // 2) for size in shape)] *= 0
    return x.astype(np.float32)


SHAPES = {
    (1, 1): 1,
    (5, 300): 1,
    (256, 128): 1,
    (130, 257): 1,
    (2, 129, 3, 130): 2,
    (3, 2, 140): 1,
    (0, 8): 1,
    (8, 0): 1,
}


def quantize_both(x, split, dtype, square, **law):
    """data, data_t and for every element of x its inverse scale in both, all in x's order; dbias."""
    kind = "block_inv" if square else "scale_inv"
    outputs = "data", "data_t", kind, f"{kind}_t", "dbias"
    attrs = dict(lead=split - 1, dtype=dtype, square=square, **law)
    data, data_t, inv, inv_t, dbias = jax.jit(lambda x: quantize_block(x, outputs=outputs, **attrs))(x)
    turn = lambda a, axes: np.transpose(np.asarray(a, np.float32), (*range(axes, a.ndim), *range(axes)))
    repeat = lambda a, axis: np.repeat(a, 128, axis).take(np.arange(x.shape[axis]), axis)
    rows, columns = split - 1, x.ndim - 1
    if square:
        inv, inv_t = (repeat(repeat(a, rows), columns) for a in (inv, turn(inv_t, x.ndim - split)))
    else:
        inv, inv_t = repeat(turn(inv, x.ndim - split), columns), repeat(np.asarray(inv_t), rows)
    return np.asarray(data, np.float32), turn(data_t, x.ndim - split), inv, inv_t, dbias


@pytest.mark.parametrize("square", [False, True], ids=["1x128", "128x128"])
@pytest.mark.parametrize(
    "fp8,law", [(E4M3, dict(power_2=True, epsilon=0.0)), (E5M2, dict(power_2=False, epsilon=0.25))]
)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_quantize(shape, fp8, law, square, rng):
    """Bit for bit: each block by its own amax, in both layouts."""
    x, split = jnp.asarray(uneven(rng, *shape), bf16), SHAPES[shape]
    data, data_t, inv, inv_t, dbias = quantize_both(x, split, fp8, square, **law)
    for got, got_inv, (tall, wide) in ((data, inv, (1, 128)), (data_t, inv_t, (128, 1))):
        blocks = (split - 1, 128 if square else tall), (x.ndim - 1, 128 if square else wide)
        want, want_inv = oracle.quantized(x, *blocks, str(fp8), **law)
        np.testing.assert_array_equal(got, want)
        np.testing.assert_array_equal(got_inv, want_inv)
    wide = np.asarray(x, np.float64)
    bound = np.abs(wide).sum(tuple(range(split))) * x.size * 2.0**-24  # f32 sums
    assert (np.abs(dbias - wide.sum(tuple(range(split)))) <= bound).all()


def test_quantize_not_finite(rng):
    """A NaN or an inf leaves its blocks a scale of 1, and no others; an inf becomes the largest number."""
    x = uneven(rng, 260, 260)
    want = quantize_both(jnp.asarray(x), 1, E4M3, False, power_2=False, epsilon=0.0)
    for bad, becomes in ((np.nan, np.nan), (-np.inf, -448.0)):
        y = x.copy()
        y[200, 130] = bad
        got = quantize_both(jnp.asarray(y), 1, E4M3, False, power_2=False, epsilon=0.0)
        row, column = (200, slice(128, 256)), (slice(128, 256), 130)
        for i, block in enumerate((row, column, row, column)):
            others = np.ones_like(x, bool)
            others[block] = False
            np.testing.assert_array_equal(got[i][others], want[i][others])
        assert (got[2][row] == 1).all() and (got[3][column] == 1).all()
        np.testing.assert_array_equal(got[0][200, 130], becomes)
        np.testing.assert_array_equal(got[1][200, 130], becomes)


# -- GEMM ----------------------------------------------------------------------------------------------------

GEMMS = {  # m, n, k
    "small": ((1,), (1,), (1,)),
    "whole": ((4,), (256,), (256,)),
    "odd": ((3, 5), (2, 150), (200,)),
    "groups": ((2,), (7,), (3, 130)),
    "empty": ((2,), (3,), (0,)),
}


gemm_cases = pytest.mark.parametrize("sizes", GEMMS.values(), ids=GEMMS)
squares = pytest.mark.parametrize("square", [False, True], ids=["1x128", "128x128"])


@gemm_cases
@squares
@pytest.mark.parametrize("types,out", [((E4M3, E4M3), f32), ((E5M2, E4M3), bf16)], ids=["e4m3-f32", "e5m2-bf16"])
def test_gemm(sizes, square, types, out, rng):
    operands, want, size = oracle.gemm_case(sizes, square, types, out, rng)
    options = dict(square=square, contract=len(sizes[2]), out_dtype=out)
    got = jax.jit(lambda *a: gemm(*a, **options))(*operands)
    oracle.check_gemm(got, want, size, np.prod(sizes[2]), out)


@gemm_cases
@squares
def test_gemm_fills_up(sizes, square, rng):
    """What surrounds the CUDA call: sizes as cuBLASLt wants them, and the same product."""
    operands, want, size = oracle.gemm_case(sizes, square, (E4M3, E4M3), bf16, rng)
    lhs, rhs, lhs_inv, rhs_inv, bias, c = operands

    def call(lhs, rhs, lhs_inv, rows, squares, bias, c, **attrs):
        (m, k), n = lhs.shape, rhs.shape[0]
        assert m % 4 == n % 16 == k % 128 == 0 and rhs.shape == (n, k) and c.shape == (m, n) and bias.shape == (n,)
        assert lhs_inv.shape == (k // 128, m) and (rows is None or rows.shape == (k // 128, n))
        assert squares is None or squares.shape == (-(-n // 128), -(-k // 512) * 4)
        squares = None if squares is None else squares[:, : k // 128]
        return gemm_block_op.reference(lhs, rhs, lhs_inv, rows, squares, bias, c, **attrs)

    scales = (None, rhs_inv) if square else (rhs_inv, None)
    attrs = dict(outer=len(sizes[2]) - 1, out_dtype=jnp.dtype(bf16), tune=False)
    (got,) = jax.jit(functools.partial(gemm_block_op.cuda, call, **attrs))(lhs, rhs, lhs_inv, *scales, bias, c)
    oracle.check_gemm(got, want, size, np.prod(sizes[2]), bf16)
    run = jax.jit(lambda *operands: gemm(*operands, square=square, contract=len(sizes[2]), tune=False))
    text = run.trace(*operands).lower(lowering_platforms=("cuda",)).as_text()
    calls = [line for line in text.splitlines() if "custom_call @te_gemm_block" in line]
    rows, blocks = -(-np.prod(sizes[1]) // 128), -(-np.prod(sizes[2]) // 512) * 4
    if 0 not in sizes[2] and square and len(sizes[1]) == len(sizes[2]) == 1:
        assert f"tensor<{rows}x{blocks}xf32>" in calls[0]
    assert len(calls) == (0 not in sizes[2])


def test_gemm_refuses(monkeypatch):
    x, one = jnp.ones((4, 200), E4M3), jnp.ones((2, 4))
    with pytest.raises(ValueError, match=r"te_gemm_block: axis `k` is 200: 2 blocks of 128, but rhs_scale_inv.* has 1"):
        gemm(x, x, one, one[:1], square=False)
    with pytest.raises(TypeError, match="lhs is bfloat16.*pass float8_e4m3fn, or float8_e5m2 for one of them"):
        gemm(x.astype(bf16), x, one, one, square=False)
    with pytest.raises(TypeError, match="te_gemm_block: c is float32, but out is bfloat16"):
        gemm(x, x, one, one, c=jnp.ones((4, 4)), square=False)
    with pytest.raises(ValueError, match="te_gemm_block: contract is 0"):
        gemm(x, x, one, one, square=False, contract=0)
    blackwell = type("Device", (), dict(compute_capability="10.0"))
    monkeypatch.setattr(_lib, "has_cuda_device", lambda: True)
    monkeypatch.setattr(jax, "devices", lambda *args: [blackwell])
    operands = x, x, one, one, None, None, None
    with pytest.raises(
        RuntimeError, match=r"te_gemm_block: .*9\.0 \(Hopper\) alone, this GPU has 10\.0: use recipe\.Fl"
    ):
        gemm_block_op.cuda(None, *operands, outer=0, out_dtype=jnp.dtype(bf16))


# -- layers --------------------------------------------------------------------------------------------------


def results(layer, *args):
    """y, and the gradients of all arguments."""
    y, vjp = jax.vjp(layer, *args)
    (dy,) = data(np.random.default_rng(1), y.shape, dtype=y.dtype)
    return y, vjp(dy)


def error_of(x, axis, top, mantissa, lowest):
    """How far FP8 may be off x: half a step of normal numbers, or of the subnormal ones at the scale of its block,
    whose amax becomes `top` or half of it."""
    amax = np.abs(x).max(axis, keepdims=True)
    return np.maximum(np.abs(x) * 2.0 ** -(mantissa + 1), 2 * amax / top * 2.0 ** (lowest - mantissa - 1))


@options
@pytest.mark.parametrize("dtype", [f32, bf16], ids=["f32", "bf16"])
def test_dense(recipe, dtype, rng):
    check_dense(recipe, 130, 140, dtype, rng)


def check_dense(recipe, tokens, features, dtype, rng):
    """Two axes are contracted. Against numpy's blocks: sums in another order, then one rounding."""
    x, residual = data(rng, (2, tokens, 2, features), (2, tokens, 2, 20), dtype=dtype)
    w, bias = data(rng, (2, features, 2, 20), (2, 20))
    x = x * jnp.exp2(jnp.arange(features) % 7 * 2.0).astype(dtype)
    layer = lambda *a: dense(*a, contract=2, recipe=recipe)
    y, (dx, dw, dbias, dresidual) = jax.jit(functools.partial(results, layer))(x, w * 0.01, bias, residual)
    (dy,) = data(np.random.default_rng(1), y.shape, dtype=dtype)
    operands = [np.asarray(a, np.float32) for a in (x, w * 0.01, dy)]
    added = [np.asarray(a.astype(dtype), np.float64) for a in (bias, residual)]  # bias is rounded to y's type first
    wants, sizes = ([*oracle.dense(*operands, 2, recipe, of)] for of in (np.array, np.abs))
    wants[0], sizes[0] = wants[0] + sum(added), sizes[0] + sum(map(np.abs, added))
    terms, types = (2 * features, 40, 2 * tokens), (dtype, dtype, f32)
    for got, want, size, of_sum, out in zip((y, dx, dw), wants, sizes, terms, types):
        oracle.check_gemm(got, want, size, of_sum, out)
    close(dbias, np.asarray(dy, np.float32).sum((0, 1)))
    np.testing.assert_array_equal(dresidual, dy)


def test_dense_is_near_f32(rng):
    """Within what the roundings of both operands of each product allow."""
    x, w, dy = (np.asarray(a) for a in data(rng, (256, 128), (128, 128), (256, 128)))
    y, vjp = jax.vjp(lambda x, w: dense(x, w, recipe=RECIPE), x, w)
    off = functools.partial(error_of, top=448.0, mantissa=3, lowest=-6)
    of_w = off(w, (0, 1))
    halves = lambda a: np.concatenate([off(half, 0) for half in np.split(a, 2)])  # blocks of 128 rows
    products = [(x, off(x, 1), w, of_w), (dy, off(dy, 1), w.T, of_w.T), (x.T, halves(x).T, dy, halves(dy))]
    for got, (a, ea, b, eb) in zip((y, *vjp(dy)), products, strict=True):
        bound = ea @ np.abs(b) + np.abs(a) @ eb + ea @ eb + np.abs(a) @ np.abs(b) * 2.0**-16
        assert (np.abs(got - a @ b) <= bound).all()


@pytest.mark.parametrize("recipe", [Float8BlockScaling, MXFP8BlockScaling])
@pytest.mark.parametrize("override", [(True, False, False), (False, True, False), (False, False, True), (True,) * 3])
def test_override(override, recipe, rng):
    recipe = recipe(override_linear_precision=override)
    x, w, dy = data(rng, (130, 24), (24, 10), (130, 10))
    y, vjp = jax.vjp(lambda *a: dense(*a, recipe=recipe), x, w)
    narrow = oracle.dense(*map(np.asarray, (x, w, dy)), 1, recipe)
    for got, wide, *wants in zip((y, *vjp(dy)), override, (x @ w, dy @ w.T, x.T @ dy), narrow):
        close(got, wants[not wide])


def near(got, want):
    """The same ops in another program: where f32 noise or a bf16 step before a quantization crosses an edge of FP8, a
    number of some hundred differs by 2**-3 of itself."""
    got, want = np.asarray(got, np.float64), np.asarray(want, np.float64)
    assert np.linalg.norm(got - want) <= 2.0**-6 * np.linalg.norm(want) + 1e-30


def test_layernorm_dense_is_its_parts(rng):
    """Two projections and the residual; under block scaling the norm's output is quantized from x's type."""
    x, gamma, w, w2, bias = data(rng, (3, 50, 140), (140,), (140, 20), (140, 2, 6), (20,), dtype=bf16)
    beta = gamma * 0.5
    flat = lambda y, y2, ln_out: jnp.concatenate([y, y2.reshape(3, 50, -1), ln_out], -1)

    def whole(x, gamma, w, w2, bias):
        also = [Projection(w2, None, None)]
        options = dict(return_layernorm_output=True, also=also, recipe=RECIPE)
        (y, y2), ln_out = layernorm_dense(x, w, gamma, beta, bias, **options)
        return flat(y, y2, ln_out)

    def parts(x, gamma, w, w2, bias):
        normed = layernorm(x, gamma, beta)
        return flat(dense(normed, w, bias, recipe=RECIPE), dense(normed, w2, recipe=RECIPE), normed)

    run = lambda layer: jax.jit(functools.partial(results, layer))(x, gamma, w, w2, bias)
    jax.tree.map(near, run(whole), run(parts))


@pytest.mark.parametrize("recipe", [RECIPE, MXFP8BlockScaling()], ids=["block", "mxfp8"])
def test_layernorm_mlp_is_its_parts(recipe, rng):
    names = "silu", "linear"
    x, gamma, wi, wo = data(rng, (3, 50, 24), (24,), (24, len(names), 140), (140, 24), dtype=bf16)
    bi, bo = data(rng, (len(names), 140), (24,), dtype=bf16)

    def whole(x, gamma, wi, wo, bi, bo):
        options = dict(norm="rmsnorm", activations=names, residual=True, recipe=recipe)
        return layernorm_mlp(x, gamma, None, wi, wo, bi, bo, **options)

    def parts(x, gamma, wi, wo, bi, bo):
        z = dense(layernorm(x, gamma, norm="rmsnorm"), wi, bi, recipe=recipe)
        return dense(activation(z, names), wo, bo, x, recipe=recipe)

    run = lambda layer: jax.jit(functools.partial(results, layer))(x, gamma, wi, wo, bi, bo)
    jax.tree.map(near, run(whole), run(parts))


def test_an_outlier_costs_its_block_alone(rng):
    """One number 2**20 times the others: with one scale for the tensor they all vanish below E4M3's least number."""
    x, w = data(rng, (8, 256), (256, 20))
    x = x.at[0, 7].set(2.0**20)
    exact, rest = np.asarray(x @ w), slice(1, None)
    error = lambda recipe: np.linalg.norm(dense(x, w, recipe=recipe)[rest] - exact[rest]) / np.linalg.norm(exact[rest])
    assert error(Float8CurrentScaling(Format.E4M3)) > 0.9
    assert error(RECIPE) < 2.0**-4  # half a step of E4M3


def test_layers_need_an_axis_of_rows():
    x, w = jnp.ones((16,)), jnp.ones((16, 8))
    with pytest.raises(ValueError, match=r"dense: x has no axis but those contracted.*; pass x\[None\]"):
        dense(x, w, recipe=RECIPE)
    with pytest.raises(ValueError, match=r"dense: kernel has no axis but.*; pass kernel\[..., None\]"):
        dense(jnp.ones((4, 16)), x, recipe=RECIPE)


# -- transforms ----------------------------------------------------------------------------------------------


def test_vmap_is_a_loop_over_examples(rng):
    x, gamma, wi, wo = data(rng, (3, 4, 16), (16,), (16, 1, 24), (24, 16))
    x = x * jnp.array([1e-3, 1.0, 1e3])[:, None, None]
    mlp = lambda x, *w: layernorm_mlp(x, w[0], None, *w[1:], norm="rmsnorm", residual=True, recipe=RECIPE)
    step = lambda x, *w: results(jax.checkpoint(mlp), x, *w)
    got = jax.jit(jax.vmap(step, (0, None, None, None)))(x, gamma, wi, wo)
    run = jax.jit(step)
    jax.tree.map(near, got, jax.tree.map(lambda *a: jnp.stack(a), *(run(one, gamma, wi, wo) for one in x)))


# -- meshes --------------------------------------------------------------------------------------------------

CUT = {  # b, s, C, F of x and kernel, and how 4 x 2 devices share them
    "tokens": ((2, 192, 128, 128), P(None, "tp"), P()),  # 1.5 blocks for each: gathered
    "features": ((4, 8, 384, 160), P("dp", None, "tp"), P("tp")),
    "kernel": ((4, 8, 128, 320), P("dp"), P(None, "tp")),
    "whole": ((4, 128, 256, 256), P("dp", None, "tp"), P("tp")),
}


@pytest.mark.usefixtures("on_host")
@pytest.mark.parametrize("kind", sharded.KINDS)
@pytest.mark.parametrize("name", CUT)
def test_cut_blocks_on_a_mesh(name, kind, rng):
    found = check_on_mesh(RECIPE, *CUT[name], kind, rng)
    if name == "whole":  # row parallel: nothing is gathered
        assert not [kind for kind, *_ in found if kind == "all-gather"], found


def check_on_mesh(recipe, sizes, x_spec, w_spec, kind, rng):
    """The numbers of one device, also where shards would have parts of blocks; the gradient of y lies as y does. -> the
    collectives."""
    b, s, c, f = sizes
    x, w, weight = (jnp.asarray(uneven(rng, *shape)) for shape in ((b, s, c), (c, f), (b, s, f)))
    step = jax.value_and_grad(lambda x, w: jnp.sum(dense(x, w, recipe=recipe) * weight), (0, 1))
    want = jax.jit(step)(x, w)
    mesh = jax.make_mesh((4, 2), ("dp", "tp"), axis_types=(sharded.KINDS[kind],) * 2)
    with jax.set_mesh(mesh):
        x, w = (jax.device_put(np.asarray(a), NamedSharding(mesh, spec)) for a, spec in ((x, x_spec), (w, w_spec)))
        if kind == "explicit":
            y_spec = jax.eval_shape(lambda x, w: dense(x, w, recipe=recipe), x, w).sharding
            weight = jax.device_put(np.asarray(weight), NamedSharding(mesh, y_spec.spec))
        program, found = collectives.compiled(jax.jit(step), x, w, mesh=mesh)
        got = program(x, w)
    jax.tree.map(close, got, want)
    return found


@pytest.mark.usefixtures("on_host")
@pytest.mark.parametrize("kind", sharded.KINDS)
def test_modules_on_a_mesh(kind, monkeypatch):
    """Sequence parallelism: the gradients of row-parallel layers are gathered before they are quantized."""
    monkeypatch.setattr(sharded, "RECIPE", RECIPE)
    monkeypatch.setattr(sharded, "on_one_device", functools.cache(sharded.on_one_device.__wrapped__))
    _, others, want = sharded.on_one_device("mlp", True, bf16)
    got, _ = sharded.on_mesh.__wrapped__("mlp", "dp-fsdp-tp-sp", kind, True, bf16)
    assert others == got[1][1] == {}
    sharded.check_equal((got[0], got[1][0], got[1][2]), (want[0], want[1][0], want[1][2]), 2e-2)


# -- modules -------------------------------------------------------------------------------------------------


@functools.cache
def losses_of_steps(recipe):
    """Of five steps of a layer without FP8 state, or without FP8."""
    fields = dict(hidden_size=16, mlp_hidden_size=144, num_attention_heads=2, hidden_dropout=0.0)
    module = te_flax.TransformerLayer(**fields, attention_dropout=0.0)
    (x,) = data(np.random.default_rng(0), (1, 140, 16))
    with te.autocast(recipe is not None, recipe):
        state, params = flax.core.pop(nn.meta.unbox(jax.jit(module.init)(jax.random.key(0), x)), "params")
        assert state == {}

        @jax.jit
        def step(params):
            loss = lambda params: jnp.mean(module.apply({"params": params}, x) ** 2)
            value, grads = te.value_and_grad(loss)(params)
            return value, jax.tree.map(lambda p, g: p - 3e-2 * g, params, grads)

        found = []
        for _ in range(5):
            loss, params = step(params)
            found.append(float(loss))
    return np.array(found)


def test_a_transformer_layer_trains():
    """The losses are those of f32 up to what FP8 may do to a step."""
    got, want = losses_of_steps(RECIPE), losses_of_steps(None)
    assert (np.diff(got) < 0).all() and got[-1] < 0.97 * got[0]
    np.testing.assert_allclose(got, want, rtol=2.0**-5)
