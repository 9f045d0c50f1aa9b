"""router_bias of MoEBlock: biases of the router's logits, with gpt-oss' experts, against plain JAX."""

import flax_reference as ref
import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from flax_reference import data

import te_jax as te
import te_jax.flax as te_flax
import te_jax.nnx as te_nnx

H, F, E, K, B, S = 16, 24, 4, 2, 2, 5
LIMIT, ALPHA = 0.7, 1.702
FIELDS = dict(
    num_experts=E,
    num_experts_per_tok=K,
    intermediate_dim=F,
    activations=("clamped_silu", "clamped_linear"),
    activation_params=dict(limit=LIMIT, alpha=ALPHA, glu_linear_offset=1.0),
    use_bias=True,
    router_bias=True,
)
# f32 sums of at most 24 terms, four products behind each other and their gradients.
BOUND = 64 * 2.0**-24


def reference(p, x):
    """All experts of all tokens, of which the chosen ones count."""
    logits = x @ p["gate_kernel"] + p["gate_bias"]
    chosen = logits >= jax.lax.top_k(logits, K)[0][..., -1:]
    weights = jax.nn.softmax(jnp.where(chosen, logits, -jnp.inf), -1)
    of = lambda i: jnp.einsum("bsh,ehf->bsef", x, p[f"wi_{i}"]) + p[f"wi_{i}_bias"]
    gate, up = jnp.minimum(of(0), LIMIT), jnp.clip(of(1), -LIMIT, LIMIT)
    inner = (up + 1) * gate * jax.nn.sigmoid(ALPHA * gate)
    each = jnp.einsum("bsef,efh->bseh", inner, p["wo"]) + p["wo_bias"]
    return jnp.einsum("bse,bseh->bsh", weights, each)


def test_against_plain_jax(on_host):
    """Outputs and gradients, of the bias too; FP8 near them, with the same experts; NNX has the same bits."""
    module, x, weights = te_flax.MoEBlock(**FIELDS), data(B, S, H), data(B, S, H, seed=2)
    params = ref.unboxed(ref.filled(jax.eval_shape(module.init, jax.random.key(0), x)["params"]))
    params["gate_bias"] = jnp.array([0.0, 3.0, -2.0, 1.0])  # enough to change choices
    assert params["gate_bias"].shape == (E,)

    @jax.jit
    def run(params, x):
        def of(apply):
            y, vjp = jax.vjp(apply, params, x)
            return y, *vjp(weights)

        apply = lambda p, x: module.apply({"params": p}, x)
        with te.autocast(recipe=te.recipe.Float8CurrentScaling()):
            narrow = apply(params, x)
        return of(apply), of(reference), narrow, apply(params | {"gate_bias": jnp.zeros(E)}, x)

    got, want, narrow, without = run(params, x)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=BOUND * np.abs(b).max(initial=1.0))
    assert ref.relative_error(without, want[0]) > 0.1
    # Four operands in E4M3, two behind each other, each off by 2**-4 / sqrt(3) of itself at most.
    assert 0 < ref.relative_error(narrow, want[0]) < 4 * 2**-4 / 3**0.5
    sizes = {name: value for name, value in FIELDS.items()}
    again = te_nnx.from_linen({"params": params}, te_nnx.MoEBlock(H, **sizes, rngs=nnx.Rngs(0)))
    plain = jax.jit(module.apply)({"params": params}, x)
    np.testing.assert_array_equal(nnx.jit(lambda module, x: module(x))(again, x), plain)
