"""Layers on meshes of 8 devices: the numbers of one device, and no collective beyond what Megatron's scheme needs
(Shoeybi et al. 2019, https://arxiv.org/abs/1909.08053; sequence parallelism: Korthikanti et al. 2022,
https://arxiv.org/abs/2205.05198; FSDP: Zhao et al. 2023, https://arxiv.org/abs/2304.11277)."""

import functools

import flax
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from arrays import on_device
from flax import linen as nn
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from quick_init import quick_init
from sharded import (
    KEY,
    KINDS,
    LAYER_BOUND,
    MESHES,
    RECIPE,
    SMALL,
    WIDTHS,
    B,
    H,
    S,
    check_collectives,
    check_equal,
    check_state,
    data,
    gradients,
    minimum,
    module_of,
    on_mesh,
    on_one_device,
    relative_error,
    resource,
    run_on,
)

import te_jax as te
import te_jax.flax as te_flax
from te_jax import recipe, sharding
from te_jax.flax._common import Dropout
from te_jax.ops.attention import dot_product_attention
from te_jax.ops.norm import norm
from te_jax.sharding import collectives

pytestmark = pytest.mark.usefixtures("on_host")


# -- the minimum ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", MESHES)
@pytest.mark.parametrize("what", WIDTHS)
def test_fp8(what, name, kind):
    """bf16 data, so that attention goes through its op."""
    _, _, want = on_one_device(what, RECIPE, jnp.bfloat16)
    got, found = on_mesh(what, name, kind, RECIPE, jnp.bfloat16)
    check_state(got[1][1], want[1][1])
    check_equal((got[0], got[1][0], got[1][2]), (want[0], want[1][0], want[1][2]), 2e-2)
    check_collectives(found, minimum(what, name, True, 2))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", MESHES)
@pytest.mark.parametrize("what", WIDTHS)
def test_f32_numbers(what, name, kind):
    _, _, want = on_one_device(what, None, jnp.float32)
    check_equal(on_mesh(what, name, kind, None, jnp.float32)[0], want, 1e-5)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", MESHES)
@pytest.mark.parametrize("what", WIDTHS)
def test_f32_collectives(what, name, kind):
    """XLA gathers a kernel once, and keeps it, or once for each direction."""
    found = on_mesh(what, name, kind, None, jnp.float32)[1]
    want, got = minimum(what, name, False, 4), collectives.table(found, SMALL)
    if (gather := ("all-gather", "f32", "fsdp")) in want and got.get(gather, (0,))[0] == 4:
        want[gather] = (4, 2 * want[gather][1])
    assert got == want


def test_wgrad_out_of_fp8():
    """By `override_linear_precision`: activations are not gathered for it, and the sum is scattered, as in FP8."""
    name, wide = "dp-fsdp-tp", recipe.DelayedScaling(amax_history_len=4, override_linear_precision=(False, False, True))
    params, others, _ = on_one_device("mlp", RECIPE, jnp.float32)
    mesh = jax.make_mesh((2, 2, 2), tuple(MESHES[name]), axis_types=(AxisType.Explicit,) * 3)
    arrays, module = [data(jnp.float32, seed) for seed in (0, 1)], module_of("mlp", False)
    with te.autocast(True, wide):
        want = jax.jit(gradients(module))(nn.meta.unbox(params), others, *arrays)
        got, found = run_on(mesh, resource(name), module, params, others, arrays, P(("dp", "fsdp")))
    check_equal((got[0], got[1][0], got[1][2]), (want[0], want[1][0], want[1][2]), LAYER_BOUND[jnp.float32])
    check_collectives(found, minimum("mlp", name, True, 4))


@pytest.mark.parametrize("dtype", LAYER_BOUND, ids=lambda dtype: dtype.__name__)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["dp-fsdp-tp", "dp-fsdp-tp-sp"])
def test_transformer_layer(name, kind, dtype):
    """The collectives are those of its two blocks, and none between them."""
    _, _, want = on_one_device("layer", RECIPE, dtype)
    got, found = on_mesh("layer", name, kind, RECIPE, dtype)
    check_equal((got[0], got[1][0], got[1][2]), (want[0], want[1][0], want[1][2]), LAYER_BOUND[dtype])
    each = [minimum(what, name, True, jnp.dtype(dtype).itemsize) for what in WIDTHS]
    check_collectives(found, {key: tuple(map(sum, zip(*(m[key] for m in each)))) for key in each[0]})


