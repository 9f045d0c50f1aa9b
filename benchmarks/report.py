"""Rows as a table, as summaries, and against an earlier run's."""

import json
import math
import pathlib

GB = 1e9


def load(path: pathlib.Path) -> dict:
    """An earlier result. Raises ValueError where the file holds none."""
    result = json.loads(path.read_text())
    if not isinstance(result, dict) or "rows" not in result:
        raise ValueError(f"{path}: no result of `python -m benchmarks`: it has no `rows`.")
    return result


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
    ("case", "case", lambda row: row["case"]),
    ("implementation", "impl", lambda row: row["impl"]),
    ("ms", "ms", lambda row: f"{row['ms']:.4f}"),
    ("min", "min_ms", lambda row: f"{row['min_ms']:.4f}"),
    ("rate", "ms", _rate),
    ("of ceiling", "fraction", lambda row: f"{row['fraction']:.2f}"),
    ("us/token", "us_per_token", lambda row: f"{row['us_per_token']:.3f}"),
    ("tokens/s", "tokens_per_s", lambda row: f"{row['tokens_per_s']:.0f}"),
    ("a GPU", "tokens_per_s_per_gpu", lambda row: f"{row['tokens_per_s_per_gpu']:.0f}"),
    ("MFU", "mfu", lambda row: f"{row['mfu']:.3f}"),
    ("of FP8's peak", "mfu_fp8", lambda row: f"{row['mfu_fp8']:.3f}"),
    ("in kernels", "profile", lambda row: f"{row['profile']['kernel_ms']:.4f}"),
    ("peak GB", "peak_bytes", lambda row: f"{row['peak_bytes'] / GB:.2f}"),
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


_MEMORY_OF = ("gpt layer fwd+bwd", "llama layer fwd+bwd")


def memory(rows: list[dict]) -> list[str]:
    """Peak memory of FP8 over bf16, a line for each layer."""
    lines = []
    for case in _MEMORY_OF:
        peaks = {row["impl"]: row for row in rows if row["case"] == case and row.get("peak_bytes")}
        if not peaks.keys() >= {"te_jax fp8", "te_jax bf16"}:
            continue
        fp8 = peaks["te_jax fp8"]
        ratios = [
            f"{fp8['peak_bytes'] / peaks[impl]['peak_bytes']:.3f} of {impl}'s {peaks[impl]['peak_bytes'] / GB:.3f} GB"
            for impl in ("te_jax bf16", "flax bf16", "flax fp8 direct")
            if impl in peaks
        ]
        saved = [
            f"{impl} {row['saved_bytes'] / GB:.3f} GB"
            for impl, row in peaks.items()
            if impl.startswith("te_jax") and row.get("saved_bytes")
        ]
        kept = f"; kept for the backward pass: {', '.join(saved)}" if saved else ""
        lines.append(f"FP8 / bf16 peak, {case}: {fp8['peak_bytes'] / GB:.3f} GB, {', '.join(ratios)}{kept}")
    return lines
