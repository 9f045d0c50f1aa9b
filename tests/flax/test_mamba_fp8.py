"""Mamba2's output projection in FP8, which quantizes the gated norm where it is computed: routes, state, gradients."""

import flax_reference as ref
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from arrays import on_device
from flax import linen as nn
from flax import nnx
from flax_reference import data
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from jaxprs import equations
from quick_init import quick_init

import te_jax as te
import te_jax.flax as te_flax
import te_jax.flax._mixers
import te_jax.nnx as te_nnx
from te_jax import recipe
from te_jax.checkpoint_policies import QUANTIZED, save
from te_jax.layers import gated_norm_dense, gated_rmsnorm, quantize_kernel
from te_jax.sharding import MeshResource, global_shard_guard

pytestmark = pytest.mark.usefixtures("on_host")
KEY = jax.random.key(0)
B, S, H, N, P, G = 2, 16, 32, 4, 8, 2
DELAYED, CURRENT, BLOCK = recipe.DelayedScaling(), recipe.Float8CurrentScaling(), recipe.Float8BlockScaling()
MX = recipe.MXFP8BlockScaling()


def mamba(**fields):
    return te_flax.Mamba2(**dict(ssm_num_heads=N, ssm_head_dim=P, ssm_state_size=16, ssm_num_groups=G) | fields)


def filled(module, x):
    """Variables, the parameters random and the FP8 state as `init` makes it."""
    variables = quick_init(module.init)(KEY, x)
    return {**variables, "params": ref.unboxed(ref.filled(jax.eval_shape(lambda: variables)["params"]))}


def run_of(module, dy):
    """(variables, x) -> the output, and the gradients of variables (of the state: the new state) and x for dy."""

    def run(variables, x):
        y, pull = jax.vjp(lambda v, x: module.apply(v, x)[0], variables, x)
        return y, pull(dy.astype(y.dtype))

    return run


def ops_of(run, *args):
    """{name: the types of the results of each} of the gated norm's ops."""
    return ops_in(jax.make_jaxpr(run)(*args))


def ops_in(jaxpr):
    found = {}
    for eqn in equations(jaxpr.jaxpr):
        if "gated_norm" in eqn.primitive.name:
            found.setdefault(eqn.primitive.name, []).append({v.aval.dtype.name for v in eqn.outvars})
    return found


def in_fp8(found):
    """Whether a call writes FP8."""
    return any(name.startswith("float8_e4") for calls in found.values() for names in calls for name in names)


def errors(got, want):
    """By leaf: the norm of the difference over the norm."""
    norm = lambda a: float(np.linalg.norm(np.asarray(a, np.float32)))
    wide = lambda a: np.asarray(a, np.float32)
    return {
        jax.tree_util.keystr(path): norm(wide(a) - wide(b)) / max(norm(b), 1e-30)
        for (path, a), b in zip(jax.tree_util.tree_leaves_with_path(got), jax.tree.leaves(want), strict=True)
    }


@pytest.mark.parametrize(
    ("law", "groups", "before", "dtype"),
    [
        (DELAYED, 2, False, jnp.float32),
        (DELAYED, 1, True, jnp.bfloat16),
        (CURRENT, 4, False, jnp.bfloat16),
        (BLOCK, 1, False, jnp.bfloat16),
        (MX, 1, True, jnp.float32),
    ],
    ids=["delayed", "norm_first", "current", "block", "mx"],
)
def test_as_the_norm_that_is_written(law, groups, before, dtype, monkeypatch):
    """Outputs, gradients and state are as where y is written and quantized from there, and near those out of FP8."""
    module, x = mamba(norm_groups=groups, norm_before_gate=before, dtype=dtype), data(B, S, H, dtype=dtype)
    run = run_of(module, data(B, S, H, seed=2))
    with te.autocast(True, law):
        variables = filled(module, x)
        program = jax.jit(run).trace(variables, x)
        assert in_fp8(ops_in(program.jaxpr))
        got = program.lower().compile()(variables, x)
        monkeypatch.setattr(te_jax.flax._mixers, "quantizes_gated_norm", lambda *args: False)
        run = run_of(module, data(B, S, H, seed=2))  # another function, which jax has not traced
        program = jax.jit(run).trace(variables, x)
        assert not in_fp8(ops_in(program.jaxpr))
        want = program.lower().compile()(variables, x)
    wide = jax.jit(run)({"params": variables["params"]}, x)
    assert jax.tree.structure(got) == jax.tree.structure(want)
    rounding = float(jnp.finfo(dtype).eps) / 2
    if law.has_state:  # The amax is of f32: y was rounded before.
        for a, b in zip(*(jax.tree.leaves(tree[1][0].pop(te.FP8_COLLECTION)) for tree in (got, want)), strict=True):
            np.testing.assert_allclose(a, b, rtol=rounding + 16 * 2.0**-24)
    # Rounding to bf16 moves a number by 2**-9 in the mean, and the scale by 2**-8 at most. So one in 2**5 is on the
    # other side of the middle of two E4M3 numbers, and off by their distance, 2**-3 / 1.5 of it in the mean: together
    # by sqrt(2**-5) * 2**-3 / 1.5, 0.015. This, and as much again for sums of few terms. In f32 there are about none.
    assert max(errors(got, want).values()) < (0.03 if dtype == jnp.bfloat16 else 0.01)
    # A product's factors are off by 3 % in E4M3 and 6 % in E5M2 in the mean, and what it reads is of such a product.
    chosen = lambda y, params: (y, params["out"], params["norm_scale"])
    off = errors(*(chosen(tree[0], tree[1][0]["params"]) for tree in (got, wide)))
    assert max(off.values()) < 0.15


