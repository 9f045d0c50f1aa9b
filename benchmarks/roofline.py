"""The roofline of a result as a picture: rates over intensity below the measured ceilings, te_jax's rows as bars."""

import importlib.util
import pathlib

_COLOURS = {
    "te_jax fp8 fast": "tab:green",
    "te_jax fp8 current": "tab:cyan",
    "te_jax fp8 block": "tab:purple",
    "te_jax fp8": "tab:olive",
    "te_jax bf16": "tab:blue",
    "te_jax": "tab:green",
    "": "tab:gray",
}


def available() -> bool:
    return importlib.util.find_spec("matplotlib") is not None


def _colour(impl: str) -> str:
    return next(colour for prefix, colour in _COLOURS.items() if impl.startswith(prefix))


def draw(result: dict, path: pathlib.Path) -> bool:
    """Writes a PNG; False where the result has no ceilings or no row to show. Needs matplotlib."""
    ceilings, rows = result.get("ceilings"), [row for row in result["rows"] if row.get("fraction")]
    if not ceilings or not rows:
        return False
    from matplotlib.figure import Figure  # no pyplot: no display, no state

    ours = [row for row in rows if row["impl"].startswith("te_jax")]
    figure = Figure(figsize=(17, max(7, 1 + 0.17 * len(ours))), layout="constrained")
    _roofs(figure.add_subplot(1, 2, 1), ceilings, rows)
    _bars(figure.add_subplot(1, 2, 2), ours)
    figure.suptitle(f"{result['machine']['device']}, {result['machine']['date'][:10]}, {result['timing']}")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
    return True


def _roofs(axes, ceilings: dict, rows: list[dict]):
    copy = ceilings["copy"]["sustained"]
    points = [(row["flops"] / _moved(row), row["tflops"], row["impl"]) for row in rows if row["flops"] and _moved(row)]
    peaks = [ceilings[name]["sustained"] for name in ("fp8", "bf16")]
    left = min([peak / copy / 4 for peak in peaks] + [x for x, _, _ in points])
    right = max([peak / copy * 4 for peak in peaks] + [x for x, _, _ in points]) * 1.5
    for name, peak in zip(("fp8", "bf16"), peaks):
        knee = peak / copy
        axes.plot([left, knee, right], [left * copy, peak, peak], color="black", linewidth=1)
        axes.annotate(f"{name} GEMM {peak:.4g} TFLOP/s", (right, peak), ha="right", va="bottom")
    axes.annotate(f"copy {copy:.3g} TB/s", (left, left * copy), va="bottom")
    for impl in dict.fromkeys(impl for _, _, impl in points):
        x, y = zip(*(point[:2] for point in points if point[2] == impl))
        marker = "o" if impl.startswith("te_jax") else "x"
        axes.plot(x, y, marker, color=_colour(impl), markersize=5, alpha=0.7, label=impl)
    axes.set(xscale="log", yscale="log", title="Rows with multiplications")
    axes.set(xlabel="FLOP per byte of arguments and results", ylabel="TFLOP/s")
    if points:
        axes.legend(fontsize=8)


def _moved(row) -> float:
    return row["bytes"] or row.get("io_bytes") or 0.0


def _bars(axes, rows: list[dict]):
    names = [f"{row['case']} | {row['impl'].removeprefix('te_jax ')}" for row in rows]
    axes.barh(names, [row["fraction"] for row in rows], color=[_colour(row["impl"]) for row in rows], alpha=0.7)
    for place, row in enumerate(rows):
        if row.get("beside"):
            # The fastest other implementation of the same case does the same work: its bar would end here.
            axes.plot([row["fraction"] * max(row["beside"].values())], [place], "|", color="black")
    axes.axvline(1.0, color="black", linewidth=1)
    axes.invert_yaxis()
    axes.margins(y=0.005)
    axes.tick_params(axis="y", labelsize=6)
    axes.set(title="te_jax, fraction of the ceiling; | the fastest beside it")
