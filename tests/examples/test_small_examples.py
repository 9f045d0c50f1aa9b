"""The small tasks of examples/: their data are what they say, and one of them learns in both precisions."""

import importlib.util
import re
import sys
import types

import numpy as np
import pytest
from example_runs import EXAMPLES  # noqa: F401

import classify  # isort: skip
import digits  # isort: skip
import span_corruption  # isort: skip
from tasks import loop  # isort: skip


def test_spans_are_cut_out_and_can_be_put_back():
    for seed in range(20):
        rng = np.random.default_rng(seed)
        text = rng.integers(0, 256, span_corruption.LENGTH)
        kept, cut = span_corruption.corrupt(text, rng)
        assert kept.shape == (span_corruption.LENGTH - span_corruption.SPANS * (span_corruption.SPAN - 1),)
        assert cut.shape == (span_corruption.TARGET,)
        sentinels = np.flatnonzero(cut >= span_corruption.SENTINELS)
        spans = {cut[at]: cut[at + 1 : at + 1 + span_corruption.SPAN] for at in sentinels}
        assert list(spans) == [span_corruption.SENTINELS + i for i in range(span_corruption.SPANS)], "in order"
        whole = np.concatenate([spans.get(token, [token]) for token in kept])
        np.testing.assert_array_equal(whole, text)


def test_pieces_of_sources_have_the_label_of_their_package():
    if missing := [package for package in classify.PACKAGES if importlib.util.find_spec(package) is None]:
        pytest.skip(f"this Python's library lacks {missing}")
    found = classify.task()
    texts = [bytes(classify.sources(package)) for package in classify.PACKAGES]
    batch = found.batch(3)
    assert batch["text"].shape == (classify.BATCH, classify.LENGTH) and len(set(batch["labels"])) > 4
    for row, label in zip(batch["text"], batch["labels"]):
        at = texts[label].index(bytes(row.astype(np.uint8)))
        assert at < 0.9 * len(texts[label])
    np.testing.assert_array_equal(batch["text"], found.batch(3)["text"])
    assert (batch["text"] != found.batch(4)["text"]).any()


@pytest.fixture
def stand_in(monkeypatch):
    """Digits that are there without scikit-learn: the label is where the image is bright."""
    labels = np.random.default_rng(0).integers(0, 10, 1797)
    images = np.random.default_rng(1).uniform(0, 4, (1797, 64))
    images[np.arange(1797), 5 * labels] = 16
    datasets = types.SimpleNamespace(load_digits=lambda return_X_y: (images, labels))
    monkeypatch.setitem(sys.modules, "sklearn", types.SimpleNamespace(datasets=datasets))
    monkeypatch.setitem(sys.modules, "sklearn.datasets", datasets)


def test_digits_are_learned_in_both_precisions(stand_in, capsys):
    assert digits.main(["--compare", "--steps", "40", "--check-gap", "0.5"]) == 0
    rows = re.findall(r"digits, (.+): loss ([\d.]+), held out ([\d.]+), ([\d.]+) % right", capsys.readouterr().out)
    assert [name for name, *_ in rows] == ["FP8 (delayed)", "bf16"]
    for _, loss, held_out, right in rows:
        assert float(loss) < 1.5 < np.log(10) and float(held_out) < 1.5, "chance is 2.3 nats"
        assert float(right) > 50
    assert rows[0][1:3] != rows[1][1:3], "both ran in the same precision"


@pytest.mark.parametrize("arguments", [["--check-gap", "1"], ["--steps", "0"], ["--recipe", "fp4"]])
def test_what_does_not_start(arguments):
    with pytest.raises(SystemExit) as stopped:
        loop.main(lambda: pytest.fail("the task was made"), arguments, "a task")
    assert stopped.value.code == 2
