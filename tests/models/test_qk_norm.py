"""qk_norm_type: queries and keys normalized per head, against plain JAX; decoding, FP8, meshes, NNX, errors."""

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
from te_jax.sharding import MeshResource, global_shard_guard

pytestmark = pytest.mark.usefixtures("on_host")
KEY = jax.random.key(0)
B, S, H, N, D = 2, 6, 24, 4, 8
EPS = 1e-3  # as large as to be seen in the numbers
QWEN = dict(qk_norm_type="RMSNorm", qk_norm_eps=EPS, qk_norm_before_rope=True, enable_rotary_pos_emb=True)
# Five products of at most 24 terms in f32 and two norms behind each other; each adds a few roundings of 2**-24 of the
# largest value, and the gradients pass twice as many. Terms are of order 1 where their sum is less: k_norm's bias moves
# all logits of a query alike, so its gradient is 0.
BOUND = 128 * 2.0**-24


def mha(**fields):
    return te_flax.MultiHeadAttention(**{"head_dim": D, "num_attention_heads": N, **fields})


def drawn(module, *args):
    return ref.unboxed(ref.filled(jax.eval_shape(module.init, KEY, *args)["params"]))


def close(got, want, bound=BOUND):
    for (path, a), b in zip(jax.tree_util.tree_leaves_with_path(got), jax.tree.leaves(want), strict=True):
        atol = bound * np.abs(b).max(initial=1.0)
        np.testing.assert_allclose(a, b, rtol=0, atol=atol, err_msg=jax.tree_util.keystr(path))


def normalized(x, p, kind, zero_centered, across=False):
    """x [b, s, h, d] over d, or over h and d."""
    if across:
        return normalized(x.reshape(*x.shape[:2], -1), p, kind, zero_centered).reshape(x.shape)
    if kind == "l2normalization":
        return x / jnp.sqrt(jnp.sum(x**2, -1, keepdims=True) + EPS)
    centered = x - jnp.mean(x, -1, keepdims=True) if kind == "layernorm" else x
    y = centered / jnp.sqrt(jnp.mean(centered**2, -1, keepdims=True) + EPS) * (p["scale"] + zero_centered)
    return y + p["ln_bias"] if kind == "layernorm" else y


def turned(x):
    """RoPE of pairs of channels (2i, 2i + 1)."""
    angle = jnp.arange(x.shape[1])[:, None] * 10000.0 ** (-jnp.arange(0, D, 2) / D)
    cos, sin = (f(angle)[None, :, None] for f in (jnp.cos, jnp.sin))
    a, b = x[..., ::2], x[..., 1::2]
    return jnp.stack([a * cos - b * sin, a * sin + b * cos], -1).reshape(x.shape)


