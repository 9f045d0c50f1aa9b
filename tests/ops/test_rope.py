"""Rotary positions against complex rotation in float64, and their gradient against the inverse rotation."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import rope_oracle
from arrays import on_device

from te_jax.ops import rope as module
from te_jax.ops.rope import (
    LinearScaling,
    Llama3Scaling,
    NTKScaling,
    PositionSections,
    ProportionalScaling,
    YarnScaling,
    rope,
)

METHODS = pytest.mark.parametrize("method", ["consecutive", "alternate"])
SCALINGS = [
    None,
    LinearScaling(4),
    NTKScaling(8.0),
    Llama3Scaling(),
    Llama3Scaling(32.0, 2, 3, 100),
    YarnScaling(),
    YarnScaling(4.0, 8, 2, 999),
    ProportionalScaling(2.0, 0.5),
    ProportionalScaling(share=0.01),
]


def check(got, x, positions=None, **options):
    want, bound = rope_oracle.rotate(x, positions, **options)
    assert got.dtype == x.dtype and got.shape == x.shape
    error = np.abs(np.asarray(got, np.float64) - want)
    assert (error <= bound).all(), (error.max(), np.max(error - bound))


def at_once(cases, x, **common):
    """{name: (positions or None, options)} -> {name: rope(x)}, of one program."""
    given = {name: at for name, (at, _) in cases.items() if at is not None}
    run = lambda x, given: {name: rope(x, given.get(name), **common, **each) for name, (_, each) in cases.items()}
    return jax.jit(run)(x, given)


@METHODS
@pytest.mark.parametrize("rotary_dim", [None, 2, 6, 10])
def test_rope(rng, method, rotary_dim):
    x = rng.normal(size=(2, 33, 3, 10)).astype(np.float32)
    positions = {
        None: None,
        "row": np.arange(33) + 7,
        "batch": rng.integers(0, 99, (2, 33)),
        "between": rng.uniform(-9, 99, 33).astype(np.float32),
        "one batch": np.arange(33)[None] + 1000,
    }
    common = dict(group_method=method, rotary_dim=rotary_dim)
    cases = {
        f"{name}, {windows}": (at, dict(windows=windows))
        for name, at in positions.items()
        for windows in ((1, 10000), (2, 500.0))
    }
    for name, got in at_once(cases, x, **common).items():
        at, options = cases[name]
        check(got, x, at, **common, **options)


@METHODS
@pytest.mark.parametrize("rotary_dim", [None, 64])
def test_scaling(rng, method, rotary_dim):
    """To positions that the scalings are for. d is that of Llama 3, so that all parts of its rule have frequencies."""
    x = rng.normal(size=(2, 50, 2, 128)).astype(np.float32)
    at = rng.integers(0, 131072, (2, 50))
    common = dict(windows=(1, 500000.0), group_method=method, rotary_dim=rotary_dim)
    cases = {str(scaling): (at, dict(scaling=scaling)) for scaling in SCALINGS}
    for name, got in at_once(cases, x, **common).items():
        check(got, x, at, **common, **cases[name][1])


@pytest.mark.parametrize("scaling", SCALINGS[1:-2], ids=str)
def test_what_a_scaling_keeps(scaling):
    """The lowest frequency serves `factor` times the positions; Llama 3 and NTK leave the highest as it is."""
    was, now = (module._inverse_frequencies((1, 500000.0), 128, s).astype(float) for s in (None, scaling))
    np.testing.assert_allclose(now[-1], was[-1] / scaling.factor, rtol=2**-23)
    assert now[0] == (0.25 if isinstance(scaling, LinearScaling) else 1)
    assert (np.diff(now) < 0).all()


def test_a_share_of_the_pairs_turns():
    """The first ones, by the frequencies that they have among all; what stands keeps its bits."""
    was, now = (module._inverse_frequencies((1, 1e6), 512, s) for s in (None, ProportionalScaling()))
    np.testing.assert_array_equal(now, np.where(np.arange(256) < 64, was, 0))
    x = np.random.default_rng(0).normal(size=(1, 9, 1, 512)).astype(np.float32)
    y = np.asarray(rope(x, group_method="alternate", scaling=ProportionalScaling()))
    moved = (y != x).any((0, 1, 2)).reshape(2, 256)
    assert moved[:, :64].all() and not moved[:, 64:].any()


@METHODS
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16, jnp.float32])
@pytest.mark.parametrize("rotary_dim", [None, 4])
def test_type_and_length_are_kept(rng, method, dtype, rotary_dim):
    x = rng.normal(size=(2, 199, 1, 8)).astype(dtype)
    options = dict(group_method=method, rotary_dim=rotary_dim)
    y, wide = jax.jit(lambda x: (rope(x, **options), rope(x.astype(jnp.float32), **options)))(x)
    check(y, x, **options)
    norms = np.linalg.norm(wide, axis=-1)
    np.testing.assert_allclose(norms, np.linalg.norm(x.astype(np.float32), axis=-1), rtol=1e-5)


@METHODS
@pytest.mark.parametrize("rotary_dim", [None, 4])
@pytest.mark.parametrize("turned", [None, 2])
def test_gradient_is_the_inverse_rotation(rng, method, rotary_dim, turned):
    shape = (1, 9, 3, 2, 6) if turned else (1, 9, 3, 6)
    x, dy = (rng.normal(size=shape).astype(np.float32) for _ in range(2))
    options = dict(group_method=method, rotary_dim=rotary_dim, turned=turned, scaling=NTKScaling(4))
    # What autodiff makes of the reference: the same products, summed by another program.
    slots, at = (x if turned else x[:, :, None]), jnp.arange(9.0)[None]
    inv_freq = jnp.asarray(module._inverse_frequencies((1, 10000), rotary_dim or 6, NTKScaling(4)))
    attrs = dict(turned=turned or 1, consecutive=method == "consecutive", inverse=False)

    @jax.jit
    def run(x, dy, slots):
        y, vjp = jax.vjp(lambda x: rope(x, **options), x)
        _, plain = jax.vjp(lambda x: module._reference(x, at, inv_freq, **attrs)[0], slots)
        return y, *vjp(dy), *vjp(y), *plain(dy.reshape(slots.shape))

    y, dx, there_and_back, plain_dx = run(x, dy, slots)
    check(dx, dy, **options, sign=-1)
    # Two turns of about 2**-22 each on values of at most 4.
    np.testing.assert_allclose(there_and_back, x, atol=8 * 2.0**-22)
    # <y, dy> = <x, dx>: each of 324 products of at most 10 is off by about 2**-22.
    dot = lambda a, b: np.sum(np.asarray(a, float) * np.asarray(b, float))
    np.testing.assert_allclose(dot(y, dy), dot(x, dx), atol=324 * 10 * 2.0**-22)
    np.testing.assert_allclose(dx.reshape(slots.shape), plain_dx, atol=4 * 2.0**-22)


def test_jit_and_vmap(rng):
    """A scaling may be a static argument, positions may be traced and mapped."""
    x, at = on_device(rng.normal(size=(4, 2, 9, 3, 8)), jnp.float32), jnp.asarray(rng.integers(0, 999, (4, 9)))
    turn = jax.jit(rope, static_argnames=("windows", "group_method", "turned", "rotary_dim", "scaling"))
    options = dict(rotary_dim=4, scaling=Llama3Scaling(2.0, original_max_position=64))
    got = jax.vmap(partial(turn, **options))(x, at)
    for one, x_one, at_one in zip(got, x, at):
        check(one, x_one, at_one, **options)


@pytest.mark.parametrize(
    ("shape", "kwargs", "error", "text"),
    [
        ((2, 4, 3, 5), {}, ValueError, "even d"),
        ((2, 4, 6), {}, ValueError, "b, s, h, d"),
        ((2, 4, 3, 6), {"group_method": "pairs"}, ValueError, "'pairs'"),
        ((2, 4, 3, 6), {"windows": (10, 1)}, ValueError, "0 < w0 < w1"),
        ((2, 4, 3, 6), {"rotary_dim": 3}, ValueError, "rotary_dim is 3; pass None or an even int of 2 to 6"),
        ((2, 4, 3, 6), {"rotary_dim": 8}, ValueError, "rotary_dim is 8"),
        ((2, 4, 3, 6), {"rotary_dim": 0}, ValueError, "rotary_dim is 0"),
        ((2, 4, 3, 6), {"rotary_dim": 4.0}, ValueError, r"rotary_dim is 4\.0"),
        ((2, 4, 3, 6), {"scaling": 8.0}, TypeError, r"scaling is 8\.0; pass None, LinearScaling"),
        ((2, 4, 3, 6), {"rotary_dim": 2, "scaling": NTKScaling(2)}, ValueError, "a single pair has no base"),
        ((2, 4, 3, 6), {"rotary_dim": 2, "scaling": YarnScaling()}, ValueError, "a single pair has no base"),
        ((2, 4, 3, 6), {"positions": jnp.arange(5)}, ValueError, r"positions has shape \(5,\)"),
    ],
)
def test_errors(shape, kwargs, error, text):
    with pytest.raises(error, match=text):
        rope(jnp.ones(shape), **kwargs)
    with pytest.raises(TypeError, match="int32"):
        rope(jnp.ones((2, 4, 3, 6), jnp.int32))


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: LinearScaling(0.125), r"LinearScaling: factor is 0\.125; .*at least 1"),
        (lambda: NTKScaling(float("inf")), "NTKScaling: factor is inf; pass a positive finite number"),
        (lambda: NTKScaling("8"), "NTKScaling: factor is '8'"),
        (lambda: Llama3Scaling(low_freq_factor=5), "Llama3Scaling: low_freq_factor is 5, high_freq_factor 4.0"),
        (lambda: YarnScaling(beta_slow=32), r"YarnScaling: beta_fast is 32\.0, beta_slow 32; the first must be"),
        (lambda: ProportionalScaling(share=1.5), r"ProportionalScaling: share is 1\.5; pass the part of the pairs"),
        (lambda: YarnScaling(factor=0.5), r"YarnScaling: factor is 0\.5"),
        (lambda: Llama3Scaling(original_max_position=0), "original_max_position is 0"),
    ],
)
def test_errors_of_a_scaling(make, text):
    with pytest.raises(ValueError, match=text):
        make()


@METHODS
@pytest.mark.parametrize("rotary_dim", [None, 4])
def test_slots_of_a_joined_projection(rng, method, rotary_dim):
    """The first slots are turned as by themselves, the others are as they were; and their gradients."""
    x, dy = (rng.normal(size=(2, 9, 3, 4, 6)).astype(np.float32) for _ in range(2))
    at = rng.integers(0, 99, (2, 9))
    options = dict(group_method=method, rotary_dim=rotary_dim)

    def both(x, dy, at, turned):
        y, vjp = jax.vjp(lambda x: rope(x, at, turned=turned, **options), x)
        return y, *vjp(dy)

    run = jax.jit(both, static_argnums=3)
    y, dx = jax.device_get(run(x, dy, at, 2))
    for slot in range(2):
        want, want_dx = run(x[:, :, slot], dy[:, :, slot], at, None)
        np.testing.assert_array_equal(y[:, :, slot], want)
        np.testing.assert_array_equal(dx[:, :, slot], want_dx)
    np.testing.assert_array_equal(y[:, :, 2], x[:, :, 2])
    np.testing.assert_array_equal(dx[:, :, 2], dy[:, :, 2])
    with pytest.raises(ValueError, match="turned is 4"):
        rope(x, turned=4)


def plain_by_sections(x, positions, sections, half):
    """Both forms as published code writes them: parts of the angles of one position after another, or slices of
    every third angle instead of the first position's. Pairs (i, i + half) turn."""
    angle = positions[..., None] * 10_000 ** -(np.arange(half, dtype=np.float32) / half)  # [n, b, s, half]
    if sections.interleaved:
        mixed = angle[0]
        for i, size in enumerate(sections.sizes[1:], start=1):
            own = slice(i, len(sections.sizes) * size, len(sections.sizes))
            mixed = mixed.at[..., own].set(angle[i][..., own])
    else:
        parts = jnp.split(angle, np.cumsum(sections.sizes)[:-1], -1)
        mixed = jnp.concatenate([part[i] for i, part in enumerate(parts)], -1)
    cos, sin = jnp.cos(mixed)[:, :, None], jnp.sin(mixed)[:, :, None]
    x1, x2 = x[..., :half], x[..., half : 2 * half]
    return jnp.concatenate([x1 * cos - x2 * sin, x2 * cos + x1 * sin, x[..., 2 * half :]], -1)


