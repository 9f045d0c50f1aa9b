"""Transforms of Flax's that do not pass FP8 state, or another collection of te_jax's, on to the modules inside: in
`init` that is an error which names the transform's argument, later a warning does."""

import itertools
import warnings

import jax
import jax.numpy as jnp
import pytest
from flax import linen as nn
from probes import Probe, ended

import te_jax as te
import te_jax.flax as te_flax
from te_jax.recipe import DelayedScaling, Float8CurrentScaling

RECIPE, KEY = DelayedScaling(amax_history_len=4), jax.random.key(0)
X = jax.ShapeDtypeStruct((2, 4, 16), jnp.float32)


class Dense(nn.Module):
    @nn.compact
    def __call__(self, x, _=None):
        return te_flax.DenseGeneral(16)(x), None


class FlaxDense(nn.Module):
    @nn.compact
    def __call__(self, x, _=None):
        return nn.Dense(16, dot_general_cls=te_flax.DotGeneral)(x), None


class Experts(nn.Module):
    @nn.compact
    def __call__(self, x, _=None):
        return te_flax.MoEBlock(num_experts=2, intermediate_dim=16, use_expert_bias=True)(x), None


# {collection: (a module that has it, the recipe)}
HOLDERS = {
    "fp8_metas": (Dense, RECIPE),
    "_overwrite_with_gradient": (FlaxDense, RECIPE),
    "expert_bias": (Experts, Float8CurrentScaling()),
}
OPTIONS = dict(split_rngs={"params": True}, metadata_params={nn.PARTITION_NAME: None})
SHARED = dict(split_rngs={"params": False})
# {transform: (module, the collections that it passes on) -> module}
TRANSFORMS = {
    "scan": lambda of, names: nn.scan(of, variable_axes=dict.fromkeys(names, 0), length=2, **OPTIONS)(),
    "vmap": lambda of, names: nn.vmap(of, variable_axes=dict.fromkeys(names, 0), **OPTIONS)(),
    "scan of remat": lambda of, names: nn.scan(
        nn.remat(of), variable_axes=dict.fromkeys(names, 0), length=2, **OPTIONS
    )(),
    "remat of scan": lambda of, names: nn.remat(
        nn.scan(of, variable_axes=dict.fromkeys(names, 0), length=2, **OPTIONS)
    )(),
    "a shared scan": lambda of, names: nn.scan(of, variable_broadcast=list(names), length=2, **SHARED)(),
    "a shared vmap": lambda of, names: nn.vmap(of, variable_axes=dict.fromkeys(names), **SHARED)(),
}
# These pass on all that there is.
THROUGH = {
    "no transform": lambda of: of(),
    "remat": lambda of: nn.remat(of)(),
    "jit": lambda of: nn.jit(of)(),
    "map_variables": lambda of: nn.map_variables(of, "params", lambda v: v, init=True)(),
}


class Below(nn.Module):
    of: nn.Module

    @nn.compact
    def __call__(self, x):
        return self.of(x)


def started(model, recipe=RECIPE, **options):
    """The types of a model's variables."""
    with te.autocast(recipe=recipe):
        return jax.eval_shape(lambda x: model.init(KEY, x, **options), X)


def called(model, variables, recipe=RECIPE):
    with te.autocast(recipe=recipe):
        return jax.eval_shape(model.apply, variables, X)


def ends(probes):
    return {probe.name: how for probe in probes if (how := ended(probe))}


CASES = [
    (f"{transform}, {collection}", lift, collection, of, recipe)
    for (transform, lift), (collection, (of, recipe)) in itertools.product(TRANSFORMS.items(), HOLDERS.items())
]


@pytest.mark.parametrize("wrap", (lambda model: model, Below), ids=("itself", "below a module"))
def test_init_through_a_transform(wrap):
    probes = []
    for name, lift, collection, of, recipe in CASES:
        if wrap is not Below and collection != "fp8_metas":
            continue
        drops, passes = wrap(lift(of, ["params"])), wrap(lift(of, ["params", collection]))
        way = f"cannot be made: a transform .*variable_axes={{'{collection}': 0}}.*params have there"
        probes += [
            Probe(f"{name} dropped", lambda m=drops, r=recipe: started(m, r), ValueError, way),
            Probe(f"{name} passed on", lambda m=passes, r=recipe, c=collection: c in started(m, r)),
        ]
    for (name, lift), (collection, (of, recipe)) in itertools.product(THROUGH.items(), HOLDERS.items()):
        model = wrap(lift(of))
        probes.append(Probe(f"{name}, {collection}", lambda m=model, r=recipe, c=collection: c in started(m, r)))
    assert not ends(probes)


def test_apply_through_a_transform():
    """State that is there, but that the transform does not pass on."""
    probes = []
    for name, lift, collection, of, recipe in CASES:
        drops, passes = Below(lift(of, ["params"])), Below(lift(of, ["params", collection]))
        kind = ValueError if collection == "expert_bias" else UserWarning
        way = f"{collection}.* lacks .*variable_axes={{'{collection}': 0}}"
        variables = started(passes, recipe)
        probes += [
            Probe(f"{name} dropped", lambda m=drops, v=variables, r=recipe: called(m, v, r), kind, way),
            Probe(f"{name} passed on", lambda m=passes, v=variables, r=recipe: quietly(m, v, r)),
        ]
    assert not ends(probes)


def quietly(*args):
    with warnings.catch_warnings(action="error", category=UserWarning):
        return called(*args)


def test_where_nobody_wants_the_state():
    """Outside of autocast, under a recipe without state, and where `init` is asked for parameters only."""
    model = Below(TRANSFORMS["scan"](Dense, ["params"]))
    assert set(started(model, None)) == set(started(model, Float8CurrentScaling())) == {"params"}
    assert set(started(Dense(), mutable=["params"])) == {"params"}
    with pytest.raises(ValueError, match="and name it in `mutable` if you pass that"):
        started(Below(TRANSFORMS["scan"](Dense, ["params", "fp8_metas"])), mutable=["params"])
