"""Fixed scaling: every tensor by a number that is chosen beforehand."""

from dataclasses import dataclass
from typing import ClassVar

import jax
import jax.numpy as jnp

from te_jax.recipe._base import Format, Recipe


@dataclass(frozen=True)
class FixedScaling(Recipe):
    """A scale for all activations, one for all weights and one for all gradients, fixed for the whole run: no amax is
    computed, nothing crosses devices for one, and there is no state: no `fp8_metas`. For models whose tensors keep a
    known size, as under unit scaling (Blake et al. 2023, https://arxiv.org/abs/2303.11257) or with normalised weights.

    A tensor is multiplied by its scale and cast. Values that then exceed 448 (E4M3) or 57344 (E5M2) saturate, those
    below 2**-10 (E4M3) or 2**-17 (E5M2) become 0, and nothing tells so: where sizes are not known, use
    `Float8CurrentScaling`. Powers of 2 change only exponents.

    x_scale:      of the inputs of GEMMs. 1: after a norm they are of size 1, and outliers up to 448 fit.
    kernel_scale: of weights. 2**6: initial ones, of a standard deviation of some 2**-6, become of size 1; 7 fits.
    grad_scale:   of the gradients of GEMMs' outputs. 2**16: with E5M2 numbers from 2**-30 to 0.875 keep all bits, which
                  holds the gradients of a mean over 2**6 to 2**20 tokens. The scale goes with the loss: for a sum over
                  tokens, or a loss that is scaled, divide it by that factor; with Format.E4M3 the range is 2**-22 to
                  0.0068.
    fp8_format:   Format.HYBRID or Format.E4M3.
    override_linear_precision, split_accumulator, exclude: as in `DelayedScaling`.
    fp8_dpa, fp8_mha: attention in FP8 has only delayed scales: must be False.

    Raises ValueError (TypeError for a wrong type) at construction, naming the field, its value and what is allowed.
    """

    x_scale: float = 1.0
    kernel_scale: float = 2.0**6
    grad_scale: float = 2.0**16
    fp8_format: Format = Format.HYBRID
    override_linear_precision: tuple[bool, bool, bool] = (False, False, False)
    fp8_dpa: bool = False
    fp8_mha: bool = False
    split_accumulator: tuple[bool, bool, bool] = (False, True, True)
    exclude: tuple[str, ...] = ()

    reduce_amax: ClassVar[bool] = True  # there is none

    def __post_init__(self) -> None:
        self._check_shared()
        for field in ("x_scale", "kernel_scale", "grad_scale"):
            self._need_number(field, 2.0**-126, 2.0**126, "pass a number from 2**-126 to 2**126")  # so is its inverse
        self._check_no_attention()

    def scale(self, tensor: str, stored: None, amax: None, fp8_max: float) -> jax.Array:
        """The scale in the tensor's field, f32[]."""
        return jnp.full((), getattr(self, f"{tensor}_scale"), jnp.float32)
