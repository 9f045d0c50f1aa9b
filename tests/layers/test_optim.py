"""adamw_fp8: a float64 oracle written apart, how it follows AdamW, that it works wherever an optax optimizer does."""

import math
import pathlib
import sys

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
import pytest
from arrays import on_device
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from states import restored, saved

import te_jax as te
from te_jax import optim
from te_jax.sharding import collectives

sys.path.insert(0, str(pathlib.Path(__file__).parents[2] / "examples"))

needs_8 = pytest.mark.skipif(jax.device_count() < 8, reason="needs 8 devices: run it on a CPU")
B1, B2, EPS = 0.9, 0.999, 1e-8


# -- the oracle ---------------------------------------------------------------------------------------------------


def oracle_random(count: int, shape) -> np.ndarray:
    """Of blocks [..., blocks, elements], in Python's integers."""
    odd, out = 2654435769, np.empty(shape)
    for index in np.ndindex(*shape):
        bits = (odd * count + sum(i * odd ** (axis + 2) for axis, i in enumerate(index))) % 2**32
        bits = (bits ^ bits >> 16) * 0x85EBCA6B % 2**32
        bits = (bits ^ bits >> 13) * 0xC2B2AE35 % 2**32
        out[index] = bits // 2**20 / 2**12
    return out


def oracle_round(x: np.ndarray, random: np.ndarray, dtype) -> np.ndarray:
    """Between the neighbours in `dtype`, which are found by its own conversion."""
    info = ml_dtypes.finfo(dtype)
    size = np.minimum(np.abs(x), float(info.max))
    near = size.astype(dtype).astype(np.float64)
    step = 2.0 ** (np.maximum(np.floor(np.log2(np.maximum(size, 1e-300))), info.minexp) - info.nmant)
    low = np.where(near > size, near - step, near)
    up = (size - low) / step >= 1 - random
    return np.copysign(np.minimum(low + up * step, float(info.max)), x)


def oracle(grad, mu, root_nu, exponent, count, block):
    """One step in float64: (update, that of the terms' sizes, mu, root_nu, exponent), arrays [..., blocks, elements],
    exponent [..., blocks]."""
    split = lambda x: np.asarray(x, np.float64).reshape(*np.shape(grad)[:-1], -1, block)
    root = split(root_nu) * 2.0 ** np.asarray(exponent, np.float64)[..., None]
    m = B1 * split(mu) / 16 * root + (1 - B1) * split(grad)
    v = B2 * root**2 + (1 - B2) * split(grad) ** 2
    by = (1 - B1**count) * (np.sqrt(v / (1 - B2**count)) + EPS)
    size = B1 * np.abs(split(mu)) / 16 * root + (1 - B1) * np.abs(split(grad))
    root = np.sqrt(v)
    with np.errstate(divide="ignore"):
        exponent = np.clip(np.ceil(np.log2(root.max(-1) / 65504)), -126, 126)
    scale, random = 2.0 ** exponent[..., None], oracle_random(count, root.shape)
    root = oracle_round(root / scale, random, np.float16)
    ratio = np.divide(16 * m, root * scale, out=np.zeros_like(m), where=root > 0)
    return m / by, size / by, oracle_round(ratio, random, ml_dtypes.float8_e4m3fn), root, exponent


SHAPES = {"plain": (3, 256), "odd": (2, 199), "vector": (128,), "one": (1,), "scalar": ()}


def gradients(rng, step: int) -> dict:
    """Rows of very different sizes, a row of zeros, and elements 1e-9 of their neighbours."""
    grads = {}
    for name, shape in SHAPES.items():
        g = rng.normal(size=shape) * np.exp(3 * rng.normal(size=shape))
        if name == "plain":
            g *= np.array([[1e-9], [0.0], [1e12]])
        if name == "odd":
            g[:, ::7] *= 1e-9
        if name == "vector" and step == 2:
            g *= 0
        grads[name] = jnp.asarray(g, jnp.float32)
    return grads


