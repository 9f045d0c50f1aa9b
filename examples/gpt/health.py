"""FP8 health: what becomes of the tensors of each layer when they are quantized, over the steps of a run."""

import math
import pathlib
from typing import get_type_hints

import jax
import numpy as np

import te_jax as te
from te_jax.stats import TensorStats

from . import cluster, report, steps

FILES = JSON, PNG = "fp8_report.json", "fp8_report.png"

MEANINGS = {name: kind.__metadata__[0] for name, kind in get_type_hints(TensorStats, include_extras=True).items()}


class Health:
    """Looks at the tensors of a step every --fp8-report-every steps, from the first on, and at the last one.

    A look is the step's forward and backward pass once more, with probes, before the step itself.
    """

    def __init__(self, args, recipe, shardings):
        # NNX's checkpoints hold what Linen's do, and Linen computes the same with it.
        self.stats = steps.make_fp8_stats(steps.make_model(args), recipe, shardings)
        self.every, self.last = args.fp8_report_every, args.steps
        self.board = writer()(args.tensorboard) if args.tensorboard and cluster.is_first() else None

    def due(self, step: int) -> bool:
        return (step - 1) % self.every == 0 or step == self.last

    def look(self, step: int, state: steps.TrainState, batch) -> dict:
        """{"step": step, "tensors": {path: {number: [value of each layer]}}}; None for what is not known or not finite.
        A tensor of experts has a value of each expert of the first layer, then of the second.

        state, batch: what the step starts from.
        """
        found = jax.device_get(self.stats(state, batch))
        tensors = {
            path: {name: [_plain(value) for value in np.ravel(layers)] for name, layers in tensor._asdict().items()}
            for path, tensor in found.items()
        }
        if self.board:
            for path, name, layer, value in _scalars(tensors):
                self.board.add_scalar(f"{name}/{path}/{layer}", value, step)
        return {"step": step, "tensors": tensors}

    def close(self):
        if self.board:
            self.board.close()


def monitor(args, recipe, shardings) -> Health | None:
    """What --fp8-report asks for; None without it, and in bf16 (no recipe)."""
    return None if recipe is None or args.fp8_report is None else Health(args, recipe, shardings)


def check(args) -> None:
    """Raises ValueError for --tensorboard without tensorboardX, OSError for a directory that cannot be made."""
    if args.tensorboard:
        writer()
    for directory in filter(None, (args.fp8_report, args.tensorboard)):
        pathlib.Path(directory).mkdir(parents=True, exist_ok=True)


def writer() -> type:
    """The class of what writes scalars for TensorBoard."""
    try:
        from tensorboardX import SummaryWriter
    except ImportError as error:
        raise ValueError("--tensorboard needs tensorboardX: pip install tensorboardX, or leave it out") from error
    return SummaryWriter


def _plain(value) -> float | None:
    return float(value) if math.isfinite(value) else None


def _scalars(tensors: dict):
    """(path, number, layer, value) of all that is known."""
    for path, numbers in tensors.items():
        for name, layers in numbers.items():
            for layer, value in enumerate(layers):
                if value is not None:
                    yield path, name, layer, value


def write(directory: pathlib.Path, every: int, looks: list[dict], title: str) -> None:
    """fp8_report.json, and fp8_report.png with the numbers over layers and steps. looks: of `Health.look`, in order."""
    directory.mkdir(parents=True, exist_ok=True)
    content = {"every": every, "numbers": MEANINGS, "null": "not known, or not finite", "looks": looks}
    report.write_json(directory / JSON, content)
    draw(looks, title).savefig(directory / PNG, dpi=110)


def table(look: dict) -> str:
    """The numbers of one look, a line for each tensor."""
    unknown = lambda layers: np.array([np.nan if value is None else value for value in layers])
    stats = {
        path: TensorStats(**{name: unknown(layers) for name, layers in numbers.items()})
        for path, numbers in look["tensors"].items()
    }
    return te.fp8_stats_table(stats)


def grid(looks: list[dict], number: str) -> np.ndarray:
    """[tensors * layers, looks]: the layers of a tensor side by side, NaN for what is not known."""
    columns = [[v for tensor in look["tensors"].values() for v in tensor[number]] for look in looks]
    return np.array(columns, float).T  # None becomes NaN


def draw(looks: list[dict], title: str):
    """A figure of four heat maps with a row for each layer of each tensor and a column for each look."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.colors import LogNorm, Normalize
    from matplotlib.figure import Figure

    first = looks[0]["tensors"]
    layers = [len(tensor["amax"]) for tensor in first.values()]
    rows, places = sum(layers), np.cumsum([0, *layers])
    figure = Figure(figsize=(17, min(max(4.0, 1.5 + 0.13 * rows), 40.0)), layout="constrained")
    FigureCanvasAgg(figure)  # no display needed
    figure.suptitle(title)
    panels = figure.subplots(1, 4, sharey=True)
    amax, headroom = np.log2(np.maximum(grid(looks, "amax"), 2.0**-126)), grid(looks, "headroom")
    fractions = {"cmap": "inferno_r", "norm": LogNorm(1e-6, 1)}  # 0 stays white, as does what is not known
    for panel, name, values, how in (
        (panels[0], "log2 of the amax", amax, {"cmap": "viridis", "norm": Normalize()}),
        (panels[1], "headroom, powers of 2", headroom,
         {"cmap": "RdBu", "norm": Normalize(-4, 4)}),
        (panels[2], "saturation, fraction", grid(looks, "saturation"), fractions),
        (panels[3], "underflow, fraction", grid(looks, "underflow"), fractions),
    ):  # fmt: skip
        image = panel.imshow(np.ma.masked_invalid(values), aspect="auto", interpolation="nearest", **how)
        figure.colorbar(image, ax=panel, extend="both" if name.startswith("headroom") else "neither")
        panel.set_title(name, fontsize="medium")
        panel.set_xlabel("step")
        shown = np.unique(np.linspace(0, len(looks) - 1, min(6, len(looks))).round().astype(int))
        panel.set_xticks(shown, [looks[i]["step"] for i in shown])
        for place in places[1:-1]:
            panel.axhline(place - 0.5, color="black", linewidth=0.4)
    names = [path.removeprefix("layers/TransformerLayer_0/") for path in first]
    panels[0].set_yticks((places[:-1] + places[1:] - 1) / 2, names, fontsize="small")
    panels[0].set_ylabel(f"tensor; in it, layers 0 to {layers[0] - 1} from above" if layers[0] > 1 else "tensor")
    return figure
