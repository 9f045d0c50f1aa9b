"""`te_jax.fp8_stats`: what state and probes tell of a tensor, against the same counted in numpy."""

from functools import partial

import flax
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
import pytest
from flax import linen as nn
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from quick_init import quick_init

import te_jax as te
import te_jax.flax as te_flax
from te_jax.layers.fp8_attention import attention_fp8
from te_jax.recipe import DelayedScaling, Float8BlockScaling, Float8CurrentScaling, Format
from te_jax.state import fp8
from te_jax.stats import TensorStats

L = 4
RECIPE = DelayedScaling(amax_history_len=L)
TYPES = {"fwd": ml_dtypes.float8_e4m3fn, "bwd": ml_dtypes.float8_e5m2}


def fractions(x, scale, direction="fwd"):
    """(beyond the largest FP8 value, lost of what is not 0) of x, in numpy."""
    x, dtype = np.asarray(x, np.float32), TYPES[direction]
    top = float(ml_dtypes.finfo(dtype).max)
    scaled = x * np.float32(scale)
    data = np.clip(scaled, -top, top).astype(dtype).astype(np.float32)
    return (np.abs(scaled) > top).mean(), ((x != 0) & (data == 0)).sum() / max((x != 0).sum(), 1)


def state_of(scale, amaxes, length=L):
    """The state of a tensor whose recorded amaxes are these, the newest one last."""
    history = np.zeros(length, np.float32)
    history[length - len(amaxes) :] = amaxes
    return np.float32([scale]), history


def metas(**states):
    return {f"{name}{end}": a for name, both in states.items() for end, a in zip(("_scale", "_amax_history"), both)}


def wide(rng, *shape, spread=5):
    """Numbers over many powers of 10, some 0."""
    x = rng.normal(size=shape) * np.exp(spread * rng.normal(size=shape)) * (rng.random(shape) > 0.1)
    return jnp.asarray(x, jnp.float32)


# -- of the state ------------------------------------------------------------------------------


def test_numbers_of_a_state():
    tensors = metas(
        x=state_of(2.0, [1, 2, 4]),
        grad_0=state_of(4.0, [8, 4]),  # E5M2 under HYBRID
        kernel=state_of(3.0, []),
        q=state_of(1.0, [1, 4, np.inf]),
        k=state_of(1.0, [np.nan, 2, 2]),
        o=state_of(7.0, [-2], length=1),  # slot 0 counts steps
    )
    got = jax.device_get(te.fp8_stats({"fp8_metas": {"a": tensors}}))
    assert set(got) == {f"a/{name}" for name in ("x", "grad_0", "kernel", "q", "k", "o")}
    nan, log448, log57344 = np.nan, np.log2(448), np.log2(57344)
    for name, amax, scale, headroom, trend, recorded in (
        ("x", 4, 2, log448 - 3, 1, 3),
        ("grad_0", 4, 4, log57344 - 4, -1, 2),
        ("kernel", nan, 3, nan, nan, 0),
        ("q", np.inf, 1, -np.inf, 2, 2),
        ("k", 2, 1, log448 - 1, 0, 2),
        ("o", nan, 7, nan, nan, 0),
    ):
        want = TensorStats(amax, scale, headroom, nan, nan, trend, recorded)
        np.testing.assert_allclose(got[f"a/{name}"], want, rtol=1e-6, atol=1e-6, err_msg=name)
        assert all(leaf.shape == () and leaf.dtype == np.float32 for leaf in got[f"a/{name}"])
    e4m3 = te.fp8_stats({"fp8_metas": tensors}, DelayedScaling(fp8_format=Format.E4M3))
    np.testing.assert_allclose(e4m3["grad_0"].headroom, log448 - 4, rtol=1e-6)


