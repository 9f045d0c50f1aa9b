"""LayerNorm, DenseGeneral, LayerNormDenseGeneral: numbers from raw parameters, trees, keys, errors."""

import flax
import flax_reference as ref
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from flax_reference import data
from jax.test_util import check_grads
from quick_init import quick_init

import te_jax as te
import te_jax.flax as te_flax

KEY = jax.random.key(0)
CLOSE = dict(rtol=2e-5, atol=2e-5)  # float32 sums of at most 100 terms of order 1


def make(module, *args):
    params = module.init(KEY, *args)["params"]
    return params, ref.filled(params)


@pytest.mark.parametrize("zero_centered", [False, True])
@pytest.mark.parametrize("kind", ["layernorm", "RMS-Norm", "rms_norm"])
def test_layernorm(kind, zero_centered):
    x = data(3, 5, 33) * 3 + 1
    module = te_flax.LayerNorm(layernorm_type=kind, zero_centered_gamma=zero_centered, epsilon=1e-3)
    fresh, params = make(module, x)
    names = ["scale", "ln_bias"] if kind == "layernorm" else ["scale"]
    assert list(fresh) == names and ref.shapes(fresh) == dict.fromkeys(names, (33,))
    assert fresh["scale"].names == ("embed",)
    assert float(ref.unboxed(fresh)["scale"][0]) == (0 if zero_centered else 1)
    kind = "layernorm" if kind == "layernorm" else "rmsnorm"
    want = ref.norm(ref.f64(x), ref.f64(params), kind, 1e-3, zero_centered)
    np.testing.assert_allclose(module.apply({"params": params}, x), want, **CLOSE)


def test_layernorm_equals_flax():
    x = data(4, 7, 24)
    module = te_flax.LayerNorm()
    _, params = make(module, x)
    raw = ref.unboxed(params)
    same = {"params": {"scale": raw["scale"], "bias": raw["ln_bias"]}}
    np.testing.assert_allclose(module.apply({"params": params}, x), nn.LayerNorm().apply(same, x), **CLOSE)


@pytest.mark.parametrize(
    ("features", "axis", "shape", "use_bias"),
    [
        (8, -1, (3, 5, 12), True),
        ((2, 8), -1, (4, 12), False),
        (6, (-2, -1), (3, 4, 5), True),
        ((3, 2), (1, 2), (2, 4, 5), True),
    ],
)
def test_dense_general(features, axis, shape, use_bias):
    x = data(*shape)
    module = te_flax.DenseGeneral(features=features, axis=axis, use_bias=use_bias)
    fresh, params = make(module, x)
    contracted = len(axis) if isinstance(axis, tuple) else 1
    widths = features if isinstance(features, tuple) else (features,)
    want_shapes = {"kernel": (*shape[len(shape) - contracted :], *widths)} | ({"bias": widths} if use_bias else {})
    assert list(fresh) == list(want_shapes) and ref.shapes(fresh) == want_shapes
    p = ref.f64(params)
    want = np.tensordot(ref.f64(x), p["kernel"], contracted) + p.get("bias", 0)
    got = module.apply({"params": params}, x)
    np.testing.assert_allclose(got, want, **CLOSE)
    assert module.apply({"params": params}, x.astype(jnp.bfloat16)).dtype == jnp.bfloat16


def test_dense_general_bf16_rounds_once():
    x = data(5, 64, dtype=jnp.bfloat16)
    module = te_flax.DenseGeneral(16, use_bias=False, dtype=jnp.bfloat16)
    _, params = make(module, x)
    assert ref.unboxed(params)["kernel"].dtype == jnp.bfloat16
    want = ref.f64(x) @ ref.f64(params)["kernel"]
    np.testing.assert_allclose(ref.f64(module.apply({"params": params}, x)), want, rtol=2**-8, atol=1e-4)


