"""What the benchmarks use of examples/gpt, which is loaded from its place in the source tree."""

import importlib.util
import pathlib
import sys

_ROOT = pathlib.Path(__file__).resolve().parents[1]
_spec = importlib.util.spec_from_file_location("gpt", _ROOT / "examples/gpt/__init__.py")
sys.modules.setdefault("gpt", importlib.util.module_from_spec(_spec))

from gpt import colours, config, flops, model, steps  # noqa: E402

__all__ = ["colours", "config", "flops", "model", "steps"]
