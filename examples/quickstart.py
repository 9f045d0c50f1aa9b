"""FP8 with delayed scaling in 40 lines: a dense layer learns to do what another one does, and its FP8 scales follow.

Each step prints the loss, which falls, and the scales by which the tensors of the layer's GEMMs are multiplied before
the cast to FP8. They begin at 1, where the gradient, of numbers around 1e-6, becomes 0: nothing is learned in the first
step. From the second one on a scale is the largest FP8 number over the largest amax of the steps before: x's stays, for
x does, and the kernel's falls as the kernel grows.
"""

# fmt: off
import flax
import jax
import jax.numpy as jnp

import te_jax as te
import te_jax.flax as te_flax
from te_jax import recipe

BATCH, SEQLEN, HIDDEN = 32, 128, 1024
LEARNING_RATE = 0.3 * HIDDEN  # the loss is a mean over HIDDEN features, its gradient that much smaller
rng = jax.random.PRNGKey(0)
init_rng, data_rng = jax.random.split(rng)
inp = jax.random.normal(data_rng, [BATCH, SEQLEN, HIDDEN], jnp.float32)
teacher = jax.random.normal(jax.random.fold_in(rng, 1), [HIDDEN, HIDDEN], jnp.float32) / HIDDEN ** 0.5
target = inp @ teacher
fp8_recipe = recipe.DelayedScaling(margin=0, interval=1, fp8_format=recipe.Format.HYBRID)

with te.fp8_autocast(enabled=True, fp8_recipe=fp8_recipe):
    model = te_flax.DenseGeneral(features=HIDDEN)

    def loss_fn(params, other_vars, inp):
        out = model.apply({'params': params, **other_vars}, inp)
        out = (out - target) ** 2
        return jnp.mean(out)

    variables = model.init(init_rng, inp)
    other_variables, params = flax.core.pop(variables, 'params')
    fwd_bwd_fn = jax.value_and_grad(loss_fn, argnums=(0, 1))
    for _ in range(10):
        loss, (param_grads, other_grads) = fwd_bwd_fn(params, other_variables, inp)
        scales = {name: other_variables['fp8_metas'][f'{name}_scale'][0] for name in ('x', 'kernel', 'grad')}
        print(f"loss {loss:.6f}; scales:", *(f"{name} {scale:.4g}" for name, scale in scales.items()))
        params = jax.tree.map(lambda p, g: p - LEARNING_RATE * g, params, param_grads)
        # The "gradient" of the FP8 state is its next value.
        other_variables = te.update_fp8_metas(other_grads)
