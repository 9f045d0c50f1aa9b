"""Products in FP8 inside of Flax's own modules: `te_jax.layers.dot_general` and the classes around it."""

import functools
import warnings
from functools import partial

import flax
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from flax.linen.fp8_ops import OVERWRITE_WITH_GRADIENT as OVERWRITE
from flax.linen.fp8_ops import Fp8DirectDotGeneralOp
from flax.training import train_state
from jax import lax
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from quick_init import quick_init
from recipe_cases import near
from states import data

import te_jax as te
import te_jax.flax as te_flax
from te_jax import layers, recipe
from te_jax.core import check

KEY, RNG = jax.random.key(0), np.random.default_rng(0)
DELAYED = recipe.DelayedScaling(amax_history_len=4)
STATELESS = (
    recipe.Float8CurrentScaling(),
    recipe.FixedScaling(),
    recipe.Float8BlockScaling(),
    recipe.MXFP8BlockScaling(),
)
CLS = te_flax.make_dot_general_cls(DELAYED)
OF_CLS = {
    "TEWrapper_dot_general_0": {
        f"{tensor}_{leaf}": shape
        for tensor in ("x", "kernel", "grad")
        for leaf, shape in (("scale", (1,)), ("amax_history", (4,)))
    }
}


# -- the product --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dims", [((2,), (0,)), ((1, 2), (0, 1)), ((2, 1), (1, 2)), ((0,), (2,))])
def test_any_axes_are_contracted(dims):
    """Operands of small integers are exact in E4M3 at a scale of 1, and so is each sum."""
    sizes = {1: (5, 7, 3), 2: (4, 3, 6)}[len(dims[0])]
    lhs, shape = RNG.integers(-3, 4, sizes), [2, 5, 4]
    for a, b in zip(*dims):
        shape[b] = sizes[a]
    rhs = RNG.integers(-3, 4, shape)
    lhs, rhs = (jnp.asarray(a, jnp.float32) for a in (lhs, rhs))
    exact = recipe.FixedScaling(kernel_scale=1.0, grad_scale=1.0)
    want, want_vjp = jax.vjp(lambda *a: lax.dot_general(*a, (dims, ((), ()))), lhs, rhs)
    got, vjp = jax.vjp(lambda *a: layers.dot_general(*a, (dims, ((), ())), recipe=exact), lhs, rhs)
    np.testing.assert_array_equal(got, want)
    dy = jnp.asarray(RNG.integers(-2, 3, want.shape), jnp.float32)
    jax.tree.map(np.testing.assert_array_equal, vjp(dy), want_vjp(dy))


def test_dtypes_of_the_result():
    lhs, rhs = jnp.full((2, 3), 1.0625, jnp.bfloat16), jnp.full((3, 4), 1.125, jnp.bfloat16)
    run = partial(layers.dot_general, dimension_numbers=(((1,), (0,)), ((), ())), recipe=recipe.FixedScaling())
    assert run(lhs, rhs).dtype == jnp.bfloat16
    wide = run(lhs, rhs, preferred_element_type=jnp.float32)
    # 1.0625 is a tie between 1 and 1.125, and goes to the even one, 1; the sum 3.375 is exact either way.
    assert wide.dtype == jnp.float32 and (wide == 3.375).all()
    assert run(lhs.astype(jnp.float32), rhs).dtype == jnp.float32
    assert run(lhs.astype(jnp.float32), rhs, preferred_element_type=jnp.bfloat16).dtype == jnp.bfloat16
    sums = jnp.full((2, 300), 1.0, jnp.bfloat16), jnp.full((300, 4), 1.0, jnp.bfloat16)
    assert (run(*sums, preferred_element_type=jnp.float32) == 300).all()  # bf16 has no 300 + 1, so also:
    odd = sums[0].at[0, 0].set(2.0), sums[1]
    assert run(*odd, preferred_element_type=jnp.float32)[0, 0] == 301