@pytest.mark.parametrize("sections", [((2, 1, 3), False), ((4, 2), False), ((2, 2, 2), True), ((4, 1, 1), True)])
def test_sections(rng, sections):
    """Several positions of a token against plain JAX, and their gradients; one position turns all pairs alike.

    Angles are products of the same f32 numbers, whose powers may differ by 2**-23: at 99, by 99 * 2**-22 with the
    product's rounding, of numbers up to 5."""
    sections, half = PositionSections(*sections), 6
    x, dy = (rng.normal(size=(2, 9, 3, 14)).astype(np.float32) for _ in range(2))
    at = rng.integers(0, 99, (len(sections.sizes), 2, 9))
    options = dict(group_method="alternate", rotary_dim=2 * half, sections=sections)

    @jax.jit
    def run(x, dy, at):
        ways = lambda x: rope(x, at, **options), lambda x: plain_by_sections(x, at, sections, half)
        made = [(y, *vjp(dy)) for y, vjp in (jax.vjp(way, x) for way in ways)]
        alike = [rope(x, each, **options) for each in (at[:1].repeat(len(at), 0), at[0])]
        narrow = [rope(x.astype(jnp.bfloat16), at, **options), x.astype(jnp.bfloat16)]
        return made, (*alike, rope(x, at[0], **options | dict(sections=None))), narrow

    (got, want), alike, (narrow, before) = run(x, dy, at)
    for ours, theirs in zip(got, want):
        np.testing.assert_allclose(ours, theirs, rtol=0, atol=5 * 99 * 2**-22)
    for each in alike[:2]:
        np.testing.assert_array_equal(each, alike[2])
    np.testing.assert_array_equal(narrow[..., 2 * half :], before[..., 2 * half :])
    # A pair is rounded once: 2**-9 of numbers up to 5, and of x, which was rounded before.
    np.testing.assert_allclose(narrow.astype(np.float32), got[0], rtol=0, atol=2 * 5 * 2**-8)


