"""Benchmarks of te_jax: times next to its peers, memory, launches, and where the time goes."""

import argparse
import pathlib
import re
import sys

from . import contexts, decode, hlo, layers, memory, overlap, report, run, step_trace, tables, timing, trees, turns


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number of at least 1")
    return int(text)


def _pattern(text: str) -> str:
    try:
        re.compile(text)
    except re.error as error:
        raise argparse.ArgumentTypeError(f"{text!r} is no regular expression: {error}") from None
    return text


_MODELS = tuple(model.name for model in layers.gpt_and_llama(tiny=True))
# Of each option: its type or its choices, and its help. `file` is an argument.
_OPTIONS = {
    "file": (pathlib.Path, "an earlier JSON, of rows or of `trace`"),
    "out": (pathlib.Path, "JSON, rewritten after each row; next to it the roofline of rows, .png"),
    "text": (pathlib.Path, "the module's text"),
    "folder": (pathlib.Path, "of files that are read, or kept"),
    "compare": (pathlib.Path, "an earlier JSON: each row's time against its own"),
    "only": (_pattern, 'regular expression: of rows, by "case | implementation", or of candidates'),
    "repeat": (_count, "of each measurement"),
    "calls": (_count, "issued back to back"),
    "steps": (_count, "under the profiler"),
    "layers": (_count, "in the stack"),
    "hidden": (_count, "width of a layer"),
    "tokens": (_count, "in the row"),
    "model": (_MODELS, "what is measured"),
    "impl": (layers.IMPLS, "by whom"),
    "strategies": (str, "by which tokens reach their experts, as all_gather,all_to_all,ring,ragged: other rows"),
    "pieces": (str, "in which sums of experts come back, or tokens are multiplied, as 1,2,4: other rows"),
    "mixer": (("all", *contexts.MIXERS), "of random weights, behind contexts of growing length"),
    "shape": (tuple(decode.SHAPES), "of the checkpoint"),
    "role": (("fsdp", "dp", "tp"), "of all GPUs"),
    "quick": (bool, "a tenth of a second for each row, where it is a second"),
    "profile": (bool, "also the time in kernels, by jax.profiler"),
    "tune": (bool, "time cuBLASLt's algorithms, where its first guess runs else"),
    "tiny": (bool, "tiny sizes: to try the program without a GPU"),
    "list": (bool, "print the rows' names and leave"),
    "check": (bool, "write nothing; exit with 1 where a table is not what its figures make it"),
    "measure": (str, argparse.SUPPRESS),  # one of those that get processes of their own, in this process
}
_ROWS = dict(out=None, only=None, compare=None, repeat=3, calls=timing.CALLS, profile=0, tune=0, tiny=0, list=0)
_TURNS = dict(out=None, only=None, quick=0, tune=0, tiny=0, list=0)
_LAYER = dict(out=None, text=None, model=_MODELS[0], tiny=0)


def _show(args) -> int:
    result = report.load(args.file)
    step_trace.show(result) if "queued_ms" in result else run.show(result, args.file, args.compare)
    return 0


# Of each command: what runs it, its options with their defaults, and a line of help.
COMMANDS = {
    **{name: (run.main, _ROWS, f"time {text}") for name, (_, text) in run.SUITES.items()},
    **{
        name: (turns.main, _TURNS | turns.OWN_OPTIONS.get(name, {}), f"time {text}")
        for name, (_, text) in turns.SUITES.items()
    },
    "trace": (
        step_trace.main,
        dict(**_LAYER, folder=None, impl="te_jax fp8 fast", calls=150),
        "a layer's step: every kernel's time, work and fraction of the ceiling, idle time, clock and power",
    ),
    "hlo": (
        hlo.main,
        dict(**_LAYER, impl="te_jax fp8", steps=10),
        "a layer's step: custom calls, kernels, launches, and whether two runs give the same bits",
    ),
    "overlap": (
        overlap.main,
        dict(out=None, role="fsdp", impl="te_jax fp8 fast", only=None, calls=10, repeat=4, tiny=0, measure=None),
        "what XLA hides of the collectives of layers on all GPUs, by flags and unrolling",
    ),
    "memory": (
        memory.main,
        dict(out=None, layers=16, hidden=4096, tokens=2048, measure=None),
        "memory of inference with parameters in bf16 and in FP8",
    ),
    "decode": (
        decode.main,
        dict(out=None, tiny=0, folder=None, shape="llama3-8b", only=None, mixer=None, measure=None),
        "a checkpoint of 8B or 20B parameters: loading, memory, tokens per second, next to transformers; or by mixers",
    ),
    "trees": (
        trees.main,
        dict(folder=None, only=None, out=None, tiny=0),
        "another tree of te_jax, in --folder, next to this one: the bits of a layer's step, and its time",
    ),
    "show": (_show, dict(file=None, compare=None), "show an earlier JSON, measure nothing"),
    "tables": (tables.main, dict(check=0), "write the measured tables of the documents"),
}


def parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    commands = p.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, (function, options, text) in COMMANDS.items():
        description = f"{text[0].upper()}{text[1:]}. {sys.modules[function.__module__].__doc__}"
        command = commands.add_parser(name, help=text, description=description)
        for option, default in options.items():
            kind, said = _OPTIONS[option]
            if kind is bool:
                command.add_argument(f"--{option}", action="store_true", help=said)
                continue
            value = dict(choices=kind) if isinstance(kind, tuple) else dict(type=kind, metavar=option.upper())
            if option == "file":
                command.add_argument(option, help=said, **value)
            else:
                said += "" if default is None else " [default: %(default)s]"
                command.add_argument(f"--{option}", default=default, help=said, **value)
    return p


def main(argv=None) -> int:
    args = parser().parse_args(argv)
    return COMMANDS[args.command][0](args)


if __name__ == "__main__":
    sys.exit(main())