def test_operands_without_free_axes():
    """An axis is put in and taken out: of the backward pass each product needs one, of block scaling all."""
    x, weight = data(RNG, 256), data(RNG, 256, 3)
    for rule in (recipe.Float8BlockScaling(), recipe.Float8CurrentScaling()):
        run = jax.jit(partial(layers.dot_general, dimension_numbers=(((0,), (0,)), ((), ())), recipe=rule))
        for w in (weight, weight[:, 0]):
            y, vjp = jax.vjp(run, x, w)
            dx, dw = vjp(jnp.ones_like(y))
            assert y.shape == w.shape[1:] and (dx.shape, dw.shape) == (x.shape, w.shape)
            np.testing.assert_allclose(y, x @ w, atol=2.0**-4 * float(jnp.linalg.norm(x)) * float(jnp.linalg.norm(w)))


def test_what_a_product_refuses():
    x = jnp.ones((2, 3, 4))
    run = partial(layers.dot_general, x, x, recipe=recipe.FixedScaling())
    for dims in ((((2,), (2,)), ((0,), (0,))), (((), ()), ((), ()))):
        with pytest.raises(ValueError, match=r"te_jax.layers.dot_general: dimension_numbers is .*; use jax.lax"):
            run(dims)
    run = partial(run, (((2,), (2,)), ((), ())))
    for precision in ("highest", lax.Precision.HIGH, (None, "highest")):
        with pytest.raises(ValueError, match="precision is .*; leave it None"):
            run(precision=precision)
    for precision in (None, "default", lax.Precision.DEFAULT, (lax.Precision.DEFAULT, None)):
        run(precision=precision)


# -- in Flax's modules --------------------------------------------------------------------------------------------


class Net(nn.Module):
    """A transformer of one layer, of only Flax's modules."""

    dot: type | None = None

    @nn.compact
    def __call__(self, tokens):
        x = nn.Embed(16, 32)(tokens)
        attention = nn.MultiHeadDotProductAttention(2, qkv_dot_general_cls=self.dot, out_dot_general_cls=self.dot)
        x = x + attention(nn.LayerNorm()(x), mask=nn.make_causal_mask(tokens))
        y = nn.gelu(nn.Dense(64, dot_general_cls=self.dot)(nn.LayerNorm()(x)))
        x = x + nn.Dense(32, dot_general_cls=self.dot)(y)
        return nn.DenseGeneral(16, dot_general_cls=self.dot)(x)


def losses(model, rule):
    """(variables before, losses) of a training whose tokens count up by 3 or 5."""
    rng = np.random.default_rng(7)
    starts, strides = rng.integers(0, 16, (8, 1)), rng.choice([3, 5], (8, 1))
    tokens = jnp.asarray((starts + strides * np.arange(13)) % 16)

    def loss(params, state):
        logits = model.apply({"params": params, **state}, tokens[:, :-1])
        return jnp.mean(optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]))

    variables = jax.jit(model.init)(KEY, tokens[:, :-1])
    state, params = flax.core.pop(variables, "params")
    tx = optax.adam(1e-2)

    @jax.jit
    def steps(params, state):
        def step(carry, _):
            params, state, moments = carry
            with te.autocast(rule is not None, rule):
                value, (grads, state) = te.value_and_grad(loss, (0, 1))(params, state)
            updates, moments = tx.update(grads, moments, params)
            return (optax.apply_updates(params, updates), state, moments), value

        return lax.scan(step, (params, state, tx.init(params)), length=25)[1]

    return variables, np.asarray(steps(params, state))


@functools.cache
def losses_in_f32(device):
    """On the device that is the default."""
    return losses(Net(), None)


@pytest.mark.parametrize("rule", [DELAYED, *STATELESS], ids=lambda rule: type(rule).__name__)
def test_a_transformer_learns(rule):
    """Its loss stays near the one in f32, with the tree and the values of parameters that Flax makes."""
    plain, want = losses_in_f32(jnp.zeros(()).device)
    variables, got = losses(Net(te_flax.make_dot_general_cls(rule)), rule)
    jax.tree.map(np.testing.assert_array_equal, variables["params"], plain["params"])
    assert set(variables) == {"params", *([OVERWRITE] if rule.has_state else [])}
    assert want[-1] < want[0] / 4, want
    # Each product is off by 2**-4 of its terms at most, some percent of the sum.
    assert abs(got - want).max() < 0.1 * want[0], (got, want)


