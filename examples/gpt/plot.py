"""Loss curves and their gap as a picture."""

import pathlib

import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

# The curves nearly coincide: FP8 is dashed and on top, so that both show.
STYLES = {
    "fp8": {"color": "tab:orange", "linestyle": "--", "zorder": 3},
    "bf16": {"color": "tab:blue", "linestyle": "-", "zorder": 2},
}


def smooth(values: np.ndarray, width: int) -> tuple[np.ndarray, np.ndarray]:
    """Running mean over `width` steps; (steps, means)."""
    means = np.convolve(values, np.ones(width) / width, mode="valid")
    return np.arange(width, len(values) + 1), means


def draw(runs: dict[str, dict], gap: dict | None, title: str) -> Figure:
    """Training and held-out loss of each run over the steps; below, with two runs, FP8 minus bf16."""
    figure = Figure(figsize=(9, 7 if gap else 4.5), layout="constrained")
    FigureCanvasAgg(figure)  # no display needed
    panels = figure.subplots(2 if gap else 1, 1, sharex=True, squeeze=False, height_ratios=[2, 1] if gap else [1])
    top = panels[0, 0]
    held_out = {"linestyle": ":", "marker": "o", "markersize": 5, "fillstyle": "none"}
    for name, run in runs.items():
        losses, style = np.asarray(run["losses"]), STYLES[name]
        top.plot(np.arange(1, len(losses) + 1), losses, color=style["color"], alpha=0.2, linewidth=0.8)
        top.plot(*smooth(losses, max(1, len(losses) // 50)), **style, label=f"{name}, training")
        if run["held_out"]:
            top.plot(*np.transpose(run["held_out"]), **style | held_out, label=f"{name}, held-out")
    top.set(title=title, ylabel="loss, nats per byte")
    top.legend()
    top.grid(alpha=0.3)

    if gap:
        bottom = panels[1, 0]
        shared = min(len(run["losses"]) for run in runs.values())
        difference = np.subtract(runs["fp8"]["losses"][:shared], runs["bf16"]["losses"][:shared])
        bottom.plot(np.arange(1, shared + 1), difference, color="gray", alpha=0.3, linewidth=0.8)
        bottom.plot(*smooth(difference, max(1, shared // 50)), color="black", label="fp8 - bf16")
        bottom.axhline(0, color="black", linewidth=0.6)
        bottom.set_ylim(*_range_without_spikes(difference))
        bottom.set_ylabel("gap, nats")
        bottom.set_title(f"mean gap over the last tenth: {gap['mean']:+.4f} nats", fontsize="medium")
        bottom.legend()
        bottom.grid(alpha=0.3)
    panels[-1, 0].set_xlabel("step")
    return figure


def _range_without_spikes(values: np.ndarray) -> tuple[float, float]:
    reach = 1.3 * max(float(np.quantile(np.abs(values), 0.98)), 1e-3)
    return -reach, reach


def save(path: pathlib.Path, runs: dict[str, dict], gap: dict | None, title: str) -> None:
    draw(runs, gap, title).savefig(path, dpi=130)