def test_trend_is_the_least_squares_slope(rng):
    """Of two layers with histories that are full, and filled in part."""
    history = np.exp(rng.normal(size=(2, 9))).astype(np.float32)
    history[:, 0], history[1, :5] = 0, 0
    scale = np.float32([[2.0], [3.0]])
    got = jax.jit(te.fp8_stats)({"fp8_metas": metas(x=(scale, history))})["x"]
    slopes = [np.polyfit(np.arange(n), np.log2(row[-n:]), 1)[0] for n, row in zip((8, 4), history)]
    np.testing.assert_allclose(got.trend, slopes, rtol=1e-4)
    np.testing.assert_allclose(got.recorded, [8, 4])
    np.testing.assert_allclose(got.headroom, np.log2(448 / (history[:, -1] * scale[:, 0])), rtol=1e-5)


def test_what_holds_the_state():
    collections = {"fp8_metas": {"dense": metas(x=state_of(2.0, [1, 2, 4]))}}
    want = te.fp8_stats(collections)
    for optimizer in (optax.sgd(0.1), optax.MultiSteps(optax.sgd(0.1), 2)):
        create = partial(te_flax.TrainState.create, apply_fn=None, params={"w": jnp.ones(2)}, tx=optimizer)
        state = create(collections=collections)
        for held in (state, state.fp8, ({"w": 0.0}, state.fp8), flax.core.freeze(collections)):
            jax.tree.map(np.testing.assert_array_equal, te.fp8_stats(held), want)
    with pytest.raises(
        ValueError, match="fp8_stats: this dict holds no collection 'fp8_metas'.*other recipes keep none"
    ):
        te.fp8_stats({"w": jnp.ones(2)})
    with pytest.raises(ValueError, match="fp8_probes: this TrainState holds no collection"):
        te.fp8_probes(create())
    with pytest.raises(ValueError, match="this tuple holds 2 collections"):
        te.fp8_stats((collections, collections))
    with pytest.raises(TypeError, match="fp8_stats: recipe is 'delayed'"):
        te.fp8_stats(collections, "delayed")


@pytest.mark.parametrize("recipe", [Float8CurrentScaling(), Float8BlockScaling()], ids=["current", "block"])
def test_recipes_without_state_are_refused(recipe):
    with te.autocast(True, recipe):
        variables = jax.eval_shape(te_flax.DenseGeneral(4).init, jax.random.key(0), jnp.ones((2, 4)))
    with pytest.raises(ValueError, match="fp8_stats.*keep none"):
        te.fp8_stats(variables)


def test_table():
    two = TensorStats(
        *(np.float32(pair) for pair in ([1, 3], [2, 4], [-1, 5], [0, 0.5], [0.25, np.nan], [1, -2], [7, 8]))
    )
    none = TensorStats(*np.float32([np.nan, 1, np.nan, np.nan, np.nan, np.nan, 0]))
    head, a, first, b, second = te.fp8_stats_table({"a/x": two, "b/kernel": none}).splitlines()
    assert (a, b) == ("a", "b")
    assert head.split() == ["tensor", "layers", *TensorStats._fields]
    assert first.split() == ["x", "2", "3", "2", "-1.00", "50.00%", "25.00%", "+1.000", "7"]
    assert second.split() == ["kernel", "1", "-", "1", "-", "-", "-", "-", "0"]
    assert len(head) == len(first) == len(second) <= 88
    below = te.fp8_stats_table({"a/x": none, "a/y": none, "x": none}).splitlines()[2:]
    assert [line.split()[0] for line in below] == ["x", "y", ".", "x"]
    few = two._replace(saturation=np.float32([1e-7, 0]), underflow=np.float32([0, 0]))
    assert te.fp8_stats_table({"x": few}).split()[-5:-2] == ["-1.00", "<0.01%", "0.00%"]


# -- of probes ---------------------------------------------------------------------------------


def compared(stats, name, x, scale, flips=0):
    """The fractions of a tensor are those of x; `flips` elements may lie on the other side of a rounding."""
    want = fractions(x, scale, fp8.direction_of(name))
    assert want[0] > 0 and want[1] > 0, f"the data of {name} shows nothing"
    got, nonzero = stats[name], max(np.count_nonzero(x), 1)
    np.testing.assert_allclose(got.saturation, want[0], rtol=1e-6, atol=flips / np.size(x), err_msg=name)
    np.testing.assert_allclose(got.underflow, want[1], rtol=1e-6, atol=flips / nonzero, err_msg=name)
    assert got.scale == np.float32(scale)


