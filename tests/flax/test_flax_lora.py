"""return_bias, params_dtype, kernels of the caller, and training of low-rank adaptation with frozen FP8 kernels."""

import flax
import flax_reference as ref
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from arrays import on_device
from flax import linen as nn
from flax_reference import data
from jaxprs import equations
from quick_init import quick_init

import te_jax as te
import te_jax.flax as te_flax
from te_jax.layers import Projection, layernorm_dense, layernorm_mlp
from te_jax.recipe import DelayedScaling, FixedScaling, Float8BlockScaling, Float8CurrentScaling, MXFP8BlockScaling

KEY = jax.random.key(0)
DENSE, NORM_DENSE, MLP = te_flax.DenseGeneral, te_flax.LayerNormDenseGeneral, te_flax.LayerNormMLP


def first(y):
    return y[0] if isinstance(y, tuple) else y


# -- return_bias --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fp8", [False, True])
@pytest.mark.parametrize(
    ("module", "fields", "bias"),
    [
        (DENSE, dict(features=(2, 16)), "bias"),
        (NORM_DENSE, dict(features=16, depth_scaling=2.5), "bias"),
        (MLP, dict(intermediate_dim=32), "wo_bias"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_return_bias(module, fields, bias, fp8):
    """Added by the caller it gives what the module gives; its gradient comes from there."""
    x = data(6, 16)
    whole, parted = (module(**fields, use_bias=True, return_bias=parted) for parted in (False, True))
    with te.autocast(fp8, Float8CurrentScaling()):
        params = ref.filled(quick_init(whole.init)(KEY, x)["params"])

        def sums(params):
            *y, returned = parted.apply({"params": params}, x)
            assert returned.dtype == jnp.float32
            return jnp.sum(jnp.sin(y[0] + returned)), (y[0], returned)

        (_, (y, returned)), grads = jax.jit(jax.value_and_grad(sums, has_aux=True))(params)

        def due_sum(params):
            y = first(whole.apply({"params": params}, x))
            return jnp.sum(jnp.sin(y)), y

        (_, want), due = jax.jit(jax.value_and_grad(due_sum, has_aux=True))(params)
        np.testing.assert_allclose(y + returned, want, rtol=1e-5, atol=1e-5)
    over = fields.get("depth_scaling", 1.0)
    np.testing.assert_allclose(returned, ref.unboxed(params)[bias] / over, rtol=1e-6)
    np.testing.assert_allclose(ref.unboxed(grads)[bias], ref.unboxed(due)[bias], rtol=1e-4, atol=1e-4)
    none = module(**fields, use_bias=False, return_bias=True)
    assert none.init_with_output(KEY, x)[0][-1] is None


# -- params_dtype -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("module", "x"),
    [
        (te_flax.LayerNorm(dtype=jnp.bfloat16, params_dtype=jnp.float32), data(4, 16)),
        (DENSE(8, dtype=jnp.bfloat16, params_dtype=jnp.float32), data(4, 16)),
        (NORM_DENSE(8, dtype=jnp.bfloat16, params_dtype=jnp.float32), data(4, 16)),
        (MLP(intermediate_dim=8, dtype=jnp.bfloat16, params_dtype=jnp.float32), data(4, 16)),
        (
            te_flax.TransformerLayer(
                hidden_size=16,
                mlp_hidden_size=16,
                num_attention_heads=2,
                layer_type="decoder",
                enable_relative_embedding=True,
                low_rank_adaptation_scope="all",
                output_layernorm=True,
                hidden_dropout=0.0,
                attention_dropout=0.0,
                dtype=jnp.bfloat16,
                params_dtype=jnp.float32,
            ),
            data(2, 8, 16),
        ),
    ],
    ids=lambda value: type(value).__name__,
)
def test_params_dtype(module, x):
    """Parameters of f32, a computation in bf16, whatever the inputs are: as if they had been cast."""
    more = (data(2, 4, 16),) if x.ndim == 3 else ()
    params = quick_init(module.init)(KEY, x, *more)["params"]
    assert {leaf.dtype for leaf in jax.tree.leaves(params)} == {np.dtype("float32")}
    run = jax.jit(lambda *args: first(module.apply({"params": params}, *args)))
    y = run(x, *more)
    assert y.dtype == jnp.bfloat16
    np.testing.assert_array_equal(y, run(*(a.astype(jnp.bfloat16) for a in (x, *more))))


# -- kernels of the caller ----------------------------------------------------------------------------------------


class Tied(nn.Module):
    """Logits by the embedding's own table."""

    norm: bool

    @nn.compact
    def __call__(self, tokens):
        embed = nn.Embed(24, 16)
        x = embed(tokens)
        if self.norm:
            return NORM_DENSE(24, name="head")(x, kernel=embed.embedding.T)[0]
        return DENSE(24, use_bias=False, name="head")(x, kernel=embed.embedding.T)


@pytest.mark.parametrize("norm", [False, True])
def test_tied_embedding(norm):
    """One parameter with one gradient, in FP8 with a state of its own; plain JAX gives the same numbers."""
    tokens = jnp.arange(12).reshape(2, 6)
    model = Tied(norm)
    variables = quick_init(model.init)(KEY, tokens)
    assert ref.shapes(variables["params"])["Embed_0"] == {"embedding": (24, 16)}
    assert "kernel" not in variables["params"].get("head", {})

    def due(params):
        x = params["Embed_0"]["embedding"][tokens]
        if norm:
            x = (x - x.mean(-1, keepdims=True)) / jnp.sqrt(x.var(-1, keepdims=True) + 1e-6)
        return x @ params["Embed_0"]["embedding"].T

    params = ref.unboxed(variables["params"])
    loss = lambda f: lambda params: jnp.sum(jnp.sin(f(params)))
    got, want = (jax.jit(jax.grad(loss(f)))(params) for f in (lambda p: model.apply({"params": p}, tokens), due))
    np.testing.assert_allclose(got["Embed_0"]["embedding"], want["Embed_0"]["embedding"], rtol=1e-4, atol=1e-5)
    with te.autocast(True, DelayedScaling(amax_history_len=4)):
        state = quick_init(model.init)(KEY, tokens)["fp8_metas"]
        assert "kernel_scale" in state["head"]
        fp8 = jax.jit(model.apply)({"params": params, "fp8_metas": state}, tokens)
    # Products of E4M3, 2**-4 off each: of 16 that add up at random.
    y = np.asarray(due(params))
    assert np.abs(fp8 - y).max() < 2**-3 * np.abs(y).max() and np.abs(fp8 - y).max() > 0


def test_kernels_of_the_mlp():
    x, wi, wo = data(4, 16), data(16, 2, 8, seed=2), data(8, 16, seed=3)
    module = MLP(intermediate_dim=8, activations=("silu", "linear"))
    variables = quick_init(module.init)(KEY, x)
    own = ref.unboxed(variables["params"]) | {"wi_kernel": wi, "wo_kernel": wo}
    want, _ = module.apply({"params": own}, x)
    norm = {name: own[name] for name in ("scale", "ln_bias")}
    got, _ = module.apply({"params": norm}, x, wi_kernel=wi, wo_kernel=wo)
    np.testing.assert_array_equal(got, want)
    assert set(jax.eval_shape(module.init, KEY, x, wi_kernel=wi)["params"]) == {"scale", "ln_bias", "wo_kernel"}


@pytest.mark.parametrize(
    ("kernel", "error", "text"),
    [
        (jnp.ones((8, 16)), ValueError, r"kernel has shape \(8, 16\), but .* need \(16, 8\)"),
        (jnp.ones((16, 8), jnp.int8), TypeError, "kernel is int8"),
    ],
)
def test_refused_kernels(kernel, error, text):
    with pytest.raises(error, match="DenseGeneral: " + text):
        DENSE(8).init(KEY, data(4, 16), kernel=kernel)
    variables = quick_init(DENSE(8).init)(KEY, data(4, 16))
    with pytest.raises(ValueError, match="kernel is passed, but the parameters hold one too"):
        DENSE(8).apply(variables, data(4, 16), kernel=jnp.ones((16, 8)))
    with pytest.raises(ValueError, match="return_bias is True, but operands=True"):
        DENSE(8, return_bias=True).init(KEY, data(4, 16), operands=True)


# -- LoRA with frozen kernels -------------------------------------------------------------------------------------

TOKENS, WIDTH, HIDDEN, RANK = 24, 16, 48, 2  # all different: a product is known by its shape


class Block(nn.Module):
    """All three dense modules."""

    @nn.compact
    def __call__(self, x, _):
        lora = dict(enable_low_rank_adaptation=True, low_rank_adaptation_dim=RANK, low_rank_adaptation_alpha=4.0)
        y, _ = NORM_DENSE(HIDDEN, **lora, name="up")(x)
        x = x + DENSE(WIDTH, **lora, name="down")(y)
        return x + MLP(intermediate_dim=HIDDEN, **lora, name="mlp")(x)[0], None


class Model(nn.Module):
    @nn.compact
    def __call__(self, x):
        options = dict(variable_axes={"params": 0, "fp8_metas": 0}, split_rngs={"params": True}, length=2)
        options |= dict(metadata_params={nn.PARTITION_NAME: None})
        return nn.scan(nn.remat(Block), **options)(name="blocks")(x, None)[0]


def products(jaxpr) -> set:
    """The shapes of all GEMMs' results in `jaxpr` and those within it, without axes of 1."""
    gemms = (e for e in equations(jaxpr) if e.primitive.name in ("te_gemm", "te_gemm_sum", "dot_general"))
    return {tuple(n for n in eqn.outvars[0].aval.shape if n > 1) for eqn in gemms}


@pytest.mark.parametrize(
    "recipe", [DelayedScaling(amax_history_len=4), Float8CurrentScaling(), None], ids=["delayed", "current", "plain"]
)
def test_frozen_kernels_have_no_gradient_gemm(recipe):
    """With respect to only LoRA: the gradients and the FP8 state of the whole, but no product of a kernel's shape."""
    x, model = data(TOKENS, WIDTH), Model()
    with te.autocast(recipe is not None, recipe):
        variables = ref.unboxed(quick_init(model.init)(KEY, x))
        params, fp8 = ref.filled(variables.pop("params"), spread=0.1), variables
        lora, base = te_flax.split_lora(params)
        assert jax.tree.structure(te_flax.join_lora(lora, base)) == jax.tree.structure(params)
        assert set(lora["blocks"]["mlp"]) == {f"{w}_lora_{ab}_kernel" for w in ("wi", "wo") for ab in "ab"}
        assert not {name for leaves in base["blocks"].values() for name in leaves if "lora" in name}

        def loss(params, fp8):
            return jnp.sum(jnp.sin(model.apply({"params": params, **fp8}, x)))

        whole = jax.value_and_grad(loss, (0, 1))
        alone = jax.value_and_grad(lambda lora, fp8: loss(te_flax.join_lora(lora, base), fp8), (0, 1))
        runs = (jax.jit(whole), params), (jax.jit(alone), lora)
        jaxprs = [f.trace(p, fp8).jaxpr.jaxpr for f, p in runs]
        (value, (grads, new)), (value_alone, (grads_alone, new_alone)) = (f(p, fp8) for f, p in runs)
    kernels = {(WIDTH, HIDDEN), (HIDDEN, WIDTH)}
    assert kernels <= products(jaxprs[0]) and not kernels & products(jaxprs[1])
    assert {(TOKENS, HIDDEN), (TOKENS, WIDTH)} <= products(jaxprs[1])
    close = lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)
    jax.tree.map(close, (value_alone, grads_alone, new_alone), (value, te_flax.split_lora(grads)[0], new))


def test_mask_trains_lora_alone():
    x, model = data(TOKENS, WIDTH), Model()
    params = quick_init(model.init)(KEY, x)["params"]  # in their boxes
    tx = optax.partition({True: optax.adamw(1e-2), False: optax.set_to_zero()}, te_flax.lora_mask)
    grads = jax.jit(jax.grad(lambda p: jnp.sum(jnp.sin(model.apply({"params": p}, x)))))(params)
    updates, _ = jax.jit(lambda grads, params: tx.update(grads, tx.init(params), params))(grads, params)
    moved = jax.tree.map(lambda u: bool(np.any(np.asarray(u))), ref.unboxed(updates))
    lora, base = te_flax.split_lora(moved)
    assert not any(jax.tree.leaves(base))
    # B starts at 0, so A has no gradient in the first step; decay moves it.
    assert all(jax.tree.leaves(lora))
    with pytest.raises(ValueError, match="no parameter is of low-rank adaptation"):
        te_flax.split_lora(base)


def test_part_of_the_kernels_of_fused_layers():
    """layernorm_mlp, and several projections of one norm: the gradients of what is differentiated are those of the
    whole, and no other kernel has a product."""
    recipe, wide, hidden2 = Float8CurrentScaling(), jnp.ones(WIDTH), HIDDEN + 16
    x, up, other, down = data(TOKENS, WIDTH), data(WIDTH, HIDDEN), data(WIDTH, hidden2), data(HIDDEN, WIDTH)

    def mlp(x, up, down):
        options = dict(norm="rmsnorm", recipe=recipe)
        return jnp.sum(jnp.sin(layernorm_mlp(x, wide, None, up[:, None], down, **options)))

    def pair(x, up, other):
        also = [Projection(other, None, None)]
        y, _ = layernorm_dense(x, up, wide, norm="rmsnorm", recipe=recipe, also=also)
        return jnp.sum(jnp.sin(y[0])) + jnp.sum(jnp.cos(y[1]))

    for loss, args in ((mlp, (x, up, down)), (pair, (x, up, other))):
        whole = jax.jit(jax.grad(loss, (0, 1, 2)))(*args)
        for which in (0, 1, 2):
            alone = jax.jit(jax.grad(loss, which))
            np.testing.assert_allclose(alone(*args), whole[which], rtol=1e-5, atol=1e-6)
            got = products(alone.trace(*args).jaxpr.jaxpr)
            for i in (1, 2):
                assert (args[i].shape in got) == (i == which), (loss, which, got)


@pytest.mark.parametrize(
    "recipe", [DelayedScaling, Float8CurrentScaling, FixedScaling, Float8BlockScaling, MXFP8BlockScaling]
)
@pytest.mark.parametrize("override", [(False,) * 3, (True, False, False), (False, False, True), (True,) * 3])
def test_one_traced_layer_by_several_gradients(recipe, override):
    """jax traces a jitted function once, and takes its gradient by only x and by everything from that one trace."""
    recipe = recipe(override_linear_precision=override)
    x, kernel = on_device(np.random.default_rng(0).normal(size=(2, 16, 16)), jnp.float32)
    with te.autocast(True, recipe):
        module = te_flax.DenseGeneral(16)
        variables = quick_init(module.init)(jax.random.key(0), x)
        variables = jax.tree.map(lambda a: kernel if a.shape == kernel.shape else a, variables)
        state, params = flax.core.pop(nn.meta.unbox(variables), "params")
        once = jax.jit(lambda params, x: module.apply({"params": params, **state}, x))

        @jax.jit
        def gradients(params, x):
            y, by_x = jax.vjp(lambda x: once(params, x), x)
            _, by_all = jax.vjp(once, params, x)
            _, apart = jax.vjp(lambda params: module.apply({"params": params, **state}, x), params)
            return by_x(y), by_all(y), apart(y)[0]

        (dx,), (dparams, dx_too), dparams_apart = gradients(params, x)
        np.testing.assert_array_equal(dx, dx_too)
        close = lambda got, want: np.testing.assert_allclose(got, want, atol=2.0**-20 * np.abs(want).max())
        jax.tree.map(close, dparams, dparams_apart)
