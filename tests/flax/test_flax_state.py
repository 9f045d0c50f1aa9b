"""The collection `fp8_metas` of the Flax modules: names, the law, missing state, sharing, lifting."""

import gc
import re
import warnings
import weakref
from functools import partial

import flax
import flax_reference as ref
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import fp8_sum_error
from flax import linen as nn
from flax_reference import data
from quick_init import quick_init

import te_jax as te
import te_jax.flax as te_flax
from te_jax import recipe
from te_jax.flax import _state

KEY = jax.random.key(0)
L = 4
RECIPE = recipe.DelayedScaling(amax_history_len=L)


@pytest.fixture
def fp8():
    with te.autocast(True, RECIPE):
        yield


def start(module, *args, **kwargs):
    """(params, fp8_metas) of a module initialised in the context."""
    variables = jax.jit(lambda *args: module.init(KEY, *args, **kwargs))(*args)
    others, params = flax.core.pop(variables, "params")
    return params, others["fp8_metas"]


def step(module, params, metas, *args, loss=jnp.sum, jit=True, **kwargs):
    """(gradient of params, new fp8_metas)."""

    def objective(params, metas):
        y = module.apply({"params": params, "fp8_metas": metas}, *args, **kwargs)
        return loss(y[0] if isinstance(y, tuple) else y)

    run = jax.grad(objective, argnums=(0, 1))
    return (jax.jit(run) if jit else run)(params, metas)


def leaves_of(tensors):
    return {f"{t}_{leaf}": shape for t in tensors for leaf, shape in (("scale", (1,)), ("amax_history", (L,)))}


def test_names_and_values(fp8):
    _, metas = start(te_flax.DenseGeneral(8), data(4, 16))
    assert ref.shapes(metas) == leaves_of(("x", "kernel", "grad"))
    assert all(type(leaf).__name__ == "ArrayImpl" and leaf.dtype == jnp.float32 for leaf in jax.tree.leaves(metas))
    assert all((leaf == (1 if name.endswith("scale") else 0)).all() for name, leaf in metas.items())
    _, metas = start(te_flax.LayerNormDenseGeneral(8), data(4, 16))
    assert ref.shapes(metas) == leaves_of(("x", "kernel", "grad"))
    _, metas = start(te_flax.LayerNormMLP(8), data(4, 16))
    assert ref.shapes(metas) == leaves_of(f"{t}_{i}" for i in (0, 1) for t in ("x", "kernel", "grad"))


def test_outside_of_autocast_there_is_none():
    assert set(jax.eval_shape(te_flax.LayerNormMLP(8).init, KEY, data(4, 16))) == {"params"}
    with te.autocast(True, RECIPE), te.autocast(False):
        assert set(jax.eval_shape(te_flax.DenseGeneral(8).init, KEY, data(4, 16))) == {"params"}


def test_vectors(fp8):
    """Two steps by hand: L = 4, amax of x 2.890625, dy = 1."""
    x = data(8, 16).at[3, 5].set(-2.890625).clip(-2.890625, 2.890625)
    module = te_flax.DenseGeneral(8)
    params, metas = start(module, x)
    _, metas = step(module, params, metas, x)
    np.testing.assert_allclose(metas["x_scale"], 154.9838, rtol=1e-6)
    np.testing.assert_array_equal(metas["x_amax_history"], [0, 0, 0, 2.890625])
    np.testing.assert_array_equal(metas["grad_scale"], 57344)
    np.testing.assert_array_equal(metas["grad_amax_history"], [0, 0, 0, 1])
    amax = float(jnp.abs(ref.unboxed(params)["kernel"]).max())
    np.testing.assert_allclose(metas["kernel_amax_history"], [0, 0, 0, amax])
    np.testing.assert_allclose(metas["kernel_scale"], 448 / amax, rtol=1e-6)
    _, metas = step(module, params, metas, x)
    np.testing.assert_array_equal(metas["x_amax_history"], [0, 0, 2.890625, 2.890625])
    np.testing.assert_allclose(metas["x_scale"], 154.9838, rtol=1e-6)


