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
    final, y = lax.scan(token, start, (x, heads(B), heads(C), steps, logs, firsts))
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


def near(got, want, size, name, error):
    """|got - want| <= error of the size, a rounding to got's type, and the smallest number of that type."""
    info = jnp.finfo(got.dtype)
    got, want, size = (np.asarray(a, np.float64) for a in (got, want, size))
    assert np.isfinite(got[np.abs(want) < float(info.max)]).all(), name
    bound = error * size + float(info.eps) * np.abs(want) + max(float(info.smallest_subnormal), 1e-30)
    off = np.where(np.abs(want) < float(info.max), np.abs(got - want) / bound, 0)
    assert off.max(initial=0) <= 1, f"{name}: {off.max():.3g} times what is allowed"
