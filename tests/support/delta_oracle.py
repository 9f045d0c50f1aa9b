"""The gated delta rule, one token after the other, in float64; and rows of operands."""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from ssm_oracle import EPS, segments_of

# Nothing grows on the way: a key of length 1 with beta up to 1 is a contraction of the state, and so of its errors. So
# all are roundings of sums of the size of the largest result: f32 sums of up to 2**15 terms, whose errors grow as the
# root of their number, and exps of sums of logs of at most 88, added up in 8 levels (exp of more is 0 in f32).
ERROR = (256 + 88 * 8) * EPS


def rule(given, segments, scale=None, normalize=True):
    """y, final of one row: by the names of `te_jax.ops.delta.gated_delta`."""
    q, k, v, gate = (given[name] for name in ("q", "k", "v", "gate"))
    unit = lambda a: a / jnp.sqrt(jnp.sum(a * a, -1, keepdims=True) + 1e-6) if normalize else a
    q, k = (jnp.repeat(unit(a), v.shape[1] // a.shape[1], 1) for a in (q, k))
    scale = k.shape[-1] ** -0.5 if scale is None else scale
    left = jnp.exp(gate if gate.ndim == 3 else gate[..., None])[..., None]
    start = given.get("initial_state", jnp.zeros((v.shape[1], k.shape[-1], v.shape[-1]), v.dtype))

    def token(state, at):
        q, k, v, beta, left, is_first = at
        state = jnp.where(is_first, 0, state) * left
        off = v - jnp.einsum("hd,hde->he", k, state)
        state = state + (beta[:, None] * k)[..., None] * off[:, None]
        return state, scale * jnp.einsum("hd,hde->he", q, state)

    firsts = np.zeros(v.shape[0], bool) if segments is None else segments != jnp.roll(segments, 1)
    firsts = jnp.asarray(firsts).at[0].set(False)
    final, y = lax.scan(jax.checkpoint(token, prevent_cse=False), start, (q, k, v, given["beta"], left, firsts))
    return y, final


KINDS = ("plain", "long memory", "strong decay", "some strong", "no gate", "no memory")
CASES = 24  # of each program: four rows of segments for each kind


def row(rng, kind, s, h, g, d, e, by_channel, dtype):
    """Operands of one row, rounded to `dtype`, and cotangents."""
    draw = lambda *shape: rng.standard_normal(shape)
    gates = (s, h, d) if by_channel else (s, h)
    gate = -np.exp(draw(*gates))
    if kind == "long memory":
        gate *= 1e-4
    if kind == "strong decay":
        gate = -50 - 100 * rng.random(gates)
    if kind in ("some strong", "no memory"):
        gate = np.where(draw(*gates) > 1, -np.inf if kind == "no memory" else -60.0, 0.1 * gate)
    if kind == "no gate":
        gate = np.zeros(gates)
    beta = rng.integers(0, 2, (s, h)) if kind in ("no gate", "some strong") else rng.random((s, h))
    given = dict(q=draw(s, g, d), k=draw(s, g, d), v=draw(s, h, e), beta=beta, gate=gate)
    wide = ("gate", "initial_state")
    given |= dict(initial_state=draw(h, d, e) / 4)
    rounded = {k: a.astype(np.float32 if k in wide else dtype) for k, a in given.items()}
    return rounded, (draw(s, h, e).astype(dtype), draw(h, d, e).astype(np.float32) / 4)


def rows_of(rng, *sizes, count=CASES):
    """`count` rows: operands, cotangents, segments."""
    rows = [row(rng, KINDS[i * len(KINDS) // count], *sizes) for i in range(count)]
    given, cotangents = jax.tree.map(lambda *a: np.stack(a), *rows)
    segments = np.stack([segments_of(rng, sizes[0], i) for i in range(count)]).astype(np.int32)
    return given, cotangents, segments


def near(got, want, name, error=ERROR):
    """|got - want| <= error of the row's largest number, and roundings to got's type."""
    info, axes = jnp.finfo(got.dtype), tuple(range(1, got.ndim))
    got, want = (np.asarray(a, np.float64) for a in (got, want))
    assert np.isfinite(got).all(), name
    size = np.abs(want).max(axes, keepdims=True, initial=1e-3)
    bound = error * size + float(info.eps) * np.abs(want) + float(info.smallest_subnormal)
    off = (np.abs(got - want) / bound).max(initial=0)
    assert off <= 1, f"{name}: {off:.3g} times what is allowed"
