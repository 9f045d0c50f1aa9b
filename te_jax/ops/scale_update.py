"""One step of delayed scaling of many tensors as one kernel: a layer has a dozen, and each kernel's launch takes longer
than the law."""

from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from te_jax.core.op import Op
from te_jax.recipe import DelayedScaling

MOST_STATES = 32  # of a call: kMostStates in csrc/base/ops.h
State = tuple[jax.Array, jax.Array]  # the scale f32[..., 1] and the history f32[..., L] of a tensor


def _reference(scales, histories, amaxes, fp8_max, *, interval, margin, newest):
    recipe = DelayedScaling(
        margin=margin,
        interval=interval,
        amax_history_len=histories.shape[-1],
        amax_compute_algo="most_recent" if newest else "max",
    )
    if amaxes is not None:
        law = jax.vmap(each_tensor(recipe.new_state, amaxes.ndim - 1))
        new_scales, histories = law(scales[..., None], histories, amaxes, fp8_max)
        scales = new_scales[..., 0]
    absent = [(None, None)] * (MOST_STATES - len(scales))
    return [a for each in [*zip(scales, histories), *absent] for a in each]


def each_tensor(law: Callable[..., Any], axes: int) -> Callable[..., Any]:
    """law(scale, history, amax, fp8_max) over `axes` leading axes of the first three."""
    for _ in range(axes):
        law = jax.vmap(law, (0, 0, 0, None))
    return law


def results_of(count: int) -> tuple[str, ...]:
    """The names of the results of `scale_update` of so many tensors."""
    return tuple(f"{name}{i}" for i in range(count) for name in ("new_scale", "new_history"))


scale_update: Op = Op(
    "te_scale_update",
    "scales: n b..., histories: n b... l, amaxes?: n b..., fp8_max?: n -> "
    + ", ".join(f"{name}?: b... l" if "history" in name else f"{name}?: b..." for name in results_of(MOST_STATES)),
    replicated="n l",
    dtypes=lambda *operands, **attrs: (jnp.float32,) * (2 * MOST_STATES),
    reference=_reference,
)
"""scales f32[n, b...], histories f32[n, b..., L], amaxes f32[n, b...] of this step, fp8_max f32[n], n up to MOST_STATES
-> new_scale0 f32[b...], new_history0 f32[b..., L], and so on to tensor n - 1. They are arrays of their own, for XLA
cuts each slice of a larger one by a kernel, and copies donated state that is read and written by one.

The law of `te_jax.recipe.DelayedScaling.new_state` with its own scale factors. margin: float. interval: int.
newest: amax_compute_algo is "most_recent", else "max". Without amaxes and fp8_max the states as they are.
"""


def next_states(
    recipe: DelayedScaling, states: Sequence[State], amaxes: Sequence[jax.Array], directions: Sequence[str]
) -> list[State]:
    """`recipe.new_state` of tensors with any leading axes; tensors of one type share a kernel.

    amaxes: f32[...] of this step. directions: "fwd" or "bwd", which FP8 type a tensor has.
    """
    fp8_maxes = [recipe.fp8_format.max(direction) for direction in directions]
    if callable(recipe.amax_compute_algo) or recipe.scaling_factor_compute_algo is not None:
        each = zip(states, amaxes, fp8_maxes)
        return [each_tensor(recipe.new_state, amax.ndim)(*state, amax, most) for state, amax, most in each]
    return _in_kernels(
        states,
        amaxes,
        fp8_maxes,
        interval=recipe.interval,
        margin=float(recipe.margin),
        newest=recipe.amax_compute_algo != "max",
    )


def next_state(recipe: DelayedScaling, state: State, amax: jax.Array, direction: str) -> State:
    """`next_states` of one tensor."""
    return next_states(recipe, [state], [amax], [direction])[0]


def apart(states: Sequence[State]) -> list[State]:
    """`states`, slices of larger arrays, each in arrays of its own."""
    return _in_kernels(states, None, None, interval=1, margin=0.0, newest=False)


def _in_kernels(states, amaxes, fp8_maxes, **law) -> list[State]:
    """Calls of `scale_update`, for states of one type up to MOST_STATES at once."""
    each = list(states) if amaxes is None else [(*state, amax) for state, amax in zip(states, amaxes)]
    alike = defaultdict(list)
    for i, operands in enumerate(each):
        alike[tuple(map(jax.typeof, operands))].append(i)
    new: dict[int, State] = {}
    for members in alike.values():
        for first in range(0, len(members), MOST_STATES):
            some = members[first : first + MOST_STATES]
            scales, *others = (jnp.stack(a) for a in zip(*(each[i] for i in some)))
            others += [None, None] if amaxes is None else [jnp.asarray([fp8_maxes[i] for i in some], jnp.float32)]
            results = scale_update(scales[..., 0], *others, outputs=results_of(len(some)), **law)
            new |= {i: (results[2 * at][..., None], results[2 * at + 1]) for at, i in enumerate(some)}
    return [new[i] for i in range(len(states))]