# -- sizes that the mesh does not divide ---------------------------------------------------------------------


UNDIVIDED = {  # name: batch, sequence, the mesh, sequence parallelism, how many gathers at most
    "sequence-15": (2, 15, dict(dp=2, tp=4), True, 0),
    "sequence-17": (2, 17, dict(dp=2, tp=4), True, 0),
    "batch-6": (6, 8, dict(dp=4, tp=2), False, 0),
    "batch-1": (1, 8, dict(dp=2, tp=4), False, 0),
    "batch-3-fsdp": (3, 8, dict(fsdp=4, tp=2), False, 4),  # of kernels, or of the product of the shard of one
}


@pytest.mark.parametrize("fp8", [False, True], ids=["f32", "fp8"])
@pytest.mark.parametrize("name", UNDIVIDED)
def test_undivided_sizes(name, fp8, recwarn):
    """Under Auto axes: what cannot be split stays whole, rather than be gathered for each kernel."""
    b, s, sizes, sp, gathers = UNDIVIDED[name]
    mesh = jax.make_mesh(tuple(sizes.values()), tuple(sizes), axis_types=(AxisType.Auto,) * len(sizes))
    roles = {("tpsp" if sp and axis == "tp" else axis) + "_resource": axis for axis in sizes}
    module, rng = module_of("mlp", sp, dtype=jnp.float32), np.random.default_rng(0)
    arrays = [on_device(rng.normal(size=(b, s, H)), jnp.float32) for _ in range(2)]
    with te.autocast(fp8, RECIPE):
        others, params = flax.core.pop(quick_init(module.init)(KEY, arrays[0]), "params")
        want = jax.jit(gradients(module))(nn.meta.unbox(params), others, *arrays)
        sharding.constraints._warn_undivided.cache_clear()
        got, found = run_on(mesh, te.MeshResource(**roles), module, params, others, arrays, P("dp" if sp else None))
    check_equal((got[0], got[1][0], got[1][2]), (want[0], want[1][0], want[1][2]), LAYER_BOUND[jnp.float32])
    assert sum(c.kind == "all-gather" for c in found if c.bytes > SMALL) <= gathers, found
    assert not {c.kind for c in found} - {"all-gather", "all-reduce", "reduce-scatter"}, found
    said = [str(w.message) for w in recwarn if "do not divide" in str(w.message)]
    size = max(n for n in (b, s) if n not in (8, 2))
    assert len(said) == (size > 1) and all(f" is {size}, which the 4 devices of mesh axes" in text for text in said)


@pytest.mark.parametrize("shape", [(3, 64), (2, 15, 64), (1, 64)], ids=str)
def test_undivided_shards_of_an_op(shape):
    """A constraint of the user's own, which XLA takes for any size, and hands on to the result: a gather of each."""
    x = np.random.default_rng(0).normal(size=shape).astype(np.float32)
    mesh = jax.make_mesh((2,), ("a",), axis_types=(AxisType.Auto,))
    spec = P(*[None] * (x.ndim - 2), "a")
    run = lambda x, gamma: norm(jax.lax.with_sharding_constraint(x, spec), gamma)
    operands = [jax.device_put(a, NamedSharding(mesh, P())) for a in (x, np.ones(64, np.float32))]
    program, found = collectives.compiled(run, *operands, mesh=mesh)
    np.testing.assert_allclose(program(*operands), norm(x, jnp.ones(64)), rtol=1e-5, atol=1e-6)
    assert len(found) <= 2, found


@pytest.mark.parametrize(
    "module",
    [
        te_flax.DenseGeneral(features=64, use_bias=True),
        te_flax.LayerNormDenseGeneral(features=64),
    ],
    ids=["dense", "norm"],
)
def test_column_parallel_shards_below_a_block(module):
    """Float8BlockScaling leaves blocks whole that a mesh would cut; the layer's type is that of its operands."""
    x, mesh = data(jnp.float32)[:2], jax.make_mesh((2, 4), ("dp", "tp"), axis_types=(AxisType.Explicit,) * 2)

    def loss(variables, x):
        y = module.apply(variables, x)
        return jnp.sum(jnp.sin(y[0] if isinstance(y, tuple) else y))

    with te.autocast(True, recipe.Float8BlockScaling()):
        variables = nn.meta.unbox(quick_init(module.init)(KEY, x))
        step = jax.value_and_grad(loss, (0, 1))
        want = jax.jit(step)(variables, x)
        with jax.set_mesh(mesh):
            put = lambda leaf, spec: jax.device_put(np.asarray(leaf), NamedSharding(mesh, spec))
            placed = jax.tree.map(lambda leaf: put(leaf, P(None, "tp") if leaf.ndim == 2 else P()), variables)
            got = jax.jit(step)(placed, put(x, P("dp", "tp")))
    check_equal(got, want, 1e-5)


