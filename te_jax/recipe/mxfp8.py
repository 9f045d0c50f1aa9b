"""MXFP8: every block of 32 numbers by its own amax, in the step that it is used in; scales are exponents of a byte."""

from dataclasses import dataclass
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from te_jax.recipe._base import Format, Recipe


@dataclass(frozen=True)
class MXFP8BlockScaling(Recipe):
    """OCP's microscaling format (Microscaling Formats (MX) Specification 1.0,
    https://www.opencompute.org/documents/ocp-microscaling-formats-mx-v1-0-spec-final-pdf), which tensor cores multiply
    from Blackwell on. No state: no `fp8_metas`.

    Activations, weights and gradients alike have blocks of 1 x 32 along the axis that their GEMM contracts, with scales
    of type E8M0; so each of their two layouts is quantized from the source, with scales of its own. Blocks run along
    the last of the contracted axes (of the features, the tokens of an example) and are cut at its end.

    The law of a block: scale_inv = 2**ceil(log2(amax / fp8_max)), at least 2**-126. Rounding goes up, so that nothing
    finite saturates (Mishra et al. 2025, https://arxiv.org/abs/2506.08027, section 3); OCP's conversion rounds down. An
    inf counts as 2**128, and is inf again when it is multiplied by scale_inv. A NaN makes that NaN (0xff), and with it
    the whole block.

    A mesh that splits such an axis into shards of whole blocks moves nothing, else the tensor is gathered along it
    first, as under `Float8BlockScaling`.

    On CUDA it needs compute capability 10.0 or newer, and is not tested there: XLA quantizes, and cuDNN multiplies,
    through `jax.nn.scaled_matmul`.

    fp8_format: Format.E4M3, or Format.HYBRID.
    override_linear_precision, exclude: as in `DelayedScaling`.
    fp8_dpa, fp8_mha: attention in FP8 has only delayed scales: must be False.

    Raises ValueError (TypeError for a wrong type) at construction, naming the field, its value and what is allowed.
    """

    fp8_format: Format = Format.E4M3
    override_linear_precision: tuple[bool, bool, bool] = (False, False, False)
    fp8_dpa: bool = False
    fp8_mha: bool = False
    exclude: tuple[str, ...] = ()

    scale_format: ClassVar[str] = "rows_32"
    weight_scale_format: ClassVar[str] = "rows_32"
    reduce_amax: ClassVar[bool] = True  # no block is on two devices
    split_accumulator: ClassVar[tuple[bool, bool, bool]] = (True, True, True)

    def __post_init__(self) -> None:
        self._check_shared()
        self._check_no_attention()


def scale_inv_of_amax(amax: jax.Array, fp8_max: float) -> jax.Array:
    """float8_e8m0fnu[...] of amax f32[...]: the law above.

    From bits, for a quotient or a logarithm may round to a power of 2 that is too small.
    """
    bits, top = lax.bitcast_convert_type(amax, jnp.uint32), int(np.float32(fp8_max).view(np.uint32))
    exponent, mantissa = top >> 23, top & 0x7FFFFF
    up = (bits + (0x7FFFFF - mantissa)) >> 23  # carries where the mantissa is larger than fp8_max's
    code = jnp.clip(up.astype(jnp.int32) - exponent + 127, 1, 254)  # XLA flushes smaller floats than 2**-126 on a CPU
    code = jnp.where(bits > 0x7F800000, 255, code)  # NaN
    return lax.bitcast_convert_type(code.astype(jnp.uint8), jnp.float8_e8m0fnu)