def test_the_slots_of_the_mlp(fp8):
    """grad_0 is the gradient of wi's output, grad_1 that of the layer's output."""
    x = data(8, 16)
    module = te_flax.LayerNormMLP(8)
    params, metas = start(module, x)
    _, metas = step(module, params, metas, x, loss=lambda y: 5 * y.sum())
    assert float(metas["grad_1_amax_history"][-1]) == 5
    wi, wo = (ref.unboxed(params)[name] for name in ("wi_kernel", "wo_kernel"))
    assert float(metas["kernel_0_amax_history"][-1]) == float(jnp.abs(wi).max())
    assert float(metas["kernel_1_amax_history"][-1]) == float(jnp.abs(wo).max())
    normed = ref.norm(ref.f64(x), ref.f64(params))
    np.testing.assert_allclose(metas["x_0_amax_history"][-1], np.abs(normed).max(), rtol=1e-5)
    assert 0 < float(metas["grad_0_amax_history"][-1]) != 5


def test_forward_alone_changes_nothing(fp8):
    x = data(8, 16)
    module = te_flax.DenseGeneral(8)
    variables = quick_init(module.init)(KEY, x)
    _, changed = module.apply(variables, x, mutable=["fp8_metas"])
    jax.tree.map(np.testing.assert_array_equal, changed["fp8_metas"], variables["fp8_metas"])


# -- missing and unfitting state -----------------------------------------------------------------------------


def test_missing_state_starts_fresh_with_a_note():
    x = data(8, 16)
    module = te_flax.LayerNormMLP(8)
    bare = quick_init(module.init)(KEY, x)
    with te.autocast(True, RECIPE):
        full = quick_init(module.init)(KEY, x)
        with pytest.warns(
            UserWarning, match=r"LayerNormMLP: fp8_metas lacks x_0_scale.*mutable=\['fp8_metas'\]"
        ) as notes:
            got = module.apply(bare, x)[0]
        assert [note.filename for note in notes] == [__file__], "one note per pass, at the line that made it"
        np.testing.assert_array_equal(got, module.apply(full, x)[0])
        with pytest.warns(UserWarning, match="restored as fresh state"):
            _, state = module.apply(bare, x, mutable=["fp8_metas"])
        jax.tree.map(np.testing.assert_array_equal, state["fp8_metas"], full["fp8_metas"])
        partial = {**full, "fp8_metas": {k: v for k, v in full["fp8_metas"].items() if k != "grad_1_scale"}}
        with pytest.warns(UserWarning, match="lacks grad_1_scale"):
            np.testing.assert_array_equal(module.apply(partial, x)[0], got)
        with warnings.catch_warnings():
            warnings.simplefilter("error", UserWarning)
            module.init(KEY, x)
            module.apply(full, x)
    with warnings.catch_warnings(), te.autocast(False):  # state is carried along unused
        warnings.simplefilter("error", UserWarning)
        module.apply(full, x)


def test_other_history_length_names_the_converter(fp8):
    x = data(8, 16)
    module = te_flax.DenseGeneral(8)
    params, metas = start(module, x)
    _, metas = step(module, params, metas, x)
    longer = recipe.DelayedScaling(amax_history_len=16)
    with te.autocast(True, longer):
        with pytest.raises(ValueError, match=r"DenseGeneral.*x_amax_history.*length 4.*16.*te_jax\.convert_fp8_metas"):
            step(module, params, metas, x)
        converted = te.convert_fp8_metas({"fp8_metas": metas}, longer)["fp8_metas"]
        _, new = step(module, params, converted, x)
    np.testing.assert_allclose(new["x_amax_history"][-2:], jnp.repeat(metas["x_amax_history"][-1:], 2))


def test_unfitting_leaves(fp8):
    x = data(8, 16)
    module = te_flax.DenseGeneral(8)
    params, metas = start(module, x)
    with pytest.raises(TypeError, match="x_scale is bfloat16"):
        step(module, params, metas | {"x_scale": jnp.ones(1, jnp.bfloat16)}, x)
    with pytest.raises(ValueError, match=r"kernel_scale has shape \(3, 1\).*nn.scan"):
        step(module, params, metas | {"kernel_scale": jnp.ones((3, 1))}, x)


# -- a module applied twice ----------------------------------------------------------------------------------


class Tied(nn.Module):
    times: int
    wrap: bool = False

    @nn.compact
    def __call__(self, xs):
        shared = te_flax.DenseGeneral(16, name="shared")
        return sum(shared(xs[i]) * (i + 1) for i in range(self.times))