def test_equals_the_oracle_step_by_step(rng):
    """f32 against float64 from the same stored state, three steps. Where f32's last bits, some 2**-23 * 2**11 of a unit
    in the last place of f16, take a value across a threshold, it lands one place further: of 4096 one or two."""
    tx = te.optim.scale_by_adam_fp8(B1, B2, EPS)
    state = tx.init({name: jnp.zeros(shape) for name, shape in SHAPES.items()})
    step = jax.jit(tx.update)
    for count in (1, 2, 3):
        before, grads = state, gradients(rng, count)
        got, state = step(grads, before)
        assert int(state.count) == count
        for name, shape in SHAPES.items():
            n = shape[-1] if shape else 1
            fields = lambda s, name=name: [np.asarray(tree[name]) for tree in s[1:]]
            want = oracle(np.asarray(grads[name]), *fields(before), count, 128 if n % 128 == 0 else n)
            # 1 - b2**count of f32 is 2**-24 / 1e-3 = 6e-5 off
            update = np.asarray(got[name], np.float64).reshape(want[0].shape)
            assert np.all(np.abs(update - want[0]) <= 1e-4 * want[1]), name
            mu, root_nu, exponent = fields(state)
            assert (mu.dtype, root_nu.dtype, exponent.dtype) == (ml_dtypes.float8_e4m3fn, np.float16, np.int8)
            np.testing.assert_array_equal(exponent, want[4])
            for stored, due in ((mu, want[2]), (root_nu, want[3])):
                ordered = np.abs(stored.reshape(due.shape)).view(f"u{stored.itemsize}").astype(int)
                places = np.abs(ordered - np.abs(due).astype(stored.dtype).view(f"u{stored.itemsize}"))
                assert places.max() <= 1 and (places > 0).mean() <= 0.01, (name, count)
                np.testing.assert_array_equal(np.sign(stored.astype(float)).reshape(due.shape), np.sign(due))


# -- how it follows AdamW -----------------------------------------------------------------------------------------


def run(tx, grads, params=0.0):
    """The updates of all steps, [t, ...], of gradients [t, ...]."""

    def body(state, g):
        update, state = tx.update(g, state, jnp.full_like(g, params))
        return state, update

    return np.asarray(jax.jit(lambda g: jax.lax.scan(body, tx.init(g[0]), g)[1])(grads), np.float64)


def rms(x):
    return math.sqrt(np.mean(np.square(x)))


def naive(b1, b2):
    """Moments in E4M3 and f16 with one scale a tensor, rounded to nearest."""

    def stored(x, dtype):
        scale = jnp.max(jnp.abs(x)) / float(jnp.finfo(dtype).max)
        narrow = jax.lax.optimization_barrier((x / scale).astype(dtype))  # XLA for GPUs would drop both casts
        return narrow.astype(jnp.float32) * scale

    def update(g, state, params=None):
        count, mu, nu = state
        mu, nu, count = b1 * mu + (1 - b1) * g, b2 * nu + (1 - b2) * g * g, count + 1
        by = mu / (1 - b1**count) / (jnp.sqrt(nu / (1 - b2**count)) + EPS)
        return by, (count, stored(mu, jnp.float8_e4m3fn), stored(nu, jnp.float16))

    return optax.GradientTransformation(lambda p: (0, p * 0, p * 0), update)


@pytest.mark.parametrize(("b1", "b2"), [(0.9, 0.999), (0.98, 0.9999)])
def test_follows_adam(rng, b1, b2):
    """300 steps of noise around a mean, then 300 with gradients a 30th the size, so that both moments have to fall.

    A rounding to E4M3 is off by a unit in the last place at most, 2**-3 of the value, with an rms of that over sqrt(6);
    those of the last 1 / (1 - b1**2) steps are in a moment, and add up as squares. On average nothing is missing.
    """
    size = np.exp(1.5 * rng.normal(size=(8, 128)))
    grads = size * (0.5 * rng.normal(size=(8, 128)) + rng.normal(size=(600, 8, 128)))
    grads[300:] /= 30
    grads = jnp.asarray(grads, jnp.float32)
    due, got = run(optax.scale_by_adam(b1, b2), grads), run(te.optim.scale_by_adam_fp8(b1, b2), grads)
    assert rms(got - due) < 2**-3 / math.sqrt(6 * (1 - b1**2)) * rms(due)
    for part in slice(300), slice(300, None):
        assert abs(np.sum(got[part] * due[part]) / np.sum(due[part] ** 2) - 1) < 0.02


