"""Functional layers against the same mathematics written out: quantize, multiply, dequantize; and under transforms."""

import itertools
import warnings
from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from layer_cases import TENSORS, close, data, emulated, fresh_state, observed, reference_norm, with_gradients

import te_jax as te
from te_jax.layers import dense, layernorm, layernorm_dense, layernorm_mlp, norm_mlp
from te_jax.ops.norm import norm_backward, norm_fwd
from te_jax.recipe import DelayedScaling, Format

RECIPE = DelayedScaling(amax_history_len=4)
PAYS_FROM = norm_mlp._PAYS_FROM  # tests begin without it


OVERRIDES = list(itertools.product([False, True], repeat=3))


@pytest.mark.parametrize("override", OVERRIDES, ids=str)
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16], ids=["f32", "bf16"])
def test_dense_equals_emulation(override, dtype, rng):
    recipe = DelayedScaling(amax_history_len=4, override_linear_precision=override)
    x, dy = data(rng, (3, 5, 48), (3, 5, 2, 20), dtype=dtype)
    w, bias = data(rng, (48, 2, 20), (2, 20))
    scales = dict(x=100.0, kernel=90.0, grad=3000.0)
    state = {t: (jnp.full(1, s), jnp.zeros(4)) for t, s in scales.items()}
    fn = lambda x, w, bias, state: dense(x, w, bias, recipe=recipe, metas=observed(state, recipe))
    y, (dx, dw, dbias, new) = with_gradients(fn, x, w, bias, state, dy=dy)
    want = emulated(x, w, dy, scales, recipe)
    close(y, want[0] + np.asarray(bias, np.float32), dtype)
    close(dx, want[1], dtype)
    close(dw, want[2], dtype if override[2] else jnp.float32)
    close(dbias, np.asarray(dy, np.float32).sum((0, 1)))
    fprop, dgrad, wgrad = (not o for o in override)
    for t, a, used in (("x", x, fprop or wgrad), ("kernel", w, fprop or dgrad), ("grad", dy, dgrad or wgrad)):
        seen = float(np.abs(np.asarray(a, np.float32)).max()) if used else 0.0
        np.testing.assert_array_equal(new[t][1], np.float32([0, 0, 0, seen]))
        assert float(new[t][0][0]) == pytest.approx(
            (57344 if t == "grad" else 448) / seen if used else scales[t], rel=1e-6
        )


def test_dense_contracts_several_axes(rng):
    x, w, dy = data(rng, (4, 6, 8), (6, 8, 10), (4, 10))
    fn = lambda x, w, s: dense(x, w, contract=2, recipe=RECIPE, metas=observed(s, RECIPE))
    y, (dx, dw, _) = with_gradients(fn, x, w, fresh_state(), dy=dy)
    for got, want in zip((y, dx, dw), emulated(x, w, dy, dict.fromkeys(TENSORS, 1.0), RECIPE, contract=2)):
        close(got, want)
    close(dense(x, w, contract=2), jnp.tensordot(x, w, 2))


@pytest.mark.parametrize("shape", [(1, 1, 1), (7, 199, 33), (0, 16, 16), (3, 16, 1)], ids=str)
def test_any_size(shape, rng):
    m, k, n = shape
    x, w, dy = data(rng, (m, k), (k, n), (m, n))
    fn = lambda x, w: dense(x, w, recipe=RECIPE, metas=observed(fresh_state(), RECIPE))
    y, grads = with_gradients(fn, x, w, dy=dy)
    for got, want in zip((y, *grads), emulated(x, w, dy, dict.fromkeys(TENSORS, 1.0), RECIPE)):
        close(got, want)


