"""`te_jax.explain_sharding`: the collectives of compiled programs, at the modules whose they are."""

import jax
import jax.numpy as jnp
import pytest
from flax import linen as nn
from flax import nnx
from jax.experimental.compilation_cache import compilation_cache
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from sharded import RECIPE, B, F, H, S, module_of

import te_jax as te
import te_jax.flax as te_flax
from te_jax.sharding.collectives import Collective
from te_jax.sharding.explain import Crossing, ShardingExplanation, _next_to, _place_of

RESOURCE = te.MeshResource(fsdp_resource="fsdp", tpsp_resource="tp", gradient_dtype=jnp.bfloat16)


@pytest.fixture
def mesh():
    mesh = jax.make_mesh((2, 2), ("fsdp", "tp"), axis_types=(AxisType.Auto,) * 2)
    with jax.set_mesh(mesh), te.autocast(recipe=RECIPE, mesh_resource=RESOURCE):
        yield mesh


class Stack(nn.Module):
    """A scan, whose weights are gathered out of a stack."""

    @nn.compact
    def __call__(self, x):
        axes, names = dict(params=0, fp8_metas=0), {nn.PARTITION_NAME: None}
        layers = nn.scan(_Layer, variable_axes=axes, split_rngs={"params": True}, length=2, metadata_params=names)
        return layers(name="layers")(x, None)[0]


class _Layer(nn.Module):
    @nn.compact
    def __call__(self, x, _):
        return x + module_of("mlp", True, dtype=jnp.bfloat16, name="mlp")(x)[0], None


def test_of_a_model(mesh, capsys):
    """What crosses of a block under sequence parallelism and FSDP: in FP8 tokens and weights, in bf16 sums."""
    x = jax.ShapeDtypeStruct((B, S, H), jnp.bfloat16, sharding=NamedSharding(mesh, P("fsdp", "tp")))
    with nn.logical_axis_rules(te_flax.extend_logical_axis_rules(())):
        found = te.explain_sharding(Stack(), x)
    large = {c for c in found.crossings if c.bytes >= 512}
    assert {(c.path, c.in_loop, c.next_to) for c in large} == {("layers/mlp", True, None)}
    tokens, weights = B // 2 * S * H, (H * F // 2, F // 2 * H)
    of = lambda is_backward: sorted(
        (c.kind, c.dtype, "+".join(c.axes), c.bytes)
        for c in large
        if c.is_backward == is_backward
        for _ in range(c.times)
    )
    gathered = [("all-gather", "f8e4m3fn", "fsdp", size) for size in weights]
    x = ("all-gather", "f8e4m3fn", "tp", tokens)
    summed = ("reduce-scatter", "bf16", "tp", 2 * tokens)
    assert of(False) == sorted([x, *gathered, summed])
    gradients = [("reduce-scatter", "bf16", "fsdp", 2 * size) for size in weights]
    dy = ("all-gather", "f8e5m2", "tp", tokens)
    assert of(True) == sorted([x, dy, *gathered, summed, *gradients])
    assert {c.what for c in large if c.axes == ("fsdp",) and c.kind == "reduce-scatter"} == {"wgrad te_gemm"}
    text = str(found)
    assert "layers/mlp" in text and "dgrad te_gemm_sum, backward" in text and "for a GPU" in text


def test_of_a_function(mesh):
    spread = lambda a: jax.lax.with_sharding_constraint(a, NamedSharding(mesh, P()))
    x = jax.ShapeDtypeStruct((8, 4), jnp.float32, sharding=NamedSharding(mesh, P("fsdp")))
    (one,) = te.explain_sharding(lambda x: jnp.sin(spread(x)), x).crossings
    assert (one.kind, one.dtype, one.axes, one.bytes, one.times) == ("all-gather", "f32", ("fsdp",), 128, 1)
    assert str(te.explain_sharding(jnp.sin, x)) == "nothing crosses devices"


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=str)
def test_passes_and_modules(kind):
    """On an Explicit mesh ops are in a `jax.shard_map`, whose names the program has from its call on. A MeshResource is
    not needed; an argument may be on one device, by keyword, or no array."""
    x, params = jnp.ones((8, H)), {"params": {"kernel": jnp.ones((H, F)), "bias": jnp.ones(F)}}
    mesh = jax.make_mesh((4,), ("dp",), axis_types=(kind,))
    with jax.set_mesh(mesh), te.autocast(recipe=te.recipe.Float8CurrentScaling()):
        placed = jax.device_put(x, NamedSharding(mesh, P("dp")))
        whole = jax.device_put(params, NamedSharding(mesh, P()))
        residual = jax.device_put(jnp.ones((8, F)), NamedSharding(mesh, P("dp")))
        found = te.explain_sharding(te_flax.DenseGeneral(F, use_bias=True), placed, variables=whole, residual=residual)
        (sums,) = {c for c in found.crossings if c.bytes >= H * F}
        assert (sums.what, sums.is_backward, sums.dtype) == ("wgrad te_gemm", True, "f32")
        assert te.explain_sharding(nn.Dense(F), x).crossings == ()
        assert te.explain_sharding(lambda x, y: x + y, placed, y=placed).crossings == ()


