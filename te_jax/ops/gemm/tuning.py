"""Which algorithm runs a GEMM: te_jax's own kernel or cuBLASLt's first guess, by the shape, and so the same in every
process, unless one of these is asked."""

import json
import math
import os
from pathlib import Path
from typing import NamedTuple

from te_jax.core import extension
from te_jax.core.check import BOOL, check, show


def tune_all(on: bool = True) -> None:
    """From here on a GEMM that runs for the first time in this process is timed: all of cuBLASLt's candidates,
    and te_jax's own kernel where it would run, on scratch memory, of which the fastest stays for the process. Call it
    before the first step.

    Two processes may then choose otherwise, and give other bits: carry the choices over by `save_tuning` and
    `load_tuning`. on: False ends it. Raises RuntimeError where the CUDA extension cannot be used.
    """
    check("tune_all", "on", on, BOOL)
    extension.load().tune_all_gemms(bool(on))


def save_tuning(path: str | os.PathLike[str]) -> int:
    """Writes the choices of all GEMMs that were timed or loaded in this process to the file `path`. Returns their
    number.

    JSON, one GEMM a line: device kind, cuBLASLt version, what the GEMM is, the algorithm, its ms. Files of several
    kinds of devices may be joined.
    """
    module = extension.load()
    version = module.versions()["cublaslt"]
    chosen = {(p["device"], p["key"]): p for p in module.gemm_plans() if p["tuned"]}
    lines = [
        json.dumps({"device": p["device"], "cublaslt": version, "gemm": p["key"], "algo": p["algo"], "ms": p["ms"]})
        for p in chosen.values()
    ]
    Path(path).write_text("".join(line + "\n" for line in lines))
    return len(lines)


def load_tuning(path: str | os.PathLike[str]) -> int:
    """Takes the choices in a file of `save_tuning`: their GEMMs run by them, tuned or not, and give the bits they gave
    there.

    Call it first: a GEMM that has run keeps its choice. Lines of another device kind or another cuBLASLt are left out.
    Returns how many were taken. Raises OSError if `path` cannot be read, and ValueError, with the number of the line,
    if one is not of `save_tuning`: if its algorithm is none that the tuner would try on this device (others may add up
    in fewer bits), or if two lines choose otherwise for one GEMM. Then none is taken.
    """
    module = extension.load()
    extension.has_cuda_device()  # jax takes its devices: the choices are checked on those
    version, taken, chosen = module.versions()["cublaslt"], [], {}
    for number, line in enumerate(Path(path).read_bytes().splitlines(), 1):
        try:
            saved = _Choice.of(line.decode())
            if saved.cublaslt == version and module.check_gemm_plan(saved.device, saved.gemm, saved.algo):
                taken.append(saved)
            earlier, algo = chosen.setdefault(saved[:3], (number, saved.algo))
            if algo != saved.algo:
                raise ValueError(f"line {earlier} chooses otherwise for this GEMM: keep one of them")
        except (ValueError, LookupError, TypeError, ArithmeticError, RuntimeError) as error:
            reason = f"{type(error).__name__}: {error}"
            raise ValueError(
                f"load_tuning: {path}, line {number} is not of save_tuning ({reason}); nothing was taken: remove the "
                "line, or save the file anew."
            ) from error
    return sum(module.load_gemm_plan(c.device, c.gemm, c.algo, c.ms) for c in taken)


class _Choice(NamedTuple):
    """A line of the file."""

    device: str
    cublaslt: int
    gemm: str
    algo: str
    ms: float

    @classmethod
    def of(cls, line: str) -> "_Choice":
        saved = json.loads(line)
        found = cls(*(saved[name] for name in cls._fields))
        if type(found.ms) is int:  # JSON has one kind of number
            found = found._replace(ms=float(found.ms))
        for name, value in found._asdict().items():
            if type(value) is not cls.__annotations__[name]:
                raise TypeError(f"{name} is {show(value)}")
        if not (math.isfinite(found.ms) and found.ms >= 0):
            raise ValueError(f"ms is {found.ms}")
        return found
