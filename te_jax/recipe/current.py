"""Current scaling: every tensor by its own amax, in the step that it is used in."""

from dataclasses import dataclass
from typing import ClassVar

import jax

from te_jax.recipe._base import Format, Recipe, scale_of_amax


@dataclass(frozen=True)
class Float8CurrentScaling(Recipe):
    """Every tensor is scaled by its own amax of this step (Micikevicius et al. 2022, section 3.3): nothing finite
    saturates (an inf becomes the largest FP8 value), and there is no state: no `fp8_metas`.

    The law: scale = fp8_max / max(amax, amax_epsilon), an infinite one clamped to the largest float; 1 where the amax
    is 0 or not finite. An array over a mesh has one amax, of the whole array.

    What it costs over `DelayedScaling`: one more reading of each tensor's source, by a kernel whose one result is the
    amax, before the kernel that writes FP8. (To have it write the tensor unquantized too, and to quantize that, moves
    as many bytes or more, takes room, and rounds twice.) Under `jax.vmap` each example has its own amax, so the GEMMs
    run one after the other: give arrays more axes instead.

    fp8_format:    Format.HYBRID or Format.E4M3.
    power_2_scale: scales are rounded down to a power of 2, so that they change only exponents.
    amax_epsilon:  the least amax that sets a scale, in units of the tensor.
    override_linear_precision, split_accumulator, exclude: as in `DelayedScaling`.
    reduce_amax:   inside `shard_map`, one amax for the shards of a tensor, over the mesh axes it varies over but the
                   one of pipeline stages. False: each device scales its shard by its own.
    fp8_dpa, fp8_mha: attention in FP8 has only delayed scales: must be False.

    Raises ValueError (TypeError for a wrong type) at construction, naming the field, its value and what is allowed.
    """

    fp8_format: Format = Format.HYBRID
    power_2_scale: bool = False
    amax_epsilon: float = 0.0
    override_linear_precision: tuple[bool, bool, bool] = (False, False, False)
    reduce_amax: bool = True
    fp8_dpa: bool = False
    fp8_mha: bool = False
    split_accumulator: tuple[bool, bool, bool] = (False, True, True)
    exclude: tuple[str, ...] = ()

    needs_amax: ClassVar[bool] = True

    def __post_init__(self) -> None:
        self._check_shared()
        self._need_bool("power_2_scale")
        self._check_epsilon()
        self._check_no_attention()

    def scale(self, tensor: str, stored: None, amax: jax.Array, fp8_max: float) -> jax.Array:
        """f32[] from amax f32[]: the law above."""
        return scale_of_amax(amax, fp8_max, self.amax_epsilon, self.power_2_scale)
