"""What the backward pass of a layer holds at once."""

import contextlib

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AxisType

import te_jax as te
from benchmarks import layers
from te_jax.layers import layernorm_mlp
from te_jax.recipe import DelayedScaling, Float8CurrentScaling


def mlp_program(platform: str, mesh=None) -> str:
    shapes = (64, 16), (16,), (16, 2, 32), (32, 16)
    x, gamma, wi, wo = (jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in shapes)

    def loss(x, gamma, wi, wo):
        names = ("silu", "linear")
        y = layernorm_mlp(
            x, gamma, None, wi, wo, activations=names, norm="rmsnorm", recipe=Float8CurrentScaling(), residual=True
        )
        return jnp.sum(y.astype(jnp.float32) ** 2)

    with contextlib.nullcontext() if mesh is None else jax.set_mesh(mesh):
        traced = jax.jit(jax.grad(loss, argnums=(0, 1, 2, 3))).trace(x, gamma, wi, wo)
        return traced.lower(lowering_platforms=(platform,)).as_text()


@pytest.mark.parametrize("platform", ["cpu", "cuda"])
def test_second_gradient_of_a_kernel_comes_first(platform):
    """Without a mesh the gradient of the activation's input waits for the gradient of wo, which frees its operands.
    With one that gradient is a sum over devices, which shall cross beside what follows."""
    devices = jax.devices("cpu")
    mesh = lambda kind, count: jax.make_mesh((count,), ("a",), axis_types=(kind,), devices=devices[:count])
    both = "tensor<64x32xbf16>, tensor<32x16xbf16>"  # of da and dwo
    waits = lambda text: sum("optimization_barrier" in line and both in line for line in text.splitlines())
    assert waits(mlp_program(platform)) == waits(mlp_program(platform, mesh(AxisType.Auto, 1))) == 1
    assert waits(mlp_program(platform, mesh(AxisType.Auto, 2))) == 0


@pytest.mark.gpu
def test_llama_layer_takes_no_more_than_in_bf16():
    """Arguments, results and temporaries of forward and backward, by XLA's analysis of the program. Nothing runs."""
    model = layers.named("llama layer", tiny=False)
    layer, x = model.te(), jax.ShapeDtypeStruct(model.shape, jnp.bfloat16)

    def peak(recipe):
        with te.autocast(recipe is not None, recipe):
            variables = jax.eval_shape(layer.init, jax.random.key(0), x)
            bf16 = lambda a: jax.ShapeDtypeStruct(a.shape, jnp.bfloat16)
            variables = dict(variables, params=jax.tree.map(bf16, variables["params"]))

            def step(variables, x, dy):
                run = lambda variables, x: layer.apply(variables, x, deterministic=True)
                y, vjp = jax.vjp(run, variables, x)
                return y, vjp(dy)

            of = jax.jit(step).lower(variables, x, x).compile().memory_analysis()
            return of.argument_size_in_bytes + of.output_size_in_bytes + of.temp_size_in_bytes

    peaks = [peak(recipe) for recipe in (None, DelayedScaling(), Float8CurrentScaling())]
    assert max(peaks) == peaks[0], peaks
