"""Loss curves of runs and their gaps to bf16 as a picture."""

import json
import pathlib
from typing import NamedTuple

import numpy as np

from . import colours


class Curve(NamedTuple):
    """The losses of one run."""

    name: str  # "bf16", or the recipe in FP8
    steps: np.ndarray  # i[n]; the last one of each point
    losses: np.ndarray  # f[n]; of one step, or the mean over those from the point before
    held_out: list  # [[step, loss], ...]

    @property
    def label(self) -> str:
        """What a legend calls it."""
        return self.name if self.name == colours.BF16 else f"FP8 ({self.name})"

    @property
    def each(self) -> int:
        """Steps of a point."""
        return round(self.steps[-1] / len(self.steps))


def curves(runs: dict[str, dict], recipe: str) -> list[Curve]:
    """The curves of runs by precision, each with its whole `losses`, a number for each step."""
    return [
        Curve(recipe if name == "fp8" else name, np.arange(1, len(run["losses"]) + 1), np.asarray(run["losses"]),
              run["held_out"])
        for name, run in runs.items()
    ]  # fmt: skip


def read(paths: list[pathlib.Path]) -> tuple[list[Curve], str]:
    """The curves in files results.json, and a title. ValueError where two of them have one name, or a file has none."""
    found, title = [], ""
    for path in paths:
        try:
            results = json.loads(path.read_text())
            args, device = results["args"], results["device"]
            for name, run in results["runs"].items():
                steps, losses = np.transpose(run["losses"])
                recipe = args.get("recipe", "delayed") if name == "fp8" else name
                found.append(Curve(recipe, steps.astype(int), losses, run["held_out"]))
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{path}: this is no results.json of train_gpt.py ({error!r})") from error
        title = title or f"byte-level GPT, {args['preset']}, {device['kind']}, seed {args['seed']}"
    names = [curve.name for curve in found]
    if twice := {name for name in names if names.count(name) > 1}:
        raise ValueError(f"two runs are {', '.join(sorted(twice))}: give one file for each recipe")
    return found, title


def smooth(values: np.ndarray, width: int) -> np.ndarray:
    """Running mean over the `width` (odd) values around each one; towards the ends over fewer, as many on both sides,
    so that it lies on the curve where that is straight, and nowhere behind it."""
    places = np.arange(len(values))
    reach = np.minimum(np.minimum(places, places[::-1]), width // 2)
    sums = np.concatenate([[0.0], np.cumsum(values)])
    return (sums[places + reach + 1] - sums[places - reach]) / (2 * reach + 1)


def window(points: int) -> int:
    """The window of `smooth`: a fiftieth of a curve, odd."""
    return max(1, points // 50) | 1


def draw(found: list[Curve], title: str):
    """A figure of training and held-out losses over the steps; below, where one of them is bf16's, the others minus it.

    ValueError where a curve has other steps than bf16's.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    base = next((curve for curve in found if curve.name == colours.BF16), None)
    others = [curve for curve in found if curve is not base]
    gaps = base is not None and bool(others)
    figure = Figure(figsize=(9, 7.5 if gaps else 4.5), layout="constrained")
    FigureCanvasAgg(figure)  # no display needed
    panels = figure.subplots(2 if gaps else 1, 1, sharex=True, squeeze=False, height_ratios=[3, 2] if gaps else [1])
    panels = panels[:, 0]
    _losses(panels[0], found, title)
    if gaps:
        _gaps(panels[1], base, others)
    panels[-1].set_xlabel("step")
    return figure


def _losses(panel, found: list[Curve], title: str) -> None:
    few = len(found) <= 2
    for place, curve in enumerate(found):
        colour, base = colours.OF[curve.name], curve.name == colours.BF16
        faint, line, dots = (f"{curve.label}, {what}" if few else None for what in _meanings(curve).values())
        # Curves nearly coincide: those in FP8 are dashed and on top, several of them in turns, so that all show.
        dashes = "-" if base else "--" if few else (4 * place, (4, 4 * (len(found) - 2)))
        style = {"color": colour, "zorder": 2 if base else 3}
        width = window(len(curve.losses))
        if width > 1:
            panel.plot(curve.steps, curve.losses, color=colour, alpha=0.3, linewidth=0.8, label=faint)
        panel.plot(curve.steps, smooth(curve.losses, width), **style, linestyle=dashes, label=line)
        if curve.held_out:
            dotted = {"marker": "o", "markersize": 5, "fillstyle": "none", "linestyle": ":", "linewidth": 1}
            panel.plot(*np.transpose(curve.held_out), **style, **dotted, label=dots)
        if not few:
            panel.plot([], [], color=colour, label=curve.label)
    panel.set(title=title, ylabel="loss, nats per byte")
    meanings = "\n".join(f"{how}: {what}" for how, what in _meanings(found[0]).items())
    panel.legend(title=None if few else meanings, alignment="left")
    panel.grid(alpha=0.3)


def _gaps(panel, base: Curve, others: list[Curve]) -> None:
    reach = 0.0
    for curve in others:
        if not np.array_equal(curve.steps, base.steps):
            raise ValueError(f"{curve.name} ends at step {curve.steps[-1]}, {base.name} at {base.steps[-1]}, or they "
                             "have other points: give runs of equal --steps")  # fmt: skip
        gap, colour = curve.losses - base.losses, colours.OF[curve.name]
        width, tenth = window(len(gap)), max(1, len(gap) // 10)
        smoothed = smooth(gap, width)
        if len(others) == 1 and width > 1:
            panel.plot(curve.steps, gap, color=colour, alpha=0.3, linewidth=0.8, label=_points(curve))
        label = f"{curve.label}: {gap[-tenth:].mean():+.4f} over the last {tenth * curve.each} steps"
        panel.plot(curve.steps, smoothed, color=colour, label=label)
        # What chance does in the first steps, and single ones, are no reason to make all else flat.
        reach = max(reach, 1.3 * float(np.quantile(np.abs(gap if len(others) == 1 else smoothed), 0.95)), 1e-3)
    panel.axhline(0, color=colours.OF[base.name], linewidth=0.8)
    panel.set_ylim(-reach, reach)
    panel.set_ylabel("FP8 - bf16, nats")
    panel.set_title(f"gap to bf16, {_mean(base)}", fontsize="medium")
    panel.legend()
    panel.grid(alpha=0.3)


def _points(curve: Curve) -> str:
    return "each step" if curve.each == 1 else f"means of {curve.each} steps"


def _mean(curve: Curve) -> str:
    width = window(len(curve.losses))
    return _points(curve) if width == 1 else f"centred mean of {width * curve.each} steps"


def _meanings(curve: Curve) -> dict[str, str]:
    return {"faint": _points(curve), "lines": _mean(curve), "circles": "held-out text"}


def save(path: pathlib.Path, found: list[Curve], title: str) -> None:
    draw(found, title).savefig(path, dpi=130)
