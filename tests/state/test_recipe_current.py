"""Current scaling: layers and modules against the same mathematics in plain JAX, where every tensor goes through FP8
with its own amax; under transforms. Its law: test_recipe.py; on meshes: test_recipe_current_mesh.py."""

import functools
import math

import flax
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from jax import lax
from jaxprs import equations
from layer_cases import close, data, fresh_state, observed, qdq, reference_norm
from quick_init import quick_init
from recipe_cases import near, own, results

import te_jax as te
import te_jax.flax as te_flax
from te_jax.layers import Projection, attention_fp8, dense, layernorm_dense, layernorm_mlp
from te_jax.ops.activation import activation
from te_jax.recipe import DelayedScaling, Float8CurrentScaling, Format

RECIPE = Float8CurrentScaling()
OPTIONS = [RECIPE, Float8CurrentScaling(Format.E4M3, power_2_scale=True, amax_epsilon=0.5)]
DTYPES = [jnp.float32, jnp.bfloat16]
KEY = jax.random.key(0)
options = pytest.mark.parametrize("recipe", OPTIONS, ids=["default", "power_2"])
dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=["f32", "bf16"])


# -- layers --------------------------------------------------------------------------------------------------


@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def emulated_dot(x, w, contract, recipe):
    """x [*B, *C] . w [*C, *F] -> f32[*B, *F]; x, w and the gradient of the result go through FP8."""
    return jnp.tensordot(own(x, "fwd", recipe), own(w, "fwd", recipe), contract)


def _emulated_bwd(contract, recipe, residuals, dy):
    x, w = residuals
    dy = own(dy, "bwd", recipe)
    lead, features = x.ndim - contract, w.ndim - contract
    axes = tuple(range(dy.ndim - features, dy.ndim)), tuple(range(contract, w.ndim))
    dx = jnp.tensordot(dy, own(w, "fwd", recipe), axes).astype(x.dtype)
    dw = jnp.tensordot(own(x, "fwd", recipe), dy, (tuple(range(lead)),) * 2).astype(w.dtype)
    return dx, dw


emulated_dot.defvjp(lambda x, w, *static: (emulated_dot(x, w, *static), (x, w)), _emulated_bwd)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1, 2))
def rounded(x, forward, backward):
    """f32 x, rounded to the type `forward`, its gradient to `backward`: what is an array of that type in the layer."""
    return jax.lax.optimization_barrier(x.astype(forward)).astype(jnp.float32)  # XLA might drop both casts


rounded.defvjp(
    lambda x, forward, backward: (rounded(x, forward, backward), None),
    lambda forward, backward, _, g: (jax.lax.optimization_barrier(g.astype(backward)).astype(jnp.float32),),
)


def emulated_dense(x, kernel, bias=None, residual=None, *, contract=1, recipe=None, dtype=None, **_):
    """x of its type, or f32 that is rounded nowhere; -> dtype, that of x if not given."""
    y = emulated_dot(x, kernel, contract, recipe)
    for a in (bias, residual):
        y = y if a is None else y + a.astype(jnp.float32)
    return y.astype(dtype or x.dtype)


def emulated_norm_dense(
    x, kernel, gamma, beta=None, bias=None, *, norm="layernorm", zero_centered_gamma=False, epsilon=1e-6,
    return_layernorm_output=False, return_input=False, also=(), recipe=None, dtype=None, **_,
):  # fmt: skip
    x32 = x.astype(jnp.float32)
    normed = reference_norm(x32, gamma.astype(jnp.float32), beta, norm, zero_centered_gamma, epsilon)
    normed = rounded(normed, jnp.float32, x.dtype)
    each = [(kernel, bias), *((p.kernel, p.bias) for p in also)]
    y = tuple(emulated_dense(normed, *p, recipe=recipe, dtype=dtype or x.dtype) for p in each)
    out = y if also else y[0], normed.astype(x.dtype) if return_layernorm_output else None
    return (*out, x32.astype(x.dtype)) if return_input else out