@pytest.mark.parametrize("norm", ["layernorm", "rmsnorm"])
@pytest.mark.parametrize("zero_centered", [False, True])
def test_layernorm_gradients(norm, zero_centered, rng):
    x, gamma, beta, dy = data(rng, (4, 5, 24), (24,), (24,), (4, 5, 24))
    beta = None if norm == "rmsnorm" else beta
    ours = lambda *a: layernorm(*a, norm=norm, zero_centered_gamma=zero_centered)
    theirs = lambda *a: reference_norm(*a, norm, zero_centered)
    got, want = (with_gradients(fn, x, gamma, beta, dy=dy) for fn in (ours, theirs))
    jax.tree.map(close, got, want)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16], ids=["f32", "bf16"])
def test_norm_backward_adds_the_residual_gradient(dtype, rng):
    """In f32, before the one rounding: half an ulp of the sum (and f32 noise), also where the two nearly cancel."""
    x, dy, dres, gamma, beta = data(rng, (3, 5, 48), (3, 5, 48), (3, 5, 48), (48,), (48,), dtype=dtype)
    kind, wide = dict(rms=False, zero_centered=False), lambda a: a.astype(jnp.float32)

    @jax.jit
    def run(x, dy, dres, gamma, beta):
        of_norm = dict(outputs=("y", "mean", "rstd"), eps=1e-6, dtype=jnp.dtype(jnp.float8_e4m3fn))
        _, *stats = norm_fwd(x, gamma, beta, None, None, None, **of_norm, **kind)
        got = norm_backward(dy, x, *stats, gamma, beta, dres=dres, **kind)
        return got, norm_backward(wide(dy), wide(x), *stats, gamma, beta, **kind)

    got, alone = run(x, dy, dres, gamma, beta)
    half_ulp = 2.0**-8 if dtype == jnp.bfloat16 else 0.0
    np.testing.assert_allclose(wide(got[0]), alone[0] + wide(dres), rtol=half_ulp, atol=1e-5)
    jax.tree.map(lambda a, b: close(a, b, dtype), got[1:], alone[1:])


@pytest.mark.parametrize("norm", ["layernorm", "rmsnorm"])
@pytest.mark.parametrize("with_ln_out", [False, True])
@pytest.mark.parametrize("override", [(False,) * 3, (True, False, False), (False, False, True), (True,) * 3], ids=str)
def test_layernorm_dense_equals_emulation(norm, with_ln_out, override, rng):
    recipe = DelayedScaling(amax_history_len=4, override_linear_precision=override)
    x, w, gamma, beta, bias = data(rng, (3, 5, 24), (24, 2, 8), (24,), (24,), (2, 8))
    beta = None if norm == "rmsnorm" else beta
    scales = dict(x=120.0, kernel=90.0, grad=3000.0)
    state = {t: (jnp.full(1, s), jnp.zeros(4)) for t, s in scales.items()}

    def ours(x, w, gamma, beta, bias, state):
        metas = observed(state, recipe)
        return layernorm_dense(
            x, w, gamma, beta, bias, norm=norm, return_layernorm_output=with_ln_out, recipe=recipe, metas=metas
        )

    dy, dln = data(rng, (3, 5, 2, 8), x.shape)
    (y, ln_out), grads = with_gradients(ours, x, w, gamma, beta, bias, state, dy=(dy, dln if with_ln_out else None))
    dx, dw, dgamma, dbeta, dbias, new = grads

    @jax.jit
    def wanted(x, w, gamma, beta, dy, dln):
        ln_out, norm_vjp = jax.vjp(lambda *a: reference_norm(*a, norm, False), x, gamma, beta)
        y, dnorm, dw = emulated(ln_out, w, dy, scales, recipe)
        return y, dw, ln_out, norm_vjp(dnorm + dln if with_ln_out else dnorm)

    want_y, want_dw, want_ln, (want_dx, want_dgamma, want_dbeta) = wanted(x, w, gamma, beta, dy, dln)
    close(y, want_y + bias)
    close(dw, want_dw)
    close(dbias, dy.sum((0, 1)))
    close(dx, want_dx)
    close(dgamma, want_dgamma)
    if beta is not None:
        close(dbeta, want_dbeta)
    assert (ln_out is None) != with_ln_out
    if with_ln_out:
        close(ln_out, want_ln)
    seen = 0.0 if override == (True,) * 3 else float(jnp.abs(want_ln).max())
    assert float(new["x"][1][-1]) == pytest.approx(seen, rel=1e-6)


