"""`plain_loops`: loops of a differentiated function have the numbers of its scans, and copy less."""

import contextlib
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import AxisType, NamedSharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P

import te_jax as te
import te_jax.flax as te_flax
from te_jax.checkpoint_policies import GEMM, offload
from te_jax.core import loops
from te_jax.core.loops import plain_loops

STEPS, ROWS, WIDTH = 5, 16, 8
FACTORS = np.linspace(0, 0.25, WIDTH, dtype=np.float32)


@pytest.fixture(autouse=True)
def small_results_are_large(monkeypatch):
    monkeypatch.setattr(loops, "_FILL_BYTES", 16)


def operands():
    rng = np.random.default_rng()
    w = rng.normal(size=(STEPS, WIDTH, WIDTH)) / WIDTH**0.5
    return jnp.asarray(w, jnp.float32), jnp.asarray(rng.normal(size=(ROWS, WIDTH)), jnp.float32)


def layers(w, x, **options):
    """Scanned layers with a constant, a carry of two, and results of each kind."""

    def layer(carry, w):
        x, seen = carry
        y = jnp.tanh(x @ w + x)
        return (y, seen + 1), (y[:8], jnp.argmax(y, -1), y > 0, jnp.sum(y))

    return lax.scan(layer, (x, jnp.int32(3)), w, **options)


def of_each_result(w, x, **options):
    (y, seen), (rows, places, signs, sums) = layers(w, x, **options)
    return jnp.sum(y**2) + jnp.sum(rows**3) + jnp.sum(sums) + jnp.sum(jnp.where(signs, 1.0, 2.0)), (seen, places)


def in_microbatches(w, x):
    step = lambda total, x: (total + of_each_result(w, x)[0], layers(w, x)[1][0])
    total, rows = lax.scan(step, 0.0, jnp.stack([x, 2 * x]))
    return total + jnp.sum(rows), jnp.zeros(())


def in_a_branch(w, x):
    run = jax.jit(lambda x: of_each_result(w, x)[0])
    return lax.cond(jnp.sum(x) > 0, run, lambda x: jnp.sum(x) * of_each_result(w, x)[0], x), jnp.zeros(())


def recomputed(w, x):
    layer = jax.checkpoint(lambda x, w: (jnp.sin(x @ w), x[:8]))
    x, rows = jax.checkpoint(lambda w, x: lax.scan(layer, x, w))(w, x)
    return jnp.sum(x) + jnp.sum(rows**2), jnp.zeros(())


LOSSES = {
    "forwards": of_each_result,
    "backwards": lambda w, x: of_each_result(w, x, reverse=True),
    "scan in a scan": in_microbatches,
    "in a branch": in_a_branch,
    "recomputed": recomputed,
    "unrolled by 2": lambda w, x: of_each_result(w, x, unroll=2),
}


def check_close(got, want):
    """Sums of f32 numbers near 1 may be added up in another order: 2**-18 of them, and as much of 1."""
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2**-18, atol=2**-18), got, want)


def scans(fun, *args):
    """How many scans are left in `fun`, and how many loops without a known number of steps it has."""
    text = str(jax.make_jaxpr(fun)(*args))
    return len(re.findall(r"\bscan\[", text)), len(re.findall(r"\bwhile\[", text))


@pytest.mark.parametrize("name", LOSSES)
def test_numbers_are_those_of_the_scan(name):
    step, args = jax.value_and_grad(LOSSES[name], (0, 1), has_aux=True), operands()
    check_close(jax.jit(plain_loops(step))(*args), jax.jit(step)(*args))
    assert (scans(plain_loops(step), *args)[0] == 0) == (name != "unrolled by 2")


def test_scans_become_loops_where_a_result_is_large(monkeypatch):
    step = jax.grad(lambda w, x: of_each_result(w, x)[0])
    args = operands()
    assert scans(step, *args) == (2, 0)
    assert scans(plain_loops(step), *args) == (0, 2)
    for look in (jax.debug_nans, jax.debug_infs):
        with look(True):
            assert scans(plain_loops(step), *args) == (2, 0)
    monkeypatch.setattr(loops, "_FILL_BYTES", 2**20)
    assert scans(plain_loops(step), *args) == (2, 0)


def mesh_of(*kinds):
    return jax.make_mesh((4, 2), ("rows", "columns"), axis_types=kinds)


