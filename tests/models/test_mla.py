"""MultiHeadLatentAttention against plain JAX: gradients, the cache of latents, FP8, meshes, NNX, errors."""

import flax_reference as ref
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from flax import nnx
from flax_reference import data
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import te_jax as te
import te_jax.flax as te_flax
import te_jax.nnx as te_nnx
from te_jax import recipe
from te_jax.ops.attention import SequenceDescriptor
from te_jax.ops.rope import LinearScaling
from te_jax.sharding import MeshResource, global_shard_guard

pytestmark = pytest.mark.usefixtures("on_host")
KEY = jax.random.key(0)
B, S, H, N = 2, 8, 24, 4
NOPE, ROPE, E, R, RQ = 6, 4, 10, 12, 14
MSCALE = 1.3
WIDTHS = dict(kv_lora_rank=R, qk_nope_head_dim=NOPE, qk_rope_head_dim=ROPE, v_head_dim=E)
# Seven products of at most 48 terms in f32, three norms; each adds a few roundings of 2**-24 of the largest value, and
# the gradients pass twice as many. The absorbed form multiplies in another order, no more often.
BOUND = 256 * 2.0**-24


def mla(**fields):
    return te_flax.MultiHeadLatentAttention(
        **dict(num_attention_heads=N, q_lora_rank=RQ, mscale=MSCALE) | WIDTHS | fields
    )


def layer(**fields):
    quiet = dict(hidden_dropout=0.0, attention_dropout=0.0, layernorm_type="rmsnorm")
    return te_flax.TransformerLayer(
        **dict(hidden_size=H, mlp_hidden_size=16, num_attention_heads=N, q_lora_rank=RQ) | quiet | WIDTHS | fields
    )


def drawn(module, *args, **kwargs):
    return ref.unboxed(ref.filled(jax.eval_shape(lambda: module.init(KEY, *args, **kwargs))["params"]))


def inputs(s=S, dtype=jnp.float32):
    return data(B, s, H, dtype=dtype), data(B, s, H, dtype=dtype, seed=2)


def close(got, want, bound=BOUND):
    for (path, a), b in zip(jax.tree_util.tree_leaves_with_path(got), jax.tree.leaves(want), strict=True):
        atol = bound * np.abs(b).max(initial=1.0)  # terms are of order 1 where their sum is less
        np.testing.assert_allclose(a, b, rtol=0, atol=atol, err_msg=jax.tree_util.keystr(path))


def rms(x, scale, epsilon=1e-6):
    return x / jnp.sqrt(jnp.mean(x**2, -1, keepdims=True) + epsilon) * scale


def turned(x, factor):
    """RoPE of pairs of channels (2i, 2i + 1) of x [b, s, h, ROPE]; factor: None is none."""
    if factor is None:
        return x
    angle = jnp.arange(x.shape[1])[:, None] * 10000.0 ** (-jnp.arange(0, ROPE, 2) / ROPE) / factor
    cos, sin = (f(angle)[None, :, None] for f in (jnp.cos, jnp.sin))
    a, b = x[..., ::2], x[..., 1::2]
    return jnp.stack([a * cos - b * sin, a * sin + b * cos], -1).reshape(x.shape)


def reference(p, x, bias=0.0, factor=1.0, epsilon=1e-6):
    """Section 2.1.1 of arXiv 2412.19437, causal. epsilon: of the norms of latents."""
    dense = lambda x, name: jnp.tensordot(x, p[name]["kernel"], 1) + p[name].get("bias", 0)
    heads = lambda x: x.reshape(*x.shape[:2], N, -1)
    normed = rms(x, p["q_down" if "q_down" in p else "query"]["scale"])
    q = (
        dense(rms(dense(normed, "q_down"), p["q_up"]["scale"], epsilon), "q_up")
        if "q_down" in p
        else dense(normed, "query")
    )
    down = dense(normed, "kv_down")
    up = heads(dense(rms(down[..., :R], p["kv_up"]["scale"], epsilon), "kv_up"))
    q, shared = heads(q), turned(down[:, :, None, R:], factor)
    q = jnp.concatenate([q[..., :NOPE], turned(q[..., NOPE:], factor)], -1)
    k = jnp.concatenate([up[..., :NOPE], jnp.broadcast_to(shared, (*up.shape[:-1], ROPE))], -1)
    logits = jnp.einsum("bshd,bthd->bhst", q, k) * MSCALE**2 / (NOPE + ROPE) ** 0.5 + bias
    probs = jax.nn.softmax(jnp.where(jnp.tri(x.shape[1], dtype=bool), logits, -jnp.inf), -1)
    return dense(jnp.einsum("bhst,bthe->bshe", probs, up[..., NOPE:]).reshape(*x.shape[:2], -1), "out")