def emulated_norm_mlp(
    x, gamma, beta, wi, wo, wi_bias=None, wo_bias=None, *, activations=("gelu",), activation_params=None,
    residual=False, recipe=None, norm="layernorm", zero_centered_gamma=False, epsilon=1e-6, **_,
):  # fmt: skip
    x32, of_norm = x.astype(jnp.float32), dict(norm=norm, zero_centered_gamma=zero_centered_gamma, epsilon=epsilon)
    normed = rounded(reference_norm(x32, gamma.astype(jnp.float32), beta, *of_norm.values()), jnp.float32, x.dtype)
    z = rounded(emulated_dense(normed, wi, wi_bias, recipe=recipe), x.dtype, jnp.float32)
    a = rounded(activation(z, activations, activation_params), jnp.float32, x.dtype)
    residual = (x32 if residual else None) if isinstance(residual, bool) else residual
    return emulated_dense(a, wo, wo_bias, residual, recipe=recipe, dtype=x.dtype)


@options
@dtypes
def test_dense(recipe, dtype, rng):
    """Two axes are contracted. bf16: one rounding of what is equal up to the order of sums."""
    x, residual = data(rng, (5, 6, 8), (5, 2, 20), dtype=dtype)
    w, bias = data(rng, (6, 8, 2, 20), (2, 20))
    run = lambda layer: results(lambda *a: layer(*a, contract=2, recipe=recipe), x, w * 0.01, bias, residual)
    jax.tree.map(functools.partial(close, dtype=dtype), run(dense), run(emulated_dense))


@options
@dtypes
@pytest.mark.parametrize("norm", ["layernorm", "rmsnorm"])
def test_layernorm_dense(norm, dtype, recipe, rng):
    x, gamma, beta = data(rng, (3, 5, 24), (24,), (24,), dtype=dtype)
    w, bias, w2 = data(rng, (24, 20), (20,), (24, 2, 6))
    beta = None if norm == "rmsnorm" else beta

    def layer(fn):
        def run(x, w, gamma, beta, bias, w2):
            options = dict(norm=norm, return_layernorm_output=True, return_input=True, recipe=recipe)
            (y, y2), ln_out, x = fn(x, w, gamma, beta, bias, also=[Projection(w2, None, None)], **options)
            parts = (y, y2.reshape(3, 5, -1), ln_out, x)
            return jnp.concatenate([p.astype(x.dtype) for p in parts], -1)

        return results(run, x, w, gamma, beta, bias, w2)

    jax.tree.map(near, layer(layernorm_dense), layer(emulated_norm_dense))


@options
@dtypes
@pytest.mark.parametrize("names", [("gelu",), ("silu", "linear")], ids="-".join)
def test_layernorm_mlp(names, dtype, recipe, rng):
    x, gamma, beta, wi, wo = data(rng, (3, 5, 24), (24,), (24,), (24, len(names), 20), (20, 24), dtype=dtype)
    bi, bo = data(rng, (len(names), 20), (24,), dtype=dtype)
    run = lambda fn: results(
        lambda *a: fn(*a, activations=names, residual=True, recipe=recipe), x, gamma, beta, wi, wo, bi, bo
    )
    jax.tree.map(near, run(layernorm_mlp), run(emulated_norm_mlp))


def test_not_finite_and_zero(rng):
    """A NaN or inf stays where it is; zeros give zeros."""
    x, w = data(rng, (4, 8), (8, 6))
    for bad in (jnp.nan, jnp.inf):
        y = dense(x.at[1, 2].set(bad), w, recipe=RECIPE)
        want = jnp.tensordot(qdq(x, 1.0, jnp.float8_e4m3fn), own(w, "fwd", RECIPE), 1)
        close(np.delete(y, 1, 0), np.delete(want, 1, 0))  # by a scale of 1
        assert np.isnan(y[1]).all() if math.isnan(bad) else True
    y, (dx, dw) = results(lambda x, w: dense(x, w, recipe=RECIPE), jnp.zeros_like(x), w)
    assert not y.any() and not dw.any() and np.isfinite(dx).all()


def test_an_outlier_after_small_batches_does_not_saturate(rng):
    """Where a delayed scale, of the batches before, clips nearly all of it."""
    x, w = data(rng, (64, 48), (48, 20))
    delayed, state = DelayedScaling(amax_history_len=4), fresh_state()
    for _ in range(2):
        _, (state,) = results(lambda s: dense(x, w, recipe=delayed, metas=observed(s, delayed)), state)
    exact = 1000 * x @ w
    error = lambda y: float(jnp.linalg.norm(y - exact) / jnp.linalg.norm(exact))
    assert error(dense(1000 * x, w, recipe=delayed, metas=observed(state, delayed))) > 0.9
    assert error(dense(1000 * x, w, recipe=RECIPE)) < 2.0**-4  # that of rounding to E4M3


