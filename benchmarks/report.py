"""Rows as a table, as summaries, and against an earlier run's."""

import json
import math
import pathlib

from . import ceilings, machine

GB = 1e9


def load(path: pathlib.Path) -> dict:
    """An earlier result. Raises ValueError where the file holds none."""
    try:
        result = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ValueError(f"{path}: no result of `python -m benchmarks`: {error}.") from None
    if not isinstance(result, dict) or not {"rows", "queued_ms"} & result.keys():
        raise ValueError(f"{path}: no result of `python -m benchmarks`: it has no `rows`.")
    return result


def write(result: dict, out: pathlib.Path | None, text: str = "", text_out: pathlib.Path | None = None):
    """The result as JSON into `out`, and text into `text_out`, each where it is given."""
    for path, content in ((out, json.dumps(result, indent=1) + "\n"), (text_out, text)):
        if path:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(content)


def show_heading(result: dict):
    print(machine.line(result["machine"]))
    if "ceilings" in result:
        print(ceilings.line(result["ceilings"]))


def in_order(rows: list[dict]) -> list[dict]:
    """Rows of one case together; those of te_jax with the ratio of their time to that of each other row."""
    by_case = {}
    for row in rows:
        by_case.setdefault(row["case"], []).append(row)
    for group in by_case.values():
        others = [row for row in group if not row["impl"].startswith("te_jax") and "ms" in row]
        for row in group:
            if row["impl"].startswith("te_jax") and "ms" in row:
                row["beside"] = {other["impl"]: row["ms"] / other["ms"] for other in others}
    return [row for group in by_case.values() for row in group]


def against(rows: list[dict], old: dict) -> float | None:
    """Gives each row `old_ms` where the earlier result has it too -> the geometric mean of new time over old."""
    before = {(row["case"], row["impl"]): row["ms"] for row in old["rows"] if "ms" in row}
    logs = []
    for row in rows:
        row.pop("old_ms", None)
        if "ms" in row and (row["case"], row["impl"]) in before:
            row["old_ms"] = before[row["case"], row["impl"]]
            logs.append(math.log(row["ms"] / row["old_ms"]))
    return math.exp(sum(logs) / len(logs)) if logs else None


def _rate(row):
    return f"{row['tflops']:.0f} TFLOP/s" if row["tflops"] else f"{row['tbs']:.2f} TB/s"


def _peer(row):
    peer = row["peer"]
    return f"{row['ms'] / peer['ms']:.2f}x {peer['whose']} ({peer['figure']:g} {peer['unit']})"


# Of each column: its name, the key that a row needs for it, and what it shows.
_COLUMNS = [
    ("case", "case", "{case}".format_map),
    ("implementation", "impl", "{impl}".format_map),
    ("ms", "ms", "{ms:.4f}".format_map),
    ("min", "min_ms", "{min_ms:.4f}".format_map),
    ("rate", "ms", _rate),
    ("of ceiling", "fraction", "{fraction:.2f}".format_map),
    ("of bound", "of_bound", "{of_bound:.1%}".format_map),
    ("routing", "routing", "{routing:.1%}".format_map),
    ("MHz", "sm_clock", "{sm_clock:.0f}".format_map),
    ("W", "power", "{power:.0f}".format_map),
    ("J", "joules", "{joules:.3g}".format_map),
    ("us/token", "us_per_token", "{us_per_token:.3f}".format_map),
    ("tokens/s", "tokens_per_s", "{tokens_per_s:.0f}".format_map),
    ("a GPU", "tokens_per_s_per_gpu", "{tokens_per_s_per_gpu:.0f}".format_map),
    ("MFU", "mfu", "{mfu:.3f}".format_map),
    ("of FP8's peak", "mfu_fp8", "{mfu_fp8:.3f}".format_map),
    ("in kernels", "profile", "{profile[kernel_ms]:.4f}".format_map),
    ("peak GB", "peak_bytes", lambda row: f"{row['peak_bytes'] / GB:.2f}"),
    ("collectives ms", "collective_ms", "{collective_ms:.2f}".format_map),
    ("of them exposed", "exposed_ms", "{exposed_ms:.2f}".format_map),
    ("MB received", "received_bytes", lambda row: f"{row['received_bytes'] / 1e6:.1f}"),
    ("beside it", "beside", lambda row: ", ".join(f"{ratio:.2f}x {impl}" for impl, ratio in row["beside"].items())),
    ("against old", "old_ms", lambda row: f"{row['ms'] / row['old_ms']:.3f}x ({row['old_ms']:.4f})"),
    ("peer's figure", "peer", _peer),
]


def _cells(row: dict) -> list[str]:
    if "error" in row:
        cells = [row["case"], row["impl"], "error", "", row["error"].split("\n")[0][:60]]
        return cells + [""] * (len(_COLUMNS) - len(cells))
    # The memory of an op's row is its operands', several sets of them.
    shown = lambda key: row.get(key) is not None and not (key == "peak_bytes" and row["suite"] == "ops")
    return [show(row) if shown(key) else "" for _, key, show in _COLUMNS]


def table(rows: list[dict]) -> str:
    return columns([[name for name, _, _ in _COLUMNS], *map(_cells, rows)])


def columns(lines: list[list[str]]) -> str:
    """Lines of cells below a header, aligned; without the columns that are empty in all of them."""
    used = [i for i in range(len(lines[0])) if i == 0 or any(line[i] for line in lines[1:])]
    lines = [[line[i] for i in used] for line in lines]
    widths = [max(len(line[i]) for line in lines) for i in range(len(used))]
    lines.insert(1, ["-" * width for width in widths])
    return "\n".join("  ".join(cell.ljust(width) for cell, width in zip(line, widths)).rstrip() for line in lines)


def memory(rows: list[dict]) -> list[str]:
    """Peak memory of FP8 over bf16, a line for each layer."""
    lines = []
    for case in ("gpt layer fwd+bwd", "llama layer fwd+bwd"):
        peaks = {row["impl"]: row["peak_bytes"] / GB for row in rows if row["case"] == case and row.get("peak_bytes")}
        if not peaks.keys() >= {"te_jax fp8", "te_jax bf16"}:
            continue
        fp8 = peaks["te_jax fp8"]
        others = [impl for impl in ("te_jax bf16", "flax bf16", "flax fp8 direct") if impl in peaks]
        ratios = ", ".join(f"{fp8 / peaks[impl]:.3f} of {impl}'s {peaks[impl]:.3f} GB" for impl in others)
        saved = [row for row in rows if row["case"] == case and row["impl"].startswith("te_jax")]
        saved = [f"{row['impl']} {row['saved_bytes'] / GB:.3f} GB" for row in saved if row.get("saved_bytes")]
        kept = f"; kept for the backward pass: {', '.join(saved)}" if saved else ""
        lines.append(f"FP8 / bf16 peak, {case}: {fp8:.3f} GB, {ratios}{kept}")
    return lines
