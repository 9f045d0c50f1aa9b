"""Two trees of te_jax side by side: here one process stands for both."""

from pathlib import Path

import jax
from conftest import QUICK

import te_jax
from benchmarks import trees

INSTALLED = Path(te_jax.__file__).parents[1]


def test_a_tree_beside_itself(capsys, monkeypatch):
    if jax.default_backend() == "cpu":
        monkeypatch.setenv("XLA_FLAGS", QUICK)
    tree = trees.Tree(INSTALLED, tiny=True)
    row = trees.compare([tree, tree], "gpt", "delayed", calls=1)
    assert row["differing"] == row["unsteady"] == [] and row["ms"] > 0
    assert row["leaves"] == 1 + 12 + 24 + 1  # the loss, parameters, FP8 state, x

    trees.show(row | {"differing": ["['x']"], "unsteady": ["['x']"]})
    assert "1 of 38 results differ" in (said := capsys.readouterr().out) and "from run to run too" in said
    tree.close()


class _Answers:
    """A tree with one result that differs, and one that differs in each run."""

    def __init__(self, name):
        self.name, self.runs = name, 0

    def ask(self, calls, **layer):
        self.runs += 1
        return {"ms": 1.0} if calls else {"same": "", "other": self.name, "unsteady": f"{self.name} {self.runs}"}


def test_what_differs_is_named():
    row = trees.compare([_Answers("old"), _Answers("new")], "gpt", "bf16", calls=1)
    assert row["differing"] == ["other", "unsteady"] and row["unsteady"] == ["unsteady"] and row["ratio"] == 1
