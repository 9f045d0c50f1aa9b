"""Tokens keep their place: what a module returns for a stream of tokens is sharded as the stream is, on every kind of
mesh and along every axis. Types say it, so nothing is computed, but for a few programs on Auto axes."""

import functools

import jax
import jax.numpy as jnp
import pytest
from arrays import on_device
from flax import linen as nn
from flax import nnx
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from quick_init import quick_init

import te_jax as te
import te_jax.flax as te_flax
import te_jax.nnx as te_nnx
from te_jax.recipe import DelayedScaling
from te_jax.sharding.constraints import entries

B, S, H, F = 4, 8, 32, 64
RECIPE = DelayedScaling(amax_history_len=2)
KEYS = {"params": jax.random.key(0), "dropout": jax.random.key(1)}
W_WHOLE, W_FSDP, W_TP, W_JOINED = (f"nvte_w_{name}" for name in ("no_shard", "fsdp", "tp", "joined"))
OF_NORM = dict(scale_axes=(W_WHOLE,), ln_bias_axes=(W_WHOLE,))
OF_MLP = dict(
    OF_NORM, kernel_axes_1=(W_FSDP, W_JOINED, W_TP), kernel_axes_2=(W_TP, W_FSDP), bias_axes_1=(W_JOINED, W_TP)
)
OF_MLP |= dict(bias_axes_2=(W_WHOLE,))
OF_MOE = dict(
    OF_NORM, gate_axes=(W_WHOLE, None), kernel_axes_1=(None, W_FSDP, W_TP), kernel_axes_2=(None, W_TP, W_FSDP)
)
OF_MOE |= dict(bias_axes_1=(None, W_TP), bias_axes_2=(None, W_WHOLE), num_experts=4, intermediate_dim=F)
OF_MHA = dict(head_dim=8, num_attention_heads=4)
OF_MLA = dict(num_attention_heads=4, kv_lora_rank=16, qk_nope_head_dim=8, qk_rope_head_dim=8, v_head_dim=8)
OF_LAYER = dict(hidden_size=H, mlp_hidden_size=F, num_attention_heads=4, attention_dropout=0.0, drop_path=0.1)
MOE = dict(num_experts=4)
EVERYTHING = dict(enable_layernorm=True, use_bias=True, num_shared_experts=1, capacity_factor=1.0, use_expert_bias=True)
MODULES = {
    "norm": te_flax.LayerNorm(scale_axes=(W_WHOLE,), bias_axes=(W_WHOLE,)),
    "mlp": te_flax.LayerNormMLP(F, **OF_MLP, activations=("silu", "linear"), use_bias=True),
    "mlp-lora": te_flax.LayerNormMLP(F, **OF_MLP, enable_low_rank_adaptation=True),
    "moe": te_flax.MoEBlock(**OF_MOE),
    "moe-everything": te_flax.MoEBlock(**OF_MOE, **EVERYTHING),
    "mha": te_flax.MultiHeadAttention(**OF_MHA, num_gqa_groups=2, use_bias=True, low_rank_adaptation_scope="all"),
    "mla": te_flax.MultiHeadLatentAttention(**OF_MLA),
    "layer": te_flax.TransformerLayer(**OF_LAYER, post_norms=True, output_layernorm=True),
    "layer-parallel": te_flax.TransformerLayer(**OF_LAYER, parallel_attention_mlp=True, parallel_shared_layernorm=True),
    "layer-moe": te_flax.TransformerLayer(**OF_LAYER, moe=MOE | dict(num_shared_experts=1), use_bias=True),
    "decoder-moe": te_flax.TransformerLayer(**OF_LAYER, moe=MOE, layer_type="decoder"),
}
STREAMS = te_flax.LayerNormMLP | te_flax.MoEBlock | te_flax.MultiHeadAttention | te_flax.MultiHeadLatentAttention
MESHES = {  # each pair of dp, fsdp, tp and cp; sp: the sequence lies on tp as well
    "dp-fsdp-tp": ("dp", "fsdp", "tp"),
    "dp-fsdp-tp-sp": ("dp", "fsdp", "tp"),
    "dp-fsdp-cp": ("dp", "fsdp", "cp"),
    "fsdp-tp-cp": ("fsdp", "tp", "cp"),
    "dp-tp-cp-sp": ("dp", "tp", "cp"),
}


def called(module, x):
    """The arguments of a call."""
    return (x, x) if getattr(module, "layer_type", None) == "decoder" else (x,)


