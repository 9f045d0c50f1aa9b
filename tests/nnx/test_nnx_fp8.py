"""FP8 state of te_jax.nnx: steps that are Linen's bit for bit, and what must not corrupt it."""

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from arrays import on_device
from flax import linen as nn
from flax import nnx, struct
from quick_init import quick_nnx
from states import restored, saved

import te_jax as te
import te_jax.flax as te_flax
import te_jax.nnx as te_nnx
from te_jax import recipe
from te_jax.core import loops

DELAYED = recipe.DelayedScaling(amax_history_len=3)
CURRENT = recipe.Float8CurrentScaling()
H = 32
LAYER = dict(hidden_size=H, mlp_hidden_size=48, num_attention_heads=2, hidden_dropout=0.0, attention_dropout=0.0)
SIZES = np.reshape([1.0, 9.0, 0.2], (3, 1, 1, 1))  # the second batch is the largest
BATCHES = on_device(np.random.default_rng(0).normal(size=(3, 2, 16, H)) * SIZES, jnp.bfloat16)
X = BATCHES[0]


def make(cls=None, *sizes, use=DELAYED, seed=0, **fields):
    cls, sizes = (cls, sizes) if cls else (te_nnx.DenseGeneral, (H, H))
    with te.autocast(use is not None, use):
        return quick_nnx(lambda: cls(*sizes, **fields, rngs=nnx.Rngs(seed)), seed)


def loss_of(model, x):
    out = model(x)
    return jnp.sum(jnp.square(out[0] if isinstance(out, tuple) else out).astype(jnp.float32))


def fp8_of(model) -> dict:
    return te_nnx.to_linen(model).get("fp8_metas", {})


def assert_same(tree, other):
    assert jax.tree.structure(tree) == jax.tree.structure(other)
    jax.tree.map(lambda a, b: np.testing.assert_array_equal(np.asarray(a), np.asarray(b)), tree, other)


def newest(model) -> dict:
    """The amax of the last step, by tensor."""
    return {name: leaf[..., -1] for name, leaf in fp8_of(model).items() if name.endswith("history")}


def step_of(loss=loss_of, use=DELAYED, **options):
    """jitted (model, x) -> (loss, gradients of the parameters)."""

    @nnx.jit
    def step(model, *args):
        with te.autocast(use is not None, use):
            return te_nnx.value_and_grad(loss, **options)(model, *args)

    return step


# -- the same as Linen -------------------------------------------------------------------------


@pytest.mark.parametrize(
    "use, cls, fields",
    [
        (DELAYED, te_nnx.TransformerLayer, LAYER),
        (CURRENT, te_nnx.LayerNormMLP, dict(intermediate_dim=48)),
        (None, te_nnx.LayerNormMLP, dict(intermediate_dim=48)),
    ],
    ids=["delayed", "current", "bf16"],
)
def test_steps_are_linens(use, cls, fields):
    """Losses, parameters, moments and FP8 state over three batches of different size of numbers."""
    tx = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-2))
    model = make(cls, *([] if fields is LAYER else [H]), use=use, **fields)
    optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)
    linen = cls.linen_type(**fields)
    collections = jax.tree.map(jnp.copy, te_nnx.to_linen(model))
    params = collections.pop("params")
    state = te_flax.TrainState.create(apply_fn=linen.apply, params=params, tx=tx, collections=collections)
    assert bool(state.fp8) == (use is DELAYED)

    @partial(nnx.jit, donate_argnums=(0, 1))
    def nnx_step(model, optimizer, x):
        with te.autocast(use is not None, use):
            loss, grads = te_nnx.value_and_grad(loss_of)(model, x)
        optimizer.update(model, grads)
        return loss, grads

    def linen_step(state, x):
        def loss_fn(params, fp8):
            return loss_of(partial(linen.apply, {"params": params, **fp8}), x)

        with te.autocast(use is not None, use):
            loss, grads = te.value_and_grad(loss_fn, (0, 1))(state.params, state.fp8)
            return state.apply_gradients(grads=grads), loss, grads[0]

    linen_step = jax.jit(linen_step)
    for x in BATCHES:
        loss, grads = nnx_step(model, optimizer, x)
        state, want, grads_want = linen_step(state, x)
        assert_same(loss, want)
        assert_same(nnx.to_pure_dict(grads), grads_want)
        assert_same(te_nnx.to_linen(model), {"params": state.params, **state.fp8})
    assert_same(jax.tree.leaves(nnx.state(optimizer.opt_state)), jax.tree.leaves(state.opt_state))


