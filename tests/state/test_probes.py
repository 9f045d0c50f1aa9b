"""Every probe ends as it should: see probes.py. `python tests/state/test_probes.py` counts them, file by file."""

import importlib
import sys
import time
from collections import Counter
from pathlib import Path

import pytest

TESTS = Path(__file__).resolve().parents[1]
SUPPORT = TESTS / "support"
sys.path.insert(0, str(SUPPORT))
FILES = sorted(path.stem for path in SUPPORT.glob("probes_*.py"))

from probes import ended  # noqa: E402


def probes_of(file: str):
    return importlib.import_module(file).PROBES


@pytest.mark.parametrize("file", FILES)
def test_probes(file):
    wrong = {probe.name: how for probe in probes_of(file) if (how := ended(probe))}
    assert not wrong, "\n".join(f"{name}: {how}" for name, how in wrong.items())


def test_there_are_many():
    names = Counter((file, probe.name) for file in FILES for probe in probes_of(file))
    assert len(names) >= 300
    assert not [name for name, count in names.items() if count > 1], "each has a name of its own"


def main():
    for file in FILES:
        start, ends = time.perf_counter(), {probe.name: ended(probe) for probe in probes_of(file)}
        good = sum(not how for how in ends.values())
        print(f"{file}: {good} of {len(ends)} end as they should ({time.perf_counter() - start:.1f} s)")
        for name, how in ends.items():
            if how and "-v" in sys.argv:
                print(f"  {name}: {how[:300]}")


if __name__ == "__main__":
    sys.path[:0] = [str(TESTS), str(TESTS.parent)]
    import conftest  # noqa: F401  (8 host devices)

    main()
