"""Maxima that keep a NaN, of arrays and over devices.

On a CPU XLA's maximum of floats drops a NaN in rows of 256 elements and more; a collective maximum drops it on every
platform. A step with a NaN would then be recorded as a good one. The bits of non-negative floats, read as integers,
have the order of the floats, with inf above all numbers and NaN above inf.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

_SIGNLESS = 0x7FFFFFFF


def amax(x: jax.Array, axes: tuple[int, ...] | None = None) -> jax.Array:
    """The maximum of |x| over `axes` (None: all) for x in f32: f32, NaN where an element is NaN, 0 without elements."""
    bits = lax.bitcast_convert_type(x, jnp.uint32) & jnp.uint32(_SIGNLESS)
    axes = tuple(range(x.ndim)) if axes is None else axes
    # A maximum of uint32 starts from 0; `jnp.max(initial=0)` would need a second kernel for the 0.
    return lax.bitcast_convert_type(lax.reduce(bits, np.uint32(0), lax.max, axes), jnp.float32)


def amax_across(amax: jax.Array, names: Any) -> jax.Array:
    """The maximum of amaxes f32[...] over the mesh axes `names`."""
    return lax.bitcast_convert_type(lax.pmax(lax.bitcast_convert_type(amax, jnp.int32), names), jnp.float32)
