"""Block scaling: every block of 128 numbers by its own amax, in the step that it is used in."""

from dataclasses import dataclass
from typing import ClassVar

from te_jax.recipe._base import Format, Recipe


@dataclass(frozen=True)
class Float8BlockScaling(Recipe):
    """A scale for each block (DeepSeek-V3, https://arxiv.org/abs/2412.19437, section 3.3): an outlier costs the numbers
    of its block their precision, and no others. No state: no `fp8_metas`.

    Activations and gradients have blocks of 1 x 128 along the axis that their GEMM contracts, so each of their two
    layouts has scales of its own; weights have blocks of 128 x 128, the same in both. Blocks run along the last of the
    contracted axes (of the features, the tokens of an example) and are cut at its end. A block follows the law of
    `Float8CurrentScaling`: scale = fp8_max / max(amax, amax_epsilon).

    A mesh that splits such an axis into shards of whole blocks moves nothing. Else, as where 2 devices share 300
    features, the tensor is gathered along it before it is quantized: the numbers are the same as on one device. Inside
    `shard_map` a shard's blocks are cut at its end.

    On CUDA it needs compute capability 9.0 (Hopper): cuBLASLt has these products nowhere else.

    use_f32_scales: scales are any f32; else they are rounded down to a power of 2, so that they change only exponents.
    fp8_format:     Format.E4M3, or Format.HYBRID.
    amax_epsilon:   the least amax that sets a scale, in units of the tensor.
    override_linear_precision, exclude: as in `DelayedScaling`.
    fp8_dpa, fp8_mha: attention in FP8 has only delayed scales: must be False.

    Partial sums of 128 products are scaled and added in f32, so there is no faster accumulation to choose.
    Raises ValueError (TypeError for a wrong type) at construction, naming the field, its value and what is allowed.
    """

    use_f32_scales: bool = False
    fp8_format: Format = Format.E4M3
    amax_epsilon: float = 0.0
    override_linear_precision: tuple[bool, bool, bool] = (False, False, False)
    fp8_dpa: bool = False
    fp8_mha: bool = False
    exclude: tuple[str, ...] = ()

    scale_format: ClassVar[str] = "rows_128"
    weight_scale_format: ClassVar[str] = "squares_128"
    reduce_amax: ClassVar[bool] = True  # no block is on two devices
    split_accumulator: ClassVar[tuple[bool, bool, bool]] = (True, True, True)

    def __post_init__(self) -> None:
        self._check_shared()
        self._need_bool("use_f32_scales")
        self._check_epsilon()
        self._check_no_attention()

    @property
    def scale_law(self) -> dict[str, object]:
        """The attributes of `te_quantize_block`."""
        return dict(power_2=not self.use_f32_scales, epsilon=self.amax_epsilon)
