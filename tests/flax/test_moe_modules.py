"""MoEBlock and TransformerLayer with experts, in Linen and NNX: training, state, meshes."""

import warnings
from functools import partial

import jax
import jax.numpy as jnp
import moe_oracle as oracle
import numpy as np
import optax
import pytest
import states
from conftest import division_error
from flax import linen as nn
from flax import nnx
from quick_init import quick_init, quick_nnx

import te_jax as te
import te_jax.flax as te_flax
import te_jax.nnx as te_nnx
from te_jax import recipe
from te_jax.checkpoint_policies import GEMM, KERNEL, QUANTIZED, save
from te_jax.layers import MoEOptions, quantize_experts
from te_jax.nnx.convert import collections_of
from te_jax.ops.router import RouterOptions, route, updated_expert_bias
from te_jax.optim import master_weights
from te_jax.state import fp8

B, S, H, F, E, K = 2, 12, 32, 48, 4, 2
RECIPE = recipe.DelayedScaling(amax_history_len=3)
FIELDS = dict(num_experts=E, num_experts_per_tok=K, intermediate_dim=F, use_expert_bias=True)
FIELDS |= dict(aux_loss_coeff=0.01, z_loss_coeff=1e-3)
BLOCK = te_flax.MoEBlock(**FIELDS)
IDLE = 1  # an expert whose bias keeps all tokens away


def loss_of(model, params, others, x):
    y, sown = model.apply({"params": params, **others}, x, mutable=["losses"])
    return jnp.mean(y**2) + sum(map(jnp.sum, jax.tree.leaves(sown)))


def with_idle_expert(state):
    bias = {"expert_bias": {"expert_bias": jnp.zeros(E).at[IDLE].set(-99.0)}}
    return state.replace(fp8={**state.fp8, **bias})


@partial(jax.jit, static_argnums=(0, 3), donate_argnums=1)
def train_step(model, state, x, rate=0.0):
    with te.autocast(True, RECIPE):
        of = partial(loss_of, model)
        _, grads = te.value_and_grad(lambda *a: of(*a, x), argnums=(0, 1))(state.params, state.fp8)
        return state.apply_gradients(grads=grads, expert_bias_rate=rate)


def tensors_of(metas):
    return {name.removesuffix("_scale") for name in metas if name.endswith("_scale")}


@jax.jit
def by_law(metas, amaxes):
    """{tensor: its scale and history after these amaxes}, experts apart."""

    def moved(name, amax):
        law = partial(RECIPE.new_state, fp8_max=RECIPE.fp8_format.max(fp8.direction_of(name)))
        old = metas[f"{name}_scale"], metas[f"{name}_amax_history"]
        return jnp.vectorize(law, signature="(i),(l),()->(i),(l)")(*old, amax)

    return {name: moved(name, amax) for name, amax in amaxes.items()}


def test_state_of_each_expert_follows_the_law(rng, tmp_path):
    """Ten steps; those of an expert without tokens stay but for its weights'. After a restart the same bits."""
    model, x = BLOCK, states.data(rng, 10, B, S, H)
    state = with_idle_expert(states.state_of(model, RECIPE, x[0]))
    assert state.fp8["fp8_metas"]["x_1_amax_history"].shape == (E, 3)
    for step in range(10):
        before, params = jax.device_get((state.fp8["fp8_metas"], nn.meta.unbox(state.params)))
        if step == 8:
            states.saved(tmp_path / "state", state)
            like = jax.tree.map(jnp.copy, state)
        state = train_step(model, state, x[step])
        metas = jax.device_get(state.fp8["fp8_metas"])
        amaxes = {name: metas[f"{name}_amax_history"][..., -1] for name in tensors_of(metas)}
        largest = lambda *kernels: np.max([np.abs(kernel).max((1, 2)) for kernel in kernels], 0)
        np.testing.assert_array_equal(amaxes["kernel_0"], largest(params["wi_0"], params["wi_1"]))
        np.testing.assert_array_equal(amaxes["kernel_1"], largest(params["wo"]))
        with jax.default_device(jax.devices("cpu")[0]):
            want = jax.device_get(by_law(before, amaxes))
        for name, amax in amaxes.items():
            np.testing.assert_allclose(metas[f"{name}_scale"], want[name][0], rtol=division_error())
            states.assert_equal(metas[f"{name}_amax_history"], want[name][1])
            idle = name in ("x_1", "grad_0")
            assert not idle or (metas[f"{name}_scale"][IDLE] == 1 and not metas[f"{name}_amax_history"][IDLE].any())
            assert np.all(np.delete(amax, IDLE) > 0 if idle else amax > 0)
    again = states.restored(tmp_path / "state", like)
    for step in (8, 9):
        again = train_step(model, again, x[step])
    states.assert_equal(jax.tree.leaves(again), jax.tree.leaves(state))


