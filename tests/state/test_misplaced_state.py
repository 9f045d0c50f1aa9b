"""FP8 state, parameters and other collections that are not where a function looks for them, and FP8 state that an
optimizer changed: each is served, refused by name, or told."""

import itertools
import warnings
from functools import partial

import flax
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from flax.training import train_state
from probes import Probe, ended

import te_jax as te
import te_jax.flax as te_flax
from te_jax import models
from te_jax.core import check
from te_jax.recipe import DelayedScaling, Float8CurrentScaling

RECIPE = DelayedScaling(amax_history_len=4)
PARAMS, X = {"w": jnp.ones(2)}, np.ones((4, 16), np.float32)


def metas(scale=3.0, **first):
    """The FP8 state of a module; first: leaves instead of its own."""
    leaves = {}
    for tensor in ("x", "kernel", "grad"):
        leaves |= {f"{tensor}_scale": jnp.full(1, scale), f"{tensor}_amax_history": jnp.asarray([0.0, 0.0, 8.0, 9.0])}
    return leaves | first


def two(tree=None):
    return jax.tree.map(lambda a: jnp.stack([a, a]), metas() if tree is None else tree)


def under_recipe(call, *args):
    with te.autocast(recipe=RECIPE):
        return call(*args)


def create(collections=None, **kwargs):
    kwargs = dict(apply_fn=None, params=PARAMS, tx=optax.sgd(0.1), collections=collections) | kwargs
    return te_flax.TrainState.create(**kwargs)


# -- FP8 state without the name of its collection -----------------------------------------------------------------

# Of each function: it, with the collection `c`, and with one of two microbatches, `k`.
SERVES = {
    "update_fp8_metas": lambda c, k: te.update_fp8_metas(c),
    "update_fp8_metas, previous": lambda c, k: te.update_fp8_metas(c, previous=c),
    "convert_fp8_metas": lambda c, k: te.convert_fp8_metas(c, DelayedScaling(amax_history_len=8)),
    "convert_fp8_metas, dropped": lambda c, k: te.convert_fp8_metas(c, Float8CurrentScaling()),
    "combine_by_max": lambda c, k: jax.tree.map(lambda a: a.astype(jnp.float32), te.combine_by_max(c)),
    "max_fp8_metas": lambda c, k: te.max_fp8_metas(c, k),
    "fp8_probes": lambda c, k: te.fp8_probes(c),
    "fp8_stats": lambda c, k: te.fp8_stats(c),
    "value_and_grad": lambda c, k: te.value_and_grad(lambda c: 2.0)(c)[1],  # nothing reads it, and it stays
}
# How the state is given, and whether its values are compared, or shapes only.
BARE = {
    "a module's": (metas(), False),
    "a model's": ({"a": metas(), "b": {"c": metas()}}, True),
    "frozen": (flax.core.freeze({"a": metas()}), False),
}


def with_the_name_and_without(name, call, bare, of_two):
    """What `call` makes of the state with the name of its collection, which is taken off again, and of itself."""
    kind = type(bare)
    want = call(kind({"fp8_metas": bare}), kind({"fp8_metas": of_two}))
    return want if name == "fp8_stats" else want.get("fp8_metas", kind({})), call(bare, of_two)


@pytest.mark.filterwarnings("ignore:value_and_grad. no module reads")
def test_without_the_name_of_its_collection():
    wrong = {}
    for (name, call), (what, (bare, values)) in itertools.product(SERVES.items(), BARE.items()):
        run = partial(with_the_name_and_without, name, call)
        want, got = under_recipe(jax.jit(run) if values else partial(jax.eval_shape, run), bare, two(bare))
        same = jax.tree.structure(got) == jax.tree.structure(want)
        equal = (lambda a, b: np.array_equal(a, b, equal_nan=True)) if values else (lambda a, b: a == b)
        if not same or not jax.tree.all(jax.tree.map(equal, got, want)):
            wrong[name, what] = got
    assert not wrong


