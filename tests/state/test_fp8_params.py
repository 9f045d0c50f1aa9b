"""Parameters that live in FP8: what modules compute with them, their bytes, checkpoints, shardings, and LoRA."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from flax import nnx
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from jaxprs import equations
from quick_init import quick_init, quick_nnx
from states import assert_equal, data, restored, saved

import te_jax as te
import te_jax.flax as te_flax
import te_jax.nnx as te_nnx
from te_jax.layers import QuantizedKernel
from te_jax.recipe import DelayedScaling, Float8BlockScaling, Float8CurrentScaling

DELAYED, CURRENT, BLOCK = DelayedScaling(amax_history_len=3), Float8CurrentScaling(), Float8BlockScaling()
WIDTH = 24
LORA = dict(enable_low_rank_adaptation=True, low_rank_adaptation_dim=3)


class Body(nn.Module):
    @nn.compact
    def __call__(self, x, _):
        axes = dict(kernel_axes_1=("embed", None, "mlp"), kernel_axes_2=("mlp", "embed"), use_bias=True)
        return te_flax.LayerNormMLP(intermediate_dim=160, name="mlp", **axes, **LORA)(x, True, residual=True)[0], None


class Net(nn.Module):
    @nn.compact
    def __call__(self, x):
        axes = dict.fromkeys(("params", "fp8_metas", "fp8_kernels"), 0)
        names = {nn.PARTITION_NAME: "layers"}
        layers = nn.scan(Body, variable_axes=axes, split_rngs={"params": True}, length=2, metadata_params=names)
        x = layers(name="layers")(x, None)[0].reshape(*x.shape[:-1], 4, -1)
        return te_flax.DenseGeneral((2, 5), axis=(-2, -1), kernel_axes=(None, "embed", None, None), name="head")(x)


NET = Net()


def initial(recipe, x, model=NET):
    with te.autocast(True, recipe):
        variables = quick_init(model.init)(jax.random.key(0), x)
        return variables, jax.jit(lambda v: te_flax.fp8_params(model, v, x))(variables)


def kernels(params):
    is_one = lambda leaf: isinstance(leaf, QuantizedKernel)
    return [leaf for leaf in jax.tree.leaves(params, is_leaf=is_one) if is_one(leaf)]


class Expert(nn.Module):
    @nn.compact
    def __call__(self, x, _):
        return te_flax.MoEBlock(num_experts=4, num_experts_per_tok=2, intermediate_dim=48, name="moe")(x), None


EXPERTS = nn.scan(
    Expert, variable_axes=dict.fromkeys(("params", "fp8_kernels"), 0), split_rngs={"params": True}, length=2
)


@pytest.mark.parametrize(
    "made, recipe",
    [(te_flax.fp8_params, CURRENT), (te_flax.fp8_params, BLOCK), (te_flax.fp8_kernels, CURRENT)],
    ids=["params-current", "params-block", "kernels"],
)
@pytest.mark.parametrize("model, args", [(NET, ()), (EXPERTS(), (None,))], ids=["mlp", "experts"])
def test_a_loop_over_layers_keeps_no_copy_of_them(model, args, made, recipe, rng):
    """The backward pass reads the stack that the forward pass read: also one of the layout of fprop."""
    x = data(rng, 3, 5, WIDTH)
    with te.autocast(True, recipe):
        variables = jax.eval_shape(lambda: nn.meta.unbox(model.init(jax.random.key(0), x, *args)))
        variables = jax.eval_shape(lambda v: {**v, **nn.meta.unbox(made(model, v, x, *args))}, variables)
        loss = lambda x, variables: jnp.sum(jax.tree.leaves(model.apply(variables, x, *args))[0])
        jaxpr = jax.make_jaxpr(jax.grad(loss))(x, variables).jaxpr
    forward, backward = (eqn for eqn in equations(jaxpr) if eqn.primitive.name == "scan")
    in_fp8 = lambda variables: [v.aval for v in variables if v.aval.dtype == jnp.float8_e4m3fn]
    assert in_fp8(backward.invars) and not in_fp8(forward.outvars)


@pytest.mark.parametrize("recipe", [CURRENT, BLOCK], ids=["current", "block"])
def test_equals_the_dequantized_values(recipe, rng):
    """Output and gradients of LoRA and of x are those of array parameters with the same values: these lie on the grid
    of their FP8 types, so that to quantize them again gives the same data, with scales that are off by a rounding."""
    x = data(rng, 3, 5, WIDTH)
    variables, narrow = (nn.meta.unbox(v) for v in initial(recipe, x))
    assert len(kernels(narrow)) == 3, "wi, wo and the head"
    lora, base = te_flax.split_lora(narrow["params"])
    lora = jax.tree.map(lambda a: a + 0.1, lora)  # B starts at 0

    def loss(lora, base, x):
        y = NET.apply({"params": te_flax.join_lora(lora, base)}, x)
        return jnp.mean(jnp.sin(y)), y

    @jax.jit
    def run(lora, base, x):
        wide = te_flax.dequantize_params(base)
        grad = jax.value_and_grad(loss, (0, 2), has_aux=True)
        with te.autocast(False):
            plain = [loss(lora, params, x)[1] for params in (base, wide)]
        return grad(lora, base, x), grad(lora, wide, x), loss(lora, base, x)[1], wide, plain

    with te.autocast(True, recipe):
        ((_, y), grads), ((_, want), want_grads), alone, wide, plain = run(lora, base, x)
    close = lambda got, want: np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-4 * np.abs(want).max())
    np.testing.assert_array_equal(y, alone)
    jax.tree.map(close, (y, grads), (want, want_grads))
    original = te_flax.split_lora(variables["params"])[1]
    # Half a unit in the last place of E4M3 is 2**-4 of a value; below the normal range it is 2**-10 of the type's 448.
    error = lambda a, b: np.testing.assert_allclose(a, b, rtol=2.0**-4, atol=np.abs(b).max() * 2.0**-10 / 448 * 1.01)
    jax.tree.map(error, wide, original)
    close(*plain)


def test_delayed_scaling(rng):
    """The kernel keeps its own scale, whatever the state says of it; that state stays."""
    x, model = data(rng, 6, WIDTH), te_flax.DenseGeneral(10)
    variables, narrow = (nn.meta.unbox(v) for v in initial(DELAYED, 3 * x, model))
    loss = lambda fp8, params: jnp.sum(model.apply({"params": params, "fp8_metas": fp8}, x) ** 2)
    run = jax.jit(jax.value_and_grad(loss))
    with te.autocast(True, DELAYED):
        got, new = run(narrow["fp8_metas"], narrow["params"])
        held = narrow["params"]["kernel"].tensor
        same = narrow["fp8_metas"] | {"kernel_scale": 1 / held.scale_inv[None]}
        want, moved = run(same, variables["params"])
        far, _ = run(narrow["fp8_metas"], variables["params"])
    np.testing.assert_allclose(got, want, rtol=1e-5)
    assert abs(far - want) > 1e-3 * want, "a scale of 1 gives other values"
    assert_equal(
        {k: new[k] for k in new if "kernel" in k},
        {k: same[k] * 0 + narrow["fp8_metas"][k] for k in new if "kernel" in k},
    )
    assert_equal({k: new[k] for k in new if "kernel" not in k}, {k: moved[k] for k in new if "kernel" not in k})


def test_bytes_checkpoint_and_optimizer(rng, tmp_path):
    """Half of bf16; through orbax, optax and jax.tree as any leaf."""
    x = data(rng, 2, WIDTH)
    model = te_flax.LayerNormMLP(intermediate_dim=320, **LORA)
    with te.autocast(True, CURRENT):
        narrow = nn.meta.unbox(te_flax.fp8_model_init(model, jax.random.key(0), x))["params"]
        run = jax.jit(lambda p, x: model.apply({"params": p}, x)[0]).lower(narrow, x).compile()
        variables = jax.jit(model.init)(jax.random.key(0), x)
        made = jax.jit(lambda v: te_flax.fp8_params(model, v, x))(variables)
    assert_equal(nn.meta.unbox(made["params"]), narrow)
    size = lambda tree: sum(leaf.nbytes for leaf in jax.tree.leaves(tree))
    elements = 2 * WIDTH * 320
    assert size(kernels(narrow)) == elements + 2 * 4
    assert run.memory_analysis().argument_size_in_bytes == size((narrow, x))
    lora, base = te_flax.split_lora(narrow)
    tx = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-2))

    @jax.jit
    def updated(lora):
        updates, _ = tx.update(jax.tree.map(jnp.ones_like, lora), tx.init(lora), lora)
        return optax.apply_updates(lora, updates)

    params = te_flax.join_lora(updated(lora), base)
    saved(tmp_path / "params", params)
    again = restored(tmp_path / "params", params)
    assert jax.tree.structure(again) == jax.tree.structure(params)
    assert_equal(again, params)
    back = jax.eval_shape(te_flax.dequantize_params, again)
    assert jax.tree.map(lambda a: (a.shape, a.dtype), back) == jax.tree.map(
        lambda a: (a.shape, a.dtype), nn.meta.unbox(variables["params"])
    )


def test_shardings(rng, on_host):
    """By the names in the boxes, which follow data_t's axes, and the same values as on one device."""
    x = data(rng, 4, WIDTH)
    rules = (("embed", "fsdp"), ("mlp", "tp"), ("layers", None))
    mesh = jax.make_mesh((2, 2), ("fsdp", "tp"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    of_net = jax.eval_shape(lambda: initial(CURRENT, x)[1])["params"]
    of_net = nn.logical_to_mesh(nn.get_partition_spec(of_net), rules)
    assert of_net["layers"]["mlp"]["wi_kernel"].tensor.data_t == P(None, None, "tp", "fsdp")
    assert of_net["head"]["kernel"].tensor.data_t == P(None, None, None, "fsdp")
    model = te_flax.LayerNormMLP(
        intermediate_dim=160, kernel_axes_1=("embed", None, "mlp"), kernel_axes_2=("mlp", "embed")
    )
    _, narrow = initial(CURRENT, x, model)
    specs = nn.logical_to_mesh(nn.get_partition_spec(narrow), rules)
    narrow = nn.meta.unbox(narrow)
    apply = jax.jit(lambda v, x: model.apply(v, x)[0])
    with te.autocast(True, CURRENT):
        want = apply(narrow, x)
        put = jax.tree.map(lambda a, spec: jax.device_put(a, NamedSharding(mesh, spec)), narrow, specs)
        with jax.set_mesh(mesh):
            got = apply(put, x)
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)  # sums over devices, in another order


def test_refusals(rng):
    """No gradient, in FP8 or out of it; no other recipe; no other width."""
    x, model = data(rng, 4, WIDTH), te_flax.DenseGeneral(10, name="head")
    _, narrow = initial(CURRENT, x, model)
    loss = jax.jit(jax.grad(lambda p, x: jnp.sum(model.apply({"params": p}, x))))
    for enabled in (True, False):
        with te.autocast(enabled, CURRENT), pytest.raises(ValueError, match="DenseGeneral.*is differentiated, but"):
            loss(nn.meta.unbox(narrow["params"]), x)
    with te.autocast(True, BLOCK), pytest.raises(ValueError, match="DenseGeneral.*one scale.* scales of blocks"):
        model.apply(narrow, x)
    with te.autocast(True, CURRENT), pytest.raises(ValueError, match=r"kernel has shape \(24, 10\).*\(12, 10\)"):
        model.apply(narrow, x[:, :12])
    with pytest.raises(ValueError, match="fp8_params: there is no recipe in force"):
        te_flax.fp8_params(model, narrow, x)
    with te.autocast(True, CURRENT), pytest.raises(ValueError, match="or all are in FP8 already"):
        te_flax.fp8_params(model, narrow, x)
    wide = DelayedScaling(amax_history_len=3, override_linear_precision=(True, False, False))
    variables = {"params": {"kernel": jnp.ones((WIDTH, 10)), "bias": jnp.zeros(10)}}
    with te.autocast(True, wide), pytest.raises(ValueError, match="none multiplies in FP8"), pytest.warns():
        te_flax.fp8_params(model, variables, x)


def test_nnx(rng):
    """Through the converters, and next to LoRA's own type of parameters."""
    x, wrt = data(rng, 4, WIDTH), nnx.LoRAParam
    with te.autocast(True, CURRENT):
        model = quick_nnx(lambda: te_nnx.LayerNormMLP(WIDTH, intermediate_dim=40, **LORA, rngs=nnx.Rngs(0)))
        narrow = jax.jit(lambda v: te_flax.fp8_params(model.linen, v, x))(te_nnx.to_linen(model))
        grads = jax.jit(lambda state: te_nnx.value_and_grad(lambda m: jnp.sum(m(x)[0] ** 2), wrt=wrt)(state))
        want = grads(model)
        assert_equal(grads(te_nnx.from_linen(narrow, model)), want)
    assert isinstance(model.wi_kernel.get_value(), QuantizedKernel)
