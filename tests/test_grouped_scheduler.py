"""Which tiles the CTAs of a grouped product compute: every one, once, and none that has no rows."""

import subprocess

import numpy as np
import pytest
from host_cuda import library


@pytest.fixture(scope="module")
def scheduler(tmp_path_factory):
    """The program of host_cuda/scheduler.cc."""
    if not library.cuda_include():
        pytest.skip("needs g++")
    program = tmp_path_factory.mktemp("scheduler") / "scheduler"
    source = library.ROOT / "tests/host_cuda/scheduler.cc"
    done = subprocess.run(["g++", "-std=c++20", "-O1", f"-I{library.ROOT / 'csrc'}", source, "-o", program])
    assert done.returncode == 0
    return program


def test_every_tile_once(scheduler, rng):
    random = [[rng.integers(0, 40), rng.integers(1, 70), 2, 8, rng.integers(1, 70)] for _ in range(300)]
    cases = [*random, [0, 5, 2, 8, 3], [1, 1, 2, 8, 66], [7, 9, 1, 8, 132], [3, 17, 2, 4, 66], [2**14, 3, 2, 8, 66]]
    text = "\n".join(" ".join(map(str, case)) for case in cases)
    lines = subprocess.run([scheduler], input=text, capture_output=True, text=True, check=True).stdout.splitlines()
    for case, line in zip(cases, lines, strict=True):
        rows, columns, span, _, workers = case
        tiles, share = (np.array(part.split(), int) for part in line.split("share"))
        tiles = tiles.reshape(-1, 2)
        assert (tiles[:, 0] < rows).all(), case
        inside = tiles[tiles[:, 1] < columns]
        assert len(inside) == rows * columns == len(np.unique(inside, axis=0)), case
        # A tile beyond the columns is in a row that no pair of rows has, at the end of its last band.
        assert len(tiles) - len(inside) <= (rows % span) * (span - 1), case
        np.testing.assert_array_equal(np.sort(share), np.arange(len(tiles) // span), str(case))