REFUSES = SERVES | {
    "update_fp8_metas, previous only": lambda c, k: te.update_fp8_metas({"fp8_metas": metas()}, previous=c),
    "TrainState.create": lambda c, k: create(c),
    "TrainState.with_fp8": lambda c, k: create().with_fp8(c),
}
del REFUSES["value_and_grad"], REFUSES["fp8_stats"]  # These look into any tree.
MISPLACED = {
    "next to other collections": {"batch_stats": {"a": X}, "a": metas()},
    "next to its collection": {"fp8_metas": metas(), "other": {"a": metas()}},
    "of a model below another name": {"model": {"params": PARAMS, "fp8_metas": metas()}},
    "in the other collection, below another name": {"model": {"_overwrite_with_gradient": metas()}},
}


def test_where_nothing_would_find_it():
    probes = []
    for (name, call), (what, tree) in itertools.product(REFUSES.items(), MISPLACED.items()):
        run = lambda call=call, tree=tree: under_recipe(call, tree, two(tree))
        probes.append(
            Probe(f"{name}, {what}", run, ValueError, "has FP8 state at .* in no collection at the top; pass")
        )
    for what, tree in {**MISPLACED, "a module's": metas(), "a model's": {"a": metas()}}.items():
        run = lambda tree=tree: create(params=tree)
        probes.append(Probe(f"params, {what}", run, ValueError, "create: params holds FP8 state .*collections="))
        for tx in (te.optim.adamw_fp8(0.1), te.optim.master_weights(optax.sgd(0.1))):
            run = lambda tx=tx, tree=tree: tx.init(tree)
            at = f"{tx.init.__qualname__}, {what}"
            probes.append(Probe(at, run, ValueError, "params holds (the collection|FP8 state at) .*fp8_masked"))
    wrong = {probe.name: how for probe in probes if (how := ended(probe))}
    assert not wrong


def test_what_value_and_grad_and_fp8_stats_find():
    """Both look for it in any tree; the former treats state without a name as what it is: uses combine."""
    state = metas(scale=1.0)
    params = {"kernel": jnp.full((16, 16), 0.1)}
    model = te_flax.DenseGeneral(16, use_bias=False)
    apply = lambda state, x: jnp.sum(model.apply({"params": params, "fp8_metas": state}, x))
    run = lambda f, tree: under_recipe(te.value_and_grad(f), tree)[1]
    bare = run(lambda s: apply(s, X) + apply(s, 4 * X), state)
    named = run(lambda c: apply(c["fp8_metas"], X) + apply(c["fp8_metas"], 4 * X), {"fp8_metas": state})["fp8_metas"]
    jax.tree.map(np.testing.assert_array_equal, bare, named)
    assert float(bare["x_amax_history"][-1]) == 4.0
    nested = run(lambda t: apply(t[0]["mine"], X) + apply(t[0]["mine"], 4 * X), ({"mine": state, "p": jnp.ones(1)},))
    jax.tree.map(np.testing.assert_array_equal, nested[0]["mine"], named)
    assert set(te.fp8_stats(({}, {"fp8_metas": state}))) == {"x", "kernel", "grad"}


def test_fp8_masked_leaves_it_alone_below_any_name():
    tx = te_flax.fp8_masked(optax.adamw(0.1))
    for held in ({"fp8_metas": metas()}, {"mine": {"a": metas()}}, metas()):
        tree = {"params": PARAMS, **held}
        updates, _ = tx.update(tree, tx.init(tree), tree)
        flat = {jax.tree_util.keystr(path): np.any(u != 0) for path, u in jax.tree.leaves_with_path(updates)}
        assert [path for path, moves in flat.items() if moves] == [path for path in flat if "'w'" in path]


BIAS = {"expert_bias": jnp.zeros(4)}


def move(collections, grads=None):
    return te_flax.update_expert_bias(collections, collections if grads is None else grads, 1)


NO_HOME = ValueError, "update_expert_bias: .* no collection of them at the top; pass"
OF_BIASES = [
    Probe("biases of experts", lambda: move({"expert_bias": {"moe": BIAS}})),
    Probe("no biases", lambda: move({"a": 1}, {}) == {"a": 1}),
    Probe("biases without the name of their collection", lambda: move({"moe": BIAS}), *NO_HOME),
    Probe("biases below another name", lambda: move({"model": {"expert_bias": {"moe": BIAS}}}), *NO_HOME),
]


# -- collections that would be read instead of what is trained ----------------------------------------------------

