"""Norms of values and values that are keys, against plain JAX."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from flax_reference import data

import te_jax as te
import te_jax.flax as te_flax
import te_jax.nnx as te_nnx

pytestmark = pytest.mark.usefixtures("on_host")
H, N, G, D, B, S, EPS = 24, 4, 2, 8, 2, 6, 0.25
FIELDS = dict(num_gqa_groups=G, layernorm_type="rmsnorm", enable_rotary_pos_emb=True)
CASES = {
    "values have a norm": dict(v_norm_eps=EPS),
    "values are keys": dict(keys_as_values=True),
    "both, as in Gemma 4": dict(
        v_norm_eps=EPS, keys_as_values=True, qk_norm_type="rmsnorm", qk_norm_before_rope=True, qk_norm_eps=EPS
    ),
}
# f32 sums of at most 32 terms, four products behind each other and their gradients.
BOUND = 128 * 2.0**-24


def rms(x, eps=1e-6):
    return x / jnp.sqrt(jnp.mean(x**2, -1, keepdims=True) + eps)


def turned(x):
    """RoPE of neighbouring channels, as numbers of the complex plane."""
    angles = jnp.arange(S)[:, None] * 10_000.0 ** (-jnp.arange(0, D, 2) / D)
    pairs = jax.lax.complex(x[..., ::2], x[..., 1::2]) * jnp.exp(1j * angles)[:, None]
    return jnp.stack([pairs.real, pairs.imag], -1).reshape(x.shape)


def reference(p, x, v_norm_eps=None, keys_as_values=False, qk_norm_type=None, **_):
    h = rms(x) * p["query"]["scale"]
    heads = lambda kernel: (h @ kernel).reshape(B, S, -1, D)
    q = heads(p["query"]["kernel"])
    k, v = [heads(p["key"]["kernel"])] * 2 if keys_as_values else map(heads, jnp.moveaxis(p["kv"]["kernel"], 1, 0))
    v = v if v_norm_eps is None else rms(v, v_norm_eps)
    if qk_norm_type is not None:
        q, k = rms(q, EPS) * p["q_norm"]["scale"], rms(k, EPS) * p["k_norm"]["scale"]
    q, (k, v) = turned(q), (jnp.repeat(a, N // G, 2) for a in (turned(k), v))
    logits = jnp.where(jnp.tri(S, dtype=bool), jnp.einsum("bshd,bthd->bhst", q, k) / D**0.5, -jnp.inf)
    return jnp.einsum("bhst,bthd->bshd", jax.nn.softmax(logits, -1), v).reshape(B, S, -1) @ p["out"]["kernel"]


@pytest.mark.parametrize("name", CASES)
def test_against_plain_jax(name):
    """Outputs and gradients; token by token from the cache; near them in FP8; NNX has the same bits."""
    fields, x, weights = CASES[name], data(B, S, H), data(B, S, H, seed=2)
    module = te_flax.MultiHeadAttention(D, N, **FIELDS | fields)
    model = te_nnx.MultiHeadAttention(H, head_dim=D, num_attention_heads=N, **FIELDS | fields, rngs=nnx.Rngs(0))
    params = te_nnx.to_linen(model)["params"]
    assert set(params) >= {"query", "key" if "keys_as_values" in fields else "kv", "out"} and "value" not in params
    own = lambda p, x: module.apply({"params": p}, x, deterministic=True)[0]

    def by_token(p):
        given, out = {"params": p}, []
        for i in range(S):
            more = dict(decode=True, deterministic=True, max_decode_length=S)
            (y, _), new = module.apply(given, x[:, i : i + 1], **more, mutable=["cache"])
            given, out = {"params": p, **new}, [*out, y]
        return jnp.concatenate(out, 1)

    def both(run):
        return jax.value_and_grad(lambda p, x: (jnp.vdot(y := run(p, x), weights), y), (0, 1), has_aux=True)

    run = lambda p, x: (both(own)(p, x), both(lambda p, x: reference(p, x, **fields))(p, x), by_token(p))
    ((_, y), grads), ((_, want), dwant), tokens = jax.jit(run)(params, x)
    close = lambda a, b: np.testing.assert_allclose(a, b, rtol=0, atol=BOUND * max(1, np.abs(b).max()))
    jax.tree.map(close, (y, grads, tokens), (want, dwant, want))
    np.testing.assert_array_equal(nnx.jit(lambda m, x: m(x, deterministic=True)[0])(model, x), jax.jit(own)(params, x))
    with te.autocast(True, te.recipe.Float8CurrentScaling()):
        in_fp8 = jax.jit(own)(params, x)
    # Operands of 3 bits are off by 2**-4 at most, three products in a row by less than the sum of these.
    assert 0 < np.abs(in_fp8 - want).max() < 3 * 2.0**-4 * np.abs(want).max()


def test_layers_hand_them_on():
    """To self-attention; latent attention has neither."""
    fields = dict(hidden_size=H, mlp_hidden_size=8, num_attention_heads=N, v_norm_eps=EPS, keys_as_values=True)
    init = lambda **more: jax.eval_shape(
        te_flax.TransformerLayer(**fields | more).init, jax.random.key(0), data(B, S, H)
    )
    assert set(init()["params"]["attention"]) == {"query", "key", "out"}
    latents = dict(kv_lora_rank=8, qk_nope_head_dim=4, qk_rope_head_dim=4, v_head_dim=4)
    with pytest.raises(ValueError, match="v_norm_eps is 0.25, which attention with a kv_lora_rank has no use for"):
        init(**latents)
    module = te_flax.MultiHeadAttention(D, N)
    held = jax.eval_shape(te_flax.MultiHeadAttention(D, N, keys_as_values=True).init, jax.random.key(0), data(B, S, H))
    with pytest.raises(ValueError, match="keys_as_values=False, .* reads"):
        jax.eval_shape(module.apply, held, data(B, S, H))