def by_devices(step):
    """`step`, called by each device with its rows."""
    mesh = mesh_of(AxisType.Auto, AxisType.Auto)
    total = lambda w, x: jax.tree.map(lambda a: lax.psum(a, "rows"), step(w, x))
    return jax.shard_map(total, mesh=mesh, in_specs=(P(), P("rows")), out_specs=P())


def with_a_ref(step):
    def loss(w, x):
        seen = jax.new_ref(jnp.zeros(()))

        def layer(x, w):
            seen[...] += jnp.sum(x)
            return jnp.tanh(x @ w), None

        return jnp.sum(lax.scan(layer, x, w)[0] ** 2)

    return plain_loops(jax.grad(loss))


def offloaded(step):
    layer = jax.checkpoint(lambda x, w: (jnp.tanh(keep(x @ w)), None), policy=offload(GEMM))
    keep = lambda y: checkpoint_name(y, GEMM)
    return plain_loops(jax.grad(lambda w, x: jnp.sum(lax.scan(layer, x, w)[0] ** 2)))


def of_weak_type(step):
    """The carry begins as a Python number, so its products have the other factor's dtype."""
    layer = lambda carry, w: ((jnp.tanh(carry[0] @ w), carry[1] * 2), None)

    def loss(w, x):
        (y, scale), _ = lax.scan(layer, (x, 1.0), w)
        assert (scale * jnp.ones((), jnp.bfloat16)).dtype == jnp.bfloat16
        return jnp.sum(y**2)

    def twice(w, x):
        grad, scale = plain_loops(lambda w, x: (jax.grad(loss)(w, x), lax.scan(layer, (x, 1.0), w)[0][1]))(w, x)
        assert (scale * jnp.ones((), jnp.bfloat16)).dtype == jnp.bfloat16
        return grad

    return twice


STAY = dict(by_devices=by_devices, with_a_ref=with_a_ref, offloaded=offloaded, of_weak_type=of_weak_type)


@pytest.mark.parametrize("name", STAY)
def test_scans_that_stay(name):
    args = operands()
    assert scans(STAY[name](plain_loops(gradient)), *args) == scans(STAY[name](gradient), *args)


def test_scans_of_64_bits_stay():
    """In a function of 32 bits."""

    def step(w, x):
        with jax.enable_x64(True):
            w, x = w.astype(jnp.float64), x.astype(jnp.float64)
            loss = lambda w, x: jnp.sum(lax.scan(lambda x, w: (jnp.tanh(x @ w), x), x, w)[1] ** 2)
            return jax.grad(loss)(w, x).astype(jnp.float32)

    args = operands()
    check_close(jax.jit(plain_loops(step))(*args), jax.jit(step)(*args))


def test_scans_on_meshes_of_both_kinds_stay():
    """What a device has of Auto axes is not known where shardings of Explicit ones are; nor is it where a mesh is not
    the one in force."""
    w, x = operands()
    step = plain_loops(jax.grad(of_rows))
    for kinds, in_force in (((AxisType.Explicit, AxisType.Auto), True), ((AxisType.Explicit,) * 2, False)):
        mesh = mesh_of(*kinds)
        placed = jax.device_put(w, NamedSharding(mesh, P())), jax.device_put(x, NamedSharding(mesh, P("rows")))
        with jax.set_mesh(mesh) if in_force else contextlib.nullcontext():
            assert scans(step, *placed) == (2, 0)


def of_rows(w, x):
    """Layers whose rows lie as the rows of x do, with a constant of the host."""
    mesh = jax.typeof(x).sharding.mesh
    lie = NamedSharding(mesh, P("rows")) if AxisType.Explicit in mesh.axis_types else None
    layer = lambda x, w: (jnp.tanh(jnp.einsum("rc,cd->rd", x, w, out_sharding=lie)) * jnp.sum(FACTORS), None)
    return jnp.sum(lax.scan(layer, x, w)[0] ** 2)


def test_no_zeros_are_written_on_a_gpu():
    w, x = operands()
    step = jax.grad(of_rows)
    texts = [jax.jit(f).trace(w, x).lower(lowering_platforms=("cuda",)).as_text() for f in (step, plain_loops(step))]
    filled = [len(re.findall(rf"broadcast_in_dim %cst\S*, .*-> tensor<{STEPS}x\d+x\d+xf32>", t)) for t in texts]
    assert filled[0] > 0 == filled[1]
    assert "AllocateBuffer" in texts[1] and "AllocateBuffer" not in texts[0]


def gradient(w, x):
    return jax.grad(lambda w: of_each_result(w, x)[0])(w)


