"""DiTBlock, and the adaptive norm and gated residual connection that it is made of, against plain JAX."""

import flax_reference as ref
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from flax import nnx
from flax_reference import data
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import te_jax as te
import te_jax.flax as te_flax
import te_jax.nnx as te_nnx
from te_jax import layers, recipe
from te_jax.sharding import MeshResource, global_shard_guard

pytestmark = pytest.mark.usefixtures("on_host")
KEY = jax.random.key(0)
B, S, C, H, F, N = 2, 6, 20, 32, 64, 4
SIZES = dict(hidden_size=H, mlp_hidden_size=F, num_attention_heads=N)
BLOCK = te_flax.DiTBlock(**SIZES)
# Five products of at most 64 terms in f32 and two norms behind each other; each adds a few roundings of 2**-24 of the
# largest value, and the gradients pass twice as many.
BOUND = 128 * 2.0**-24


def inputs(dtype=jnp.float32):
    """x, condition, and the gradient of the result."""
    return data(B, S, H, dtype=dtype), data(B, C, dtype=dtype, seed=2), data(B, S, H, dtype=dtype, seed=3)


def boxed(block=BLOCK):
    x, condition, _ = inputs()
    return ref.filled(jax.eval_shape(block.init, KEY, x, condition)["params"])


def close(got, want, bound=BOUND):
    for (path, a), b in zip(jax.tree_util.tree_leaves_with_path(got), jax.tree.leaves(want), strict=True):
        atol = bound * np.abs(b).max(initial=1.0)  # terms are of order 1 where their sum is less
        np.testing.assert_allclose(a, b, rtol=0, atol=atol, err_msg=jax.tree_util.keystr(path))


def plain_norm(x, kind="layernorm"):
    x = x if kind == "rmsnorm" else x - jnp.mean(x, -1, keepdims=True)
    return x / jnp.sqrt(jnp.mean(x**2, -1, keepdims=True) + 1e-6)