def test_a_program_that_was_compiled_before(mesh, tmp_path):
    """jax's compilation cache has it, and nothing would be compiled."""
    x = jax.ShapeDtypeStruct((8, 4), jnp.float32, sharding=NamedSharding(mesh, P("fsdp")))
    settings = dict(jax_compilation_cache_dir=str(tmp_path), jax_persistent_cache_min_compile_time_secs=0.0)
    before = {name: getattr(jax.config, name) for name in settings}
    try:
        for name, value in settings.items():
            jax.config.update(name, value)
        compilation_cache.reset_cache()
        found = [te.explain_sharding(jax.jit(jnp.sum), x) for _ in range(2)]
    finally:
        for name, value in before.items():
            jax.config.update(name, value)
        compilation_cache.reset_cache()
    assert len(found[0].crossings) == 1 and found[0] == found[1]


def test_operations_of_jax_are_no_ops():
    """A name with "te_" in it, which `nn.scan` leaves where it stacks results."""
    names = "jit(f)/jvp(Net)/mlp/dot_general", "jit(f)/jvp(Net)/while/body/dynamic_update_slice"
    one = Collective("all-gather", "f32", 8, ("dp",), 1, names=names)
    assert _place_of(one) == ("mlp", "dot_general", names[0])


def test_what_it_is_not_for(mesh):
    x = jnp.ones((2, 4))
    with pytest.raises(TypeError, match="model is .*; pass a module of Flax Linen, or a function, such as a jitted"):
        te.explain_sharding(nnx.Linear(4, 4, rngs=nnx.Rngs(0)), x)
    with pytest.raises(TypeError, match="variables is .*; pass None"):
        te.explain_sharding(jnp.sin, x, variables={})
    with jax.set_mesh(jax.make_mesh((1,), ("fsdp",), axis_types=(AxisType.Auto,))):
        with pytest.raises(ValueError, match=r"no mesh of several devices is in force; enter jax.set_mesh\(mesh\)"):
            te.explain_sharding(jnp.sin, x)


def test_what_runs_meanwhile():
    """The text of a scheduled program, as XLA writes it for a GPU."""
    program = """
      %all-gather-start.1 = (f8e4m3fn[2]{0}, f8e4m3fn[4]{0}) all-gather-start(%a), channel_id=3, dimensions={0}
      %gemm.1 = (bf16[8]{0}, u8[4]{0}) custom-call(%b, %c), custom_call_target="te_gemm", api_version=API_VERSION_TYPED
      %fusion.2 = bf16[8]{0} fusion(%b), kind=kLoop, calls=%fused
      %fusion.4 = (bf16[8]{0}, u8[4]{0}) fusion(%b, %c), kind=kCustom, calls=%dynamic-slice-fusion.1
      %all-gather-done.1 = f8e4m3fn[4]{0} all-gather-done(%all-gather-start.1)
      %all-reduce-start.2 = bf16[8]{0} all-reduce-start(%gemm.1), channel_id=5, to_apply=%add
      %all-reduce-done.2 = bf16[8]{0} all-reduce-done(%all-reduce-start.2)
      %dot.3 = bf16[8]{0} dot(%b, %c)
    """
    with_slices = """
%dynamic-slice-fusion.1 (p0: bf16[2,8], p1: bf16[8]) -> (bf16[8], u8[4]) {
  ROOT %gemm.2 = (bf16[8]{0}, u8[4]{0}) custom-call(%s, %p1), custom_call_target="te_gemm", metadata={op_name="NAME"}
}
"""
    name = "jit(f)/jvp(Net)/layers/mlp/te_product[fprop]/jit(te_gemm)/ffi_call"
    found = _next_to(with_slices.replace("NAME", name) + program)
    assert found == {3: ("product", "layers/mlp fprop te_gemm"), 5: ()}
    crossing = Crossing("layers/mlp", "x", False, "all-gather", "f8e4m3fn", ("tp",), 4, 1, False, 2, found[3])
    assert "1 x product, 1 x mlp fprop te_gemm" in str(ShardingExplanation((crossing,)))