def test_default_init_takes_the_contracted_axes_as_fan_in():
    x = data(2, 256)
    kernel = ref.unboxed(te_flax.DenseGeneral((3, 64)).init(KEY, x)["params"]["kernel"])
    assert abs(float(kernel.std()) * 16 - 1) < 0.02  # 49152 draws: the std of the std is 0.3 %
    pair = ref.unboxed(te_flax.DenseGeneral(96, axis=(-2, -1)).init(KEY, data(2, 8, 32))["params"]["kernel"])
    assert abs(float(pair.std()) * 16 - 1) < 0.02
    plain = nn.initializers.variance_scaling(1.0, "fan_in", "truncated_normal")
    ours = te_flax.DenseGeneral(8).init(KEY, data(2, 16))["params"]["kernel"].value
    flax_dense = nn.Dense(8, kernel_init=plain).init(KEY, data(2, 16))["params"]["kernel"]
    np.testing.assert_array_equal(ours, flax_dense)


@pytest.mark.parametrize("alpha", [None, 3.0])
def test_dense_general_lora(alpha):
    x = data(4, 6, 12)
    module = te_flax.DenseGeneral(
        (3, 8), enable_low_rank_adaptation=True, low_rank_adaptation_dim=5, low_rank_adaptation_alpha=alpha
    )
    fresh, params = make(module, x)
    assert list(fresh) == ["kernel", "bias", "lora_a_kernel", "lora_b_kernel"]
    assert ref.shapes(fresh)["lora_a_kernel"] == (12, 3, 5) and ref.shapes(fresh)["lora_b_kernel"] == (
        3,
        5,
        8,
    )
    assert fresh["lora_a_kernel"].names == (None, None, None)
    assert not ref.unboxed(fresh)["lora_b_kernel"].any() and ref.unboxed(fresh)["lora_a_kernel"].any()
    want = ref.dense(ref.f64(x), ref.f64(params), alpha)
    np.testing.assert_allclose(module.apply({"params": params}, x), want, **CLOSE)


@pytest.mark.parametrize("enable_layernorm", [True, False])
@pytest.mark.parametrize("want_norm", [True, False])
@pytest.mark.parametrize("lora", [True, False])
def test_layernorm_dense_general(enable_layernorm, want_norm, lora):
    x = data(3, 4, 16) * 5
    module = te_flax.LayerNormDenseGeneral(
        features=(2, 8),
        enable_layernorm=enable_layernorm,
        use_bias=True,
        return_layernorm_output=want_norm,
        enable_low_rank_adaptation=lora,
        low_rank_adaptation_dim=3,
        depth_scaling=2.5,
        kernel_axes=("embed", "joined", "mlp"),
        bias_axes=("joined", "mlp"),
    )
    fresh, params = make(module, x)
    want_shapes = {"scale": (16,), "ln_bias": (16,)} if enable_layernorm else {}
    want_shapes |= {"kernel": (16, 2, 8)}
    want_shapes |= {"lora_a_kernel": (16, 2, 3), "lora_b_kernel": (2, 3, 8)} if lora else {}
    want_shapes |= {"bias": (2, 8)}
    assert list(fresh) == list(want_shapes) and ref.shapes(fresh) == want_shapes
    assert fresh["kernel"].names == ("embed", "joined", "mlp")
    p = ref.f64(params)
    normed = ref.norm(ref.f64(x), p)
    y, ln_out = module.apply({"params": params}, x)
    np.testing.assert_allclose(y, ref.dense(normed, p) / 2.5, rtol=2e-5, atol=1e-4)
    if want_norm:
        np.testing.assert_allclose(ln_out, normed, **CLOSE)
    else:
        assert ln_out is None


def test_gradients_equal_finite_differences():
    x = data(3, 8)
    module = te_flax.LayerNormDenseGeneral(features=6, use_bias=True, layernorm_type="rmsnorm")
    _, params = make(module, x)
    weights = data(3, 6, seed=4)

    def loss(params, x):
        return (module.apply({"params": params}, x)[0] * weights).sum()

    check_grads(loss, (params, x), order=1, modes=["rev"], rtol=2e-2, eps=1e-2)


def test_fields_in_declaration_order():
    order = {
        te_flax.DenseGeneral: "features kernel_init kernel_axes use_bias bias_init bias_axes "
        "enable_low_rank_adaptation low_rank_adaptation_dim low_rank_adaptation_alpha axis dtype input_axes "
        "transpose_batch_sequence quantization_checkpoint_name",
        te_flax.LayerNorm: "epsilon layernorm_type zero_centered_gamma scale_init scale_axes bias_init bias_axes dtype",
        te_flax.LayerNormDenseGeneral: "features enable_layernorm layernorm_type epsilon zero_centered_gamma "
        "scale_init scale_axes ln_bias_init ln_bias_axes kernel_init kernel_axes use_bias bias_init "
        "bias_axes return_layernorm_output enable_low_rank_adaptation low_rank_adaptation_dim "
        "low_rank_adaptation_alpha axis dtype layernorm_input_axes dot_input_axes depth_scaling "
        "transpose_batch_sequence quantization_checkpoint_name",
    }
    for module, names in order.items():
        names = names.split()
        assert list(module.__dataclass_fields__)[: len(names)] == names


