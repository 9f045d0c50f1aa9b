"""Laws that layers obey under every recipe without state, and on meshes that cut blocks. Each recipe's numbers against
an emulation of its own: test_recipe_current.py, test_recipe_fixed.py, test_recipe_block.py, test_recipe_mxfp8.py."""

import functools

import block_oracle as oracle
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import sharded
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from layer_cases import close, data, with_gradients
from recipe_cases import losses_of_steps, near, own, results, uneven

from te_jax.layers import dense, layernorm, layernorm_mlp
from te_jax.ops.activation import activation
from te_jax.recipe import FixedScaling, Float8BlockScaling, Float8CurrentScaling, Format, MXFP8BlockScaling
from te_jax.sharding import collectives

BLOCK, CURRENT, MXFP8 = Float8BlockScaling(), Float8CurrentScaling(), MXFP8BlockScaling()
f32, bf16 = jnp.float32, jnp.bfloat16


def short(case):
    """An id of a test; conftest.py asks ids which of block scaling and MXFP8 a GPU must have."""
    blocks = {Float8BlockScaling: "block", MXFP8BlockScaling: "mx"}
    names = {Float8CurrentScaling: "current", FixedScaling: "fixed"} | blocks
    return names.get(case if isinstance(case, type) else type(case))


def over(*recipes):
    return pytest.mark.parametrize("recipe", recipes, ids=short)


@over(FixedScaling(), BLOCK, MXFP8)
def test_a_transformer_layer_trains(recipe):
    """The losses are those of f32 up to what FP8 may do to a step."""
    got, want = losses_of_steps(recipe), losses_of_steps(None)
    assert (np.diff(got) < 0).all() and got[-1] < 0.97 * got[0]
    np.testing.assert_allclose(got, want, rtol=2.0**-5)


OF_DENSE = [(recipe, 130, 140) for recipe in (BLOCK, Float8BlockScaling(True, Format.HYBRID, amax_epsilon=0.5))]
OF_DENSE += [(MXFP8BlockScaling(fp8_format), 33, 40) for fp8_format in (Format.E4M3, Format.HYBRID)]


@pytest.mark.parametrize("recipe,tokens,features", OF_DENSE, ids=["block", "block f32-hybrid", "mx", "mx hybrid"])
@pytest.mark.parametrize("dtype", [f32, bf16], ids=["f32", "bf16"])
def test_dense(recipe, tokens, features, dtype, rng):
    """Two axes are contracted. Against numpy's blocks: sums in another order, then one rounding."""
    x, residual = data(rng, (2, tokens, 2, features), (2, tokens, 2, 20), dtype=dtype)
    w, bias = data(rng, (2, features, 2, 20), (2, 20))
    x = x * jnp.exp2(jnp.arange(features) % 7 * 2.0).astype(dtype)
    layer = lambda *a: dense(*a, contract=2, recipe=recipe)
    y, (dx, dw, dbias, dresidual) = results(layer, x, w * 0.01, bias, residual)
    (dy,) = data(np.random.default_rng(1), y.shape, dtype=dtype)
    operands = [np.asarray(a, np.float32) for a in (x, w * 0.01, dy)]
    added = [np.asarray(a.astype(dtype), np.float64) for a in (bias, residual)]  # bias is rounded to y's type first
    wants, sizes = ([*oracle.dense(*operands, 2, recipe, of)] for of in (np.array, np.abs))
    wants[0], sizes[0] = wants[0] + sum(added), sizes[0] + sum(map(np.abs, added))
    terms, types = (2 * features, 40, 2 * tokens), (dtype, dtype, f32)
    for got, want, size, of_sum, out in zip((y, dx, dw), wants, sizes, terms, types):
        oracle.check_gemm(got, want, size, of_sum, out)
    close(dbias, np.asarray(dy, np.float32).sum((0, 1)))
    np.testing.assert_array_equal(dresidual, dy)


@over(Float8CurrentScaling, Float8BlockScaling, MXFP8BlockScaling)
@pytest.mark.parametrize("override", [(True, False, False), (False, True, False), (False, False, True), (True,) * 3])
def test_override(override, recipe, rng):
    recipe = recipe(override_linear_precision=override)
    x, w, dy = data(rng, (130, 24), (24, 10), (130, 10))
    y, gradients = with_gradients(lambda *a: dense(*a, recipe=recipe), x, w, dy=dy)
    operands = x, w, dy = [np.asarray(a) for a in (x, w, dy)]
    gemms = lambda x, w, dy: (x @ w, dy @ w.T, x.T @ dy)
    if isinstance(recipe, Float8CurrentScaling):
        directions = ("fwd", "fwd", "bwd")
        narrow = gemms(*(np.asarray(own(a, of, recipe)) for a, of in zip(operands, directions)))
    else:
        narrow = oracle.dense(*operands, 1, recipe)
    for got, high, *wants in zip((y, *gradients), override, gemms(*operands), narrow):
        close(got, wants[not high])


