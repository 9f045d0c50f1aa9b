"""Maxima that keep a NaN, of arrays and over devices.

XLA's maximum of floats drops a NaN on a CPU, in rows of 256 elements and more, as a collective maximum does anywhere. A
spoiled step would then be recorded as if it were a good one. The bits of floats without a sign are in the order of the
floats, with inf above all numbers and NaN above inf.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

_SIGNLESS = 0x7FFFFFFF


def amax(x, axes: tuple[int, ...] | None = None) -> jax.Array:
    """max |x| over `axes` (None: all), f32, of x in f32; NaN where there is one, and 0 of no elements."""
    bits = lax.bitcast_convert_type(x, jnp.uint32) & jnp.uint32(_SIGNLESS)
    axes = tuple(range(x.ndim)) if axes is None else axes
    # 0 is what a maximum of uint32 starts from; `jnp.max(initial=0)` would take a second kernel for the 0.
    return lax.bitcast_convert_type(lax.reduce(bits, np.uint32(0), lax.max, axes), jnp.float32)


def amax_across(amax, names) -> jax.Array:
    """The max of amaxes f32[...] over mesh axes."""
    return lax.bitcast_convert_type(lax.pmax(lax.bitcast_convert_type(amax, jnp.int32), names), jnp.float32)
