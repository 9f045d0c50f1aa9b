"""Tokens, positions and types that a table has no row for; lengths, offsets and ids below 0 or beyond a row."""

import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from arrays import on_device
from flax import linen as nn
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from quick_init import quick_init

import te_jax.flax as te_flax
from te_jax import models
from te_jax.core import check
from te_jax.models.stack import Model, rows_at
from te_jax.ops.attention import SequenceDescriptor, dot_product_attention
from te_jax.sharding import reorder_causal_load_balancing

V, H, S = 6, 4, 8
IDS = np.array([[0, V - 1, V, V + 5, 10**6], [-1, -V, -V - 1, -1000, 3]])


class Embeds(Model):
    """The sum of all look-ups of a model."""

    @nn.compact
    def __call__(self, tokens, positions=None, kinds=None, lengths=None):
        return self._embed(self._table("embedding", V), self._rows(tokens, lengths), positions, kinds)


def of_flax(params, tokens, positions, kinds):
    rows = lambda name, ids: nn.Embed(V, H).apply({"params": {"embedding": params[name]}}, ids)
    return rows("embedding", tokens) + rows("positions", positions) + rows("token_types", kinds)


@pytest.mark.parametrize("axis_type", ["Auto", "Explicit"])
@pytest.mark.parametrize("by_product", [False, True])
def test_look_ups_are_those_of_flax(by_product, axis_type, rng):
    """Of tokens, positions and token types, values and gradients."""
    config = models.ModelConfig(V, 1, H, max_positions=V, token_types=V)
    model, inside = Embeds(config, dtype=jnp.float32, embed_by_product=by_product), IDS % V
    tables = ("embedding", "positions", "token_types")
    params = {name: on_device(rng.normal(size=(V, H)), jnp.float32) for name in tables}
    mesh = jax.make_mesh((1,), ("dp",), axis_types=(AxisType[axis_type],))
    ours = lambda params, *args: model.apply({"params": params}, *args)

    @jax.jit
    def both(ids):
        total = lambda y: jnp.sum(jnp.where(jnp.isnan(y), 0, y) ** 2)
        loss = lambda look_up: jax.value_and_grad(lambda p: (total(y := look_up(p, *ids)), y), has_aux=True)
        return tuple((y, grads) for (_, y), grads in (loss(f)(params) for f in (ours, of_flax)))

    with jax.set_mesh(mesh):
        for at, dtype in ((0, np.int32), (1, np.int32), (2, np.int32), (0, np.uint8), (0, np.uint32)):
            ids = [inside.astype(dtype)] * 3
            ids[at] = IDS.astype(dtype)
            got, want = both(tuple(map(jnp.asarray, ids)))
            assert np.isnan(want[0]).any()
            np.testing.assert_array_equal(got[0], want[0])
            # Rows that several tokens share are summed in another order.
            jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2.0**-20), got[1], want[1])


@pytest.mark.parametrize("balanced", [False, True])
@pytest.mark.parametrize("kind", ["Auto", "Explicit", "Manual"])
def test_look_ups_of_rows_that_devices_share(kind, balanced, rng):
    """Learned positions follow the tokens, and what pads is not read: neither tokens nor positions nor types."""
    config = models.ModelConfig(V, 1, H, max_positions=S, token_types=V)
    cut = config.with_layer(context_parallel_axis="cp", context_parallel_causal_load_balanced=balanced)
    sizes = {"embedding": V, "positions": S, "token_types": V}
    params = {name: rng.normal(size=(size, H)) for name, size in sizes.items()}
    rows = rng.integers(0, V, (3, S))
    lengths = np.array([S, 5, 0])
    pads = np.arange(S) >= lengths[:, None]
    rows[pads] = V + 5
    embed = lambda config, params, *args: Embeds(config, dtype=jnp.float32).apply({"params": params}, *args)
    want = embed(config, params, rows % V, None, rows % V, lengths)
    at = np.where(pads, 10**6, np.arange(S))
    np.testing.assert_array_equal(embed(config, params, rows, at, rows, lengths)[~pads], want[~pads])
    reorder = reorder_causal_load_balancing if balanced else lambda x, _: x
    mesh = jax.make_mesh((2,), ("cp",), axis_types=(AxisType[kind.replace("Manual", "Auto")],))
    each = P(None, "cp")
    ours = lambda params, rows, lengths: embed(cut, params, rows, None, rows, lengths)
    with jax.set_mesh(mesh):
        ours = jax.shard_map(ours, in_specs=(P(), each, P()), out_specs=each) if kind == "Manual" else ours
        rows = jax.device_put(reorder(rows, 2), jax.NamedSharding(mesh, each))
        got = jax.jit(ours)(jax.device_put(params, jax.NamedSharding(mesh, P())), rows, jnp.asarray(lengths))
    tokens = ~reorder(pads, 2)
    np.testing.assert_array_equal(np.asarray(got)[tokens], reorder(np.asarray(want), 2)[tokens])


def test_a_token_that_is_none_reaches_the_logits_of_its_row():
    model = models.CausalLM(models.ModelConfig(V, 1, 16, dict(num_attention_heads=2, mlp_hidden_size=16)))
    tokens = jnp.array([[1, 2, V + 5], [-1000, 2, 3], [-1, 2, 3]])
    logits, _ = jax.jit(lambda t: model.init_with_output(jax.random.key(0), t))(tokens)
    is_nan = np.isnan(np.asarray(logits)).all(-1)
    assert is_nan[0, 2] and is_nan[1].all() and np.isfinite(logits[2]).all()
    np.testing.assert_array_equal(np.isnan(rows_at(logits[2:], jnp.array([3]))), True)