@over(BLOCK, MXFP8)
def test_layernorm_mlp_is_its_parts(recipe, rng):
    names = "silu", "linear"
    x, gamma, wi, wo = data(rng, (3, 50, 24), (24,), (24, len(names), 140), (140, 24), dtype=bf16)
    bi, bo = data(rng, (len(names), 140), (24,), dtype=bf16)

    def whole(x, gamma, wi, wo, bi, bo):
        options = dict(norm="rmsnorm", activations=names, residual=True, recipe=recipe)
        return layernorm_mlp(x, gamma, None, wi, wo, bi, bo, **options)

    def parts(x, gamma, wi, wo, bi, bo):
        z = dense(layernorm(x, gamma, norm="rmsnorm"), wi, bi, recipe=recipe)
        return dense(activation(z, names), wo, bo, x, recipe=recipe)

    run = lambda layer: results(layer, x, gamma, wi, wo, bi, bo)
    jax.tree.map(near, run(whole), run(parts))


@over(CURRENT, BLOCK)
def test_vmap_is_a_loop_over_examples(recipe, rng):
    """Each with scales of its own: they differ by powers of 10."""
    x, gamma, wi, wo = data(rng, (3, 4, 16), (16,), (16, 1, 24), (24, 16))
    x = x * jnp.array([1e-3, 1.0, 1e3])[:, None, None]
    mlp = lambda x, *w: layernorm_mlp(x, w[0], None, *w[1:], norm="rmsnorm", residual=True, recipe=recipe)
    step = lambda x, *w: (results(jax.checkpoint(mlp), x, *w), dense(x, w[1][:, 0], recipe=recipe))
    got, y = jax.jit(jax.vmap(step, (0, None, None, None)))(x, gamma, wi, wo)
    alone = jax.jit(step)
    want, alone_y = jax.tree.map(lambda *a: np.stack(a), *(alone(one, gamma, wi, wo) for one in x))
    jax.tree.map(near, got, want)
    for one, other in zip(y, alone_y):
        close(one, other)


# -- meshes --------------------------------------------------------------------------------------------------


CUT = {  # b, s, C, F of x and kernel, and how 4 x 2 devices share them
    "block tokens": (BLOCK, (2, 192, 128, 128), P(None, "tp"), P()),  # 1.5 blocks for each: gathered
    "block features": (BLOCK, (4, 8, 384, 160), P("dp", None, "tp"), P("tp")),
    "block kernel": (BLOCK, (4, 8, 128, 320), P("dp"), P(None, "tp")),
    "block whole": (BLOCK, (4, 128, 256, 256), P("dp", None, "tp"), P("tp")),
    "mxfp8 features": (MXFP8, (4, 8, 96, 40), P("dp", None, "tp"), P("tp")),
}


@functools.cache
def cut_on_one_device(name):
    """x, w and the weights of y, and the loss with its gradients by x and w; the step, too."""
    recipe, (b, s, c, f), *_ = CUT[name]
    rng = np.random.default_rng(0)
    arrays = [uneven(rng, *shape) for shape in ((b, s, c), (c, f), (b, s, f))]
    loss = lambda x, w, weight: jnp.sum(dense(x, w, recipe=recipe) * weight)
    step = jax.value_and_grad(loss, (0, 1))
    return arrays, jax.jit(step)(*arrays), step


@pytest.mark.usefixtures("on_host")
@pytest.mark.parametrize("kind", sharded.KINDS)
@pytest.mark.parametrize("name", CUT)
def test_cut_blocks_on_a_mesh(name, kind):
    """The numbers of one device, also where shards would have parts of blocks; the gradient of y lies as y does."""
    recipe, _, x_spec, w_spec = CUT[name]
    (x, w, weight), want, step = cut_on_one_device(name)
    mesh = jax.make_mesh((4, 2), ("dp", "tp"), axis_types=(sharded.KINDS[kind],) * 2)
    with jax.set_mesh(mesh):
        x, w = (jax.device_put(a, NamedSharding(mesh, spec)) for a, spec in ((x, x_spec), (w, w_spec)))
        if kind == "explicit":
            y_spec = jax.eval_shape(lambda x, w: dense(x, w, recipe=recipe), x, w).sharding
            weight = jax.device_put(weight, NamedSharding(mesh, y_spec.spec))
        program, found = collectives.compiled(jax.jit(step), x, w, weight, mesh=mesh)
        got = program(x, w, weight)
    jax.tree.map(close, got, want)
    if name == "block whole":  # row parallel: nothing is gathered
        assert not [kind for kind, *_ in found if kind == "all-gather"], found


MODULES = [(CURRENT, what, mesh) for what in ("mlp", "mha") for mesh in ("dp-tp", "dp-fsdp-tp-sp")]


@pytest.mark.usefixtures("on_host")
@pytest.mark.parametrize("kind", sharded.KINDS)
@pytest.mark.parametrize("recipe,what,name", [*MODULES, (BLOCK, "mlp", "dp-fsdp-tp-sp")], ids=short)
def test_modules_on_a_mesh(recipe, what, name, kind):
    """Numbers of one device; under current scaling no collective beyond those under delayed scaling but of single
    numbers. Under block scaling the gradients of row-parallel layers are gathered before they are quantized."""
    _, others, want = sharded.on_one_device(what, recipe, bf16)
    got, found = sharded.on_mesh(what, name, kind, recipe, bf16)
    assert others == got[1][1] == {}
    sharded.check_equal((got[0], got[1][0], got[1][2]), (want[0], want[1][0], want[1][2]), 2e-2)
    if recipe is CURRENT:
        sharded.check_collectives(found, sharded.minimum(what, name, True, 2))
