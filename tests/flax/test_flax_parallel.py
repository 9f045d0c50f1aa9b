"""TransformerLayer with parallel_attention_mlp: numbers, tree, dropout, scan, FP8, sharding, errors."""

import operator
from functools import partial

import flax
import flax_reference as ref
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from flax_reference import data
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from quick_init import quick_init

import te_jax as te
import te_jax.flax as te_flax
from te_jax import recipe

KEY = jax.random.key(0)
H, F, N, B, S = 16, 24, 4, 2, 6
RECIPE = recipe.DelayedScaling(amax_history_len=4)
SHARED = dict(parallel_shared_layernorm=True)
FALCON_7B = SHARED | dict(num_gqa_groups=1, enable_rotary_pos_emb=True)

# Compiling these programs takes the time; LLVM's optimizations are most of it, and they run once.
_OPTIONS = {"xla_backend_optimization_level": 0} if jax.default_backend() == "cpu" else None
jit = partial(jax.jit, compiler_options=_OPTIONS)


def layer(**fields):
    quiet = dict(hidden_dropout=0.0, attention_dropout=0.0, parallel_attention_mlp=True)
    return te_flax.TransformerLayer(
        **{"hidden_size": H, "mlp_hidden_size": F, "num_attention_heads": N, **quiet, **fields}
    )


def drawn(module, x):
    return ref.unboxed(ref.filled(jax.eval_shape(module.init, KEY, x)["params"]))


def reference(x, p, g=None, rope=None):
    """x + attention(norm(x)) + mlp(norm(x)) in float64; the MLP takes attention's norm where it has none."""
    y, normed = ref.mha(x, p["attention"], N, g, masked=ref.causal(S, S), rope=rope)
    z, _ = ref.mlp(x if "scale" in p["mlp"] else normed, p["mlp"])
    return x + y + z


@pytest.mark.parametrize(
    ("fields", "equation"),
    [
        (dict(use_bias=True), {}),
        (SHARED | dict(use_bias=True), {}),
        (SHARED | dict(fuse_qkv_params=False), {}),
        (dict(num_gqa_groups=2), dict(g=2)),
        (FALCON_7B, dict(g=1, rope={})),
    ],
    ids=str,
)
def test_layer(fields, equation):
    module, x = layer(**fields), data(B, S, H)
    params = drawn(module, x)
    want = reference(ref.f64(x), ref.f64(params), **equation)
    # Values reach 30: each of the two sums rounds at 30 * 2**-24, the products before them a few times that.
    np.testing.assert_allclose(jit(module.apply)({"params": params}, x), want, rtol=1e-4, atol=1e-4)
    flipped = layer(transpose_batch_sequence=True, **fields)
    got = jit(flipped.apply)({"params": params}, jnp.swapaxes(x, 0, 1))
    np.testing.assert_allclose(jnp.swapaxes(got, 0, 1), want, rtol=1e-4, atol=1e-4)


def test_tree():
    """The tree of the layer whose parts follow each other; a shared norm stays attention's."""
    shapes = lambda module: ref.shapes(jax.eval_shape(module.init, KEY, data(B, S, H))["params"])
    for fields in ({}, dict(num_gqa_groups=2, use_bias=True, layernorm_type="rmsnorm")):
        want = shapes(layer(parallel_attention_mlp=False, **fields))
        assert shapes(layer(**fields)) == want
        want["mlp"] = {name: shape for name, shape in want["mlp"].items() if name not in ("scale", "ln_bias")}
        assert shapes(layer(**fields, **SHARED)) == want


@pytest.mark.parametrize("fields", [{}, SHARED], ids=str)
def test_one_dropout_and_one_drop_path_for_the_sum(fields):
    x = data(400, S, H)
    params = drawn(layer(**fields), x)

    def added(**more):
        module = layer(dropout_rng_name="mine", **fields, **more)
        return np.asarray(jit(module.apply)({"params": params}, x, rngs={"mine": KEY}) - x)

    still, dropped, skipped = added(), added(hidden_dropout=0.5), added(drop_path=0.5)
    kept = np.abs(dropped) > 1e-5
    np.testing.assert_allclose(dropped, np.where(kept, 2 * still, 0), rtol=1e-4, atol=1e-4)
    assert abs(kept.mean() - 0.5) < 0.013  # of 38400: 5 sigma
    kept = np.abs(skipped).max((1, 2), keepdims=True) > 1e-5
    np.testing.assert_allclose(skipped, np.where(kept, 2 * still, 0), rtol=1e-4, atol=1e-4)
    assert abs(kept.mean() - 0.5) < 0.125  # of 400: 5 sigma


