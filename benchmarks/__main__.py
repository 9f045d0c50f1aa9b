"""`python -m benchmarks`: the same as `python benchmarks/run.py`."""

import pathlib
import runpy
import sys

HERE = pathlib.Path(__file__).resolve().parent

# The source tree's te_jax has no CUDA extension: it must not hide an installed one. run.py appends it last.
sys.path = [path for path in sys.path if pathlib.Path(path or ".").resolve() != HERE.parent]
sys.path.insert(0, str(HERE))
runpy.run_path(str(HERE / "run.py"), run_name="__main__")