SHADOWS = ("params", "fp8_metas", "_overwrite_with_gradient", "expert_bias", "fp8_kernels", "wgrads")
GRADS = jax.tree.map(jnp.zeros_like, PARAMS)
TAKES_COLLECTIONS = {
    "create": lambda c: create(c),
    "replace": lambda c: create().replace(collections=c),
    "apply_gradients": lambda c: create().apply_gradients(grads=GRADS, collections=c),
    "the constructor": lambda c: te_flax.TrainState(0, None, PARAMS, optax.sgd(0.1), (), {}, {}, c),
    "a jitted replace": lambda c: jax.jit(lambda s, c: s.replace(collections=c))(create(), c),
}


def test_collections_that_would_shadow():
    probes = []
    for (name, call), held in itertools.product(TAKES_COLLECTIONS.items(), SHADOWS):
        value = {"a": metas()} if held in ("fp8_metas", "_overwrite_with_gradient") else {"a": BIAS}
        run = lambda call=call, held=held, value=value: call({"batch_stats": PARAMS, held: value})
        taken = name == "create" and held in SHADOWS[1:4]  # They become `fp8`.
        refused = () if taken else (ValueError, f"collections holds '{held}', which .*; ")
        probes.append(Probe(f"{name}, {held}", run, *refused))
    for held in ("params", "batch_stats", "cache", "fp8_kernels", "wgrads"):
        run = lambda held=held: create().with_fp8({held: PARAMS})
        replace = lambda held=held: create().replace(fp8={held: PARAMS})
        for name, call in {"with_fp8": run, "replace(fp8)": replace}.items():
            probes.append(Probe(f"{name}, {held}", call, ValueError, f"TrainState: fp8 has .*{held}.*; pass {{}}"))
    for name, call in TAKES_COLLECTIONS.items():
        probes.append(Probe(f"{name}, batch_stats", lambda call=call: call({"batch_stats": PARAMS, "cache": {}})))
    model = models.CausalLM(models.ModelConfig(8, 1, 8, dict(num_attention_heads=1, mlp_hidden_size=8)))
    cached = {"params": {}, "cache": {"layer": {"cache_index": jnp.int32(3)}}}
    prompts, refused = jnp.ones((1, 2), jnp.int32), (ValueError, "variables hold 'cache'.*leave it out")
    probes += [
        Probe("generate", lambda: models.generate(model, cached, prompts, 2), *refused),
        Probe("read_prompts", lambda: models.read_prompts(model, cached, prompts, jnp.full(1, 2), 4), *refused),
    ]
    wrong = {probe.name: how for probe in probes if (how := ended(probe))}
    assert not wrong


def test_flax_keeps_its_own_products_among_collections():
    names = itertools.product(("input", "kernel", "output_grad"), ("scale", "amax_history"))
    of_flax = {f"{tensor}_{end}": jnp.ones(1) for tensor, end in names}
    state = create({"_overwrite_with_gradient": {"Dense_0": of_flax}})
    assert not state.fp8 and set(state.collections) == {"_overwrite_with_gradient"}


# -- an optimizer -------------------------------------------------------------------------------------------------


NO_OPTIMIZER = "tx is .*; pass an optax.GradientTransformation"
CALL_IT = NO_OPTIMIZER + r" \(call it first, as in optax.adam\(1e-3\)\)"
TX = {"None": (None, NO_OPTIMIZER), "0.1": (0.1, NO_OPTIMIZER)} | {
    tx.__name__: (tx, CALL_IT) for tx in (optax.adam, optax.MultiSteps)
}
TRAIN = [
    *(Probe(f"tx={name}", lambda tx=tx: create(tx=tx), TypeError, how) for name, (tx, how) in TX.items()),
    *(
        Probe(f"fp8_masked({name})", lambda tx=tx: te_flax.fp8_masked(tx), TypeError, how)
        for name, (tx, how) in TX.items()
    ),
    Probe("tx=MultiSteps(...)", lambda: create(tx=optax.MultiSteps(optax.sgd(0.1), 2))),
]


@pytest.mark.parametrize("probe", OF_BIASES + TRAIN, ids=lambda probe: probe.name)
def test_probes(probe):
    assert not ended(probe)


# -- FP8 state that an optimizer changed --------------------------------------------------------------------------