def test_dropout_in_attention_and_mlp():
    x = data(B, S, H)
    params = drawn(layer(), x)
    run = lambda **fields: jit(layer(**fields).apply)({"params": params}, x, rngs={"dropout": KEY})
    still = run()
    for rate in ("attention_dropout", "intermediate_dropout"):
        assert not np.allclose(run(**{rate: 0.5}), still, atol=1e-3)


class Scanned(nn.Module):
    """Two layers, each of which runs again in the backward pass."""

    fields: dict

    @nn.compact
    def __call__(self, x):
        body = nn.remat(lambda module, x, _: (module(x), None), prevent_cse=False)
        scan = nn.scan(
            body,
            variable_axes={"params": 0, "fp8_metas": 0},
            length=2,
            split_rngs={"params": True},
            metadata_params={nn.PARTITION_NAME: "layers"},
        )
        return scan(layer(**self.fields, name="layer"), x, None)[0]


@pytest.mark.parametrize(("fields", "fp8"), [({}, False), (FALCON_7B, True)], ids=str)
def test_a_rematted_scan_is_its_layers_one_by_one(fields, fp8):
    x = data(B, S, H)
    scanned, one = Scanned(fields), layer(**fields)

    def by_hand(variables, x):
        for i in range(2):
            x = one.apply(jax.tree.map(operator.itemgetter(i), variables), x)
        return x

    with te.autocast(fp8, RECIPE):
        variables = ref.unboxed(quick_init(scanned.init)(KEY, x))
        whole = lambda v, x: (scanned.apply({c: {"layer": leaves} for c, leaves in v.items()}, x) ** 2).mean()
        parts = lambda v, x: (by_hand(v, x) ** 2).mean()
        variables = {collection: leaves["layer"] for collection, leaves in variables.items()}
        got = jit(jax.value_and_grad(whole, (0, 1)))(variables, x)
        want = jit(jax.value_and_grad(parts, (0, 1)))(variables, x)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5), got, want)


# -- FP8 -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fields", [dict(use_bias=True), SHARED, FALCON_7B], ids=str)
def test_fp8(fields):
    dtype = jnp.bfloat16
    module, x = layer(dtype=dtype, **fields), data(B, S, H, dtype=dtype)
    with te.autocast(True, RECIPE):
        others, params = flax.core.pop(ref.unboxed(jit(module.init)(KEY, x)), "params")
        projections = ("query", "kv") if "num_gqa_groups" in fields else ("qkv",)
        gemms = [(f"attention/{name}/", "") for name in (*projections, "out")] + [("mlp/", "_0"), ("mlp/", "_1")]
        leaves = [f"{t}{{}}_{leaf}" for t in ("x", "kernel", "grad") for leaf in ("scale", "amax_history")]
        want = {scope + leaf.format(postfix) for scope, postfix in gemms for leaf in leaves}
        assert set(flax.traverse_util.flatten_dict(others["fp8_metas"], sep="/")) == want

        def loss(params, others, x):
            y = module.apply({"params": params, **others}, x)
            return (y.astype(jnp.float32) ** 2).mean(), y

        run = jit(jax.value_and_grad(loss, argnums=(0, 1, 2), has_aux=True))
        for _ in range(2):
            (_, y), (grads, others, dx) = run(params, others, x)
            others = te.update_fp8_metas(others)
    metas = flax.traverse_util.flatten_dict(others["fp8_metas"], sep="/")
    assert all(np.isfinite(leaf).all() and (leaf != 1).all() for name, leaf in metas.items() if "scale" in name)
    (_, plain), plain_grads = jit(jax.value_and_grad(loss, argnums=(0, 2), has_aux=True))(params, {}, x)
    # e4m3 has 3 bits: a relative error of 2**-4 / sqrt(3) per value = 3.6 %, e5m2 twice that; gradients pass a few.
    assert y.dtype == dtype and ref.relative_error(y, plain) < 0.05
    for got, exact in zip(jax.tree.leaves((grads, dx)), jax.tree.leaves(plain_grads), strict=True):
        assert got.dtype == dtype and ref.relative_error(got, exact) < 0.25


