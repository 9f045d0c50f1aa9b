"""Probes of autocast, FP8 state, what moves it, and training states."""

import asyncio
from functools import cache

import flax
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from probes import Probe

import te_jax as te
import te_jax.flax as te_flax
import te_jax.nnx as te_nnx
from te_jax import sharding
from te_jax.recipe import DelayedScaling, Float8CurrentScaling
from te_jax.state import fp8

RECIPE, CURRENT = DelayedScaling(amax_history_len=4), Float8CurrentScaling()
MODULE, X = te_flax.DenseGeneral(8), np.ones((2, 16), np.float32)
TENSORS = ("x", "kernel", "grad")


# -- autocast -----------------------------------------------------------------------------------------------------


def entered(*args, of=te.autocast, **kwargs):
    """(recipe in force, whether FP8 was switched off by name)"""
    with of(*args, **kwargs):
        return fp8.current_recipe(), fp8.is_switched_off()


def ask_in(*args, **kwargs):
    return lambda: entered(*args, **kwargs)


def in_tasks(*coroutines):
    """The errors of coroutines that run side by side."""

    async def run():
        return await asyncio.gather(*(c() for c in coroutines), return_exceptions=True)

    for result in asyncio.run(run()):
        if isinstance(result, Exception):
            raise result
    return fp8.current_recipe() is None and sharding.current_mesh_resource() is None


async def waits(block=lambda: te.autocast(recipe=RECIPE)):
    with block():
        await asyncio.sleep(0.001)


async def asks():
    return fp8.current_recipe()


async def applies():
    return applied(state())


def generators_out_of_order():
    def batches():
        with te.autocast(recipe=RECIPE):
            yield

    one, other = batches(), batches()
    next(one), next(other)
    try:
        next(one)
    finally:
        other.close()


def guard():
    return sharding.global_shard_guard(te.MeshResource("dp"))


AROUND = "around the call itself.*never around an `await` or a `yield`"
AUTOCAST = [
    Probe("autocast(recipe=D)", lambda: ask_in(recipe=RECIPE)() == (RECIPE, False)),
    Probe("autocast(True)", lambda: ask_in(True)() == (DelayedScaling(), False)),
    Probe("autocast(np.True_, D)", lambda: ask_in(np.True_, RECIPE)() == (RECIPE, False)),
    Probe("autocast(False, D)", lambda: ask_in(False, RECIPE)() == (None, True)),
    Probe("autocast(False) inside", lambda: [*map(entered, (True, False))][1] == (None, True)),
    Probe(
        "autocast(collection='x')", ask_in(recipe=RECIPE, collection="x"), ValueError, "collection is 'x'; pass None"
    ),
    Probe("autocast(collection=1)", ask_in(recipe=RECIPE, collection=1), TypeError, "collection is 1; pass None or"),
    Probe("autocast(mesh_resource=...)", lambda: ask_in(mesh_resource=te.MeshResource())() == (None, False)),
    Probe("fp8_autocast(fp8_recipe=D)", lambda: ask_in(of=te.fp8_autocast, fp8_recipe=RECIPE)()[0] == RECIPE),
    Probe("fp8_autocast(sharding_resource=...)", ask_in(True, of=te.fp8_autocast, sharding_resource=te.MeshResource())),
    Probe("autocast()", ask_in(), UserWarning, "autocast: enabled is None.*pass True, a recipe, or False"),
    Probe("autocast(D)", ask_in(RECIPE), TypeError, r"autocast: enabled is Delayed.*pass True or False.*recipe=\.\.\."),
    Probe("autocast(D class)", ask_in(DelayedScaling), TypeError, r"autocast: enabled is .*recipe=\.\.\."),
    Probe("autocast('off', D)", ask_in("off", RECIPE), TypeError, "autocast: enabled is 'off'; pass True or False"),
    Probe("autocast(1)", ask_in(1), TypeError, "autocast: enabled is 1; pass True or False"),
    Probe("autocast(array)", ask_in(jnp.ones(())), TypeError, "autocast: enabled is .*; pass True or False"),
    Probe(
        "autocast(True, class)", ask_in(True, DelayedScaling), TypeError, r"autocast: recipe is .*DelayedScaling\(\)"
    ),
    Probe("autocast(False, str)", ask_in(False, "delayed"), TypeError, "autocast: recipe is 'delayed'; pass te_jax"),
    Probe("autocast(True, D, str)", ask_in(True, RECIPE, "dp"), TypeError, "resource is 'dp'; pass a te_jax.MeshR"),
    Probe(
        "fp8_autocast of both names",
        ask_in(True, RECIPE, te.MeshResource(), of=te.fp8_autocast, sharding_resource=te.MeshResource()),
        TypeError,
        "sharding_resource is .* next to mesh_resource.*pass one",
    ),
    Probe("a decorated function", lambda: te.autocast(recipe=RECIPE)(fp8.current_recipe)() == RECIPE),
    Probe(
        "a decorated coroutine", lambda: te.autocast(recipe=RECIPE)(waits), TypeError, "decorates waits.*around a call"
    ),
    Probe("two tasks wait inside of autocasts", lambda: in_tasks(waits, waits), RuntimeError, AROUND),
    Probe("two tasks wait inside of guards", lambda: in_tasks(*[lambda: waits(guard)] * 2), RuntimeError, AROUND),
    Probe("a task asks next to one that waits", lambda: in_tasks(waits, asks), RuntimeError, AROUND),
    Probe("a task applies next to one that waits", lambda: in_tasks(waits, applies), RuntimeError, AROUND),
    Probe("tasks that wait outside of it", lambda: in_tasks(asks, asks)),
    Probe("generators left out of order", generators_out_of_order, RuntimeError, AROUND),
]