def test_outlier_rows_do_no_harm(rng):
    """A row of gradients 1e7 times the others: with one scale a tensor these have moments of 0."""
    grads = rng.normal(size=(50, 16, 128)) + 0.5
    grads[:, 3] *= 1e7
    grads = jnp.asarray(grads, jnp.float32)
    rest = np.arange(16) != 3
    due = run(optax.scale_by_adam(B1, B2), grads)[:, rest]
    off = lambda tx: rms(run(tx, grads)[:, rest] - due) / rms(due)
    assert off(te.optim.scale_by_adam_fp8(B1, B2)) < 0.1 < 0.5 < off(naive(B1, B2))


def test_elements_far_below_their_neighbours(rng):
    """Within a block, elements of gradients 1e-9 times the largest move as they should: E4M3 by itself spans 2**18."""
    grads = rng.normal(size=(50, 4, 128)) + 0.5
    grads[..., 1:] *= 1e-9
    grads = jnp.asarray(grads, jnp.float32)
    due = run(optax.scale_by_adam(B1, B2, 0.0), grads)
    assert rms(run(te.optim.scale_by_adam_fp8(B1, B2, 0.0), grads) - due) < 0.1 * rms(due)


def test_moments_die_out(rng, monkeypatch):
    """After the gradients have stopped the update falls as (b1 / sqrt(b2))**t. Rounded to nearest it would stop at half
    its values, where 5 % are less than half a unit in the last place."""
    b1, b2, t = 0.95, 0.9999, 100
    grads = jnp.concatenate([on_device(rng.normal(size=(20, 4, 128)), jnp.float32), jnp.zeros((t, 4, 128))])
    due, got = (run(tx, grads) for tx in (optax.scale_by_adam(b1, b2), te.optim.scale_by_adam_fp8(b1, b2)))
    assert np.abs(got).max() < 1.2 * np.abs(due).max()
    # Summed over 512 elements, each off at random by some 2**-3 / sqrt(6) / sqrt(1 - b1**2) of it, 16 %: 0.7 %.
    assert abs(np.abs(got[20:]).sum() / np.abs(due[20:]).sum() - 1) < 0.03
    monkeypatch.setattr(optim.adam, "_random", lambda count, x: jnp.full_like(x, 0.5))
    assert np.abs(run(te.optim.scale_by_adam_fp8(b1, b2), grads)[-1]).mean() > 20 * np.abs(due[-1]).mean()


def test_bad_gradients_spoil_their_own_element_alone():
    grads = jnp.ones((1, 128)).at[0, 5].set(jnp.inf).at[0, 9].set(jnp.nan)
    tx = te.optim.scale_by_adam_fp8(B1, B2)
    step = jax.jit(tx.update)
    _, state = step(grads, tx.init(grads))
    update, state = step(jnp.ones((1, 128)), state)
    bad = np.isin(np.arange(128), (5, 9))
    np.testing.assert_array_equal(np.isnan(np.asarray(update[0])), bad)
    np.testing.assert_allclose(np.asarray(update[0])[~bad], 1, atol=0.07)  # mu was rounded once: 2**-4


