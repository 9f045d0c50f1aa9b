"""Checkpoints of the training programs whose bytes were changed: read as they were saved, or refused by name."""

import json
import pathlib
import shutil
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

sys.path.insert(0, str(pathlib.Path(__file__).parents[2] / "examples"))

from gpt import checkpoint, config, steps

RUN = {
    "key": {"seed": 0, config.TEXT: "a"},
    "losses": [5.25, 4.125],
    "held_out": [[2, 4.5]],
    "fp8_report": [],
    "precision": "fp8",
}


def state(step: int) -> steps.TrainState:
    fp8 = {"fp8_metas": {"x_scale": jnp.float32([step]), "x_amax_history": jnp.arange(4.0) + step}}
    params = {"w": jnp.arange(64.0) + step, "kernel": jnp.arange(32).astype(jnp.float8_e4m3fn)}
    return steps.TrainState(jnp.int32(step), params, [jnp.ones(8, jnp.bfloat16)], fp8, jnp.zeros(2, jnp.uint32))


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """The directory of a run, with checkpoints of steps 1 and 2."""
    directory = tmp_path_factory.mktemp("run")
    with checkpoint.opened(directory) as checkpoints:
        for step in (1, 2):
            checkpoints.save(state(step), RUN)
    return directory


def problem(directory: pathlib.Path) -> str:
    """How the restoration of step 2 goes wrong: "" where it is as it was saved, else what is said."""
    reader = object.__new__(checkpoint.Checkpoints)
    reader.directory = directory
    try:
        found = reader.restore(state(0), RUN["key"])
    except ValueError as error:
        assert "no checkpoint in" in str(error) and "2: " in str(error)
        return str(error)
    assert found is not None
    restored, run = found
    jax.tree.map(np.testing.assert_array_equal, restored, state(2))
    assert {name: run[name] for name in RUN} == RUN
    return ""


def test_any_byte_of_any_file(saved, tmp_path):
    """One bit of a byte at the begin, in the middle and at the end of each file of a checkpoint, and each file gone."""
    shutil.copytree(saved / "2", tmp_path / "2")
    assert problem(tmp_path) == ""
    files = [path for path in sorted((tmp_path / "2").rglob("*")) if path.is_file()]
    refused = 0
    for path in files:
        content = path.read_bytes()
        for place in {0, len(content) // 2, len(content) - 1}:
            path.write_bytes(content[:place] + bytes([content[place] ^ 4]) + content[place + 1 :])
            refused += bool(problem(tmp_path))
            path.write_bytes(content)
    assert len(files) > 10 and refused > 10


def test_any_byte_of_the_record(saved, tmp_path):
    path = tmp_path / "2"
    shutil.copytree(saved / "2", path)
    content, whole, taken = (path / "run" / "metadata").read_bytes(), checkpoint.read_run(path), []
    for place in range(len(content)):
        changed = content[:place] + bytes([content[place] ^ 1]) + content[place + 1 :]
        (path / "run" / "metadata").write_bytes(changed)
        try:
            taken += [changed] if checkpoint.read_run(path) != whole else []
        except ValueError:  # what is no JSON ends so, too
            continue
    assert not taken


def changed(saved, tmp_path, change) -> str:
    """What is said of a checkpoint whose record `change` has changed."""
    shutil.copytree(saved / "2", tmp_path / "2")
    file = tmp_path / "2" / "run" / "metadata"
    run = json.loads(file.read_text())
    change(run)
    file.write_text(json.dumps(run))
    return problem(tmp_path)


@pytest.mark.parametrize("name", [*RUN, "step", "has_fp8", "sums"])
def test_what_the_record_lacks(name, saved, tmp_path):
    assert "its record of the run is not as it was saved" in changed(saved, tmp_path, lambda run: run.pop(name))


def test_a_record_without_a_checksum(saved, tmp_path):
    """As programs before this one wrote them: refused, with the way out, rather than trusted."""
    said = changed(saved, tmp_path, lambda run: run.pop(checkpoint.SEAL))
    assert "its record has no sha256" in said and "go on with that version, or train anew" in said


def test_a_checksum_that_is_missing(saved, tmp_path):
    """In a record that was sealed again."""

    def change(run):
        del run["sums"]["['state']['params']['w']"], run[checkpoint.SEAL]
        run |= checkpoint.sealed(run)

    said = changed(saved, tmp_path, change)
    assert "1 arrays are not as they were saved, the first is ['state']['params']['w']" in said


@pytest.mark.parametrize("item", ["state", "fp8", "run", ""])
def test_parts_of_another_step(item, saved, tmp_path):
    """Whole in themselves, but not of this checkpoint."""
    shutil.copytree(saved / "2", tmp_path / "2")
    shutil.rmtree(tmp_path / "2" / item)
    shutil.copytree(saved / "1" / item, tmp_path / "2" / item)
    due = "its record is of step 1" if item in ("run", "") else "arrays are not as they were saved"
    assert due in problem(tmp_path)