def test_microbatches(rng):
    """The state of the largest amaxes, the counts of all tokens, and gradients that GEMMs add up, of weights that were
    quantized once; and the same by optax.MultiSteps."""
    fields = dict(use_expert_bias=True, use_bias=True, enable_layernorm=True, layernorm_type="rmsnorm")
    model, x = te_flax.MoEBlock(E, K, F, **fields), states.data(rng, 2, B, S, H) * jnp.array([[[[1.0]]], [[[5.0]]]])
    state = states.state_of(model, RECIPE, x[0])
    collections = {**state.fp8, **state.collections}
    tx = optax.MultiSteps(optax.sgd(0.1), 2)
    multi = te_flax.TrainState.create(apply_fn=model.apply, params=state.params, tx=tx, collections=collections)

    @jax.jit
    def one(state, x):
        return te.value_and_grad(partial(loss_of, model), argnums=(0, 1))(state.params, state.fp8, x)

    @jax.jit
    def fused(state):
        kernels = te_flax.fp8_kernels(model, state.variables, x[0])
        sums = te_flax.wgrads(model, state.variables, x[0])
        loss = lambda params, others, x: loss_of(model, params, {**others, **kernels}, x)
        return state.accumulate_gradients(loss, x, sums)

    step = jax.jit(lambda state, grads: state.apply_gradients(grads=grads, expert_bias_rate=0.5))
    with te.autocast(True, RECIPE):
        each = [one(state, microbatch) for microbatch in x]
        loss, (grads, new) = fused(state)
        moved = step(state, (grads, new))
        for _, of_microbatch in each:
            multi = step(multi, of_microbatch)
    each, loss, grads, new = jax.device_get((each, loss, grads, new))
    np.testing.assert_allclose(loss, np.mean([value for value, _ in each]), rtol=1e-6)
    mean = jax.tree.map(lambda *g: sum(g) / 2, *(g[0] for _, g in each))
    # Sums of each microbatch in another order, and one rounding instead of two.
    close = lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=2.0**-21 * np.abs(b).max(initial=1e-20))
    jax.tree.map(close, grads, mean)
    counts = [g[1]["expert_bias"]["expert_bias"] for _, g in each]
    assert all(c.sum() == B * S * K for c in counts)
    states.assert_equal(new["expert_bias"]["expert_bias"], sum(counts))
    newest = lambda g: {k: v[..., -1] for k, v in g["fp8_metas"].items() if k.endswith("history")}
    want = jax.tree.map(lambda *a: np.max(a, 0), *(newest(g[1]) for _, g in each))
    bias = updated_expert_bias(jnp.zeros(E), sum(counts), 0.5)
    for of in (moved, multi):
        states.assert_equal(newest(of.fp8), want)
        states.assert_equal(of.fp8["expert_bias"]["expert_bias"], bias)


