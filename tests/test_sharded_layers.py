"""Layers on meshes of 8 devices: the numbers of one device, and no collective beyond what Megatron's scheme needs
(Shoeybi et al. 2019, https://arxiv.org/abs/1909.08053; sequence parallelism: Korthikanti et al. 2022,
https://arxiv.org/abs/2205.05198; FSDP: Zhao et al. 2023, https://arxiv.org/abs/2304.11277)."""

import contextlib
import functools

import collectives
import flax
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import te_jax as te
import te_jax.flax as te_flax
from te_jax import recipe, sharding
from te_jax.flax._common import Dropout
from te_jax.ops.attention import dot_product_attention
from te_jax.ops.norm import norm
from te_jax.sharding import global_shard_guard

pytestmark = pytest.mark.usefixtures("on_host")

B, S, H, F, HEADS = 8, 16, 64, 128, 8
RECIPE = recipe.DelayedScaling(amax_history_len=4)
KEY = jax.random.key(0)

MESHES = {  # sizes of the mesh axes; sp: the sequence lies on tp outside of the GEMMs
    "dp": dict(dp=8),
    "fsdp": dict(fsdp=8),
    "tp": dict(tp=8),
    "tp-sp": dict(tp=8),
    "dp-tp": dict(dp=2, tp=4),
    "dp-fsdp-tp": dict(dp=2, fsdp=2, tp=2),
    "dp-fsdp-tp-sp": dict(dp=2, fsdp=2, tp=2),
}
KINDS = {"auto": AxisType.Auto, "explicit": AxisType.Explicit}
WIDTHS = {"mlp": (F, F), "mha": (3 * H, H)}  # of the column-parallel product, of the row-parallel operand


def resource(name) -> te.MeshResource:
    """The roles of the mesh axes."""
    roles = {f"{axis}_resource": axis for axis in MESHES[name]}
    if name.endswith("sp"):
        roles["tpsp_resource"] = roles.pop("tp_resource")
    return te.MeshResource(**roles)


