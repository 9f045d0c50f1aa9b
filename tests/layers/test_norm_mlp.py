"""layernorm_mlp against its three layers one after the other, and residual connections inside of kernels."""

import itertools
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from jaxprs import equations
from layer_cases import data, fresh_state, observed
from quick_init import quick_init

import te_jax as te
import te_jax.flax as te_flax
from te_jax.layers import Projection, dense, layernorm_dense, layernorm_mlp
from te_jax.ops.activation import activation
from te_jax.recipe import DelayedScaling, Float8CurrentScaling

RECIPE, RECIPE_NOW = DelayedScaling(amax_history_len=4), Float8CurrentScaling()
ACTIVATIONS = [("gelu",), ("silu", "linear"), ("squared_relu",), ("clamped_silu", "clamped_linear")]
H, F, OUT = 24, 20, 24


def composed(x, gamma, beta, wi, wo, bi, bo, residual, metas, recipe, names, norm):
    """The same function, layer by layer. In f32 nothing is rounded between the layers, so all bits agree."""
    z, _ = layernorm_dense(x, wi, gamma, beta, bi, norm=norm, recipe=recipe, metas=metas[0])
    y = dense(activation(z, names), wo, bo, recipe=recipe, metas=metas[1])
    return y + x if residual else y


def fused(x, gamma, beta, wi, wo, bi, bo, residual, metas, recipe, names, norm):
    return layernorm_mlp(x, gamma, beta, wi, wo, bi, bo, activations=names, norm=norm, residual=residual,
                         recipe=recipe, metas=metas)  # fmt: skip


def close(got, want):
    """f32 throughout: sums of up to 64 terms in another order, each term as large as the largest result."""
    got, want = np.asarray(got), np.asarray(want)
    np.testing.assert_allclose(got, want, rtol=2e-6, atol=64 * 2.0**-24 * np.abs(want).max(initial=0))


def close_but_for_steps(got, want):
    """The fused activation is compiled otherwise than by itself, on a GPU it is another kernel: where their f32 noise
    crosses a rounding boundary, a byte differs by a step, 2**-3 of its value. Of some 300 bytes a few do, each
    1 / sqrt(300) of the norm."""
    got, want = np.asarray(got, np.float64), np.asarray(want, np.float64)
    assert np.linalg.norm(got - want) <= 2.0**-6 * np.linalg.norm(want)


def operands(rng, slots, norm, biases=True, lead=(3, 5), dtype=jnp.float32):
    x, gamma, beta, wi, wo = data(rng, (*lead, H), (H,), (H,), (H, slots, F), (F, OUT), dtype=dtype)
    bi, bo = data(rng, (slots, F), (OUT,), dtype=dtype) if biases else (None, None)
    return x, gamma, None if norm == "rmsnorm" else beta, wi, wo, bi, bo


def settled(args, names, norm, recipe=RECIPE):
    """Scales that fit the data: after one step."""
    return value_and_grads(args, (fresh_state(), fresh_state()), fused, True, recipe, names, norm)[1][1]


def loss(args, states, layer, residual, recipe, names, norm):
    metas = tuple(observed(s, recipe) for s in states)
    y = layer(*args, residual, metas, recipe, names, norm)
    return jnp.sum(y.astype(jnp.float32) * weights_of(y))


def weights_of(y):
    """f32: what each number of a result counts in the loss."""
    return jnp.cos(jnp.arange(y.size, dtype=jnp.float32)).reshape(y.shape)


value_and_grads = jax.jit(jax.value_and_grad(loss, (0, 1)), static_argnums=(2, 3, 4, 5, 6))


@partial(jax.jit, static_argnums=(2, 3))
def composed_both(args, states, names, norm):
    """{residual: value and gradients} of the layers one by one. The addition of x to the last result is an addition to
    the gradient of x, so that one pass through the layers serves both."""
    metas = lambda states: tuple(observed(s, RECIPE) for s in states)
    layers = lambda args, states: composed(*args, False, metas(states), RECIPE, names, norm)
    y, vjp = jax.vjp(layers, args, states)
    weights = weights_of(y)
    (dx, *others), dstates = vjp(weights)
    values = {False: jnp.sum(y * weights), True: jnp.sum((y + args[0]) * weights)}
    return {with_x: (value, ((dx + weights * with_x, *others), dstates)) for with_x, value in values.items()}


