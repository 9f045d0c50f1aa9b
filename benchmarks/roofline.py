"""The roofline of a result as a picture: rates over intensity below the measured ceilings, te_jax's rows as bars."""

import collections
import importlib.util
import pathlib

from .gpt import colours


def available() -> bool:
    return importlib.util.find_spec("matplotlib") is not None


def colour(impl: str) -> str:
    """Of an implementation, by its recipe: "te_jax fp8 block" has that of "block" in any plot."""
    if not impl.startswith("te_jax"):
        return colours.OTHERS
    words = impl.split()
    if "fp8" in words:
        return next((colours.OF[word] for word in words if word in colours.OF), colours.OF["delayed"])
    return colours.OF.get(words[-1], colours.NO_RECIPE)


def draw(result: dict, path: pathlib.Path) -> bool:
    """Writes a PNG; False where the result has no ceilings or no row to show. Needs matplotlib."""
    drawn = figure(result)
    if drawn:
        path.parent.mkdir(parents=True, exist_ok=True)
        drawn.savefig(path, dpi=110)
    return drawn is not None


def figure(result: dict):
    """What `draw` writes, or None."""
    ceilings, rows = result.get("ceilings"), [row for row in result["rows"] if row.get("fraction")]
    if not ceilings or not rows:
        return None
    from matplotlib.figure import Figure  # no pyplot: no display, no state

    ours = [row for row in rows if row["impl"].startswith("te_jax")]
    products = [row for row in rows if row["flops"] and _moved(row)]
    panels = 2 if products else 1  # what only moves bytes has no place under the roofs
    drawn = Figure(figsize=(8.5 * panels, max(7, 1 + 0.17 * len(ours))), layout="constrained")
    axes = drawn.subplots(1, panels, squeeze=False)[0]
    if products:
        _roofs(axes[0], ceilings, products)
    _bars(axes[-1], ours)
    drawn.suptitle(f"{result['machine']['device']}, {result['machine']['date'][:10]}, {result['timing']}")
    return drawn


def _roofs(axes, ceilings: dict, rows: list[dict]):
    from matplotlib.ticker import FuncFormatter, NullFormatter

    copy = ceilings["copy"]["sustained"]
    points = [(row["flops"] / _moved(row), row["tflops"], row["impl"]) for row in rows]
    peaks = [ceilings[name]["sustained"] for name in ("fp8", "bf16")]
    left = min([peak / copy / 4 for peak in peaks] + [x for x, _, _ in points])
    right = max([peak / copy * 4 for peak in peaks] + [x for x, _, _ in points]) * 1.5
    for name, peak in zip(("fp8", "bf16"), peaks):
        knee = peak / copy
        axes.plot([left, knee, right], [left * copy, peak, peak], color="black", linewidth=1)
        axes.annotate(f"{name} GEMM {peak:.4g} TFLOP/s", (right, peak), ha="right", va="bottom")
    axes.annotate(f"  copy {copy:.3g} TB/s", (left, left * copy), va="center")
    used = collections.Counter()
    for impl in dict.fromkeys(impl for _, _, impl in points):
        x, y = zip(*(point[:2] for point in points if point[2] == impl))
        shade = colour(impl)
        marker = ("x+1234" if shade == colours.OTHERS else "os^Dv<>")[used[shade] % 6]  # one recipe, several ways
        used[shade] += 1
        axes.plot(x, y, marker, color=shade, markersize=5, alpha=0.7, label=impl)
    axes.set(xscale="log", yscale="log", title="Rows with multiplications")
    axes.yaxis.set_major_formatter(FuncFormatter(lambda y, _: f"{y:g}"))
    axes.yaxis.set_minor_formatter(FuncFormatter(lambda y, _: f"{y:g}" if f"{y:g}"[0] in "25" else ""))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:g}"))
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.set(xlabel="FLOP per byte of arguments and results", ylabel="TFLOP/s")
    axes.legend(fontsize=8)


def _moved(row) -> float:
    return row["bytes"] or row.get("io_bytes") or 0.0


def _bars(axes, rows: list[dict]):
    names = [f"{row['case']} | {row['impl'].removeprefix('te_jax ')}".removesuffix(" | te_jax") for row in rows]
    axes.barh(names, [row["fraction"] for row in rows], color=[colour(row["impl"]) for row in rows], alpha=0.7)
    for place, row in enumerate(rows):
        if row.get("beside"):
            # The fastest other implementation of the same case does the same work: its bar would end here.
            axes.plot([row["fraction"] * max(row["beside"].values())], [place], "|", color="black")
    axes.axvline(1.0, color="black", linewidth=1)
    axes.invert_yaxis()
    axes.margins(y=0.005)
    axes.tick_params(axis="y", labelsize=6)
    beside = "; | the fastest beside it" if any(row.get("beside") for row in rows) else ""
    axes.set(title="te_jax, fraction of the ceiling" + beside, xlabel="time at the ceiling over measured time")
