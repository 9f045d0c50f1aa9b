"""Experts of NNX modules that devices divide: as those of the Linen modules, bit for bit."""

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn
from flax import nnx
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from quick_init import quick_nnx

import te_jax as te
import te_jax.flax as te_flax
import te_jax.nnx as te_nnx

RECIPE = te.recipe.DelayedScaling(amax_history_len=3)
E, H = 4, 32
MOE = dict(num_experts=E, num_experts_per_tok=2, use_expert_bias=True)
LAYER = dict(hidden_size=H, mlp_hidden_size=48, num_attention_heads=2, hidden_dropout=0.0, attention_dropout=0.0)


def test_a_step_is_linens(rng, on_host):
    """Loss and gradients of parameters; FP8 state and the bias of experts, which the model gets."""
    mesh = jax.make_mesh((2, 2), ("fsdp", "ep"), axis_types=(AxisType.Auto,) * 2)
    resource = te.MeshResource(fsdp_resource="fsdp", ep_resource="ep")
    x = jnp.asarray(rng.standard_normal((4, 8, H), np.float32))
    with jax.set_mesh(mesh), te.autocast(True, RECIPE, resource):
        with nn.logical_axis_rules(te.sharding.extend_logical_axis_rules(())):
            model = quick_nnx(lambda: te_nnx.TransformerLayer(**LAYER, moe=MOE, rngs=nnx.Rngs(0)))
            shardings = nnx.get_named_sharding(nnx.state(model), mesh)
            nnx.update(model, jax.device_put(nnx.state(model), shardings))
            wo, x = model.moe.wo[...], jax.device_put(x, NamedSharding(mesh, P(("fsdp", "ep"))))
            assert wo.sharding.spec == P("ep", None, "fsdp") and wo.addressable_data(0).size * 4 == wo.size
            before = te_nnx.to_linen(model)

            def linen_loss(variables, x):
                return jnp.mean(model.linen.apply(variables, x) ** 2)

            want = jax.jit(te.value_and_grad(linen_loss))(before, x)
            step = nnx.jit(lambda model, x: te_nnx.value_and_grad(lambda model, x: jnp.mean(model(x) ** 2))(model, x))
            loss, grads = step(model, x)
    got, wanted = nnx.to_pure_dict(grads), want[1]["params"]
    for a, b in ((loss, want[0]), (got, wanted), (te_nnx.to_linen(model)["fp8_metas"], want[1]["fp8_metas"])):
        assert jax.tree.structure(a) == jax.tree.structure(b)
        jax.tree.map(np.testing.assert_array_equal, a, b)
    bias = te_flax.update_expert_bias(before, want[1], 1e-3)["expert_bias"]
    jax.tree.map(np.testing.assert_array_equal, te_nnx.to_linen(model)["expert_bias"], bias)
    assert np.ptp(want[1]["expert_bias"]["moe"]["expert_bias"]) > 0