def mlp(params, state, x, recipe=RECIPE):
    metas = [None if recipe is None else observed(s, recipe) for s in state]
    h, _ = layernorm_dense(
        x, params["wi"], params["gamma"], params["beta"], params["bi"], recipe=recipe, metas=metas[0]
    )
    return dense(jax.nn.gelu(h), params["wo"], params["bo"], recipe=recipe, metas=metas[1])


def mlp_case(rng, batch=8, seq=8):
    wi, wo, gamma, beta, bi, bo, x, t = data(
        rng, (16, 32), (32, 16), (16,), (16,), (32,), (16,), (batch, seq, 16), (batch, seq, 16)
    )
    params = dict(wi=wi, wo=wo, gamma=gamma, beta=beta, bi=bi, bo=bo)
    return params, [fresh_state(), fresh_state()], x, t


def mlp_step(params, state, x, t, recipe=RECIPE):
    """Two steps' worth of gradients: the second runs on the scales that the first one set."""
    loss = lambda params, state, x: jnp.mean((mlp(params, state, x, recipe) - t) ** 2)
    _, state = jax.grad(loss, (0, 1))(params, state, x)
    return jax.value_and_grad(loss, (0, 1, 2))(params, state, x)


@cache
def on_one_device(recipe):
    """`mlp_step` of the fixture's numbers."""
    return jax.jit(partial(mlp_step, recipe=recipe))(*mlp_case(np.random.default_rng(0)))


def state_close(got, want):
    """FP8 steps double a relative difference of 2**-24 into 2**-3 of one element: sums over many stay near."""
    for g, w in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(g, w, rtol=2e-3, atol=2e-3 * np.abs(w).max(initial=1e-6))


PLACEMENTS = {
    "dp": (dict(), P("a")),
    "dp2": (dict(), P(("a", "b"))),
    "fsdp": (dict(wi=P("a"), wo=P("a")), P("a")),
    "tp": (dict(wi=P(None, "b"), wo=P("b"), bi=P("b")), P("a")),
    "sp": (dict(), P("a", "b")),
}


HIGH = DelayedScaling(amax_history_len=4, override_linear_precision=(True,) * 3)


@pytest.mark.parametrize("placement", PLACEMENTS)
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=["auto", "explicit"])
@pytest.mark.parametrize("recipe", [RECIPE, HIGH, None], ids=["fp8", "overridden", "plain"])
def test_sharded_step_equals_one_device(placement, kind, recipe, rng, on_host):
    if recipe is not RECIPE and kind == AxisType.Auto:
        pytest.skip("plain products of XLA on Auto axes are XLA's")
    params, state, x, t = mlp_case(rng)
    step = partial(mlp_step, recipe=recipe)
    want = on_one_device(recipe)
    mesh = jax.make_mesh((4, 2), ("a", "b"), axis_types=(kind, kind))
    weights, batch = PLACEMENTS[placement]
    with jax.set_mesh(mesh):
        put = lambda a, s: jax.device_put(a, NamedSharding(mesh, s))
        params = {n: put(a, weights.get(n, P())) for n, a in params.items()}
        got = jax.jit(step)(params, jax.device_put(state, NamedSharding(mesh, P())), put(x, batch), put(t, batch))
    state_close(got, want)


def test_shard_map_step_equals_one_device(rng, on_host):
    """check_vma=True: gradients of replicated parameters are summed, amaxes maximised, without a word from the user."""
    params, state, x, t = mlp_case(rng)
    want = on_one_device(RECIPE)
    mesh = jax.make_mesh((8,), ("a",), axis_types=(AxisType.Auto,))

    def step(params, state, x, t):
        loss = lambda params, state, x: lax.pmean(jnp.mean((mlp(params, state, x) - t) ** 2), "a")
        _, state = jax.grad(loss, (0, 1))(params, state, x)
        return jax.value_and_grad(loss, (0, 1, 2))(params, state, x)

    specs = dict(in_specs=(P(), P(), P("a"), P("a")), out_specs=(P(), (P(), P(), P("a"))))
    state_close(jax.jit(jax.shard_map(step, mesh=mesh, **specs))(params, state, x, t), want)