# -- states -------------------------------------------------------------------------------------------------------


@cache
def variables(recipe=RECIPE):
    with te.autocast(recipe=recipe):
        return jax.jit(MODULE.init)(jax.random.key(0), X)


def state(of=None, drop=(), length=4, **leaves) -> dict:
    """FP8 state of MODULE; leaves by name instead of its own, or next to them."""
    own = {f"{t}_scale": jnp.ones(1) for t in TENSORS} | {f"{t}_amax_history": jnp.ones(length) for t in TENSORS}
    metas = {name: leaf for name, leaf in (own | leaves).items() if name not in drop}
    return {"fp8_metas": metas if of is None else {of: metas}}


def applied(collections, recipe=None, module=MODULE):
    """The types of what the module returns, under a recipe or outside of autocast."""
    params = variables(CURRENT)["params"]
    call = lambda x: module.apply({"params": params if module is MODULE else {"dense": params}, **collections}, x)
    if recipe is None:
        return jax.eval_shape(call, X)
    with te.autocast(recipe=recipe):
        return jax.eval_shape(call, X)


def traced(f, *args, recipe=RECIPE):
    """Types only: nothing is compiled."""
    with te.autocast(recipe=recipe):
        return jax.eval_shape(f, *args) or True


def update(*args, **kwargs):
    return traced(lambda: te.update_fp8_metas(*args, **kwargs))


def update_eagerly(collections):
    with te.autocast(recipe=RECIPE):
        return te.update_fp8_metas(collections)


def in_update(**options):
    return lambda: update(state(**options))


BF16, ZERO = jnp.ones(1, jnp.bfloat16), {name: 0 * leaf for name, leaf in state()["fp8_metas"].items()}
MISSPELT = dict(x_scal=jnp.ones(1), drop=("x_scale",))
APPLY = [
    Probe("apply", lambda: applied(state(), RECIPE)),
    Probe("apply of a FrozenDict", lambda: applied(flax.core.freeze(state()), RECIPE)),
    Probe("apply under autocast(False)", lambda: (entered(False), with_off())),
    Probe(
        "apply with state, no autocast", lambda: applied(state()), UserWarning, "DenseGeneral: there is FP8 state.*auto"
    ),
    Probe(
        "apply without state",
        lambda: applied({}, RECIPE),
        UserWarning,
        "DenseGeneral: fp8_metas lacks x_scale.*mutable",
    ),
    Probe("apply without a scale", lambda: applied(state(drop=("x_scale",)), RECIPE), UserWarning, "lacks x_scale"),
    Probe(
        "apply without a history",
        lambda: applied(state(drop=("grad_amax_history",)), RECIPE),
        UserWarning,
        "lacks grad_",
    ),
    Probe("apply, a leaf misspelt", lambda: applied(state(**MISSPELT), RECIPE), ValueError, "leaf 'x_scal'.*'x_scale'"),
    Probe(
        "apply, a leaf of another library", lambda: applied(state(amax=BF16), RECIPE), ValueError, "a leaf 'amax'.*drop"
    ),
    Probe(
        "apply, another length", lambda: applied(state(length=8), RECIPE), ValueError, "DenseGeneral.*convert_fp8_metas"
    ),
    Probe("apply, bf16 scale", lambda: applied(state(x_scale=BF16), RECIPE), TypeError, "x_scale is bfloat16.*float32"),
    Probe(
        "apply, stacked",
        lambda: applied(state(x_scale=jnp.ones((2, 1))), RECIPE),
        ValueError,
        r"shape \(2, 1\).*nn.scan",
    ),
    Probe(
        "apply, two scales",
        lambda: applied(state(x_scale=jnp.ones(2)), RECIPE),
        ValueError,
        r"x_scale has shape \(2,\)",
    ),
    Probe(
        "apply, a module of another name",
        lambda: applied(state(of="dens"), RECIPE, _Named()),
        UserWarning,
        "DenseGeneral `dense`: fp8_metas lacks x_scale, but has state of another module.*'dens'",
    ),
]