@pytest.mark.parametrize(("groups", "fused"), [(1, True), (2, True), (4, False)])
def test_blocks_that_cross_groups(groups, fused):
    """Several groups of channels that are no multiple of 128 are written and quantized from there."""
    module, x = mamba(ssm_head_dim=64, norm_groups=groups), data(B, S, H)
    with te.autocast(True, BLOCK):
        shapes = jax.eval_shape(module.init, KEY, x)
        assert in_fp8(ops_of(lambda v: module.apply(v, x)[0], shapes)) == fused


def test_a_policy_keeps_what_the_backward_pass_multiplies():
    """The norm runs once where its FP8 and its statistics are kept, else the backward pass computes it again."""
    module, x = mamba(dtype=jnp.bfloat16), data(B, S, H, dtype=jnp.bfloat16)

    def calls(**policy):
        loss = lambda p: jnp.sum(module.apply(p, x)[0].astype(jnp.float32))
        found = ops_of(jax.grad(jax.checkpoint(loss, **policy) if policy else loss), variables)
        return {name: len(each) for name, each in found.items()}

    with te.autocast(True, DELAYED):
        variables = quick_init(module.init)(KEY, x)
        once, twice = (dict(te_gated_norm_fwd=n, te_gated_norm_bwd=1) for n in (1, 2))
        assert [calls(), calls(policy=None), calls(policy=save(QUANTIZED))] == [once, twice, once]


def test_adapters_read_the_norm():
    """With low-rank adaptation of the output projection the norm is written, and state is where it was."""
    x = data(B, S, H, dtype=jnp.bfloat16)
    for scope, fused in (("all", False), ("output_proj", False), ("qkv_proj", True)):
        module = mamba(low_rank_adaptation_scope=scope, low_rank_adaptation_dim=2, dtype=jnp.bfloat16)
        with te.autocast(True, DELAYED):
            shapes = jax.eval_shape(module.init, KEY, x)
            assert in_fp8(ops_of(lambda v, module=module: module.apply(v, x)[0], shapes)) == fused
        assert set(shapes[te.FP8_COLLECTION]) == {"x", "z", "B", "C", "dt", "out"}
        assert ("lora_a_kernel" in shapes["params"]["out"]) != fused


@pytest.mark.parametrize(("other", "where"), [("enable_low_rank_adaptation", "fields"), ("operands", "call")])
def test_a_layer_and_what_would_read_the_inputs(other, where):
    given = {where: {other: True}}
    dense = te_flax.DenseGeneral(4, **given.get("fields", {}))
    call = dict(multiply=lambda x, *args, **kwargs: x) | given.get("call", {})
    with pytest.raises(ValueError, match=f"{other} is True, but multiply computes of the inputs"):
        jax.eval_shape(lambda: dense.init(KEY, jnp.ones((2, 3)), **call))


def test_an_excluded_projection():
    x = data(B, S, H, dtype=jnp.bfloat16)
    module = mamba(dtype=jnp.bfloat16)
    with te.autocast(True, recipe.DelayedScaling(exclude=("out",))):
        shapes = jax.eval_shape(module.init, KEY, x)
        assert not in_fp8(ops_of(lambda v: module.apply(v, x)[0], shapes))
    assert set(shapes[te.FP8_COLLECTION]) == {"x", "z", "B", "C", "dt"}


