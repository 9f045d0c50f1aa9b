"""What known trainers ask of `transformer_engine`: their sequences of calls, written anew, on te_jax.compat.

`python -m te_jax.compat run` runs the trainers themselves, where they are at hand.
"""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from arrays import on_device
from flax import linen as nn
from flax import nnx
from flax.nnx import variablelib
from jax.sharding import AxisType

import te_jax.compat.transformer_engine.jax as te
import te_jax.compat.transformer_engine.jax.cpp_extensions as tex
from te_jax.compat.transformer_engine.common import recipe
from te_jax.compat.transformer_engine.jax.attention import (
    AttnBiasType,
    AttnMaskType,
    QKVLayout,
    SequenceDescriptor,
    fused_attn,
)
from te_jax.compat.transformer_engine.jax.flax.transformer import DotProductAttention
from te_jax.compat.transformer_engine.jax.sharding import MeshResource, global_shard_guard

STATE = "_overwrite_with_gradient"
B, S, H, N, G, D, F, V = 2, 8, 32, 4, 2, 8, 48, 24
ROLES = dict(
    dp_resource="data", fsdp_resource="fsdp", tp_resource="tensor", tpsp_resource="tensor_sequence",
    cp_resource="context",
)  # fmt: skip

# -- MaxText: NNX modules around Linen ones that hold the state of products; attention that is built in each call ---


def product_class(own):
    """A Linen class whose call is `dense` of the incumbent with the quantizers of `own`, which live in STATE."""

    class Product(te.flax.module.TransformerEngineBase):
        def generate_quantizer_set(
            self, postfix="", variable_collection=None, quantization_checkpoint_name=None, fp8_recipe=own, n_groups=None
        ):
            return super().generate_quantizer_set(
                postfix=postfix, variable_collection=STATE, quantization_checkpoint_name="quantization",
                fp8_recipe=fp8_recipe, n_groups=n_groups,
            )  # fmt: skip

        @nn.compact
        def __call__(self, x, kernel, dims, **unused):
            return te.dense.dense(
                x, kernel, contracting_dims=dims[0], quantizer_set=self.generate_quantizer_set(),
                collective_op_set=tex.noop_collective_op_set,
            )  # fmt: skip

    return Product


class Projection(nnx.Module):
    """x [..., *inputs] . kernel [*inputs, *outputs]; the product's state is made by a call on one row of zeros."""

    def __init__(self, inputs, outputs, own, rngs):
        self.axes = len(inputs)
        scale = np.prod(inputs) ** -0.5
        self.kernel = nnx.Param(jax.random.normal(rngs.params(), (*inputs, *outputs)) * scale)
        self.product = None if own is None else nnx.bridge.ToNNX(product_class(own)(), rngs=jax.random.key(0))
        if own is not None:
            self.product.lazy_init(*self.operands(jnp.zeros((1, *inputs), jnp.bfloat16)), precision=None)

    def operands(self, x):
        axes = tuple(range(x.ndim - self.axes, x.ndim)), tuple(range(self.axes))
        return x, self.kernel[...].astype(jnp.bfloat16), (axes, ((), ()))

    def __call__(self, x):
        if self.product is None:
            return jax.lax.dot_general(*self.operands(x))
        return self.product(*self.operands(x), precision=None, mutable=["aqt"])


