"""DotProductAttention and the modules around it under fp8_dpa: state, results, training, what is not served."""

import warnings
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from arrays import on_device
from flax import linen as nn
from quick_init import quick_init

import te_jax as te
import te_jax.flax as te_flax
from te_jax import recipe
from te_jax.core import check
from te_jax.ops.attention import SequenceDescriptor
from te_jax.state.fp8 import AttentionMetas

KEY = jax.random.key(0)
L = 4
RECIPE = recipe.DelayedScaling(amax_history_len=L, fp8_dpa=True)
NAMES = {f"{t}_{leaf}" for t in AttentionMetas._fields for leaf in ("scale", "amax_history")}
SEEN = ("q", "k", "v", "o")  # what is quantized where gradients are bf16
H, D = 4, 16
PLACE = "DotProductAttention_0"
bf16 = jnp.bfloat16


@pytest.fixture
def fp8():
    with te.fp8_autocast(True, RECIPE), warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        check.told.clear()
        yield


def data(*shape, seed=1):
    return on_device(np.random.default_rng(seed).normal(size=shape), bf16)


def attention(**fields):
    return te_flax.DotProductAttention(D, H, **fields)


def qkv(s=24, seed=1):
    return tuple(data(2, s, H, D, seed=seed + i) for i in range(3))


def mean_square(y):
    return jnp.mean(jnp.square(y.astype(jnp.float32)))


def new_state(model, metas, *args, **kwargs):
    """The state after a step, and the result."""

    def loss(metas):
        y = model.apply({"fp8_metas": metas}, *args, **kwargs)
        return mean_square(y[0] if isinstance(y, tuple) else y), y

    return jax.jit(jax.grad(loss, has_aux=True))(metas)


def amaxes(metas):
    """The newest amax of each tensor."""
    return {name.removesuffix("_amax_history"): float(x[-1]) for name, x in metas.items() if name.endswith("history")}


def close(got, want):
    """q, k, v, probabilities and output are rounded by up to 2**-4, evenly spread, that is 2**-4 / sqrt(3) each; of
    operands of unit size the two that make a logit of unit size weigh as one each."""
    got, want = (np.asarray(x, np.float64) for x in (got, want))
    error = np.linalg.norm(got - want) / np.linalg.norm(want)
    assert 0 < error <= np.sqrt(5) * 2**-4 / np.sqrt(3), error


def test_names(fp8):
    metas = jax.eval_shape(attention().init, KEY, *qkv())["fp8_metas"]
    assert metas.keys() == NAMES
    assert all(x.shape == ((1,) if name.endswith("scale") else (L,)) for name, x in metas.items())
    metas = jax.eval_shape(te_flax.MultiHeadAttention(D, H).init, KEY, data(2, 24, 32))["fp8_metas"]
    assert metas[PLACE].keys() == NAMES


def test_there_is_no_state_without_the_field():
    for autocast in (te.autocast(False), te.autocast(True, recipe.DelayedScaling())):
        with autocast:
            assert "fp8_metas" not in jax.eval_shape(attention().init, KEY, *qkv())


@pytest.mark.parametrize("layout", ["bshd_bshd_bshd", "bs3hd", "bshd_bs2hd", "transposed"])
@pytest.mark.parametrize("mask", ["causal", "no_mask"])
def test_two_steps(mask, layout, fp8):
    """The state goes from step to step, and the second result is close to that of bf16."""
    q, k, v = qkv()
    model = attention(attn_mask_type=mask, transpose_batch_sequence=layout == "transposed",
                      qkv_layout="bshd_bshd_bshd" if layout == "transposed" else layout)  # fmt: skip
    args = {
        "bs3hd": (jnp.stack([q, k, v], 2),),
        "bshd_bs2hd": (q, jnp.stack([k, v], 2)),
        "transposed": tuple(jnp.swapaxes(x, 0, 1) for x in (q, k, v)),
    }.get(layout, (q, k, v))
    states, metas = [], quick_init(model.init)(KEY, *args)["fp8_metas"]
    for _ in range(2):
        metas, out = new_state(model, metas, *args)
        states.append(metas)
    with te.autocast(False):
        close(out, jax.jit(model.apply)({}, *args))
    for n, metas in enumerate(states, 1):
        seen = amaxes(metas)
        for name, x in zip("qkv", (q, k, v)):
            assert seen[name] == float(jnp.abs(x).max())
            np.testing.assert_allclose(metas[f"{name}_scale"], 448 / seen[name], rtol=1e-6)
        for name in AttentionMetas._fields:
            recorded = np.count_nonzero(metas[f"{name}_amax_history"])
            assert recorded == (n if name in SEEN else 0)
            assert name in SEEN or metas[f"{name}_scale"] == 1
    assert states[0]["o_amax_history"][-1] != states[1]["o_amax_history"][-1]  # of other scales