class Stack(nn.Module):
    """Two blocks, by nn.scan of nn.remat or one after the other."""

    scanned: bool

    @nn.compact
    def __call__(self, x):
        policy = save(GEMM, QUANTIZED, KERNEL)

        class Body(nn.Module):
            @nn.compact
            def __call__(self, x, _):
                return te_flax.MoEBlock(**FIELDS, name="moe")(x, residual=True), None

        body = nn.remat(Body, policy=policy, prevent_cse=False) if self.scanned else Body
        if not self.scanned:
            return Body(name="b")(Body(name="a")(x, None)[0], None)[0]
        axes = dict.fromkeys(("params", "fp8_metas", "expert_bias", "losses"), 0)
        return nn.scan(body, variable_axes=axes, split_rngs={"params": True}, length=2)(name="layers")(x, None)[0]


def test_scan_and_remat(rng):
    """As layers of their own: their losses, counts, state and gradients."""
    x, scanned = states.data(rng, B, S, H), Stack(True)
    with te.autocast(True, RECIPE):
        variables = nn.meta.unbox(quick_init(scanned.init)(jax.random.key(0), x))
        of_layer = lambda i: {name: jax.tree.map(lambda a: a[i], tree["layers"]) for name, tree in variables.items()}
        alone = {name: {"a": of_layer(0)[name], "b": of_layer(1)[name]} for name in variables}

        def run(model, variables):
            params = variables.pop("params")
            return te.value_and_grad(partial(loss_of, model), argnums=(0, 1))(params, variables, x)

        (loss, got), (want_loss, want) = jax.jit(lambda a, b: (run(scanned, dict(a)), run(Stack(False), dict(b))))(
            variables, alone
        )
    np.testing.assert_allclose(loss, want_loss, rtol=1e-6)
    stack = lambda tree: {"layers": jax.tree.map(lambda a, b: jnp.stack([a, b]), tree["a"], tree["b"])}
    want = stack(want[0]), {name: stack(tree) for name, tree in want[1].items()}
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5 * np.abs(b).max(initial=1e-20))


# -- weights ---------------------------------------------------------------------------------------------------------


def test_weights_that_live_in_fp8(rng):
    """They follow master copies; LoRA on attention next to them has no gradient of experts."""
    model, x = te_flax.MoEBlock(E, K, F), states.data(rng, B, S, H)
    with te.autocast(True, RECIPE):
        variables = quick_init(model.init)(jax.random.key(0), x)
        stored = jax.jit(lambda variables: te_flax.fp8_params(model, variables, x))(variables)
        params = stored["params"]
        state = te_flax.TrainState.create(
            apply_fn=model.apply,
            params=params,
            tx=master_weights(optax.sgd(0.5)),
            collections={"fp8_metas": stored["fp8_metas"]},
        )

        def step(state):
            loss, grads = te.value_and_grad(partial(loss_of, model), argnums=(0, 1))(state.params, state.fp8, x)
            return state.apply_gradients(grads=grads), loss

        step = jax.jit(step)
        state, first = step(state)
        state, second = step(state)
    assert second < first
    quantized = jax.jit(partial(quantize_experts, recipe=recipe.Float8CurrentScaling(), gradients=False))
    for name in ("wi_0", "wi_1", "wo"):
        want = quantized(nn.meta.unbox(state.opt_state.master[name]))
        got = nn.meta.unbox(state.params[name])
        states.assert_equal(np.asarray(got.tensor.data_t, np.float32), np.asarray(want.tensor.data_t, np.float32))
        states.assert_equal(got.tensor.scale_inv, want.tensor.scale_inv)


LAYER = dict(
    hidden_size=H,
    mlp_hidden_size=F,
    num_attention_heads=4,
    hidden_dropout=0.0,
    attention_dropout=0.0,
    mlp_activations=("silu", "linear"),
    moe=dict(num_experts=E, num_experts_per_tok=K),
)


