"""attention_chunk_size and attn_temperature of attention, weights_before_experts of MoEBlock: as Llama 4 has them."""

import functools

import flax_reference as ref
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from flax_reference import data
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import te_jax as te
import te_jax.flax as te_flax
import te_jax.nnx as te_nnx
from te_jax import explain_attention
from te_jax.flax._by_position import by_chunks
from te_jax.ops.attention import SequenceDescriptor

H, N, G, D, B, S = 16, 4, 2, 8, 2, 11
CHUNK, FLOOR, SLOPE = 3, 2.0, 0.5
FIELDS = dict(head_dim=D, num_attention_heads=N, num_gqa_groups=G, input_layernorm=False)
# f32 sums of at most 32 terms, four products behind each other and their gradients.
BOUND = 64 * 2.0**-24


def mha(**fields):
    return te_flax.MultiHeadAttention(**FIELDS | fields)


def drawn(module, x):
    return ref.unboxed(ref.filled(jax.eval_shape(module.init, jax.random.key(0), x)["params"]))


def close(got, want):
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=BOUND * np.abs(b).max(initial=1.0))


def reference(p, x, at, ids, attention_chunk_size=None, attn_temperature=None):
    """at, ids: the positions and segments of the tokens, [b, s]; 0 is padding."""
    q = (x @ p["query"]["kernel"]).reshape(B, -1, N, D)
    k, v = jnp.moveaxis(jnp.tensordot(x, p["kv"]["kernel"], 1).reshape(B, -1, 2, G, D), 2, 0)
    if attn_temperature:
        floor, slope = attn_temperature
        q = q * (jnp.log(jnp.floor((at + 1) / floor) + 1) * slope + 1)[..., None, None]
    k, v = (jnp.repeat(a, N // G, 2) for a in (k, v))
    seen = (at[:, :, None] >= at[:, None]) & (ids[:, :, None] == ids[:, None]) & (ids[:, None] > 0)
    if attention_chunk_size:
        chunk = at // attention_chunk_size
        seen &= chunk[:, :, None] == chunk[:, None]
    logits = jnp.where(seen[:, None], jnp.einsum("bshd,bthd->bhst", q, k) / D**0.5, -1e30)
    y = jnp.einsum("bhst,bthd->bshd", jax.nn.softmax(logits, -1), v)
    return y.reshape(B, x.shape[1], -1) @ p["out"]["kernel"] * (ids > 0)[..., None]


CASES = {
    "chunks": dict(attention_chunk_size=CHUNK),
    "temperature": dict(attn_temperature=(FLOOR, SLOPE)),
    "both": dict(attention_chunk_size=CHUNK, attn_temperature=(FLOOR, SLOPE)),
}
IDS = np.array([[1] * 5 + [2] * 4 + [0] * 2, [1] * 11])
AT = np.array([[*range(5), *range(4), 0, 0], [*range(11)]])


@pytest.mark.parametrize("name", CASES)
def test_against_plain_jax(name):
    """Outputs and gradients, of rows that are padded or packed too; batch second; from the cache, with prompts of
    different lengths; and NNX has the same bits."""
    fields = CASES[name]
    module, x, weights = mha(**fields), data(B, S, H), data(B, S, H, seed=2)
    params, lengths = drawn(module, x), np.array([4, 2])
    plain = np.broadcast_to(np.arange(S), (B, S)), np.ones((B, S), int)
    packed = SequenceDescriptor.from_segment_ids_and_pos(jnp.asarray(IDS), jnp.asarray(AT))
    whole = SequenceDescriptor.from_seqlens(jnp.array([7, S]))

    @jax.jit
    def run(params, x):
        def of(apply):
            y, vjp = jax.vjp(apply, params, x)
            return y, *vjp(weights)

        apply = lambda p, x, **call: module.apply({"params": p}, x, **call)[0]
        want = lambda at, ids: of(lambda p, x: reference(p, x, at, ids, **fields))
        masked = lambda mask, real: of(lambda p, x: apply(p, x, mask=mask) * real[..., None])
        pairs = [(of(apply), want(*plain))]
        pairs.append((masked(packed, IDS > 0), want(AT, IDS)))
        real = np.arange(S) < np.array([7, S])[:, None]
        pairs.append((masked(whole, real), want(plain[0], real.astype(int))))
        flipped = module.clone(transpose_batch_sequence=True)
        turned = jnp.swapaxes(flipped.apply({"params": params}, jnp.swapaxes(x, 0, 1))[0], 0, 1)
        return pairs, turned, decoded(params, x)

    def decoded(params, x):
        """Prompts of 4 and 2 tokens, then seven more tokens each, two and then one at a time."""
        call = dict(decode=True, mutable=["cache"])
        prompt = dict(mask=SequenceDescriptor.from_seqlens(jnp.asarray(lengths)), max_decode_length=S)
        (y, _), cache = module.apply({"params": params}, x[:, :4], **prompt, **call)
        out, at = [y], 4
        for count in (2, 1, 1, 1, 2):
            rows = jnp.stack([jax.lax.dynamic_slice_in_dim(row, at + n - 4, count) for row, n in zip(x, lengths)])
            (y, _), cache = module.apply({"params": params, **cache}, rows, **call)
            out.append(y)
            at += count
        return jnp.concatenate(out, 1)

    pairs, turned, words = run(params, x)
    for got, want in pairs:
        close(got, want)
    whole = pairs[0][1][0]
    close(turned, whole)
    for row, n in enumerate(lengths):
        close(words[row, :n], whole[row, :n])
        close(words[row, 4:], whole[row, n : n + 7])
    again = te_nnx.MultiHeadAttention(H, **FIELDS, **fields, rngs=nnx.Rngs(0))
    again = te_nnx.from_linen({"params": params}, again)
    same = jax.jit(lambda params, x: module.apply({"params": params}, x)[0])(params, x)
    np.testing.assert_array_equal(nnx.jit(lambda module, x: module(x)[0])(again, x), same)


def test_who_serves():
    """Chunks of whole rows are segments by lengths, which cuDNN reads; a row of one chunk is as any other."""
    assert by_chunks(None, B, CHUNK, CHUNK) is None
    q = jax.ShapeDtypeStruct((2, 128, 4, 64), jnp.bfloat16)
    descriptor = by_chunks(None, 2, 128, 48)
    np.testing.assert_array_equal(descriptor.seqlens[0], [[48, 48, 32]] * 2)
    options = dict(attn_mask_type="padding_causal", sequence_descriptor=descriptor, platform="cuda")
    assert explain_attention(q, q, q, **options).implementation == "cudnn"


def test_mistakes():
    x, memory = data(B, S, H), data(B, 3, H)
    for fields in CASES.values():
        with pytest.raises(ValueError, match="are for self-attention; leave them, or inputs_kv, out"):
            jax.eval_shape(mha(**fields).init, jax.random.key(0), x, memory)
    mesh = jax.make_mesh((2,), ("cp",), axis_types=(AxisType.Auto,))
    resource = te.MeshResource(cp_resource="cp")
    with jax.set_mesh(mesh), te.sharding.global_shard_guard(resource):
        with pytest.raises(ValueError, match="attention_chunk_size is 3, but the sequence is cut along a mesh axis"):
            jax.eval_shape(mha(attention_chunk_size=CHUNK).init, jax.random.key(0), x)


def experts(**fields):
    sizes = dict(num_experts=4, num_experts_per_tok=1, intermediate_dim=24, score_function="sigmoid")
    return dict(**sizes, num_shared_experts=1, weights_before_experts=True, **fields)


def test_weights_before_experts(on_host):
    """Against all experts in plain JAX, with gradients; on devices that divide the experts; under FP8; in NNX."""
    module, x, weights = te_flax.MoEBlock(**experts()), data(4, 6, H), data(4, 6, H, seed=2)
    params = drawn(module, x)

    def plain(p, x):
        logits = x @ p["gate_kernel"]
        chosen = logits == jnp.max(logits, -1, keepdims=True)
        weighed = jnp.einsum("bsh,bse->bseh", x, jnp.where(chosen, jax.nn.sigmoid(logits), 0))
        of = lambda i: jnp.einsum("bseh,ehf->bsef", weighed, p[f"wi_{i}"])
        shared = jnp.tensordot(x, p["shared_experts"]["wi_kernel"], 1)
        shared = (jax.nn.silu(shared[..., 0, :]) * shared[..., 1, :]) @ p["shared_experts"]["wo_kernel"]
        return shared + jnp.einsum("bsef,efh->bsh", jax.nn.silu(of(0)) * of(1), p["wo"])

    apply = lambda p, x: module.apply({"params": p}, x)

    @jax.jit
    def run(params, x):
        def of(apply):
            y, vjp = jax.vjp(apply, params, x)
            return y, *vjp(weights)

        with te.autocast(recipe=te.recipe.Float8CurrentScaling()):
            narrow = apply(params, x)
        return of(apply), of(plain), narrow

    got, want, narrow = run(params, x)
    close(got, want)
    # Eight operands in E4M3, of which four follow each other, each off by 2**-4 / sqrt(3) of itself at most.
    assert 0 < ref.relative_error(narrow, want[0]) < 4 * 2**-4 / 3**0.5
    mesh = jax.make_mesh((2, 2), ("fsdp", "ep"), axis_types=(AxisType.Auto,) * 2)
    with jax.set_mesh(mesh), te.sharding.global_shard_guard(te.MeshResource(fsdp_resource="fsdp", ep_resource="ep")):
        divided = jax.jit(apply)(params, jax.device_put(x, NamedSharding(mesh, P(("fsdp", "ep")))))
    close(divided, want[0])
    again = te_nnx.from_linen({"params": params}, te_nnx.MoEBlock(H, **experts(), rngs=nnx.Rngs(0)))
    np.testing.assert_array_equal(nnx.jit(lambda module, x: module(x))(again, x), jax.jit(apply)(params, x))
    two = te_flax.MoEBlock(**experts() | dict(num_experts_per_tok=2))
    with pytest.raises(ValueError, match="weights_before_experts is True, but num_experts_per_tok is 2; pass 1"):
        jax.eval_shape(functools.partial(two.init, jax.random.key(0)), x)