# -- axes of one device --------------------------------------------------------------------------------------


@pytest.mark.parametrize("sp", [False, True], ids=["", "sp"])
def test_explicit_axes_of_one_device(sp):
    """As without them: plain attention, whose logits a type would else split twice, with a mask, and FP8."""
    names = ("dp", "fsdp", "tp", "cp", "pp")
    mesh = jax.make_mesh((2, 1, 1, 1, 1), names, axis_types=(AxisType.Explicit,) * 5)
    roles = {("tpsp" if sp and axis == "tp" else axis) + "_resource": axis for axis in names}
    module, arrays = module_of("layer", sp, dtype=jnp.float32), [data(jnp.float32, seed) for seed in (0, 1)]
    mask = jnp.asarray(np.random.default_rng(3).random((B, 1, S, S)) < 0.3)

    class Masked:
        def apply(self, variables, x):
            return module.apply(variables, x, None, mask)

    with te.autocast(True, RECIPE):
        others, params = flax.core.pop(quick_init(module.init)(KEY, arrays[0]), "params")
        want = jax.jit(gradients(Masked()))(nn.meta.unbox(params), others, *arrays)
        spec = P(("dp", "fsdp"), ("cp", "tp") if sp else "cp")
        got, found = run_on(mesh, te.MeshResource(**roles), Masked(), params, others, arrays, spec)
    check_equal((got[0], got[1][0], got[1][2]), (want[0], want[1][0], want[1][2]), LAYER_BOUND[jnp.float32])
    assert {(c.kind, c.axes) for c in found} == {("all-reduce", ("dp",))}


# -- grouped heads -------------------------------------------------------------------------------------------


GROUPED = (("num_gqa_groups", 2),)  # of 8 query heads, on 4 devices


@pytest.mark.parametrize(("recipe", "dtype"), [(None, jnp.bfloat16), (RECIPE, jnp.float32)], ids=["bf16", "fp8"])
@pytest.mark.parametrize("kind", KINDS)
def test_fewer_groups_than_devices(kind, recipe, dtype):
    """Keys and values are replicated over tp; in bf16 through the op, which cannot split 2 heads over 4 devices."""
    _, _, want = on_one_device("mha", recipe, dtype, GROUPED)
    got, _ = on_mesh("mha", "dp-tp", kind, recipe, dtype, GROUPED)
    check_equal(got, want, 1e-5 if dtype == jnp.float32 else 2e-2)


