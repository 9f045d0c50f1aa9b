"""Rotary positions in float64: each publication's own formula for the frequencies, turns by complex numbers."""

import jax.numpy as jnp
import numpy as np

from te_jax.ops.rope import LinearScaling, Llama3Scaling, NTKScaling, ProportionalScaling, YarnScaling


def angles(positions, r, windows, scaling):
    """[..., r/2] radians, one pair at a time."""
    positions, (w0, w1) = np.asarray(positions, np.float64)[..., None], windows
    if isinstance(scaling, LinearScaling):  # arXiv:2306.15595: the position itself is divided
        positions = positions / scaling.factor
    base = w1 / w0
    if isinstance(scaling, NTKScaling):  # arXiv:2309.00071, section 3.1
        base = base * scaling.factor ** (r / (r - 2))
    theta = [base ** (-2 * i / r) / w0 for i in range(r // 2)]
    if isinstance(scaling, Llama3Scaling):
        theta = [_llama3(t, scaling) for t in theta]
    if isinstance(scaling, YarnScaling):
        theta = [_yarn(t, i, r, base, scaling, w0) for i, t in enumerate(theta)]
    if isinstance(scaling, ProportionalScaling):  # pairs of channels, so many of them; the others stand
        turning = int(scaling.share * r) // 2
        theta = [t / scaling.factor if i < turning else 0.0 for i, t in enumerate(theta)]
    return positions * np.array(theta)


def _yarn(theta, i, r, base, scaling, w0):
    """As DeepSeek-V3's published code goes about it: by the dimensions that turn beta_fast and beta_slow times."""
    dim = lambda times: r * np.log(scaling.original_max_position / w0 / (times * 2 * np.pi)) / (2 * np.log(base))
    low, high = max(np.floor(dim(scaling.beta_fast)), 0), min(np.ceil(dim(scaling.beta_slow)), r - 1)
    ramp = np.clip((i - low) / (high - low if high > low else 0.001), 0, 1)
    return theta / scaling.factor * ramp + theta * (1 - ramp)


def _llama3(theta, scaling):
    """As Llama 3.1's published code goes about it: by wavelengths in tokens."""
    wavelength = 2 * np.pi / theta
    if wavelength < scaling.original_max_position / scaling.high_freq_factor:
        return theta
    if wavelength > scaling.original_max_position / scaling.low_freq_factor:
        return theta / scaling.factor
    smooth = scaling.original_max_position / wavelength - scaling.low_freq_factor
    smooth /= scaling.high_freq_factor - scaling.low_freq_factor
    return (1 - smooth) * theta / scaling.factor + smooth * theta


def rotate(
    x, positions=None, *, windows=(1, 10000), group_method="consecutive", turned=None, rotary_dim=None, scaling=None,
    sign=1,
):  # fmt: skip
    """(y, how far the op in x's dtype may be from it) as `te_jax.ops.rope.rope`; sign -1: turned back."""
    eps, x = float(jnp.finfo(x.dtype).eps), np.asarray(x, np.float64)
    r, at = rotary_dim or x.shape[-1], np.arange(x.shape[1]) if positions is None else np.asarray(positions)
    angle = angles(np.broadcast_to(at, x.shape[:2]), r, windows, scaling)
    angle = angle.reshape(*angle.shape[:2], *[1] * (x.ndim - 3), r // 2)
    pairs = (slice(0, r, 2), slice(1, r, 2)) if group_method == "consecutive" else (slice(0, r // 2), slice(r // 2, r))
    slots = (slice(None), slice(None), slice(turned)) if turned else ()
    first, second = ((*slots, ..., pair) for pair in pairs)
    y, bound = x.copy(), np.zeros_like(x)  # what does not turn is copied as it is
    z = (x[first] + 1j * x[second]) * np.exp(1j * sign * angle)
    for half, want in ((first, z.real), (second, z.imag)):
        y[half] = want
        # The frequency is rounded to f32, and so is its product with the position: half an ulp each, 2**-24 of the
        # angle; sine, cosine and two products are a few ulp more. Then comes the result's own type.
        bound[half] = (np.abs(angle) * 2.0**-23 + 2.0**-21) * np.abs(z) + eps / 2 * np.abs(want) + 1e-7
    return y, bound