def test_the_tree_of_the_state():
    state = jax.eval_shape(Net(CLS).init, KEY, jnp.zeros((1, 4), jnp.int32))[OVERWRITE]
    got = jax.tree.map(jnp.shape, state)
    assert got.pop("MultiHeadDotProductAttention_0") == dict.fromkeys(("query", "key", "value", "out"), OF_CLS)
    assert got == dict.fromkeys(("Dense_0", "Dense_1", "DenseGeneral_0"), OF_CLS)
    with te.autocast(recipe=DELAYED):
        by_autocast = jax.eval_shape(nn.Dense(8, dot_general_cls=te_flax.DotGeneral).init, KEY, jnp.ones((2, 4)))
    assert set(by_autocast[OVERWRITE]) == {"DotGeneral_0"}
    assert te_flax.make_dot_general_cls(recipe.DelayedScaling(amax_history_len=4)) is CLS


@pytest.mark.parametrize("rule", [DELAYED, *STATELESS], ids=lambda rule: type(rule).__name__)
def test_bits_of_the_dense_module(rule):
    """Results, gradients and FP8 state are those of te_jax.flax.DenseGeneral, also in bf16 and over two axes."""
    x = data(RNG, 3, 5, 4, 32).astype(jnp.bfloat16)
    fields = dict(features=(6, 8), axis=(-2, -1), use_bias=False)
    with te.autocast(recipe=rule):
        own = te_flax.DenseGeneral(**fields, dtype=jnp.bfloat16)
        variables = nn.meta.unbox(own.init(KEY, x))
        of_flax = nn.DenseGeneral(**fields, dot_general_cls=te_flax.DotGeneral)
        params, state = variables["params"], variables.get("fp8_metas", {})

        @jax.jit
        def run(params, state, x):
            def of(module, in_collection):
                loss = lambda params, state, x: jnp.sum(
                    jnp.sin(module.apply({"params": params, **in_collection(state)}, x).astype(jnp.float32))
                )
                return jax.value_and_grad(loss, (0, 1, 2))(params, state, x)

            return of(own, lambda s: {"fp8_metas": s}), of(of_flax, lambda s: {OVERWRITE: {"DotGeneral_0": s}})

        want, got = run(params, state, x)
    jax.tree.map(np.testing.assert_array_equal, got, want)


class Twins(nn.Module):
    """One instance of the product, in two layers, the second of which sees 100 times as much."""

    @nn.compact
    def __call__(self, x):
        dot = CLS()
        y = nn.Dense(8, dot_general=dot, use_bias=False)(x)
        return nn.Dense(8, dot_general=dot, use_bias=False)(100 * x) + y


def newest(state, tensor="x"):
    (leaf,) = (leaf for path, leaf in jax.tree.leaves_with_path(state) if f"{tensor}_amax" in str(path[-1]))
    return np.asarray(leaf)[..., -1]


def step(model, x, grad=jax.grad, **kwargs):
    """The FP8 state after one step of `model`."""
    others, params = flax.core.pop(quick_init(model.init)(KEY, x, **kwargs), "params")
    loss = lambda state, params, x: jnp.mean(model.apply({"params": params, **state}, x, **kwargs) ** 2)
    return jax.jit(grad(loss))(others, params, x)


def test_uses_of_one_state_combine_by_max():
    x = data(RNG, 4, 16)
    top = float(jnp.max(jnp.abs(x)))
    assert newest(step(Twins(), x)) == pytest.approx(100 * top)

    class Twice(nn.Module):
        @nn.compact
        def __call__(self, x):
            layer = nn.remat(nn.Dense)(16, dot_general_cls=CLS)
            return layer(x) + layer(-3 * x)  # autodiff adds them up, but for te_jax.value_and_grad

    def grad(loss):
        def run(state, *args):
            with te.autocast(recipe=DELAYED):
                return te.value_and_grad(loss)(state, *args)[1]

        return run

    assert newest(step(Twice(), x, grad)) == pytest.approx(3 * top)


