"""LayerNormMLP: numbers from raw parameters, tree, keys, dropout, checkpoint names, errors."""

from functools import partial

import flax_reference as ref
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from flax_reference import data
from quick_init import quick_init

import te_jax.flax as te_flax

KEY = jax.random.key(0)


@pytest.mark.parametrize("activations", [("gelu",), ("silu", "linear"), ("linear", "silu")])
@pytest.mark.parametrize("use_bias", [True, False])
@pytest.mark.parametrize("lora", [True, False])
def test_layernorm_mlp(activations, use_bias, lora):
    x = data(2, 3, 12) * 4
    module = te_flax.LayerNormMLP(
        intermediate_dim=20,
        activations=activations,
        use_bias=use_bias,
        return_layernorm_output=True,
        layernorm_type="rmsnorm" if lora else "layernorm",
        enable_low_rank_adaptation=lora,
        low_rank_adaptation_dim=5,
        low_rank_adaptation_alpha=2.0,
    )
    fresh = module.init(KEY, x)["params"]
    a = len(activations)
    want = {"scale": (12,)} | ({} if lora else {"ln_bias": (12,)})
    want |= {"wi_kernel": (12, a, 20), "wo_kernel": (20, 12)}
    want |= {"wi_bias": (a, 20), "wo_bias": (12,)} if use_bias else {}
    if lora:
        want |= {"wi_lora_a_kernel": (12, a, 5), "wi_lora_b_kernel": (a, 5, 20)}
        want |= {"wo_lora_a_kernel": (20, 5), "wo_lora_b_kernel": (5, 12)}
    assert list(fresh) == list(want) and ref.shapes(fresh) == want
    assert fresh["wi_kernel"].names == ("embed", "act", "mlp") and fresh["wo_kernel"].names == (
        "mlp",
        "embed",
    )
    params = ref.filled(fresh)
    y, ln_out = module.apply({"params": params}, x)
    kind = "rmsnorm" if lora else "layernorm"
    want_y, want_ln = ref.mlp(ref.f64(x), ref.f64(params), kind, swiglu=a == 2, alpha=2.0)
    np.testing.assert_allclose(y, want_y, rtol=3e-5, atol=3e-5)
    np.testing.assert_allclose(ln_out, want_ln, rtol=2e-5, atol=2e-5)


def test_without_norm():
    x = data(2, 12)
    module = te_flax.LayerNormMLP(intermediate_dim=8, enable_layernorm=False, return_layernorm_output=True)
    fresh = module.init(KEY, x)["params"]
    assert list(fresh) == ["wi_kernel", "wo_kernel"]
    y, ln_out = module.apply({"params": fresh}, x)
    np.testing.assert_allclose(y, ref.mlp(ref.f64(x), ref.f64(fresh))[0], rtol=2e-5, atol=2e-5)
    np.testing.assert_array_equal(ln_out, x)


def test_functions_and_activation_params():
    x = data(5, 12)
    module = te_flax.LayerNormMLP(intermediate_dim=8, activations=(jnp.sin, "linear"))
    params = quick_init(module.init)(KEY, x)["params"]
    p = ref.f64(params)
    z = np.tensordot(ref.norm(ref.f64(x), p), p["wi_kernel"], 1)
    want = (np.sin(z[:, 0]) * z[:, 1]) @ p["wo_kernel"]
    np.testing.assert_allclose(jax.jit(module.apply)({"params": params}, x)[0], want, rtol=2e-5, atol=2e-5)
    clamped = te_flax.LayerNormMLP(
        intermediate_dim=8, activations=("clamped_silu", "clamped_linear"), activation_params={"limit": 0.5}
    )
    u, v = np.minimum(z[:, 0], 0.5), np.clip(z[:, 1], -0.5, 0.5) + 1
    want = (u / (1 + np.exp(-1.702 * u)) * v) @ p["wo_kernel"]
    np.testing.assert_allclose(jax.jit(clamped.apply)({"params": params}, x)[0], want, rtol=2e-5, atol=2e-5)