class _Named(flax.linen.Module):
    @flax.linen.compact
    def __call__(self, x):
        return te_flax.DenseGeneral(8, name="dense")(x)


def with_off():
    with te.autocast(False):
        return applied(state())


UPDATE = [
    Probe("update", lambda: update(state())),
    Probe("update of another collection", lambda: te.update_fp8_metas({"cache": 1}) == {"cache": 1}),
    Probe("update of no tensor", lambda: update({"fp8_metas": {}})),
    Probe("update of integers", in_update(x_amax_history=jnp.arange(4))),
    Probe("update with previous", lambda: update(state(), previous=state())),
    Probe("update of zeros with previous", lambda: update({"fp8_metas": ZERO}, state())),
    Probe("update, jitted", lambda: traced(te.update_fp8_metas, state())),
    Probe(
        "update of zeros",
        lambda: update_eagerly({"fp8_metas": ZERO}),
        UserWarning,
        "state of grad and 2 more is 0.*previous=",
    ),
    Probe(
        "update of a tuple",
        lambda: update(({}, state())),
        TypeError,
        "update_fp8_metas: collections is .*; pass a dict",
    ),
    Probe("update of None", lambda: update(None), TypeError, "update_fp8_metas: collections is None; pass a dict"),
    Probe(
        "update of an array as metas", lambda: update({"fp8_metas": BF16}), TypeError, "fp8_metas is .*; pass the dict"
    ),
    Probe("update, leaf misspelt", in_update(**MISSPELT), ValueError, "fp8_metas/x_scal is no leaf.*mean 'x_scale'"),
    Probe("update, bf16 scale", in_update(x_scale=BF16), TypeError, "fp8_metas/x_scale is bfloat16.*float32"),
    Probe("update, a Python number", in_update(x_scale=1.0), TypeError, "fp8_metas/x_scale is float; .*float32"),
    Probe(
        "update, two scales",
        in_update(x_scale=jnp.ones(2)),
        ValueError,
        r"x_scale has shape \(2,\); pass .*\[\.\.\., 1\]",
    ),
    Probe(
        "update, a scalar history",
        in_update(x_amax_history=jnp.ones(())),
        ValueError,
        r"shape \(\); pass .*\[\.\.\., L\]",
    ),
    Probe("update, stacked apart", in_update(x_scale=jnp.ones((2, 1))), ValueError, "the same leading axes"),
    Probe(
        "update without a scale", in_update(drop=("x_scale",)), UserWarning, "fp8_metas has no x_scale; it is restored"
    ),
    Probe("update, another length", in_update(length=8), ValueError, "length 8.*convert_fp8_metas"),
    Probe(
        "update, previous of another model", lambda: update(state(), state(of="a")), ValueError, "previous .*one model"
    ),
    Probe(
        "update, previous of another length",
        lambda: update(state(), state(length=8)),
        ValueError,
        "at fp8_metas/.*one m",
    ),
    Probe("update, previous without state", lambda: update(state(), {"a": 1}), ValueError, "has none; pass states"),
    Probe("update, previous a list", lambda: update(state(), [state()]), TypeError, r"previous is \[.*; pass a dict"),
    Probe(
        "update under a recipe without state",
        lambda: traced(te.update_fp8_metas, state(), recipe=CURRENT),
        ValueError,
        "drop",
    ),
]


# -- what reads whole states --------------------------------------------------------------------------------------


def stacked(k=2, **options):
    return jax.tree.map(lambda a: jnp.stack([a] * k), state(**options))


def convert(collections, recipe=RECIPE):
    return traced(lambda: te.convert_fp8_metas(collections, recipe))


