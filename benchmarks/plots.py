"""The plots of the documents, docs/images/*.svg, drawn from results/ by `make tables` as the tables are.

SVG written here, not by a plotting library: the same figures give the same file under every version, so that a test
can hold the files to the results, and a plot follows the reader's light or dark screen.
"""

import math
import pathlib
from collections.abc import Callable, Mapping, Sequence

from .figures import ROOT, figure, read

IMAGES = ROOT / "docs" / "images"
WIDTH, MARGIN = 600, 16
_BAR, _GAP, _ROW = 20, 5, 22  # heights of a bar, between bars, of a line of text
# {class: (colour on white, colour on black)}; a precision has a hue, a library a depth.
COLOURS = {
    "te-fp8": ("#1f6feb", "#58a6ff"),
    "te-bf16": ("#8db9f5", "#28559a"),
    "flax-fp8": ("#d9730d", "#f0883e"),
    "flax-bf16": ("#eebb8d", "#8a5523"),
    "peer-fp8": ("#57606a", "#afb8c1"),
    "peer-bf16": ("#b7bec6", "#57606a"),
    "current": ("#1a7f37", "#3fb950"),
    "block": ("#8250df", "#bc8cff"),
    "fixed": ("#bf3989", "#f778ba"),
    "zero": ("#8c959f", "#6e7681"),
}
Series = Sequence[tuple[str, str, Sequence[float]]]  # (label, class, values)


def _style() -> str:
    def rules(mode: int, ground: str, ink: str, faint: str) -> str:
        colours = "".join(f".{name}{{fill:{pair[mode]};stroke:{pair[mode]}}}" for name, pair in COLOURS.items())
        return f".ground{{fill:{ground}}}text{{fill:{ink};stroke:none}}.grid{{stroke:{faint}}}{colours}"

    dark = rules(1, "#0d1117", "#e6edf3", "#30363d")
    light = rules(0, "#ffffff", "#1f2328", "#d0d7de")
    font = "text{font:14px system-ui,sans-serif}.title{font-weight:600}.line{fill:none;stroke-width:2.5}"
    return (
        f"<style>{font}{light}.line{{fill:none}}@media(prefers-color-scheme:dark){{{dark}.line{{fill:none}}}}</style>"
    )


def _text(x: float, y: float, text: str, kind: str = "", anchor: str = "start") -> str:
    escaped = text.replace("&", "&amp;").replace("<", "&lt;")
    return f'<text class="{kind}" x="{x:.0f}" y="{y:.0f}" text-anchor="{anchor}">{escaped}</text>'


def _svg(title: str, height: float, parts: Sequence[str]) -> str:
    frame = f'<rect class="ground" width="{WIDTH}" height="{height:.0f}" rx="6"/>'
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height:.0f}" role="img"><title>{title}</title>'
    )
    return "\n".join([head + _style() + frame, _text(MARGIN, 26, title, "title"), *parts, "</svg>\n"])


def bars(title: str, groups: Mapping[str, Series], shown: str = "{:.1f} ms") -> str:
    """Bars to the right, below the name of their group; each has its label and its one value next to it."""
    most = max(values[0] for rows in groups.values() for *_, values in rows)
    left, y, parts = 196, 50, []
    for name, rows in groups.items():
        if name:
            parts.append(_text(MARGIN, y + 12, name))
            y += _ROW
        for label, kind, (value,) in rows:
            length = (WIDTH - left - 90) * value / most
            parts.append(_text(left - 8, y + 15, label, anchor="end"))
            parts.append(f'<rect class="{kind}" x="{left}" y="{y}" width="{length:.1f}" height="{_BAR}" rx="2"/>')
            parts.append(_text(left + length + 8, y + 15, shown.format(value)))
            y += _BAR + _GAP
        y += 8
    return _svg(title, y + 6, parts)


def lines(title: str, ticks: Sequence[str], series: Series, unit: str, low: float = 0.0) -> str:
    """Lines over equally spaced points, a tick (or "") below each; y from `low` up, in steps of 1, 2 or 5."""
    top, bottom, left, right = 64 + _ROW, 330, 64, WIDTH - MARGIN - 12
    most = max(value for *_, values in series for value in values)
    power = 10.0 ** math.floor(math.log10((most - low) / 4))
    step = next(power * factor for factor in (1, 2, 5, 10) if power * factor * 5 >= most - low)
    high = low + step * math.ceil((most - low) / step - 1e-9)
    at = lambda value: bottom - (value - low) * (bottom - top) / (high - low)
    parts = [_text(MARGIN, 50, unit)]
    for i in range(round((high - low) / step) + 1):
        value = low + i * step
        parts.append(f'<path class="grid" d="M{left} {at(value):.1f}H{right}"/>')
        parts.append(_text(left - 8, at(value) + 5, f"{value:.6g}", anchor="end"))
    for i, tick in enumerate(ticks):
        parts.append(_text(left + (right - left) * i / (len(ticks) - 1), bottom + 22, tick, anchor="middle"))
    x = left
    for label, kind, values in series:
        points = [(left + (right - left) * i / (len(values) - 1), at(value)) for i, value in enumerate(values)]
        path = "L".join(f"{a:.1f} {b:.1f}" for a, b in points)
        parts.append(f'<path class="{kind} line" style="fill:none" d="M{path}"/>')
        parts.append(f'<rect class="{kind}" x="{x}" y="{62}" width="14" height="10" rx="2"/>')
        parts.append(_text(x + 20, 72, label))
        x += 38 + 8 * len(label)
    return _svg(title, bottom + 40, parts)