def test_keys():
    """wi draws its parts from the chain key, k_i = split(key), each as (H, F)."""
    drawn = []

    def record(key, shape, dtype):
        drawn.append((tuple(np.asarray(jax.random.key_data(key))), shape))
        return jnp.zeros(shape, dtype)

    class Probe(nn.Module):  # the same parameters in the same order, one draw each
        @nn.compact
        def __call__(self):
            for name in ("scale", "ln_bias", "wi_kernel", "wo_kernel"):
                self.param(name, record, (1,), jnp.float32)

    te_flax.LayerNormMLP(intermediate_dim=6, activations=("silu", "linear"), kernel_init=record).init(KEY, data(2, 4))
    ours, drawn[:] = list(drawn), []
    Probe().init(KEY)
    key, want = jax.random.wrap_key_data(jnp.asarray(drawn[2][0], jnp.uint32)), []
    for _ in range(2):
        key, part = jax.random.split(key)
        want.append((tuple(np.asarray(jax.random.key_data(part))), (4, 6)))
    assert ours == [*want, (drawn[3][0], (6, 4))]


def test_dropout():
    x = data(4, 6, 12)
    module = te_flax.LayerNormMLP(
        intermediate_dim=64,
        intermediate_dropout_rate=0.5,
        intermediate_dropout_rng_name="mine",
        intermediate_hidden_dropout_dims=(1,),
    )
    variables = {"params": quick_init(module.init)({"params": KEY, "mine": KEY}, x)["params"]}
    still = jax.jit(partial(module.apply, deterministic=True))(variables, x)[0]
    np.testing.assert_allclose(still, ref.mlp(ref.f64(x), ref.f64(variables["params"]))[0], rtol=3e-5, atol=3e-5)
    draw = jax.jit(jax.vmap(lambda k: module.apply(variables, x, rngs={"mine": k})[0]))
    many = np.asarray(draw(jax.random.split(KEY, 2000)))
    one, two, *_ = many
    assert not np.allclose(one, two) and not np.allclose(one, still)
    # 2000 draws: the mean's error is 1 / sqrt(2000) of a spread of the order of `still`.
    assert ref.relative_error(many.mean(0), still) < 0.1
    same = te_flax.LayerNormMLP(
        intermediate_dim=64, intermediate_dropout_rate=5e-4, intermediate_hidden_dropout_dims=()
    )
    far = jax.jit(jax.vmap(lambda k: same.apply(variables, x, rngs={"dropout": k})[0]))(jax.random.split(KEY, 32))
    assert (np.asarray(far) != np.asarray(far[:1])).any(), "small rates are honoured too: 1536 units, 31 draws"


def test_checkpoint_names():
    x = data(4, 12)
    module = te_flax.LayerNormMLP(intermediate_dim=8, ffn1_ckpt_name="one", ffn2_ckpt_name="two")
    variables = jax.eval_shape(module.init, KEY, x)
    names = str(jax.make_jaxpr(lambda v: module.apply(v, x)[0])(variables))
    assert "name=one" in names and "name=two" in names


@pytest.mark.parametrize(
    ("fields", "error", "text"),
    [
        (dict(activations=("gelu", "swish7")), ValueError, "'swish7' is not known"),
        (dict(activations="gelu"), ValueError, "pass a tuple"),
        (dict(activation_params={"limit": 3.0}), ValueError, "'limit'"),
        (dict(axis=0), ValueError, "axis is 0"),
        (dict(intermediate_dim=0), ValueError, "intermediate_dim"),
        (dict(layernorm_type="l2"), ValueError, "'l2'"),
    ],
)
def test_errors(fields, error, text):
    with pytest.raises(error, match=text):
        jax.eval_shape(te_flax.LayerNormMLP(**{"intermediate_dim": 8, **fields}).init, KEY, data(2, 4))


def test_fields_in_declaration_order():
    names = (
        "intermediate_dim enable_layernorm layernorm_type epsilon zero_centered_gamma scale_init scale_axes "
        "ln_bias_init ln_bias_axes kernel_init kernel_axes_1 kernel_axes_2 use_bias bias_init bias_axes_1 "
        "bias_axes_2 return_layernorm_output activations activation_params intermediate_dropout_rng_name "
        "intermediate_dropout_rate intermediate_hidden_dropout_dims enable_low_rank_adaptation "
        "low_rank_adaptation_dim low_rank_adaptation_alpha axis dtype layernorm_input_axes dot_1_input_axes "
        "dot_2_input_axes ffn1_ckpt_name ffn2_ckpt_name transpose_batch_sequence quantization_checkpoint_name"
    ).split()
    assert list(te_flax.LayerNormMLP.__dataclass_fields__)[: len(names)] == names