def reference(p, x, *, kind, g=N, before=False, rope=True, zero_centered=False, across=False):
    first = p["qkv"] if "qkv" in p else p["query"]
    mean = jnp.mean(x, -1, keepdims=True)
    normed = (x - mean) / jnp.sqrt(jnp.var(x, -1, keepdims=True) + 1e-6) * (first["scale"] + zero_centered)
    normed = normed + first["ln_bias"]
    project = lambda name: jnp.tensordot(normed, p[name]["kernel"], 1)
    if "qkv" in p:
        q, k, v = jnp.moveaxis(project("qkv"), 2, 0)
    else:
        q, (k, v) = project("query"), jnp.moveaxis(project("kv"), 2, 0) if "kv" in p else map(project, ("key", "value"))
    q, k, v = (y.reshape(*y.shape[:2], -1, D) for y in (q, k, v))
    how = kind, zero_centered, across
    norms = lambda q, k: (normalized(x, p.get(name), *how) for x, name in ((q, "q_norm"), (k, "k_norm")))
    turn = lambda q, k: (turned(q), turned(k)) if rope else (q, k)
    q, k = turn(*norms(q, k)) if before else norms(*turn(q, k))
    k, v = (jnp.repeat(y, N // g, 2) for y in (k, v))
    logits = jnp.einsum("bshd,bthd->bhst", q, k) / D**0.5
    probs = jax.nn.softmax(jnp.where(jnp.tri(S, dtype=bool), logits, -jnp.inf), -1)
    return jnp.tensordot(jnp.einsum("bhst,bthd->bshd", probs, v).reshape(B, S, -1), p["out"]["kernel"], 1)


@pytest.mark.parametrize(
    ("fields", "equation"),
    [
        (QWEN, dict(kind="rmsnorm", before=True)),
        (
            dict(qk_norm_type="rmsnorm", num_gqa_groups=2, enable_rotary_pos_emb=True, zero_centered_gamma=True),
            dict(kind="rmsnorm", g=2, zero_centered=True),
        ),
        (
            dict(qk_norm_type="LayerNorm", num_gqa_groups=1, fuse_qkv_params=False),
            dict(kind="layernorm", g=1, rope=False),
        ),
        (dict(qk_norm_type="L2Normalization", enable_rotary_pos_emb=True), dict(kind="l2normalization")),
        (QWEN | dict(qk_norm_across_heads=True, num_gqa_groups=2), dict(kind="rmsnorm", g=2, before=True, across=True)),
    ],
    ids=["qwen", "gqa_after_rope", "apart_layernorm", "l2", "olmo"],
)
def test_against_plain_jax(fields, equation):
    """Forward, gradients, batch second, and from the cache, which holds normed keys."""
    module, x, weights = mha(qk_norm_eps=EPS, **{k: v for k, v in fields.items() if k != "qk_norm_eps"}), *inputs()
    params = drawn(module, x)
    assert ("q_norm" in params) == (equation["kind"] != "l2normalization")

    @jax.jit
    def run(params, x):
        def of(attend):
            y, vjp = jax.vjp(attend, params, x)
            return y, *vjp(weights)

        got, want = of(lambda p, x: module.apply({"params": p}, x)[0]), of(lambda p, x: reference(p, x, **equation))
        return got, want, ref.batch_second(module, params, x), ref.decoded(module, params, x)

    got, want, flipped, decoded = run(params, x)
    close(got, want)
    close((flipped, decoded), (want[0], want[0]))


def inputs(dtype=jnp.float32):
    return data(B, S, H, dtype=dtype), data(B, S, H, dtype=dtype, seed=2)


SIZES = dict(kv_channels=D, num_gqa_groups=2, hidden_dropout=0.0, attention_dropout=0.0)


def layer_of_qwen(**fields):
    return te_flax.TransformerLayer(H, 16, N, **SIZES, **QWEN, **fields)


def test_layers_in_bf16_and_fp8_with_lora():
    """Every recipe leaves the norms in the arrays' type; they have gradients, next to adapted projections too."""
    x, weights = inputs(jnp.bfloat16)
    module = layer_of_qwen(low_rank_adaptation_scope="all", low_rank_adaptation_dim=4, dtype=jnp.bfloat16)
    params = drawn(module, x)
    shape = dict(scale=(D,))
    assert ref.shapes(params)["attention"].items() >= dict(q_norm=shape, k_norm=shape).items()
    both = drawn(layer_of_qwen(layer_type="decoder"), x, x)
    assert all("q_norm" in both[name] for name in ("self_attention", "encoder_decoder_attention"))
    recipes = (None, recipe.DelayedScaling(amax_history_len=4), recipe.Float8CurrentScaling())

    @jax.jit
    def run(params, x):
        out = []
        for each in recipes:
            with te.autocast(each is not None, each):
                states = jax.eval_shape(module.init, KEY, x).get("fp8_metas", {})
                fill = lambda path, leaf: jnp.full(leaf.shape, float(path[-1].key.endswith("_scale")), leaf.dtype)
                state = jax.tree_util.tree_map_with_path(fill, states)
                variables = {"fp8_metas": state} if state else {}
                apply = lambda p, x, variables=variables: module.apply({"params": p, **variables}, x)
                y, vjp = jax.vjp(apply, params, x)
                out.append((y, vjp(weights)))
        return out

    (want, grads), *others = run(params, x)
    for y, (dparams, _) in others:
        # An E4M3 number is off by 2**-4 / sqrt(3) = 3.6 % at most; two operands, five products, of which the residual
        # connections carry more than half around.
        assert ref.relative_error(y, want) < 0.1
        assert not np.array_equal(y, want), "in FP8"
        for name in ("q_norm", "k_norm"):
            got, plain = dparams["attention"][name]["scale"], grads[0]["attention"][name]["scale"]
            assert np.isfinite(got).all() and ref.relative_error(got, plain) < 0.5  # E5M2 gradients, small sums


def test_nnx_is_linen_bit_for_bit():
    x, _ = inputs()
    across = dict(qk_norm_across_heads=True)
    module = te_nnx.TransformerLayer(H, 16, N, **SIZES, **QWEN, **across, rngs=nnx.Rngs(3))
    module.attention.q_norm.scale[...] = data(N * D)
    want = jax.jit(layer_of_qwen(**across).apply)(te_nnx.to_linen(module), x)
    np.testing.assert_array_equal(nnx.jit(lambda module, x: module(x))(module, x), want)


@pytest.mark.parametrize("fields", [{}, dict(qk_norm_across_heads=True)], ids=["each head", "all heads"])
def test_on_a_mesh(fields):
    """dp 2 x tp 2 x cp 2 by logical rules: heads are split, and the sequence cut; the norms' gradients are whole."""
    x, weights = data(B, 8, H), data(B, 8, H, seed=2)
    layer = functools.partial(layer_of_qwen, **fields)
    boxed = jax.eval_shape(layer().init, KEY, x)["params"]
    params = ref.unboxed(ref.filled(boxed))

    def run(params, x, weights):
        y, vjp = jax.vjp(lambda p, x: layer().apply({"params": p}, x), params, x)
        return y, *vjp(weights)

    want = jax.jit(run)(params, x, weights)
    mesh = jax.make_mesh((2, 2, 2), ("dp", "tp", "cp"), axis_types=(AxisType.Auto,) * 3)
    with jax.set_mesh(mesh), global_shard_guard(MeshResource(dp_resource="dp", tp_resource="tp", cp_resource="cp")):
        rules = te_flax.extend_logical_axis_rules(())
        with nn.logical_axis_rules(rules):
            specs = nn.logical_to_mesh_sharding(nn.get_partition_spec(boxed), mesh, rules)
            placed = jax.tree.map(jax.device_put, params, specs)
            arrays = [jax.device_put(a, NamedSharding(mesh, PartitionSpec("dp", "cp"))) for a in (x, weights)]
            got = jax.jit(run)(placed, *arrays)
    close(got, want)
