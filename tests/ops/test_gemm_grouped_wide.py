"""Grouped products of factors as jax has them, and gradients that transpose none, against a float64 oracle by loops
over experts, whatever lies in the rows that pad groups; and what the lowered layers hold besides products."""

import re
from functools import partial

import grouped_oracle as oracle
import jax
import jax.numpy as jnp
import moe_oracle
import numpy as np
import pytest

from te_jax.layers import MoEOptions, grouped_dense, moe
from te_jax.ops.gemm_grouped import gemm_grouped, gemm_grouped_wide_wgrad
from te_jax.ops.permute import buffer_rows
from te_jax.ops.router import RouterOptions
from te_jax.recipe import Float8BlockScaling

f32, bf16, f16, E4M3 = jnp.float32, jnp.bfloat16, jnp.float16, jnp.float8_e4m3fn
K, N = 37, 19
# E, tokens, type of the operands and of the result, bias or c
CASES = [
    (1, 129, f32, f32, True),
    (3, 301, bf16, bf16, False),
    (3, 301, f16, f32, True),
    (8, 301, bf16, f32, True),
    (128, 37, f32, f32, False),
]
wide = partial(np.asarray, dtype=np.float64)


def drawn(rng, shape, dtype):
    return rng.standard_normal(shape).astype(np.float32).astype(dtype)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_rows(case, rng, plain_jax):
    """Rows that pad a group and the tail hold NaN; some tokens NaN or inf, which stay in their rows."""
    experts, tokens, dtype, out, has_bias = case
    rows, run = buffer_rows(tokens, experts), jax.jit(partial(gemm_grouped, k_first=True, out_dtype=out))
    for name, counts in oracle.loads(rng, experts, tokens).items():
        offsets = oracle.groups_of(counts)
        real = oracle.is_token(rows, offsets, counts)
        lhs = oracle.spoiled(rng.standard_normal((rows, K)), rng, np.flatnonzero(real))
        lhs, rhs = oracle.poisoned(lhs, ~real).astype(dtype), drawn(rng, (experts, K, N), dtype)
        bias = drawn(rng, (experts, N), out) if has_bias else None
        weight = wide(rhs).swapaxes(1, 2)
        want, bound = oracle.products(wide(lhs), weight, offsets, counts, None if bias is None else wide(bias))
        oracle.near(run(lhs, rhs, offsets, counts, bias=bias), want, bound, out, name)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_wgrads(case, rng, plain_jax):
    """NaN in both buffers where no token is; an expert without tokens has zeros, or the sum so far."""
    experts, tokens, dtype, out, has_c = case
    rows = buffer_rows(tokens, experts)
    run = jax.jit(partial(gemm_grouped_wide_wgrad, out_dtype=out, in_place=has_c))
    for name, counts in oracle.loads(rng, experts, tokens).items():
        offsets = oracle.groups_of(counts)
        real = oracle.is_token(rows, offsets, counts)
        lhs = oracle.spoiled(rng.standard_normal((rows, K)), rng, np.flatnonzero(real))
        both = [oracle.poisoned(a, ~real).astype(dtype) for a in (lhs, rng.standard_normal((rows, N)))]
        c = drawn(rng, (experts, K, N), out) if has_c else None
        want, bound = oracle.wgrads(*(wide(a).T for a in both), offsets, counts)
        if has_c:
            want, bound = want + wide(c), bound + oracle.SPARE * oracle.U * np.abs(wide(c))
        oracle.near(run(*both, offsets, counts, c), want, bound, out, name)


def test_several_axes(rng):
    """Axes of k and n by themselves are those of one axis each."""
    counts = np.array([100, 3], np.int32)
    offsets = oracle.groups_of(counts)
    lhs, rhs, bias = (drawn(rng, shape, f32) for shape in ((384, 2, 6), (2, 2, 6, 3, 5), (2, 3, 5)))
    x, weight = wide(lhs).reshape(384, 12), wide(rhs).reshape(2, 12, 15).swapaxes(1, 2)
    got = gemm_grouped(lhs, rhs, offsets, counts, bias=bias, contract=2, k_first=True)
    want = oracle.products(x, weight, offsets, counts, wide(bias).reshape(2, 15))
    oracle.near(got.reshape(384, 15), *want, f32)
    dw = gemm_grouped_wide_wgrad(lhs, got, offsets, counts)
    assert dw.shape == rhs.shape
    oracle.near(dw.reshape(2, 12, 15), *oracle.wgrads(x.T, wide(got).reshape(384, 15).T, offsets, counts), f32)


