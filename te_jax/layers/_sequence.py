"""What mixers of tokens share that keep a state: convolutions by heads, padding, and a sequence that devices cut."""

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from te_jax.core.arrays import as_jax
from te_jax.core.check import BOOL, FLOATS_ARRAY, INTEGERS, NONE, STRING, Kind, check
from te_jax.core.types import align, on_explicit_mesh
from te_jax.ops.ssm import causal_conv1d
from te_jax.ops.ssm.conv import check_shape, last_inputs
from te_jax.ops.ssm.runs import runs_of
from te_jax.sharding import current_mesh_resource
from te_jax.sharding.constraints import entries, place_axis, repeat_groups, spec_of
from te_jax.sharding.logical_axes import batch_axes
from te_jax.sharding.resource import auto_mesh, check_cuts_sequence_alone, check_in_mesh, is_manual, mesh_sizes

Taps = Sequence[jax.Array | None]
"""The kernels [w, channels] of convolutions, or their biases [channels]: of heads, then of groups."""


def _made_by(cls: type) -> Kind:
    return Kind(f"a te_jax.layers.{cls.__name__}", lambda value: isinstance(value, cls))


class SequenceCall(NamedTuple):
    """The arguments that the mixers of this folder share; `mamba2` says what they are."""

    name: str
    segments: jax.Array | None = None
    state: Any = None
    lengths: jax.Array | None = None
    return_state: bool = False
    axis: str | None = None

    def checked(self, arrays: Mapping[str, Any], weights: Any, of_weights: type, of_state: type) -> "SequenceCall":
        """With arrays of jax. Raises TypeError or ValueError for arrays that are not floating, and for what `mamba2`
        says of weights, a state, segments, lengths and an axis. of_weights, of_state: the classes of these, whose
        entries are arrays unless they say otherwise."""
        check(self.name, "weights", weights, _made_by(of_weights))
        check(self.name, "state", self.state, NONE | _made_by(of_state))
        given = {f"weights.{field}": a for field, a in weights._asdict().items()}
        given |= {} if self.state is None else {f"state.{field}": a for field, a in self.state._asdict().items()}
        optional = {f"weights.{field}" for field, of in of_weights.__annotations__.items() if of != jax.Array}
        for what, a in {**arrays, **given}.items():
            check(self.name, what, a, FLOATS_ARRAY | NONE if what in optional else FLOATS_ARRAY)
        check(self.name, "axis", self.axis, NONE | STRING)
        rows = next(iter(arrays.values())).shape[0]
        segments, lengths = as_jax(self.segments, self.lengths)
        check(self.name, "return_state", self.return_state, BOOL)
        check(self.name, "lengths", lengths, INTEGERS | NONE)
        check_shape(self.name, "lengths", lengths, (rows,))
        if lengths is not None and segments is not None:
            raise ValueError(
                f"{self.name}: lengths and segments are both given; a row of segments is full: pass one of them."
            )
        return self._replace(segments=segments, lengths=lengths)

    def check_cut(self, s: int, width: int) -> None:
        """Raises ValueError where `axis` cannot cut s tokens, of which convolutions see `width`, or is not to."""
        what = f"{self.name}: axis is {self.axis!r}"
        check_in_mesh(what, self.axis)
        check_cuts_sequence_alone(what, self.axis, current_mesh_resource())
        size = 1 if is_manual(self.axis) else jax.sharding.get_abstract_mesh().shape[self.axis]
        asked = dict(state=self.state is not None, lengths=self.lengths is not None, return_state=self.return_state)
        for argument in (argument for argument, on in asked.items() if on):
            raise ValueError(f"{what}, which cuts the sequence; {argument} is for whole ones: leave it out.")
        if s % size or s // size < width - 1:
            raise ValueError(
                f"{self.name}: {s} tokens on the {size} devices of {self.axis!r}; pass a multiple of {size}, and at "
                f"least {width - 1} tokens for each."
            )