def test_frozen_experts_beside_lora():
    layer = te_flax.TransformerLayer(**LAYER, low_rank_adaptation_scope="qkv_proj")
    x = jnp.ones((B, S, H))
    with te.autocast(True, recipe.Float8CurrentScaling()):
        params = jax.eval_shape(layer.init, jax.random.key(0), x)["params"]
        lora, frozen = te_flax.split_lora(params)
        loss = lambda lora, frozen: jnp.sum(layer.apply({"params": te_flax.join_lora(lora, frozen)}, x))
        text = str(jax.make_jaxpr(jax.grad(loss))(lora, frozen))
    assert "te_gemm_grouped" in text and "te_gemm_grouped_wgrad" not in text and "te_combine_bwd" in text


def test_layer_is_attention_and_block(rng):
    """Experts instead of the MLP: their norm, the residual connection, and shared experts besides."""
    x, shared = states.data(rng, B, S, H), dict(num_shared_experts=2, score_function="sigmoid", scaling_factor=2.5)
    layer = te_flax.TransformerLayer(**LAYER | dict(moe=LAYER["moe"] | shared), use_bias=True)
    attention = te_flax.MultiHeadAttention(head_dim=H // 4, num_attention_heads=4, use_bias=True)
    norm, mlp = te_flax.LayerNorm(), te_flax.LayerNormMLP(2 * F, activations=("silu", "linear"), enable_layernorm=False)
    params = nn.meta.unbox(quick_init(layer.init)(jax.random.key(0), x)["params"])
    options = MoEOptions(RouterOptions(K, "sigmoid", scaling_factor=2.5))

    def composed(params, x):
        x = x + attention.apply({"params": params["attention"]}, x, deterministic=True)[0]
        p = dict(params["moe"])
        h = norm.apply({"params": {"scale": p["scale"], "ln_bias": p["ln_bias"]}}, x)
        weights = p["gate_kernel"], (p["wi_0"], p["wi_1"]), p["wo"], (p["wi_0_bias"], p["wi_1_bias"]), p["wo_bias"]
        shared = mlp.clone(use_bias=True).apply({"params": p["shared_experts"]}, h, True)[0]
        return x + shared + oracle.loop(h.reshape(-1, H), *weights, options=options).reshape(x.shape)

    layered = lambda params, x: layer.apply({"params": params}, x, deterministic=True)
    got, want = jax.jit(lambda *a: [f(*a) for f in (layered, composed)])(params, x)
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5 * np.abs(want).max())


def test_experts_of_a_latent(rng):
    """Their tokens are projected down before them and up behind, next to shared experts and a router of whole tokens;
    values and gradients with a norm and the residual connection, in FP8 and NNX too."""
    x, fields = states.data(rng, B, S, H), dict(num_shared_experts=1, score_function="sqrt_softplus", latent_size=16)
    fields |= dict(enable_layernorm=True, layernorm_type="rmsnorm")
    block, norm = te_flax.MoEBlock(E, K, F, **fields), te_flax.LayerNorm(layernorm_type="rmsnorm")
    mlp = te_flax.LayerNormMLP(F, activations=("silu", "linear"), enable_layernorm=False)
    model = quick_nnx(lambda: te_nnx.MoEBlock(H, E, K, F, **fields, rngs=nnx.Rngs(0)))
    params = te_nnx.to_linen(model)["params"]
    assert [params[f"latent_{way}"]["kernel"].shape for way in ("down", "up")] == [(H, 16), (16, H)]

    def composed(params, x):
        h = norm.apply({"params": {"scale": params["scale"]}}, x)
        dot = partial(jnp.einsum, precision="highest")
        routing = route(dot("bsh,he->bse", h, params["gate_kernel"]), RouterOptions(K, "sqrt_softplus"))
        z = dot("bsh,hl->bsl", h, params["latent_down"]["kernel"])
        slots = [dot("bsl,elf->bsef", z, params[f"wi_{i}"]) for i in (0, 1)]
        each = dot("bsef,efl->bsel", jax.nn.silu(slots[0]) * slots[1], params["wo"])
        weights = jnp.sum(jax.nn.one_hot(routing.experts, E) * routing.weights[..., None], -2)
        y = dot("bsel,bse,lh->bsh", each, weights, params["latent_up"]["kernel"])
        return x + y + mlp.apply({"params": params["shared_experts"]}, h, True)[0]

    own = lambda params, x: block.apply({"params": params}, x, residual=True)
    both = lambda run: jax.value_and_grad(lambda params, x: (jnp.mean((y := run(params, x)) ** 2), y), (0, 1), True)
    got, want = jax.jit(lambda *a: [both(run)(*a) for run in (own, composed)])(params, x)
    # Sums of up to 48 products in another order, five times in a row.
    close = lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5 * np.abs(b).max())
    jax.tree.map(close, got, want)
    states.assert_equal(nnx.jit(lambda model, x: model(x, residual=True))(model, x), jax.jit(own)(params, x))
    with te.autocast(True, recipe.Float8CurrentScaling()):
        in_fp8 = jax.jit(own)(params, x)
    exact = want[0][1]
    # Operands of 3 bits are off by 2**-4 at most, five products in a row by less than the sum of these.
    assert 0 < np.abs(in_fp8 - exact).max() < 5 * 2.0**-4 * np.abs(exact - x).max()