TRANSFORMED = {
    "second derivative": lambda f: jax.grad(lambda w, x: jnp.sum(f(w, x) ** 2), (0, 1)),
    "tangent": lambda f: lambda w, x: jax.jvp(f, (w, x), (0.5 * w, x)),
    "mapped carry": lambda f: lambda w, x: jax.vmap(f, (None, 0))(w, jnp.stack([x, 2 * x])),
    "mapped operands": lambda f: lambda w, x: jax.vmap(f, (0, None))(jnp.stack([w, 2 * w]), x),
}


@pytest.mark.parametrize("transform", TRANSFORMED.values(), ids=TRANSFORMED)
def test_transformed(transform):
    args = operands()
    check_close(jax.jit(transform(plain_loops(gradient)))(*args), jax.jit(transform(gradient))(*args))


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_devices_make_their_part(kind, monkeypatch):
    """Rows of 4 devices, and columns of 2: what autodiff keeps of steps is made as it lies."""
    (w, x), mesh, made, empty = operands(), mesh_of(kind, kind), [], lax.empty
    monkeypatch.setattr(lax, "empty", lambda shape, dtype: made.append(shape) or empty(shape, dtype))
    with jax.set_mesh(mesh):
        w_on_mesh = jax.device_put(w, NamedSharding(mesh, P(None, None, "columns")))
        x_on_mesh = jax.device_put(x, NamedSharding(mesh, P("rows")))
        got = jax.jit(plain_loops(jax.grad(of_rows)))(w_on_mesh, x_on_mesh)
    rows = [shape[1] for shape in made]
    of_all = rows.count(ROWS)  # on an Auto mesh, what is asked for before jax knows of devices
    assert rows.count(ROWS // 4) >= max(of_all, 1) and (kind == AxisType.Auto) == (of_all > 0)
    check_close(np.asarray(got), jax.grad(of_rows)(w, x))


def test_within_shard_map_scans_stay():
    """There results vary over mesh axes, which `lax.empty` does not say."""
    w, x = operands()
    mesh = jax.make_mesh((8,), ("rows",), axis_types=(AxisType.Auto,))
    total = lambda w, x: lax.psum(of_each_result(w, x)[0], "rows")
    loss = jax.shard_map(total, mesh=mesh, in_specs=(P(), P("rows")), out_specs=P())
    x = jnp.concatenate([x] * 4)
    check_close(jax.jit(plain_loops(jax.grad(loss)))(w, x), jax.jit(jax.grad(loss))(w, x))


def test_numbers_of_a_step_cross_together():
    """A step's numbers of one dtype are in one array; a key, and what has more numbers, stays by itself."""

    def layer(carry, x):
        a, b, c, i, j, v, key = x
        noise = jax.random.normal(key, (ROWS,))
        return carry + a * b, (a + c, [b * carry], i + j, i * j, v * noise, carry > 0, c[0])

    rng = np.random.default_rng()
    f32 = lambda *shape: jnp.asarray(rng.normal(size=(STEPS, *shape)), jnp.float32)
    counts = jnp.arange(STEPS)
    xs = f32(), f32(1), f32(1, 1), counts, 2 * counts, f32(ROWS), jax.random.split(jax.random.key(0), STEPS)
    run = lambda carry, xs: lax.scan(layer, carry, xs)
    check_close(jax.jit(plain_loops(run))(jnp.ones((1, 1)), xs), run(jnp.ones((1, 1)), xs))
    (loop,) = jax.make_jaxpr(plain_loops(run))(jnp.ones((1, 1)), xs).jaxpr.eqns
    (types,) = [eqn.outvars for eqn in loop.params["call_jaxpr"].eqns if eqn.primitive.name == "while"]
    written = [v.aval.str_short(short_dtypes=True) for v in types[2:]]  # behind the step and the carry
    assert {*written} == {f"bool[{STEPS},1,1]", f"f32[{STEPS},3]", f"f32[{STEPS},{ROWS}]", f"i32[{STEPS},2]"}
    (read,) = [eqn.invars for eqn in loop.params["call_jaxpr"].eqns if eqn.primitive.name == "while"]
    read = [v.aval.str_short(short_dtypes=True) for v in read[: -len(types)]]
    assert {*read} == {f"f32[{STEPS},3]", f"f32[{STEPS},{ROWS}]", f"i32[{STEPS},2]", f"key<fry>[{STEPS}]"}


@pytest.mark.parametrize("in_fp8", [False, True], ids=["bf16", "fp8"])
def test_a_scanned_model(in_fp8):
    """`te_jax.value_and_grad` of scanned layers: values, gradients and FP8 state of the scan, to the bit."""
    stack = nn.scan(
        te_flax.LayerNormMLP, {"params": 0, te.FP8_COLLECTION: 0}, split_rngs={"params": True}, length=STEPS
    )(intermediate_dim=64, dtype=jnp.bfloat16, return_layernorm_output=False)
    x = jnp.asarray(np.random.default_rng().normal(size=(32, 32)), jnp.bfloat16)
    found = []
    with te.autocast(in_fp8, te.recipe.DelayedScaling()):
        variables = stack.init(jax.random.key(0), x)
        loss = lambda variables, x: jnp.sum(stack.apply(variables, x)[0].astype(jnp.float32) ** 2)
        for least in (16, 2**62):
            loops._FILL_BYTES = least  # the fixture puts it back
            step = te.value_and_grad(loss)
            assert ("while[" in str(jax.make_jaxpr(step)(variables, x))) == (least == 16)
            found.append(step(variables, x))
    jax.tree.map(np.testing.assert_array_equal, *found)


# -- entries of a stack ---------------------------------------------------------------------------------------


def set_token(row, new, at):
    return row.at[at].set(new, mode="drop", unique_indices=True)


def set_row(row, new, at):
    return row.at[...].set(new)


def add_token(row, new, at):
    return row.at[at].add(new, mode="drop", unique_indices=True)


def apply_sine(row, new, at):
    return row.at[at].apply(jnp.sin, mode="drop", unique_indices=True)


def with_entries(stack, x, at, write=set_token, read=lambda old, new: new, **options):
    """Layers that write tokens x [b, w] into slots at [b, 1] of caches [b, t, w], and read the caches."""

    def layer(x, rows):
        new = {name: jax.vmap(write)(row, jnp.sin(x)[:, None], at) for name, row in rows.items()}
        new["keys"] = lax.with_sharding_constraint(new["keys"], SingleDeviceSharding(jax.devices()[0]))
        return jnp.tanh(x + jnp.sum(read(rows["keys"], new["keys"]) * new["values"], 1)), (jnp.sum(x), new)

    return lax.scan(layer, x, stack, **options)


def caches(slots=4, rows=3):
    rng = np.random.default_rng()
    stack = {
        name: jnp.asarray(rng.normal(size=(STEPS, rows, slots, WIDTH)), jnp.float32) for name in ("keys", "values")
    }
    return stack, jnp.asarray(rng.normal(size=(rows, WIDTH)), jnp.float32), jnp.asarray([[0], [slots - 1], [slots]])


@pytest.mark.parametrize(
    ("options", "in_place"),
    [
        (dict(), 2),
        (dict(reverse=True), 2),
        (dict(read=lambda old, new: old + new), 1),  # the old row would have to be read before
        (dict(write=set_row), 0),
        (dict(write=add_token), 0),
        (dict(write=apply_sine), 0),
    ],
    ids=["forwards", "backwards", "read", "whole", "added", "applied"],
)
def test_entries_are_written_into_the_stack(options, in_place):
    """One token is in no slot, and is dropped."""
    args, run = caches(), lambda *args: with_entries(*args, **options)
    assert str(jax.make_jaxpr(plain_loops(run))(*args)).count("name=_write") == in_place
    jax.tree.map(np.testing.assert_array_equal, jax.jit(plain_loops(run))(*args), jax.jit(run)(*args))


def test_a_donated_stack_stays_where_it_is():
    """Neither XLA nor the loop has a second one; a scan has."""
    args, memory = caches(slots=256), []
    for run in (plain_loops(with_entries), with_entries):
        compiled = jax.jit(lambda *args, run=run: run(*args), donate_argnums=0).lower(*args).compile()
        memory.append(compiled.memory_analysis().temp_size_in_bytes)
    one = args[0]["keys"].nbytes
    assert memory[0] < one < 2 * one <= memory[1]


def test_derivatives_of_written_entries():
    args = caches()
    tangent = lambda f: lambda stack, x, at: jax.jvp(lambda stack, x: f(stack, x, at), (stack, x), (stack, x))
    grad = lambda f: jax.grad(lambda stack, x, at: jnp.sum(f(stack, x, at)[0] ** 2), (0, 1))
    for of in (tangent, grad):
        check_close(jax.jit(of(plain_loops(with_entries)))(*args), jax.jit(of(with_entries))(*args))
