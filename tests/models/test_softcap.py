"""Gemma 2's fields: soft caps of logits and norms behind sub-blocks, against plain JAX; which implementation serves."""

import flax_reference as ref
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax_reference import data

import te_jax.flax as te_flax
from te_jax.ops.attention import dot_product_attention, explain_attention

KEY = jax.random.key(0)
B, S, H, N, G, D = 2, 5, 24, 4, 2, 8
CAP = 0.7  # of logits of order 1
# Five products of at most 24 terms in f32, and norms; each adds a few roundings of 2**-24 of the largest value.
BOUND = 128 * 2.0**-24
HIDE = np.triu(np.ones((S, S), bool), 1)


def attend(q, k, v, bias=0.0, pre_scale=False, scale=D**-0.5, hidden=HIDE):
    k, v = (jnp.repeat(x, N // G, 2) for x in (k, v))
    dots = jnp.einsum("bshd,bthd->bhst", q, k)
    cap = lambda x: CAP * jnp.tanh(x / CAP)
    logits = cap(scale * (dots + bias)) if pre_scale else cap(scale * dots) + bias
    return jnp.einsum("bhst,bthd->bshd", jax.nn.softmax(jnp.where(hidden, -jnp.inf, logits), -1), v)


def close(got, want):
    for (path, a), b in zip(jax.tree_util.tree_leaves_with_path(got), jax.tree.leaves(want), strict=True):
        atol = BOUND * np.abs(b).max(initial=1.0)  # terms are of order 1 where their sum is less
        np.testing.assert_allclose(a, b, rtol=0, atol=atol, err_msg=jax.tree_util.keystr(path))


@pytest.mark.parametrize("kind", ["post_scale_bias", "pre_scale_bias"])
def test_against_plain_jax(kind):
    """With a bias before and behind the cap, which hides a key by -inf in either place, and its gradient."""
    q, k, v, dout = data(B, S, N, D), data(B, S, G, D, seed=2), data(B, S, G, D, seed=3), data(B, S, N, D, seed=4)
    bias, hidden = data(1, N, S, S, seed=5), HIDE | np.eye(S, k=-2, dtype=bool)
    low = jnp.where(hidden & ~HIDE, -jnp.inf, 0.0)
    options = dict(attn_mask_type="causal", attn_bias_type=kind, logit_softcap=CAP)

    @jax.jit
    def run(q, k, v, bias):
        got = jax.vjp(lambda *x: dot_product_attention(*x[:3], bias=x[3] + low, **options), q, k, v, bias)
        plain = lambda *x: attend(*x, pre_scale=kind == "pre_scale_bias", hidden=hidden)
        want = jax.vjp(plain, q, k, v, bias)
        return [(y, vjp(dout)) for y, vjp in (got, want)]

    close(*run(q, k, v, bias))


def test_who_serves():
    q = jax.ShapeDtypeStruct((2, 128, 4, 64), jnp.bfloat16)
    assert explain_attention(q, q, q, platform="cuda").implementation == "cudnn"
    choice = explain_attention(q, q, q, logit_softcap=50.0)
    assert choice.implementation == "xla" and "logit_softcap is 50.0" in choice.refused["cudnn"]
    with pytest.raises(ValueError, match="logit_softcap is 50.0; cuDNN's op does not have it; pass None or 'xla'"):
        explain_attention(q, q, q, logit_softcap=50.0, implementation="cudnn")
    for value, error in ((0.0, ValueError), (-1.0, ValueError), ("50", TypeError), (float("inf"), ValueError)):
        with pytest.raises(error, match="logit_softcap is .*; pass None or a number above 0"):
            explain_attention(q, q, q, logit_softcap=value)
    mesh = jax.make_mesh((2,), ("cp",), axis_types=(jax.sharding.AxisType.Auto,))
    with jax.set_mesh(mesh), pytest.raises(ValueError, match="logit_softcap is 50.0, which attention over a cut"):
        explain_attention(q, q, q, logit_softcap=50.0, axis="cp")


@pytest.mark.parametrize("kind", ["encoder", "decoder"])
def test_layer(kind):
    """Four norms a layer and a cap, in one call and from the cache; in a decoder six norms."""
    module = te_flax.TransformerLayer(
        H, 16, N, G, kv_channels=D, layernorm_type="rmsnorm", zero_centered_gamma=True, post_norms=True,
        layer_type=kind, attn_logit_softcap=CAP, fuse_qkv_params=False, hidden_dropout=0.0, attention_dropout=0.0,
    )  # fmt: skip
    x, weights, encoded = data(B, S, H), data(B, S, H, seed=2), data(B, S, H, seed=3)
    args = (encoded,) if kind == "decoder" else ()
    params = ref.unboxed(ref.filled(jax.eval_shape(module.init, KEY, x, *args)["params"]))
    rms = lambda x, scale: x / jnp.sqrt(jnp.mean(x**2, -1, keepdims=True) + 1e-6) * (1 + scale)

    def block(p, x, source=None):
        normed = rms(x, p["query"]["scale"])
        of = dict(query=normed, key=normed if source is None else source, value=normed if source is None else source)
        q, k, v = ((of[name] @ p[name]["kernel"]).reshape(B, S, -1, D) for name in of)
        return attend(q, k, v, hidden=HIDE if source is None else False).reshape(B, S, -1) @ p["out"]["kernel"]

    def reference(p, x):
        first = "self_attention" if args else "attention"
        x = x + rms(block(p[first], x), p[f"post_{first}_norm"]["scale"])
        if args:
            name = "encoder_decoder_attention"
            x = x + rms(block(p[name], x, encoded), p[f"post_{name}_norm"]["scale"])
        wide = jax.nn.gelu(rms(x, p["mlp"]["scale"]) @ p["mlp"]["wi_kernel"][:, 0])
        return x + rms(wide @ p["mlp"]["wo_kernel"], p["post_mlp_norm"]["scale"])

    @jax.jit
    def run(params, x):
        apply = lambda p, x: module.apply({"params": p}, x, *args)
        out = []
        for layer in (apply, reference):
            y, vjp = jax.vjp(layer, params, x)
            out.append((y, vjp(weights)))
        call = dict(decode=True, mutable=["cache"])
        first, cache = module.apply({"params": params}, x[:, :3], *args, max_decode_length=S, **call)
        rest, _ = module.apply({"params": params, **cache}, x[:, 3:], *args, **call)
        return *out, jnp.concatenate([first, rest], 1)

    got, want, decoded = run(params, x)
    close(got, want)
    close(decoded, want[0])