# -- what must not corrupt it ------------------------------------------------------------------


def test_only_value_and_grad_moves_it():
    """Calls, gradients of only parameters and calls outside of autocast do not; an optimizer does not see it."""
    model = make()
    before = fp8_of(model)
    optimizer = nnx.Optimizer(model, optax.adamw(1e-2), wrt=nnx.Param)

    @nnx.jit
    def careless(model, optimizer, x):
        with te.autocast(True, DELAYED):
            model(x)
            loss, grads = nnx.value_and_grad(loss_of)(model, x)
        optimizer.update(model, grads)
        loss, bf16 = te_nnx.value_and_grad(loss_of)(model, x)
        return grads, bf16

    for grads in careless(model, optimizer, X):
        assert set(nnx.to_pure_dict(grads)) == {"kernel", "bias"}
    assert_same(fp8_of(model), before)
    moments = nnx.to_flat_state(nnx.state(optimizer.opt_state))
    assert {path[-1] for path, _ in moments if len(path) > 2} == {"kernel", "bias"}
    step_of()(model, X)
    amax = float(jnp.max(jnp.abs(X)))
    np.testing.assert_array_equal(np.asarray(fp8_of(model)["x_amax_history"]), np.asarray([0, 0, amax], np.float32))
    np.testing.assert_allclose(fp8_of(model)["x_scale"], 448 / amax, rtol=1e-6)


@struct.dataclass
class Times:
    """A function whose number is traced."""

    factor: jax.Array

    def __call__(self, a):
        return self.factor * a


def test_with_aux_and_static_arguments():
    model = make()

    def loss(model, x, twice, name, *, by, half=True, root=None):
        y = model(x * 2 if twice else x)
        value = loss_of(lambda _: y, x) * by
        return (value / 2 if half else root(value)), {name: y}

    with te.autocast(True, DELAYED):
        run = te_nnx.value_and_grad(loss, has_aux=True, wrt=nnx.PathContains("kernel"))
        (halved, _), _ = run(make(), X, name="y", twice=True, by=jnp.float32(2), half=True)
        (value, aux), grads = run(model, X, True, "y", by=jnp.float32(2), half=False, root=jnp.sqrt)
        (doubled, _), _ = run(make(), X, True, "y", by=jnp.float32(2), half=False, root=Times(jnp.float32(2)))
    np.testing.assert_allclose(2 * halved, value**2, rtol=1e-6)
    np.testing.assert_allclose(doubled, 4 * halved, rtol=1e-6)
    assert set(aux) == {"y"} and aux["y"].dtype == X.dtype and set(nnx.to_pure_dict(grads)) == {"kernel"}
    assert float(newest(model)["x_amax_history"]) == 2 * float(jnp.max(jnp.abs(X)))


def test_of_a_state_too_only_what_was_asked_for_has_gradients():
    build = lambda: nnx.Dict(layer=make(), count=nnx.BatchStat(jnp.int32(3)))
    graph, state = nnx.split(build())
    run = te_nnx.value_and_grad(lambda part, x: loss_of(part.layer, x), wrt=nnx.PathContains("kernel"))
    run_of_state = te_nnx.value_and_grad(
        lambda state, x: loss_of(nnx.merge(graph, state).layer, x), wrt=nnx.PathContains("kernel")
    )
    model = build()
    with te.autocast(True, DELAYED):
        value, grads = run(model, X)
        value_of_state, grads_of_state = run_of_state(state, X)
    assert_same([value, nnx.to_pure_dict(grads)], [value_of_state, nnx.to_pure_dict(grads_of_state)])
    assert_same(nnx.to_pure_dict(nnx.state(model)), nnx.to_pure_dict(state))


