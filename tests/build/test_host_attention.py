"""The parts of a call of FP8 attention on the CPU, where a function that mixes bytes is cuDNN: the launcher's pointers,
workspace, plans and amaxes."""

import subprocess

import pytest
from host_cuda import program

from te_jax.layers.fp8_attention import _MOST_HEADS

pytestmark = pytest.mark.sources
# b, s, t, h, g, d of causal gradients -> the heads of rows in each part
PARTS = {
    (1, 8, 8, 48, 8, 16): [48],
    (1, 8, 8, 64, 8, 16): [32, 32],
    (2, 8, 12, 64, 8, 16): [32] * 4,
    (1, 8, 8, 128, 16, 16): [32] * 4,
    (6, 8, 16, 16, 4, 16): [48, 48],
    (4, 12, 8, 32, 32, 8): [32] * 4,
    (2, 8, 8, 56, 1, 16): [56, 56],  # a part has all heads of a group
    (2, 8, 8, 128, 2, 16): [64] * 4,
    # No number of equal parts is close to the fewest:
    (7, 8, 8, 8, 2, 16): [24, 32],
    (13, 8, 4, 4, 1, 16): [24, 28],
    (5, 4, 4, 16, 4, 8): [32, 48],
    (1, 4, 4, 53, 53, 16): [26, 27],
    (3, 4, 8, 106, 53, 8): [34, 36, 36] * 3,
    # As the layer has it (te_jax/layers/fp8_attention.py), which leaves a part of more to bf16:
    (1, 4, 4, 2 * _MOST_HEADS, 2, 8): [_MOST_HEADS] * 2,
    (1, 4, 4, 2 * _MOST_HEADS, 2 * _MOST_HEADS, 8): [_MOST_HEADS] * 2,
    (2, 4, 4, _MOST_HEADS, 1, 8): [_MOST_HEADS] * 2,
    (2, 4, 4, _MOST_HEADS // 2, 1, 8): [_MOST_HEADS],
}


@pytest.fixture(scope="module")
def parts(tmp_path_factory):
    """Of lines of sizes: the parts of each."""
    built = program.compiled(tmp_path_factory.mktemp("attention_parts"), "attention_parts")

    def run(cases):
        text = "\n".join(" ".join(map(str, map(int, case))) for case in cases)
        done = subprocess.run([built], input=text, capture_output=True, text=True, check=True)
        wrong, found = zip(*(line.split("|") for line in done.stdout.splitlines()), strict=True)
        assert set(wrong) == {"-"}, [each for each in zip(cases, wrong) if each[1] != "-"]
        return [[int(heads) for heads in each.split()] for each in found]

    return run


def test_parts(parts):
    found = parts([(*sizes, True) for sizes in PARTS])
    assert dict(zip(PARTS, found, strict=True)) == PARTS


def test_full_attention_is_one_call(parts):
    assert parts([(2, 8, 8, 64, 8, 16, False), (5, 4, 12, 16, 4, 8, False)]) == [[128], [80]]


def test_nothing_to_attend(parts):
    """Results are 0, and cuDNN is not asked."""
    assert parts([(0, 8, 8, 64, 8, 16, True), (2, 0, 8, 64, 8, 16, True), (2, 8, 0, 64, 8, 16, True)]) == [[]] * 3


def test_parts_of_any_sizes(parts, rng):
    """Several have 48 heads at most, but for a group of more, and more than a third of that, which fill a GPU."""
    cases = []
    for _ in range(300):
        b, s, t, g, each = (int(rng.integers(1, most)) for most in (12, 4, 4, 60, 60))
        cases.append((b, s, t, g * each, g, 4, True))
    for (b, _, _, h, g, *_), found in zip(cases, parts(cases), strict=True):
        assert sum(found) == b * h
        assert max(found) <= max(_MOST_HEADS, h // g), (b, h, g)
        assert len(found) == 1 or 3 * min(found) > _MOST_HEADS, (b, h, g, found)
