"""A mixture of experts that eight devices divide, whichever processes have them: its loss, gradients and state."""

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from quick_init import quick_init

import te_jax as te
import te_jax.flax as te_flax

ROWS, S, H, F, E, K = 8, 4, 32, 48, 8, 2
# Mesh axes, the recipe. Of ("ep", "dp") devices of one process have several places along ep, and ep crosses processes.
CASES = {
    "fp8": ((4, 2), ("ep", "dp"), te.recipe.DelayedScaling(amax_history_len=3)),
    "unquantized": ((8,), ("ep",), None),
}


def case(name: str):
    """(step, its arguments): step(variables, x) is (loss, gradients) on all devices of all processes, whole on each of
    them; the gradients are counts of experts and FP8 state, too."""
    sizes, axes, recipe = CASES[name]
    mesh = jax.make_mesh(sizes, axes, axis_types=(AxisType.Auto,) * len(sizes))
    fields = dict(num_experts=E, num_experts_per_tok=K, intermediate_dim=F, use_expert_bias=True)
    model = te_flax.MoEBlock(**fields, layernorm_input_axes=("nvte_batch", None, None))
    rng = np.random.default_rng(0)
    x, w = (rng.standard_normal((ROWS, S, H), np.float32) for _ in range(2))
    resource = te.MeshResource(dp_resource="dp" if "dp" in axes else None, ep_resource="ep")
    autocast = lambda: te.autocast(recipe is not None, recipe, resource)
    with autocast():
        boxed = quick_init(model.init)(jax.random.key(0), x)
    rules = (("expert", "ep"), ("embed", None), ("mlp", None))
    specs = nn.logical_to_mesh_sharding(nn.get_partition_spec(boxed), mesh, rules)
    specs = {**specs, "x": NamedSharding(mesh, P(axes))}
    put = lambda a, sharding: jax.make_array_from_callback(a.shape, sharding, np.asarray(a).__getitem__)
    placed = jax.tree.map(put, {**jax.device_get(nn.meta.unbox(boxed)), "x": x}, specs)

    def loss(variables, x):
        return jnp.sum(model.apply(variables, x) * w)

    def step(variables, x):
        with autocast():
            return te.value_and_grad(loss)(variables, x)

    def run(variables, x):
        with jax.set_mesh(mesh):
            return jitted(variables, x)

    jitted = jax.jit(step, out_shardings=NamedSharding(mesh, P()))
    x = placed.pop("x")
    return run, (placed, x)


def numbers(result) -> dict[str, np.ndarray]:
    """Arrays by their paths."""
    return {jax.tree_util.keystr(path): np.asarray(a) for path, a in jax.tree_util.tree_leaves_with_path(result)}
