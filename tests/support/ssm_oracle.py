"""Mamba-2's convolution and scan, one token after the other, in float64; and how far f32 may be from that."""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

EPS = 2.0**-24
# A sum of logarithms of at most 88 (exp of more is 0 in f32), added up in 8 levels, each rounded: 88 * 8 * EPS.
DECAY = 704 * EPS
# And sums of products, whose f32 error grows as the root of the number of terms, at most 2**15 here.
TERMS = 256 * EPS


def steps_of(given, softplus, limit):
    """[s, h], with the full gradient at a bound."""
    dt = given["dt"] + given.get("dt_bias", 0)
    steps = jax.nn.softplus(dt) if softplus else dt
    return jnp.where((steps < limit[0]) | (steps > limit[1]), jnp.clip(lax.stop_gradient(steps), *limit), steps)


def ssd(given, segments, *, softplus, limit):
    """y, final of one row: x [s, h, p], dt [s, h], .. by the names of `te_jax.ops.ssm.ssd`."""
    steps = steps_of(given, softplus, limit)
    z = given.get("z")
    return recur(given, steps, steps * given["A"], segments, 1 if z is None else jax.nn.silu(z))


def recur(given, steps, logs, segments, gate):
    x, B, C = given["x"], given["B"], given["C"]
    heads = lambda a: jnp.repeat(a, x.shape[1] // a.shape[1], 1)
    D = given.get("D", jnp.zeros(x.shape[1]))
    start = given.get("initial_state", jnp.zeros((*x.shape[1:], B.shape[-1])))

    def token(state, at):
        x, B, C, step, log, is_first = at
        state = jnp.where(is_first, 0, state) * jnp.exp(log)[:, None, None]
        state = state + (step[:, None] * x)[..., None] * B[:, None]
        return state, jnp.sum(state * C[:, None], -1) + (D[:, None] if D.ndim == 1 else D) * x

    firsts = np.zeros(x.shape[0], bool) if segments is None else segments != jnp.roll(segments, 1)
    firsts = jnp.asarray(firsts).at[0].set(False)
    final, y = lax.scan(jax.checkpoint(token, prevent_cse=False), start, (x, heads(B), heads(C), steps, logs, firsts))
    return y * gate, final


def ssd_bounds(given, segments, cotangents, *, softplus, limit):
    """The sizes of the sums that y, final and the gradients are, by name: all terms by their absolute values."""
    absolute = {name: jnp.abs(a) for name, a in given.items()}
    steps = steps_of(given, softplus, limit)
    gate = jnp.abs(jax.nn.silu(given["z"])) if "z" in given else jnp.ones_like(given["x"])
    fn = lambda floats, steps, logs, gate: recur(floats, steps, logs, segments, gate)
    (y, final), pull = jax.vjp(fn, absolute, steps, steps * given["A"], gate)
    sizes, of_steps, of_logs, of_gate = pull(tuple(map(jnp.abs, cotangents)))
    sizes["dt"] = of_steps + of_logs * absolute["A"]
    sizes["A"] = jnp.sum(of_logs * steps, 0)
    sizes["dt_bias"] = jnp.sum(sizes["dt"], 0)
    sizes["z"] = 1.1 * of_gate  # The largest slope of silu.
    return dict(y=y, final=final), {name: sizes[name] for name in given}


def conv(given, segments, silu):
    """y, final of one row: x [s, c], kernel [w, c], bias, initial_state."""
    x, kernel = given["x"], given["kernel"]
    past, s = kernel.shape[0] - 1, x.shape[0]
    tokens = jnp.concatenate([given.get("initial_state", jnp.zeros((past, x.shape[1]))), x])
    runs = jnp.zeros(s, int) if segments is None else jnp.cumsum(jnp.diff(segments, prepend=segments[0]) != 0)
    runs = jnp.concatenate([jnp.zeros(past, int), runs])
    taps = np.arange(s)[:, None] + np.arange(past + 1)
    same = runs[taps] == runs[past:, None]
    y = jnp.sum(jnp.where(same[..., None], kernel * tokens[taps], 0), 1) + given.get("bias", 0)
    return jax.nn.silu(y) if silu else y, jnp.where((runs[s:] == runs[-1])[:, None], tokens[s:], 0)


def through_gate(name, dy):
    """`small` of `near`: the gradient of z is y before its gate, rounded to its type, times dy and a slope of at most
    1.1."""
    return 1 + 1.1 * np.abs(np.asarray(dy, np.float64)) if name == "z" else 1


def near(got, want, size, name, error, small=1):
    """|got - want| <= error of the size, roundings to got's type, and `small` of the smallest number of that type."""
    info = jnp.finfo(got.dtype)
    got, want, size = (np.asarray(a, np.float64) for a in (got, want, size))
    assert np.isfinite(got[np.abs(want) < float(info.max)]).all(), name
    bound = error * size + float(info.eps) * np.abs(want) + small * max(float(info.smallest_subnormal), 1e-30)
    off = np.where(np.abs(want) < float(info.max), np.abs(got - want) / bound, 0)
    assert off.max(initial=0) <= 1, f"{name}: {off.max():.3g} times what is allowed"


KINDS = ("plain", "long memory", "strong decay", "some strong", "large steps", "no steps")
CASES = 24  # of each program: four rows of segments for each kind


def segments_of(rng, s, case):
    """One segment, a few, one of each token, or ids that come again."""
    return [np.full(s, 3), np.sort(rng.integers(0, 4, s)), np.arange(s), rng.integers(0, 2, s)][case % 4]


def row(rng, kind, s, h, g, p, n, dtype):
    """Operands of one row, rounded to `dtype`, and cotangents."""
    draw = lambda *shape: rng.standard_normal(shape)
    given = dict(x=draw(s, h, p), dt=draw(s, h), A=-np.exp(draw(h)), B=draw(s, g, n), C=draw(s, g, n), D=draw(h))
    given |= dict(z=draw(s, h, p), dt_bias=draw(h), initial_state=draw(h, p, n))
    if kind == "long memory":
        given["A"] *= 1e-5
    if kind in ("strong decay", "some strong"):  # Logarithms of down to -50 a token; softplus(50) = 50.
        given["A"] = -np.ones(h)
        given["dt"] = np.full((s, h), 50.0) if kind == "strong decay" else np.where(draw(s, h) > 1, 50.0, given["dt"])
    if kind == "large steps":
        given["dt"] = 20 + 20 * rng.random((s, h))
    if kind == "no steps":
        given["dt"] = np.full((s, h), -60.0)
    given["x"], given["B"] = given["x"] / 4, given["B"] / np.sqrt(n)  # f16 has gradients up to 65504
    rounded = {
        k: a.astype(jnp.float32 if k in ("A", "D", "dt_bias", "initial_state") else dtype) for k, a in given.items()
    }
    return rounded, (draw(s, h, p).astype(dtype), draw(h, p, n).astype(np.float32))


def both(fn, given, cotangents):
    """Results, and gradients by name."""
    outs, pull = jax.vjp(fn, given)
    return dict(y=outs[0], final=outs[1]), pull(cotangents)[0]


def rows_of(rng, s, h, g, p, n, dtype, absent, count=CASES):
    """`count` rows: operands but for those `absent`, cotangents, segments."""
    rows = [row(rng, KINDS[i * len(KINDS) // count], s, h, g, p, n, dtype) for i in range(count)]
    given, cotangents = jax.tree.map(lambda *a: np.stack(a), *rows)
    segments = np.stack([segments_of(rng, s, i) for i in range(count)]).astype(np.int32)
    return {k: a for k, a in given.items() if k not in absent}, cotangents, segments
