"""`python -m te_jax.compat run` and `check`: programs that are written for TransformerEngine, on te_jax."""

import argparse
import pathlib
import runpy
import sys
from collections.abc import Callable, Iterator

from te_jax.compat import install


def run(program: str, arguments: list[str], *, is_module: bool) -> None:
    """Runs a program, or a module as `python -m` does, where `import transformer_engine` finds te_jax.compat."""
    install()
    sys.argv = [program, *arguments]
    if is_module:
        runpy.run_module(program, run_name="__main__", alter_sys=True)
        return
    sys.path[0] = str(pathlib.Path(program).resolve().parent)  # `python -m` has put the working folder there.
    runpy.run_path(program, run_name="__main__")


def list_edits(paths: list[str]) -> bool:
    """Prints what in the programs needs an edit, "path:line: text" each; returns whether nothing does.

    paths: files, or folders, whose programs are all files *.py. Raises OSError for a file that cannot be read and for a
    folder without one, ValueError for one that is no program.
    """
    from te_jax.compat._program import findings  # It imports all of te_jax.compat.

    found = {path: _findings(path, findings) for path in _programs(paths)}
    for path, edits in found.items():
        for line, text in edits:
            print(f"{path}:{line}: {text}")
        if not edits:
            print(f"{path}: nothing needs an edit")
    return not any(found.values())


def _programs(paths: list[str]) -> Iterator[str]:
    for path in paths:
        inside = sorted(map(str, pathlib.Path(path).rglob("*.py"))) if pathlib.Path(path).is_dir() else [path]
        if not inside:
            raise FileNotFoundError(f"the folder {path} has no file *.py")
        yield from inside


def _findings(path: str, findings: Callable[[str, str], list]) -> list:
    try:
        return findings(pathlib.Path(path).read_text(), path)
    except (SyntaxError, ValueError) as error:  # ValueError: no text
        raise ValueError(f"{path} is no Python program: {error}") from None


def command() -> None:
    parser = argparse.ArgumentParser(prog="python -m te_jax.compat", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    runs = commands.add_parser("run", help="run a program unedited")
    runs.add_argument("-m", dest="is_module", action="store_true", help="PROGRAM is a module, as for `python -m`")
    runs.add_argument("program", metavar="PROGRAM")
    runs.add_argument("arguments", metavar="ARGUMENTS", nargs=argparse.REMAINDER)
    checks = commands.add_parser("check", help="list what needs an edit; exit status 1 if anything does")
    checks.add_argument("files", metavar="FILE", nargs="+", help="a program, or a folder of programs")
    given = parser.parse_args()
    if given.command == "run":
        if not given.is_module and not pathlib.Path(given.program).exists():
            runs.error(f"there is no file {given.program}; -m runs a module")
        run(given.program, given.arguments, is_module=given.is_module)
        return
    try:
        nothing = list_edits(given.files)
    except (OSError, ValueError) as error:
        checks.error(str(error))
    if not nothing:
        sys.exit(1)


if __name__ == "__main__":
    command()
