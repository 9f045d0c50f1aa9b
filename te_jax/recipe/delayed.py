"""Delayed scaling: a tensor's scale follows from its amaxes in past steps."""

import numbers
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from te_jax.core.amax import amax as largest
from te_jax.recipe._base import Format, Recipe, bound_scale
from te_jax.recipe.current import Float8CurrentScaling

_MARGIN = 32  # that is E5M2's whole range, from its least number to its largest
SCALE, HISTORY = "_scale", "_amax_history"  # how the names of a tensor's leaves end


@dataclass(frozen=True)
class DelayedScaling(Recipe):
    """Scales that follow from the amaxes of past steps (Micikevicius et al. 2022, section 3.3).

    The law, per tensor and step: quantize with the stored scale; put the step's amax into slot 0 of the history;
    A = max(history) or history[0]; scale = (fp8_max / A) / 2**margin; roll the history by -1 and clear slot 0. An amax
    that is 0 or not finite leaves history and scale as they are; an infinite scale is clamped to the largest float.

    margin:             powers of 2 kept free above the amax, from -32 to 32.
    interval:           the scale changes every `interval` steps, the first of them included. -1 (older code) means 1.
    fp8_format:         Format.HYBRID or Format.E4M3.
    amax_history_len:   how many amaxes a scale sees, the current one among them.
    amax_compute_algo:  "max", "most_recent", or a function of the history (f32[L], newest first) to the amax (f32[]).
    scaling_factor_compute_algo: None, or a function (amax, scale, fp8_max, recipe) -> scale.
    override_linear_precision: (fprop, dgrad, wgrad): True runs that GEMM on unquantized operands.
    reduce_amax:        inside `shard_map`, one amax for all devices. False: each device scales its shard by its own
                        amax, and its `fp8_metas` must then vary over that mesh axis. Outside `shard_map` arrays are
                        global, and so is their amax.
    fp8_dpa:            attention in FP8, where `te_jax.flax.DotProductAttention` serves the call so, with gradients as
                        `te_jax.layers.attention_fp8` has them by default; its state is there only with it.
    fp8_mha:            projections and attention hand over FP8 tensors: not in this version, must be False.
    split_accumulator:  (fprop, dgrad, wgrad): True adds products in f32 every 128 or 256 of them, False all of them in
                        the tensor cores, which keep 14 bits: 1 to 2 % faster for a layer.
    exclude:            patterns (`fnmatch`) of Flax module paths that stay out of FP8, with all below them, such as
                        ("lm_head", "layers_0", "*/mlp"). Layers of one `nn.scan` are one module. One that names no
                        module is told by a warning where the autocast ends.

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
    exclude: tuple[str, ...] = ()

    has_state: ClassVar[bool] = True

    def __post_init__(self) -> None:
        set_ = object.__setattr__
        self._check_shared()
        set_(self, "interval", 1 if self.interval == -1 else self.interval)
        for field in ("interval", "amax_history_len"):
            value = getattr(self, field)
            whole = isinstance(value, numbers.Integral) and not isinstance(value, bool)
            self._need(whole and value >= 1, field, "pass an int of at least 1")
            set_(self, field, int(value))
        self._need_number("margin", -_MARGIN, _MARGIN, f"pass a number of powers of 2 from -{_MARGIN} to {_MARGIN}")
        known = callable(self.amax_compute_algo) or self.amax_compute_algo in ("max", "most_recent")
        self._need(known, "amax_compute_algo", 'pass "max", "most_recent" or a function of the history')
        scaling = self.scaling_factor_compute_algo
        text = "pass None or a function (amax, scale, fp8_max, recipe) -> scale"
        self._need(scaling is None or callable(scaling), "scaling_factor_compute_algo", text)

    def scale(self, tensor: str, stored: jax.Array, amax: None, fp8_max: float) -> jax.Array:
        """The stored scale, f32[]."""
        return stored

    def for_parameters(self) -> Recipe:
        """`Float8CurrentScaling`: a scale of past amaxes moves from step to step, a stored parameter keeps its own."""
        return Float8CurrentScaling(
            fp8_format=self.fp8_format, override_linear_precision=self.override_linear_precision
        )

    def fresh_state(self) -> dict[str, np.ndarray]:
        """A scale of 1, f32[1], and an empty history, f32[amax_history_len]."""
        return {SCALE: np.ones(1, np.float32), HISTORY: np.zeros(self.amax_history_len, np.float32)}

    @property
    def scale_is_of_history(self) -> bool:
        """Whether a scale is never larger than its history allows; else it may rightly be older than that."""
        return self.interval == 1 and self.amax_compute_algo == "max" and self.scaling_factor_compute_algo is None

    def new_state(
        self, scale: jax.Array, history: jax.Array, amax: jax.Array, fp8_max: float
    ) -> tuple[jax.Array, jax.Array]:
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
            return jnp.maximum(largest(jnp.maximum(history, 0.0)), amax)  # slot 0 is never positive
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
        return bound_scale(new, amax, scale)

    def adopt_state(self, scale: jax.Array, history: jax.Array, fp8_max: float) -> tuple[jax.Array, jax.Array]:
        """This recipe's state from the scale f32[..., 1] and history f32[..., n] that another recipe left.

        Returns the scale that the newest amaxes set, and their history.
        """
        length = self.amax_history_len
        amaxes = jnp.pad(history[..., 1:], [(0, 0)] * (history.ndim - 1) + [(length + 1, 0)])  # the newest one is last
        before = amaxes[..., -length - 1 : -1].at[..., :1].set(0)  # the history that the newest one came to
        follow = lambda before, amax, scale: self.scale_from(self.seen_amax(before, amax), scale, fp8_max)
        new = amaxes[..., amaxes.shape[-1] - length :].at[..., :1].set(0)
        return jnp.vectorize(follow, signature="(l),(),(i)->(i)")(before, amaxes[..., -1], scale), new

    def mend_states(
        self, scales: jax.Array, histories: jax.Array, bwd: jax.Array, in_force: bool = True
    ) -> tuple[jax.Array, jax.Array]:
        """Repairs states of n tensors, scales f32[n] and histories f32[n, L], that no step could have left behind.

        bwd:      bool[n], which are gradients.
        in_force: the states follow this recipe. Else neither its interval nor its formats count.
        """
        counted = self.interval if in_force else jnp.inf  # steps that slot 0 may count up to
        slot0 = jnp.where((histories[:, :1] <= 0) & (histories[:, :1] > -counted), histories[:, :1], 0.0)
        newer = jnp.where(jnp.isfinite(histories[:, 1:]) & (histories[:, 1:] > 0), histories[:, 1:], 0.0)
        fp8_max = self.fp8_format.max("fwd")
        if in_force:  # else the gradients' type is not known, and the smaller maximum is safe
            fp8_max = jnp.where(bwd, self.fp8_format.max("bwd"), fp8_max)
        top = largest(newer, (1,))
        allowed = bound_scale(fp8_max / top / 2.0**self.margin, top, jnp.inf)  # inf where nothing is recorded
        fresh = jnp.where(top == 0, 1.0, allowed)
        scales = jnp.where(scales > 0, bound_scale(scales, 1.0, 1.0), fresh)  # NaN is not either
        if in_force and self.scale_is_of_history:
            scales = jnp.minimum(scales, allowed)
        return scales, jnp.concatenate([slot0, newer], 1)