history = lambda *amaxes: jnp.asarray([0.0, *amaxes])
IMPOSSIBLE = {
    "a negative amax": dict(x_amax_history=history(0, 0, -0.5)),
    "NaN as an amax": dict(grad_amax_history=history(0, jnp.nan, 1)),
    "a negative scale": dict(kernel_scale=-jnp.ones(1)),
    "NaN as a scale": dict(x_scale=jnp.full(1, jnp.nan)),
    "an infinite scale": dict(x_scale=jnp.full(1, jnp.inf)),
}
POSSIBLE = {
    "fresh": dict(x_scale=jnp.ones(1), x_amax_history=jnp.zeros(4)),
    "of some steps": {},
    "with a count": dict(x_amax_history=jnp.asarray([-3.0, 0.0, 8.0, 9.0])),
}
MODEL, KERNEL = te_flax.DenseGeneral(16, use_bias=False), {"params": {"kernel": jnp.ones((16, 16))}}
LOOKS = {
    "update_fp8_metas": te.update_fp8_metas,
    "convert_fp8_metas": lambda c: te.convert_fp8_metas(c, RECIPE),
    "fp8_stats": te.fp8_stats,
    "TrainState.create": create,
    "TrainState.with_fp8": lambda c: create().with_fp8(c),
}
LOOKS_SLOWLY = {
    "fp8_kernels": lambda c: te_flax.fp8_kernels(MODEL, {**KERNEL, **c}, X),
    "a module": lambda c: MODEL.apply({**KERNEL, **c}, X),
    "value_and_grad": lambda c: te.value_and_grad(lambda c: 2.0)(c),
}
SLOWLY = "a negative amax", "of some steps"


def heard(call, *args):
    """The warnings of an optimizer's work that a call gives."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        call(*args)
    return [text for w in caught if "which no step leaves behind" in (text := str(w.message))]


def test_what_no_step_leaves_behind_is_told():
    wrong, ways = [], ("te_jax.flax.TrainState", 'collection="_overwrite_with_gradient"', "te_jax.flax.fp8_masked")
    cases = [*itertools.product(LOOKS.items(), IMPOSSIBLE | POSSIBLE), *itertools.product(LOOKS_SLOWLY.items(), SLOWLY)]
    for (name, call), what in cases:
        check.told.clear()
        collections = {"fp8_metas": metas(**(IMPOSSIBLE | POSSIBLE)[what])}
        said = under_recipe(heard, call, collections)
        right = len(said) == 1 and all(way in said[0] for way in ways) if what in IMPOSSIBLE else not said
        wrong += [] if right else [(name, what, said)]
    assert not wrong


def test_flax_state_over_all_variables():
    """An optimizer that sees FP8 state as weights is told of once; the two ways out keep it from there."""

    def trained(collection, wrap=lambda tx: tx):
        with te.autocast(recipe=RECIPE, collection=collection):
            variables = nn.meta.unbox(MODEL.init(jax.random.key(0), X))
            options = dict(apply_fn=None, params=variables, tx=wrap(optax.sgd(0.05)))
            grads = jax.jit(jax.grad(lambda v: jnp.mean(MODEL.apply(v, X) ** 2)))(variables)
            params = train_state.TrainState.create(**options).apply_gradients(grads=grads).params
            return params, heard(MODEL.apply, params, X), heard(MODEL.apply, params, X)

    check.told.clear()
    for ways in (("_overwrite_with_gradient",), (None, te_flax.fp8_masked)):
        assert trained(*ways)[1:] == ([], [])
    params, first, second = trained(None)
    assert float(params["fp8_metas"]["x_amax_history"][-1]) < 0 and (len(first), len(second)) == (1, 0)


def test_value_and_grad_looks_at_calls_1_2_4_8():
    """In a loop outside of `jax.jit` it sees what an optimizer left. It looks rarely, for looking waits."""
    grad, looked = te.value_and_grad(lambda c: 2.0), []
    bad = {"fp8_metas": metas(kernel_scale=-jnp.ones(1))}
    for call in range(1, 17):
        check.told.clear()
        looked += [call] if under_recipe(heard, grad, bad) else []
    assert looked == [1, 2, 4, 8, 16]