def test_updates_are_finite_where_those_of_optax_are():
    """Pairs of gradients from denormal ones to inf among usual ones: in one block, and each in a row of its own."""
    sizes = [0.0, 1e-45, 1e-38, 1e-30, 1e-19, 1.0, 1e15, 1.8e19, 1.84e19, 2e19, 1e30, 3.4e38, np.inf, np.nan]
    pairs = np.stack(np.meshgrid(sizes, [*sizes, *(-s for s in sizes)]), -1).reshape(-1, 2).astype(np.float32)
    ones = np.ones(len(pairs), np.float32)
    steps = np.stack([ones, pairs[:, 0], ones, pairs[:, 1], ones, *[pairs[:, 1]] * 3, ones])
    grads = {"block": jnp.asarray(steps[:, None]), "rows": jnp.asarray(steps[..., None])}
    for block in grads.values():
        due, got = (run(tx(B1, B2), block) for tx in (optax.scale_by_adam, te.optim.scale_by_adam_fp8))
        np.testing.assert_array_equal(np.isfinite(got), np.isfinite(due))
        assert np.isfinite(due).any() and not np.isfinite(due).all()


@pytest.mark.parametrize("nesterov", [False, True])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_first_step_is_that_of_optax(rng, nesterov, dtype):
    """There nothing has been rounded yet: schedule, eps, decay, mask, nesterov, bias corrections are those of optax."""
    params = {name: on_device(rng.normal(size=SHAPES[name]), dtype) for name in ("plain", "odd")}
    grads = jax.tree.map(lambda p: on_device(rng.normal(size=p.shape) * 1e-3, dtype), params)
    options = dict(b1=0.8, b2=0.97, eps=1e-4, eps_root=1e-9, weight_decay=0.3, nesterov=nesterov)
    options |= dict(mask=lambda p: {name: name != "odd" for name in p}, learning_rate=lambda count: 0.1 + count)
    step = lambda tx: jax.jit(lambda params, grads: tx.update(grads, tx.init(params), params)[0])(params, grads)
    got = step(te.optim.adamw_fp8(**options))
    assert all(got[name].dtype == dtype for name in got)
    params, grads = jax.tree.map(lambda x: x.astype(jnp.float32), (params, grads))
    for name, due in step(optax.adamw(**options)).items():
        # bf16: that of adam, the decay, their sum and its product with the rate are rounded, to 2**-9 of the largest
        rtol, atol = (1e-5, 0) if dtype == jnp.float32 else (2**-7, 2**-8 * float(jnp.max(jnp.abs(due))))
        np.testing.assert_allclose(np.asarray(got[name], float), np.asarray(due, float), rtol, atol, err_msg=name)


def test_bytes():
    """3 bytes a parameter, and one for each block."""
    params = {"kernel": jnp.zeros((256, 384)), "odd": jnp.zeros((5, 7)), "scalar": jnp.zeros(())}
    state = te.optim.adamw_fp8(1e-3).init(params)[0]
    size = lambda tree: sum(leaf.nbytes for leaf in jax.tree.leaves(tree))
    assert size(state[1:]) == 3 * (256 * 384 + 35 + 1) + 256 * 3 + 5 + 1
    assert size(state[1:]) / size(optax.adam(1e-3).init(params)[0][1:]) < 0.38


# -- wherever an optax optimizer does -----------------------------------------------------------------------------


def small(rng):
    params = {"a": on_device(rng.normal(size=(2, 128)), jnp.float32), "b": jnp.zeros((3,), jnp.bfloat16)}
    return params, jax.tree.map(lambda p: on_device(rng.normal(size=(4, *p.shape)), p.dtype), params)


def assert_same(got, due, flips=0.0):
    """Bit for bit; or all but that part of each leaf, f32 within 8 units in the last place: another program rounds it
    otherwise, and may so cross a threshold."""
    assert jax.tree.structure(got) == jax.tree.structure(due)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(due)):
        assert a.dtype == b.dtype and a.shape == b.shape
        a, b = np.asarray(a).reshape(-1), np.asarray(b).reshape(-1)
        differ = ~np.isclose(a, b, rtol=2.0**-20, atol=0) if flips and a.dtype == np.float32 else a != b
        assert differ.mean() <= flips, (a, b)


