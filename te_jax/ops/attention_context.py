"""Context-parallel attention: dot_product_attention of sequences that are cut along a mesh axis."""

from math import prod
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, PartitionSpec

from te_jax._check import plain
from te_jax._types import align, splittable_axes
from te_jax.ops.attention import dot_product_attention, undivided_groups
from te_jax.ops.attention.mask import SequenceDescriptor
from te_jax.ops.attention.options import AttentionOptions, check_options
from te_jax.ops.attention_context_plan import OPEN, Layout
from te_jax.ops.attention_context_run import Rows, Spec, context_attention
from te_jax.ops.attention_op import cudnn_refuses, gpu_refuses

_OP = "context_parallel_attention"
STRATEGIES = ("default", "all_gather", "ring")
_TAKES = "it takes every attn_mask_type, window_size, softmax_type and a sequence_descriptor"
Axes = str | tuple[str, ...] | None


def context_parallel_attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    *,
    axis: str,
    strategy: str = "default",
    load_balanced: bool = False,
    batch_axis: Axes = None,
    head_axis: Axes = None,
    attn_mask_type: str = "no_mask",
    window_size: tuple[int, int] | None = None,
    sequence_descriptor: SequenceDescriptor | None = None,
    softmax_type: str = "vanilla",
    softmax_offset: jax.Array | None = None,
    scale: float | None = None,
    deterministic: bool = False,
    return_lse: bool = False,
    context_checkpoint_name: str | None = None,
    bias=None,
    mask=None,
    alibi_slopes=None,
    attn_bias_type: str | None = None,
    dropout_rate: float = 0.0,
    dropout_rng: jax.Array | None = None,
    return_max_logit: bool = False,
):
    """`dot_product_attention` with the sequence cut along a mesh axis: each device has s / cp queries, and t / cp keys.

    q [b..., s, h, d], k [b..., t, g, d], v [b..., t, g, e] of one floating dtype: whole arrays, which a mesh in force
    (`jax.set_mesh`) shards or will shard; or, inside a `jax.shard_map` over `axis`, each device's part.

    axis:           the mesh axis, of cp devices.
    strategy:       "ring": keys and values go around, and a device never holds more than two parts of them;
                    "all_gather" (the default): each device collects them all, and in the backward pass once more.
    load_balanced:  the sequence is in the order of `te_jax.sharding.reorder_causal_load_balancing`: under a causal mask
                    all devices then have the same work. The result is in that order too.
    batch_axis, head_axis: the mesh axes that shard q's first axis, and its heads and groups. Auto axes should be named,
                    or the kernels gather along them; Explicit axes are known from the arrays. Without effect inside a
                    `jax.shard_map` over `axis`: make these axes manual there, too.
    sequence_descriptor: of whole rows, in the order of the sequence also if load_balanced. Segments of queries and
                    keys must be the same tokens where a causal type, or a window, goes with lengths or offsets, and
                    with any bottom-right type: rows where they are not become NaN. Segment ids, and segments with a
                    window (all_gather: one that is not causal) become biases of b * (s / chunks) * (t / chunks)
                    numbers (all_gather: b * (s / chunks) * t), chunks = cp or 2 cp, and skip no block.
    attn_mask_type, window_size, softmax_type, softmax_offset, scale, deterministic, return_lse,
    context_checkpoint_name: as in `dot_product_attention`. The saved residuals are q, k, v, out and lse of the device.
    bias, mask, alibi_slopes, attn_bias_type, dropout_rate, return_max_logit: refused, but where `axis` has one device:
                    nothing is cut there, and the call is `dot_product_attention` (dropout_rng: with dropout_rate).

    Sums over devices, of partial results and of gradients, are f32. Returns as `dot_product_attention`; with
    return_lse a pair.
    Raises ValueError for an axis that the mesh lacks, that another part has, or whose devices do not divide s or t; for
    what is refused; and what `dot_product_attention` raises.
    Source: Ring Attention (https://arxiv.org/abs/2310.01889); Llama 3 (https://arxiv.org/abs/2407.21783), section
    3.3.2.
    """
    place, ring = _Mesh.of(axis, batch_axis, head_axis), _is_ring(strategy)
    if not isinstance(load_balanced, bool):
        raise TypeError(f"{_OP}: load_balanced is {load_balanced!r}; pass True or False.")
    taken = dict(
        attn_mask_type=attn_mask_type, window_size=window_size, softmax_type=softmax_type,
        softmax_offset=softmax_offset, scale=scale, deterministic=deterministic, return_lse=return_lse,
        context_checkpoint_name=context_checkpoint_name,
    )  # fmt: skip
    refused = dict(
        bias=bias, mask=mask, alibi_slopes=alibi_slopes, attn_bias_type=attn_bias_type, dropout_rate=dropout_rate,
        return_max_logit=return_max_logit,
    )  # fmt: skip
    if place.cp == 1:  # nothing is cut
        others = dict(sequence_descriptor=sequence_descriptor, dropout_rng=dropout_rng)
        return dot_product_attention(q, k, v, **taken, **refused, **others)
    _refuse(**refused)
    q, k, v = map(jnp.asarray, (q, k, v))
    options, layout = check_options(dot_product_attention, q, k, v, taken, op=_OP), _layout(q, k, place, load_balanced)
    rows, spec = _spec(q, sequence_descriptor, options, layout, axis, ring, context_checkpoint_name)
    _check_gpu(q, k, v, options, spec)
    out, lse = place.run(q, k, v, _sink(options, q), rows, spec)
    return (out, lse) if return_lse else out