@pytest.mark.parametrize("fused", [True, False], ids=["kv", "k-v"])
@pytest.mark.parametrize(("recipe", "dtype"), [(None, jnp.bfloat16), (RECIPE, jnp.float32)], ids=["bf16", "fp8"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["dp-tp", "dp-fsdp-tp-sp"])
def test_grouped_collectives(name, kind, recipe, dtype, fused):
    """Two or three projections of one norm cross tp as one does: the gradients of their input as one sum.

    The bounds are those of the blocks above: bf16 partial sums of each device, in f32 the order of sums.
    """
    fields = (("num_gqa_groups", 4), ("fuse_qkv_params", fused))
    _, _, want = on_one_device("mha", recipe, dtype, fields)
    got, found = on_mesh("mha", name, kind, recipe, dtype, fields)
    check_equal(got, want, 1e-5 if dtype == jnp.float32 else 2e-2)
    over_tp = lambda table: {key: entry for key, entry in table.items() if key[2] == "tp"}
    assert over_tp(collectives.table(found, SMALL)) == over_tp(
        minimum("mha", name, recipe is not None, jnp.dtype(dtype).itemsize)
    )


# -- errors --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_heads_that_tp_does_not_divide(kind):
    mesh = jax.make_mesh((2, 4), ("dp", "tp"), axis_types=(KINDS[kind],) * 2)
    module = te_flax.MultiHeadAttention(head_dim=8, num_attention_heads=6, num_gqa_groups=2)
    params = nn.meta.unbox(jax.eval_shape(module.init, KEY, jnp.ones((B, S, H)))["params"])
    place = lambda leaf, *spec: jnp.ones(leaf.shape, device=NamedSharding(mesh, P(*spec)))
    with jax.set_mesh(mesh), te.autocast(mesh_resource=te.MeshResource(dp_resource="dp", tp_resource="tp")):
        params = jax.tree.map(lambda leaf: place(leaf, *[None] * (leaf.ndim - 1), "tp"), params)
        params["query"]["scale"], params["query"]["ln_bias"] = (place(params["query"]["scale"]),) * 2
        text = r"MultiHeadAttention: num_attention_heads is 6, but .*\('tp',\) has 4 devices; use a multiple of 4"
        with pytest.raises(ValueError, match=text):
            jax.jit(module.apply)({"params": params}, place(jnp.ones((B, S, H)), "dp"))


def test_fewer_groups_than_devices_of_a_mesh_without_names(rng):
    """h 4, g 2 on a 2 x 4 mesh, where no MeshResource says which axis heads lie on: k is cut in half heads."""
    mesh = jax.make_mesh((2, 4), ("a", "b"), axis_types=(AxisType.Auto,) * 2)
    q, k = (on_device(rng.normal(size=(4, 8, h * 8)), jnp.bfloat16) for h in (4, 2))
    heads = lambda x: x.reshape(4, 8, -1, 8)
    fn = lambda q, k: jnp.sum(dot_product_attention(heads(q), heads(k), heads(k)).astype(jnp.float32) ** 2)
    want = jax.jit(jax.value_and_grad(fn, (0, 1)))(q, k)
    with jax.set_mesh(mesh):
        placed = (jax.device_put(x, NamedSharding(mesh, P("a", None, "b"))) for x in (q, k))
        got = jax.jit(jax.value_and_grad(fn, (0, 1)))(*placed)
    check_equal(got, want, 1e-2)


# -- dropout -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("what", WIDTHS)
def test_dropout(what, kind):
    """Rows that are alike are not dropped alike, wherever they lie; one key and mesh, one mask: on the CPU that of one
    device."""
    rate = dict(intermediate_dropout_rate=0.5) if what == "mlp" else dict(attention_dropout=0.5)
    module, x = module_of(what, False, **rate), jnp.broadcast_to(data(jnp.float32)[:1], (B, S, H))
    params = nn.meta.unbox(quick_init(functools.partial(module.init, deterministic=True))(KEY, x)["params"])
    run = jax.jit(lambda params, x: module.apply({"params": params}, x, rngs={"dropout": KEY})[0])
    want = run(params, x)
    mesh = jax.make_mesh((2, 4), ("dp", "tp"), axis_types=(KINDS[kind],) * 2)
    with jax.set_mesh(mesh):
        whole = jax.device_put(params, NamedSharding(mesh, P()))
        placed = jax.device_put(x, NamedSharding(mesh, P("dp", "tp" if what == "mlp" else None)))
        got = [np.asarray(run(whole, placed)) for _ in range(2)]
    np.testing.assert_array_equal(*got)
    assert relative_error(got[0], want) < 1e-5
    rows = got[0].reshape(B, -1)
    assert all(not np.allclose(rows[i], rows[j], atol=1e-3) for i in range(B) for j in range(i))


@pytest.mark.parametrize("dims", [(), (1,)], ids=["each", "shared"])
def test_dropout_module(dims):
    """Flax's masks on an Explicit mesh, and another one for every shard inside of shard_map."""
    x, mesh = jnp.ones((B, S, H)), jax.make_mesh((8,), ("dp",), axis_types=(AxisType.Explicit,))
    of = lambda kind: lambda x: kind(0.5, dims).apply({}, x, False, rngs={"dropout": KEY})
    with jax.set_mesh(mesh):
        got = jax.jit(of(Dropout))(jax.device_put(x, NamedSharding(mesh, P("dp"))))
    assert got.sharding.spec[0] == "dp"
    np.testing.assert_array_equal(got, of(nn.Dropout)(x))
    mesh = jax.make_mesh((8,), ("dp",), axis_types=(AxisType.Auto,))
    got = np.asarray(jax.jit(jax.shard_map(of(Dropout), mesh=mesh, in_specs=P("dp"), out_specs=P("dp")))(x))
    assert abs((got == 2).mean() - 0.5) < (0.05 if dims else 0.03) and set(np.unique(got)) == {0.0, 2.0}
    assert len({row.tobytes() for row in got}) == B