def test_transformations(rng):
    """jit with donation, scan, vmap, eval_shape, and the wrappers of optax."""
    params, grads = small(rng)
    tx = te.optim.adamw_fp8(1e-2, weight_decay=0.0)
    at = lambda i, tree=grads: jax.tree.map(lambda g: g[i], tree)

    def step(carry, g):
        params, state = carry
        updates, state = tx.update(g, state, params)
        return (optax.apply_updates(params, updates), state), None

    jitted = jax.jit(step, donate_argnums=0)
    fresh = tx.init(params)
    carry = jax.tree.map(jnp.copy, (params, fresh))
    assert jax.tree.map(lambda x: (x.shape, x.dtype), jax.eval_shape(tx.init, params)) == jax.tree.map(
        lambda x: (x.shape, x.dtype), fresh
    )
    given = jax.tree.leaves(carry)
    for i in range(4):
        (carry, _) = jitted(carry, at(i))
    assert all(leaf.is_deleted() for leaf in given)  # every buffer of the state serves the next one
    scanned = jax.jit(lambda carry: jax.lax.scan(step, carry, grads)[0])((params, fresh))
    assert_same(scanned, carry, flips=0.01)

    twice = jax.tree.map(lambda x: jnp.stack([x, 3 * x]), (params, at(0)))
    begin = jax.jit(lambda p, g: tx.update(g, tx.init(p), p))
    mapped, state = jax.jit(jax.vmap(begin))(*twice)
    alone = [begin(params, at(i, twice[1])) for i in range(2)]
    assert_same((mapped, state), jax.tree.map(lambda *x: jnp.stack(x), *alone), flips=0.01)

    update = lambda tx: jax.jit(lambda: tx.update(at(0), tx.init(params), params)[0])()
    first = update(tx)
    injected = update(optax.inject_hyperparams(te.optim.adamw_fp8)(1e-2, weight_decay=0.0))
    for name, rtol in (("a", 1e-4), ("b", 2**-8)):  # 1 - b2 of f32: 2**-24 / 1e-3; bf16
        np.testing.assert_allclose(injected[name].astype(float), first[name].astype(float), rtol=rtol)
    masked = update(optax.masked(tx, {"a": True, "b": False}))
    assert_same(masked, {"a": first["a"], "b": at(0)["b"]})
    groups = {"all": tx, "none": te.optim.adamw_fp8(1.0)}
    assert_same(update(optax.partition(groups, lambda p: jax.tree.map(lambda _: "all", p))), first)
    several = optax.MultiSteps(tx, 2)
    state, step = several.init(params), jax.jit(several.update)
    for _ in range(2):
        updates, state = step(at(0), state, params)
    assert_same(updates, first, flips=0.01)


def test_refuses_integers():
    with pytest.raises(TypeError, match=r"adamw_fp8: parameter \['n'\] is int32; mask it out"):
        te.optim.adamw_fp8(1e-3).init({"n": jnp.zeros(3, jnp.int32)})


# -- on meshes ----------------------------------------------------------------------------------------------------

SPECS = {  # of parameters, and what crosses devices: at most maxima of blocks that several shards hold
    "rows": ((16, 256), PartitionSpec("fsdp"), False),
    "columns": ((4, 1024), PartitionSpec(None, "fsdp"), False),
    "stacked": ((2, 8, 256), PartitionSpec(None, "fsdp", None), False),
    "parts of blocks": ((4, 256), PartitionSpec(None, "fsdp"), True),
    "one block": ((4, 96), PartitionSpec(None, "fsdp"), True),
}


def on_mesh(rng, kind, names):
    mesh = jax.make_mesh((8,), ("fsdp",), axis_types=(kind,))
    place = lambda tree: {name: jax.device_put(tree[name], NamedSharding(mesh, SPECS[name][1])) for name in names}
    params = {name: on_device(rng.normal(size=SPECS[name][0]), jnp.float32) for name in names}
    grads = jax.tree.map(lambda p: on_device(rng.normal(size=p.shape), p.dtype), params)
    return mesh, place, params, grads


