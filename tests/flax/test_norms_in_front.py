"""input_layernorm and mlp_layernorm: layers without norms in front of their sub-blocks; multipliers, as in Granite, of
layers and of models: against plain JAX."""

import functools

import flax_reference as ref
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from flax_reference import data

import te_jax as te
import te_jax.flax as te_flax
import te_jax.nnx as te_nnx
from te_jax.models import CausalLM, ModelConfig

pytestmark = pytest.mark.usefixtures("on_host")
H, F, N, D, B, S = 24, 40, 3, 8, 2, 6
FIELDS = dict(
    hidden_size=H,
    mlp_hidden_size=F,
    num_attention_heads=N,
    hidden_dropout=0.0,
    attention_dropout=0.0,
    layernorm_type="rmsnorm",
    mlp_activations=("silu", "linear"),
)
# f32 sums of at most 40 terms, six products behind each other and their gradients.
BOUND = 128 * 2.0**-24


def rms(x, scale):
    return x / jnp.sqrt(jnp.mean(x**2, -1, keepdims=True) + 1e-6) * scale


def reference(
    p,
    x,
    input_layernorm=True,
    mlp_layernorm=True,
    post_norms=False,
    residual_multiplier=1.0,
    attn_logit_scale=D**-0.5,
):
    of_block = lambda y, name: rms(y, p[f"post_{name}_norm"]["scale"]) if post_norms else y
    behind = lambda y, name: residual_multiplier * of_block(y, name)
    h = rms(x, p["attention"]["qkv"]["scale"]) if input_layernorm else x
    qkv = jnp.tensordot(h, p["attention"]["qkv"]["kernel"], 1)
    q, k, v = jnp.moveaxis(qkv.reshape(*qkv.shape[:3], N, D), 2, 0)
    logits = jnp.where(jnp.tri(S, dtype=bool), jnp.einsum("bshd,bthd->bhst", q, k) * attn_logit_scale, -jnp.inf)
    y = jnp.einsum("bhst,bthd->bshd", jax.nn.softmax(logits, -1), v).reshape(B, S, -1)
    x = x + behind(y @ p["attention"]["out"]["kernel"], "attention")
    h = rms(x, p["mlp"]["scale"]) if mlp_layernorm else x
    gate, up = jnp.moveaxis(jnp.tensordot(h, p["mlp"]["wi_kernel"], 1), 2, 0)
    return x + behind((jax.nn.silu(gate) * up) @ p["mlp"]["wo_kernel"], "mlp")


CASES = {
    "as in OLMo 2": dict(input_layernorm=False, mlp_layernorm=False, post_norms=True),
    "no norms": dict(input_layernorm=False, mlp_layernorm=False),
    "as ModernBERT's first": dict(input_layernorm=False),
    "none before the MLP": dict(mlp_layernorm=False),
    "multipliers": dict(residual_multiplier=0.22, attn_logit_scale=0.75),
}


@pytest.mark.parametrize("name", CASES)
def test_against_plain_jax(name):
    """Outputs and gradients; under FP8 near them; NNX has the same bits."""
    fields, x, weights = CASES[name], data(B, S, H), data(B, S, H, seed=2)
    module = te_flax.TransformerLayer(**FIELDS, **fields)
    nnx_module = te_nnx.TransformerLayer(**FIELDS, **fields, rngs=nnx.Rngs(0))
    params = ref.unboxed(ref.filled(jax.eval_shape(module.init, jax.random.key(0), x)["params"]))
    assert ("scale" in params["mlp"]) == fields.get("mlp_layernorm", True)
    nnx_module = te_nnx.from_linen({"params": params}, nnx_module)

    @jax.jit
    def run(params, x):
        def of(apply):
            y, vjp = jax.vjp(apply, params, x)
            return y, *vjp(weights)

        apply = lambda p, x: module.apply({"params": p}, x, deterministic=True)
        with te.autocast(recipe=te.recipe.Float8CurrentScaling()):
            narrow = apply(params, x)
        return of(apply), of(functools.partial(reference, **fields)), narrow

    got, want, narrow = run(params, x)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=BOUND * np.abs(b).max(initial=1.0))
    # Eight operands in E4M3, of which six follow each other, each off by 2**-4 / sqrt(3) of itself at most.
    assert 0 < ref.relative_error(narrow, want[0]) < 6 * 2**-4 / 3**0.5
    again = nnx.jit(lambda module, x: module(x, deterministic=True))(nnx_module, x)
    plain = jax.jit(functools.partial(module.apply, deterministic=True))({"params": params}, x)
    np.testing.assert_array_equal(again, plain)


@pytest.mark.parametrize("tied", [True, False])
def test_multipliers_of_a_model(tied):
    """Embeddings and what the head reads are scaled: logits and the gradients of tables and the last norm."""
    fields = {name: value for name, value in FIELDS.items() if name != "hidden_size"}
    scales = dict(embedding_scale=12.0, output_scale=0.125)
    model = CausalLM(ModelConfig(7, 1, H, fields, tie_embeddings=tied, **scales), dtype=jnp.float32)
    tokens, weights = jnp.arange(6).reshape(1, 6), data(1, 6, 7)
    params = ref.unboxed(ref.filled(jax.eval_shape(model.init, jax.random.key(0), tokens)["params"]))
    layer = params["layers"]["TransformerLayer_0"]
    of_layer = jax.tree.map(lambda a: a[0], layer)

    def plain(table, head, norm):
        x = reference(of_layer, jnp.broadcast_to(12.0 * table[tokens], (B, S, H)))[:1]
        return jnp.einsum("bsh,vh->bsv", 0.125 * rms(x, norm), head)

    def ours(table, head, norm):
        of_head = {} if tied else dict(head=head)
        own = params | dict(embedding=table, final_norm=dict(scale=norm)) | of_head
        return model.apply({"params": own}, tokens)

    def tie(run):
        return (lambda table, norm: run(table, table, norm)) if tied else run

    args = (params["embedding"], *(() if tied else (params["head"],)), params["final_norm"]["scale"])

    @jax.jit
    def run(*args):
        def of(apply):
            y, vjp = jax.vjp(tie(apply), *args)
            return y, vjp(weights)

        return of(ours), of(plain)

    got, want = run(*args)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=BOUND * np.abs(b).max(initial=1.0))