@partial(jax.jit, static_argnums=(2, 3))
def fused_both(args, states, names, norm):
    """The same of the fused layer, which adds inside of its kernels."""
    run = jax.value_and_grad(loss, (0, 1))
    return {residual: run(args, states, fused, residual, RECIPE, names, norm) for residual in (False, True)}


@pytest.mark.parametrize("names", ACTIVATIONS, ids="-".join)
@pytest.mark.parametrize("norm", ["layernorm", "rmsnorm"])
def test_equals_the_layers_one_by_one(names, norm, rng):
    """With and without a residual."""
    args = operands(rng, len(names), norm, biases=norm == "layernorm")
    states = fused_both(args, (fresh_state(), fresh_state()), names, norm)[True][1][1]
    got, want = (run(args, states, names, norm) for run in (fused_both, composed_both))
    exact = names == ("squared_relu",)
    for residual in (False, True):
        jax.tree.map(close if exact else close_but_for_steps, got[residual], tuple(want[residual]))
        assert all(float(s["grad"][1][-1]) > 0 for s in got[residual][1][1])


@pytest.mark.parametrize(
    "recipe", [RECIPE, None, DelayedScaling(amax_history_len=4, override_linear_precision=(True,) * 3)], ids=str
)
def test_another_residual_than_its_input(recipe, rng):
    """It is added as an addition outside would, and its gradient is only the output's."""
    args, names = operands(rng, 1, "layernorm"), ("gelu",)
    (other,) = data(rng, (3, 5, OUT))

    def run(layer):
        of = lambda *args: loss(args[:-1], states, layer, args[-1], recipe, names, "layernorm")
        return jax.jit(jax.value_and_grad(of, tuple(range(len(args) + 1))))(*args, other)

    states = (fresh_state(), fresh_state())
    outside = lambda *args: composed(*args[:7], False, *args[8:]) + args[7]
    (value, grads), (want, want_grads) = run(fused), run(outside)
    jax.tree.map(close_but_for_steps, (value, grads), (want, want_grads))


@pytest.mark.parametrize("override", list(itertools.product([False, True], repeat=3)), ids=str)
def test_precision_of_each_gemm(override, rng):
    recipe = DelayedScaling(amax_history_len=4, override_linear_precision=override)
    args, names, norm = operands(rng, 2, "layernorm"), ("silu", "linear"), "layernorm"
    states = settled(args, names, norm, recipe)
    run = lambda layer: value_and_grads(args, states, layer, True, recipe, names, norm)
    jax.tree.map(close, run(fused), run(composed))


def test_without_a_recipe(rng):
    x, gamma, _, wi, wo, bi, bo = operands(rng, 2, "rmsnorm", dtype=jnp.bfloat16)
    names = ("silu", "linear")

    def whole(x, gamma, wi, wo, bi, bo):
        return layernorm_mlp(x, gamma, None, wi, wo, bi, bo, activations=names, norm="rmsnorm", residual=True)

    def by_layers(x, gamma, wi, wo, bi, bo):
        z, _ = layernorm_dense(x, wi, gamma, None, bi, norm="rmsnorm")
        return dense(activation(z, names), wo, bo) + x

    args = x, gamma, wi, wo, bi, bo

    @partial(jax.jit, static_argnums=0)
    def run(layer, *args):
        y, vjp = jax.vjp(layer, *args)
        return y, vjp(y)

    jax.tree.map(np.testing.assert_array_equal, run(whole, *args), run(by_layers, *args))