def reference(p, x, condition):
    """The block of section 3.2 of the paper, from the block's parameters."""
    moved = jnp.einsum("bc,cnh->nbh", condition / (1 + jnp.exp(-condition)), p["condition_kernel"])
    moved = moved[:, :, None] + p["condition_bias"][:, None, None]
    adapted = lambda x, shift, scale: plain_norm(x) * (1 + scale) + shift
    own = p["attention"]
    qkv = jnp.einsum("bsh,hnd->nbsd", adapted(x, *moved[:2]), own["qkv"]["kernel"]) + own["qkv"]["bias"][:, None, None]
    q, k, v = qkv.reshape(3, B, S, N, H // N)
    probabilities = jax.nn.softmax(jnp.einsum("bshd,bthd->bhst", q, k) / (H / N) ** 0.5, -1)
    y = jnp.einsum("bhst,bthd->bshd", probabilities, v).reshape(B, S, H)
    x = x + moved[2] * (y @ own["out"]["kernel"] + own["out"]["bias"])
    own = p["mlp"]
    z = jax.nn.gelu(adapted(x, *moved[3:5]) @ own["wi_kernel"][:, 0] + own["wi_bias"][0], approximate=True)
    return x + moved[5] * (z @ own["wo_kernel"] + own["wo_bias"])


def with_gradients(call):
    """(params, x, condition, dy) -> the result, the gradients of all three."""

    def run(*args):
        *args, dy = args
        y, vjp = jax.vjp(call, *args)
        return y, *vjp(dy)

    return jax.jit(run)


apply = with_gradients(lambda params, *args: BLOCK.apply({"params": params}, *args))


def test_layers_against_plain_jax():
    """Rows of the batch and whole arrays, both norms, of bf16: f32 inside, and one rounding of each result."""
    x, y, dy = (data(B, 3, S, H, dtype=jnp.bfloat16, seed=seed) for seed in range(3))
    rows = [data(B, H, dtype=dtype, seed=4) for dtype in (jnp.float32, jnp.bfloat16)]
    shift, whole = rows[0], data(B, 3, S, H, seed=5)
    wide = lambda a: a.astype(jnp.float32) if a.ndim == 4 else a.astype(jnp.float32)[:, None, None]
    cases = {}
    for kind in ("layernorm", "rmsnorm"):
        for name, scale in (("rows", rows[1]), ("whole", whole)):
            got = lambda x, shift, scale, kind=kind: layers.adaptive_layernorm(x, shift, scale, norm=kind)
            want = lambda x, shift, scale, kind=kind: plain_norm(wide(x), kind) * (1 + wide(scale)) + wide(shift)
            cases[kind, name] = got, want, (x, shift, scale)
    for name, gate in (("rows", rows[1]), ("whole", whole)):
        want = lambda x, y, gate: wide(x) + wide(gate) * wide(y)
        cases["residual", name] = layers.gated_residual, want, (x, y, gate)

    @jax.jit
    def run(cases_args, dy):
        def of(call, args):
            out, vjp = jax.vjp(lambda *args: call(*args).astype(jnp.bfloat16), *args)
            return out, *vjp(dy)

        return {key: [of(call, cases_args[key]) for call in cases[key][:2]] for key in cases}

    for key, (got, want) in run({key: case[2] for key, case in cases.items()}, dy).items():
        for a, b in zip(got, want, strict=True):
            assert a.dtype == b.dtype, key
            # In f32 both differ by a few 2**-24, so that one bf16 rounding may fall on the other side: one ulp, 2**-7.
            np.testing.assert_allclose(*(np.asarray(v, np.float64) for v in (a, b)), rtol=2**-7, atol=1e-5, err_msg=key)


def test_block_against_plain_jax():
    """Forward and all gradients in Linen; in NNX the same bits; at initialization the identity, and gradients
    reach what is 0."""
    arrays = inputs()
    params = ref.unboxed(boxed())
    assert ref.shapes(params)["condition_kernel"] == (C, 6, H) and params["attention"].keys() == {"qkv", "out"}
    assert params["mlp"].keys() == {"wi_kernel", "wi_bias", "wo_kernel", "wo_bias"}, "no norm has parameters"
    got = apply(params, *arrays)
    close(got, with_gradients(reference)(params, *arrays))

    block = te_nnx.DiTBlock(**SIZES, condition_features=C, rngs=nnx.Rngs(1))
    fresh = te_nnx.to_linen(block)["params"]
    assert not fresh["condition_kernel"].any() and not fresh["condition_bias"].any()
    y, grads, *_ = apply(fresh, *arrays)
    np.testing.assert_array_equal(y, arrays[0])
    assert all(np.abs(grads["condition_kernel"][:, i]).max() > 0.1 for i in (2, 5)), "the gates learn at once"
    held = nnx.state(block, nnx.Param)
    nnx.replace_by_pure_dict(held, params)
    nnx.update(block, held)
    call = nnx.jit(lambda block, x, condition, dy: with_gradients(lambda x, c: block(x, c))(x, condition, dy))
    for a, b in zip(call(block, *arrays), (got[0], *got[2:]), strict=True):
        np.testing.assert_array_equal(a, b)


def test_in_fp8():
    """Near bf16; only the projection of the condition is not in FP8; under a recipe with state it has none."""
    *arrays, dy = inputs(jnp.bfloat16)
    params = jax.tree.map(lambda a: a.astype(jnp.bfloat16), ref.unboxed(boxed()))

    def call(params, *args):
        return BLOCK.apply({"params": params}, *args)

    @jax.jit
    def run(*args):
        out = []
        for each in (None, recipe.Float8CurrentScaling()):
            with te.autocast(each is not None, each):
                y, vjp = jax.vjp(call, *args)
                out.append((y, vjp(dy)[0]))
        return out

    (want, plain), (y, grads) = run(params, *arrays)
    # An E4M3 number is off by 2**-4 / sqrt(3) = 3.6 % at most; two operands, four products, two behind each other in
    # each branch: 3.6 % * sqrt(2 * 4) = 10 % of what the branches add, and residual connections carry the rest.
    assert 0 < ref.relative_error(y, want) < 0.1
    assert jax.tree.all(jax.tree.map(lambda a, b: ref.relative_error(a, b) < 0.5, grads, plain))  # E5M2, small sums
    with te.autocast(True, recipe.Float8CurrentScaling()):
        explained = te.explain_fp8(call, params, *arrays)
    reasons = {p.why for p in explained.products if p.path == "" and not p.in_fp8}
    assert reasons == {"the projection of a condition is never in FP8"}, explained
    with te.autocast(True, recipe.DelayedScaling()):
        state = jax.eval_shape(BLOCK.init, KEY, *arrays)[te.FP8_COLLECTION]
    assert state.keys() == {"attention", "mlp"}


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_on_a_mesh(kind):
    """dp 2 x tp 2: tensor parallelism divides the condition's kernel, too."""
    arrays, held = inputs(), boxed()
    params = ref.unboxed(held)
    want = apply(params, *arrays)
    mesh = jax.make_mesh((2, 2), ("dp", "tp"), axis_types=(kind,) * 2)
    with jax.set_mesh(mesh), global_shard_guard(MeshResource(dp_resource="dp", tp_resource="tp")):
        rules = te_flax.extend_logical_axis_rules(())
        with nn.logical_axis_rules(rules):
            specs = nn.logical_to_mesh_sharding(nn.get_partition_spec(held), mesh, rules)
            assert specs["condition_kernel"].spec == PartitionSpec(None, None, "tp")
            placed = jax.tree.map(jax.device_put, params, specs)
            got = apply(placed, *(jax.device_put(a, NamedSharding(mesh, PartitionSpec("dp"))) for a in arrays))
    close(got, want)


def test_refused():
    x, condition, _ = inputs()
    params = {"params": ref.unboxed(boxed())}
    for args, message in (
        ((x, condition[:1]), r"DiTBlock: condition has shape \(1, 20\), but x \(2, 6, 32\).*\[2, c\]"),
        ((x, x), r"DiTBlock: condition has shape \(2, 6, 32\)"),
        ((x, condition[:, 1:]), r"DiTBlock: parameter condition_kernel has shape \(20, 6, 32\)"),
        ((x[..., 1:], condition), r"DiTBlock: x has shape \(2, 6, 31\), but hidden_size is 32"),
    ):
        with pytest.raises(ValueError, match=message):
            jax.eval_shape(BLOCK.apply, params, *args)
    with pytest.raises(TypeError, match="DiTBlock: condition is int32"):
        BLOCK.apply(params, x, jnp.zeros((B, C), jnp.int32))
    with pytest.raises(ValueError, match="hidden_size=32 does not split into num_attention_heads=5"):
        te_nnx.DiTBlock(**SIZES | dict(num_attention_heads=5), rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match=r"scale has shape \(2, 31\), but x \(2, 6, 32\); pass \(2, 32\) or"):
        layers.adaptive_layernorm(x, x[:, 0], x[:, 0, 1:])
    with pytest.raises(ValueError, match=r"gate has shape \(6, 32\)"):
        layers.gated_residual(x, x, x[0])