def test_gradients_in_fp8(fp8):
    """Long full attention of head dim 128: all nine tensors have an amax, once the scales of `do` and of `dp` keep
    them from being 0 in E5M2, a step each."""
    model = te_flax.DotProductAttention(128, 1, attn_mask_type="no_mask")
    args = tuple(data(1, 1024, 1, 128, seed=i) for i in range(3))
    metas = quick_init(model.init)(KEY, *args)["fp8_metas"]
    step = jax.jit(lambda metas: new_state(model, metas, *args)[0])
    for _ in range(3):
        metas = step(metas)
    assert all(amax > 0 for amax in amaxes(metas).values())
    for name in ("do", "dq", "dk", "dv", "dp"):
        np.testing.assert_allclose(metas[f"{name}_scale"], 57344 / metas[f"{name}_amax_history"].max(), rtol=1e-6)


NOT_SERVED = {
    "a bias is given": (dict(), dict(bias=jnp.ones((24, 24), bf16))),
    "a mask is given": (dict(), dict(mask=jnp.zeros((24, 24), bool))),
    "dropout_rate is 0.5": (dict(attention_dropout=0.5), dict(rngs={"dropout": KEY})),
    "a sequence_descriptor": (
        dict(attn_mask_type="padding"),
        dict(sequence_descriptor=SequenceDescriptor.from_seqlens(jnp.array([20, 24]))),
    ),
    "with window_size": (dict(window_size=(3, 0)), dict()),
    "softmax_type is": (dict(softmax_type="off_by_one"), dict()),
    "return_max_logit": (dict(return_max_logit=True), dict()),
}


@cache
def first_state():
    """That of `attention()` after one step, under RECIPE."""
    return new_state(attention(), quick_init(attention().init)(KEY, *qkv())["fp8_metas"], *qkv())[0]


@pytest.mark.parametrize("reason", NOT_SERVED)
def test_what_is_not_served(reason, fp8):
    """It is told once, the result is that without FP8, the state stays."""
    fields, kwargs = NOT_SERVED[reason]
    model, args = attention(**fields), qkv()
    metas = first_state()
    with pytest.warns(UserWarning, match=f"not in FP8, though the recipe has fp8_dpa=True: .*{reason}"):
        after, out = new_state(model, metas, *args, **kwargs)
    jax.tree.map(np.testing.assert_array_equal, after, metas)
    again = jax.eval_shape(lambda metas: model.apply({"fp8_metas": metas}, *args, **kwargs), metas)
    assert jax.tree.structure(again) == jax.tree.structure(out)  # without a warning, else an error here
    with te.autocast(False):
        want = jax.jit(lambda *args: model.apply({}, *args, **kwargs))(*args)
    jax.tree.map(np.testing.assert_array_equal, out, want)


def test_float32_is_not_served(fp8):
    args = tuple(x.astype(jnp.float32) for x in qkv())
    with pytest.warns(UserWarning, match="q is float32"):
        assert jax.eval_shape(attention().init, KEY, *args)["fp8_metas"].keys() == NAMES


def test_two_uses_combine_by_max(fp8):
    """Under plain autodiff in one pass, and in a scan that shares the state under te.value_and_grad."""

    class Twice(nn.Module):
        @nn.compact
        def __call__(self, q, k, v):
            attend = attention()
            return attend(q, k, v) + attend(3 * q, k, v)

    args = qkv()
    metas, _ = new_state(Twice(), quick_init(Twice().init)(KEY, *args)["fp8_metas"], *args)
    assert amaxes(metas[PLACE])["q"] == 3 * float(jnp.abs(args[0]).max())

    class Shared(nn.Module):
        @nn.compact
        def __call__(self, q, k, v):
            body = lambda attend, carry, factor: (carry, attend(factor * q, k, v))
            scan = nn.scan(body, variable_broadcast="fp8_metas", split_rngs={"params": False}, length=3)
            return scan(attention(), 0, jnp.array([1, 3, 2], bf16))[1]

    model = Shared()
    variables = quick_init(model.init)(KEY, *args)
    _, grads = jax.jit(te.value_and_grad(lambda variables: mean_square(model.apply(variables, *args))))(variables)
    (metas,) = grads["fp8_metas"].values()
    assert amaxes(metas)["q"] == 3 * float(jnp.abs(args[0]).max())


