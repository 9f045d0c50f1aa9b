"""MoEBlock on meshes: tokens, hidden features and experts divided among devices, against one device."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import states
from flax import linen as nn
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from quick_init import quick_init

import te_jax as te
import te_jax.flax as te_flax
from te_jax import recipe

B, S, H, F, E, K = 2, 12, 32, 48, 4, 2
RECIPE = recipe.DelayedScaling(amax_history_len=3)
FIELDS = dict(num_experts=E, num_experts_per_tok=K, intermediate_dim=F, use_expert_bias=True)


def loss_of(model, params, others, x):
    y, sown = model.apply({"params": params, **others}, x, mutable=["losses"])
    return jnp.mean(y**2) + sum(map(jnp.sum, jax.tree.leaves(sown)))


@partial(jax.jit, static_argnums=0)
def train_step(model, state, x, rate):
    with te.autocast(True, RECIPE):
        of = partial(loss_of, model)
        _, grads = te.value_and_grad(lambda *a: of(*a, x), argnums=(0, 1))(state.params, state.fp8)
        return state.apply_gradients(grads=grads, expert_bias_rate=rate)


def test_mesh_and_shard_map(rng, on_host):
    """Tokens on dp, F on tp; within shard_map over dp, where each device routes its own tokens. Counts are of all."""
    axes = dict(gate_axes=(None, None), kernel_axes_1=(None, None, "tp"), kernel_axes_2=(None, "tp", None))
    axes |= dict(bias_axes_1=(None, "tp"), bias_axes_2=(None, None))
    axes |= dict(use_bias=True, capacity_factor=4.0)  # which no expert reaches, on any device
    model, x = te_flax.MoEBlock(E, K, F, use_expert_bias=True, **axes), states.data(rng, 2 * B, S, H)
    w = states.data(rng, 2 * B, S, H)  # the gradient of y, so that it is quantized alike
    with te.autocast(True, RECIPE):
        variables = quick_init(model.init)(jax.random.key(0), x)
        specs = nn.get_partition_spec(variables)
        variables = te.fp8_probes(nn.meta.unbox(variables))
        specs["fp8_metas"] = jax.tree.map(lambda _: P(), variables["fp8_metas"])

        def loss(variables, x, w):
            return jnp.sum(model.apply(variables, x) * w)

        def mapped(variables, x, w):
            run = lambda *args: jax.lax.psum(loss(*args), "dp")
            return jax.shard_map(run, in_specs=(P(), P("dp"), P("dp")), out_specs=P(), axis_names={"dp"})(
                variables, x, w
            )

        grad = lambda f: jax.jit(lambda *a: te.value_and_grad(f)(*a))
        want = grad(loss)(variables, x, w)
        results = []
        for f, kind in ((loss, AxisType.Auto), (mapped, AxisType.Auto), (loss, AxisType.Explicit)):
            mesh = jax.make_mesh((2, 2), ("dp", "tp"), axis_types=(kind,) * 2)
            with jax.set_mesh(mesh):
                place = lambda a, spec, mesh=mesh: jax.device_put(a, NamedSharding(mesh, spec))
                placed = jax.tree.map(place, variables, specs), place(x, P("dp")), place(w, P("dp"))
                results.append(jax.device_get(grad(f)(*placed)))
    counts = want[1]["expert_bias"]["expert_bias"]
    assert counts.sum() == x.size // H * K
    for got in results:
        states.assert_equal(got[1]["expert_bias"]["expert_bias"], counts)
        for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-4, atol=2.0**-19 * np.abs(b).max(initial=1e-20))


def shardings_on(sizes, boxed, **resource):
    """The mesh, and where a state lies on it by its logical axes."""
    mesh = jax.make_mesh(tuple(sizes.values()), tuple(sizes), axis_types=(AxisType.Auto,) * len(sizes))
    with jax.set_mesh(mesh), te.sharding.global_shard_guard(te.MeshResource(**resource)):
        rules = te.sharding.extend_logical_axis_rules((("embed", resource.get("fsdp_resource")), ("mlp", None)))
        return mesh, rules, nn.logical_to_mesh_sharding(nn.get_partition_spec(boxed), mesh, rules)


def test_experts_are_divided(rng, tmp_path):
    """Experts on dp, by the logical axis "expert" of their parameters: after two steps of training parameters, biases
    and FP8 state are as on one device. A checkpoint of them has the same bits on other meshes and on one device."""
    fields = FIELDS | dict(aux_loss_coeff=0.01, layernorm_input_axes=("nvte_batch", None, None))
    model, x = te_flax.MoEBlock(**fields), states.data(rng, 4, S, H)
    start = states.state_of(model, RECIPE, x)

    def steps(state):
        state = nn.meta.unbox(state)
        for rate in (0.1, 0.2):
            state = train_step(model, state, x, rate)
        return state

    want = steps(start)
    resource = dict(dp_resource="dp", ep_resource="dp")
    mesh, rules, on_dp = shardings_on({"dp": 4}, start, **resource)
    assert on_dp.params["wo"].spec[0] == "dp"
    with jax.set_mesh(mesh), te.sharding.global_shard_guard(te.MeshResource(**resource)), nn.logical_axis_rules(rules):
        got = steps(jax.device_put(start, on_dp))
    # The gradient is rounded on its way: by 2**-4 of a number, and its amax with it.
    for a, b in zip(jax.tree.leaves((got.params, got.fp8)), jax.tree.leaves((want.params, want.fp8)), strict=True):
        np.testing.assert_allclose(a, b, rtol=2.0**-4, atol=2.0**-4 * np.abs(b).max())
    states.assert_equal(got.fp8["expert_bias"], want.fp8["expert_bias"])

    *_, on_both = shardings_on({"fsdp": 2, "ep": 2}, start, fsdp_resource="fsdp", ep_resource="ep")
    here = jax.tree.map(lambda _: jax.sharding.SingleDeviceSharding(jax.devices()[0]), on_dp)
    assert on_both.params["wo"].spec == P("ep", None, "fsdp")  # "expert", "mlp", "embed"
    assert got.fp8["fp8_metas"]["kernel_0_amax_history"].shape == (E, 3) and "expert_bias" in got.fp8
    last = got
    for i, places in enumerate((on_both, here, on_dp)):
        states.saved(tmp_path / str(i), last)
        types = jax.tree.map(lambda a, at: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=at), last, places)
        last = states.restored(tmp_path / str(i), types)
        states.assert_equal(last, got)
        assert jax.tree.map(lambda a: a.sharding, last) == places