@pytest.mark.parametrize("norm", ["layernorm", "rmsnorm"])
def test_statistics_of_a_norm_are_computed_once(norm):
    """The call that measures finds them; the one that quantizes and the backward pass read them."""
    x, kernel, gamma, beta = (jnp.ones(shape, jnp.bfloat16) for shape in ((4, 16), (16, 8), 16, 16))

    def loss(x, kernel):
        beta_of = beta if norm == "layernorm" else None
        return jnp.sum(layernorm_dense(x, kernel, gamma, beta_of, norm=norm, recipe=RECIPE)[0])

    of_norms = equations(jax.make_jaxpr(jax.grad(loss, (0, 1)))(x, kernel).jaxpr)
    calls = [(e.params["inputs"], e.params["outputs"]) for e in of_norms if e.primitive.name == "te_norm_fwd"]
    of_norm = ("mean", "rstd") if norm == "layernorm" else ("rstd",)
    (_, measured), (given, quantized) = calls
    assert measured == (*of_norm, "amax") and quantized == ("data", "data_t")
    assert set(given) >= {f"known_{name}" for name in of_norm}


# -- transforms ----------------------------------------------------------------------------------------------


def mlp(x, gamma, wi, wo):
    return layernorm_mlp(x, gamma, None, wi, wo, norm="rmsnorm", residual=True, recipe=RECIPE)


@pytest.mark.parametrize("wrap", [lambda f: f, jax.checkpoint], ids=["plain", "remat"])
def test_scan_and_remat(wrap, rng):
    x, gamma, wi, wo = data(rng, (4, 16), (3, 16), (3, 16, 1, 24), (3, 24, 16))

    def scanned(x, *weights):
        return lax.scan(lambda x, w: (wrap(mlp)(x, *w), None), x, weights)[0]

    def unrolled(x, *weights):
        for i in range(3):
            x = mlp(x, *(w[i] for w in weights))
        return x

    run = lambda fn: results(fn, x, gamma, wi, wo)
    jax.tree.map(near, run(scanned), run(unrolled))


def test_jit_retraces_between_recipes(rng):
    """And each program has its own law: scales of 1, powers of 2, the amax."""
    x, w = data(rng, (4, 16), (16, 8))
    traced = []

    @jax.jit
    def f(x, w):
        traced.append(te.fp8.current_recipe())
        return dense(x, w, recipe=traced[-1])

    for recipe in (*OPTIONS, RECIPE):
        with te.autocast(True, recipe):
            close(f(x, w), emulated_dense(x, w, recipe=recipe))
    assert traced == OPTIONS


# -- modules -------------------------------------------------------------------------------------------------

MODULES = {
    "DenseGeneral": lambda **k: te_flax.DenseGeneral((2, 12), **k),
    "LayerNormMLP": lambda **k: te_flax.LayerNormMLP(24, activations=("silu", "linear"), use_bias=True, **k),
    "MultiHeadAttention": lambda **k: te_flax.MultiHeadAttention(8, 2, use_bias=True, **k),
    "grouped": lambda **k: te_flax.MultiHeadAttention(8, 2, num_gqa_groups=1, fuse_qkv_params=False, **k),
    "TransformerLayer": lambda **k: te_flax.TransformerLayer(
        hidden_size=16, mlp_hidden_size=24, num_attention_heads=2, hidden_dropout=0.0, attention_dropout=0.0, **k
    ),
}


def first(y):
    return y[0] if isinstance(y, tuple) else y


def emulate(monkeypatch):
    """The modules with the layers of plain JAX in place of their own."""
    from te_jax.flax import dense as of_dense
    from te_jax.flax import mlp as of_mlp

    for module in (of_dense, of_mlp):
        monkeypatch.setattr(module, "dense", emulated_dense)
    monkeypatch.setattr(of_dense, "layernorm_dense", emulated_norm_dense)
    monkeypatch.setattr(of_mlp, "layernorm_mlp", emulated_norm_mlp)


