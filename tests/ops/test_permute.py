"""te_jax.ops.permute against loops over tokens; its errors. Meshes and vmap of each op are in tests/core/test_op.py.

On a GPU, and with --host-kernels, these tests run the kernels.
"""

import itertools

import block_oracle
import jax
import jax.numpy as jnp
import numpy as np
import permute_oracle as oracle
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from te_jax.layers.config import Config
from te_jax.layers.produce import Role, produce
from te_jax.layers.tensor import Uses
from te_jax.ops.formats import ROWS_128, format_of
from te_jax.ops.permute import Groups, buffer_rows, combine, group, permute, permute_op, permute_source
from te_jax.recipe import Float8BlockScaling, Float8CurrentScaling, MXFP8BlockScaling

E4M3, E5M2 = jnp.dtype(jnp.float8_e4m3fn), jnp.dtype(jnp.float8_e5m2)
SCALE = 2.0**5
# Experts, choices, tokens, width: widths with whole vectors of 8 and without, and of more than one tile of 64.
SIZES = [
    (1, 1, 13, 24),
    (3, 1, 13, 5),
    (3, 2, 301, 72),
    (8, 1, 7, 16),
    (8, 2, 37, 24),
    (8, 8, 13, 11),
    (128, 1, 5, 8),
    (128, 2, 9, 8),
    (128, 8, 5, 13),
]
CASES = [
    (*size, dtype)
    for size, dtype in itertools.product(SIZES, ("float32", "bfloat16", "float16"))
    if dtype == "float32" or size in (SIZES[4], SIZES[5])
]


