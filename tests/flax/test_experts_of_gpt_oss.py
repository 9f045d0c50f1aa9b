"""router_bias and shared_expert_gate of MoEBlock, with gpt-oss' experts, against plain JAX."""

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
    num_shared_experts=2,
    shared_expert_gate=True,
)
# f32 sums of at most 24 terms, four products behind each other and their gradients.
BOUND = 64 * 2.0**-24


def clamped(gate, up):
    gate, up = jnp.minimum(gate, LIMIT), jnp.clip(up, -LIMIT, LIMIT)
    return (up + 1) * gate * jax.nn.sigmoid(ALPHA * gate)


def reference(p, x):
    """All experts of all tokens, of which the chosen ones count."""
    logits = x @ p["gate_kernel"] + p["gate_bias"]
    chosen = logits >= jax.lax.top_k(logits, K)[0][..., -1:]
    weights = jax.nn.softmax(jnp.where(chosen, logits, -jnp.inf), -1)
    of = lambda i: jnp.einsum("bsh,ehf->bsef", x, p[f"wi_{i}"]) + p[f"wi_{i}_bias"]
    each = jnp.einsum("bsef,efh->bseh", clamped(of(0), of(1)), p["wo"]) + p["wo_bias"]
    own = p["shared_experts"]
    gate, up = jnp.moveaxis(jnp.tensordot(x, own["wi_kernel"], 1) + own["wi_bias"], 2, 0)
    shared = clamped(gate, up) @ own["wo_kernel"] + own["wo_bias"]
    return jnp.einsum("bse,bseh->bsh", weights, each) + jax.nn.sigmoid(x @ p["shared_gate_kernel"]) * shared


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
    again = te_nnx.from_linen({"params": params}, te_nnx.MoEBlock(H, **FIELDS, rngs=nnx.Rngs(0)))
    plain = jax.jit(module.apply)({"params": params}, x)
    np.testing.assert_array_equal(nnx.jit(lambda module, x: module(x))(again, x), plain)


def test_a_gate_needs_experts():
    with pytest.raises(ValueError, match="shared_expert_gate is True, but num_shared_experts is 0; pass both"):
        jax.eval_shape(te_flax.MoEBlock(shared_expert_gate=True).init, jax.random.key(0), data(B, S, H))