def test_scan_and_vmap():
    """Layers of a scan have a state each, examples of a vmap one together."""

    class Scanned(nn.Module):
        @nn.compact
        def __call__(self, x):
            body = lambda dense, x, _: (2 * dense(x), None)
            axes = {"params": 0, OVERWRITE: 0}
            scan = nn.scan(body, variable_axes=axes, split_rngs={"params": True}, length=3)
            return scan(nn.Dense(16, use_bias=False, dot_general_cls=CLS), x, None)[0]

    x = data(RNG, 4, 16)
    amaxes = newest(step(Scanned(), x))
    assert amaxes.shape == (3,) and amaxes[0] == jnp.max(jnp.abs(x)) and len(set(amaxes.tolist())) == 3
    dense = nn.Dense(8, dot_general_cls=CLS)
    variables = quick_init(dense.init)(KEY, x)
    loss = lambda variables: jnp.sum(jax.vmap(lambda x: dense.apply(variables, x))(x))
    assert newest(jax.jit(jax.grad(loss))(variables)[OVERWRITE]) == jnp.max(jnp.abs(x))


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=["auto", "explicit"])
def test_on_a_mesh(kind):
    """A column-parallel layer and a row-parallel one on 2 x 4 devices, with the state and the gradients of one."""

    class Mlp(nn.Module):
        @nn.compact
        def __call__(self, x):
            y = nn.Dense(32, use_bias=False, dot_general_cls=CLS, name="wi")(x)
            return nn.Dense(16, use_bias=False, dot_general_cls=CLS, name="wo")(jnp.sin(y))

    x, model = data(RNG, 8, 4, 16), Mlp()
    loss = lambda variables, x: jnp.mean(model.apply(variables, x) ** 2)
    variables = quick_init(model.init)(KEY, x)
    want = jax.jit(jax.value_and_grad(loss))(variables, x)
    mesh = jax.make_mesh((2, 4), ("dp", "tp"), axis_types=(kind,) * 2)
    with jax.set_mesh(mesh):
        put = lambda a, *spec: jax.device_put(a, NamedSharding(mesh, PartitionSpec(*spec)))
        params = variables["params"]
        wi, wo = put(params["wi"]["kernel"], None, "tp"), put(params["wo"]["kernel"], "tp")
        state = jax.tree.map(put, variables[OVERWRITE])
        sharded = {"params": {"wi": {"kernel": wi}, "wo": {"kernel": wo}}, OVERWRITE: state}
        got = jax.jit(jax.value_and_grad(loss))(sharded, put(x, "dp"))
    jax.tree.map(near, got, want)


def test_where_a_sharding_is_asked_for():
    mesh = jax.make_mesh((2,), ("tp",), axis_types=(AxisType.Explicit,))
    with jax.set_mesh(mesh):
        x = jax.device_put(data(RNG, 4, 16), NamedSharding(mesh, PartitionSpec(None, "tp")))
        weight = jax.device_put(data(RNG, 16, 8), NamedSharding(mesh, PartitionSpec("tp")))
        run = lambda x, w: layers.dot_general(
            x, w, (((1,), (0,)), ((), ())), out_sharding=PartitionSpec("tp"), recipe=recipe.FixedScaling()
        )
        assert jax.jit(run)(x, weight).sharding.spec == PartitionSpec("tp", None)


# -- which recipe, and where the state lives ----------------------------------------------------------------------


def test_which_recipe_counts():
    x = data(RNG, 4, 16)
    dense = nn.Dense(8, dot_general_cls=CLS)
    variables = quick_init(dense.init)(KEY, x)
    plain = nn.Dense(8).apply({"params": variables["params"]}, x)
    narrow = dense.apply(variables, x)
    assert (narrow != plain).any()
    with te.autocast(recipe=recipe.FixedScaling()):
        np.testing.assert_array_equal(dense.apply(variables, x), narrow)
    with te.autocast(False):
        np.testing.assert_array_equal(dense.apply(variables, x), plain)
    out = te_flax.make_dot_general_cls(
        recipe.DelayedScaling(amax_history_len=4, exclude=("DotGeneral_0", "TEWrapper*"))
    )
    np.testing.assert_array_equal(nn.Dense(8, dot_general_cls=out).apply(variables, x), plain)
    by_autocast = nn.Dense(8, dot_general_cls=te_flax.make_dot_general_cls(None))
    np.testing.assert_array_equal(by_autocast.apply({"params": variables["params"]}, x), plain)
    with te.autocast(recipe=recipe.DelayedScaling(margin=1)):
        with pytest.raises(ValueError, match="`TEWrapper_dot_general_0`: its recipe is .*use one"):
            dense.apply(variables, x)
    with pytest.raises(TypeError, match="make_dot_general_cls: quantization_recipe is .*pass an instance"):
        te_flax.make_dot_general_cls(recipe.DelayedScaling)


