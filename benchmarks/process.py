"""Measurements in processes of their own."""

import json
import os
import subprocess
import sys
from typing import Any


def in_own_process(command: str, flags: str = "", timeout_s: float | None = None, **options) -> Any:
    """What `python -m benchmarks <command>` with these options prints last, as JSON; {"error": ...} where it fails.

    flags: XLA's, in addition to the flags of the environment.
    """
    words = []
    for name, value in options.items():
        words += [f"--{name}"] if value is True else [] if value is False else [f"--{name}", str(value)]
    environment = os.environ | {"XLA_FLAGS": f"{os.environ.get('XLA_FLAGS', '')} {flags}".strip()}
    program = [sys.executable, "-m", __package__, command, *words]
    try:
        done = subprocess.run(program, env=environment, capture_output=True, text=True, timeout=timeout_s)
    except subprocess.TimeoutExpired:
        return {"error": f"took more than {timeout_s} s"}
    if done.returncode:
        return {"error": done.stderr.strip()[-500:] or f"exit code {done.returncode}"}
    return json.loads(done.stdout.splitlines()[-1])