def _refuse(*, attn_bias_type, **arguments):
    arguments["attn_bias_type"] = None if attn_bias_type and plain(attn_bias_type) == "no_bias" else attn_bias_type
    for name, value in arguments.items():
        if value is not None and value is not False and not (name == "dropout_rate" and value == 0):
            shown = f"of shape {tuple(value.shape)}" if hasattr(value, "shape") and value.ndim else repr(value)
            raise ValueError(
                f"{_OP}: {name} is {shown}, which attention over a cut sequence does not support; {_TAKES}. Leave "
                f"{name} out, or call dot_product_attention."
            )


def _is_ring(strategy) -> bool:
    if strategy not in STRATEGIES:
        raise ValueError(f"{_OP}: strategy is {strategy!r}; pass one of {', '.join(STRATEGIES)}.")
    return strategy == "ring"


def _check_gpu(q, k, v, options: AttentionOptions, spec: Spec):
    if options.scale <= 0:
        raise ValueError(f"{_OP}: scale is {options.scale}; pass a positive one (change the sign of q).")
    if cudnn_refuses(q, k, v):
        return  # the ops are plain JAX then
    lacks = gpu_refuses(
        q.shape[-1], v.shape[-1], only_band=spec.rows is Rows.WHOLE, has_bias=False,
        deterministic=spec.deterministic, drops=False,
    )  # fmt: skip
    if lacks:
        raise ValueError(f"{_OP}: {lacks}; pass float32 arrays, which are plain JAX's.")


# ---- the sequence ----------------------------------------------------------------------------------


def _layout(q, k, place: "_Mesh", load_balanced) -> Layout:
    """How the sequences lie; ValueError if they cannot be cut."""
    chunks = 2 if load_balanced else 1
    pieces = chunks * (1 if place.is_inside else place.cp)
    for name, x in (("q", q), ("k and v", k)):
        if x.shape[-3] % pieces or not x.shape[-3]:
            each = " (2 for each device, with load_balanced)" if load_balanced else ""
            raise ValueError(
                f"{_OP}: {name} has {x.shape[-3]} positions{' on each device' if place.is_inside else ''}, which "
                f"{pieces} pieces{each} do not divide; mesh axis {place.axis!r} has {place.cp} devices. Pad the "
                "sequence."
            )
    whole = place.cp if place.is_inside else 1
    return Layout(place.cp, load_balanced, whole * q.shape[-3], whole * k.shape[-3])