def test_bf16_is_no_worse_than_the_layers_one_by_one(rng):
    """Against the gradients in f32 without FP8: quantized from f32, the activation is rounded once, not twice. The
    errors are those of FP8, some 10 %; they differ by the few values that the second rounding moves."""
    names, norm = ("gelu",), "layernorm"
    narrow = operands(rng, 1, norm, lead=(64,), dtype=jnp.bfloat16)
    wide = jax.tree.map(lambda a: a.astype(jnp.float32), narrow)
    states = settled(narrow, names, norm)
    plain = lambda *args: layernorm_mlp(*args[:7], activations=names, norm=norm, residual=True)
    exact = value_and_grads(wide, states, plain, True, RECIPE, names, norm)[1][0]
    error = {}
    for layer in (fused, composed):
        grads = value_and_grads(narrow, states, layer, True, RECIPE, names, norm)[1][0]
        pairs = [(np.ravel(a).astype(np.float32), np.ravel(b)) for a, b in zip(grads, exact)]
        error[layer] = sum(np.linalg.norm(a - b) / np.linalg.norm(b) for a, b in pairs)
    assert error[fused] <= 1.05 * error[composed]


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
@pytest.mark.parametrize("spec", [P("a"), P(("a", "b")), P("a", None, "b")], ids=str)
def test_on_a_mesh(kind, spec, rng, on_host):
    """Batch and sequence sharded in all ways: the values of one device, up to the order of sums over shards."""
    args, names, norm = operands(rng, 2, "layernorm", lead=(8, 4)), ("silu", "linear"), "layernorm"
    if len(spec) == 3:
        spec = P("a", "b")
    states = settled(args, names, norm)
    mesh = jax.make_mesh((4, 2), ("a", "b"), axis_types=(kind,) * 2)
    run = lambda args, states: value_and_grads(args, states, fused_f32, True, RECIPE, names, norm)
    want = run(args, states)
    with jax.set_mesh(mesh):
        put = lambda a: jax.device_put(a, NamedSharding(mesh, P()))
        sharded = (jax.device_put(np.asarray(args[0]), NamedSharding(mesh, spec)), *map(put, args[1:]))
        got = run(sharded, jax.tree.map(put, states))
    jax.tree.map(close, got, want)


def fused_f32(*args):
    y = fused(*args)
    mesh = jax.typeof(y).sharding.mesh
    return jax.sharding.reshard(y, P()) if AxisType.Explicit in mesh.axis_types else y


def test_errors(rng):
    x, gamma, beta, wi, wo, bi, bo = operands(rng, 1, "layernorm")
    with pytest.raises(
        ValueError, match=r"mlp: the last axes of the activation's output are \(20,\), but .* wo are \(21"
    ):
        layernorm_mlp(x, gamma, beta, wi, jnp.ones((21, OUT)), name="mlp")
    with pytest.raises(ValueError, match=r"mlp: wi_bias is \(3,\), but wi's features"):
        layernorm_mlp(x, gamma, beta, wi, wo, jnp.ones(3), name="mlp")
    with pytest.raises(TypeError, match="mlp: wo_bias is int32"):
        layernorm_mlp(x, gamma, beta, wi, wo, bi, bo.astype(int), name="mlp")
    with pytest.raises(ValueError, match="mlp: residual is"):
        layernorm_mlp(x, gamma, beta, wi, jnp.ones((F, 7)), residual=True, name="mlp")
    metas = (observed(fresh_state(), RECIPE),) * 2
    with pytest.raises(ValueError, match="tanh"):
        layernorm_mlp(x, gamma, beta, wi, wo, bi, bo, activations=("tanh",), recipe=RECIPE, metas=metas)
    with pytest.raises(ValueError, match="metas is None under DelayedScaling; pass a tuple of 2"):
        layernorm_mlp(x, gamma, beta, wi, wo, recipe=RECIPE)