def resource(name):
    roles = {f"{axis}_resource": axis for axis in MESHES[name]}
    if name.endswith("sp"):
        roles["tpsp_resource"] = roles.pop("tp_resource")
    return te.MeshResource(**roles)


def places(name):
    """Where tokens lie: on the axes that divide data; and, where there is an fsdp, not on that one."""
    axes = MESHES[name]
    sequence = [axis for axis in ("cp", "tp") if axis in axes and (axis == "cp" or name.endswith("sp"))]
    for lacks in ((), ("fsdp",)) if "fsdp" in axes else ((),):
        batch = [axis for axis in ("dp", "fsdp") if axis in axes and axis not in lacks]
        yield P(tuple(batch) or None, tuple(sequence) or None, None)


def placed(boxed, mesh):
    """The types of variables, sharded by their names."""
    specs = nn.logical_to_mesh_sharding(nn.get_partition_spec(boxed), mesh, te_flax.extend_logical_axis_rules(()))
    return jax.tree.map(lambda a, at: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=at), nn.meta.unbox(boxed), specs)


@functools.cache
def initialized(recipe):
    """The variables of all modules, in boxes."""
    x = jax.ShapeDtypeStruct((B, S, H), jnp.float32)
    with te.autocast(recipe is not None, recipe):
        return {name: jax.eval_shape(m.init, KEYS, *called(m, x)) for name, m in MODULES.items()}


@pytest.mark.usefixtures("on_host")
@pytest.mark.parametrize(
    ("name", "recipe"),
    [*((name, None) for name in MESHES), ("dp-fsdp-tp-sp", RECIPE)],
    ids=lambda value: value if isinstance(value, str) else "fp8" if value else "f32",
)
def test_explicit_axes(name, recipe):
    axes, moved = MESHES[name], []
    mesh = jax.make_mesh((2,) * len(axes), axes, axis_types=(AxisType.Explicit,) * len(axes))
    with jax.set_mesh(mesh), te.autocast(recipe is not None, recipe, mesh_resource=resource(name)):
        for what, module in MODULES.items():
            held = placed(initialized(recipe)[what], mesh)
            calls = [(spec, {}) for spec in places(name)]
            if isinstance(module, STREAMS):
                calls = [(spec, dict(residual=added)) for (spec, _), added in zip(calls, (True, False))]
            for spec, more in calls:
                x = jax.ShapeDtypeStruct((B, S, H), jnp.float32, sharding=NamedSharding(mesh, spec))
                run = lambda v, x: module.apply(v, *called(module, x), rngs=KEYS, **more)  # noqa: B023
                y = jax.tree.leaves(jax.eval_shape(run, held, x))[0]
                if entries(y) != entries(x):
                    moved.append((what, more, x.sharding.spec, y.sharding.spec))
    assert not moved


@pytest.mark.usefixtures("on_host")
def test_gradients_on_explicit_axes():
    """They are sharded as what they belong to, where tokens lie on fsdp, and where they do not."""
    mesh = jax.make_mesh((2, 2, 2), MESHES["dp-fsdp-tp"], axis_types=(AxisType.Explicit,) * 3)
    with jax.set_mesh(mesh), te.autocast(True, RECIPE, mesh_resource=resource("dp-fsdp-tp")):
        for what in ("mlp", "moe-everything", "mha"):
            module = MODULES[what]
            x = jax.ShapeDtypeStruct((B, S, H), jnp.float32)
            held = placed(jax.eval_shape(module.init, KEYS, x), mesh)
            for spec in places("dp-fsdp-tp"):
                x = jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(mesh, spec))
                loss = lambda v, x: jnp.sum(jax.tree.leaves(module.apply(v, x, residual=True))[0] ** 2)  # noqa: B023
                for got, want in zip(
                    *map(jax.tree.leaves, (jax.eval_shape(jax.grad(loss, (0, 1)), held, x), (held, x)))
                ):
                    assert entries(got) == entries(want), what


