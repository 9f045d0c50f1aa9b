"""The formats, and what layers and modules ask of any recipe."""

import enum
import numbers
from typing import ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from te_jax.core.check import KnownFields


class _Max(NamedTuple):
    max_fwd: float  # largest finite value of the forward type
    max_bwd: float  # ... and of the gradients' type


class Format(enum.Enum):
    """FP8 formats (Micikevicius et al. 2022, https://arxiv.org/abs/2209.05433): E4M3 reaches 448, E5M2 57344.

    HYBRID is E4M3 in the forward pass and E5M2 for gradients. `.value` is (max_fwd, max_bwd).
    """

    E4M3 = _Max(448.0, 448.0)
    E5M2 = _Max(57344.0, 57344.0)
    HYBRID = _Max(448.0, 57344.0)

    def dtype(self, direction: str) -> jnp.dtype:
        """The FP8 type of a tensor: `direction` is "fwd" (activations, weights) or "bwd" (gradients)."""
        is_e5m2 = self is Format.E5M2 or (self is Format.HYBRID and direction == "bwd")
        return jnp.dtype(jnp.float8_e5m2 if is_e5m2 else jnp.float8_e4m3fn)

    def max(self, direction: str) -> float:
        """The largest finite value of that type."""
        return self.value.max_bwd if direction == "bwd" else self.value.max_fwd


class Recipe(KnownFields):
    """What is asked of a recipe: three facts about it, and pure functions of one tensor's numbers.

    A recipe is a frozen dataclass with fields of its own and these: fp8_format, override_linear_precision, reduce_amax,
    fp8_dpa, fp8_mha, split_accumulator, exclude (see `DelayedScaling`). Each recipe declares them, for the order in
    which a recipe takes its arguments is its own.
    """

    has_state: ClassVar[bool] = False  # in `fp8_metas`: see `DelayedScaling` for the methods that it takes
    needs_amax: ClassVar[bool] = False  # `scale` wants the tensor's own amax: its source is read once more for it
    # What shares a scale, in activations and gradients and in weights: names of te_jax.ops.formats. With blocks the op
    # that quantizes finds the scales, and `scale` is not asked.
    scale_format: ClassVar[str] = "tensor"
    weight_scale_format: ClassVar[str] = "tensor"

    fp8_format: Format
    override_linear_precision: tuple[bool, bool, bool]
    reduce_amax: bool
    fp8_dpa: bool
    fp8_mha: bool
    split_accumulator: tuple[bool, bool, bool]
    exclude: tuple[str, ...]

    def scale(self, tensor: str, stored: jax.Array | None, amax: jax.Array | None, fp8_max: float) -> jax.Array:
        """f32[]: what a tensor is multiplied by before it is cast to the type that ends at `fp8_max`.

        tensor: "x", "kernel" or "grad" of a dense layer. stored: f32[], the scale of its state, None without state.
        amax: f32[], its own, None unless `needs_amax`.
        """
        raise NotImplementedError(f"{type(self).__name__}.scale")

    @property
    def scale_law(self) -> dict[str, object]:
        """The attributes by which an op finds the scales of blocks."""
        return {}

    def for_parameters(self) -> "Recipe":
        """The recipe by which parameters that live in FP8 are quantized."""
        return self

    def fresh_state(self) -> dict[str, np.ndarray]:
        """State of a tensor that was never seen, f32 leaves by the end of their names; {} without state."""
        return {}

    def _need(self, ok: bool, field: str, text: str, error=ValueError):
        if not ok:
            raise error(f"{type(self).__name__}: {field} is {getattr(self, field)!r}; {text}.")

    def _need_bool(self, *fields: str):
        for field in fields:
            self._need(isinstance(getattr(self, field), bool), field, "pass a bool")

    def _need_number(self, field: str, least: float, most: float, text: str):
        """Makes the field a float."""
        value = getattr(self, field)
        number = isinstance(value, numbers.Real) and not isinstance(value, bool | np.bool_)
        self._need(number and least <= value <= most, field, text)  # not so of NaN
        object.__setattr__(self, field, float(value))

    def _check_epsilon(self):
        largest = float(jnp.finfo(jnp.float32).max)
        self._need_number("amax_epsilon", 0.0, largest, "pass a finite float32 of at least 0")

    def _check_no_attention(self):
        text = "attention in FP8 has only delayed scales: leave it False, or use DelayedScaling(fp8_dpa=True)"
        self._need(not self.fp8_dpa, "fp8_dpa", text)

    def _check_shared(self):
        """Checks in `__post_init__` the fields that all recipes have."""
        self._need(
            isinstance(self.fp8_format, Format),
            "fp8_format",
            "pass te_jax.recipe.Format.HYBRID or te_jax.recipe.Format.E4M3",
            TypeError,
        )
        text = "E5M2 has too few bits for the forward pass: use Format.HYBRID or Format.E4M3"
        self._need(self.fp8_format is not Format.E5M2, "fp8_format", text)
        for field in ("override_linear_precision", "split_accumulator"):
            value = getattr(self, field)
            three = isinstance(value, tuple | list) and len(value) == 3 and all(isinstance(v, bool) for v in value)
            self._need(three, field, "pass three bools: (fprop, dgrad, wgrad)")
            object.__setattr__(self, field, tuple(value))
        self._need_bool("reduce_amax", "fp8_dpa")
        patterns = isinstance(self.exclude, tuple | list) and all(isinstance(p, str) and p for p in self.exclude)
        self._need(patterns, "exclude", "pass a tuple of patterns of module paths, such as ('lm_head', 'layers_*/mlp')")
        object.__setattr__(self, "exclude", tuple(self.exclude))
        text = "FP8 tensors between projections and attention are not in this version: leave it False"
        self._need(not self.fp8_mha, "fp8_mha", text)


def bound_scale(scale: jax.Array, amax: jax.Array, otherwise) -> jax.Array:
    """`scale`, computed from `amax`, within the normal floats; `otherwise` where amax is 0 or not finite."""
    float32 = jnp.finfo(jnp.float32)
    usable = jnp.isfinite(amax) & (amax > 0) & ~jnp.isnan(scale)
    return jnp.where(usable, jnp.clip(scale, float32.tiny, float32.max), otherwise)


def scale_of_amax(amax: jax.Array, fp8_max: float, epsilon: float, power_2: bool) -> jax.Array:
    """fp8_max / max(amax, epsilon), f32[...] of amax f32[...]; 1 where the amax is 0 or not finite, an infinite one
    clamped to the largest float. power_2: rounded down to a power of 2."""
    scale = bound_scale(fp8_max / jnp.maximum(amax, epsilon), amax, 1.0)
    if not power_2:
        return scale
    exponent = lax.bitcast_convert_type(scale, jnp.uint32) & jnp.uint32(0xFF << 23)  # log2 might round up
    return lax.bitcast_convert_type(exponent, jnp.float32)
