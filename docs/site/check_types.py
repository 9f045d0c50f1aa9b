"""`make types`: pyright's view of te_jax from outside. Fails unless the types of all names without an underscore are
known, in modules without one: as plain `pyright --verifytypes te_jax --ignoreexternal` does."""

import json
import os
import subprocess
import sys

import reference


def main() -> int:
    command = [sys.executable, "-m", "pyright", "--verifytypes", "te_jax", "--ignoreexternal", "--outputjson"]
    # pyright asks the first python in PATH where packages are, and finds te_jax in the folder that it runs in.
    environment = os.environ | {"PATH": f"{os.path.dirname(sys.executable)}{os.pathsep}{os.environ['PATH']}"}
    said = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=reference.ROOT)
    try:
        symbols = [s for s in json.loads(said.stdout)["typeCompleteness"]["symbols"] if s["isExported"]]
    except (ValueError, KeyError):
        print(said.stdout + said.stderr)
        return 2
    unknown = [symbol for symbol in symbols if not symbol["isTypeKnown"]]
    for symbol in unknown:
        print(symbol["name"])
        for diagnostic in symbol["diagnostics"]:
            print("   ", diagnostic["message"].replace("\n", "\n    "))
    print(f"types known: {len(symbols) - len(unknown)} of {len(symbols)} public names")
    return 1 if unknown or not symbols else 0


if __name__ == "__main__":
    sys.exit(main())