def test_products_that_are_not_in_fp8_say_so_once():
    x = data(RNG, 2, 4, 16)
    batched = nn.DenseGeneral(8, batch_dims=(0,), dot_general_cls=CLS)
    check.told.clear()
    with pytest.warns(UserWarning, match="a product is not in FP8: it has batch axes") as said:
        variables = batched.init(KEY, x)
        batched.apply(variables, x)
    assert len(said) == 1 and set(variables) == {"params"}
    np.testing.assert_array_equal(batched.apply(variables, x), nn.DenseGeneral(8, batch_dims=(0,)).apply(variables, x))
    with pytest.warns(UserWarning, match="not in FP8: an operand is int32"):
        y = CLS().apply({}, jnp.ones((2, 3), int), jnp.ones((3, 4), int), (((1,), (0,)), ((), ())))
    assert y.dtype == jnp.int32
    with warnings.catch_warnings(action="error"), te.autocast(False):
        batched.apply(variables, x)


def test_a_function_with_two_products():
    def f(generate_quantizer_set, x, a, b):
        y = layers.dense(x, a, **generate_quantizer_set("_0")._asdict())
        return layers.dense(y, b, **generate_quantizer_set("_1")._asdict())

    module = te_flax.wrap_function_in_te_state_module(f, DELAYED, "mlp")()
    x, a, b = data(RNG, 4, 16), data(RNG, 16, 8), data(RNG, 8, 4)
    variables = module.init(KEY, x, a, b)
    assert set(variables) == {OVERWRITE} and len(variables[OVERWRITE]) == 12
    assert type(module).__name__ == "TEWrapper_mlp"
    state = jax.grad(lambda v: module.apply(v, x, a, b).sum())(variables)
    assert newest(state, "x_0") == jnp.max(jnp.abs(x)) and newest(state, "kernel_1") == jnp.max(jnp.abs(b))
    wrong = te_flax.wrap_function_in_te_state_module(lambda generate: generate("qkv"), DELAYED, "f")
    with pytest.raises(ValueError, match="TEWrapper_f: postfix is 'qkv'; pass"):
        wrong().init(KEY)
    grouped = lambda rule: te_flax.wrap_function_in_te_state_module(
        lambda generate: generate(n_groups=3).checkpoint, rule, None, "mine"
    )()
    assert grouped(recipe.FixedScaling()).apply({}) == "mine"
    with pytest.raises(ValueError, match="n_groups is 3, but DelayedScaling has state"):
        grouped(DELAYED).apply({})