@pytest.mark.parametrize("out_of_fp8", [(True, False, False), (True, True, False)])
def test_a_tensor_that_no_gemm_reads_in_fp8(out_of_fp8):
    """Where the kernel is not differentiated, x is not quantized: nothing is known of it, least of all an amax of 0."""
    recipe = DelayedScaling(amax_history_len=3, override_linear_precision=out_of_fp8)
    model, x = te_flax.DenseGeneral(4), jnp.full((2, 4), 3.0)
    with te.autocast(True, recipe):
        collections, params = flax.core.pop(quick_init(model.init)(jax.random.key(0), x), "params")
        loss = lambda fp8: jnp.sum(model.apply({"params": params, **fp8}, x))
        stats = te.fp8_stats(jax.jit(jax.grad(loss))(te.fp8_probes(collections)))
    assert np.isnan(stats["x"].amax) and np.isnan(stats["x"].headroom)


def test_kernels_of_probed_variables_serve_a_pass_without_probes():
    model, x = te_flax.DenseGeneral(4), jnp.full((2, 4), 3.0)
    with te.autocast(True, RECIPE):
        collections, params = flax.core.pop(quick_init(model.init)(jax.random.key(0), x), "params")
        kernels = te_flax.fp8_kernels(model, {"params": params, **te.fp8_probes(collections)}, x)
        loss = lambda fp8, kernels: jnp.sum(model.apply({"params": params, **fp8, **kernels}, x))
        got, want = jax.jit(lambda fp8: [jax.grad(loss)(fp8, k) for k in (kernels, {})])(collections)
    jax.tree.map(np.testing.assert_array_equal, got, want)


def test_more_elements_than_an_integer_counts():
    meta = fp8.TensorMeta(jnp.ones(()), jnp.zeros(4))
    count = lambda x: fp8.observation(meta, jnp.ones(()), meta.scale, lambda: x, jnp.float8_e4m3fn)
    assert jax.eval_shape(count, jax.ShapeDtypeStruct((2**17, 2**15), jnp.bfloat16)).shape == (4,)


class Stack(nn.Module):
    """Dense layers, scanned."""

    @nn.compact
    def __call__(self, x):
        body = lambda module, x, _: (module(x), None)
        axes = {"params": 0, "fp8_metas": 0}
        scan = nn.scan(
            body, variable_axes=axes, split_rngs={"params": True}, length=3, metadata_params={nn.PARTITION_NAME: None}
        )
        return scan(te_flax.DenseGeneral(x.shape[-1], use_bias=False, name="dense"), x, None)[0]


def test_fractions_of_a_dense_layer_and_nothing_else_changes(rng):
    """Tensors that saturate, that underflow, with inf and NaN, zero rows and odd sizes; under jit."""
    scales = {"x": 30.0, "kernel": 0.02, "grad": 3e3}
    tensors = {"x": wide(rng, 7, 33), "kernel": wide(rng, 33, 5), "grad": wide(rng, 7, 5, spread=8)}
    tensors["x"] = tensors["x"].at[3].set(0).at[0, 0].set(jnp.inf).at[1, 1].set(jnp.nan)
    model = te_flax.DenseGeneral(5, use_bias=False)
    state = {"fp8_metas": metas(**{name: state_of(scale, []) for name, scale in scales.items()})}

    @jax.jit
    def grads(state):
        def loss(state, x, kernel):
            return jnp.sum(model.apply({"params": {"kernel": kernel}, **state}, x) * tensors["grad"])

        with te.autocast(True, RECIPE):
            return jax.grad(loss, (0, 1, 2))(state, tensors["x"], tensors["kernel"])

    probed = grads(te.fp8_probes(state))
    got = te.fp8_stats(probed)
    for name, scale in scales.items():
        compared(got, name, tensors[name], scale)
    for name in ("kernel", "grad"):
        assert got[name].amax == np.abs(tensors[name]).max() and got[name].headroom < 0
    assert not np.isfinite(got["x"].amax)
    plain = grads(state)
    without = {name: leaf for name, leaf in probed[0]["fp8_metas"].items() if not name.endswith("_probe")}
    jax.tree.map(np.testing.assert_array_equal, ({"fp8_metas": without}, *probed[1:]), plain)
    jax.tree.map(np.testing.assert_array_equal, te.update_fp8_metas(probed[0]), probed[0])


