"""RoPE's width and scaling in the Flax modules: against float64, when decoding, and what is refused."""

import flax_reference as ref
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from arrays import on_device
from flax import linen as nn

import te_jax.flax as te_flax
from te_jax.models import CausalLM, families
from te_jax.ops.rope import LinearScaling, Llama3Scaling, NTKScaling, PositionSections, rope

KEY = jax.random.key(0)
H, N, D, B, S = 16, 4, 8, 2, 12  # width, heads, width of a head, rows, tokens
# A short training length, so that frequencies of all three parts of the rule are among four.
LLAMA3 = Llama3Scaling(8.0, original_max_position=128)
CLOSE = dict(rtol=1e-4, atol=2e-5)  # f32 sums of at most 32 terms of order 1, three times, and angles up to 12


def data(*shape, seed=1):
    return on_device(np.random.default_rng(seed).normal(size=shape), jnp.float32)


def mha(**fields):
    fields = {"head_dim": D, "num_attention_heads": N, "enable_rotary_pos_emb": True, **fields}
    return te_flax.MultiHeadAttention(**fields)


def layer(**fields):
    sizes = dict(hidden_size=H, mlp_hidden_size=24, num_attention_heads=N, kv_channels=D)
    return te_flax.TransformerLayer(**sizes, hidden_dropout=0.0, attention_dropout=0.0, **fields)


def drawn(module, *args):
    return {"params": ref.filled(jax.eval_shape(module.init, KEY, *args)["params"])}


@pytest.mark.parametrize("method", ["consecutive", "alternate"])
@pytest.mark.parametrize("made", [{}, dict(num_gqa_groups=2), dict(num_gqa_groups=1, fuse_qkv_params=False)], ids=str)
@pytest.mark.parametrize(("dim", "scaling"), [(4, None), (None, LLAMA3), (6, NTKScaling(4)), (2, LinearScaling(4))])
def test_mha(method, made, dim, scaling):
    """Side by side, with fewer groups, apart; in one call, batch second, and from the cache."""
    x = data(B, S, H)
    fields = dict(rotary_pos_emb_group_method=method, rotary_pos_emb_dim=dim, rotary_pos_emb_scaling=scaling, **made)
    module = mha(**fields)
    variables = drawn(module, x)
    rope = dict(group_method=method, rotary_dim=dim, scaling=scaling)
    want, _ = ref.mha(
        ref.f64(x), ref.f64(variables["params"]), N, made.get("num_gqa_groups"), masked=ref.causal(S, S), rope=rope
    )

    @jax.jit
    def run(variables, x):
        whole = module.apply(variables, x)[0]
        flipped = mha(transpose_batch_sequence=True, **fields).apply(variables, jnp.swapaxes(x, 0, 1))[0]
        cache, parts = {}, []
        for at, slots in ((slice(0, 7), dict(max_decode_length=S)), (slice(7, 8), {}), (slice(8, S), {})):
            (y, _), cache = module.apply({**variables, **cache}, x[:, at], decode=True, mutable=["cache"], **slots)
            parts.append(y)
        return dict(whole=whole, flipped=jnp.swapaxes(flipped, 0, 1), decoded=jnp.concatenate(parts, 1))

    for way, got in run(variables, x).items():
        np.testing.assert_allclose(got, want, **CLOSE, err_msg=way)


def test_several_positions_of_a_token():
    """A module turns queries and keys as `rope` does: in one call, batch second, and from the cache."""
    sections, x = PositionSections((1, 2, 1), interleaved=True), data(B, S, H)
    fields = dict(rotary_pos_emb_group_method="alternate", rotary_pos_emb_sections=sections)
    module, at = mha(**fields), jnp.asarray(np.random.default_rng(2).integers(0, 12, (3, B, S)))
    variables = drawn(module, x)
    params = ref.f64(variables["params"])

    @jax.jit
    def run(variables, x):
        whole = module.apply(variables, x, positions=at)[0]
        flipped = mha(transpose_batch_sequence=True, **fields).apply(variables, jnp.swapaxes(x, 0, 1), positions=at)[0]
        cache, parts = {}, []
        for part, slots in ((slice(0, 7), dict(max_decode_length=S)), (slice(7, S), {})):
            call = dict(decode=True, mutable=["cache"], positions=at[..., part], **slots)
            (y, _), cache = module.apply({**variables, **cache}, x[:, part], **call)
            parts.append(y)
        return dict(whole=whole, flipped=jnp.swapaxes(flipped, 0, 1), decoded=jnp.concatenate(parts, 1))

    turn = lambda a: np.asarray(rope(jnp.asarray(a, jnp.float32), at, group_method="alternate", sections=sections))
    want, _ = ref.mha(ref.f64(x), params, N, masked=ref.causal(S, S), rope=turn)
    for way, got in run(variables, x).items():
        np.testing.assert_allclose(got, want, **CLOSE, err_msg=way)


