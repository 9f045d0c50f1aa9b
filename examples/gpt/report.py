"""What a run leaves behind: results.json, the gap between two runs, and how far a curve is from an earlier one."""

import datetime
import hashlib
import importlib.metadata
import json
import pathlib
import platform
import shlex
import sys

import jax
import numpy as np

from . import config, load

POINTS = 500  # of a loss curve in results.json
SMOOTHED = 20  # points of a curve whose mean is compared with an earlier run's


def gap(losses: list[float], reference: list[float]) -> dict:
    """FP8 minus bf16, step by step, over the last tenth of the steps, in nats: mean, and mean size.

    The two runs see the same batches, so the batches' own noise is not in it.
    """
    difference = np.subtract(losses, reference)
    last = difference[-max(1, len(difference) // 10) :]
    return {"steps": len(last), "mean": float(last.mean()), "mean_abs": float(np.abs(last).mean())}


def within(gap: dict, limit: float) -> bool:
    return abs(gap["mean"]) <= limit  # so that NaN fails


def thin(losses: list[float]) -> list[list[float]]:
    """[[step, mean loss up to this step from the one before it], ...], at most `POINTS` of them."""
    blocks = np.array_split(np.asarray(losses), min(POINTS, len(losses)))
    ends = np.cumsum([len(b) for b in blocks])
    return [[int(end), float(block.mean())] for end, block in zip(ends, blocks, strict=True)]


def digest(losses: list[float]) -> str:
    """SHA-256 of the losses of all steps, of which `thin` keeps means: two runs are equal bit for bit if it is."""
    return hashlib.sha256(np.asarray(losses, np.float64).tobytes()).hexdigest()


def read(path: pathlib.Path, key: dict, precisions: tuple[str, ...], steps: int) -> dict[str, list]:
    """The loss curves of an earlier results.json, by precision. Raises ValueError where it is none, has other settings
    than `key`, lacks a precision or does not end at step `steps`."""
    try:
        found = json.loads(path.read_text())
        args, curves = found["args"], {name: run["losses"] for name, run in found["runs"].items()}
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"--against {path}: this is no results.json of train_gpt.py ({error!r})") from error
    config.check_same(f"--against {path}", args, key, "make both equal")
    for name in precisions:
        if name not in curves:
            raise ValueError(f"--against {path}: it has {', '.join(curves)}, not {name}: run that there too")
        if curves[name][-1][0] != steps:
            raise ValueError(f"--against {path}: {name} ends at step {curves[name][-1][0]} there, at {steps} here")
    return {name: curves[name] for name in precisions}


def distance(losses: list[float], earlier: list[list[float]]) -> dict:
    """How far a curve lies from an earlier one (of `thin`), in nats: the largest difference of two points, after which
    step, and the largest difference of two means over `SMOOTHED` points, in which a single batch counts less."""
    steps, ours = np.transpose(thin(losses))
    differences = np.abs(ours - np.transpose(earlier)[1])
    window = min(SMOOTHED, len(steps))
    means = [np.convolve(curve, np.full(window, 1 / window), "valid") for curve in (ours, np.transpose(earlier)[1])]
    return {
        "largest": float(differences.max()),
        "step": int(steps[differences.argmax()]),
        "largest_of_means": float(np.abs(np.subtract(*means)).max()),
        "points": window,
    }


def versions() -> dict[str, str]:
    found = {"python": platform.python_version()}
    for name in ("te_jax", "jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "numpy"):
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = "run from its source folder"
    return found


def write(path: pathlib.Path, args: dict, text: str, runs: dict[str, dict], gap: dict | None, distances: dict) -> None:
    """`runs`: by precision, each with its whole `losses`; `distances`: by precision, from an earlier run."""
    device = jax.devices()[0]
    curves = {
        name: {"losses": thin(run["losses"]), "losses_sha256": digest(run["losses"])} for name, run in runs.items()
    }
    results = {
        "command": shlex.join([pathlib.Path(sys.executable).name, *sys.argv]),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "device": {"platform": device.platform, "kind": device.device_kind, "count": jax.device_count()},
        "versions": versions(),
        "text": text,
        "args": args,
        "runs": {name: run | curves[name] for name, run in runs.items()},
        "gap_last_tenth": gap,
        "distances": distances,
    }
    write_json(path, results, indent=1)


def write_json(path: pathlib.Path, content: dict, **options) -> None:
    """All of it or nothing: on a full disk an earlier file stays as it was."""
    partial = path.with_name(f".{path.name}.partial")
    partial.write_text(json.dumps(content, **options) + "\n")
    partial.replace(path)


def lines(runs: dict[str, dict], gap: dict | None, distances: dict) -> list[str]:
    """The same in words."""
    said = []
    for name, run in runs.items():
        last = np.mean(run["losses"][-max(1, len(run["losses"]) // 10) :])
        parts = [f"{name}: loss {last:.4f} nats over the last tenth of {len(run['losses'])} steps"]
        if run["held_out"]:
            parts.append(f"held-out {run['held_out'][-1][1]:.4f}")
        if run["step_ms"]:
            parts.append(f"{run['step_ms']:.1f} ms a step, {run['tokens_per_s']:,.0f} tokens/s")
        else:
            parts.append("no step was timed (from the second one of a run on, they are)")
        if run["mfu"]:
            parts.append(f"MFU {run['mfu']:.1%}")
        said.append("; ".join(parts))
    said += [load.line(name, run["load"]) for name, run in runs.items() if run.get("load")]
    if gap:
        said.append(
            f"gap (FP8 - bf16) over the last {gap['steps']} steps: mean {gap['mean']:+.4f} nats, "
            f"mean size {gap['mean_abs']:.4f}"
        )
    for name, found in distances.items():
        if found["largest"] == 0:
            said.append(f"{name} against the earlier run: all points of the curve are equal bit for bit")
            continue
        said.append(
            f"{name} against the earlier run: losses differ by {found['largest']:.1e} nats at most (step "
            f"{found['step']}), means over {found['points']} points by {found['largest_of_means']:.1e}"
        )
    return said