def test_fractions_of_what_kernels_compute(rng):
    """LayerNormMLP: the norm, the activation and its gradient are quantized where they are computed, from f32."""
    scales = dict(x_0=40.0, kernel_0=5.0, grad_0=1e-3, x_1=0.02, kernel_1=3.0, grad_1=50.0)
    x, dy = wide(rng, 6, 40, spread=2), wide(rng, 6, 40, spread=8)
    params = {
        "scale": wide(rng, 40, spread=2),
        "wi_kernel": wide(rng, 40, 2, 17, spread=2),
        "wo_kernel": wide(rng, 17, 40),
    }
    fields = dict(intermediate_dim=17, activations=("silu", "linear"), layernorm_type="rmsnorm", use_bias=False)
    model = te_flax.LayerNormMLP(**fields, intermediate_dropout_rate=0.0)
    state = {"fp8_metas": metas(**{name: state_of(scale, []) for name, scale in scales.items()})}

    @jax.jit
    def stats(state):
        loss = lambda state: jnp.sum(model.apply({"params": params, **state}, x)[0] * dy)
        with te.autocast(True, RECIPE):
            return te.fp8_stats(jax.grad(loss)(te.fp8_probes(state)))

    @jax.jit
    def tensors():
        def rounded(value, name):
            dtype = TYPES[fp8.direction_of(name)]
            top = float(ml_dtypes.finfo(dtype).max)
            return jnp.clip(value * scales[name], -top, top).astype(dtype).astype(jnp.float32) / scales[name]

        ln = x * jax.lax.rsqrt(jnp.mean(x**2, -1, keepdims=True) + 1e-6) * params["scale"]
        z = jnp.einsum("bh,haf->baf", rounded(ln, "x_0"), rounded(params["wi_kernel"], "kernel_0"))
        act, vjp = jax.vjp(lambda z: jax.nn.silu(z[:, 0]) * z[:, 1], z)
        (dz,) = vjp(rounded(dy, "grad_1") @ rounded(params["wo_kernel"], "kernel_1").T)
        kernels = {"kernel_0": params["wi_kernel"], "kernel_1": params["wo_kernel"]}
        return dict(x_0=ln, grad_0=dz, x_1=act, grad_1=dy, **kernels)

    got = jax.device_get(stats(state))
    for name, value in tensors().items():
        compared(got, name, value, scales[name], flips=1)


def test_layers_and_uses(rng):
    """Scanned layers have numbers of their own; of uses that share a state the largest count."""
    x, dy = wide(rng, 5, 16), wide(rng, 2, 5, 16)
    with te.autocast(True, RECIPE):
        variables = quick_init(Stack().init)(jax.random.key(0), x)
    own, params = flax.core.pop(variables, "params")
    own["fp8_metas"]["dense"]["x_scale"] = jnp.asarray([[1e-3], [30.0], [1e3]])

    def loss(state, x, dy):
        return jnp.sum(Stack().apply({"params": params, **state}, x) * dy)

    @jax.jit
    def of_scan(state):
        with te.autocast(True, RECIPE):
            return te.fp8_stats(jax.grad(loss)(te.fp8_probes(state), x, dy[0]))

    @jax.jit
    def of_microbatches(state):
        state, run = te.fp8_probes(state), te.value_and_grad(loss)
        both = lambda state: sum(loss(state, x * factor, d) for factor, d in zip((1.0, 50.0), dy))
        with te.autocast(True, RECIPE):
            each = [run(state, x * factor, d)[1] for factor, d in zip((1.0, 50.0), dy)]
            one_loss = te.value_and_grad(both)(state)[1]
        joined = te.max_fp8_metas(state, jax.tree.map(lambda *leaves: jnp.stack(leaves), *each))
        return [te.fp8_stats(grads) for grads in (*each, joined, one_loss)]

    scanned = of_scan(own)["dense/x"]
    assert scanned.amax.shape == (3,) and scanned.amax[0] == np.abs(x).max()
    np.testing.assert_allclose(scanned.scale, [1e-3, 30, 1e3])
    np.testing.assert_allclose(scanned.saturation[0], fractions(x, 1e-3)[0])
    np.testing.assert_allclose(scanned.underflow[0], fractions(x, 1e-3)[1])
    assert (np.diff(scanned.saturation) > 0).all() and scanned.headroom[2] < scanned.headroom[0]

    *each, joined, one_loss = jax.device_get(of_microbatches(own))
    for name in joined:
        for field in ("amax", "saturation", "underflow"):
            parts = [getattr(stats[name], field) for stats in each]
            assert name != "dense/x" or (np.minimum(*parts) > 0).any(), "a sum would do, too"
            for together in (joined, one_loss):
                np.testing.assert_array_equal(getattr(together[name], field), np.maximum(*parts))


