"""FP8 with delayed scaling in 30 lines: one dense layer, ten steps, and its FP8 state as it moves."""

# fmt: off
import flax
import jax
import jax.numpy as jnp

import te_jax as te
import te_jax.flax as te_flax
from te_jax import recipe

BATCH, SEQLEN, HIDDEN = 32, 128, 1024
rng = jax.random.PRNGKey(0)
init_rng, data_rng = jax.random.split(rng)
inp = jax.random.normal(data_rng, [BATCH, SEQLEN, HIDDEN], jnp.float32)
fp8_recipe = recipe.DelayedScaling(margin=0, interval=1, fp8_format=recipe.Format.HYBRID)

with te.fp8_autocast(enabled=True, fp8_recipe=fp8_recipe):
    model = te_flax.DenseGeneral(features=HIDDEN)

    def loss_fn(params, other_vars, inp):
        out = model.apply({'params': params, **other_vars}, inp)
        return jnp.mean(out)

    variables = model.init(init_rng, inp)
    other_variables, params = flax.core.pop(variables, 'params')
    fwd_bwd_fn = jax.value_and_grad(loss_fn, argnums=(0, 1))
    for _ in range(10):
        loss, (param_grads, other_grads) = fwd_bwd_fn(params, other_variables, inp)
        before = jax.tree.leaves(other_variables)
        other_variables = te.update_fp8_metas(other_grads)
        after = jax.tree.leaves(other_variables)
        changed = sum(bool((a != b).any()) for a, b in zip(before, after, strict=True))
        print(f"loss {loss:.6f}; {changed} of {len(before)} FP8 metas changed")
