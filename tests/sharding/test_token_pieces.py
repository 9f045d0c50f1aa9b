"""`MeshResource.tpsp_pieces`: the bits of products that multiply all tokens at once, and their bytes; only tokens of
fprop and dgrad cross in pieces."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from flax import nnx
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from jaxprs import equations
from sharded import KINDS, RECIPE, SMALL, check_same_bits, on_mesh

import te_jax as te
import te_jax.flax as te_flax
import te_jax.nnx as te_nnx
from te_jax import recipe
from te_jax.layers import dense, layernorm_dense, layernorm_mlp
from te_jax.ops.attention import SequenceDescriptor
from te_jax.sharding import collectives

pytestmark = pytest.mark.usefixtures("on_host")


def counts(found, least: int) -> dict:
    """{(kind, type): (number, bytes)} of what crosses tp."""
    return {key[:2]: row for key, row in collectives.table(found, least).items() if key[2] == "tp"}


@pytest.mark.parametrize("kind,pieces", [("auto", 2), ("auto", 4), ("explicit", 4)])
def test_bits_and_bytes(kind, pieces):
    """A device has two rows of the batch: two pieces are rows, four are parts of the sequence."""
    where = "layer", "dp-fsdp-tp-sp", kind, RECIPE, jnp.bfloat16
    (got, found), (want, before) = on_mesh(*where, tpsp_pieces=pieces), on_mesh(*where)
    check_same_bits(got, want)
    due, whole = counts(before, SMALL), {("all-gather", "f8e4m3fn"): 2}  # x for wgrad
    cut = {key: (pieces * (n - whole.get(key, 0)) + whole.get(key, 0), size) for key, (n, size) in due.items()}
    assert counts(found, SMALL // pieces) == cut


def resources():
    return [te.MeshResource(dp_resource="dp", tpsp_resource="tp", tpsp_pieces=pieces) for pieces in (1, 2)]


def mesh_of(kind):
    return jax.make_mesh((2, 2), ("dp", "tp"), axis_types=(KINDS[kind],) * 2)


FORMS = ("auto", recipe.Float8CurrentScaling()), ("explicit", recipe.Float8BlockScaling())


@pytest.mark.parametrize("kind,form", FORMS, ids=["current", "block"])
def test_functions_scan_and_remat(kind, form):
    """Blocks of 128 that a device has whole. Rows [s, b, h], whose first axis tensor parallelism splits."""
    b, s, h, f, depth = 4, 8, 256, 512, 2
    draw = lambda seed, *shape: jax.random.normal(jax.random.key(seed), shape, jnp.bfloat16)
    mesh, tokens = mesh_of(kind), P("tp", "dp")
    place = lambda a, *spec: jax.device_put(np.asarray(a), NamedSharding(mesh, P(*spec)))
    wi, wo = draw(1, depth, h, 2, f) / 16, draw(2, depth, f, h) / 16
    weights = place(draw(0, depth, h)), place(wi, None, None, None, "tp"), place(wo, None, "tp")
    x = place(draw(3, s, b, h), *tokens)
    axes = dict(tokens=tokens, grad_spec=P(None, "dp", None), middle_spec=P(None, "dp", "tp")) if kind == "auto" else {}
    options = dict(activations=("silu", "linear"), norm="rmsnorm", residual=True, recipe=form, **axes)

    def loss(x, weights):
        layer = jax.checkpoint(lambda x, w: (layernorm_mlp(x, w[0], None, *w[1:], **options), None))
        return jnp.sum(jax.lax.scan(layer, x, weights)[0].astype(jnp.float32) ** 2)

    results = []
    for resource in resources():
        with jax.set_mesh(mesh), te.sharding.global_shard_guard(resource):
            step = jax.jit(jax.value_and_grad(loss, (0, 1)))
            program, found = collectives.compiled(step, x, weights, mesh=mesh)
            results.append((program(x, weights), counts(found, 1024)))
    (want, before), (got, after) = results
    check_same_bits(got, want)
    assert sum(n for n, _ in after.values()) > sum(n for n, _ in before.values())


def test_nnx():
    """A layer of NNX under logical axis rules, packed rows."""
    mesh, b, s, h = mesh_of("auto"), 4, 8, 32
    x = np.random.default_rng(0).normal(size=(b, s, h)).astype(jnp.bfloat16)
    x = jax.device_put(x, NamedSharding(mesh, P("dp", "tp")))
    fields = dict(hidden_size=h, mlp_hidden_size=64, num_attention_heads=4, enable_sequence_parallel=True)
    fields |= dict(hidden_dropout=0.0, attention_dropout=0.0)
    segments = jnp.repeat(jnp.arange(1, 3), s // 2)[None].repeat(b, 0)
    packed = SequenceDescriptor.from_segment_ids_and_pos(segments)
    results = []
    for resource in resources():
        with jax.set_mesh(mesh), te.autocast(True, recipe.Float8CurrentScaling(), resource):
            with nn.logical_axis_rules(te_flax.extend_logical_axis_rules(())):
                graph, params, rest = nnx.split(te_nnx.TransformerLayer(**fields, rngs=nnx.Rngs(0)), nnx.Param, ...)

                def loss(params, x, graph=graph, rest=rest):
                    y = nnx.merge(graph, params, rest)(x, attention_mask=packed, deterministic=True)
                    return jnp.sum(y.astype(jnp.float32) ** 2)

                program, found = collectives.compiled(jax.jit(jax.value_and_grad(loss, (0, 1))), params, x, mesh=mesh)
                results.append((program(params, x), counts(found, 128)))
    (want, before), (got, after) = results
    check_same_bits(got, want)
    assert after["reduce-scatter", "bf16"][0] == 2 * before["reduce-scatter", "bf16"][0]


def test_products_write_where_pieces_lie():
    """Products of gathered pieces do; each scattered sum has an array of its own."""
    x, wi, wo, gamma = (jnp.zeros(shape, jnp.bfloat16) for shape in ((4, 8, 32), (32, 1, 64), (64, 32), (32,)))
    specs = dict(tokens=P("dp", "tp"), grad_spec=P("dp", None, None), middle_spec=P("dp", None, "tp"))
    mlp = lambda wi, x: jnp.sum(layernorm_mlp(x, gamma, None, wi, wo, norm="rmsnorm", recipe=CURRENT, **specs))
    with jax.set_mesh(mesh_of("auto")), te.sharding.global_shard_guard(resources()[1]):
        found = list(equations(jax.make_jaxpr(jax.value_and_grad(mlp, (0, 1)))(wi, x).jaxpr))
    names = "te_gemm", "te_gemm_sum", "te_gemm_into"
    calls = [(eqn.primitive.name, eqn.params.get("entry")) for eqn in found if eqn.primitive.name in names]
    gathered, wo_fprop, wi_dgrad, wi_wgrad = (
        [("te_gemm_into", 0), ("te_gemm_into", 1)], [("te_gemm", None)] * 2, [("te_gemm_sum", None)] * 2,
        [("te_gemm", None)],
    )  # fmt: skip
    assert calls == gathered + wo_fprop + gathered + wi_dgrad + wi_wgrad
    named = [eqn.params["name"] for eqn in found if eqn.primitive.name == "name"]
    assert named.count("te_gemm") == 5  # entries are named once, together, for policies


def test_pieces_are_a_positive_integer():
    with pytest.raises(ValueError, match="MeshResource: tpsp_pieces is 0"):
        te.MeshResource(tpsp_pieces=0)
    with pytest.raises(TypeError, match="MeshResource: tpsp_pieces is '2'"):
        te.MeshResource(tpsp_pieces="2")


CURRENT = recipe.Float8CurrentScaling()


def gradients(call, *operands):
    return jax.jit(jax.grad(lambda *a: jnp.sum(call(*a).astype(jnp.float32)), (0, 1))).lower(*operands)


@pytest.mark.parametrize("pieces, rows, tokens", [(3, 8, 4), (2, 4, 9)])
def test_tokens_that_are_not_divided(pieces, rows, tokens):
    """By the pieces, and by tensor parallelism."""
    x, w, gamma = (jnp.zeros(shape, jnp.bfloat16) for shape in ((rows, tokens, 32), (32, 64), (32,)))
    layer = lambda x, w: layernorm_dense(x, w, gamma, None, norm="rmsnorm", recipe=CURRENT, tokens=P("dp", "tp"))[0]
    resource = te.MeshResource(dp_resource="dp", tpsp_resource="tp", tpsp_pieces=pieces)
    with jax.set_mesh(mesh_of("auto")), te.sharding.global_shard_guard(resource):
        text = rf"tpsp_pieces is {pieces}, which tokens \({rows}, {tokens}\) .* multiplied at once"
        with pytest.warns(UserWarning, match=text):
            gradients(layer, x, w)


def test_no_tokens():
    x, w = jnp.zeros((4, 0, 32), jnp.bfloat16), jnp.zeros((32, 64), jnp.bfloat16)
    with jax.set_mesh(mesh_of("auto")), te.sharding.global_shard_guard(resources()[1]):
        gradients(lambda x, w: dense(x, w, recipe=CURRENT, tokens=P("dp", "tp")), x, w)


def test_whole_features_of_split_kernels():
    """On an Explicit mesh: x's tokens are gathered, and y's gradient, too, but not in pieces."""
    mesh = mesh_of("explicit")
    draw = lambda seed, shape, *spec: jax.device_put(
        jax.random.normal(jax.random.key(seed), shape, jnp.bfloat16), NamedSharding(mesh, P(*spec))
    )
    x, w, out = draw(0, (4, 8, 32), "dp", "tp"), draw(1, (32, 64), None, "tp"), draw(2, (4, 8, 64), "dp")
    results = []
    for resource in resources():
        with jax.set_mesh(mesh), te.sharding.global_shard_guard(resource):
            results.append(gradients(lambda x, w: dense(x, w, out=out, recipe=CURRENT), x, w).compile()(x, w))
    check_same_bits(*results)


def test_pieces_need_an_axis():
    with pytest.raises(ValueError, match="MeshResource: tpsp_pieces is 2, but tpsp_resource None"):
        te.MeshResource(dp_resource="dp", tpsp_pieces=2)