def test_shard_map_without_vma_is_refused(rng):
    """Nothing would tell that the state is shared, and each device would train its own."""
    params, state, x, t = mlp_case(rng)
    mesh = jax.make_mesh((8,), ("a",), axis_types=(AxisType.Auto,))
    specs = dict(in_specs=(P(), P(), P("a"), P("a")), out_specs=P(), check_vma=False)
    with pytest.raises(ValueError, match=r"need shard_map\(check_vma=True\)"):
        jax.eval_shape(jax.shard_map(lambda *a: mlp_step(*a)[1][1], mesh=mesh, **specs), params, state, x, t)


def test_stages_keep_their_own_amax(rng):
    """Along pp_resource no statistics are shared, also where autocast was left before the backward pass."""
    mesh = jax.make_mesh((4,), ("pp",), axis_types=(AxisType.Auto,))
    (w,) = data(rng, (16, 16))

    def step(state, x):
        def loss(state):
            with te.autocast(True, RECIPE, te.MeshResource(pp_resource="pp")):
                return dense(x, w, recipe=RECIPE, metas=observed(state, RECIPE)).sum()

        varying = jax.tree.map(lambda a: lax.pcast(a, "pp", to="varying"), state)
        return jax.grad(loss)(varying)["x"][1][-1:]

    x = jnp.ones((4, 16)) * jnp.arange(1.0, 5.0)[:, None]
    newest = jax.jit(jax.shard_map(step, mesh=mesh, in_specs=(P(), P("pp")), out_specs=P("pp")))(fresh_state(), x)
    np.testing.assert_array_equal(newest, [1, 2, 3, 4])


def test_scan_and_remat_equal_the_loop(rng):
    """Stacked layers, each with its own state, scanned with and without remat."""
    cases = [mlp_case(rng) for _ in range(3)]
    x, t = cases[0][2:]
    stack = lambda trees: jax.tree.map(lambda *a: np.stack(a), *trees)
    params, state = stack([c[0] for c in cases]), stack([c[1] for c in cases])

    def loop(params, state, x):
        for i in range(3):
            x = x + mlp(*jax.tree.map(lambda a, i=i: a[i], (params, state)), x)
        return jnp.mean((x - t) ** 2)

    def scanned(body):
        return lambda params, state, x: jnp.mean((lax.scan(body, x, (params, state))[0] - t) ** 2)

    body = lambda x, layer: (x + mlp(*layer, x), None)
    ways = loop, scanned(body), scanned(jax.checkpoint(body))
    want, *got = jax.jit(lambda *args: [jax.grad(way, (0, 1, 2))(*args) for way in ways])(params, state, x)
    for each in got:
        state_close(each, want)


def test_vmap_over_layers(rng):
    """Parameters, state and data mapped: as many layers side by side."""
    cases = [mlp_case(rng, 2, 4) for _ in range(3)]
    params, state, x, t = jax.tree.map(lambda *a: np.stack(a), *cases)
    got, alone = jax.jit(jax.vmap(mlp_step))(params, state, x, t), jax.jit(mlp_step)
    for i, case in enumerate(cases):
        state_close(jax.tree.map(lambda a, i=i: a[i], got), alone(*case))


def test_checkpoint_name_saves_the_quantized_tensors(rng):
    params, _, x, _ = mlp_case(rng)

    def loss(w, x):
        return dense(x, w, recipe=RECIPE, metas=observed(fresh_state(), RECIPE), checkpoint="fp8").sum()

    policy = jax.checkpoint_policies.save_only_these_names("fp8")
    text = str(jax.make_jaxpr(jax.grad(jax.checkpoint(loss, policy=policy)))(params["wi"], x))
    assert text.count("name=fp8") >= 2
    plain = str(jax.make_jaxpr(jax.grad(jax.checkpoint(loss)))(params["wi"], x))
    assert text.count("te_quantize") < plain.count("te_quantize")  # x and w are not quantized again