def assert_law(metas, x_amax, grad_amax):
    np.testing.assert_allclose(metas["x_amax_history"], [0] * (L - 1) + [x_amax], rtol=1e-6)
    np.testing.assert_allclose(metas["x_scale"], [448 / x_amax], rtol=1e-6)
    np.testing.assert_allclose(metas["grad_amax_history"], [0] * (L - 1) + [grad_amax], rtol=1e-6)
    np.testing.assert_allclose(metas["grad_scale"], [57344 / grad_amax], rtol=1e-6)


@pytest.mark.parametrize("times", [1, 2, 3])
@pytest.mark.parametrize("jit", [False, True])
def test_uses_combine_by_max(fp8, times, jit):
    xs = data(times, 8, 16) * jnp.asarray([2.0, 7.0, 3.0])[:times, None, None]
    module = Tied(times)
    params, metas = start(module, xs)
    for _ in range(2):  # a second pass starts from the same state: nothing is left over from the first
        grads, new = step(module, params, metas, xs, jit=jit)
        assert_law(new["shared"], float(jnp.abs(xs).max()), float(times))
    kernel = ref.unboxed(params)["shared"]["kernel"]
    amax = float(jnp.abs(kernel).max())
    np.testing.assert_allclose(new["shared"]["kernel_amax_history"], [0] * (L - 1) + [amax])
    np.testing.assert_allclose(new["shared"]["kernel_scale"], [448 / amax], rtol=1e-6)
    # Parameters' gradients still add up.
    want = sum((i + 1) * ref.quantized(xs[i], 1.0).sum(0)[:, None] * jnp.ones((1, 16)) for i in range(times))
    np.testing.assert_allclose(ref.unboxed(grads)["shared"]["kernel"], want, rtol=1e-5, atol=1e-4)


def test_uses_combine_by_max_where_a_field_is_shared(fp8):
    class Child(nn.Module):
        shared: nn.Module

        @nn.compact
        def __call__(self, x):
            return self.shared(x)

    class Parent(nn.Module):
        def setup(self):
            self.shared = te_flax.DenseGeneral(16)
            self.one, self.two = Child(self.shared), Child(self.shared)

        def __call__(self, xs):
            return self.one(xs[0]) + 2 * self.two(xs[1])

    xs = data(2, 8, 16) * jnp.asarray([9.0, 1.0])[:, None, None]
    params, metas = start(Parent(), xs)
    _, new = step(Parent(), params, metas, xs)
    assert_law(new["shared"], float(jnp.abs(xs).max()), 2.0)


def test_uses_combine_by_max_inside_remat_and_scan(fp8):
    xs = data(3, 2, 8, 16)
    params, metas = start(nn.remat(Tied)(2), xs[0])
    _, new = step(nn.remat(Tied)(2), params, metas, xs[0])
    assert_law(new["shared"], float(jnp.abs(xs[0]).max()), 2.0)

    class Stack(nn.Module):
        @nn.compact
        def __call__(self, xs):
            body = lambda module, carry, x: (carry + module(x), None)
            scan = nn.scan(
                body,
                variable_axes={"params": 0, "fp8_metas": 0},
                split_rngs={"params": True},
                metadata_params={nn.PARTITION_NAME: "layers"},
            )
            return scan(Tied(2, name="tied"), jnp.zeros((8, 16)), xs)[0]

    params, metas = start(Stack(), xs)
    _, new = step(Stack(), params, metas, xs)
    for i in range(3):
        layer = jax.tree.map(lambda leaf: leaf[i], new["tied"]["shared"])  # noqa: B023
        assert_law(layer, float(jnp.abs(xs[i]).max()), 2.0)


def test_two_recipes_in_one_pass_are_refused(fp8):
    class Model(nn.Module):
        @nn.compact
        def __call__(self, x):
            shared = te_flax.DenseGeneral(16)
            y = shared(x)
            with te.autocast(True, recipe.DelayedScaling(amax_history_len=L, margin=1)):
                return shared(y)

    with pytest.raises(ValueError, match="applied twice in one pass"):
        Model().init(KEY, data(8, 16))


