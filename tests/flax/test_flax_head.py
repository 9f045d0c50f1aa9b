"""LMHead in Linen and NNX: logits, loss, FP8 state, and where logical axis rules put tokens and words."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from arrays import on_device
from flax import linen as nn
from flax import nnx
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from quick_init import quick_init

import te_jax as te
import te_jax.flax as te_flax
import te_jax.nnx as te_nnx
from te_jax.layers import linear_cross_entropy
from te_jax.sharding import extend_logical_axis_rules, global_shard_guard

H, V = 16, 34
RECIPE = te.recipe.DelayedScaling(amax_history_len=4)
FIELDS = dict(label_smoothing=0.1, z_loss=1e-2, logit_softcap=5.0, ignore_index=3)


@pytest.fixture
def data(rng):
    return on_device(rng.normal(size=(4, 6, H)), jnp.float32), rng.integers(0, V, (4, 6))


def test_logits_and_loss(data):
    """The loss is that of the logits; a kernel of the caller's takes the parameter's place."""
    x, labels = data
    head = te_flax.LMHead(V, **FIELDS)
    variables = nn.unbox(quick_init(head.init)(jax.random.key(0), x))
    assert jax.tree.map(jnp.shape, variables) == {"params": {"kernel": (V, H)}}
    kernel = 8 * variables["params"]["kernel"]  # beyond the cap
    variables = {"params": {"kernel": kernel}}
    z, loss = head.apply(variables, x), head.apply(variables, x, labels)
    assert z.dtype == jnp.float32 and z.shape == (4, 6, V) and 4 < jnp.max(jnp.abs(z)) < 5
    lse = jax.nn.logsumexp(z, -1)
    label = jnp.take_along_axis(z, labels[..., None], -1)[..., 0]
    each = lse - 0.9 * label - 0.1 * jnp.mean(z, -1) + 1e-2 * lse**2
    counted = labels != 3
    np.testing.assert_allclose(loss, jnp.sum(each * counted) / jnp.sum(counted), rtol=2.0**-20)
    tokens = head.apply(variables, x, labels, reduction="none")
    np.testing.assert_allclose(tokens, each * counted, rtol=2.0**-18, atol=2.0**-18)
    np.testing.assert_array_equal(head.apply({}, x, labels, kernel=kernel), loss)
    low = te_flax.LMHead(V, dtype=jnp.bfloat16, params_dtype=jnp.float32).apply(variables, x)
    assert low.dtype == jnp.float32
    with pytest.raises(ValueError, match="kernel is passed, but the parameters hold one too"):
        head.apply(variables, x, kernel=kernel)
    with pytest.raises(ValueError, match="LMHead: labels has the shape"):
        head.apply(variables, x, labels[:2])


def test_fp8_state_and_exclude(data):
    """The loss of the functional layer under the same recipe; `exclude` leaves it out, without state."""
    x, labels = data

    class Model(nn.Module):
        @nn.compact
        def __call__(self, x, labels):
            return te_flax.LMHead(V, name="lm_head")(x, labels)

    with te.autocast(recipe=RECIPE):
        variables = nn.unbox(quick_init(Model().init)(jax.random.key(0), x, labels))
        grads = jax.jit(jax.grad(Model().apply))(variables, x, labels)
        te_head = te_nnx.LMHead(H, V, rngs=nnx.Rngs(0))
    state = te.update_fp8_metas(grads)["fp8_metas"]["lm_head"] if "fp8_metas" in grads else {}
    kernel = variables["params"]["lm_head"]["kernel"]
    seen = {name: leaf.max() for name, leaf in state.items() if name.endswith("history")}
    assert seen["x_amax_history"] == jnp.abs(x).max() and seen["kernel_amax_history"] == jnp.abs(kernel).max()
    assert 0.9 < seen["grad_amax_history"] <= 1
    with te.autocast(recipe=RECIPE):
        want = Model().apply(variables, x, labels)
        te_head.kernel[...] = kernel
        np.testing.assert_array_equal(te_head(x, labels), want)
    assert want != linear_cross_entropy(x, kernel, labels, words_first=True)
    with te.autocast(recipe=te.recipe.DelayedScaling(amax_history_len=4, exclude=("lm_head",))):
        plain = Model().apply({"params": variables["params"]}, x, labels)
        assert set(jax.eval_shape(Model().init, jax.random.key(0), x, labels)) == {"params"}
    np.testing.assert_array_equal(plain, linear_cross_entropy(x, kernel, labels, words_first=True))


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=str)
def test_mesh(data, kind):
    """With a MeshResource the words of one device are its own: no product has all of them."""
    x, labels = data
    head = te_flax.LMHead(V)
    boxed = quick_init(head.init)(jax.random.key(0), x)
    run = jax.value_and_grad(lambda p, x, labels: head.apply(p, x, labels))
    want = jax.jit(run)(nn.unbox(boxed), x, labels)
    z = jax.jit(head.apply)(nn.unbox(boxed), x)
    mesh = jax.make_mesh((2, 2, 2), ("dp", "fsdp", "tp"), axis_types=(kind,) * 3)
    resource = te.MeshResource(dp_resource="dp", fsdp_resource="fsdp", tp_resource="tp")
    with jax.set_mesh(mesh), global_shard_guard(resource):
        rules = extend_logical_axis_rules(()) if kind == AxisType.Auto else ()
        put = lambda a, spec: jax.device_put(a, jax.NamedSharding(mesh, spec))
        args = (
            {"params": {"kernel": put(nn.unbox(boxed)["params"]["kernel"], P("tp", "fsdp"))}},
            put(x, P(("dp", "fsdp"))),
            put(labels, P(("dp", "fsdp"))),
        )
        with nn.logical_axis_rules(rules):
            compiled = jax.jit(run).lower(*args).compile()
            got, logits = compiled(*args), jax.jit(head.apply)(*args[:2])
    for a, b in zip(jax.tree.leaves((got, logits)), jax.tree.leaves((want, z))):
        np.testing.assert_allclose(a, b, atol=2.0**-20 * np.abs(b).max())
    assert f"f32[6,{V // 2}]" in compiled.as_text() and f",{V}]" not in compiled.as_text()