def assignments(rng, num_experts, topk, tokens):
    """{name: experts i32[T, k]}: what a router says, and what it should not say."""
    distinct = np.array([rng.permutation(num_experts)[:topk] for _ in range(tokens)])
    last = np.full((tokens, topk), num_experts - 1)
    half = np.where(distinct < (num_experts + 1) // 2, distinct, 0)  # experts without tokens at the end
    upper = np.maximum(distinct, num_experts // 2)  # and at the beginning
    elsewhere = rng.integers(-2, num_experts + 2, (tokens, topk))
    cases = dict(distinct=distinct, last=last, half=half, upper=upper, elsewhere=elsewhere, nowhere=last + 1)
    return {name: experts.astype(np.int32) for name, experts in cases.items()}


def run(experts, x, weights, dy, drows, num_experts):
    """All that the ops compute of one case."""
    groups = group(experts, num_experts)
    rows, permute_vjp = jax.vjp(lambda x: permute(x, groups), x)
    fp8 = permute_source(x, groups).run(("data", "data_t", "amax"), E4M3, scale=jnp.float32(SCALE))
    grads = permute_source(dy, groups, weights).run(("data", "data_t", "amax"), E5M2, scale=jnp.float32(SCALE))
    measured = permute_source(dy, groups, weights).run(("amax",), E5M2)["amax"]
    # What lies behind the groups, and what pads them, is read by nobody.
    poisoned = jnp.where(groups.slots[:, None] < 0, jnp.nan, rows)
    y, combine_vjp = jax.vjp(lambda rows, weights: combine(rows, groups, weights), poisoned, weights)
    spoilt = jnp.where(groups.slots[:, None] < 0, jnp.nan, drows)
    return dict(groups=groups, rows=rows, fp8=fp8, grads=grads, measured=measured, y=y, dx=permute_vjp(spoilt)[0],
                of_combine=combine_vjp(dy))  # fmt: skip


def assert_sum(got, want, sizes, terms, dtype):
    """f32 sums of `terms` products, each rounded once, and one rounding to dtype; NaN and inf where they must be."""
    got = np.asarray(got, np.float64)
    finite = np.isfinite(want)
    np.testing.assert_array_equal(np.isnan(got), np.isnan(want))
    np.testing.assert_array_equal(got[~finite], want[~finite])
    info = jnp.finfo(dtype)
    bound = terms * 2.0**-24 * sizes + float(info.eps) * np.abs(want) + float(info.smallest_subnormal)
    assert (np.abs(got - want)[finite] <= bound[finite]).all()


def as_f32(a):
    return np.asarray(a).astype(np.float32)


def check_rows(got, want, end, dtype):
    """The rows of groups bit by bit, but for the bits of a NaN; what lies behind them is anything."""
    assert got.dtype == dtype
    np.testing.assert_array_equal(as_f32(got)[:end], as_f32(want)[:end])


def check_fp8(got, want, end, dtype):
    want_fp8 = oracle.fp8(want, SCALE, dtype)
    check_rows(got["data"], want_fp8, end, dtype)
    check_rows(got["data_t"].T, want_fp8, end, dtype)
    np.testing.assert_array_equal(got["amax"], np.abs(want).max(initial=0))


def check_case(got, experts, x, weights, dy, drows, num_experts):
    groups, dtype, topk = got["groups"], x.dtype, experts.shape[1]
    offsets, counts, rows, slots = oracle.group(experts, num_experts)
    for name, want in dict(offsets=offsets, counts=counts, rows=rows, slots=slots).items():
        np.testing.assert_array_equal(getattr(groups, name), want, name)
    end, total = offsets[-1], len(slots)
    buffer = oracle.permute(as_f32(x), rows, total)
    check_rows(got["rows"], buffer.astype(dtype), end, dtype)
    check_fp8(got["fp8"], buffer, end, E4M3)
    with np.errstate(invalid="ignore", over="ignore"):
        dbuffer = oracle.permute(as_f32(dy), rows, total, np.asarray(weights))
        check_fp8(got["grads"], dbuffer, end, E5M2)
        np.testing.assert_array_equal(got["measured"], got["grads"]["amax"])
        assert_sum(got["y"], *oracle.combine(buffer, rows, weights), 2 * topk, dtype)
        dx = oracle.combine(as_f32(drows), rows)
        assert_sum(got["dx"], *dx, topk, dtype)
        dcombine, dweights = got["of_combine"]
        check_rows(dcombine, dbuffer.astype(dtype), end, dtype)
        assert_sum(dweights, *oracle.weight_gradient(as_f32(dy), buffer, rows), x.shape[1] + 1, jnp.float32)


@pytest.mark.parametrize("num_experts, topk, tokens, width, dtype", CASES)
def test_against_loops(num_experts, topk, tokens, width, dtype, rng):
    """Odd numbers of tokens, experts without tokens and with all of them, pairs that go nowhere, values that are not
    finite; twice, with the same bits."""
    compiled = jax.jit(run, static_argnums=5)
    ran = lambda *operands: jax.device_get(compiled(*operands))
    random = lambda *shape: rng.standard_normal(shape).astype(jnp.dtype(dtype))
    for n, (name, experts) in enumerate(assignments(rng, num_experts, topk, tokens).items()):
        x, dy = random(tokens, width), random(tokens, width)
        weights = rng.uniform(0, 2, experts.shape).astype(np.float32)
        drows = random(buffer_rows(experts.size, num_experts), width)
        if n % 2:
            x[0, 1], x[2, 0], x[3, 2] = np.nan, np.inf, -np.inf
            weights[1, 0], weights[4, 0] = np.nan, 0
            dy[4, 4] = np.inf
        operands = experts, x, weights, dy, drows, num_experts
        got = ran(*operands)
        check_case(got, *operands)
        if name == "distinct":
            first, again = map(bits_in_use, (got, ran(*operands)))
            assert first == again


def bits_in_use(got):
    """The bytes of all results, but for the tail."""
    end = got["groups"].offsets[-1]
    both = [(each["data"][:end], each["data_t"][:, :end], each["amax"]) for each in (got["fp8"], got["grads"])]
    drows, dweights = got["of_combine"]
    arrays = got["groups"], got["rows"][:end], both, got["measured"], got["y"], got["dx"], drows[:end], dweights
    return [np.asarray(a).tobytes() for a in jax.tree.leaves(arrays)]


@pytest.mark.parametrize("pairs, num_experts", [((4353, 8), 3), ((1301, 2), 5), ((40, 4), 1024), ((7, 2), 1025)])
def test_group_alone(pairs, num_experts, rng):
    """Many chunks of a kernel, as many experts as it takes, and one more."""
    grouped = jax.jit(group, static_argnums=1)
    for low, high in ((0, num_experts), (num_experts // 2, num_experts + 1)):
        experts = rng.integers(low, high, pairs).astype(np.int32)
        for got, want in zip(grouped(experts, num_experts), oracle.group(experts, num_experts), strict=True):
            np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("shape", [(0, 2), (3, 0, 2), (2, 5, 2), (2,)])
def test_shapes(shape, rng):
    """No tokens, several axes of them, and one token: of any rank, all tokens are one batch."""
    experts = rng.integers(0, 4, shape).astype(np.int32)
    x, weights = rng.standard_normal((*shape[:-1], 6)).astype(np.float32), np.full(shape, 0.5, np.float32)

    @jax.jit
    def run(x, weights, experts):
        groups = group(experts, 4)
        loss = lambda x, weights: jnp.sum(combine(permute(x, groups), groups, weights) ** 2)
        fp8 = permute_source(x, groups).run(("data_t", "amax"), E4M3, scale=jnp.float32(1))
        return groups, combine(permute(x, groups), groups, weights), jax.grad(loss, (0, 1))(x, weights), fp8["amax"]

    groups, y, (dx, dweights), amax = run(x, weights, experts)
    assert groups.rows.shape == shape and groups.slots.shape == (buffer_rows(experts.size, 4),)
    np.testing.assert_array_equal(y, x)
    np.testing.assert_allclose(dx, 2 * x, rtol=2.0**-22)
    np.testing.assert_allclose(dweights, np.broadcast_to(2 * np.sum(x**2, -1)[..., None], shape), rtol=2.0**-20)
    np.testing.assert_array_equal(amax, np.abs(x).max(initial=0))


@pytest.mark.parametrize("tokens, rows", [(3, 0), (0, 128)])
def test_without_rows_or_tokens(tokens, rows):
    """No row for tokens, or no tokens for rows: nothing is written, and the amax is 0."""
    slots, offsets, scale = jnp.full(rows, -1, jnp.int32), jnp.zeros(5, jnp.int32), jnp.float32(2)
    x, attrs = jnp.ones((tokens, 8)), dict(outputs=("data", "amax"), topk=2, dtype=E4M3)
    data, amax = permute_op(x, slots, offsets, None, scale, **attrs)
    assert data.shape == (rows, 8) and float(amax) == 0


def test_a_scale_is_exact_on_the_wide_rows(rng):
    """`Source.exact` widens what is floating, not the rows' numbers."""
    experts = rng.integers(0, 4, (9, 2)).astype(np.int32)
    x = rng.standard_normal((9, 8)).astype(jnp.bfloat16)

    @jax.jit
    def run(x, experts):
        groups = group(experts, 4)
        return groups, permute_source(x, groups, jnp.full((9, 2), 1.25)).exact(E4M3)

    groups, exact = jax.device_get(run(x, experts))
    end = int(groups.offsets[-1])
    want = oracle.permute(as_f32(x), groups.rows, len(exact), np.full((9, 2), 1.25))
    np.testing.assert_array_equal(exact[:end], want[:end])


@pytest.mark.parametrize("width, dtype, weighted", [(200, "bfloat16", True), (13, "float32", False)])
@pytest.mark.parametrize("power_2", [False, True])
def test_blocks_against_loops(width, dtype, weighted, power_2, rng):
    """Both layouts with the scales of their own blocks, of groups that are full, cut and empty."""
    experts = rng.choice([0, 2, 3, 5], (101, 2), p=[0.7, 0.1, 0.1, 0.1]).astype(np.int32)
    x, weights = rng.standard_normal((101, width)), rng.random((101, 2)).astype(np.float32)
    x[3, 2], x[5, 1] = np.nan, np.inf
    with np.errstate(invalid="ignore"):
        x = (x * rng.choice([0, 2.0**-20, 1], (101, 1))).astype(jnp.dtype(dtype))
    law = dict(power_2=power_2, epsilon=0.0)

    @jax.jit
    def run(x, weights, experts):
        groups = group(experts, 5)
        source = permute_source(x, groups, weights if weighted else None)
        return groups, source.run(("data", "data_t"), E4M3, ROWS_128, law=law)

    groups, got = jax.device_get(run(x, weights, experts))
    end, total = int(groups.offsets[-1]), len(groups.slots)
    rows = oracle.permute(as_f32(x), groups.rows, total, weights if weighted else None)
    rows = as_f32(rows.astype(jnp.dtype(dtype)))[:end]
    for which, blocks, turn in (("", ((0, 1), (1, 128)), lambda a: a), ("_t", ((0, 128), (1, 1)), np.transpose)):
        want, inverse = block_oracle.quantized(rows, *blocks, E4M3.name, **law)
        data = turn(as_f32(got[f"data{which}"]))[:end]
        scale_inv = np.asarray(got[f"scale_inv{which}"])
        each = np.repeat(scale_inv, 128, 0)[: width if which == "" else total]
        np.testing.assert_array_equal(turn(each.T)[:end] if which == "" else each[:end], inverse)
        np.testing.assert_array_equal(data, want)


RECIPES = {
    "current": Float8CurrentScaling(),
    "block": Float8BlockScaling(),
    "mx": MXFP8BlockScaling(),
}


@pytest.mark.parametrize("name", RECIPES)
def test_a_layer_produces_it(name, rng):
    """`permute_source` in each format: both layouts hold the permuted rows within a step of E4M3."""
    recipe = RECIPES[name]
    experts = rng.integers(0, 3, (40, 2)).astype(np.int32)
    x = rng.standard_normal((40, 128)).astype(jnp.bfloat16)

    @jax.jit
    def run(x, experts):
        groups, of_x = group(experts, 3), jax.typeof(x)
        config = Config(recipe, 1, of_x, of_x)
        q, _ = produce(permute_source(x, groups), Role("x", None, Uses(True, True, False), of_x), config)
        of = lambda data, inverse: format_of(recipe, "x").read(data, inverse, 1)
        return (
            permute(x, groups),
            groups.slots,
            groups.offsets[-1],
            [(pair[0], of(*pair)) for pair in (q.rows, q.columns)],
        )

    wide, slots, end, layouts = jax.device_get(run(x, experts))
    want, is_pad = as_f32(wide)[:end], slots[:end] < 0
    for (data, got), turn in zip(layouts, (lambda a: a, np.transpose), strict=True):
        assert not turn(as_f32(data))[:end][is_pad].any()  # exact zeros
        # Half a step of E4M3, which is 2**-4 of a number down to 2**-15 of the largest, and below that 2**-17 of it.
        np.testing.assert_allclose(turn(got)[:end], want, rtol=2.0**-4, atol=float(np.abs(want).max()) * 2.0**-17)


@pytest.mark.parametrize("kind", ["auto", "explicit", "manual"])
def test_tokens_on_a_mesh(kind, rng, on_host):
    """Tokens split over a mesh axis: the sums and gradients of one device; inside `shard_map` each groups its own."""
    types = AxisType.Explicit if kind == "explicit" else AxisType.Auto
    mesh = jax.make_mesh((4,), ("a",), axis_types=(types,))
    experts = rng.integers(0, 5, (12, 2)).astype(np.int32)
    x, weights = rng.standard_normal((12, 8)).astype(np.float32), rng.random((12, 2)).astype(np.float32)

    def sums(x, weights, experts):
        groups = group(experts, 5)
        return combine(permute(x, groups) * 2.0, groups, weights)

    def split(*args):
        return (
            jax.shard_map(sums, mesh=mesh, in_specs=P("a"), out_specs=P("a"))(*args)
            if kind == "manual"
            else sums(*args)
        )

    def both(x, weights, experts, fn):
        y, vjp = jax.vjp(lambda x, weights: fn(x, weights, experts), x, weights)
        return y, vjp(2 * y)

    with jax.set_mesh(mesh):
        placed = [jax.device_put(a, NamedSharding(mesh, P("a"))) for a in (x, weights, experts)]
        got = jax.jit(both, static_argnums=3)(*placed, split)
    want = jax.jit(both, static_argnums=3)(x, weights, experts, sums)
    for g, w in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(np.asarray(g), w, rtol=2.0**-20, atol=2.0**-18)


def test_vmap_scan_and_remat(rng):
    """Examples of a batch, each with its own groups, as one by one; also in a scan whose steps are computed again."""
    experts = rng.integers(0, 3, (2, 5, 2)).astype(np.int32)
    x, weights = (rng.standard_normal((2, 5, n)).astype(np.float32) for n in (8, 2))

    def loss(x, weights, experts):
        groups = group(experts, 3)
        return jnp.sum(combine(jnp.tanh(permute(x, groups)), groups, weights) ** 2)

    def scanned(x, weights, experts):
        step = jax.checkpoint(lambda total, each: (total + loss(*each), None))
        return jax.lax.scan(step, 0.0, (x, weights, experts))[0]

    grad = jax.grad(loss, (0, 1))
    run = lambda *args: (jax.vmap(grad)(*args), jax.grad(scanned, (0, 1))(*args), [grad(*each) for each in zip(*args)])
    mapped, steps, singly = jax.jit(run)(x, weights, experts)
    want = jax.tree.map(lambda *each: np.stack(each), *singly)
    for got in (mapped, steps):  # f32 sums of few terms in another order of operations
        jax.tree.map(lambda g, w: np.testing.assert_allclose(g, w, rtol=2.0**-18, atol=2.0**-18), got, want)


GROUPS = group(jnp.zeros((4, 2), jnp.int32), 3)
X, W = jnp.ones((4, 8)), jnp.ones((4, 2))


@pytest.mark.parametrize(
    "make, error, words",
    [
        (lambda: group(jnp.zeros((4, 2)), 3), TypeError, "experts is float32"),
        (lambda: group([[0, 1]], 3), TypeError, "experts is"),
        (lambda: group(jnp.zeros((), jnp.int32), 3), ValueError, "experts has shape ()"),
        (lambda: group(jnp.zeros((4, 2), jnp.int32), 0), ValueError, "num_experts is 0; pass a positive int"),
        (lambda: group(jnp.zeros((4, 2), jnp.int32), "3"), TypeError, "num_experts is '3'"),
        (lambda: jax.eval_shape(lambda e: group(e, 2), jax.ShapeDtypeStruct((2**30, 2), jnp.int32)), ValueError,
         "pass fewer than"),
        (lambda: permute(X[:3], GROUPS), ValueError, "x has shape (3, 8); pass [4, h]"),
        (lambda: permute(X.astype(int), GROUPS), TypeError, "x is int32[4, 8]; pass an array of float32, bfloat16"),
        (lambda: permute(X, tuple(GROUPS)), TypeError, "groups is tuple; pass"),
        (lambda: permute_source(X, GROUPS, W[:3]), ValueError, "weights has shape (3, 2); pass (4, 2)"),
        (lambda: combine(X, GROUPS, W), ValueError, "rows has shape (4, 8); pass [512, h]"),
        (lambda: combine(permute(X, GROUPS), GROUPS, W[:, :1]), ValueError, "weights has shape (4, 1)"),
        (lambda: combine(permute(X, GROUPS), GROUPS, W.astype(int)), TypeError, "weights is int32"),
    ],
)  # fmt: skip
def test_errors(make, error, words):
    with pytest.raises(error) as raised:
        make()
    assert words in str(raised.value) and str(raised.value).startswith("te_jax.ops.permute: ")


def test_groups_are_a_tree():
    assert isinstance(jax.tree.map(lambda a: a + 1, GROUPS), Groups)