def test_nothing_is_kept_between_passes(fp8):
    xs = data(2, 8, 16)
    module = Tied(2)
    params, metas = start(module, xs)
    refs = []

    def interceptor(call, args, kwargs, context):
        refs.append(weakref.ref(context.module))
        return call(*args, **kwargs)

    gc.collect()
    gc.freeze()  # each look for a leak walks through all objects, of which the earlier tests made none that count
    with jax.checking_leaks(), nn.intercept_methods(interceptor):
        step(module, params, metas, xs)
    gc.collect()
    assert refs and not any(ref() for ref in refs), "a bound module outlives its pass"
    assert _state._LEFT not in vars(module)


# -- lifted transforms ---------------------------------------------------------------------------------------


class Block(nn.Module):
    @nn.compact
    def __call__(self, x, _=None):
        y, _ = te_flax.LayerNormMLP(24, activations=("silu", "linear"), name="mlp")(x)
        return x + y, None


def stack(n, block=Block):
    class Model(nn.Module):
        @nn.compact
        def __call__(self, x):
            layers = nn.scan(
                block,
                variable_axes={"params": 0, "fp8_metas": 0},
                split_rngs={"params": True},
                length=n,
                metadata_params={nn.PARTITION_NAME: "layers"},
            )
            return layers(name="layers")(x, None)[0]

    return Model()


class Unrolled(nn.Module):
    n: int

    @nn.compact
    def __call__(self, x):
        for i in range(self.n):
            x, _ = Block(name=f"layer_{i}")(x)
        return x


@pytest.mark.parametrize("block", [Block, nn.remat(Block, prevent_cse=False)])
def test_scan_equals_unrolled_layers(fp8, block):
    x = data(8, 16)
    module = stack(2, block)
    params, metas = start(module, x)
    assert metas["layers"]["mlp"]["x_0_scale"].shape == (2, 1)
    assert metas["layers"]["mlp"]["x_1_amax_history"].shape == (2, L)
    assert params["layers"]["mlp"]["wi_kernel"].names == ("layers", "embed", "act", "mlp")
    layer = lambda tree, i: jax.tree.map(lambda leaf: leaf[i], ref.unboxed(tree)["layers"])
    flat_params, flat_metas = ({f"layer_{i}": layer(tree, i) for i in range(2)} for tree in (params, metas))
    grads, metas = step(module, params, metas, x)
    flat_grads, flat_metas = step(Unrolled(2), flat_params, flat_metas, x)
    for i in range(2):
        compare = lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)
        jax.tree.map(compare, layer(grads, i), ref.unboxed(flat_grads)[f"layer_{i}"])
        jax.tree.map(compare, layer(metas, i), flat_metas[f"layer_{i}"])


def test_vmap_with_own_and_with_shared_state(fp8):
    xs = data(3, 8, 16) * jnp.asarray([1.0, 5.0, 2.0])[:, None, None]

    def lift(axis):
        return nn.vmap(
            te_flax.DenseGeneral,
            variable_axes={"params": axis, "fp8_metas": axis},
            in_axes=0,
            split_rngs={"params": axis == 0},
            metadata_params={nn.PARTITION_NAME: "experts"},
        )(8)

    params, metas = start(lift(0), xs)
    assert metas["x_scale"].shape == (3, 1)
    _, new = step(lift(0), params, metas, xs)
    np.testing.assert_allclose(new["x_amax_history"][:, -1], jnp.abs(xs).max((1, 2)))
    params, metas = start(lift(None), xs)
    _, new = step(lift(None), params, metas, xs)
    assert_law(new, float(jnp.abs(xs).max()), 1.0)


def test_remat_changes_nothing(fp8):
    x = data(8, 16)
    params, metas = start(Block(), x)
    plain = step(Block(), params, metas, x)
    policy = jax.checkpoint_policies.save_only_these_names("ffn1")
    rematted = step(nn.remat(Block, policy=policy)(), params, metas, x)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), plain, rematted)


def test_quantization_checkpoint_name(fp8):
    x = data(8, 16)
    module = te_flax.LayerNormMLP(24, quantization_checkpoint_name="quantized")
    params, metas = start(module, x)
    text = str(jax.make_jaxpr(lambda p, m: step(module, p, m, x))(params, metas))
    assert len(re.findall(r"f8_e4m3fn\[[\d,]*\] = name\[name=quantized\]", text)) == 4  # x and kernel of two GEMMs