@pytest.mark.parametrize("fields", [{}, SHARED], ids=str)
def test_no_addition_in_the_forward_pass(fields):
    """Under FP8 attention and residual are operands of the GEMMs."""
    module, x = layer(**fields), data(B, S, H, dtype=jnp.bfloat16)
    with te.autocast(True, RECIPE):
        variables = jax.eval_shape(module.init, KEY, x)
        text = jax.jit(module.apply).trace(variables, x).lower(lowering_platforms=("cuda",)).as_text()
    adds = [line for line in text.splitlines() if "stablehlo.add" in line and f"{B}x{S}x{H}x" in line]
    assert "te_gemm" in text and not adds, "\n".join(adds)


# -- sharding ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("fields", "fp8"), [({}, True), (SHARED, False), (SHARED, True)], ids=str)
def test_sequence_parallel_on_a_mesh(fields, fp8):
    """dp 2 x fsdp 2 x tp 2 by logical rules: the numbers of one device."""
    module, x = layer(enable_sequence_parallel=True, **fields), data(4, S, H)

    def loss(params, others, x):
        return (module.apply({"params": params, **others}, x) ** 2).mean()

    with te.autocast(fp8, RECIPE):
        others, params = flax.core.pop(quick_init(module.init)(KEY, x), "params")
        run = jax.value_and_grad(loss, argnums=(0, 1, 2))
        want = jit(run)(ref.unboxed(params), others, x)
        mesh = jax.make_mesh((2, 2, 2), ("dp", "fsdp", "tp"), axis_types=(AxisType.Auto,) * 3)
        resource = te.MeshResource(dp_resource="dp", fsdp_resource="fsdp", tpsp_resource="tp")
        with jax.set_mesh(mesh), te.autocast(fp8, RECIPE, resource):
            rules = te_flax.extend_logical_axis_rules(())
            specs = nn.logical_to_mesh_sharding(nn.get_partition_spec(params), mesh, rules)
            placed = jax.tree.map(jax.device_put, ref.unboxed(params), specs)
            x = jax.device_put(x, NamedSharding(mesh, PartitionSpec("fsdp")))
            with nn.logical_axis_rules(rules):
                got = jit(run)(placed, others, x)
    # FP8: sums of another order may cross an edge between two FP8 numbers here and there.
    bound = 2e-2 if fp8 else 1e-5
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert ref.relative_error(a, b) < bound


# -- errors --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        (SHARED | dict(parallel_attention_mlp=False), "parallel_shared_layernorm is True, but .* is False; set both"),
        (dict(layer_type="decoder"), 'parallel_attention_mlp is True, but layer_type is "decoder"; use "encoder"'),
        (dict(output_layernorm=True), "parallel_attention_mlp and output_layernorm are both True; set one"),
        (
            SHARED | dict(apply_residual_connection_post_layernorm=True),
            "parallel_attention_mlp and apply_residual_connection_post_layernorm are both True",
        ),
    ],
    ids=lambda value: None if isinstance(value, dict) else value.split(" ")[0],
)
def test_errors(fields, text):
    module, x = layer(**fields), data(B, S, H)
    with pytest.raises(ValueError, match="^TransformerLayer: " + text):
        module.init(KEY, x, x if "layer_type" in fields else None)


def test_parameters_of_a_norm_that_is_not_there():
    x = data(B, S, H)
    params = drawn(layer(), x)
    with pytest.raises(ValueError, match="hold `mlp/scale`, but parallel_shared_layernorm is True; set it False"):
        layer(**SHARED).apply({"params": params}, x)