def layer(**fields):
    return te_flax.TransformerLayer(
        hidden_size=H * D, mlp_hidden_size=64, num_attention_heads=H, hidden_dropout=0.0, attention_dropout=0.0,
        dtype=bf16, **fields,
    )  # fmt: skip


def test_scan_and_remat(fp8):
    """Two layers, scanned and rematerialized: a state each, of the amaxes that the layers have one by one."""
    x = data(2, 24, H * D)

    class Stack(nn.Module):
        @nn.compact
        def __call__(self, x):
            body = nn.remat(lambda block, x, _: (block(x, deterministic=True), None), prevent_cse=False)
            axes = {"params": 0, "fp8_metas": 0}
            scan = nn.scan(
                body, variable_axes=axes, split_rngs={"params": True}, length=2,
                metadata_params={nn.PARTITION_NAME: None},
            )  # fmt: skip
            return scan(layer(name="layer"), x, None)[0]

    def state_of(model, variables, x):
        def loss(metas):
            return mean_square(model.apply({"params": variables["params"], "fp8_metas": metas}, x))

        return jax.jit(jax.grad(loss))(variables["fp8_metas"])

    variables = quick_init(Stack().init)(KEY, x)
    stacked = state_of(Stack(), variables, x)["layer"]["attention"][PLACE]
    assert stacked.keys() == NAMES and stacked["q_amax_history"].shape == (2, L)
    first = jax.tree.map(lambda a: a[0], nn.unbox(variables)["params"]["layer"])
    alone = state_of(layer(), {**quick_init(layer().init)(KEY, x), "params": first}, x)["attention"][PLACE]
    for name in NAMES:
        np.testing.assert_allclose(stacked[name][0], alone[name], rtol=2.0**-7)  # bf16 of other fusions


def test_training(fp8):
    """A layer learns to halve its input, in FP8 as without: the state follows, the losses are close."""
    x = data(4, 32, H * D)
    model, losses = layer(self_attn_mask_type="no_mask"), {}

    def train(steps=30):
        variables = quick_init(model.init)(KEY, x)
        params, others = variables["params"], {"fp8_metas": variables.get("fp8_metas", {})}

        def loss(params, others):
            return mean_square(model.apply({"params": params, **others}, x, deterministic=True) - 0.5 * x)

        @jax.jit
        def step(params, others):
            value, (grads, others) = jax.value_and_grad(loss, argnums=(0, 1))(params, others)
            new = jax.tree.map(lambda p, g: p - (0.3 * g).astype(p.dtype), params, grads)
            return value, new, te.update_fp8_metas(others)

        values = []
        for _ in range(steps):
            value, params, others = step(params, others)
            values.append(float(value))
        return values, others["fp8_metas"]

    losses, metas = train()
    state = metas["attention"][PLACE]
    assert all(np.all(state[f"{name}_amax_history"][1:] > 0) for name in SEEN)
    with te.autocast(False):
        want, _ = train()
    assert losses[-1] < 0.7 * losses[0]
    np.testing.assert_allclose(losses[-1], want[-1], rtol=0.05)


def test_generation(fp8):
    """With a cache attention is not in FP8; the prompt's is."""
    model = te_flax.MultiHeadAttention(D, H, dtype=bf16)
    x = data(2, 8, 32)
    variables = quick_init(model.init)(KEY, x)
    (y, _), cache = model.apply(variables, x, decode=True, max_decode_length=16, mutable=["cache"])
    np.testing.assert_array_equal(y, model.apply(variables, x)[0])
    with pytest.warns(UserWarning, match="cache"):
        model.apply({**variables, **cache}, x[:, :1], decode=True, mutable=["cache"])