class Block(nnx.Module):
    """Attention, and an MLP or `experts` of them, of which a router takes two."""

    def __init__(self, own, rngs, *, experts=0, packed=False, window=None):
        make = lambda inputs, outputs, own=own: Projection(inputs, outputs, own, rngs)
        self.q, self.k, self.v, self.o = *(make((H,), (n, D)) for n in (N, G, G)), make((N, D), (H,))
        self.up, self.down = make((H,), (2 * F if not experts else experts,)), None if experts else make((F,), (H,))
        self.experts = experts and nnx.Param(jax.random.normal(rngs.params(), (experts, H, H)) * H**-0.5)
        self.packed, self.window = packed, window

    def attend(self, q, k, v, ids):
        layer = DotProductAttention(
            head_dim=D, num_attention_heads=N, num_gqa_groups=G, attn_mask_type="padding_causal",
            attn_bias_type="no_bias", attention_dropout=0.0, dropout_rng_name="aqt", dtype=jnp.bfloat16,
            float32_logits=True, qkv_layout="THD_THD_THD" if self.packed else "BSHD_BSHD_BSHD", scale_factor=1.0,
            transpose_batch_sequence=False, window_size=self.window, context_parallel_causal_load_balanced=True,
            context_parallel_axis="context", context_parallel_strategy="all_gather",
            max_segments_per_seq=3 if self.packed else 1,
        )  # fmt: skip
        if self.packed:
            describe = SequenceDescriptor.from_segment_ids_and_pos
            with pytest.raises(TypeError):  # which the trainer catches, to call again without these
                describe(segment_ids=ids, segment_pos=None, is_thd=True, is_segment_ids_reordered=False)
            position = jnp.broadcast_to(jnp.arange(S), (B, S)) - jnp.where(ids == 2, 3, 0)
            dummy, mask = (describe(segment_ids=i, segment_pos=position) for i in (jnp.ones_like(ids), ids))
        else:
            dummy = jnp.zeros((1, 1, 1, S, S), jnp.uint8)
            seen = (ids[:, :, None] == ids[:, None]) & jnp.tril(jnp.ones((S, S), bool))
            mask = jnp.where(seen, 0, 1).astype(jnp.uint8)[:, None, None]
        layer = nnx.bridge.ToNNX(layer, rngs=jax.random.key(0))
        layer.lazy_init(*(jnp.zeros((1, S, n, D), jnp.bfloat16) for n in (N, G, G)), sequence_descriptor=dummy)
        return layer(q * jnp.asarray(D**-0.5, q.dtype), k, v, sequence_descriptor=mask)

    def __call__(self, x, ids):
        norm = lambda x: (
            x * jax.lax.rsqrt(jnp.mean(jnp.square(x.astype(jnp.float32)), -1, keepdims=True)).astype(x.dtype)
        )
        y = norm(x)
        x = x + self.o(self.attend(self.q(y), self.k(y), self.v(y), ids))
        y = self.up(norm(x))
        if self.down is not None:
            return x + self.down(nn.silu(y[..., :F]) * y[..., F:])
        weights, chosen = jax.lax.top_k(jax.nn.softmax(y.astype(jnp.float32)), 2)
        weights = jnp.einsum("bskn,bsk->bsn", jax.nn.one_hot(chosen, y.shape[-1]), weights).astype(x.dtype)
        return x + jnp.einsum("bsh,nhi,bsn->bsi", norm(x), self.experts[...].astype(x.dtype), weights)


class LanguageModel(nnx.Module):
    def __init__(self, own, rngs, **fields):
        self.embed = nnx.Param(jax.random.normal(rngs.params(), (V, H)))
        self.block = Block(own, rngs, **fields)

    def __call__(self, tokens, ids):
        x = self.block(self.embed[...].astype(jnp.bfloat16)[tokens], ids)
        return jnp.einsum("bsh,vh->bsv", x, self.embed[...].astype(x.dtype)).astype(jnp.float32) / H**0.5


def train(own, tokens, ids, steps=3, **fields):
    """The losses of the steps, and the state after them: it is what the gradient of the collection was."""
    model = LanguageModel(own, nnx.Rngs(params=0, aqt=1), **fields)
    kept = variablelib.variable_type_from_name(STATE, allow_register=True)
    graph, params, state, rest = nnx.split(model, nnx.Param, kept, ...)

    def loss(params, state, rest):
        logits = nnx.merge(graph, params, state, rest, copy=True)(tokens[:, :-1], ids)
        return -jnp.mean(jnp.take_along_axis(jax.nn.log_softmax(logits), tokens[:, 1:, None], -1))

    @jax.jit
    def step(params, state, rest):
        value, (grads, state) = jax.value_and_grad(loss, argnums=(0, 1))(params, state, rest)
        return value, jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), state

    values = []
    for _ in range(steps):
        value, params, state = step(params, state, rest)
        values.append(float(value))
    return values, nnx.to_pure_dict(state)


