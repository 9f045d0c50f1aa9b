"""Rows of TransformerEngine, with te_jax.compat's packages instead of its own: they have the same names."""

from functools import partial

import jax
import numpy as np
import pytest

from benchmarks import incumbent, layers

OURS = "te_jax bf16", "te_jax fp8", "te_jax fp8 current"


@pytest.mark.parametrize("theirs, ours", list(zip(incumbent.RECIPES, OURS)))
def test_layer(monkeypatch, theirs, ours):
    """The same fields, parameters and recipe: the same step."""
    monkeypatch.setattr(incumbent, "_PACKAGE", "te_jax.compat.transformer_engine")
    got, want = (layers.Trainee(layers.named("gpt layer", tiny=True), impl) for impl in (theirs, ours))
    assert jax.tree.structure(got.params) == jax.tree.structure(want.params)
    got.params = want.params  # queries start at another size there
    y, again = (trainee.compile().run(*trainee.train_inputs(trainee.fresh))[0] for trainee in (got, want))
    np.testing.assert_array_equal(y, again)


def test_rows(monkeypatch):
    """Only where the package is installed."""
    impls = lambda: {case.impl for case in layers.energy_cases(tiny=True)}
    for installed, rows in ((False, set()), (True, set(incumbent.RECIPES))):
        monkeypatch.setattr(incumbent, "installed", partial(bool, installed))
        assert impls() & set(incumbent.RECIPES) == rows