@pytest.mark.parametrize("name", MODULES)
def test_modules(name, rng, monkeypatch):
    """Without state, and with the numbers of plain JAX; f32, so that nothing but FP8 rounds."""
    module, (x,) = MODULES[name](), data(rng, (2, 8, 16))
    with te.autocast(True, RECIPE):
        variables = nn.meta.unbox(quick_init(module.init)(KEY, x))
        assert set(variables) == {"params"}
        run = lambda: results(lambda v, x: first(module.apply(v, x)), variables, x)
        got = run()
        emulate(monkeypatch)
        jax.tree.map(near, got, run())


def test_a_training_loop_passes_through(rng):
    """The loop of the README: no collection, and `update_fp8_metas` has nothing to do."""
    module, (x,) = MODULES["TransformerLayer"](), data(rng, (2, 8, 16))
    with te.autocast(True, RECIPE):
        state, params = flax.core.pop(quick_init(module.init)(KEY, x), "params")

        @jax.jit
        def step(params, state):
            loss = lambda params, state: jnp.mean(module.apply({"params": params, **state}, x) ** 2)
            value, (grads, state) = te.value_and_grad(loss, (0, 1))(params, state)
            return value, jax.tree.map(lambda p, g: p - 1e-2 * g, params, grads), te.update_fp8_metas(state)

        losses = []
        for _ in range(4):
            loss, params, state = step(params, state)
            losses.append(float(loss))
    assert state == {} and losses == sorted(losses, reverse=True) and losses[-1] < 0.99 * losses[0]


def test_a_module_applied_twice(rng):
    """Each use has scales of its own."""
    module, (x,) = te_flax.DenseGeneral(16), data(rng, (4, 16))
    with te.autocast(True, RECIPE):
        variables = module.init(KEY, x)
        twice = nn.apply(lambda m, x: (m(x), m(1e4 * x)), module)
        small, large = twice(variables, x)
        np.testing.assert_array_equal(small, module.apply(variables, x))
        np.testing.assert_array_equal(large, module.apply(variables, 1e4 * x))


def test_state_of_another_recipe(rng):
    """It is neither read nor lost in silence."""
    (x,) = data(rng, (4, 16))
    module = te_flax.DenseGeneral(8)
    with te.autocast(True, DelayedScaling(amax_history_len=4)):
        variables = module.init(KEY, x)
    with te.autocast(True, RECIPE):
        got = module.apply(variables, x)
        assert te.combine_by_max(variables) is variables
        with pytest.raises(ValueError, match="Float8CurrentScaling, the recipe in force, has no state; drop it with"):
            te.update_fp8_metas(variables)
        converted = te.convert_fp8_metas(flax.core.freeze(variables), RECIPE)
        assert isinstance(converted, flax.core.FrozenDict) and set(converted) == {"params"}
        np.testing.assert_array_equal(module.apply(converted, x), got)
        assert te.update_fp8_metas(converted) is converted
    te.update_fp8_metas(variables)


@pytest.mark.parametrize("layer", ["dense", "norm", "mlp"])
def test_layers_refuse_metas(layer, rng):
    x, w, gamma = data(rng, (4, 16), (16, 16), (16,))
    metas = observed(fresh_state(), DelayedScaling(amax_history_len=4))
    call = dict(
        dense=lambda: dense(x, w, recipe=RECIPE, metas=metas),
        norm=lambda: layernorm_dense(x, w, gamma, recipe=RECIPE, metas=metas),
        mlp=lambda: layernorm_mlp(x, gamma, None, w[:, None], w, recipe=RECIPE, metas=(metas, metas)),
    )[layer]
    with pytest.raises(
        ValueError, match=r"metas(\[0\])? is given under Float8CurrentScaling; it has no state: pass None"
    ):
        call()


def test_refused_in_use(rng):
    with pytest.raises(TypeError, match=r"pass an instance: Float8CurrentScaling\(\)"):
        with te.autocast(True, Float8CurrentScaling):
            pass
    (q,) = data(rng, (2, 16, 2, 32), dtype=jnp.bfloat16)
    with pytest.raises(ValueError, match="attention_fp8: recipe is Float8CurrentScaling.*use DelayedScaling"):
        attention_fp8(q, q, q, recipe=RECIPE, metas=None)