# -- NNX -------------------------------------------------------------------------------------------------------------


def test_nnx_is_linen(rng):
    """Results, losses, gradients and the moves of state and bias."""
    x = states.data(rng, B, S, H)
    with te.autocast(True, RECIPE):
        fields = LAYER | dict(moe=LAYER["moe"] | dict(use_expert_bias=True))
        layer = nnx.eval_shape(lambda: te_nnx.TransformerLayer(**fields, rngs=nnx.Rngs(0)))
        assert type(layer.moe) is te_nnx.MoEBlock and isinstance(layer.moe.expert_bias, te_nnx.ExpertBias)
        model, linen = quick_nnx(lambda: te_nnx.MoEBlock(H, **FIELDS, rngs=nnx.Rngs(0))), BLOCK
        variables = te_nnx.to_linen(model)
        params = variables.pop("params")

        def loss(model, x):
            return jnp.mean(model(x) ** 2) + sum(jax.tree.leaves(nnx.pop(model, te_nnx.Loss)))

        forward = nnx.jit(lambda model, x: model(x))
        forward(model, 5 * x)  # its losses are no part of what follows
        assert nnx.state(model, te_nnx.Loss)
        got = nnx.jit(lambda *a: te_nnx.value_and_grad(loss, expert_bias_rate=0.25)(*a))(model, x)
        run = jax.jit(lambda *a: te.value_and_grad(partial(loss_of, linen), argnums=(0, 1))(*a))
        want, (dparams, new) = run(params, variables, x)
        states.assert_equal(got[0], want)
        close = lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6 * np.abs(b).max())
        jax.tree.map(close, collections_of(got[1])["params"], dparams)
        new = te_flax.update_expert_bias({**new, "expert_bias": variables["expert_bias"]}, new, 0.25)
        forward(model, x)  # its losses are no variables for Linen
        moved = te_nnx.to_linen(model)
        assert set(moved) == {"params", "fp8_metas", "expert_bias"}
        states.assert_equal(moved["expert_bias"], new["expert_bias"])
        jax.tree.map(close, moved["fp8_metas"], new["fp8_metas"])
        assert np.abs(model.expert_bias.get_value()).max() == 0.25
        with pytest.warns(UserWarning, match="leaves losses of routers in the model, balancing_loss"):
            gate = nnx.All(nnx.Param, nnx.PathContains("gate_kernel"))
            nnx.jit(lambda *a: te_nnx.value_and_grad(lambda model, x: jnp.mean(model(x)), wrt=gate)(*a))(model, x)
    assert not nnx.state(model, te_nnx.Loss)