@pytest.mark.parametrize("kind", ["llama", "mixtral"])
def test_a_trainer_of_language_models(kind, rng):
    """In the manner of MaxText: with axes of one device in all roles, masks of five axes or packed rows, and state that
    the gradient replaces. FP8 changes the losses by less than e4m3's half step of 2**-4, times what they are."""
    tokens = jnp.asarray(rng.integers(0, V, (B, S + 1)))
    ids = jnp.asarray([[1, 1, 1, 2, 2, 2, 2, 2], [1, 1, 1, 1, 1, 1, 0, 0]])
    fields = dict(llama={}, mixtral=dict(experts=3, packed=True, window=[4, 0]))[kind]
    own = dict(llama=recipe.DelayedScaling(amax_history_len=4), mixtral=recipe.Float8CurrentScaling())[kind]
    names = tuple(ROLES.values())
    mesh = jax.make_mesh((1,) * len(names), names, (AxisType.Auto,) * len(names), devices=jax.devices()[:1])
    with global_shard_guard(MeshResource(**ROLES, pp_resource=None)), jax.set_mesh(mesh):
        plain, _ = train(None, tokens, ids, **fields)
        values, state = train(own, tokens, ids, **fields)
    np.testing.assert_allclose(values, plain, rtol=2**-4)
    assert values[-1] < values[0] and plain[-1] < plain[0]
    histories = {path: x for path, x in jax.tree_util.tree_leaves_with_path(state) if "history" in str(path[-1])}
    assert len(histories) == (3 * 6 if kind == "llama" else 0)
    assert all(np.count_nonzero(x) == 3 for x in histories.values())  # one number for each step


# -- MaxDiffusion, Levanter -------------------------------------------------------------------------------------


@pytest.fixture
def qkv(rng):
    return tuple(on_device(rng.standard_normal((B, S, n, D)), jnp.float32) for n in (N, G, G))


def test_a_trainer_of_diffusion_models(qkv):
    """In the manner of MaxDiffusion: a module without variables, applied outside of any other."""
    q, k, v = qkv[0], *(jnp.repeat(x, N // G, 2) for x in qkv[1:])
    layer = DotProductAttention(
        head_dim=D, num_attention_heads=N, num_gqa_groups=N, attn_mask_type="no_mask", attn_bias_type="NO_BIAS",
        dropout_rng_name="aqt", dtype=q.dtype, qkv_layout="BSHD_BSHD_BSHD", scale_factor=0.3,
        transpose_batch_sequence=False,
    )  # fmt: skip
    attend = partial(layer.apply, {})
    roles = {role: axis for role, axis in ROLES.items() if role not in ("dp_resource", "tpsp_resource")}
    with global_shard_guard(MeshResource(dp_resource=None, **roles)):
        got = jax.jit(partial(attend, mask=None))(q, k, v)
    np.testing.assert_allclose(got, jax.nn.dot_product_attention(q, k, v, scale=0.3), rtol=1e-5, atol=1e-5)


@pytest.mark.filterwarnings("ignore:fused_attn. a mask of:UserWarning")
@pytest.mark.parametrize("causal", [True, False])
def test_a_trainer_with_the_function(qkv, causal):
    """In the manner of Levanter: `fused_attn` by keywords of an older release, where mask types without padding ignore
    the mask, whatever it says."""
    if causal:
        kind, mask = AttnMaskType.CAUSAL_MASK, jnp.dstack([jnp.tril(jnp.ones((S, S), bool))] * B)
    else:
        kind, mask = AttnMaskType.NO_MASK, jnp.ones((B, S, S))

    def attend(q, k, v):
        return fused_attn(
            qkv=(q, k, v), bias=None, mask=mask, seed=None, attn_bias_type=AttnBiasType.NO_BIAS, attn_mask_type=kind,
            qkv_layout=QKVLayout.BSHD_BSHD_BSHD, scaling_factor=0.3, dropout_probability=0.0, is_training=True,
        )  # fmt: skip

    want = jax.nn.dot_product_attention(*qkv, scale=0.3, is_causal=causal)
    np.testing.assert_allclose(jax.jit(attend)(*qkv), want, rtol=1e-5, atol=1e-5)