@pytest.mark.parametrize("k_first", [False, True])
@pytest.mark.parametrize("dtype", [f32, bf16])
def test_gradients(dtype, k_first, rng, plain_jax):
    """Of rows, weights and biases; x and the gradient of the result have NaN where no token is."""
    experts, tokens = 3, 301
    rows = buffer_rows(tokens, experts)

    @jax.jit
    def run(dout, lhs, rhs, bias, offsets, counts):
        product = lambda lhs, rhs, bias: gemm_grouped(lhs, rhs, offsets, counts, bias=bias, k_first=k_first)
        return jax.vjp(product, lhs, rhs, bias)[1](dout)

    for name, counts in oracle.loads(rng, experts, tokens).items():
        offsets = oracle.groups_of(counts)
        real = oracle.is_token(rows, offsets, counts)
        lhs, dout = (oracle.poisoned(rng.standard_normal((rows, n)), ~real).astype(dtype) for n in (K, N))
        weight, bias = drawn(rng, (experts, K, N), dtype), drawn(rng, (experts, N), dtype)
        dlhs, drhs, dbias = run(dout, lhs, weight if k_first else weight.swapaxes(1, 2), bias, offsets, counts)
        drhs = drhs if k_first else drhs.swapaxes(1, 2)
        oracle.near(dlhs, *oracle.products(wide(dout), wide(weight), offsets, counts), dtype, name)
        oracle.near(drhs, *oracle.wgrads(wide(lhs).T, wide(dout).T, offsets, counts), dtype, name)
        ones = oracle.wgrads(np.ones((1, rows)), wide(dout).T, offsets, counts)
        oracle.near(dbias, *(np.squeeze(a, 1) for a in ones), dtype, name)


# -- what layers hold besides products ------------------------------------------------------------------------

T, H, F, E, CHOICES = 256, 64, 128, 4, 2
COPIES = ("stablehlo.transpose", "stablehlo.concatenate", "stablehlo.while")
FILLS = ("stablehlo.pad", "stablehlo.slice")
# Rows of groups or their transpose, in both layers; stacked weights.
ROWS = "|".join(str(buffer_rows(tokens, E)) for tokens in (T, CHOICES * T))
LARGE = re.compile(rf"tensor<((.*x)?({ROWS})x|{E}x\d+x\d+x)")


def operations(block):
    for op in block.operations:
        yield op.operation
        for region in op.operation.regions:
            for inner in region:
                yield from operations(inner)


def masks_rows(select, calls) -> bool:
    """Whether a `select` reads one predicate for each row; the derivatives of activations select by elements."""
    predicate = select.operands[0]
    if hasattr(predicate.owner, "operations"):  # an argument of a function, which its callers know
        name = predicate.owner.owner.attributes["sym_name"].value
        made = [call.operands[predicate.arg_number].owner for call in calls if name in str(call.attributes["callee"])]
    else:
        made = [predicate.owner]
    return any(not hasattr(op, "name") or op.name == "stablehlo.broadcast_in_dim" for op in made)


def copies(layer, *shapes, kinds=COPIES):
    """Operations of these kinds, and masks, over the rows of groups or over stacked weights, in a layer and its
    gradients on CUDA."""

    def both(*args):
        y, vjp = jax.vjp(layer, *args)
        return vjp(y)

    lowered = jax.jit(both).trace(*shapes).lower(lowering_platforms=("cuda",))
    assert lowered.as_text().count("custom_call @te_gemm_grouped") >= 3
    module = lowered.compiler_ir("stablehlo")
    found = list(operations(module.body))
    calls = [op for op in found if op.name == "func.call"]
    copying = [op for op in found if op.name in kinds or op.name == "stablehlo.select" and masks_rows(op, calls)]
    return [str(op) for op in copying if LARGE.search(" ".join(str(result.type) for result in op.results))]


def test_masks_of_rows_are_found_and_selects_of_elements_are_none():
    """`masks_rows` by a mask made in place, one that a function is handed, and a select by elements."""
    mask = lambda x, each: jax.jit(lambda keep, x: jnp.where(keep, x, 0))(
        jnp.broadcast_to(each[:, None] > 0, x.shape), x
    )
    for select, expected in (
        (lambda x, each: jnp.where(each[:, None] > 0, x, 0), True),
        (mask, True),
        (lambda x, each: jnp.where(x * each[:, None] > 0, x, 0), False),
    ):
        lowered = jax.jit(select).lower(jnp.ones((8, 4)), jnp.ones(8))
        found = list(operations(lowered.compiler_ir("stablehlo").body))
        calls = [op for op in found if op.name == "func.call"]
        selects = [op for op in found if op.name == "stablehlo.select"]
        assert selects and all(masks_rows(op, calls) == expected for op in selects), lowered.as_text()