@pytest.mark.parametrize("kind", ["auto", "explicit", "manual"])
def test_shards(kind, rng):
    """On a mesh an array is counted as a whole, inside of `shard_map` too."""
    x, kernel = wide(rng, 8, 16), wide(rng, 16, 4)
    axis_type = AxisType.Explicit if kind == "explicit" else AxisType.Auto
    mesh = jax.make_mesh((4,), ("dp",), axis_types=(axis_type,))
    state = te.fp8_probes({"fp8_metas": metas(**{name: state_of(2.0, []) for name in ("x", "kernel", "grad")})})

    def grads(state, x, kernel):
        def loss(state):
            return jnp.sum(
                te_flax.DenseGeneral(4, use_bias=False).apply({"params": {"kernel": kernel}, **state}, x) ** 2
            )

        with te.autocast(True, RECIPE):
            return jax.grad(loss)(state)

    with jax.set_mesh(mesh):
        run = jax.shard_map(grads, in_specs=(P(), P("dp"), P()), out_specs=P()) if kind == "manual" else grads
        placed = jax.device_put(x, NamedSharding(mesh, P("dp")))
        got = jax.device_get(jax.jit(lambda *args: te.fp8_stats(run(*args)))(state, placed, kernel))
    compared(got, "kernel", kernel, 2.0)
    np.testing.assert_allclose((got["x"].saturation, got["x"].underflow), fractions(x, 2.0), rtol=1e-6)
    assert got["x"].amax == np.abs(x).max()


def test_attention_in_fp8(rng):
    """Only the amax is known of what the kernel computes and quantizes itself, nothing of what stays out of FP8."""
    q, k, v, dout = (wide(rng, 1, 16, 2, 16, spread=3).astype(jnp.bfloat16) for _ in range(4))
    recipe = DelayedScaling(amax_history_len=L, fp8_dpa=True)
    names = fp8.AttentionMetas._fields
    scales = dict.fromkeys(names, 1.0) | dict(q=0.5, k=2.0, v=20.0)
    state = {"fp8_metas": metas(**{name: state_of(scale, []) for name, scale in scales.items()})}

    @jax.jit
    def stats(state):
        def loss(state):
            leaves = (("_scale", "_amax_history", "_probe"), state["fp8_metas"])
            of = lambda name: [leaves[1][name + end] for end in leaves[0]]
            observed = lambda name, scale, history, probe: fp8.observe(
                scale, history, recipe, fp8.direction_of(name), probe
            )
            each = fp8.AttentionMetas(*(observed(name, *of(name)) for name in names))
            return jnp.sum(attention_fp8(q, k, v, recipe=recipe, metas=each, backward="bf16") * dout)

        return te.fp8_stats(jax.grad(loss)(te.fp8_probes(state)))

    got = jax.device_get(stats(state))
    for name, x in (("q", q), ("k", k), ("v", v)):
        compared(got, name, x.astype(jnp.float32), scales[name])
    assert got["o"].amax > 0 and np.isnan(got["o"].saturation) and np.isnan(got["o"].underflow)
    assert all(np.isnan(got[name][i]) for name in ("do", "dq", "dp") for i in (0, 3, 4))