def decoded(module, variables, x, parts, slots=S, **kwargs):
    """`module` on the tokens of x in order, `parts` at a time; bias [.., s, slots] goes along."""
    cache, out, at, bias = {}, [], 0, kwargs.pop("bias", None)
    for size in parts:
        call = dict(decode=True, mutable=["cache"], **kwargs)
        call |= {} if bias is None else dict(bias=bias[..., at : at + size, :])
        call |= {} if cache else dict(max_decode_length=slots)
        y, cache = module.apply({**variables, **cache}, x[:, at : at + size], **call)
        out.append(y[0] if isinstance(y, tuple) else y)
        at += size
    return jnp.concatenate(out, 1), cache["cache"]


@pytest.mark.parametrize(
    ("fields", "factor"),
    [
        (dict(use_bias=True), 1.0),
        (dict(q_lora_rank=None, rotary_pos_emb_scaling=LinearScaling(4.0)), 4.0),
        (dict(latent_rotary=False, latent_norm_epsilon=0.1), None),
    ],
    ids=["q_latent", "scaled_rope", "no_rope"],
)
def test_against_plain_jax(fields, factor):
    """Forward, gradients, batch second, a bias; and both forms of decoding on the cache, of one and of many tokens."""
    (x, weights), module, bias = inputs(), mla(**fields), data(1, N, S, S, seed=3)
    params = drawn(module, x)
    assert module.bind({})._absorbs(1, S) and module.bind({})._absorbs(2, S) and not module.bind({})._absorbs(5, S)

    @jax.jit
    def run(params, x):
        def of(attend):
            y, vjp = jax.vjp(attend, params, x)
            return y, *vjp(weights)

        got = of(lambda p, x: module.apply({"params": p}, x, bias=bias)[0])
        epsilon = fields.get("latent_norm_epsilon", 1e-6)
        want = of(lambda p, x: reference(p, x, bias, factor, epsilon))
        flipped = module.clone(transpose_batch_sequence=True).apply(
            {"params": params}, jnp.swapaxes(x, 0, 1), bias=bias
        )
        steps = decoded(module, {"params": params}, x, (2, 5, 1), bias=bias)
        return got, want, jnp.swapaxes(flipped[0], 0, 1), steps

    got, want, flipped, (steps, cache) = run(params, x)
    close(got, want)
    close((flipped, steps), (want[0], want[0]))
    shapes = dict(cached_latent=(B, S, 1, R), cached_rotary_key=(B, S, 1, ROPE), cache_index=(), cache_padding=(B,))
    assert ref.shapes(cache) == shapes


def test_decoding_of_padded_prompts():
    """Prompts of different lengths, LoRA and NaN in slots that nothing was written to; batch second."""
    x, _ = inputs()
    module = mla(low_rank_adaptation_scope="all", low_rank_adaptation_dim=3, low_rank_adaptation_alpha=2.0)
    params, lengths = drawn(module, x), jnp.asarray([5, 3])

    @jax.jit
    def run(params, x):
        want = module.apply({"params": params}, x)[0]
        flipped = module.clone(transpose_batch_sequence=True)
        prompt, mask = jnp.swapaxes(x[:, :5], 0, 1), SequenceDescriptor.from_seqlens(lengths)
        call = dict(decode=True, mutable=["cache"])
        (first, _), cache = flipped.apply({"params": params}, prompt, None, mask, max_decode_length=S, **call)
        spoil = lambda leaf: leaf.at[6:].set(jnp.nan) if leaf.ndim == 4 else leaf
        cache, parts = jax.tree.map(spoil, cache), []
        for step in range(3):
            token = jnp.stack([x[row, lengths[row] + step] for row in range(B)])[None]
            (y, _), cache = flipped.apply({"params": params, **cache}, token, **call)
            parts.append(y[0])
        return want, first, jnp.stack(parts, 1)

    want, first, steps = run(params, x)
    for row, length in enumerate(lengths):
        close((first[:length, row], steps[row]), (want[row, :length], want[row, length : length + 3]))