@pytest.mark.parametrize("layer", ["dense", "norm_dense"])
def test_residual_of_one_layer(layer, rng):
    """The residual in the GEMM and its gradient in the norm: the same numbers as the additions outside."""
    x, w, gamma, beta, res = data(rng, (3, 5, H), (H, F), (H,), (H,), (3, 5, F))

    def inside(x, w, res, state):
        metas = observed(state, RECIPE)
        if layer == "dense":
            return dense(x, w, None, res, recipe=RECIPE, metas=metas), x
        y, _, through = layernorm_dense(x, w, gamma, beta, return_input=True, recipe=RECIPE, metas=metas)
        return y, through

    def outside(x, w, res, state):
        metas = observed(state, RECIPE)
        if layer == "dense":
            return dense(x, w, recipe=RECIPE, metas=metas) + res, x
        return layernorm_dense(x, w, gamma, beta, recipe=RECIPE, metas=metas)[0], x

    def run(fn):
        def loss(*args):
            y, through = fn(*args)
            return jnp.sum(jnp.sin(y)) + jnp.sum(jnp.cos(through))

        return jax.jit(jax.value_and_grad(loss, (0, 1, 2, 3)))(x, w, res, fresh_state())

    jax.tree.map(close, run(inside), run(outside))


def test_a_layer_holds_no_addition_of_its_residual():
    """TransformerLayer under FP8: residuals are operands of kernels, in both directions."""
    layer = te_flax.TransformerLayer(hidden_size=32, mlp_hidden_size=64, num_attention_heads=2, hidden_dropout=0.0,
                                     attention_dropout=0.0)  # fmt: skip
    x = jnp.ones((2, 16, 32), jnp.bfloat16)
    with te.autocast(True, RECIPE):
        variables = jax.eval_shape(layer.init, jax.random.key(0), x)
        run = lambda v, x: jax.vjp(lambda v, x: layer.apply(v, x), v, x)[1](x)
        text = jax.jit(run).trace(variables, x).lower(lowering_platforms=("cuda",)).as_text()
    adds = [line for line in text.splitlines() if "stablehlo.add" in line and "2x16x32x" in line]
    assert not adds, "\n".join(adds)


@pytest.mark.parametrize("with_ln_out", [False, True])
@pytest.mark.parametrize("override", [None, (False,) * 3, (True, True, False), (False, False, True)], ids=str)
def test_several_projections_of_one_norm(with_ln_out, override, rng):
    """Queries and keys of one norm: in f32 what two layers give that each quantize it for themselves."""
    recipe = override and DelayedScaling(amax_history_len=4, override_linear_precision=override)
    metas_of = lambda state: recipe and observed(state, recipe)
    x, gamma, beta, wq, wk, bk = data(rng, (3, 5, H), (H,), (H,), (H, F), (H, 2, 7), (2, 7))
    options = dict(return_layernorm_output=with_ln_out, recipe=recipe)

    def shared(x, gamma, beta, wq, wk, bk, states):
        also = (Projection(wk, bk, metas_of(states[1])),)
        metas = metas_of(states[0])
        (q, k), ln_out, through = layernorm_dense(x, wq, gamma, beta, metas=metas, also=also, return_input=True, **options)  # fmt: skip  # noqa: E501
        return q, k, ln_out, through

    def separate(x, gamma, beta, wq, wk, bk, states):
        q, ln_out = layernorm_dense(x, wq, gamma, beta, metas=metas_of(states[0]), **options)
        k, _ = layernorm_dense(x, wk, gamma, beta, bk, metas=metas_of(states[1]), recipe=recipe)
        return q, k, ln_out, x

    def run(fn, *args):
        def loss(*args):
            return sum(jnp.sum(jnp.sin((i + 1) * out)) for i, out in enumerate(fn(*args)) if out is not None)

        return jax.value_and_grad(loss, tuple(range(7)))(*args)

    both = jax.jit(lambda *args: (run(shared, *args), run(separate, *args)))
    states = (fresh_state(), fresh_state())
    for _ in range(2):
        got, want = both(x, gamma, beta, wq, wk, bk, states)
        jax.tree.map(close, got, want)
        states = want[1][6]