def test_state_of_what_the_loss_does_not_call_stays():
    model = nnx.Dict(used=make(), idle=make())
    step_of(lambda model, x: loss_of(model["used"], x))(model, X)  # from step to step
    before = fp8_of(model)
    step_of(lambda model, x: loss_of(model["idle"], x))(model, X)
    after = fp8_of(model)
    assert_same(after["used"], before["used"])
    assert_same(after["idle"], before["used"])


def uses():
    """name -> a loss (model, xs [3, ...]) under which one state sees all three batches."""

    def twice(model, xs):
        return sum(loss_of(model, x) for x in xs)

    def shared_scan(model, xs):
        through = nnx.scan(lambda model, x: loss_of(model, x), in_axes=(None, 0), out_axes=0)
        return jnp.sum(through(model, xs))

    def lax_scan(model, xs):
        return jnp.sum(jax.lax.scan(lambda _, x: (None, loss_of(model, x)), None, xs)[1])

    def vmapped(model, xs):
        return jnp.sum(nnx.vmap(loss_of, in_axes=(None, 0))(model, xs))

    def rematted(model, xs):
        return sum(nnx.remat(loss_of)(model, x) for x in xs)

    def tied(model, xs):  # two attributes, one module
        return twice(Tied(model), xs)

    return {f.__name__: f for f in (twice, shared_scan, lax_scan, vmapped, rematted, tied)}


class Tied(nnx.Module):
    def __init__(self, model):
        self.a = self.b = model

    def __call__(self, x):
        return self.a(x) + self.b(0.5 * x)


@pytest.mark.parametrize("name", uses())
def test_all_uses_combine_by_the_largest_amax(name):
    """Three batches, of which the second is the largest: the state as after only that one."""
    model = make()
    step_of(uses()[name])(model, BATCHES)
    got = fp8_of(model)
    assert float(got["x_amax_history"][-1]) == float(jnp.max(jnp.abs(BATCHES)))
    assert float(got["x_scale"][0]) == np.float32(448) / np.float32(jnp.max(jnp.abs(BATCHES)))
    assert float(got["kernel_amax_history"][-1]) == float(jnp.max(jnp.abs(model.kernel[...])))
    # Gradients: that of the second batch is the largest; a step of only that one saw as much.
    alone = make()
    step_of()(alone, BATCHES[1])
    if name != "tied":
        np.testing.assert_array_equal(*(np.asarray(newest(m)["grad_amax_history"]) for m in (model, alone)))


