"""What the backward pass of a layer holds at once."""

import contextlib

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AxisType

import te_jax as te
from benchmarks import experts, layers
from benchmarks import moe as moe_cases
from te_jax.layers import MoEOptions, layernorm_mlp, moe
from te_jax.ops.router import RouterOptions
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
    With one that gradient is a sum over devices, which shall cross next to what follows."""
    devices = jax.devices("cpu")
    mesh = lambda kind, count: jax.make_mesh((count,), ("a",), axis_types=(kind,), devices=devices[:count])
    both = "tensor<64x32xbf16>, tensor<32x16xbf16>"  # of da and dwo
    waits = lambda text: sum("optimization_barrier" in line and both in line for line in text.splitlines())
    assert waits(mlp_program(platform)) == waits(mlp_program(platform, mesh(AxisType.Auto, 1))) == 1
    assert waits(mlp_program(platform, mesh(AxisType.Auto, 2))) == 0


def moe_program(platform: str, on_mesh: bool) -> str:
    """Of a buffer of 384 rows for 2 experts, in bf16: x [24, 16], z [384, 2, 128], wo [2, 128, 16]."""
    shapes = (24, 16), (16, 2), (2, 16, 128), (2, 16, 128), (2, 128, 16)
    operands = [jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in shapes]

    def loss(x, gate, wi_0, wi_1, wo):
        options = MoEOptions(RouterOptions(1))
        y = moe(x, gate, (wi_0, wi_1), wo, options=options, recipe=Float8CurrentScaling(), residual=True)[0]
        return jnp.sum(y.astype(jnp.float32) ** 2)

    mesh = jax.make_mesh((2,), ("a",), axis_types=(AxisType.Auto,), devices=jax.devices("cpu")[:2])
    with jax.set_mesh(mesh) if on_mesh else contextlib.nullcontext():
        traced = jax.jit(jax.grad(loss, argnums=(0, 1, 2, 3, 4))).trace(*operands)
        return traced.lower(lowering_platforms=(platform,)).as_text()


@pytest.mark.parametrize("platform", ["cpu", "cuda"])
def test_experts_begin_nothing_early(platform):
    """The second weights wait for the activation's input, the gradient of y for the output of the last product, and
    that of the activation's output for the gradient of the second weights."""
    bf16 = lambda *shape: f"tensor<{'x'.join(map(str, shape))}xbf16>"
    z, wo, dy, rows, da = bf16(384, 2, 128), bf16(2, 128, 16), bf16(24, 16), bf16(384, 16), bf16(384, 128)
    text = moe_program(platform, on_mesh=False)
    barriers = [line for line in text.splitlines() if "optimization_barrier" in line]
    for waiting in ((z, wo), (dy, z, rows), (da, wo)):
        assert sum(", ".join(waiting) in line for line in barriers) == 1, waiting
    assert "optimization_barrier" not in moe_program(platform, on_mesh=True)


# Mixtral's step in bf16 has taken 6.90 GB since the derivative of a gated activation is one product, and 7.26 before.
# In FP8 it takes 7.62 GB, as before. gpt-oss' step takes 4.22 and 4.48 GB.
MISSED = {"Mixtral 8x7B 8192 tokens, balanced": 1.104, "gpt-oss-20b 8192 tokens, balanced": 1.061}


def _missed(label):
    return pytest.mark.xfail(strict=True, reason=f"{MISSED[label]} times that in bf16")


MODELS = [
    pytest.param(m, id=m.label, marks=[_missed(m.label)] if m.label in MISSED else [])
    for m in experts.models(tiny=False)
    if not m.skewed
]


@pytest.mark.gpu
@pytest.mark.parametrize("model", MODELS)
def test_experts_take_little_more_than_in_bf16(model):
    """A peak of 1.05 times that in bf16 at most, by XLA's analysis of the program. Nothing runs."""
    bf16 = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.bfloat16)
    e, h, f, options = model.experts, model.hidden, model.ffn, MoEOptions(RouterOptions(model.topk))
    params = bf16(h), bf16(h, e), (bf16(e, h, f), bf16(e, h, f)), bf16(e, f, h)
    x = bf16(model.tokens, h)

    def peak(recipe, metas):
        def layer(params, metas, x):
            gamma, *weights = params
            of = dict(gamma=gamma, norm="rmsnorm", residual=True, options=options)
            return moe(x, *weights, recipe=recipe, metas=metas, **of)[0]

        def step(params, metas, x, dy):
            y, vjp = jax.vjp(layer, params, metas, x)
            return y, vjp(dy)

        found = jax.jit(step).lower(params, metas, x, x).compile().memory_analysis()
        return found.argument_size_in_bytes + found.output_size_in_bytes + found.temp_size_in_bytes

    assert peak(DelayedScaling(), moe_cases.fresh_metas(model)) <= 1.05 * peak(None, None)


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
