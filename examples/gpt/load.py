"""How even the loads of a model's experts are: the largest over the mean, and a heat map over layers and experts."""

import pathlib

import numpy as np

PNG = "load.png"


def fresh() -> dict:
    """What a run keeps: of each step the mean over layers of `max_over_mean`; and how many tokens each expert got,
    [layer][expert], over the last tenth of the steps."""
    return {"max_over_mean": [], "counts": []}


def max_over_mean(counts) -> np.ndarray:
    """f[layers] of the tokens i[layers, experts]: of the expert that has the most; 1 where all have as many."""
    counts = np.asarray(counts, float)
    return counts.max(-1) / counts.mean(-1)


def add(kept: dict, counts, late: bool) -> None:
    """Takes the loads [layers, experts] of a step. late: it is one of the last tenth."""
    counts = np.asarray(counts)
    kept["max_over_mean"].append(float(max_over_mean(counts).mean()))
    if late:
        kept["counts"] = (counts + (kept["counts"] or 0)).tolist()


def summary(kept: dict) -> dict | None:
    """For results.json: `max_over_mean` of each step; `late`, its mean over the last tenth of the steps;
    `worst`, the one of the layer whose loads, summed over these steps, are the least even. None without experts."""
    curve = kept["max_over_mean"]
    if not curve:
        return None
    late = curve[-max(1, len(curve) // 10) :]
    worst = float(max_over_mean(kept["counts"]).max()) if kept["counts"] else None
    return {
        "max_over_mean": curve,
        "steps": len(late),
        "late": float(np.mean(late)),
        "worst": worst,
        "counts": kept["counts"],
    }


def line(name: str, found: dict) -> str:
    """The same in words."""
    text = f"{name}: the expert with the most tokens has {found['late']:.2f} times the mean in a step"
    if found["worst"] is None:
        return text
    return f"{text}, over the last tenth of the steps together {found['worst']:.2f} in the least even layer"


def draw(runs: dict[str, dict], title: str):
    """A figure with a heat map for each run that has `load`: its experts' tokens over the mean of their layer. None
    where no run came to its last steps."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.colors import Normalize
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    loads = {name: np.asarray(run["load"]["counts"], float) for name, run in runs.items() if run["load"]["counts"]}
    if not loads:
        return None
    layers, experts = next(iter(loads.values())).shape
    size = 2.5 + len(loads) * min(max(3.5, 0.3 * experts), 12.0), min(max(3.5, 1.5 + 0.25 * layers), 12.0)
    figure = Figure(figsize=size, layout="constrained")
    FigureCanvasAgg(figure)  # no display needed
    figure.suptitle(title)
    panels = figure.subplots(1, len(loads), sharey=True, squeeze=False)[0]
    for panel, (name, counts) in zip(panels, loads.items()):
        relative = counts / counts.mean(-1, keepdims=True)
        image = panel.imshow(relative, aspect="auto", interpolation="nearest", cmap="RdBu_r", norm=Normalize(0, 2))
        panel.set_title(f"{name}, at most {relative.max():.2f}", fontsize="medium")
        panel.set_xlabel("expert")
        for axis in (panel.xaxis, panel.yaxis):
            axis.set_major_locator(MaxNLocator(integer=True))
    panels[0].set_ylabel("layer")
    figure.colorbar(image, ax=panels, extend="max", label="over the layer's mean, last tenth")
    return figure


def save(path: pathlib.Path, runs: dict[str, dict], title: str) -> bool:
    """Whether there was something to draw."""
    drawn = draw(runs, title)
    if drawn:
        drawn.savefig(path, dpi=130)
    return drawn is not None
