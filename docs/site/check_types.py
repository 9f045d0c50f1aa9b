"""`make types`: pyright's view of te_jax from outside. Fails unless the types of all names of the reference are known.

`pyright --verifytypes` looks at every module without an underscore. Those that the reference does not have are parts
of te_jax, whose annotations serve its authors; they are counted, and told.
"""

import json
import os
import subprocess
import sys

import reference

SPECIAL = ("__init__", "__call__", "__new__")


def public(name: str, names: dict[str, bool]) -> bool:
    """Whether pyright's symbol is one of the reference's, or a member without an underscore of one that is a class."""
    owner, _, member = name.rpartition(".")
    return name in names or (names.get(owner, False) and (member in SPECIAL or not member.startswith("_")))


def main() -> int:
    command = [sys.executable, "-m", "pyright", "--verifytypes", "te_jax", "--ignoreexternal", "--outputjson"]
    # pyright asks the first python in PATH where packages are, and finds te_jax in the folder that it runs in.
    environment = os.environ | {"PATH": f"{os.path.dirname(sys.executable)}{os.pathsep}{os.environ['PATH']}"}
    said = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=reference.ROOT)
    try:
        found = json.loads(said.stdout)["typeCompleteness"]
    except (ValueError, KeyError):
        print(said.stdout + said.stderr)
        return 2
    names = {}
    for name, value in reference.documented().items():
        names[name] = isinstance(value, type)
        if callable(value) and hasattr(value, "__qualname__"):
            names[f"{value.__module__}.{value.__qualname__}"] = isinstance(value, type)
    symbols = [symbol for symbol in found["symbols"] if public(symbol["name"], names)]
    unknown = [symbol for symbol in symbols if not symbol["isTypeKnown"]]
    for symbol in unknown:
        print(symbol["name"])
        for said in symbol["diagnostics"]:
            print("   ", said["message"].replace("\n", "\n    "))
    all_known = sum(symbol["isTypeKnown"] for symbol in found["symbols"] if symbol["isExported"])
    all_of = sum(symbol["isExported"] for symbol in found["symbols"])
    print(f"types known: {len(symbols) - len(unknown)} of {len(symbols)} public names, {all_known} of {all_of} in all")
    return 1 if unknown or not symbols else 0


if __name__ == "__main__":
    sys.exit(main())