def largest(*args):
    return traced(lambda: te.max_fp8_metas(*args))


def combine(collections):
    return traced(te.combine_by_max, collections)


def probed(collections):
    return traced(lambda: te.fp8_probes(collections))


def stats(*args):
    return traced(lambda: te.fp8_stats(*args))


WHOLE = [
    Probe("convert", lambda: convert(state(length=8))),
    Probe("convert to a recipe without", lambda: te.convert_fp8_metas({"a": 1, **state()}, CURRENT) == {"a": 1}),
    Probe("convert, a recipe class", lambda: convert(state(), DelayedScaling), TypeError, r"pass an instance: Delayed"),
    Probe("convert, None", lambda: convert(None), TypeError, "convert_fp8_metas: collections is None; pass a dict"),
    Probe("convert, leaf misspelt", lambda: convert(state(**MISSPELT)), ValueError, "x_scal is no leaf.*'x_scale'"),
    Probe("convert, bf16", lambda: convert(state(x_scale=BF16)), TypeError, "x_scale is bfloat16.*float32"),
    Probe(
        "convert without a history",
        lambda: convert(state(drop=("x_amax_history",))),
        UserWarning,
        "has no x_amax_history",
    ),
    Probe("combine", lambda: combine(state())),
    Probe("combine, a list", lambda: combine([state()]), TypeError, "combine_by_max: collections is .*; pass a dict"),
    Probe("combine, leaf misspelt", lambda: combine(state(**MISSPELT)), ValueError, "x_scal is no leaf.*'x_scale'"),
    Probe("combine, another length", lambda: combine(state(length=8)), ValueError, "length 8.*convert_fp8_metas"),
    Probe("max", lambda: largest(state(), stacked())),
    Probe("max, not stacked", lambda: largest(state(), state()), ValueError, "one of the microbatches.*one model"),
    Probe("max, another tree", lambda: largest(state(), stacked(of="a")), ValueError, "gradients with respect to"),
    Probe("max, None", lambda: largest(None, stacked()), TypeError, "max_fp8_metas: before is None; pass a dict"),
    Probe("max, a list", lambda: largest(state(), [state()] * 2), TypeError, "microbatches is .*; pass a dict"),
    Probe("probes, leaf misspelt", lambda: probed(state(**MISSPELT)), ValueError, "x_scal is no leaf.*'x_scale'"),
    Probe(
        "probes of nothing",
        lambda: probed({"params": {}}),
        ValueError,
        "fp8_probes: .*no collection 'fp8_metas'",
    ),
    Probe("probes of None", lambda: probed(None), ValueError, "fp8_probes: .*no collection"),
    Probe("stats, leaf misspelt", lambda: stats(state(**MISSPELT)), ValueError, "x_scal is no leaf.*'x_scale'"),
    Probe("stats, a recipe class", lambda: stats(state(), DelayedScaling), TypeError, "pass an instance"),
    Probe("stats", lambda: stats(state(), RECIPE)),
]


# -- gradients and training states --------------------------------------------------------------------------------


def loss(params, collections, *_, **__):
    return jnp.sum(MODULE.apply({"params": params, **collections}, X))


def grad_of(f=loss, collections=None, argnums=1, args=(), **kwargs):
    run = te.value_and_grad(f, argnums)
    given = state() if collections is None else collections
    return traced(lambda c: run(variables()["params"], c, *args, **kwargs), given)


def by_layer(params, collections):
    """A state of stacked layers, sliced."""
    of_layer = lambda i: {"fp8_metas": jax.tree.map(lambda a: a[i], collections["fp8_metas"])}
    return sum(loss(params, of_layer(i)) for i in range(2))


def doubled(params, collections):
    return loss(params, {"fp8_metas": jax.tree.map(lambda a: 2 * a, collections["fp8_metas"])})


