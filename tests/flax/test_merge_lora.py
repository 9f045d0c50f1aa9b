"""merge_lora: a model without adapters computes with the merged parameters what the adapted one does."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from flax import nnx
from flax_reference import data

import te_jax.flax as te_flax
import te_jax.nnx as te_nnx
from te_jax.recipe import Float8CurrentScaling

LORA = dict(enable_low_rank_adaptation=True, low_rank_adaptation_dim=4, low_rank_adaptation_alpha=6.0)


def filled(tree):
    """The same tree of random numbers: B starts at 0."""
    return jax.tree.map(lambda a: 0.3 * data(*a.shape), tree)


def close(got, want):
    """Products of at most 32 terms of about 1, added up in another order: 32 roundings of f32 and of their factors."""
    np.testing.assert_allclose(got, want, atol=2.0**-17 * float(np.abs(want).max()))


@pytest.mark.parametrize(
    ("module", "fields"),
    [
        (te_flax.DenseGeneral, dict(features=(3, 16), axis=(-2, -1))),  # several axes on either side
        (te_flax.LayerNormMLP, dict(intermediate_dim=16, activations=("silu", "linear"))),  # two kernels, one in parts
    ],
)
@pytest.mark.parametrize("layers", [None, 5])
def test_the_merged_model_computes_the_same(module, fields, layers):
    x, adapted, plain = data(2, 2, 16), module(**fields, **LORA), module(**fields)
    shapes = nn.meta.unbox(jax.eval_shape(adapted.init, jax.random.key(0), x)["params"])
    lead = () if layers is None else (layers,)
    params = filled(jax.tree.map(lambda a: jax.ShapeDtypeStruct((*lead, *a.shape), a.dtype), shapes))
    merged = te_flax.merge_lora(params, alpha=6.0)
    assert set(merged) == {name for name in params if "lora" not in name}

    @jax.jit
    def both(params, merged):
        each = lambda model, tree: model.apply({"params": tree}, x)
        run = lambda params, merged: (each(adapted, params), each(plain, merged))
        return run(params, merged) if layers is None else jax.vmap(run)(params, merged)

    with jax.default_matmul_precision("highest"):
        want, got = (y[0] if isinstance(y, tuple) else y for y in both(params, merged))
    close(got, want)


def test_in_nnx():
    adapted = te_nnx.DenseGeneral(16, 8, **LORA, rngs=nnx.Rngs(0))
    plain, x = te_nnx.DenseGeneral(16, 8, rngs=nnx.Rngs(1)), data(2, 16)
    adapted = te_nnx.from_linen(filled(te_nnx.to_linen(adapted)), adapted)
    plain = te_nnx.from_linen({"params": te_flax.merge_lora(te_nnx.to_linen(adapted)["params"], alpha=6.0)}, plain)
    with jax.default_matmul_precision("highest"):
        close(plain(x), adapted(x))


def test_types_and_boxes_stay():
    box = lambda a: nn.LogicallyPartitioned(a, ("in", "out"))
    a, b = data(4, 2), data(2, 3)
    params = {"layer": {"kernel": box(jnp.ones((4, 3), jnp.bfloat16)), "lora_a_kernel": box(a), "lora_b_kernel": b}}
    merged = te_flax.merge_lora(params)["layer"]["kernel"]
    assert merged.names == ("in", "out") and merged.value.dtype == jnp.bfloat16
    # One rounding to bf16's 8 bits.
    np.testing.assert_allclose(np.float32(merged.value), 1 + np.asarray(a) @ np.asarray(b), rtol=2.0**-8, atol=2.0**-16)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (dict(lora_a_kernel=None, lora_b_kernel=None), "no parameter is of low-rank adaptation; set enable_low_rank"),
        (dict(lora_b_kernel=None), "layer/lora_a_kernel has no lora_b_kernel or no kernel next to it; pass all params"),
        (dict(kernel=None), "layer/lora_a_kernel has no lora_b_kernel or no kernel next to it; pass all params"),
        (dict(lora_b_kernel=(2, 4)), r"kernel is \(4, 3\), with adapters \(4, 2\) and \(2, 4\), which are not of"),
        (
            dict(kernel=(4, 4, 3), lora_a_kernel=(4, 4, 2), lora_b_kernel=(4, 2, 3)),
            "they do not tell which axis is of layers. Merge each layer's params apart",
        ),
    ],
)
def test_what_is_refused(changes, message):
    shapes = dict(kernel=(4, 3), lora_a_kernel=(4, 2), lora_b_kernel=(2, 3)) | changes
    with pytest.raises(ValueError, match=message):
        te_flax.merge_lora({"layer": {name: np.ones(shape) for name, shape in shapes.items() if shape}})


def test_kernels_in_fp8_are_refused():
    from te_jax.layers import quantize_kernel

    kernel = quantize_kernel(jnp.ones((32, 16)), recipe=Float8CurrentScaling())
    with pytest.raises(ValueError, match="te_jax.flax.merge_lora: kernel is in FP8, which would be rounded twice"):
        te_flax.merge_lora({"kernel": kernel, "lora_a_kernel": data(32, 2), "lora_b_kernel": data(2, 16)})
    with pytest.raises(TypeError, match="alpha is '6'"):
        te_flax.merge_lora({"kernel": kernel}, alpha="6")