@pytest.mark.parametrize("residual", [False, True], ids=["plain", "residual"])
@pytest.mark.parametrize("recipe", [None, RECIPE], ids=["bf16", "fp8"])
def test_the_norms_gradient_takes_that_of_the_residual(recipe, residual):
    """In its kernel. Without a residual it gets none: an unused result would send it zeros."""
    layer, x = te_flax.LayerNormDenseGeneral(features=F), jnp.ones((4, H), jnp.bfloat16)
    with te.autocast(recipe is not None, recipe):
        variables = jax.eval_shape(layer.init, jax.random.key(0), x)
        results = lambda v, x: [a for a in layer.apply(v, x, return_input=residual) if a is not None]
        run = lambda v, x: jax.grad(lambda v, x: sum(map(jnp.sum, results(v, x))).astype(jnp.float32), (0, 1))(v, x)
        text = str(jax.make_jaxpr(run)(variables, x))
    (inputs,) = {line.split("inputs=")[1].split(")")[0] for line in text.split("te_norm_bwd[")[1:]}
    assert "rstd" in inputs and ("dres" in inputs) == residual


def test_inputs_that_are_not_placed_yet(rng, on_host):
    """Under `jax.set_mesh`, arrays that are on no device of it in particular."""
    args, names, norm = operands(rng, 1, "layernorm", lead=(8,)), ("gelu",), "layernorm"
    states = (fresh_state(), fresh_state())
    want = value_and_grads(args, states, fused, True, RECIPE, names, norm)
    with jax.set_mesh(jax.make_mesh((8,), ("a",), axis_types=(AxisType.Auto,))):
        got = value_and_grads(args, states, fused, True, RECIPE, names, norm)
    jax.tree.map(close, got, want)


def test_tensor_parallel_keeps_weight_gradients_in_shards():
    """Sequence parallel under logical rules: the fused MLP computes on the shards of F that its weights have."""
    mesh = jax.make_mesh((2, 4), ("dp", "tp"), axis_types=(AxisType.Auto,) * 2)
    layer = te_flax.TransformerLayer(hidden_size=64, mlp_hidden_size=128, num_attention_heads=4, hidden_dropout=0.0,
                                     attention_dropout=0.0, enable_sequence_parallel=True)  # fmt: skip
    x = jax.random.normal(jax.random.key(0), (4, 32, 64))
    resource = te.MeshResource(dp_resource="dp", tpsp_resource="tp")
    with jax.set_mesh(mesh), te.autocast(True, RECIPE, resource):
        rules = te_flax.extend_logical_axis_rules(())
        with nn.logical_axis_rules(rules):
            variables = quick_init(layer.init)(jax.random.key(0), x)
            specs = nn.logical_to_mesh_sharding(nn.get_partition_spec(variables), mesh, rules)
            variables = jax.device_put(nn.meta.unbox(variables), specs)
            x = jax.device_put(x, NamedSharding(mesh, P("dp", "tp")))
            grad = jax.grad(lambda v, x: jnp.sum(layer.apply(v, x) ** 2), (0, 1))
            text = jax.jit(grad).lower(variables, x).compile().as_text()
    reduced = [line for line in text.splitlines() if " all-reduce(" in line or " all-reduce-start(" in line]
    assert any("f32[64,1,32]" in line for line in reduced) and any("f32[32,64]" in line for line in reduced)
    assert not any("f32[64,1,128]" in line or "f32[128,64]" in line for line in reduced), "\n".join(reduced)


def test_middle_spec_may_leave_out_the_last_axes():
    """They are whole, as in any PartitionSpec: its last entry is not the hidden features'."""
    args = operands(np.random.default_rng(0), 2, "rmsnorm", lead=(4, 6))
    run = lambda *args: layernorm_mlp(*args, activations=("silu", "linear"), norm="rmsnorm", recipe=RECIPE_NOW,
                                      middle_spec=P("data"))  # fmt: skip
    with jax.set_mesh(jax.make_mesh((2,), ("data",), axis_types=(AxisType.Auto,))):
        traced = jax.make_jaxpr(run)(*args)
    found = [
        eqn.params["sharding"].spec for eqn in equations(traced.jaxpr) if eqn.primitive.name == "sharding_constraint"
    ]
    assert found == [P("data", None, None, None)]