def module_of(what, sp: bool, **fields):
    """The module under test, with logical names on its parameters and activations."""
    seq = "nvte_seqlen_tp" if sp else "nvte_seqlen"
    if what == "mha":
        fields = dict(head_dim=H // HEADS, num_attention_heads=HEADS, enable_sequence_parallel=sp) | fields
        return te_flax.MultiHeadAttention(**fields)
    if what == "layer":
        own = dict(hidden_size=H, mlp_hidden_size=F, num_attention_heads=HEADS, enable_sequence_parallel=sp)
        return te_flax.TransformerLayer(**own | dict(hidden_dropout=0.0, attention_dropout=0.0) | fields)
    return te_flax.LayerNormMLP(
        intermediate_dim=F,
        scale_axes=("nvte_w_no_shard",),
        ln_bias_axes=("nvte_w_no_shard",),
        kernel_axes_1=("nvte_w_fsdp", "nvte_w_joined", "nvte_w_tp"),
        kernel_axes_2=("nvte_w_tp", "nvte_w_fsdp"),
        layernorm_input_axes=("nvte_batch", seq, "nvte_hidden"),
        dot_1_input_axes=("nvte_batch", "nvte_seqlen", "nvte_hidden"),
        dot_2_input_axes=("nvte_batch", "nvte_seqlen", "nvte_hidden_tp"),
        **fields,
    )


def data(dtype, seed=0):
    return jnp.asarray(np.random.default_rng(seed).normal(size=(B, S, H)), dtype)


def gradients(module):
    """(params, state, x, w) -> loss, its gradients by the first three; w makes every output count differently."""

    def loss(params, others, x, w):
        y = module.apply({"params": params, **others}, x)
        y = y[0] if isinstance(y, tuple) else y
        return jnp.sum(y.astype(jnp.float32) * w)

    return jax.value_and_grad(loss, argnums=(0, 1, 2))


@functools.cache
def on_one_device(what, fp8, dtype, fields=()):
    """(parameters in boxes, state, loss and gradients) of the module without a mesh."""
    module, x = module_of(what, False, dtype=dtype, **dict(fields)), data(dtype)
    with te.autocast(fp8, RECIPE):
        others, params = flax.core.pop(jax.jit(module.init)(KEY, x), "params")
        return params, others, jax.jit(gradients(module))(nn.meta.unbox(params), others, x, data(dtype, 1))


@functools.cache
def on_mesh(what, name, kind, fp8, dtype, fields=()):
    """(loss and gradients, collectives) on the mesh `name`, gradients sharded as what they belong to."""
    params, others, _ = on_one_device(what, fp8, dtype, fields)
    module, sizes = module_of(what, name.endswith("sp"), dtype=dtype, **dict(fields)), MESHES[name]
    mesh = jax.make_mesh(tuple(sizes.values()), tuple(sizes), axis_types=(KINDS[kind],) * len(sizes))
    batch = tuple(axis for axis in ("dp", "fsdp") if axis in sizes)
    spec = P(batch or None, "tp" if name.endswith("sp") else None)
    arrays = [data(dtype, seed) for seed in (0, 1)]
    with te.autocast(fp8, RECIPE):
        return run_on(mesh, resource(name), module, params, others, arrays, spec)


def run_on(mesh, resource, module, params, others, arrays, spec):
    """(loss and gradients, collectives): parameters, in boxes, by their logical names, x and w of `arrays` by `spec`,
    the state on every device; gradients are sharded as what they belong to."""
    with jax.set_mesh(mesh), global_shard_guard(resource):
        rules = te_flax.extend_logical_axis_rules(())
        specs = nn.logical_to_mesh_sharding(nn.get_partition_spec(params), mesh, rules)
        operands = (
            jax.tree.map(jax.device_put, jax.tree.map(np.asarray, nn.meta.unbox(params)), specs),
            jax.device_put(others, NamedSharding(mesh, P())),
            *(jax.device_put(np.asarray(a), NamedSharding(mesh, spec)) for a in arrays),
        )
        out = None, jax.tree.map(lambda a: a.sharding, operands[:3])
        with nn.logical_axis_rules(rules) if AxisType.Auto in mesh.axis_types else contextlib.nullcontext():
            step = jax.jit(gradients(module), out_shardings=out)
            program, found = collectives.compiled(step, *operands, mesh=mesh)
        return program(*operands), found


# -- the minimum ---------------------------------------------------------------------------------------------


def minimum(what, name, fp8: bool, size: int) -> dict:
    """{(kind, type, mesh axes): (number, bytes on a device)} of a block, forward and backward, data of `size` bytes.

    Of an all-gather and a reduce-scatter the larger side counts. Per block with the column-parallel kernel [H, n1] and
    the row-parallel [n2, H], for the T tokens of a data-parallel rank:

    dp    one all-reduce of each kernel's gradient (a shard of it, beside fsdp and tp)
    fsdp  an all-gather of each kernel forward, one backward, of FP8; a reduce-scatter of its gradient
    tp    an all-reduce of [T, H] forward, one backward
    sp    reduce-scatters in their place; all-gathers of x forward, of x and of the output's gradient backward, of FP8
    """
    sizes, wide = MESHES[name], {2: "bf16", 4: "f32"}[size]
    dp, fsdp, tp, sp = (*(sizes.get(axis, 1) for axis in ("dp", "fsdp", "tp")), name.endswith("sp"))
    tokens = B * S * H // (dp * fsdp)
    kernels = sum(H * n for n in WIDTHS[what]) // tp
    gathered, width = ("f8e4m3fn", 1) if fp8 else (wide, size)
    table = {}
    if dp > 1:
        table["all-reduce", wide, "dp"] = (2, kernels // fsdp * size)
    if fsdp > 1:
        times = 2 if fp8 else 1  # without FP8 it is XLA that keeps what was gathered
        table["all-gather", gathered, "fsdp"] = (2 * times, times * kernels * width)
        table["reduce-scatter", wide, "fsdp"] = (2, kernels * size)
    if tp > 1:
        table["reduce-scatter" if sp else "all-reduce", wide, "tp"] = (2, 2 * tokens * size)
    if sp and fp8:
        table["all-gather", "f8e4m3fn", "tp"] = (2, 2 * tokens)
        table["all-gather", "f8e5m2", "tp"] = (1, tokens)
    elif sp:
        table["all-gather", wide, "tp"] = (2, 2 * tokens * size)
    return table


SMALL = 512  # bytes: amaxes, the loss, gradients of norms


def check_collectives(found, want: dict):
    assert collectives.table(found, SMALL) == want
    small = [c for c in found if c.bytes <= SMALL]
    assert {c.kind for c in small} <= {"all-reduce"}, small


def relative_error(got, want) -> float:
    got, want = (np.asarray(a, np.float32) for a in (got, want))
    return float(np.linalg.norm(got - want) / max(np.linalg.norm(want), 1e-30))


def check_equal(got, want, bound):
    for (path, a), b in zip(jax.tree_util.tree_leaves_with_path(got), jax.tree.leaves(want), strict=True):
        assert a.shape == b.shape and a.dtype == b.dtype
        assert relative_error(a, b) < bound, (jax.tree_util.keystr(path), relative_error(a, b))


def check_state(got, want):
    """Scales and histories are the same on all devices; those of the block's input and of kernels bit for bit those of
    one device, for their amax passes no sum that a mesh orders otherwise. The rest are amaxes behind sums of another
    order: bf16 partial sums of 8 devices (2**-8 each), and FP8 numbers on an edge that fall to the other side."""
    got, want = (flax.traverse_util.flatten_dict(nn.meta.unbox(state), sep="/") for state in (got, want))
    assert got.keys() == want.keys()
    for name, leaf in got.items():
        for shard in leaf.addressable_shards:
            np.testing.assert_array_equal(shard.data, leaf.addressable_shards[0].data)
        tensor = name.rsplit("/", 1)[-1]
        if tensor.startswith("kernel") or name in ("fp8_metas/qkv/x_scale", "fp8_metas/x_0_scale"):
            np.testing.assert_array_equal(leaf, want[name], err_msg=name)
        np.testing.assert_allclose(leaf, want[name], rtol=2e-2, err_msg=name)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", MESHES)
@pytest.mark.parametrize("what", WIDTHS)
def test_fp8(what, name, kind):
    """bf16 data, so that attention goes through its op."""
    _, _, want = on_one_device(what, True, jnp.bfloat16)
    got, found = on_mesh(what, name, kind, True, jnp.bfloat16)
    check_state(got[1][1], want[1][1])
    check_equal((got[0], got[1][0], got[1][2]), (want[0], want[1][0], want[1][2]), 2e-2)
    check_collectives(found, minimum(what, name, True, 2))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", MESHES)
@pytest.mark.parametrize("what", WIDTHS)
def test_f32_numbers(what, name, kind):
    _, _, want = on_one_device(what, False, jnp.float32)
    check_equal(on_mesh(what, name, kind, False, jnp.float32)[0], want, 1e-5)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", MESHES)
@pytest.mark.parametrize("what", WIDTHS)
def test_f32_collectives(what, name, kind):
    """XLA gathers a kernel once, and keeps it, or once for each direction."""
    found = on_mesh(what, name, kind, False, jnp.float32)[1]
    want, got = minimum(what, name, False, 4), collectives.table(found, SMALL)
    if (gather := ("all-gather", "f32", "fsdp")) in want and got.get(gather, (0,))[0] == 4:
        want[gather] = (4, 2 * want[gather][1])
    assert got == want


def test_wgrad_out_of_fp8():
    """By `override_linear_precision`: activations are not gathered for it, and the sum is scattered, as in FP8."""
    name, wide = "dp-fsdp-tp", recipe.DelayedScaling(amax_history_len=4, override_linear_precision=(False, False, True))
    params, others, _ = on_one_device("mlp", True, jnp.float32)
    mesh = jax.make_mesh((2, 2, 2), tuple(MESHES[name]), axis_types=(AxisType.Explicit,) * 3)
    arrays, module = [data(jnp.float32, seed) for seed in (0, 1)], module_of("mlp", False)
    with te.autocast(True, wide):
        want = jax.jit(gradients(module))(nn.meta.unbox(params), others, *arrays)
        got, found = run_on(mesh, resource(name), module, params, others, arrays, P(("dp", "fsdp")))
    check_equal((got[0], got[1][0], got[1][2]), (want[0], want[1][0], want[1][2]), LAYER_BOUND[jnp.float32])
    check_collectives(found, minimum("mlp", name, True, 4))


# Partial sums are rounded to bf16 on each device: 2**-9 of a number moves one FP8 number in 64 (E4M3, steps of 2**-3;
# in 128 for E5M2, 2**-2) to a neighbour, 1 or 2 % of a tensor. The gradient of qkv sees some ten such tensors. In f32
# next to none of them moves.
LAYER_BOUND = {jnp.bfloat16: 8e-2, jnp.float32: 5e-3}


@pytest.mark.parametrize("dtype", LAYER_BOUND, ids=lambda dtype: dtype.__name__)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["dp-fsdp-tp", "dp-fsdp-tp-sp"])
def test_transformer_layer(name, kind, dtype):
    """The collectives are those of its two blocks, and none between them."""
    _, _, want = on_one_device("layer", True, dtype)
    got, found = on_mesh("layer", name, kind, True, dtype)
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
    arrays = [jnp.asarray(rng.normal(size=(b, s, H)), jnp.float32) for _ in range(2)]
    with te.autocast(fp8, RECIPE):
        others, params = flax.core.pop(jax.jit(module.init)(KEY, arrays[0]), "params")
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
        variables = nn.meta.unbox(module.init(KEY, x))
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
        others, params = flax.core.pop(jax.jit(module.init)(KEY, arrays[0]), "params")
        want = jax.jit(gradients(Masked()))(nn.meta.unbox(params), others, *arrays)
        spec = P(("dp", "fsdp"), ("cp", "tp") if sp else "cp")
        got, found = run_on(mesh, te.MeshResource(**roles), Masked(), params, others, arrays, spec)
    check_equal((got[0], got[1][0], got[1][2]), (want[0], want[1][0], want[1][2]), LAYER_BOUND[jnp.float32])
    assert {(c.kind, c.axes) for c in found} == {("all-reduce", ("dp",))}


# -- grouped heads -------------------------------------------------------------------------------------------


GROUPED = (("num_gqa_groups", 2),)  # of 8 query heads, on 4 devices


@pytest.mark.parametrize(("fp8", "dtype"), [(False, jnp.bfloat16), (True, jnp.float32)], ids=["bf16", "fp8"])
@pytest.mark.parametrize("kind", KINDS)
def test_fewer_groups_than_devices(kind, fp8, dtype):
    """Keys and values are replicated over tp; in bf16 through the op, which cannot split 2 heads over 4 devices."""
    _, _, want = on_one_device("mha", fp8, dtype, GROUPED)
    got, _ = on_mesh("mha", "dp-tp", kind, fp8, dtype, GROUPED)
    check_equal(got, want, 1e-5 if dtype == jnp.float32 else 2e-2)


@pytest.mark.parametrize("fused", [True, False], ids=["kv", "k-v"])
@pytest.mark.parametrize(("fp8", "dtype"), [(False, jnp.bfloat16), (True, jnp.float32)], ids=["bf16", "fp8"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["dp-tp", "dp-fsdp-tp-sp"])
def test_grouped_collectives(name, kind, fp8, dtype, fused):
    """Two or three projections of one norm cross tp as one does: the gradients of their input as one sum.

    The bounds are those of the blocks above: bf16 partial sums of each device, in f32 the order of sums.
    """
    fields = (("num_gqa_groups", 4), ("fuse_qkv_params", fused))
    _, _, want = on_one_device("mha", fp8, dtype, fields)
    got, found = on_mesh("mha", name, kind, fp8, dtype, fields)
    check_equal(got, want, 1e-5 if dtype == jnp.float32 else 2e-2)
    over_tp = lambda table: {key: entry for key, entry in table.items() if key[2] == "tp"}
    assert over_tp(collectives.table(found, SMALL)) == over_tp(minimum("mha", name, fp8, jnp.dtype(dtype).itemsize))


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
    q, k = (jnp.asarray(rng.normal(size=(4, 8, h * 8)), jnp.bfloat16) for h in (4, 2))
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
    params = nn.meta.unbox(jax.jit(functools.partial(module.init, deterministic=True))(KEY, x)["params"])
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
