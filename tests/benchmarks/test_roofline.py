"""The picture of a benchmark's results."""

import pathlib

import pytest

from benchmarks import report, roofline

ROOT = pathlib.Path(__file__).parents[2]
pytest.importorskip("matplotlib")


@pytest.mark.parametrize("name, run, panels", [("ops", "ops", 1), ("layers", "dropout", 2)])
def test_a_panel_has_something_to_show_and_a_recipe_its_colour(name, run, panels):
    result = report.load(ROOT / "results" / "h200" / f"{name}.json")
    result["rows"] = [row for row in result["rows"] if row["run"] == run]
    axes = roofline.figure(result).axes
    assert len(axes) == panels
    bars = [row for row in result["rows"] if row.get("fraction") and row["impl"].startswith("te_jax")]
    assert len(axes[-1].patches) == len(bars)
    points = axes[0].get_legend_handles_labels() if panels == 2 else ([], [])
    colours = {label: line.get_color() for line, label in zip(*points)}
    assert colours == {impl: roofline.colour(impl) for impl in colours} and bool(colours) == (panels == 2)
    found = [
        roofline.colour(f"te_jax{impl}") for impl in ("", " bf16", " fp8", " fp8 current", " fp8 block", " fp8 fixed")
    ]
    assert len({*found, roofline.colour("flax bf16")}) == 7
    assert roofline.colour("te_jax fp8 fast") == roofline.colour("te_jax fp8")