def test_scan_over_rematted_layers(monkeypatch):
    """Layers stacked by nnx.vmap and run by nnx.scan give what nn.scan gives: parameters, gradients, FP8 state. Both in
    loops of te_jax's, as scans with larger results are. Without remat: test_nnx_examples.py."""
    monkeypatch.setattr(loops, "_FILL_BYTES", 16)

    class Block(nn.Module):
        @nn.compact
        def __call__(self, x, _):
            return x + te_flax.LayerNormMLP(48, name="mlp")(x)[0], None

    scanned = nn.scan(nn.remat(Block), variable_axes={"params": 0, "fp8_metas": 0}, length=2)

    class Model(nnx.Module):
        def __init__(self, rngs):
            make = lambda rngs: te_nnx.LayerNormMLP(H, 48, rngs=rngs)
            self.mlp = nnx.split_rngs(splits=2)(nnx.vmap(make))(rngs)

        def __call__(self, x):
            call = nnx.remat(lambda x, mlp: x + mlp(x)[0])
            return nnx.scan(call, in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)(x, self.mlp)

    model = make(Model)
    collections = jax.tree.map(jnp.copy, te_nnx.to_linen(model))
    params = collections.pop("params")
    assert {leaf.shape[0] for leaf in jax.tree.leaves(collections)} == {2}

    @jax.jit
    def linen_step(params, fp8, x):
        with te.autocast(True, DELAYED):
            loss = lambda params, fp8: loss_of(lambda x: scanned().apply({"params": params, **fp8}, x, None), x)
            value, (grads, fp8) = te.value_and_grad(loss, (0, 1))(params, fp8)
            return value, grads, te.update_fp8_metas(fp8)

    step = step_of()
    for x in BATCHES[:2]:
        loss, grads = step(model, x)
        want, wanted, collections = linen_step(params, collections, x)
        assert_same((loss, nnx.to_pure_dict(grads)), (want, wanted))
        assert_same(fp8_of(model), collections["fp8_metas"])


def test_orbax_round_trip(tmp_path):
    model = make(te_nnx.LayerNormMLP, H, 48)
    step_of()(model, X)
    other = make(te_nnx.LayerNormMLP, H, 48, seed=1)
    saved(tmp_path / "state", nnx.state(model))
    nnx.update(other, restored(tmp_path / "state", nnx.state(other)))
    assert_same(te_nnx.to_linen(other), te_nnx.to_linen(model))


def test_an_inf_batch_leaves_it():
    model, step = make(), step_of()
    step(model, X)
    before = fp8_of(model)
    step(model, X.at[0, 0, 0].set(jnp.inf))
    after = fp8_of(model)
    for name in ("x_scale", "x_amax_history"):
        assert_same(after[name], before[name])
    assert all(jnp.isfinite(leaf).all() for leaf in after.values())


# -- recipes -----------------------------------------------------------------------------------


def test_missing_state_is_an_error_that_names_the_way_out():
    model = make(te_nnx.TransformerLayer, use=None, **LAYER)
    text = (
        r"LayerNormDenseGeneral `attention/qkv`: DelayedScaling is in force, but there is no FP8 state x_scale; make "
        r"the module under te_jax.autocast\(True, recipe\), and take over weights with nnx.update\(new, nnx.state\(old"
    )
    with te.autocast(True, DELAYED), pytest.raises(ValueError, match=text):
        model(X)
    new = make(te_nnx.TransformerLayer, **LAYER)
    nnx.update(new, nnx.state(model, nnx.Param))  # the way out
    with te.autocast(True, DELAYED):
        new(X)
    assert_same(te_nnx.to_linen(new)["params"], te_nnx.to_linen(model)["params"])


def test_another_recipe():
    model, longer = make(), dataclasses.replace(DELAYED, amax_history_len=5)
    for x in BATCHES[:2]:
        step_of()(model, x)
    before = fp8_of(model)
    with te.autocast(True, longer), pytest.raises(ValueError, match=r"te_jax.nnx.convert_fp8_state\(module, recipe\)"):
        model(X)
    text = "the model has FP8 state, but Float8CurrentScaling, the recipe in force, has none; drop it with te_jax.nnx"
    with pytest.raises(ValueError, match=text):
        step_of(use=CURRENT)(model, X)
    assert te_nnx.convert_fp8_state(model, longer) is model
    assert_same({"fp8_metas": fp8_of(model)}, te.convert_fp8_metas({"fp8_metas": before}, longer))
    step_of(use=longer)(model, X)
    te_nnx.convert_fp8_state(model, CURRENT)
    assert not fp8_of(model)
    step_of(use=CURRENT)(model, X)
    with pytest.raises(ValueError, match="convert_fp8_state: DenseGeneral has no FP8 state; make one under"):
        te_nnx.convert_fp8_state(model, DELAYED)