@pytest.mark.parametrize(
    ("module", "x", "error", "text"),
    [
        (te_flax.DenseGeneral(4, axis=0), jnp.ones((3, 4)), ValueError, "axis is 0 .* trailing"),
        (te_flax.DenseGeneral(4, axis=(-1, -2)), jnp.ones((3, 4)), ValueError, "trailing"),
        (te_flax.DenseGeneral(4, axis=-3), jnp.ones((3, 4)), ValueError, "trailing"),
        (te_flax.DenseGeneral(0), jnp.ones((3, 4)), ValueError, "features is .0,."),
        (te_flax.DenseGeneral(4), jnp.ones((3, 4), jnp.int32), TypeError, "inputs is int32"),
        (
            te_flax.DenseGeneral(4, enable_low_rank_adaptation=True, low_rank_adaptation_dim=0),
            jnp.ones((3, 4)),
            ValueError,
            "low_rank_adaptation_dim is 0",
        ),
        (te_flax.LayerNormDenseGeneral(4, axis=(-2, -1)), jnp.ones((3, 4)), ValueError, "only the last axis"),
        (te_flax.LayerNorm(layernorm_type="batchnorm"), jnp.ones((3, 4)), ValueError, "'batchnorm'"),
        (te_flax.LayerNormDenseGeneral(4), jnp.ones((3, 4), bool), TypeError, "inputs is bool"),
        (te_flax.LayerNorm(), jnp.ones((3, 4), jnp.int8), TypeError, "x is int8"),
    ],
)  # fmt: skip
def test_errors(module, x, error, text):
    with pytest.raises(error, match=text):
        module.init(KEY, x)


def test_errors_name_the_path():
    class Model(nn.Module):
        @nn.compact
        def __call__(self, x):
            return te_flax.DenseGeneral(4, axis=0, name="first")(x)

    with pytest.raises(ValueError, match="DenseGeneral `first`"):
        Model().init(KEY, jnp.ones((3, 4)))
    params = quick_init(te_flax.DenseGeneral(4).init)(KEY, jnp.ones((3, 4)))
    with pytest.raises((ValueError, flax.errors.ScopeParamShapeError), match="kernel"):
        te_flax.DenseGeneral(4).apply(params, jnp.ones((3, 5)))


@pytest.mark.parametrize("fp8", [False, True])
def test_other_width_than_initialised(fp8):
    """Not Flax's ScopeParamShapeError, which is no ValueError and names no module."""
    module = te_flax.DenseGeneral(8)
    with te.autocast(fp8):
        variables = quick_init(module.init)(KEY, jnp.ones((4, 32)))
        with pytest.raises(ValueError, match=r"DenseGeneral: parameter kernel has shape \(32, 8\).*need \(12, 8\)"):
            module.apply(variables, jnp.ones((4, 12)))


@pytest.mark.parametrize("recipe", [te.recipe.DelayedScaling(), te.recipe.Float8CurrentScaling()], ids=type)
def test_a_single_vector_is_a_batch_of_one(recipe):
    """As `jax.vmap` over examples gives it: its wgrad is an outer product, which contracts no axis of x."""
    x = data(32)
    for module in (te_flax.DenseGeneral(16), te_flax.LayerNormDenseGeneral(16), te_flax.LayerNormMLP(48)):

        @jax.jit
        def step(variables, x, module=module):
            with te.autocast(True, recipe):
                return jax.grad(lambda v: jnp.sum(jnp.square(jax.tree.leaves(module.apply(v, x))[0])))(variables)

        with te.autocast(True, recipe):
            variables = quick_init(module.init)(jax.random.key(0), x)
        jax.tree.map(np.testing.assert_array_equal, step(variables, x), step(variables, x[None]))