def test_state_of_own_modules_in_the_other_collection():
    """Nothing else changes: results, the law, training states, reports, conversion."""
    x, model = data(RNG, 4, 16), te_flax.DenseGeneral(8)

    def loss(params, fp8, factor):
        variables = {"params": params, **fp8}
        return jnp.mean(model.apply(variables, factor * x) ** 2 + model.apply(variables, 3 * x))

    @jax.jit
    def run(x):
        others, params = flax.core.pop(nn.meta.unbox(model.init(KEY, x)), "params")
        state = te_flax.TrainState.create(apply_fn=model.apply, params=params, tx=optax.sgd(0.1), collections=others)
        _, grads = state.accumulate_gradients(loss, jnp.arange(1.0, 3.0))
        state = state.apply_gradients(grads=grads)
        converted = te.convert_fp8_metas(state.fp8, recipe.DelayedScaling(amax_history_len=7))
        return others, state.params, te.fp8_stats(state), [state.fp8, converted, te.fp8_probes(state.fp8)]

    results = []
    for name in ("fp8_metas", OVERWRITE):
        with te.autocast(recipe=DELAYED, collection=name):
            *equal, trees = run(x)
            assert set(equal[0]) == {name} and all(set(tree) == {name} for tree in trees)
            with te.autocast(False):  # keeps the collection of the outer one
                assert not te.fp8.current_recipe() and te.fp8.state_collection() == name
        results.append((equal[1:], [tree[name] for tree in trees]))
    assert newest(trees[0]) == 3 * jnp.max(jnp.abs(x))
    jax.tree.map(np.testing.assert_array_equal, *results)
    assert te.convert_fp8_metas(trees[0], recipe.FixedScaling()) == {}
    with pytest.raises(ValueError, match="autocast: collection is 'params'; pass None or one of"):
        te.autocast(recipe=DELAYED, collection="params")


def test_beside_modules_of_te_jax():
    """The state of a model may be in both collections, or by an autocast in one."""

    class Both(nn.Module):
        @nn.compact
        def __call__(self, x):
            return nn.Dense(4, dot_general_cls=te_flax.DotGeneral)(te_flax.DenseGeneral(8)(x))

    @jax.jit
    def step(x):
        others, params = flax.core.pop(nn.meta.unbox(Both().init(KEY, x)), "params")
        state = te_flax.TrainState.create(apply_fn=None, params=params, tx=optax.sgd(0.1), collections=others)
        loss = lambda params, fp8: jnp.mean(Both().apply({"params": params, **fp8}, x) ** 2)
        return state.apply_gradients(grads=te.value_and_grad(loss, (0, 1))(state.params, state.fp8)[1]).fp8

    x = data(RNG, 4, 16)
    with te.autocast(recipe=DELAYED):
        apart = step(x)
    assert newest(apart["fp8_metas"]) == jnp.max(jnp.abs(x)) and newest(apart[OVERWRITE]) > 0
    for name in apart:
        with te.autocast(recipe=DELAYED, collection=name):
            together = step(x)
        assert set(together) == {name}
        want = {**apart["fp8_metas"], **apart[OVERWRITE]}
        jax.tree.map(np.testing.assert_array_equal, together[name], want)


def test_in_the_training_state_of_flax():
    """Flax's step overwrites the collection with its gradient, as a loop that pops it does."""
    x, model = data(RNG, 8, 16), nn.Dense(8, dot_general_cls=CLS)
    start = train_state.TrainState.create(
        apply_fn=model.apply, params=quick_init(model.init)(KEY, x), tx=optax.adamw(1e-2)
    )
    grads = jax.jit(jax.grad(lambda variables: jnp.mean(start.apply_fn(variables, x) ** 2)))(start.params)
    after = start.apply_gradients(grads=grads)
    assert newest(after.params[OVERWRITE]) == jnp.max(jnp.abs(x))
    masked = te_flax.fp8_masked(optax.adamw(1e-2))
    updates, _ = jax.jit(lambda grads, params: masked.update(grads, masked.init(params), params))(grads, start.params)
    assert not any(leaf.any() for leaf in jax.tree.leaves(updates[OVERWRITE]))
    with pytest.raises(ValueError, match="params holds the collection _overwrite_with_gradient"):
        te.optim.adamw_fp8(1e-2).init(start.params)


def test_beside_products_of_flax():
    class Both(nn.Module):
        @nn.compact
        def __call__(self, x):
            return nn.Dense(8, dot_general_cls=CLS)(nn.Dense(16, dot_general_cls=Fp8DirectDotGeneralOp)(x))

    x, model = data(RNG, 4, 16), Both()
    variables = quick_init(model.init)(KEY, x)
    state = jax.jit(jax.grad(lambda v: model.apply(v, x).sum()))(variables)[OVERWRITE]["Dense_0"]
    assert newest(state) > 0
    with te.autocast(recipe=DELAYED), pytest.raises(ValueError, match="holds state of Flax's FP8 products"):
        te.value_and_grad(lambda v: model.apply(v, x).sum())(variables)