def of_type(dtype, shapes):
    is_shape = lambda node: isinstance(node, tuple) and isinstance(node[0], int)
    return jax.tree.map(lambda shape: jax.ShapeDtypeStruct(shape, dtype), shapes, is_leaf=is_shape)


@pytest.mark.parametrize("kernels", [bf16, f32])
def test_a_mixture_of_experts_copies_no_weights_and_masks_no_rows(kernels):
    """Nor does it transpose either, or lay the weights of a gated activation side by side."""
    layer = lambda *args: moe(*args, options=MoEOptions(RouterOptions(CHOICES)))[0]
    found = copies(layer, of_type(bf16, (T, H)), *of_type(kernels, moe_oracle.shapes(E, H, F)))
    assert not found, "\n".join(found)


@pytest.mark.parametrize("h,f", [(144, 80), (80, 144)])
def test_blocks_that_are_cut_are_multiplied_where_they_lie(h, f):
    """Blocks of 128 begin anew in each of the two weights of a gated activation, and are cut at the ends of all axes:
    nothing is filled up."""
    layer = lambda *args: moe(*args, options=MoEOptions(RouterOptions(CHOICES)), recipe=Float8BlockScaling())[0]
    shapes = of_type(bf16, ((T, h), *moe_oracle.shapes(E, h, f)[:3]))  # without biases
    found = copies(layer, *shapes, kinds=(*COPIES, *FILLS))
    assert not found, "\n".join(found)


def test_a_dense_layer_of_groups_copies_no_weights_and_masks_no_rows():
    layer = lambda x, kernel, bias: grouped_dense(x, kernel, jnp.array([100, 0, 100, 56]), bias)
    found = copies(layer, *of_type(bf16, ((T, H), (E, H, F), (E, F))))
    assert not found, "\n".join(found)


# -- what is refused ------------------------------------------------------------------------------------------

f = lambda *shape, dtype=f32: np.ones(shape, dtype)
GROUPS = np.array([0, 128, 128, 256], np.int32), np.array([7, 0, 128], np.int32)
X, WEIGHT, ONE = f(256, 8), f(3, 8, 5), np.float32(1)
rows, wgrad = partial(gemm_grouped, k_first=True), gemm_grouped_wide_wgrad
BAD = {  # function, operands, keywords, error, words
    "another E": (rows, (X, f(4, 8, 5), *GROUPS), {}, ValueError, "axis `e` is 3"),
    "another K": (rows, (X, f(3, 9, 5), *GROUPS), {}, ValueError, "axis `k...0` is 9"),
    "the other order": (rows, (X, f(3, 5, 8), *GROUPS), {}, ValueError, "axis `k...0` is 5"),
    "E of the bias": (rows, (X, WEIGHT, *GROUPS, None, None, f(2, 5)), {}, ValueError, "axis `e` is 2 in bias"),
    "contract": (rows, (X, WEIGHT, *GROUPS), dict(contract=2), ValueError, "contract is 2"),
    "k_first": (rows, (X, WEIGHT, *GROUPS), dict(k_first=1), TypeError, "k_first is 1"),
    "FP8": (rows, (f(256, 8, dtype=E4M3), f(3, 8, 5, dtype=E4M3), *GROUPS, ONE, ONE), {}, TypeError, "k_first is True"),
    "scale": (rows, (X, WEIGHT, *GROUPS, ONE, ONE), {}, TypeError, "k_first is True"),
    "two types": (rows, (X.astype(bf16), WEIGHT, *GROUPS), {}, TypeError, "lhs is bfloat16, rhs is float32"),
    "wgrad of FP8": (wgrad, (f(256, 8, dtype=E4M3), f(256, 5, dtype=E4M3), *GROUPS), {}, TypeError, "lhs is float8"),
    "wgrad rows": (wgrad, (X, f(384, 5), *GROUPS), {}, ValueError, "axis `r` is 384"),
    "wgrad sum": (wgrad, (X, X, *GROUPS, f(4, 8, 8)), {}, ValueError, "axis `e` is 4 in c"),
    "wgrad sum's type": (wgrad, (X, X, *GROUPS, f(3, 8, 8, dtype=bf16)), {}, TypeError, "c is bfloat16"),
    "wgrad out_dtype": (wgrad, (X, X, *GROUPS), dict(out_dtype=E4M3), ValueError, "out_dtype is"),
    "wgrad in_place": (wgrad, (X, X, *GROUPS), dict(in_place=1), TypeError, "in_place is 1"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input(name):
    """Refused while it is traced, with the op, the value and a way out."""
    fn, args, attrs, error, words = BAD[name]
    with pytest.raises(error, match=words) as raised:
        jax.eval_shape(lambda: fn(*args, **attrs))
    assert re.match(r"te_gemm_grouped", str(raised.value))