# -- what is drawn ---------------------------------------------------------------------------------------------


def _number(place: str) -> float:
    return float(figure(f"{place} = .6g"))


def layers_next_to_peers() -> str:
    groups = {}
    for name, text in (
        ("gpt layer", "GPT layer, 8192 tokens, hidden size 4096"),
        ("llama layer", "Llama layer, 8192 tokens"),
    ):
        ms = lambda impl, name=name: [_number(f"h100/peers : {name} fwd+bwd | {impl} : ms")]
        groups[text] = [
            ("Flax bf16", "flax-bf16", ms("flax bf16")),
            ("TransformerEngine bf16", "peer-bf16", ms("transformer engine bf16")),
            ("te_jax bf16", "te-bf16", ms("te_jax bf16")),
            ("TransformerEngine FP8", "peer-fp8", ms("transformer engine fp8 delayed")),
            ("te_jax FP8, default", "te-fp8", ms("te_jax fp8")),
            ("te_jax FP8, fast sums", "te-fp8", ms("te_jax fp8 fast")),
        ]
    return bars("Forward and backward on one H100, delayed scaling; shorter is faster", groups)


def layer_by_recipe() -> str:
    rows = [
        ("bf16", "te-bf16", "te_jax bf16; recipes"),
        ("Float8BlockScaling", "block", "te_jax fp8 block; blocks gpt"),
        ("Float8CurrentScaling", "current", "te_jax fp8 current; recipes"),
        ("DelayedScaling", "te-fp8", "te_jax fp8; recipes"),
        ("FixedScaling", "fixed", "te_jax fp8 fixed; recipes"),
    ]
    ms = lambda impl: [_number(f"h200/layers : gpt layer fwd+bwd | {impl}")]
    return bars("GPT layer by recipe, forward and backward", {"": [(a, b, ms(impl)) for a, b, impl in rows]})


def time_per_token() -> str:
    tokens = {"1k": 1024, "2k": 2048, "4k": 4096, "8k": 8192, "16k": 16384, "32k": 32768, "64k": 65536}
    us = lambda impl: [
        _number(f"h200/scaling : gpt layer h4096, {n} tokens fwd+bwd | {impl}; tokens : us_per_token")
        for n in tokens.values()
    ]
    series = [("te_jax bf16", "te-bf16", us("te_jax bf16")), ("te_jax FP8", "te-fp8", us("te_jax fp8"))]
    return lines("GPT layer, forward and backward on an H200", list(tokens), series, "µs for each token, by tokens")


def whole_steps() -> str:
    groups = {}
    for name, case, run in (
        ("one GPU", "b8 s2048, fsdp=1", "one"),
        ("two GPUs, fully sharded", "b16 s2048, fsdp=2", "two"),
    ):
        rows = [("Flax bf16", "flax-bf16", "flax bf16"), ("te_jax bf16", "te-bf16", "te_jax bf16")]
        rows.append(("te_jax FP8", "te-fp8", "te_jax fp8 fast"))
        place = "h200x2/training : gpt, 20 layers h2048 {} step | {}; {} : ms"
        groups[name] = [(a, b, [_number(place.format(case, impl, run))]) for a, b, impl in rows]
    return bars("A training step of a GPT of 1.08B parameters, 16k tokens a GPU", groups, "{:.0f} ms")


def gaps_of_recipes(mean_of: int = 25) -> str:
    """FP8 minus bf16 of seed 0, means over `mean_of` of the losses, of which the files have every fourth."""
    losses = lambda name, run: [loss for _, loss in read(f"h200/train_2000/{name}")["runs"][run]["losses"]]
    bf16 = losses("bf16", "bf16")

    def gap(name: str) -> list[float]:
        differences = [a - b for a, b in zip(losses(name, "fp8"), bf16)]
        starts = range(0, len(differences), mean_of)
        return [sum(differences[i : i + mean_of]) / mean_of for i in starts]

    rows = [("delayed", "te-fp8"), ("current", "current"), ("block", "block"), ("fixed", "fixed")]
    series = [(name, kind, gap(name)) for name, kind in rows]
    ticks = [str(n) if n in (100, 500, 1000, 1500, 2000) else "" for n in range(100, 2001, 100)]
    low = min(0.0, math.floor(min(v for *_, values in series for v in values) * 200) / 200)
    return lines(
        "Loss in FP8 minus loss in bf16, GPT of 353M parameters",
        ticks,
        series,
        "nats, means over 100 steps, by step",
        low,
    )


PLOTS: dict[str, Callable[[], str]] = {
    "layers": layers_next_to_peers,
    "recipes": layer_by_recipe,
    "tokens": time_per_token,
    "training": whole_steps,
    "gaps": gaps_of_recipes,
}


def drawings() -> dict[pathlib.Path, str]:
    """{file: its text}, as it should be."""
    return {IMAGES / f"{name}.svg": draw() for name, draw in PLOTS.items()}