def test_plain_gradients_are_told():
    """Without FP8 state too: `nnx.value_and_grad` leaves the bias as it is, ours moves it."""
    model = quick_nnx(lambda: te_nnx.MoEBlock(8, E, K, 8, use_expert_bias=True, rngs=nnx.Rngs(0)))
    trace = lambda grad: nnx.eval_shape(lambda model, x: grad(model, x)[0], model, jnp.ones((1, 2, 8)))
    loss = lambda model, x: jnp.sum(model(x))
    with pytest.warns(UserWarning, match="MoEBlock: .* not of the biases of experts, .* te_jax.nnx.value_and_grad"):
        trace(nnx.value_and_grad(loss))
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        trace(te_nnx.value_and_grad(loss))
        trace(lambda model, x: nnx.value_and_grad(lambda x: loss(model, x))(x))


# -- numbers ---------------------------------------------------------------------------------------------------------


def test_stats_of_experts(rng):
    """Loads, what was dropped, and saturation of each expert: as table and as data of a heat map."""
    model, x = te_flax.MoEBlock(E, K, F, capacity_factor=0.75), states.data(rng, B, S, H)
    with te.autocast(True, RECIPE):
        variables = quick_init(model.init)(jax.random.key(0), x)
        params, metas = variables["params"], variables["fp8_metas"]
        metas["kernel_1_scale"] = jnp.array([[1e5], [1.0], [1.0], [1.0]])

        def loss(metas):
            y, sown = model.apply({"params": params, **metas}, x, mutable=["intermediates"])
            return jnp.sum(y), sown

        probed = te.fp8_probes({"fp8_metas": metas})
        (_, sown), grads = jax.jit(lambda metas: te.value_and_grad(loss, has_aux=True)(metas))(probed)
        stats = te.fp8_stats(grads)
        found = te.expert_stats(sown, stats)
    block = found[""]
    counts = np.asarray(sown["intermediates"]["tokens_per_expert"][0])
    np.testing.assert_array_equal(block.tokens, counts)
    np.testing.assert_allclose(block.load, counts / (B * S * K / E), rtol=1e-6)
    np.testing.assert_allclose(block.dropped, np.maximum(counts - 9, 0) / counts, rtol=1e-6)
    assert block.saturation[0] > 0.9 and np.all(block.saturation[1:] == 0)
    assert np.asarray(stats["x_1"].amax).shape == (E,)
    head, line = te.expert_stats_table(found).splitlines()
    assert head.split()[:4] == ["block", "layers", "experts", "tokens"] and line.split()[:4] == [".", "1", "4", "48"]
    two = jax.tree.map(lambda a: jnp.stack([a, a]), block)
    names, values = te.expert_heat_map({"": block, "layers/moe": two}, "tokens")
    assert names == [".", "layers/moe[0]", "layers/moe[1]"]
    np.testing.assert_array_equal(values, np.stack([counts] * 3))
    assert np.all(np.isnan(te.expert_stats(sown)[""].saturation))
    with pytest.raises(ValueError, match="no tokens_per_expert of a MoEBlock in 'intermediates'; pass"):
        te.expert_stats({"losses": {}})
    with pytest.raises(ValueError, match="field is 'loads'; pass .*did you mean 'load'"):
        te.expert_heat_map(found, "loads")


# -- what is refused, and told ---------------------------------------------------------------------------------------