def test_autocast_is_part_of_the_jit_cache_key():
    x = data(8, 16)
    module = te_flax.DenseGeneral(8, use_bias=False)
    with te.autocast(True, RECIPE):
        variables = quick_init(module.init)(KEY, x)
    f = jax.jit(module.apply)
    plain = f(variables, x)
    with te.autocast(True, RECIPE):
        coarse = f(variables, x)
    np.testing.assert_allclose(plain, x @ ref.unboxed(variables)["params"]["kernel"], rtol=1e-5, atol=1e-5)
    assert 1e-3 < ref.relative_error(coarse, plain) < 0.1


# -- numbers -------------------------------------------------------------------------------------------------


def scaled(metas, **scales):
    return metas | {f"{name}_scale": jnp.full((1,), scale, jnp.float32) for name, scale in scales.items()}


def test_dense_equals_emulation(fp8):
    x, weights = data(6, 33), data(6, 20, seed=3)
    module = te_flax.DenseGeneral(20, use_bias=False)
    params, metas = start(module, x)
    metas = scaled(metas, x=100.0, kernel=300.0, grad=1000.0)
    scales = jnp.asarray([100.0, 300.0, 1000.0])
    kernel = ref.unboxed(params)["kernel"]
    variables = {"params": params, "fp8_metas": metas}
    close = partial(np.testing.assert_allclose, rtol=fp8_sum_error(), atol=fp8_sum_error())
    close(module.apply(variables, x), ref.fp8_dense(x, kernel, scales))
    grads, _ = step(module, params, metas, x, loss=lambda y: (y * weights).sum())
    want = jax.grad(lambda k: (ref.fp8_dense(x, k, scales) * weights).sum())(kernel)
    close(ref.unboxed(grads)["kernel"], want)


def test_mlp_equals_emulation(fp8):
    x, weights = data(16, 32), data(16, 32, seed=3)
    module = te_flax.LayerNormMLP(48, layernorm_type="rmsnorm")
    params, metas = start(module, x)
    scales = dict(x_0=100.0, kernel_0=500.0, grad_0=3e4, x_1=80.0, kernel_1=400.0, grad_1=1e4)
    metas = scaled(metas, **scales)

    def emulated(p, x):
        normed = x * jax.lax.rsqrt(jnp.mean(x**2, -1, keepdims=True) + 1e-6) * p["scale"]
        at = lambda i: jnp.asarray([scales[f"{t}_{i}"] for t in ("x", "kernel", "grad")])
        z = jax.nn.gelu(ref.fp8_dense(normed, p["wi_kernel"][:, 0], at(0)), approximate=True)
        return ref.fp8_dense(z, p["wo_kernel"], at(1))

    p = ref.unboxed(params)
    # A value at the edge between two FP8 numbers may round either way; an e5m2 step is 1/4 of it, so a
    # handful of them in 16 x 48 gives 1/4 / sqrt(768) = 0.9 % at the most.
    got = jax.jit(module.apply)({"params": params, "fp8_metas": metas}, x)[0]
    assert ref.relative_error(got, jax.jit(emulated)(p, x)) < 1e-2
    grads, _ = step(module, params, metas, x, loss=lambda y: (y * weights).sum())
    want = jax.jit(jax.grad(lambda p: (emulated(p, x) * weights).sum()))(p)
    for name, leaf in ref.unboxed(grads).items():
        assert ref.relative_error(leaf, want[name]) < 1e-2, name


def test_layernorm_output_is_not_quantized(fp8):
    x = data(16, 32)
    module = te_flax.LayerNormDenseGeneral(8, return_layernorm_output=True)
    params, metas = start(module, x)
    _, normed = module.apply({"params": params, "fp8_metas": metas}, x)
    np.testing.assert_allclose(normed, ref.norm(ref.f64(x), ref.f64(params)), rtol=1e-5, atol=1e-5)


def test_lora_sees_the_norms_output(fp8):
    x = data(16, 32) * 50
    module = te_flax.LayerNormDenseGeneral(8, enable_low_rank_adaptation=True, low_rank_adaptation_dim=4)
    params, metas = start(module, x)
    p = ref.f64(ref.filled(params))
    zero_kernel = ref.filled(params) | {"kernel": jnp.zeros((32, 8))}
    got = module.apply({"params": zero_kernel, "fp8_metas": metas}, x)[0]
    want = ref.norm(ref.f64(x), p) @ p["lora_a_kernel"] @ p["lora_b_kernel"]
    np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-4)
