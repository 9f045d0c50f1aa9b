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
    mixer: str = "attention"

    @property
    def is_base(self) -> bool:
        return self.name == colours.BF16

    @property
    def label(self) -> str:
        """What a legend calls it."""
        return self.name if self.is_base else f"FP8 ({self.name})"

    @property
    def last(self) -> slice:
        """The last tenth of the points."""
        return slice(-max(1, len(self.losses) // 10), None)

    @property
    def each(self) -> int:
        """Steps of a point."""
        return round(self.steps[-1] / len(self.steps))


class Gap(NamedTuple):
    """How far the losses of a run in FP8 are from the run in bf16 with the same mixer."""

    curve: Curve
    base: Curve
    values: np.ndarray  # f[n]

    @property
    def text(self) -> str:
        """Of the last tenth of the steps."""
        steps = len(self.values[self.curve.last]) * self.curve.each
        return f"{self.values[self.curve.last].mean():+.4f} over the last {steps} steps"


def curves(runs: dict[str, dict], recipe: str, mixer: str = "attention") -> list[Curve]:
    """The curves of runs by precision, each with its whole `losses`, a number for each step."""
    return [
        Curve(recipe if name == "fp8" else name, np.arange(1, len(run["losses"]) + 1), np.asarray(run["losses"]),
              run["held_out"], mixer)
        for name, run in runs.items()
    ]  # fmt: skip


def gaps(found: list[Curve]) -> list[Gap]:
    """Of each curve in FP8 whose mixer has one in bf16. ValueError where these have other steps."""
    bases, of = {curve.mixer: curve for curve in found if curve.is_base}, []
    for curve in found:
        base = bases.get(curve.mixer)
        if base is None or curve is base:
            continue
        if not np.array_equal(curve.steps, base.steps):
            raise ValueError(f"{curve.name} ends at step {curve.steps[-1]}, {base.name} at {base.steps[-1]}, or they "
                             "have other points: give runs of equal --steps")  # fmt: skip
        of.append(Gap(curve, base, curve.losses - base.losses))
    return of


def mixed(found: list[Curve]) -> bool:
    """Whether they have several mixers."""
    return len({curve.mixer for curve in found}) > 1


def labels(found: list[Curve]) -> list[str]:
    """What tells the curves apart."""
    return [f"{curve.mixer}, {curve.label}" if mixed(found) else curve.label for curve in found]


def read(paths: list[pathlib.Path]) -> tuple[list[Curve], str]:
    """The curves in files results.json, and a title. ValueError where two of them have one name and mixer, several
    mixers are under several recipes, or a file has no curve."""
    found, first = [], None
    for path in paths:
        try:
            results = json.loads(path.read_text())
            args, device = results["args"], results["device"]
            for name, run in results["runs"].items():
                steps, losses = np.transpose(run["losses"])
                recipe = args.get("recipe", "delayed") if name == "fp8" else name
                mixer = args.get("mixer", "attention")
                found.append(Curve(recipe, steps.astype(int), losses, run["held_out"], mixer))
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{path}: this is no results.json of train_gpt.py ({error!r})") from error
        first = first or [args["preset"], device["kind"], f"seed {args['seed']}"]
    names = labels(found)
    if twice := {curve.name for curve, name in zip(found, names) if names.count(name) > 1}:
        raise ValueError(f"two runs are {', '.join(sorted(twice))}: give one file for each recipe")
    recipes = sorted({curve.name for curve in found if not curve.is_base})
    if mixed(found) and len(recipes) > 1:
        raise ValueError(f"runs with several mixers are under {', '.join(recipes)}: give one recipe for all of them")
    mixer = [] if mixed(found) or found[0].mixer == "attention" else [found[0].mixer]
    return found, ", ".join(["byte-level GPT", *first[:1], *mixer, *first[1:]])


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
    """A figure of training and held-out losses over the steps; below, where there are curves in bf16 and in FP8 of one
    mixer, the latter minus the former. Colours are of recipes; of mixers where there are several.

    ValueError where a curve has other steps than bf16's.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    apart = gaps(found)
    figure = Figure(figsize=(9, 7.5 if apart else 4.5), layout="constrained")
    FigureCanvasAgg(figure)  # no display needed
    panels = figure.subplots(2 if apart else 1, 1, sharex=True, squeeze=False, height_ratios=[3, 2] if apart else [1])
    panels = panels[:, 0]
    _losses(panels[0], found, title)
    if apart:
        _gaps(panels[1], apart, found)
    panels[-1].set_xlabel("step")
    return figure


def _losses(panel, found: list[Curve], title: str) -> None:
    several = mixed(found)
    few = len(found) <= 2 and not several
    for place, (curve, name) in enumerate(zip(found, labels(found))):
        colour, base = _colour(curve, found), curve.is_base
        faint, line, dots = (f"{curve.label}, {what}" if few else None for what in _meanings(curve).values())
        # Curves nearly coincide: those in FP8 are dashed and on top, several of them in turns, so that all show. Two of
        # one mixer have one colour, and the one in bf16 is broad.
        dashes = "-" if base or several else "--" if few else (4 * place, (4, 4 * (len(found) - 2)))
        style = {"color": colour, "zorder": 2 if base else 3}
        style |= {"alpha": 0.4, "linewidth": 5} if base and several else {}
        width = window(len(curve.losses))
        if width > 1 and not several:
            panel.plot(curve.steps, curve.losses, color=colour, alpha=0.3, linewidth=0.8, label=faint)
        panel.plot(curve.steps, smooth(curve.losses, width), **style, linestyle=dashes, label=line)
        if curve.held_out:
            dotted = {"marker": "o", "markersize": 5, "fillstyle": "none", "linestyle": ":", "linewidth": 1}
            panel.plot(*np.transpose(curve.held_out), **style | dotted, label=dots)
        if not few:
            panel.plot([], [], **{name: style[name] for name in style if name != "zorder"}, label=name)
    panel.set(title=title, ylabel="loss, nats per byte")
    said = {how: what for how, what in _meanings(found[0]).items() if how != "faint" or not several}
    meanings = "\n".join(f"{how}: {what}" for how, what in said.items())
    panel.legend(title=None if few else meanings, alignment="left")
    panel.grid(alpha=0.3)


def _colour(curve: Curve, found: list[Curve]) -> str:
    return colours.MIXERS[curve.mixer] if mixed(found) else colours.OF[curve.name]


def _gaps(panel, apart: list[Gap], found: list[Curve]) -> None:
    reach, base, named = 0.0, apart[0].base, labels(found)
    for gap in apart:
        curve, values, colour = gap.curve, gap.values, _colour(gap.curve, found)
        width = window(len(values))
        smoothed = smooth(values, width)
        if len(apart) == 1 and width > 1:
            panel.plot(curve.steps, values, color=colour, alpha=0.3, linewidth=0.8, label=_points(curve))
        name = next(name for each, name in zip(found, named) if each is curve)
        panel.plot(curve.steps, smoothed, color=colour, label=f"{name}: {gap.text}")
        # What chance does in the first steps, and single ones, are no reason to make all else flat.
        reach = max(reach, 1.3 * float(np.quantile(np.abs(values if len(apart) == 1 else smoothed), 0.95)), 1e-3)
    panel.axhline(0, color="black" if mixed(found) else colours.OF[base.name], linewidth=0.8)
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