def test_inference_quantizes_one_layout(rng):
    """Without gradients only what fprop reads is written: x as it is, w transposed."""
    x, w = data(rng, (4, 16), (16, 32))
    fn = lambda x, w: dense(x, w, recipe=RECIPE, metas=observed(fresh_state(), RECIPE))
    text = str(jax.make_jaxpr(fn)(x, w))
    for layout in ("data", "data_t"):
        assert f"outputs=('{layout}', 'amax', 'scale_inv')" in text
    assert "'data', 'data_t'" not in text


@pytest.mark.parametrize("fp8_format", [Format.HYBRID, Format.E4M3])
def test_formats(fp8_format, rng):
    recipe = DelayedScaling(fp8_format=fp8_format, amax_history_len=4)
    x, w = data(rng, (4, 16), (16, 32))
    loss = lambda x, w: dense(x, w, recipe=recipe, metas=observed(fresh_state(), recipe)).sum()
    assert ("f8_e5m2" in str(jax.make_jaxpr(jax.grad(loss))(x, w))) == (fp8_format is Format.HYBRID)


@pytest.mark.parametrize(
    "error,text,call",
    [
        (
            ValueError,
            r"last axes of x are \(8,\), but the first of kernel are \(9,\)",
            lambda o: dense(o(4, 8), o(9, 3)),
        ),
        (TypeError, "x is int32", lambda o: dense(o(4, 8).astype(int), o(8, 3))),
        (ValueError, r"bias is \(4,\), but kernel's features are \(3,\)", lambda o: dense(o(4, 8), o(8, 3), o(4))),
        (ValueError, "metas is None under DelayedScaling", lambda o: dense(o(4, 8), o(8, 3), recipe=RECIPE)),
        (ValueError, "contract is 3", lambda o: dense(o(4, 8), o(8, 3), contract=3)),
        (ValueError, "norm is 'batchnorm'", lambda o: layernorm(o(4, 8), o(8), norm="batchnorm")),
        (ValueError, "RMSNorm has no beta", lambda o: layernorm(o(4, 8), o(8), o(8), norm="rmsnorm")),
        (ValueError, "axis `h` is 7 in gamma", lambda o: layernorm(o(4, 8), o(7), o(8))),
    ],
)
def test_refused(error, text, call):
    with pytest.raises(error, match=text):
        call(lambda *shape: jnp.ones(shape))


def test_training_that_is_too_small_for_fp8_is_told(monkeypatch):
    monkeypatch.setattr("te_jax.core.check.told", set())
    monkeypatch.setattr("te_jax.layers.norm_mlp._PAYS_FROM", PAYS_FROM)
    monkeypatch.setattr("te_jax.core.extension.is_built", lambda: True)
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    like = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.bfloat16)
    current = te.recipe.Float8CurrentScaling()

    def trace(rows, wrt=(0, 1, 2), recipe=current):
        loss = lambda x, wi, wo: jnp.sum(layernorm_mlp(x, jnp.ones(32), None, wi, wo, recipe=recipe, norm="rmsnorm"))
        jax.eval_shape(jax.grad(loss, wrt) if wrt else loss, like(rows, 32), like(32, 1, 8), like(8, 32))

    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        trace(2**16)  # large enough
        trace(0)
        trace(7, 0)  # frozen kernels
        trace(7, ())
        trace(7, recipe=te.recipe.Float8CurrentScaling(override_linear_precision=(True, True, True)))
        with jax.default_device(jax.devices("cpu")[0]):
            trace(7)
    with pytest.warns(UserWarning, match=r"x is bfloat16\[7,32\]: a layer with less than 2\*\*21 elements .*FP8 off"):
        trace(7)
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        trace(9)  # once
