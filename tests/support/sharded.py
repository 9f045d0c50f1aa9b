"""Modules on meshes of 8 devices: their numbers and collectives, those of one device, and the fewest collectives that
Megatron's scheme needs."""

import contextlib
import dataclasses
import functools

import flax
import jax
import jax.numpy as jnp
import numpy as np
from arrays import on_device
from flax import linen as nn
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from quick_init import quick_init

import te_jax as te
import te_jax.flax as te_flax
from te_jax.recipe import DelayedScaling
from te_jax.sharding import collectives, global_shard_guard

B, S, H, F, HEADS = 8, 16, 64, 128, 8
RECIPE = DelayedScaling(amax_history_len=4)
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
    return on_device(np.random.default_rng(seed).normal(size=(B, S, H)), dtype)


def gradients(module):
    """(params, state, x, w) -> loss, its gradients by the first three; w makes every output count differently."""

    def loss(params, others, x, w):
        y = module.apply({"params": params, **others}, x)
        y = y[0] if isinstance(y, tuple) else y
        return jnp.sum(y.astype(jnp.float32) * w)

    return jax.value_and_grad(loss, argnums=(0, 1, 2))


@functools.cache
def on_one_device(what, recipe, dtype, fields=()):
    """(parameters in boxes, state, loss and gradients) of the module without a mesh; `recipe` is None without FP8."""
    module, x = module_of(what, False, dtype=dtype, **dict(fields)), data(dtype)
    with te.autocast(recipe is not None, recipe):
        # With seed 0 the losses of two modules cancel to a tenth and a hundredth of what a sum of such terms is like.
        others, params = flax.core.pop(quick_init(module.init, seed=1)(KEY, x), "params")
        return params, others, jax.jit(gradients(module))(nn.meta.unbox(params), others, x, data(dtype, 1))


@functools.cache
def on_mesh(what, name, kind, recipe, dtype, fields=(), **asked):
    """(loss and gradients, collectives) on the mesh `name`, gradients sharded as what they belong to. asked: of
    the MeshResource, besides axes."""
    params, others, _ = on_one_device(what, recipe, dtype, fields)
    module, sizes = module_of(what, name.endswith("sp"), dtype=dtype, **dict(fields)), MESHES[name]
    mesh = jax.make_mesh(tuple(sizes.values()), tuple(sizes), axis_types=(KINDS[kind],) * len(sizes))
    batch = tuple(axis for axis in ("dp", "fsdp") if axis in sizes)
    spec = P(batch or None, "tp" if name.endswith("sp") else None)
    arrays = [data(dtype, seed) for seed in (0, 1)]
    with te.autocast(recipe is not None, recipe):
        roles = dataclasses.replace(resource(name), **asked)
        return run_on(mesh, roles, module, params, others, arrays, spec)


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


def minimum(what, name, fp8: bool, size: int) -> dict:
    """{(kind, type, mesh axes): (number, bytes on a device)} of a block, forward and backward, data of `size` bytes.

    Of an all-gather and a reduce-scatter the larger side counts. Per block with the column-parallel kernel [H, n1] and
    the row-parallel [n2, H], for the T tokens of a data-parallel rank:

    dp    one all-reduce of each kernel's gradient (a shard of it, next to fsdp and tp)
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


def check_same_bits(got, want):
    for (path, a), b in zip(jax.tree_util.tree_leaves_with_path(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_array_equal(a, b, err_msg=jax.tree_util.keystr(path))


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


# Partial sums are rounded to bf16 on each device: 2**-9 of a number moves one FP8 number in 64 (E4M3, steps of 2**-3;
# in 128 for E5M2, 2**-2) to a neighbour, 1 or 2 % of a tensor. The gradient of qkv sees some ten such tensors. In f32
# next to none of them moves.
LAYER_BOUND = {jnp.bfloat16: 8e-2, jnp.float32: 5e-3}