@pytest.mark.usefixtures("on_host")
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_manual_axes(kind):
    """Within `jax.shard_map` over tokens y varies as x does."""
    recipe = None if kind == AxisType.Auto else RECIPE
    variables = initialized(recipe)
    mesh = jax.make_mesh((2, 2), ("dp", "tp"), axis_types=(kind,) * 2)
    with jax.set_mesh(mesh), te.autocast(recipe is not None, recipe):
        for what, module in MODULES.items():

            def run(v, x):
                y = jax.tree.leaves(module.apply(v, *called(module, x), rngs=KEYS))[0]  # noqa: B023
                assert jax.typeof(y).manual_axis_type.varying == {"dp"}
                return y

            axes = {} if kind == AxisType.Explicit else {"axis_names": {"dp"}}
            mapped = jax.shard_map(run, in_specs=(P(), P("dp")), out_specs=P("dp"), **axes)
            sharding = NamedSharding(mesh, P("dp")) if kind == AxisType.Explicit else None
            x = jax.ShapeDtypeStruct((B, S, H), jnp.float32, sharding=sharding)
            jax.eval_shape(mapped, nn.meta.unbox(variables[what]), x)


@pytest.mark.usefixtures("on_host")
@pytest.mark.parametrize("what", ["moe", "mlp"])
def test_auto_axes(what, rng):
    """The compiler finds the place by the names of activations, whatever splits the kernels."""
    names = dict(layernorm_input_axes=("nvte_batch", "nvte_seqlen", "nvte_hidden"))
    module, x = MODULES[what].clone(**names), on_device(rng.standard_normal((B, S, H)), jnp.float32)
    boxed = quick_init(module.init)(KEYS, x)
    mesh = jax.make_mesh((2, 2), ("dp", "fsdp"), axis_types=(AxisType.Auto,) * 2)
    with jax.set_mesh(mesh), te.autocast(False, mesh_resource=te.MeshResource(dp_resource="dp", fsdp_resource="fsdp")):
        rules = te_flax.extend_logical_axis_rules(())
        specs = nn.logical_to_mesh_sharding(nn.get_partition_spec(boxed), mesh, rules)
        held = jax.tree.map(jax.device_put, nn.meta.unbox(boxed), specs)
        x = jax.device_put(x, NamedSharding(mesh, P(("dp", "fsdp"))))
        with nn.logical_axis_rules(rules):
            y = jax.tree.leaves(jax.jit(module.apply)(held, x))[0]
    assert y.sharding.is_equivalent_to(x.sharding, 3), y.sharding


# -- init ----------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("on_host")
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_init_under_logical_rules(kind):
    """Of each module, with biases: no parameter names a logical axis twice."""
    own = [("embed", "fsdp"), ("mlp", "tp")]
    others = {
        "dense": te_flax.DenseGeneral((3, 24), use_bias=True, enable_low_rank_adaptation=True),
        "projection": te_flax.LayerNormDenseGeneral(24, use_bias=True, enable_low_rank_adaptation=True),
        "moe-names": te_flax.MoEBlock(num_experts=4, intermediate_dim=F, **EVERYTHING),
        "mlp-names": te_flax.LayerNormMLP(F, use_bias=True),
        "head": te_flax.LMHead(F),
        "layer-relative": te_flax.TransformerLayer(**OF_LAYER, enable_relative_embedding=True, use_bias=True),
    }
    mesh = jax.make_mesh((2, 2, 2), MESHES["dp-fsdp-tp"], axis_types=(kind,) * 3)
    x = jax.ShapeDtypeStruct((B, S, H), jnp.float32)
    with jax.set_mesh(mesh), te.autocast(True, RECIPE, mesh_resource=resource("dp-fsdp-tp")):
        with nn.logical_axis_rules(te_flax.extend_logical_axis_rules(own)):
            for module in (MODULES | others).values():
                boxed = jax.eval_shape(module.init, KEYS, *called(module, x))
                for spec in jax.tree.leaves(nn.logical_to_mesh(nn.get_partition_spec(boxed))):
                    assert {axis for axis in spec if axis} <= {"fsdp", "tp"}


@pytest.mark.usefixtures("on_host")
def test_nnx_init_under_logical_rules():
    mesh = jax.make_mesh((2, 2, 2), MESHES["dp-fsdp-tp"], axis_types=(AxisType.Auto,) * 3)
    with jax.set_mesh(mesh), te.autocast(True, RECIPE, mesh_resource=resource("dp-fsdp-tp")):
        with nn.logical_axis_rules(te_flax.extend_logical_axis_rules(())):
            layer = nnx.eval_shape(
                lambda: te_nnx.TransformerLayer(**OF_LAYER, moe=MOE, use_bias=True, rngs=nnx.Rngs(0))
            )
    assert layer.moe.wi_0.get_metadata()["out_sharding"] == (None, "fsdp", "tp")
