"""attn_output_gate: attention's result times the sigmoid of a projection, as in Qwen3-Next, against plain JAX."""

import functools

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
from te_jax.sharding import MeshResource, global_shard_guard

pytestmark = pytest.mark.usefixtures("on_host")
KEY = jax.random.key(0)
B, S, H, N, G, D, TURNED = 2, 6, 24, 4, 2, 16, 4
BASE = dict(layernorm_type="rmsnorm", zero_centered_gamma=True, attn_output_gate=True)
# As Qwen3-Next has it: RoPE of a quarter of the channels, normed queries and keys, few keys, weights around 0.
QWEN = BASE | dict(qk_norm_type="rmsnorm", qk_norm_before_rope=True, num_gqa_groups=G)
QWEN |= dict(enable_rotary_pos_emb=True, rotary_pos_emb_dim=TURNED, rotary_pos_emb_group_method="alternate")
# Six products of at most 64 terms in f32 and two norms behind each other; each adds a few roundings of 2**-24 of the
# largest value, and the gradients pass twice as many.
BOUND = 128 * 2.0**-24


def mha(**fields):
    return te_flax.MultiHeadAttention(**{"head_dim": D, "num_attention_heads": N, **fields})


def layer(**fields):
    sizes = dict(kv_channels=D, hidden_dropout=0.0, attention_dropout=0.0, mlp_activations=("silu", "linear"))
    return te_flax.TransformerLayer(H, 32, N, **sizes, **QWEN | fields)


def drawn(module, *args):
    return ref.unboxed(ref.filled(jax.eval_shape(module.init, KEY, *args)["params"]))


def close(got, want, bound=BOUND):
    for (path, a), b in zip(jax.tree_util.tree_leaves_with_path(got), jax.tree.leaves(want), strict=True):
        atol = bound * np.abs(b).max(initial=1.0)  # terms are of order 1 where their sum is less
        np.testing.assert_allclose(a, b, rtol=0, atol=atol, err_msg=jax.tree_util.keystr(path))


def rms(x, scale):
    return x / jnp.sqrt(jnp.mean(x**2, -1, keepdims=True) + 1e-6) * (1 + scale)


