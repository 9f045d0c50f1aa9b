"""FP8 recipes: how a tensor gets its scale. Frozen, hashable values: a recipe is part of the jit cache key."""

import enum
import math
import numbers
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp

# The converter is named in errors about stored state; it lives in fp8.py, which imports this module.
CONVERTER = "te_jax.convert_fp8_metas"


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
        wide = self is Format.E5M2 or (self is Format.HYBRID and direction == "bwd")
        return jnp.dtype(jnp.float8_e5m2 if wide else jnp.float8_e4m3fn)

    def max(self, direction: str) -> float:
        """The largest finite value of that type."""
        return self.value.max_bwd if direction == "bwd" else self.value.max_fwd


def _need(ok: bool, field: str, value, text: str, error=ValueError):
    if not ok:
        raise error(f"DelayedScaling: {field} is {value!r}; {text}.")


@dataclass(frozen=True)
class DelayedScaling:
    """Scales from the amaxes of past steps (Micikevicius et al. 2022, section 3.3).

    The law, per tensor and step: quantize with the stored scale; put the step's amax into slot 0 of the history;
    A = max(history) or history[0]; scale = (fp8_max / A) / 2**margin; roll the history by -1 and clear slot 0. An amax
    that is 0 or not finite leaves history and scale as they are; an infinite scale is clamped to the largest float.

    margin:             powers of 2 kept free above the amax.
    interval:           the scale changes every `interval` steps, the first of them included. -1 (older code) means 1.
    fp8_format:         Format.HYBRID or Format.E4M3.
    amax_history_len:   how many amaxes a scale sees, the current one among them.
    amax_compute_algo:  "max", "most_recent", or a function of the history (f32[L], newest first) to the amax (f32[]).
    scaling_factor_compute_algo: None, or a function (amax, scale, fp8_max, recipe) -> scale.
    override_linear_precision: (fprop, dgrad, wgrad): True runs that GEMM on unquantized operands.
    reduce_amax:        inside `shard_map`, one amax for all devices. False: each device scales its shard by its own
                        amax, and its `fp8_metas` must then vary over that mesh axis. Outside `shard_map` arrays are
                        global, and so is their amax.
    fp8_dpa:            attention in FP8, where `te_jax.flax.DotProductAttention` serves the call so; its state is there
                        with it alone.
    fp8_mha:            projections and attention hand over FP8 tensors: not in this version, must be False.
    split_accumulator:  (fprop, dgrad, wgrad): True adds partial sums in full precision, False is the faster mode.

    Raises ValueError (TypeError for a wrong type) at construction, naming the field, its value and what is allowed.
    """

    margin: float = 0
    interval: int = 1
    fp8_format: Format = Format.HYBRID
    amax_history_len: int = 1024
    amax_compute_algo: str | Callable = "max"
    scaling_factor_compute_algo: Callable | None = None
    override_linear_precision: tuple[bool, bool, bool] = (False, False, False)
    reduce_amax: bool = True
    fp8_dpa: bool = False
    fp8_mha: bool = False
    split_accumulator: tuple[bool, bool, bool] = (False, True, True)

    def __post_init__(self):
        set_ = object.__setattr__
        _need(isinstance(self.fp8_format, Format), "fp8_format", self.fp8_format, "pass a recipe.Format", TypeError)
        _need(
            self.fp8_format is not Format.E5M2,
            "fp8_format",
            self.fp8_format,
            "E5M2 has too few bits for the forward pass: use Format.HYBRID or Format.E4M3",
        )
        set_(self, "interval", 1 if self.interval == -1 else self.interval)
        for field in ("interval", "amax_history_len"):
            value = getattr(self, field)
            whole = isinstance(value, numbers.Integral) and not isinstance(value, bool)
            _need(whole and value >= 1, field, value, "pass an int of at least 1")
            set_(self, field, int(value))
        finite = isinstance(self.margin, numbers.Real) and math.isfinite(self.margin)
        _need(finite, "margin", self.margin, "pass a finite number of powers of 2")
        _need(isinstance(self.reduce_amax, bool), "reduce_amax", self.reduce_amax, "pass a bool")
        _need(
            callable(self.amax_compute_algo) or self.amax_compute_algo in ("max", "most_recent"),
            "amax_compute_algo",
            self.amax_compute_algo,
            'pass "max", "most_recent" or a function of the history',
        )
        scaling = self.scaling_factor_compute_algo
        text = "pass None or a function (amax, scale, fp8_max, recipe) -> scale"
        _need(scaling is None or callable(scaling), "scaling_factor_compute_algo", scaling, text)
        for field in ("override_linear_precision", "split_accumulator"):
            value = getattr(self, field)
            three = isinstance(value, tuple | list) and len(value) == 3 and all(isinstance(v, bool) for v in value)
            _need(three, field, value, "pass three bools: (fprop, dgrad, wgrad)")
            set_(self, field, tuple(value))
        _need(isinstance(self.fp8_dpa, bool), "fp8_dpa", self.fp8_dpa, "pass a bool")
        text = "FP8 tensors between projections and attention are not in this version: leave it False"
        _need(not self.fp8_mha, "fp8_mha", self.fp8_mha, text)

    def new_state(self, scale: jax.Array, history: jax.Array, amax: jax.Array, fp8_max: float):
        """One step of the law.

        scale:   f32[1]
        history: f32[L]; slot L-1 is the newest amax. Slot 0 is free between steps: it holds minus the number of steps
                 since the scale last changed, which is 0 when `interval` is 1.
        amax:    f32[], of this step
        Returns the new (scale, history).
        """
        since = -history[0]
        new_scale = jnp.where(since == 0, self.scale_from(self.seen_amax(history, amax), scale, fp8_max), scale)
        slot0 = 0.0 - (since + 1) % self.interval
        kept = [slot0[None], history[2:], amax[None]] if history.shape[0] > 1 else [slot0[None]]
        recorded = jnp.isfinite(amax) & (amax > 0)
        return jnp.where(recorded, new_scale, scale), jnp.where(recorded, jnp.concatenate(kept), history)

    def seen_amax(self, history: jax.Array, amax: jax.Array) -> jax.Array:
        """The amax (f32[]) that sets the scale, from history f32[L] (as `new_state` takes it) and this step's amax."""
        if self.amax_compute_algo == "max":
            return jnp.maximum(jnp.max(history), amax)  # slot 0 is never positive
        if self.amax_compute_algo == "most_recent":
            return amax
        newest_first = jnp.concatenate([amax[None], history[:0:-1]])
        return jnp.asarray(self.amax_compute_algo(newest_first), jnp.float32).reshape(())

    def scale_from(self, amax: jax.Array, scale: jax.Array, fp8_max: float) -> jax.Array:
        """amax f32[...] -> scale, in the shape of `scale`: the one in force, kept where amax is 0 or not finite."""
        if self.scaling_factor_compute_algo is None:
            new = fp8_max / amax / 2.0**self.margin
        else:
            new = jnp.asarray(self.scaling_factor_compute_algo(amax, scale, fp8_max, self), jnp.float32)
        float32 = jnp.finfo(jnp.float32)
        new = jnp.clip(new, float32.tiny, float32.max)
        return jnp.where(jnp.isfinite(amax) & (amax > 0) & ~jnp.isnan(new), new, scale)