def test_recipes():
    """In bf16, and under recipes with and without state, within a TransformerLayer; gradients, and decoding."""
    x, weights = inputs(dtype=jnp.bfloat16)
    module = layer(dtype=jnp.bfloat16)
    params = drawn(module, x)
    assert set(params["attention"]) == {"q_down", "q_up", "kv_down", "kv_up", "out"}
    recipes = (None, recipe.DelayedScaling(amax_history_len=4), recipe.Float8CurrentScaling())
    fill = lambda path, leaf: jnp.full(leaf.shape, float(path[-1].key.endswith("_scale")), leaf.dtype)

    @jax.jit
    def run(params, x):
        out = []
        for each in recipes:
            with te.autocast(each is not None, each):
                state = {name: leaf for name, leaf in jax.eval_shape(module.init, KEY, x).items() if name != "params"}
                state = jax.tree_util.tree_map_with_path(fill, state)
                y, vjp = jax.vjp(lambda p, s, x: module.apply({"params": p, **s}, x), params, state, x)
                steps = decoded(module, {"params": params, **state}, x, (2, 5, 1))[0] if state else y
                out.append((y, steps, *vjp(weights)[:2]))
        return out

    (want, _, plain, _), *others = run(params, x)
    for y, steps, grads, _ in others:
        # E4M3 is off by 2**-4 / sqrt(3) = 3.6 % at most, E5M2 by twice that: two operands, seven products in a row,
        # of which the residual connections carry more than half around. Decoding is in bf16 where it absorbs.
        assert ref.relative_error(y, want) < 0.1 and ref.relative_error(steps, want) < 0.1
        assert not np.array_equal(y, want), "in FP8"
        got, exact = (tree["attention"]["kv_up"]["kernel"] for tree in (grads, plain))
        assert ref.relative_error(got, exact) < 0.4
    histories = [leaf for leaf in jax.tree.leaves(others[0][3]) if leaf.shape == (4,)]
    assert len(histories) == 7 * 3 and np.all(np.asarray(histories)[:, -1] > 0), "seven layers, three tensors each"


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=["auto", "explicit"])
def test_on_a_mesh(kind):
    """dp 2 x tp 2: heads are split, latents whole, the sequence split outside of the projections; and the cache."""
    x, weights = inputs()
    boxed = jax.eval_shape(layer().init, KEY, x)["params"]
    params = ref.unboxed(ref.filled(boxed))

    def run(params, x, weights, tokens):
        y, vjp = jax.vjp(lambda p, x: module.apply({"params": p}, x), params, x)
        return y, *vjp(weights), decoded(module, {"params": params}, tokens, (6, 2))[0]

    module = layer(enable_sequence_parallel=True)
    want = jax.jit(run)(params, x, weights, x)
    mesh = jax.make_mesh((2, 2), ("dp", "tp"), axis_types=(kind,) * 2)
    resource = MeshResource(dp_resource="dp", tpsp_resource="tp")
    with jax.set_mesh(mesh), global_shard_guard(resource):
        rules = te_flax.extend_logical_axis_rules(())
        with nn.logical_axis_rules(rules):
            specs = nn.logical_to_mesh_sharding(nn.get_partition_spec(boxed), mesh, rules)
            placed = jax.tree.map(jax.device_put, params, specs)
            put = lambda a, *spec: jax.device_put(a, NamedSharding(mesh, PartitionSpec(*spec)))
            got = jax.jit(run)(placed, put(x, "dp", "tp"), put(weights, "dp", "tp"), put(x, "dp"))
    close(got, want)


def test_who_serves_deepseek_v3():
    """cuDNN the heads of 192 and 128 channels; latents as they are plain JAX, for calls of few tokens."""
    heads = lambda d, dtype=jnp.bfloat16: jax.ShapeDtypeStruct((1, 64, 128, d), dtype)
    options = dict(attn_mask_type="causal", platform="cuda")
    assert te.explain_attention(heads(192), heads(192), heads(128), **options).implementation == "cudnn"
    assert "d, of q and k, is 512" in te.explain_attention(heads(512), heads(512), heads(512)).refused["cudnn"]
    widths = dict(kv_lora_rank=512, q_lora_rank=1536, qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128)
    absorbs = mla(**widths).bind({})._absorbs
    assert absorbs(1, 8192) and absorbs(150, 8192) and not absorbs(151, 8192) and not absorbs(1, 3)


def test_cut_sequence():
    x, weights = inputs()
    boxed = jax.eval_shape(mla().init, KEY, x)["params"]
    params = ref.unboxed(ref.filled(boxed))

    def run(params, x, weights):
        y, vjp = jax.vjp(lambda p, x: mla().apply({"params": p}, x)[0], params, x)
        return y, *vjp(weights)

    want = jax.jit(run)(params, x, weights)
    mesh = jax.make_mesh((2,), ("cp",), axis_types=(AxisType.Auto,))
    with jax.set_mesh(mesh), global_shard_guard(MeshResource(cp_resource="cp")):
        arrays = [jax.device_put(a, NamedSharding(mesh, PartitionSpec(None, "cp"))) for a in (x, weights)]
        close(jax.jit(run)(params, *arrays), want)


def test_nnx_is_linen_bit_for_bit():
    x, _ = inputs()
    module = te_nnx.MultiHeadLatentAttention(H, N, R, NOPE, ROPE, E, RQ, rngs=nnx.Rngs(3))
    linen, variables = mla(mscale=1.0), te_nnx.to_linen(module)

    @jax.jit
    def want(variables, x):
        return linen.apply(variables, x)[0], decoded(linen, variables, x, (7, 1))[0]

    @nnx.jit
    def got(module, x):
        y, first = module(x)[0], module(x[:, :7], decode=True, max_decode_length=S)[0]
        return y, jnp.concatenate([first, module(x[:, 7:], decode=True)[0]], 1)

    for a, b in zip(got(module, x), want(variables, x)):
        np.testing.assert_array_equal(a, b)