def convolved(
    arrays: Sequence[jax.Array], past: Any, kernels: Taps, biases: Taps, segments: jax.Array | None,
    lengths: jax.Array | None, over: tuple[tuple[str, ...], int], wanted: bool,
) -> tuple[list[jax.Array], list[jax.Array | None]]:  # fmt: skip
    """-> the arrays, of heads [b, s, h, p] the first and of groups [b, s, g, n] the others, behind their convolutions
    with silu; and their last inputs, or None unless they are wanted. There are as many groups as the devices `over`
    which heads are split need, so that each has the group of its heads."""
    groups = arrays[1]
    if groups.shape[2] % over[1] and on_explicit_mesh(jax.typeof(groups)):  # Such groups are whole on every device.
        whole = lambda a: None if a is None else place_axis(a, -1, ())
        kernels, biases = ((of_heads, *map(whole, others)) for of_heads, *others in (kernels, biases))
    conv = partial(_conv_of_heads, segments=segments, lengths=lengths, wanted=wanted)
    out, last = zip(*map(conv, arrays, past, kernels, biases))
    if groups.shape[2] > 1:  # The scan shares one group with all heads, wherever these are.
        out = repeat_groups(*out, over=over)
    return list(out), list(last)


def real(a: Any, lengths: jax.Array | None) -> Any:
    """a [b, s, ...], 0 at padding. A factor of 0 would keep a NaN."""
    if lengths is None:
        return a
    is_real = jnp.arange(a.shape[1])[None] < lengths[:, None]
    return jnp.where(jnp.expand_dims(is_real, tuple(range(2, a.ndim))), a, 0)


def _conv_of_heads(a, past, kernel, bias, *, segments, lengths, wanted):
    """silu(conv(a)) of a [b, s, heads, d], and the last inputs [b, w-1, heads*d], or None unless they are wanted."""
    channels, count = _by_channels(a), kernel.shape[0] - 1
    options = dict(activation="silu", segments=segments, initial_state=past)
    if lengths is None and wanted:
        y, last = causal_conv1d(channels, kernel, bias, **options, return_final_state=True)
    else:
        y, last = causal_conv1d(channels, kernel, bias, **options), None
    if lengths is not None and wanted:
        before = jnp.zeros((a.shape[0], count, channels.shape[-1]), a.dtype) if past is None else past
        last = _last_of_rows(before.astype(a.dtype), channels, lengths)
    return y.reshape(a.shape), last


def _last_of_rows(before, channels, lengths):
    """The last inputs [b, count, c] of rows of `lengths` channels [b, s, c], behind those before [b, count, c]."""

    def last(before, channels, lengths):
        tokens, count = jnp.concatenate([before, channels], 1), before.shape[1]
        at = jnp.clip(lengths, 0, channels.shape[1])[:, None] + jnp.arange(count)[None]
        return jnp.take_along_axis(tokens, at[..., None], 1)

    aval = jax.typeof(channels)
    if on_explicit_mesh(aval):  # jax joins and looks up only what lies the same way
        rows, _, split = entries(aval)
        last = jax.sharding.auto_axes(last, out_sharding=spec_of((rows, (), split)))
    return last(before, channels, lengths)


def _by_channels(a):
    """[b, s, heads, d] -> [b, s, heads*d]."""
    return a.reshape(*a.shape[:2], math.prod(a.shape[2:]))


# -- a sequence that devices share --------------------------------------------------------------------------------