def test_several_positions_of_a_model():
    """Logits of a prompt and of the tokens behind it, from the cache, as in one call."""
    size = families.Size(H, 2 * H, N, 1, head_dim=D, vocab=16)
    model = CausalLM(families.llama(size).with_layer(rotary_pos_emb_sections=PositionSections((1, 1, 2))))
    tokens, at = jnp.arange(2 * S).reshape(2, S) % 16, np.random.default_rng(2).integers(0, 12, (3, 2, S))
    variables = model.init(KEY, tokens)

    @jax.jit
    def run(variables):
        whole, cache, parts = model.apply(variables, tokens, positions=jnp.asarray(at)), {}, []
        for part, slots in ((slice(0, 7), dict(max_decode_length=S)), (slice(7, S), {})):
            call = dict(decode=True, mutable=["cache"], positions=jnp.asarray(at[..., part]), **slots)
            logits, cache = model.apply({**variables, **cache}, tokens[:, part], **call)
            parts.append(logits)
        return whole, jnp.concatenate(parts, 1), model.apply(variables, tokens)

    whole, decoded, as_text = run(variables)
    np.testing.assert_allclose(decoded, whole, **CLOSE)
    assert np.abs(whole - as_text).max() > 1e-3


@pytest.mark.parametrize("cross", [False, True])
def test_layer(cross):
    """The attention that has RoPE gets its fields, and the other none."""
    fields = dict(rotary_pos_emb_dim=4, rotary_pos_emb_scaling=LLAMA3, layer_type="decoder")
    fields["cross_rotary_pos_emb" if cross else "enable_rotary_pos_emb"] = True
    args, seen = (data(B, S, H), data(B, 5, H, seed=2)), {}

    def spy(call, a, k, context):
        m = context.module
        if isinstance(m, te_flax.MultiHeadAttention):
            seen[m.name] = (m.enable_rotary_pos_emb, m.rotary_pos_emb_dim, m.rotary_pos_emb_scaling)
        return call(*a, **k)

    module = layer(**fields)
    with nn.intercept_methods(spy):
        jax.eval_shape(module.init, KEY, *args)
    with_rope, without = ("encoder_decoder_attention", "self_attention")[:: 1 if cross else -1]
    assert seen == {with_rope: (True, 4, LLAMA3), without: (False, None, None)}


@pytest.mark.parametrize(
    ("fields", "error", "text"),
    [
        (dict(rotary_pos_emb_dim=3), ValueError, "rotary_pos_emb_dim is 3; pass None or an even int of 2 to 8"),
        (dict(rotary_pos_emb_dim=10), ValueError, "rotary_pos_emb_dim is 10"),
        (dict(rotary_pos_emb_scaling=8.0), TypeError, r"rotary_pos_emb_scaling is 8\.0; pass None, LinearScaling"),
        (
            dict(rotary_pos_emb_dim=2, rotary_pos_emb_scaling=NTKScaling(2)),
            ValueError,
            r"rotary_pos_emb_scaling is NTKScaling\(factor=2\), but a single pair",
        ),
        (
            dict(rotary_pos_emb_dim=4, enable_rotary_pos_emb=False),
            ValueError,
            "rotary_pos_emb_dim is 4, but RoPE is off; set enable_rotary_pos_emb",
        ),
        (
            dict(rotary_pos_emb_scaling=LLAMA3, enable_rotary_pos_emb=False),
            ValueError,
            "rotary_pos_emb_scaling is Llama3Scaling.*, but RoPE is off",
        ),
        (
            dict(rotary_pos_emb_sections=(2, 1, 1)),
            TypeError,
            r"rotary_pos_emb_sections is \(2, 1, 1\); pass None or Pos",
        ),
        (
            dict(rotary_pos_emb_sections=PositionSections((1, 1))),
            ValueError,
            "rotary_pos_emb_sections is .*, but 4 pairs of channels turn",
        ),
        (
            dict(rotary_pos_emb_sections=PositionSections((2, 2)), attn_temperature=(8, 0.1)),
            ValueError,
            "rotary_pos_emb_sections is .*, but attn_temperature=.* needs one position",
        ),
    ],
)
def test_errors(fields, error, text):
    for make, name in ((mha, "MultiHeadAttention"), (layer, "TransformerLayer")):
        with pytest.raises(error, match=f"^{name}: {text}"):
            make(**{"enable_rotary_pos_emb": True, **fields}).init(KEY, data(B, S, H))
    with pytest.raises(ValueError, match="set enable_rotary_pos_emb or cross_rotary_pos_emb"):
        layer(layer_type="decoder", rotary_pos_emb_dim=4).init(KEY, data(B, S, H), data(B, S, H))