def test_errors_of_sections():
    x, blocks, mixed = jnp.ones((2, 4, 3, 12)), PositionSections((3, 3)), PositionSections((2, 2, 2), True)
    for sections, at, error, text in (
        ((3, 3), None, TypeError, r"sections is \(3, 3\); pass None or PositionSections"),
        (
            PositionSections((3, 2)),
            None,
            ValueError,
            "sections is .*, but 6 pairs of channels turn; pass sizes that add",
        ),
        (blocks, (3, 2, 4), ValueError, r"positions has shape \(3, 2, 4\); pass .*\[2, 4\] or \[4\], or \[2, 2, 4\]"),
        (None, (3, 2, 4), ValueError, r"positions has shape \(3, 2, 4\); pass .*\[2, 4\] or \[4\]\."),
        (mixed, (3, 4), ValueError, r"positions has shape \(3, 4\)"),
    ):
        with pytest.raises(error, match=text):
            rope(x, None if at is None else jnp.zeros(at, jnp.int32), sections=sections)
    for sizes, error in (((), ValueError), ((-1, 7), ValueError), (6, TypeError), (("3", "3"), ValueError)):
        with pytest.raises(error, match="PositionSections: sizes is"):
            PositionSections(sizes)
    with pytest.raises(TypeError, match="PositionSections: interleaved is 1"):
        PositionSections((3, 3), 1)
