"""Another tree of te_jax next to this one: the bits of a layer's training step, and its time.

Each tree runs in a process of its own, from its own folder, and both are timed in turns. A result that differs between
two runs of one tree, as cuDNN's gradient of queries may, is told apart from one that differs between trees.
"""

import json
import os
import re
import statistics
import subprocess
import sys
from pathlib import Path

import te_jax

from . import machine, report

_TURNS = 6
_CALLS = 60  # of a layer in a turn
_WORKER = Path(__file__).resolve().with_name("trees_worker.py")


class Tree:
    """A process in which `trees_worker.py` runs on the te_jax of a folder."""

    def __init__(self, folder: Path, tiny: bool):
        paths = os.pathsep.join(filter(None, [str(folder), os.environ.get("PYTHONPATH")]))
        # Timing its own GEMMs anew in each process, XLA may choose others; untimed, cuBLASLt's are the fast ones.
        own = "--xla_gpu_autotune_level=0 --xla_gpu_enable_triton_gemm=false"
        flags = f"{os.environ.get('XLA_FLAGS', '')} {own}".strip()
        environment = os.environ | dict(PYTHONPATH=paths, XLA_FLAGS=flags, XLA_PYTHON_CLIENT_PREALLOCATE="false")
        command = [sys.executable, "-P", str(_WORKER), *["--tiny"] * tiny]
        pipes = dict(stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        self.process = subprocess.Popen(command, env=environment, cwd=folder, text=True, **pipes)

    def ask(self, **question) -> dict:
        self.process.stdin.write(json.dumps(question) + "\n")
        self.process.stdin.flush()
        while not (line := self.process.stdout.readline()).startswith("{"):
            if not line:
                raise RuntimeError(f"the process of a tree ended with {self.process.wait()}")
        return json.loads(line)

    def close(self):
        self.process.stdin.close()
        self.process.wait()


def compare(trees: list[Tree], model: str, recipe: str, calls: int) -> dict:
    """A row: which results differ between the trees, which from run to run, and the times."""
    layer = dict(model=model, recipe=recipe)
    first, second = ([tree.ask(**layer, calls=0) for tree in trees] for _ in range(2))
    unsteady = sorted({leaf for a, b in zip(first, second) for leaf in a if a[leaf] != b[leaf]})
    differing = sorted(leaf for leaf in first[0].keys() | first[1].keys() if first[0].get(leaf) != first[1].get(leaf))
    times = [[tree.ask(**layer, calls=calls)["ms"] for tree in trees] for _ in range(_TURNS)]
    other, this = (statistics.median(column) for column in zip(*times))
    row = dict(case=f"{model} {recipe}", leaves=len(first[0]), other_ms=other, ms=this, ratio=this / other)
    return row | dict(differing=differing, unsteady=unsteady)


def main(args) -> int:
    this = Path(te_jax.__file__).parents[1]
    if args.folder is None or not (args.folder / "te_jax").is_dir():
        print(f"--folder is {args.folder}: give the root of another source tree, the folder that has te_jax in it")
        return 2
    trees = [Tree(folder.resolve(), args.tiny) for folder in (args.folder, this)]
    recipes = ("bf16", "delayed", "current", "block", "fixed", *(["mxfp8"] if args.tiny else []))  # no Hopper has it
    asked = [(model, recipe) for model in ("gpt", "llama", "moe") for recipe in recipes]
    rows = []
    for model, recipe in asked:
        if re.search(args.only or "", f"{model} {recipe}"):
            rows.append(compare(trees, model, recipe, 2 if args.tiny else _CALLS))
            show(rows[-1])
            report.write({"rows": rows}, args.out)  # a run that is cut short leaves what it has
    for tree in trees:
        tree.close()
    report.write({"machine": machine.describe(), "rows": rows}, args.out)  # last: it takes memory of the GPU
    return 0


def show(row: dict):
    times = f"{row['other_ms']:8.3f} ms  {row['ms']:8.3f} ms  x {row['ratio']:.4f}"
    print(f"{row['case']:14}  {times}  {len(row['differing'])} of {row['leaves']} results differ", flush=True)
    for leaf in row["differing"]:
        print(f"    {leaf}{' (from run to run too)' if leaf in row['unsteady'] else ''}")