def test_nnx_and_decoding():
    """An NNX module, and a prompt with one more token behind it: the same bits as Linen, the norm in FP8."""
    x = data(B, S, H)
    fields = dict(ssm_num_heads=N, ssm_head_dim=P, ssm_state_size=16, ssm_num_groups=G)
    with te.autocast(True, DELAYED):
        module = te_nnx.Mamba2(in_features=H, **fields, rngs=nnx.Rngs(0))
        variables = te_nnx.to_linen(module)
        assert set(variables[te.FP8_COLLECTION]) == {"x", "z", "B", "C", "dt", "out"}
        linen = te_flax.Mamba2(**fields)
        np.testing.assert_array_equal(module(x)[0], linen.apply(variables, x)[0])
        step = lambda v, x: linen.apply(v, x, decode=True, mutable=["cache"])
        assert in_fp8(ops_of(step, variables, x[:, :1]))
        (first, _), cache = jax.jit(step)(variables, x[:, :-1])
        (last, _), _ = jax.jit(step)(variables | cache, x[:, -1:])
        whole = jax.jit(lambda v, x: linen.apply(v, x)[0])(variables, x)
    # The states are f32 in both; a number on the other side of the middle of two of FP8 is off by a step.
    assert max(errors(jnp.concatenate([first, last], 1), whole).values()) < 0.01


@pytest.mark.parametrize(
    ("kind", "groups", "sp"), [("auto", 2, False), ("auto", 1, True), ("auto", 2, True), ("explicit", 2, False)]
)
def test_devices_that_split_heads(kind, groups, sp):
    """Over two devices of tensor parallelism: with whole groups the norm is in FP8, and crosses no device; groups that
    devices share are plain JAX. The numbers of one device."""
    module = mamba(ssm_num_groups=groups, ssm_state_size=24, enable_sequence_parallel=sp)
    s, c = 12, N * P // 2  # of no other array
    x, dy = data(4, s, H), data(4, s, H, seed=2)
    with te.autocast(True, DELAYED):
        variables, run = filled(module, x), run_of(module, dy)
        want = jax.jit(run)(variables, x)
        types = (AxisType.Auto if kind == "auto" else AxisType.Explicit,) * 2
        mesh = jax.make_mesh((2, 2), ("dp", "tp"), axis_types=types)
        with jax.set_mesh(mesh), global_shard_guard(MeshResource(dp_resource="dp", tpsp_resource="tp")):
            place = lambda a, spec: jax.device_put(np.asarray(a), NamedSharding(mesh, spec))
            boxes = jax.eval_shape(lambda: module.init(KEY, x))["params"]
            rules = te_flax.extend_logical_axis_rules(())
            specs = jax.tree.map(
                lambda box: nn.logical_to_mesh_axes(box.names, rules),
                boxes,
                is_leaf=lambda leaf: isinstance(leaf, nn.Partitioned),
            )
            with nn.logical_axis_rules(rules):
                states = jax.tree.map(lambda a: place(a, PartitionSpec()), variables[te.FP8_COLLECTION])
                placed = {"params": jax.tree.map(place, variables["params"], specs), te.FP8_COLLECTION: states}
                args = placed, place(x, PartitionSpec("dp"))
                program = jax.jit(run).trace(*args)
                assert in_fp8(ops_in(program.jaxpr)) == (groups == 2)
                compiled = program.lower().compile()
                got = compiled(*args)
    # As in `test_nnx_and_decoding`; gradients pass five more products, and sums of devices.
    assert max(errors(got, want).values()) < 0.03
    if groups == 2:  # No device has the other's group: neither before the norm nor in FP8 behind it.
        text = compiled.as_text()
        assert f"[2,{s},1,{c}]" in text and f"[2,{s},2,{c}]" not in text and f"[2,2,{s},{c}]" not in text


@pytest.mark.parametrize("law", [None, CURRENT, BLOCK, MX], ids=lambda law: type(law).__name__)
def test_the_layer(law, rng):
    """`gated_norm_dense` with bias and residual, and with a kernel in FP8, against the norm and the product in f32."""
    h, p, f, g = 4, 64, 48, 2
    x, z, residual = (on_device(rng.standard_normal(s), jnp.float32) for s in ((3, 8, h, p), (3, 8, h, p), (3, 8, f)))
    gamma, kernel, bias = (on_device(rng.standard_normal(s), jnp.float32) for s in (h * p, (h * p, f), f))
    options = dict(groups=g, recipe=law)

    def both(layer):
        def run(*args):
            y, pull = jax.vjp(layer, *args)
            return y, pull(dy)

        return jax.jit(run)(x, z, gamma, kernel, bias, residual)

    dy = on_device(rng.standard_normal((3, 8, f)), jnp.float32)
    got = both(lambda *args: gated_norm_dense(*args, **options))

    def plain(x, z, gamma, kernel, bias, residual):
        y = gated_rmsnorm(x, z, gamma, groups=g).reshape(3, 8, h * p)
        return y @ kernel + bias + residual

    want = both(plain)
    # Products of two numbers in FP8, off by 3 % in the mean each.
    assert max(errors(got, want).values()) < (1e-5 if law is None else 0.08)
    if law is not None:
        q = quantize_kernel(kernel, recipe=law)
        y = jax.jit(lambda: gated_norm_dense(x, z, gamma, q, bias, residual, **options))()
        assert errors(y, got[0])[""] < 256 * 2.0**-24  # the same FP8; a sum of 256 terms in another order