def turned(x, at):
    """RoPE of channels (i, i + TURNED / 2) of the first TURNED."""
    angle = at[..., None] * 10000.0 ** (-jnp.arange(0, TURNED, 2) / TURNED)
    cos, sin = (f(angle)[..., None, :] for f in (jnp.cos, jnp.sin))
    a, b, rest = jnp.split(x, (TURNED // 2, TURNED), -1)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin, rest], -1)


def reference(p, x, ids, at, context=None):
    """Attention of x [b, s, H]; with a context [b, t, H] to all of that. A call of te_jax has ids and at."""
    first = p["qkv" if "qkv" in p else "query"]
    normed, dense = rms(x, first["scale"]), lambda x, name: jnp.tensordot(x, p[name]["kernel"], 1)
    source = normed if context is None else context
    q, k, v = (
        jnp.moveaxis(dense(normed, "qkv"), 2, 0)
        if "qkv" in p
        else (dense(normed, "query"), *jnp.moveaxis(dense(source, "kv"), 2, 0))
    )
    q, k, v = (y.reshape(*y.shape[:2], -1, D) for y in (q, k, v))
    if "q_norm" in p:
        q, k = (rms(y, p[name]["scale"]) for y, name in ((q, "q_norm"), (k, "k_norm")))
        q, k = turned(q, at), turned(k, at)
    k, v = (jnp.repeat(y, N // y.shape[2], 2) for y in (k, v))
    sees = jnp.ones((S, source.shape[1]), bool) if context is not None else jnp.tri(S, dtype=bool)
    sees = sees if context is not None else sees & (ids[:, None, :, None] == ids[:, None, None, :])
    logits = jnp.where(sees, jnp.einsum("bshd,bthd->bhst", q, k) / D**0.5, -jnp.inf)
    y = jnp.einsum("bhst,bthd->bshd", jax.nn.softmax(logits, -1), v).reshape(B, S, -1)
    return dense(y / (1 + jnp.exp(-dense(normed, "gate"))), "out")


PACKED = np.array([[1, 1, 2, 2, 2, 2], [1, 1, 1, 1, 1, 2]], np.int32)


def inputs(dtype=jnp.float32):
    return data(B, S, H, dtype=dtype), data(B, S, H, dtype=dtype, seed=2)


@pytest.mark.parametrize("fields", [QWEN, BASE], ids=["qwen", "joined"])
def test_against_plain_jax(fields):
    """Forward and gradients, packed rows, batch second, and from the cache, which holds no gate."""
    module, (x, weights) = mha(**fields), inputs()
    params = drawn(module, x)
    assert ref.shapes(params)["gate"] == dict(kernel=(H, N * D)) and ("qkv" in params) == (fields == BASE)
    whole, positions = np.ones((B, S), np.int32), np.broadcast_to(np.arange(S), (B, S))
    starts = np.array([[0, 1, 0, 1, 2, 3], [0, 1, 2, 3, 4, 0]])

    @jax.jit
    def run(params, x):
        def of(attend):
            y, vjp = jax.vjp(attend, params, x)
            return y, *vjp(weights)

        rows = SequenceDescriptor.from_segment_ids_and_pos(PACKED)
        got = [of(lambda p, x, mask=mask: module.apply({"params": p}, x, None, mask)[0]) for mask in (None, rows)]
        want = [of(lambda p, x, of=of_: reference(p, x, *of)) for of_ in ((whole, positions), (PACKED, starts))]
        return got, want, ref.batch_second(module, params, x), ref.decoded(module, params, x)

    got, want, flipped, decoded = run(params, x)
    close(got, want)
    close((flipped, decoded), (want[0][0], want[0][0]))


def test_cross_attention():
    """The gate is a projection of the queries' norm, not of the context; with a norm's output and without."""
    module, (x, context) = mha(**BASE, attn_mask_type="no_mask"), inputs()
    context = context[:, :4]
    params = drawn(module, x, context)
    call = lambda p, x, context, **more: module.apply({"params": p}, x, context, **more)[0]
    for norm_output in (True, False):
        got = jax.jit(functools.partial(call, norm_output=norm_output))(params, x, context)
        close(got, reference(params, x, None, None, context))


def test_in_bf16_and_fp8_with_lora():
    """Every recipe leaves the product with the gate in the arrays' type; the projection is in FP8, and is adapted."""
    x, weights = inputs(jnp.bfloat16)
    fields = dict(low_rank_adaptation_dim=4, dtype=jnp.bfloat16)
    module = layer(**fields)
    params = drawn(module, x)
    adapted = drawn(layer(**fields, low_rank_adaptation_scope="qkv_proj"), x)
    assert ref.shapes(adapted)["attention"]["gate"].keys() == {"kernel", "lora_a_kernel", "lora_b_kernel"}

    @jax.jit
    def run(params, x):
        out = []
        for each in (None, recipe.Float8CurrentScaling()):
            with te.autocast(each is not None, each):
                y, vjp = jax.vjp(lambda p, x: module.apply({"params": p}, x), params, x)
                out.append((y, vjp(weights)[0]["attention"]["gate"]["kernel"]))
        return out

    (want, plain), (y, gate) = run(params, x)
    # An E4M3 number is off by 2**-4 / sqrt(3) = 3.6 % at most; two operands, five products, of which the residual
    # connections carry more than half around.
    assert ref.relative_error(y, want) < 0.1 and not np.array_equal(y, want)
    assert np.isfinite(gate).all() and ref.relative_error(gate, plain) < 0.5  # E5M2 gradients, small sums
    with te.autocast(True, recipe.Float8CurrentScaling()):
        report = te.explain_fp8(module.apply, {"params": params}, x)
    assert "2 x  e4m3[2,6,24] x e4m3[64,24]" in str(report), "the gate's projection next to the queries'"


def test_nnx_is_linen_bit_for_bit():
    x, _ = inputs()
    sizes = dict(kv_channels=D, hidden_dropout=0.0, attention_dropout=0.0, mlp_activations=("silu", "linear"))
    module = te_nnx.TransformerLayer(H, 32, N, **sizes, **QWEN, rngs=nnx.Rngs(3))
    want = jax.jit(layer().apply)(te_nnx.to_linen(module), x)
    np.testing.assert_array_equal(nnx.jit(lambda module, x: module(x))(module, x), want)


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_on_a_mesh(kind):
    """dp 2 x tp 2: a device has the gate of its heads."""
    x, weights = inputs()
    boxed = jax.eval_shape(layer().init, KEY, x)["params"]
    params = ref.unboxed(ref.filled(boxed))

    def run(params, x, weights):
        y, vjp = jax.vjp(lambda p, x: layer().apply({"params": p}, x), params, x)
        return y, *vjp(weights)

    want = jax.jit(run)(params, x, weights)
    mesh = jax.make_mesh((2, 2), ("dp", "tp"), axis_types=(kind,) * 2)
    with jax.set_mesh(mesh), global_shard_guard(MeshResource(dp_resource="dp", tp_resource="tp")):
        rules = te_flax.extend_logical_axis_rules(())
        with nn.logical_axis_rules(rules):
            specs = nn.logical_to_mesh_sharding(nn.get_partition_spec(boxed), mesh, rules)
            assert "tp" in specs["attention"]["gate"]["kernel"].spec
            placed = jax.tree.map(jax.device_put, params, specs)
            arrays = [jax.device_put(a, NamedSharding(mesh, PartitionSpec("dp"))) for a in (x, weights)]
            got = jax.jit(run)(placed, *arrays)
    close(got, want)


def test_refused():
    """Parameters of another configuration."""
    x, _ = inputs()
    for made, asked in ((BASE, {}), ({}, BASE)):
        params = drawn(mha(**made, num_gqa_groups=G), x)
        with pytest.raises(ValueError, match="attn_output_gate is .*, but the parameters hold (a|no) `gate`"):
            mha(**asked, num_gqa_groups=G).apply({"params": params}, x)