class AutoAxes(NamedTuple):
    """The Auto mesh axes by which a device has its rows, its heads and its groups, so that kernels see only these."""

    rows: tuple[str, ...]
    heads: tuple[str, ...]
    groups: tuple[str, ...]  # (): all groups are on every device
    copies: tuple[int, int]  # how many devices share a group that none has by itself, and how many groups a device has

    @classmethod
    def of(cls, x: jax.Array, B: jax.Array, over: tuple[tuple[str, ...], int]) -> "AutoAxes":
        """Of x [b, s, h, ...] and B [b, s, g, ...], where `over` splits the heads."""
        resource, (names, devices), groups = current_mesh_resource(), over, B.shape[2]
        if auto_mesh() is None or resource is None:
            return cls((), (), (), (1, groups))
        rows = batch_axes(resource)
        rows = () if x.shape[0] % math.prod(mesh_sizes()[name] for name in rows) else rows
        if x.shape[2] % devices:
            names, devices = (), 1
        each = math.lcm(groups, devices)
        return cls(rows, names, () if groups % devices else names, (each // groups, each // devices))

    def own_groups(self, a: jax.Array) -> jax.Array:
        """a [b, s, g, n] -> the groups of this device's heads, where all are here."""
        copies, count = self.copies
        if copies == 1 or a.shape[2] == 1:
            return a
        first = jax.lax.axis_index(self.heads) * count
        return jnp.take(a, (first + jnp.arange(count)) // copies, axis=2)


def from_a_device_before(a: jax.Array, axis: str, step: int = 1) -> jax.Array:
    """`a` of the device `step` before this one; of the first ones 0."""
    size = jax.lax.axis_size(axis)
    return jax.lax.ppermute(a, axis, [(i, i + step) for i in range(size - step)])


def goes_on_from(segments: jax.Array | None, axis: str) -> jax.Array:
    """bool[b], or [1]: whether the first token is of the segment of the last token of the device before."""
    is_first = jax.lax.axis_index(axis) == 0
    if segments is None:
        return ~is_first[None]
    return (from_a_device_before(segments[:, -1], axis) == segments[:, 0]) & ~is_first


def inputs_before(arrays: Sequence[jax.Array], count: int, segments: jax.Array | None, axis: str) -> list[jax.Array]:
    """The last `count` tokens [b, count, channels] of the arrays [b, s, heads, d] of the device before, 0 where these
    are of another segment."""
    runs, goes_on = None if segments is None else runs_of(segments), goes_on_from(segments, axis)
    tails = [last_inputs(_by_channels(a), runs, count) for a in arrays]
    return [jnp.where(goes_on[:, None, None], from_a_device_before(a, axis), 0) for a in tails]


def on_each_device(
    shard: Callable[..., jax.Array], axis: str, place: AutoAxes, of_heads: Sequence[jax.Array],
    of_groups: Sequence[jax.Array], segments: jax.Array | None, weights: Any,
    specs: Callable[[PartitionSpec, PartitionSpec], Any],
) -> jax.Array:  # fmt: skip
    """shard(of_heads, of_groups, segments, weights) of each device of `axis`, of its tokens: an array as the first.

    of_heads, of_groups: arrays [b, s, h, ...] and [b, s, g, ...]. specs: of heads and of groups -> of all weights.
    """

    def aligned(*args):
        return shard(*align(*args))

    args = tuple(of_heads), tuple(of_groups), segments, weights
    if is_manual(axis):
        return aligned(*args)
    one = lambda names: names or None
    heads, groups = PartitionSpec(one(place.heads)), PartitionSpec(one(place.groups))
    rows = PartitionSpec(one(place.rows), axis)
    given = specs(heads, groups)
    given = type(given)(*(None if a is None else spec for a, spec in zip(weights, given)))
    tokens = (PartitionSpec(*rows, *heads),) * len(of_heads), (PartitionSpec(*rows, *groups),) * len(of_groups)
    in_specs = (*tokens, None if segments is None else rows, given)
    run = jax.shard_map(
        aligned, in_specs=in_specs, out_specs=tokens[0][0], axis_names={axis, *place.rows, *place.heads}
    )
    if on_explicit_mesh(jax.typeof(of_heads[0])):
        of_heads, of_groups = (tuple(place_axis(a, 1, (axis,)) for a in each) for each in (of_heads, of_groups))
        if segments is not None:
            spec = PartitionSpec(*jax.typeof(of_heads[0]).sharding.spec[:1], axis)
            segments = jax.sharding.reshard(segments, spec)
    return run(of_heads, of_groups, segments, weights)