# -- lengths ------------------------------------------------------------------------------------------------------


def descriptor(**fields):
    arrays = {name: np.asarray(value, np.int32) for name, value in fields.items()}
    if "segment_ids" in arrays:
        return SequenceDescriptor.from_segment_ids_and_pos(**arrays)
    if "seq_offsets" in arrays:
        return SequenceDescriptor.from_seqlens_and_offsets(**arrays)
    return SequenceDescriptor.from_seqlens(**arrays)


LENGTHS = {  # what is wrong with it, or None
    "inside": (dict(seqlens=[3, S]), None),
    "empty": (dict(seqlens=[0, S]), None),
    "negative": (dict(seqlens=[3, -4]), "seqlens has -4; it counts as 0"),
    "beyond": (dict(seqlens=[3, 40]), "has 40, but a row has 8"),
    "packed": (dict(seqlens=[[3, 5], [8, -1]], seq_offsets=[[0, 3, 8], [0, -1, -1]]), None),
    "packed_negative": (dict(seqlens=[[3, -2], [8, -1]], seq_offsets=[[0, 3, 8], [0, -1, -1]]), "seqlens has -2"),
    "packed_before": (dict(seqlens=[[3, 5], [8, -1]], seq_offsets=[[-3, 3, 8], [0, -1, -1]]), "seq_offsets has -3"),
    "packed_beyond": (dict(seqlens=[[3, 5], [8, -1]], seq_offsets=[[0, 4, 9], [0, -1, -1]]), "up to token 9, but"),
    "ids": (dict(segment_ids=[[1] * S, [1] * 4 + [0] * 4]), None),
    "ids_negative": (dict(segment_ids=[[1] * S, [1] * 4 + [-1] * 4]), "segment_ids has -1"),
}


def attend(described):
    x = jnp.ones((2, S, 2, 8))
    return dot_product_attention(x, x, x, attn_mask_type="padding", sequence_descriptor=described)


def decode(described):
    module, x = te_flax.MultiHeadAttention(head_dim=8, num_attention_heads=2), jnp.ones((2, S, 16))
    params = {"params": module.init(jax.random.key(0), x)["params"]}
    return module.apply(params, x, mask=described, decode=True, max_decode_length=S, mutable=["cache"])[0][0]


def in_model(described):
    model = models.CausalLM(models.ModelConfig(V, 1, 16, dict(num_attention_heads=2, mlp_hidden_size=16)))
    lengths = described.seqlens[0] if described.starts_at_zero else described
    return model.init_with_output(jax.random.key(0), jnp.ones((2, S), jnp.int32), lengths=lengths)[0]


@pytest.mark.parametrize("case", LENGTHS)
def test_lengths_out_of_range_are_told(case, monkeypatch):
    """Where their values are known, which they are in a program that has them as constants."""
    fields, words = LENGTHS[case]
    for call in [attend, in_model, *[decode] * (set(fields) == {"seqlens"})]:
        monkeypatch.setattr(check, "told", set())
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            jax.eval_shape(lambda call=call: call(descriptor(**fields)))
        said = [str(w.message) for w in caught if w.category is UserWarning]
        assert any(words in each for each in said) if words else not said, (call, said)


def test_lengths_that_are_traced_are_defined():
    """They count as 0, or as the row's tokens."""
    run = jax.jit(lambda n: attend(SequenceDescriptor.from_seqlens(n)))
    np.testing.assert_array_equal(run(jnp.array([-4, 40])), run(jnp.array([0, S])))


@pytest.mark.parametrize("lengths", [[0, 3], [3, -1], [4, 1]])
def test_lengths_of_prompts(lengths):
    model = models.CausalLM(models.ModelConfig(V, 1, 16, dict(num_attention_heads=2, mlp_hidden_size=16)))
    with pytest.raises(ValueError, match=r"te_jax.models.generate: lengths are \[.*; pass lengths from 1 to 3"):
        models.generate(model, {}, jnp.ones((2, 3), jnp.int32), 2, lengths=np.array(lengths))


def test_tokens_of_prompts():
    """What pads prompts is not read, whatever it is; other numbers that are no tokens are refused."""
    layer = dict(num_attention_heads=2, mlp_hidden_size=16, self_attn_mask_type="causal")
    model = models.CausalLM(models.ModelConfig(V, 1, 16, layer))
    prompts, lengths = np.array([[1, 2, 3], [4, 5, 0]]), np.array([3, 2])
    variables = quick_init(model.init)(jax.random.key(0), prompts)
    read = jax.jit(lambda prompts: models.read_prompts(model, variables, prompts, jnp.asarray(lengths), 4)[0])
    padded = prompts.copy()
    for padded[1, 2] in (0, V, -1, -100):
        np.testing.assert_array_equal(read(padded), read(prompts))
    unseen = jax.jit(lambda prompts: models.generate(model, variables, prompts, 3))
    for prompts[0, 1] in (V, -1, -V):
        for dtype in (np.int32, np.int8, np.uint8, np.uint32):  # -1 is 255, and so on
            np.testing.assert_array_equal(unseen(prompts.astype(dtype))[0], [-1, -1, -1])
        within = jax.jit(lambda v, prompts=prompts: models.generate(model, v, prompts, 1, lengths=lengths))
        for call in (within, lambda v: models.generate(model, v, prompts, 1, lengths=lengths)):
            with pytest.raises(ValueError, match=rf"prompts\[0, 1\] is {prompts[0, 1]}; pass tokens from 0 to {V - 1}"):
                call(variables)
