"""On the GPU: block scaling at large sizes and of chosen results. At small ones test_recipe_block.py runs there too."""

from functools import partial

import block_oracle as oracle
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cuda_cases import activation_case, bits_equal, odd_values

from te_jax.ops.activation import (
    activation_block_bwd,
    activation_block_fwd,
    activation_bwd,
    activation_fwd,
    attributes,
)
from te_jax.ops.formats import ROWS_128, SQUARES_128
from te_jax.ops.gemm import gemm
from te_jax.ops.grouped import quantize_stacked_block
from te_jax.ops.norm import norm_block_fwd, norm_fwd
from te_jax.ops.quantize import quantize_block

pytestmark = pytest.mark.gpu
E4M3, E5M2 = jnp.dtype(jnp.float8_e4m3fn), jnp.dtype(jnp.float8_e5m2)
f32, bf16, f16 = jnp.float32, jnp.bfloat16, jnp.float16
OUT = ("data", "data_t", "scale_inv", "scale_inv_t", "block_inv", "block_inv_t", "dbias")
SHAPES = {(199, 1001): 1, (2, 300, 3, 136): 2, (8192, 4096): 1, (2, 4096, 3, 4096): 2, (65536, 40): 1, (7, 65536): 1}


def check(x, outputs, **attrs):
    """Bit for bit as plain JAX on the CPU, whose division is exact; but for the order of dbias's sums."""
    got = jax.jit(lambda x: quantize_block(x, outputs=outputs, **attrs))(x)
    on_cpu = jax.device_put(x, jax.devices("cpu")[0])
    want = dict(zip(OUT, jax.jit(lambda x: quantize_block.reference(x, **attrs))(on_cpu)))
    for name, g in zip(outputs, got, strict=True):
        if name != "dbias":
            bits_equal(g, want[name])
            continue
        rows = tuple(range(attrs["lead"] + 1))
        size = np.abs(np.asarray(x, np.float64)).sum(rows)
        exact = np.asarray(x, np.float64).sum(rows)
        assert (np.abs(np.asarray(g) - exact) <= size * x.size / exact.size * 2.0**-24 + 1e-30).all()


@pytest.mark.parametrize("shape", SHAPES, ids=lambda s: f"large-{s}" if np.prod(s) > 2**20 else str(s))
@pytest.mark.parametrize("dtype", [bf16, f16, f32], ids=lambda d: d.__name__)
@pytest.mark.parametrize("square", [False, True], ids=["1x128", "128x128"])
@pytest.mark.parametrize("fp8,law", [(E4M3, dict(power_2=True, epsilon=0.0)), (E5M2, dict(power_2=False, epsilon=9.0))])
def test_quantize_block(shape, dtype, square, fp8, law, rng):
    kind = OUT[4:6] if square else OUT[2:4]
    attrs = dict(lead=SHAPES[shape] - 1, dtype=fp8, square=square, **law)
    check(odd_values(rng, shape, dtype), ("data", "data_t", *kind, "dbias"), **attrs)


@pytest.mark.parametrize(
    "outputs",
    [("data", "scale_inv"), ("data_t", "scale_inv_t"), ("data", "block_inv"), ("data_t", "block_inv_t"), ("dbias",)],
    ids="-".join,
)
def test_quantize_block_chosen(outputs, rng):
    attrs = dict(lead=1, dtype=E4M3, square="block" in outputs[-1], power_2=False, epsilon=0.0)
    check(odd_values(rng, (3, 130, 264), bf16), outputs, **attrs)


# Stacked weights, how many axes are experts and how many lead; whether two lie side by side; the types of x and of the
# results.
STACKS = [
    ((3, 199, 1001), 1, 0, 0, bf16, E4M3),
    ((1, 2, 130, 3, 136), 1, 1, 1, f16, E5M2),
    ((2, 3, 272, 264), 2, 0, 1, f32, E4M3),
    ((3, 128, 12), 1, 0, 1, bf16, E5M2),
    ((3, 131, 264), 1, 0, 0, f32, E5M2),
    ((130, 140), 0, 0, 0, bf16, E4M3),
    ((0, 256, 128), 1, 0, 1, bf16, E4M3),
    ((3, 0, 64), 1, 0, 0, f32, E4M3),
]
STACKED_OUT = OUT[:2] + OUT[4:6]