X = jnp.ones((B, S, H))
BAD = {  # a call, error, words
    "k": (lambda: te_flax.MoEBlock(4, 5), ValueError, "MoEBlock: num_experts_per_tok is 5, but a token .* 4"),
    "groups": (lambda: te_flax.MoEBlock(4, 2, num_groups=3), ValueError, "MoEBlock: num_groups is 3"),
    "a typo": (lambda: te_flax.MoEBlock(4, 2, capacity=1.0), TypeError, "did you mean 'capacity_factor'"),
    "a score": (lambda: te_flax.MoEBlock(4, 2, score_function="tanh"), ValueError, "score_function is 'tanh'"),
    "a coefficient": (lambda: te_flax.MoEBlock(4, 2, aux_loss_coeff=-1), ValueError, "aux_loss_coeff is -1"),
    "sequences": (
        lambda: te_flax.MoEBlock(4, 2, per_sequence_loss=True, transpose_batch_sequence=True),
        ValueError,
        "both True",
    ),
    "in a layer": (
        lambda: te_flax.TransformerLayer(**LAYER | dict(moe=dict(experts=4))),
        TypeError,
        "unexpected keyword argument 'experts'",
    ),
    "no dict": (lambda: te_flax.TransformerLayer(**LAYER | dict(moe=4)), TypeError, "moe is 4; pass None or a dict"),
    "dropout": (
        lambda: te_flax.TransformerLayer(**LAYER, intermediate_dropout=0.1),
        ValueError,
        "intermediate_dropout is 0.1, which experts have not",
    ),
    "LoRA": (
        lambda: te_flax.TransformerLayer(**LAYER, low_rank_adaptation_scope="all"),
        ValueError,
        "low_rank_adaptation_scope is 'all'",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_bad_fields(name):
    make, error, words = BAD[name]
    with pytest.raises(error, match=words):
        jax.eval_shape(make().init, jax.random.key(0), X)


def test_parameters_without_axes():
    """Of shared experts, whose axes follow from those of the experts, neither."""
    without = dict.fromkeys(("gate_axes", "kernel_axes_1", "kernel_axes_2", "bias_axes_1", "bias_axes_2"), ())
    block = te_flax.MoEBlock(E, K, F, num_shared_experts=1, use_bias=True, **without)
    params = nn.meta.unbox(jax.eval_shape(block.init, jax.random.key(0), X)["params"])
    assert params["shared_experts"]["wi_kernel"].shape == (H, 2, F)
    assert params["shared_experts"]["wi_bias"].shape == (2, F)


def test_bias_is_where_it_belongs(monkeypatch):
    """No optimizer sees it; without the collection, or with a parameter of that name, a call is refused."""
    variables = nn.meta.unbox(jax.eval_shape(BLOCK.init, jax.random.key(0), X))
    assert set(variables) == {"params", "expert_bias"}
    apply = lambda **changed: jax.eval_shape(lambda v: BLOCK.apply(v, X, True), {**variables, **changed})
    with pytest.raises(ValueError, match="the collection 'expert_bias' lacks expert_bias; pass"):
        apply(expert_bias={})
    with pytest.raises(ValueError, match="parameters hold `expert_bias`, which an optimizer would train"):
        apply(params={**variables["params"], "expert_bias": jnp.zeros(E)})
    with pytest.raises(ValueError, match=r"has shape \(2, 4\); pass \[4\]"):
        apply(expert_bias={"expert_bias": jnp.zeros((2, E))})
    with pytest.raises(ValueError, match="grads lack the collection 'expert_bias'"):
        te_flax.update_expert_bias(variables, {}, 1e-3)
    tx = te_flax.fp8_masked(optax.sgd(1.0))
    tree = {"params": jnp.ones(2), "expert_bias": {"expert_bias": jnp.ones(2)}}
    updates, _ = tx.update(tree, tx.init(tree), tree)
    assert not updates["expert_bias"]["expert_bias"].any() and updates["params"].all()


@pytest.mark.filterwarnings("ignore:.*z_loss is asked for")
def test_lost_losses_are_told(monkeypatch):
    """A call that trains, without the collection; the counts are for whoever asks."""
    monkeypatch.setattr("te_jax.core.check.told", set())
    variables = jax.eval_shape(BLOCK.init, jax.random.key(0), X)
    jax.eval_shape(lambda v: BLOCK.apply(v, X, deterministic=True), variables)
    with pytest.warns(UserWarning, match="balancing_loss is asked for, but the collection 'losses' is not mutable"):
        jax.eval_shape(lambda v: BLOCK.apply(v, X), variables)
    _, sown = jax.eval_shape(lambda v: BLOCK.apply(v, X, mutable=["losses", "intermediates"]), variables)
    assert set(sown["losses"]) == {"balancing_loss", "z_loss"}
    assert sown["intermediates"]["tokens_per_expert"][0].shape == (E,)