GRADS = [
    Probe("value_and_grad", grad_of),
    Probe("value_and_grad of slices", lambda: grad_of(by_layer, stacked())),
    Probe("value_and_grad with a float", lambda: grad_of(args=(0.5, -0.0, 1j))),
    Probe("value_and_grad with static arguments", lambda: grad_of(args=(True, "a", 3, None), flag=False)),
    Probe(
        "value_and_grad of twice the state",
        lambda: grad_of(doubled),
        TypeError,
        "FP8 state is computed with.*slice, index",
    ),
    Probe(
        "value_and_grad of unread state",
        lambda: grad_of(collections={"fp8_metas": {**state()["fp8_metas"], "b": ZERO}}),
        UserWarning,
        "no module reads the FP8 state fp8_metas/b/grad and 2 more",
    ),
    Probe(
        "value_and_grad of no function",
        lambda: te.value_and_grad(3),
        TypeError,
        "value_and_grad: fun is 3; pass a func",
    ),
    Probe(
        "value_and_grad with a set",
        lambda: grad_of(args=({1},)),
        TypeError,
        r"an argument of loss is \{1\}; pass an array",
    ),
    Probe(
        "value_and_grad, leaf misspelt", lambda: grad_of(collections=state(**MISSPELT)), ValueError, "x_scal is no leaf"
    ),
    Probe(
        "value_and_grad, another length", lambda: grad_of(collections=state(length=8)), ValueError, "convert_fp8_metas"
    ),
]


def train(params=None, collections=None, tx=None, **kwargs):
    params = {"w": jnp.ones(1)} if params is None else params
    return te_flax.TrainState.create(
        apply_fn=None,
        params=params,
        tx=tx or optax.sgd(0.1),
        collections=state() if collections is None else collections,
        **kwargs,
    )


def stepped(fp8_grads=None, grads=None, **kwargs):
    grads = ({"w": jnp.ones(1)}, state() if fp8_grads is None else fp8_grads) if grads is None else grads
    return traced(lambda s: s.apply_gradients(grads=grads, **kwargs), train())


TRAIN = [
    Probe("create", train),
    Probe("create of a FrozenDict", lambda: train(collections=flax.core.freeze(state()))),
    Probe("create without state", lambda: train(collections={})),
    Probe("create(params=variables)", lambda: train(variables()), ValueError, "params holds FP8 state.*collections="),
    Probe(
        "create(params nested)",
        lambda: train({"a": variables()}),
        ValueError,
        r"FP8 state \(a/fp8_metas\).*collections=",
    ),
    Probe(
        "create, a list of collections", lambda: train(collections=[1]), TypeError, r"collections is \[1\]; pass a dict"
    ),
    Probe(
        "create, leaf misspelt",
        lambda: train(collections=state(**MISSPELT)),
        ValueError,
        "x_scal is no leaf.*'x_scale'",
    ),
    Probe(
        "create, bf16 state", lambda: train(collections=state(x_scale=BF16)), TypeError, "x_scale is bfloat16.*float32"
    ),
    Probe("with_fp8 of metas only", lambda: train().with_fp8(state()["fp8_metas"]), ValueError, "with_fp8: fp8 has"),
    Probe("with_fp8(None)", lambda: train().with_fp8(None), TypeError, "with_fp8: fp8 is None; pass a dict"),
    Probe("apply_gradients", stepped),
    Probe("apply_gradients of zeros", lambda: stepped({"fp8_metas": ZERO})),
    Probe(
        "apply_gradients of params only",
        lambda: stepped(grads={"w": jnp.ones(1)}),
        TypeError,
        "pass what value_and_grad",
    ),
    Probe("apply_gradients without state", lambda: stepped({}), ValueError, "differentiate with respect to state.fp8"),
    Probe(
        "apply_gradients, another state", lambda: stepped(state(of="a")), ValueError, "differentiate with respect to"
    ),
    Probe("apply_gradients, stacked", lambda: stepped(stacked()), ValueError, "shape.*one model"),
    Probe(
        "nnx.value_and_grad of no function",
        lambda: te_nnx.value_and_grad(None),
        TypeError,
        "f is None; pass a function",
    ),
    Probe(
        "nnx.value_and_grad, argnums a string",
        lambda: te_nnx.value_and_grad(loss, argnums="0"),
        TypeError,
        "argnums is '0'",
    ),
    Probe(
        "nnx: plain value_and_grad", lambda: of_nnx(nnx.value_and_grad), UserWarning, "use te_jax.nnx.value_and_grad"
    ),
    Probe("nnx: value_and_grad of te_jax", lambda: of_nnx(te_nnx.value_and_grad)),
]


def of_nnx(transform):
    with te.autocast(recipe=RECIPE):
        module = te_nnx.DenseGeneral(8, 8, rngs=nnx.Rngs(0))
        return transform(lambda m, x: jnp.sum(m(x)))(module, jnp.ones((1, 8)))


PROBES = AUTOCAST + APPLY + UPDATE + WHOLE + GRADS + TRAIN