def spoiled_stack(rng, shape, dtype):
    """With a NaN as the first number of the last expert, an inf as its last one, and blocks of zeros."""
    x = odd_values(rng, shape, dtype)
    if not x.size:
        return x
    flat = x.reshape(-1, shape[-2] * shape[-1])
    flat = flat.at[0, : flat.shape[1] // 2].set(0).at[-1, 0].set(jnp.nan).at[-1, -1].set(-jnp.inf)
    return flat.reshape(shape)


@pytest.mark.parametrize("case", STACKS, ids=str)
def test_quantize_stacked_block(case, rng):
    """Bit for bit as plain JAX on the CPU, all results and each layout by itself."""
    shape, stack, lead, slots, dtype, fp8 = case
    operands = spoiled_stack(rng, shape, dtype), odd_values(rng, shape, dtype) * 4 if slots else None
    on_cpu, power_2 = jax.device_put(operands, jax.devices("cpu")[0]), fp8 == E4M3
    attrs = dict(stack=stack, slots=slots, lead=lead, dtype=fp8, power_2=power_2, epsilon=0.0 if power_2 else 9.0)
    want = dict(zip(STACKED_OUT, jax.jit(lambda x, y: quantize_stacked_block.reference(x, y, **attrs))(*on_cpu)))
    of_layouts = STACKED_OUT, STACKED_OUT[::2], STACKED_OUT[1::2]
    run = jax.jit(lambda x, y: [quantize_stacked_block(x, y, outputs=names, **attrs) for names in of_layouts])
    for names, got in zip(of_layouts, run(*operands), strict=True):
        for name, g in zip(names, got, strict=True):
            bits_equal(g, want[name])


# A slot and two, both families of functions; test_cuda_ops.py has all.
NAMES = [("gelu",), ("squared_relu",), ("silu", "linear"), ("clamped_silu", "clamped_linear")]
ACTIVATION_SHAPES = {(199, 1001): (199,), (390, 264): (3, 130), (16, 8): (2, 8), (8192, 16384): (8192,)}


@pytest.mark.parametrize("shape", ACTIVATION_SHAPES, ids=lambda s: f"large-{s}" if np.prod(s) > 2**20 else str(s))
@pytest.mark.parametrize("dtype", [bf16, f16, f32], ids=lambda d: d.__name__)
@pytest.mark.parametrize("names", NAMES, ids="-".join)
def test_activation_block(names, dtype, shape, rng):
    """Bit for bit what the activation's kernel and the quantizing one make in turn, which have tests of their own."""
    dy, x, _ = activation_case(names, shape, dtype, rng)
    lead, attrs = ACTIVATION_SHAPES[shape], attributes(names)
    dy, x = dy.reshape(*lead, shape[1]), x.reshape(*lead, len(names), shape[1])
    poison = jnp.asarray([[jnp.nan], [jnp.inf]], dtype)[: len(names)]
    x = x.at[(0,) * len(lead)].set(poison) if shape[1] > 1000 else x  # a row that is not finite
    fwd, bwd = dict(dtype=E4M3, power_2=True, epsilon=0.0), dict(dtype=E5M2, power_2=False, epsilon=0.5)

    def fused(dy, x):
        back = activation_block_bwd(dy, x, outputs=(*OUT[:4], "dbias"), **bwd, **attrs)
        return activation_block_fwd(x, outputs=OUT[:4], **fwd, **attrs), back

    def in_turn(dy, x):
        (y,) = activation_fwd(x, None, outputs=("y",), dtype=E4M3, **attrs)
        (dx,) = activation_bwd(dy, x, None, outputs=("dx",), dtype=E5M2, **attrs)
        of = dict(square=False, lead=len(lead) - 1)
        back = quantize_block(dx, outputs=(*OUT[:4], "dbias"), **bwd, **of)
        return quantize_block(y, outputs=OUT[:4], **fwd, **of), back

    jax.tree.map(bits_equal, jax.jit(fused)(dy, x), jax.jit(in_turn)(dy, x))


@pytest.mark.parametrize("outputs", [OUT[:3:2], OUT[1:4:2], (*OUT[1:4:2], "dbias"), ("dbias",)], ids="-".join)
def test_activation_block_chosen(outputs, rng):
    dy, x, _ = activation_case(("silu", "linear"), (390, 264), bf16, rng)
    attrs = dict(attributes(("silu", "linear")), dtype=E4M3, power_2=False, epsilon=0.0)
    every = (*OUT[:4], "dbias")
    run = lambda chosen: jax.jit(lambda *a: activation_block_bwd(*a, outputs=chosen, **attrs))(dy, x)
    want = dict(zip(every, run(every)))
    jax.tree.map(bits_equal, list(run(outputs)), [want[name] for name in outputs])


# Of the last the rows are not aligned to 16 bytes, in x or in data_t.
NORM_SHAPES = [(8192, 4096), (3, 130, 264), (2, 5, 12288), (4096, 129), (199, 1001), (1, 40), (3, 0, 64)]


@pytest.mark.parametrize("shape", NORM_SHAPES, ids=str)
@pytest.mark.parametrize("dtype", [bf16, f16, f32], ids=lambda d: d.__name__)
@pytest.mark.parametrize("rms", [False, True], ids=["layernorm", "rmsnorm"])
def test_norm_block(rms, dtype, shape, rng):
    """Bit for bit what te_norm_fwd, by its kernel with data_t, and the quantizing kernel make in turn."""
    x = odd_values(rng, shape, dtype)
    if dtype != f16 and shape[-1] < 1000:  # a row whose mean times rstd overflows
        x = x.at[..., :1, :].set(2.0**120)
    gamma, beta = (jnp.asarray(rng.standard_normal(shape[-1:]), t) for t in (f32, bf16))
    beta, mean = (None, ()) if rms else (beta, ("mean",))
    attrs = dict(eps=1e-5, rms=rms, zero_centered=rms, dtype=E4M3)
    law = dict(power_2=rms, epsilon=0.0 if rms else 0.5)

    def in_turn(*operands):
        y, _, *stats = norm_fwd(*operands, None, None, jnp.ones(()), outputs=("y", "data_t", *mean, "rstd"), **attrs)
        of = dict(lead=y.ndim - 2, dtype=E4M3, square=False)
        return *quantize_block(y, outputs=OUT[:4], **of, **law), *stats

    fused = lambda *operands: norm_block_fwd(*operands, outputs=(*OUT[:4], *mean, "rstd"), **attrs, **law)
    for got, want in zip(jax.jit(fused)(x, gamma, beta), jax.jit(in_turn)(x, gamma, beta), strict=True):
        bits_equal(got, want)


@pytest.mark.parametrize("outputs", [OUT[:3:2], OUT[1:4:2]], ids="-".join)
def test_norm_block_chosen(outputs, rng):
    x, gamma = odd_values(rng, (390, 264), bf16), jnp.ones(264)
    attrs = dict(eps=1e-5, rms=True, zero_centered=False, dtype=E4M3, power_2=False, epsilon=0.0)
    every = (*OUT[:4], "rstd")
    run = lambda chosen: jax.jit(lambda x: norm_block_fwd(x, gamma, None, outputs=chosen, **attrs))(x)
    want = dict(zip(every, run(every)))
    jax.tree.map(bits_equal, list(run((*outputs, "rstd"))), [want[name] for name in (*outputs, "rstd")])


OWN = 998, 3968, 12288  # by te_jax's own kernel where a factor has squares, of which n has an odd number


@pytest.mark.parametrize(
    "mnk", [(8192, 4096, 4096), (4096, 4096, 7168), (1000, 50257, 128), (17, 48, 1040), OWN], ids=str
)
@pytest.mark.parametrize("square", [False, True], ids=["1x128", "128x128"])
@pytest.mark.parametrize("types", [(E4M3, E4M3), (E5M2, E4M3), (E4M3, E5M2)], ids=str)
@pytest.mark.parametrize("tune", [False, True], ids=["heuristic", "tuned"])
def test_gemm_block(mnk, square, types, tune, rng):
    """Of the larger ones some rows: float64 takes long."""
    m, n, k = mnk
    operands, want, size = oracle.gemm_case(((m,), (n,), (k,)), square, types, bf16, rng, rows=min(m, 64))
    got = jax.jit(lambda *a: gemm(*a, formats=(ROWS_128, SQUARES_128 if square else ROWS_128), tune=tune))(*operands)
    assert got.shape == (m, n)
    oracle.check_gemm(got[: len(want)], want, size, k, bf16)


# Axes of m, n and k. In all but the first case blocks are cut at the end of axes of n or k.
CUT = [
    tuple((size,) for size in OWN),
    ((1000,), (2, 2880), (2880,)),
    ((1000,), (2880,), (2, 2880)),
    ((17,), (48,), (1040,)),
    ((3, 70), (2, 50), (200,)),
]


@pytest.mark.parametrize("sizes", CUT, ids=str)
@pytest.mark.parametrize("out", [bf16, f32], ids=str)
def test_gemm_block_adds_to_c(sizes, out, rng):
    """With a bias and a sum that it is added to in place."""
    (*factors, bias, c), want, size = oracle.gemm_case(sizes, True, (E4M3, E4M3), out, rng)
    formats, k = (ROWS_128, SQUARES_128), sizes[2]
    product = partial(gemm, contract=len(k), formats=formats, out_dtype=out, in_place=True)
    got = jax.jit(product, donate_argnums=5)(*factors, bias, jnp.array(c))
    assert got.shape == (*sizes[0], *sizes[1])
    oracle.check_gemm(got, want, size, np.prod(k), out)