def _spec(q, described, options: AttentionOptions, layout: Layout, axis: str, ring: bool, name):
    """-> what of the sequence descriptor the devices need, and how they take it."""
    s, t, band, kind, rows = layout.s, layout.t, options.mask.band, Rows.WHOLE, None
    if described is not None:
        if not isinstance(described, SequenceDescriptor):
            got = type(described).__name__
            raise TypeError(f"{_OP}: sequence_descriptor is a {got}; pass a SequenceDescriptor. {_TAKES}.")
        described.check(_OP, q.shape[:-3], s, t)
        is_open = band[:2] == OPEN[:2]
        by_lengths = described.segment_ids is None
        causal = band.right == 0 and (band.left is None or not ring)
        kind = Rows.SEGMENTS if by_lengths and (is_open or (s == t and causal)) else Rows.TOKENS
        rows = described.segments() if kind is Rows.SEGMENTS else described.tokens(s, t)
        if not is_open and (by_lengths or band.bottom_right):
            rows = (rows, _differ(described, s, t))
        else:
            rows = (rows, None)
        band = band._replace(bottom_right=False)  # where the segments are the same, it is the same
    return rows, Spec(axis, layout, ring, band, kind, options.scale, options.deterministic, name)


def _differ(described: SequenceDescriptor, s: int, t: int) -> jax.Array:
    """bool[b...]: rows whose segments as queries and as keys are not the same tokens."""
    if described.segment_ids is not None:
        queries, keys = described.segment_ids
        return jnp.any(queries != keys, -1) if s == t else jnp.ones(queries.shape[:-1], bool)
    segments = described.segments()
    end = lambda at, size: jnp.minimum(segments[..., at] + segments[..., at + 1], size)
    there = lambda at: (segments[..., at] >= 0) & (segments[..., at + 1] > 0)
    same = (segments[..., 0] == segments[..., 2]) & (end(0, s) == end(2, t))
    return jnp.any((there(0) != there(2)) | (there(0) & ~same), -1)


def _sink(options: AttentionOptions, q) -> jax.Array | None:
    """What joins the softmax: f32[h] or [1]; None: nothing."""
    offset = options.offset(q)
    return None if offset is None else offset.reshape(-1)


# ---- the mesh --------------------------------------------------------------------------------------