@needs_8
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=["auto", "explicit"])
def test_state_lies_as_parameters_do(rng, kind, tmp_path):
    names = [name for name in SPECS if kind == AxisType.Auto or name != "parts of blocks"]
    mesh, place, params, grads = on_mesh(rng, kind, names)
    tx = te.optim.adamw_fp8(1e-2)

    @jax.jit
    def due(params, grads):
        state = tx.update(grads, tx.init(params), params)[1]
        return tx.update(grads, state, params)

    with jax.set_mesh(mesh):
        sharded, grads_there = place(params), place(grads)
        state = tx.init(sharded)
        shardings = optax.tree.map_params(
            tx, te.optim.state_sharding, jax.eval_shape(tx.init, params), jax.tree.map(lambda p: p.sharding, sharded)
        )
        for name in names:
            for leaf, wanted in ((tree[name], where[name]) for tree, where in zip(state[0][1:], shardings[0][1:])):
                assert leaf.sharding.is_equivalent_to(wanted, leaf.ndim), name
            assert state[0].mu[name].sharding.is_equivalent_to(sharded[name].sharding, sharded[name].ndim)
        step = jax.jit(tx.update)
        for _ in range(2):
            updates, state = step(grads_there, state, sharded)
    want, want_state = due(params, grads)
    assert_same(jax.tree.map(np.asarray, state), jax.tree.map(np.asarray, want_state), flips=0.01)
    for name in names:
        np.testing.assert_allclose(np.asarray(updates[name]), np.asarray(want[name]), rtol=1e-2, atol=1e-6)
        for tree in state[0][1:3]:
            assert tree[name].sharding.is_equivalent_to(sharded[name].sharding, sharded[name].ndim), name
    is_dict = lambda tree: isinstance(tree, dict)
    for crosses in (False, True):
        only = lambda tree, wanted=crosses: {name: tree[name] for name in names if SPECS[name][2] == wanted}
        held = jax.tree.map(lambda tree, only=only: only(tree) if is_dict(tree) else tree, state, is_leaf=is_dict)
        found = collectives.compiled(step, only(grads_there), held, only(sharded), mesh=mesh)[1]
        blocks = max(math.prod(exponent.shape) for exponent in only(state[0].exponent).values())
        assert bool(found) == crosses and all(c.bytes <= 4 * blocks for c in found), list(map(str, found))
    check_checkpoint(state, tmp_path / "state")


def check_checkpoint(state, path):
    """Orbax: bit for bit, types and shardings too."""
    saved(path, state)
    again = restored(path, jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), state))
    bits = lambda x: np.asarray(x).reshape(-1).view(f"u{x.dtype.itemsize}")
    for a, b in zip(jax.tree.leaves(again), jax.tree.leaves(state)):
        assert a.dtype == b.dtype and a.sharding.is_equivalent_to(b.sharding, b.ndim)
        np.testing.assert_array_equal(bits(a), bits(b))


@needs_8
def test_explicit_shards_that_cut_blocks_are_refused(rng):
    mesh, place, params, _ = on_mesh(rng, AxisType.Explicit, ["parts of blocks"])
    with jax.set_mesh(mesh), pytest.raises(ValueError, match=r"shape \(4, 256\) has shards of 32, .* blocks of 128"):
        te.optim.adamw_fp8(1e-3).init(place(params))


@needs_8
def test_train_gpt_on_a_mesh(tmp_path):
    """The same losses with parameters and moments over 8 devices, whose shards hold parts of blocks."""
    import json

    import train_gpt

    def losses(*arguments):
        small = "--preset tiny --layers 1 --seq-len 16 --batch-size 8 --steps 4 --eval-every 0 --precision bf16"
        text = ["--data", str(pathlib.Path(__file__).parents[2] / "examples" / "README.md"), "--no-checkpoint"]
        out = ["--out", str(tmp_path), "--optimizer", "adamw_fp8"]
        assert train_gpt.main([*small.split(), *text, *out, *arguments]) == 0
        results = json.loads((tmp_path / "results.json").read_text())
        assert results["args"]["optimizer"] == "adamw_fp8"
        return [loss for _, loss in results["runs"]["bf16"]["losses"]]

    # as in test_train_mesh.py: bf16 rounds other partial sums
    np.testing.assert_allclose(losses("--mesh", "fsdp=8"), losses(), atol=1e-3, rtol=0)