class _Mesh(NamedTuple):
    """The mesh in force, and what its axes are for."""

    axis: str
    batch: tuple[str, ...]
    heads: tuple[str, ...]
    mesh: jax.sharding.AbstractMesh

    @classmethod
    def of(cls, axis, batch_axis, head_axis) -> "_Mesh":
        """Raises ValueError for axes that the mesh in force lacks, and for one that is given twice."""
        mesh = jax.sharding.get_abstract_mesh()
        named = {"axis": axis, "batch_axis": batch_axis, "head_axis": head_axis}
        parts = {name: _names(name, value) for name, value in named.items()}
        if len(parts["axis"]) != 1:
            raise ValueError(f"{_OP}: axis is {axis!r}; pass the name of one mesh axis.")
        roles: dict[str, str] = {}
        for role, names in parts.items():
            for name in names:
                if name not in mesh.axis_names:
                    has = f"has the axes {mesh.axis_names}" if mesh.axis_names else "is none; enter jax.set_mesh(mesh)"
                    raise ValueError(f"{_OP}: {role} is {named[role]!r}, but the mesh in force {has}.")
                if name in roles and mesh.shape[name] > 1:
                    raise ValueError(
                        f"{_OP}: mesh axis {name!r} is both {roles[name]} and {role}; an axis cuts one of them: name "
                        "another."
                    )
                roles[name] = role
        cutting = lambda names: tuple(name for name in names if mesh.shape[name] > 1)
        return cls(axis, cutting(parts["batch_axis"]), cutting(parts["head_axis"]), mesh)

    @property
    def cp(self) -> int:
        return self.mesh.shape[self.axis]

    @property
    def is_inside(self) -> bool:
        """Whether this is traced for each device along `axis`."""
        return self._type(self.axis) == AxisType.Manual

    def _type(self, name: str):
        return dict(zip(self.mesh.axis_names, self.mesh.axis_types))[name]

    def run(self, q, k, v, sink, rows, spec: Spec):
        """`context_attention` on every device, by `shard_map` over `axis`, the axes that are named, and Explicit ones:
        the kernels then see what is on one device."""
        lead, heads = self._parts(q, k)
        if self.is_inside:  # jax 0.10 has no residuals of a shard_map in a shard_map
            q, restored = undivided_groups(q, k.shape[-2])
            out, lse = _per_device(q, k, v, sink, rows, spec)
            return restored(out), lse
        manual = {name for names in (*lead, heads) for name in names} | {self.axis}
        manual |= splittable_axes(self.mesh)
        one = lambda names: names or None
        batch = tuple(map(one, lead))
        tokens = PartitionSpec(*batch, self.axis, one(heads), None)
        by_head = PartitionSpec(one(heads) if sink is not None and sink.size > 1 else None)
        by_row = lambda x: PartitionSpec(*batch, *[None] * (x.ndim - len(batch)))
        arrays = (q, k, v, sink, rows)
        specs = (tokens, tokens, tokens, None if sink is None else by_head, jax.tree.map(by_row, rows))
        if AxisType.Explicit in self.mesh.axis_types:
            arrays = jax.tree.map(lambda x, spec: jax.sharding.reshard(x, self._explicit(spec)), arrays, specs)
        run = jax.shard_map(
            lambda *arrays: _per_device(*arrays, spec),
            in_specs=specs,
            out_specs=(tokens, PartitionSpec(*batch, one(heads), self.axis)),
            axis_names=manual,
        )
        return jax.jit(run)(*arrays)

    def _parts(self, q, k) -> tuple[list[tuple[str, ...]], tuple[str, ...]]:
        """The mesh axes, beside `axis` and Manual ones, that shard each batch axis, and the heads."""
        given = jax.typeof(q).sharding
        explicit = [()] * q.ndim
        if given.mesh.axis_names == self.mesh.axis_names:
            explicit = [tuple(n for n in _names("", e) if self._type(n) == AxisType.Explicit) for e in given.spec]
        *lead, _, heads, _ = explicit
        for where, names in (("batch", sum(lead, ())), ("head", heads)):
            if self.axis in names:
                raise ValueError(
                    f"{_OP}: mesh axis {self.axis!r} cuts the sequence, but q has its {where} axis on it: "
                    f"{given.spec}; name another axis, or reshard q."
                )
        heads = heads if k.shape[-2] % prod(self.mesh.shape[n] for n in heads) == 0 else ()  # no axis cuts a group
        for name, size, named in (("b", q.shape[0] if lead else 1, self.batch), ("g", k.shape[-2], self.heads)):
            devices = prod(self.mesh.shape[n] for n in named if self._type(n) != AxisType.Manual)
            if size % devices:
                raise ValueError(
                    f"{_OP}: axis `{name}` is {size}, which the {devices} devices of mesh axes {named} do not divide; "
                    "name others, or none."
                )
        known = {n for names in (*lead, heads) for n in names}
        more = lambda named: tuple(n for n in named if n not in known and self._type(n) != AxisType.Manual)
        if lead:
            lead[0] += more(self.batch)
        return lead, heads + more(self.heads)

    def _explicit(self, spec) -> PartitionSpec:
        """The part of `spec` that types show."""
        kept = (tuple(n for n in _names("", entry) if self._type(n) == AxisType.Explicit) for entry in spec)
        return PartitionSpec(*(names or None for names in kept))


def _names(role: str, value) -> tuple[str, ...]:
    names = () if value is None else value if isinstance(value, tuple) else (value,)
    if not all(isinstance(name, str) and name for name in names):
        raise ValueError(f"{_OP}: {role} is {value!r}; pass names of mesh axes.")
    return names


def _per_device(q, k, v, sink, rows, spec: Spec):
    """`context_attention` of what one device has."""
    rows, differ = (None, None) if rows is None else rows
    poisoned = lambda x: x if differ is None else jnp.where(differ[..., None, None, None], jnp.nan, x)
    leaves, tree = jax.tree.flatten(rows)
    # Not what is the same on all devices of the axis: then its gradient is theirs, added up.
    anchor = jax.lax.axis_index(spec.axis).astype(jnp.int32)
    q, k, v, sink, _, *leaves = align(poisoned(q), k, v, sink, anchor, *leaves)  # of q: the gradients too
    out, lse = context_attention(q, k, v, sink, jax.tree.unflatten(tree, leaves), spec)
    return poisoned(out), poisoned(lse[..., None])[..., 0]
