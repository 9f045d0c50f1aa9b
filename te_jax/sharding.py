"""Names for mesh axes: which mesh axis plays which part, and the logical axis names of the Flax modules.

Nothing here is needed to run sharded: the ops follow the shardings of their operands. A `MeshResource` serves
those who shard by Flax's logical names; `extend_logical_axis_rules` turns it into rules.
"""

import contextlib
import functools
import math
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, PartitionSpec

from te_jax._check import ARRAY, NONE, STRING, Kind, KnownFields, check, integer
from te_jax._placement import mesh_axes
from te_jax._scope import Scope
from te_jax._types import on_explicit_mesh

# Logical axes of activations ...
BATCH_AXES = "nvte_batch"
SEQLEN_AXES = "nvte_seqlen"
SEQLEN_TP_AXES = "nvte_seqlen_tp"
SEQLEN_CP_AXES = "nvte_seqlen_cp"
HEAD_AXES = "nvte_head"
HIDDEN_AXES = "nvte_hidden"
HIDDEN_TP_AXES = "nvte_hidden_tp"
JOINED_AXES = "nvte_joined"
# ... and of weights. Joined: the axis that stacks q, k, v or the parts of a gated activation.
W_NO_SHARD_AXES = "nvte_w_no_shard"
W_FSDP_AXES = "nvte_w_fsdp"
W_TP_AXES = "nvte_w_tp"
W_JOINED_AXES = "nvte_w_joined"


_NAME = NONE | STRING
_AXIS = Kind("the name of a mesh axis, or None", _NAME.is_type, lambda axis: axis != "")
_PAIR = "a pair (logical name, mesh axis, tuple of them or None)"
_RULES = Kind(f"a tuple, each {_PAIR}", lambda rules: isinstance(rules, tuple | list))


@dataclass(frozen=True)
class MeshResource(KnownFields):
    """The mesh axis behind each kind of parallelism; None where there is none.

    dp_resource:   data parallel: the batch.
    tp_resource:   tensor parallel: heads, hidden width.
    tpsp_resource: tensor and sequence parallel in one: as tp, and the sequence outside the GEMMs (with cp, each
                   part of it). tp and tpsp may not both have more than one device.
    fsdp_resource: fully sharded data parallel: the batch (beside dp, if both are there), and the weights.
    pp_resource, cp_resource, ep_resource: pipeline, context (sequence in attention), expert parallel.
    """

    dp_resource: str | None = None
    tp_resource: str | None = None
    tpsp_resource: str | None = None
    fsdp_resource: str | None = None
    pp_resource: str | None = None
    cp_resource: str | None = None
    ep_resource: str | None = None

    def __post_init__(self):
        for field in fields(self):
            value = getattr(self, field.name)
            check("MeshResource", field.name, value, _AXIS)
        self._check_roles()

    def _check_roles(self):
        roles = {}
        for field in fields(self):
            axis = getattr(self, field.name)
            if axis is not None and roles.setdefault(axis, field.name) != field.name:
                raise ValueError(
                    f"MeshResource: {roles[axis]} and {field.name} are both {axis!r}; give each an axis of its own, "
                    "or leave one None (fsdp shards the batch as well, tpsp is tensor parallelism too)."
                )


ShardingResource = MeshResource  # its name in older code, with the first two fields

# Part of the jit cache key: a function traced under another MeshResource is traced again.
_mesh_resource = Scope("te_jax.sharding.global_shard_guard")


def current_mesh_resource() -> MeshResource | None:
    """The MeshResource in force, None if there is none. Raises RuntimeError under that of another task or thread."""
    return _mesh_resource.value


@contextlib.contextmanager
def global_shard_guard(resource: MeshResource | None) -> Iterator[None]:
    """Puts `resource` in force within a `with` block; None leaves the outer one in force.

    It belongs to the task and the thread that enter it: see `te_jax.autocast`.

    Raises TypeError for anything else, ValueError if a mesh is in force and lacks one of the axes.
    """
    if resource is None:
        yield
        return
    if not isinstance(resource, MeshResource):
        raise TypeError(f"global_shard_guard: resource is {resource!r}; pass a te_jax.MeshResource.")
    check_mesh_resource(resource)
    with _mesh_resource(resource):
        yield


def stage_axes() -> frozenset[str]:
    """The mesh axes whose devices hold different layers (pp_resource, of several devices): tensors there share no
    statistics."""
    resource = current_mesh_resource()
    axis = None if resource is None else resource.pp_resource
    return frozenset(() if axis is None or _axis_sizes().get(axis) == 1 else (axis,))


def _axis_sizes() -> dict[str, int]:
    return dict(jax.sharding.get_abstract_mesh().shape)


def check_mesh_resource(resource: MeshResource) -> None:
    """ValueError if an axis of `resource` is not in the mesh in force, or tp and tpsp contradict."""
    sizes = _axis_sizes()
    if not sizes:
        return
    for field in fields(resource):
        axis = getattr(resource, field.name)
        if axis is not None and axis not in sizes:
            raise ValueError(
                f"MeshResource: {field.name} is {axis!r}, but the mesh in force has the axes {tuple(sizes)}; "
                "name one of them, or None."
            )
    tp, tpsp = resource.tp_resource, resource.tpsp_resource
    if sizes.get(tp, 1) > 1 and sizes.get(tpsp, 1) > 1:
        raise ValueError(
            f"MeshResource: tp_resource {tp!r} has {sizes[tp]} devices and tpsp_resource {tpsp!r} has "
            f"{sizes[tpsp]}; only one of the two may have more than one."
        )


def check_cuts_sequence_alone(given: str, axis: str, resource: MeshResource | None) -> None:
    """ValueError, beginning with `given`, if `axis`, which cuts the sequence in attention, has another part as well."""
    if resource is None or _axis_sizes().get(axis, 1) == 1:
        return
    for name in ("dp_resource", "fsdp_resource", "tp_resource", "tpsp_resource", "pp_resource"):
        if getattr(resource, name) == axis:
            raise ValueError(f"{given}, and {name} is the same mesh axis; an axis cuts one of them: name another.")


def check_current_mesh_resource() -> None:
    """`check_mesh_resource` of the one in force, for a mesh that was set after it."""
    if (resource := current_mesh_resource()) is not None:
        check_mesh_resource(resource)


def logical_axis_map(resource: MeshResource) -> dict[str, str | tuple[str, ...] | None]:
    """Logical axis name -> mesh axis (None: replicated), for `resource` on the mesh in force.

    The batch lies on dp and fsdp together where both have more than one device: fsdp is data parallelism too. So does
    the sequence outside the GEMMs on cp and tpsp, cp first: to gather it for a GEMM goes over tpsp alone.
    """
    check_mesh_resource(resource)
    sizes = _axis_sizes()

    def together(*axes: str | None, alone: str | None) -> str | tuple[str, ...] | None:
        used = tuple(axis for axis in axes if sizes.get(axis, 1) > 1)
        return used if len(used) > 1 else used[0] if used else alone

    batch = together(resource.dp_resource, resource.fsdp_resource, alone=resource.dp_resource)
    sequence = together(resource.cp_resource, resource.tpsp_resource, alone=resource.tpsp_resource)
    tensor = resource.tpsp_resource if sizes.get(resource.tpsp_resource, 1) > 1 else resource.tp_resource
    return {
        BATCH_AXES: batch,
        SEQLEN_AXES: None,
        SEQLEN_TP_AXES: sequence,
        SEQLEN_CP_AXES: resource.cp_resource,
        HEAD_AXES: tensor,
        HIDDEN_AXES: None,
        HIDDEN_TP_AXES: tensor,
        JOINED_AXES: None,
        W_NO_SHARD_AXES: None,
        W_FSDP_AXES: resource.fsdp_resource,
        W_TP_AXES: tensor,
        W_JOINED_AXES: None,
        "heads": tensor,  # the two axes of RelativePositionBiases' table
        "relpos_buckets": None,
    }


def extend_logical_axis_rules(rules: Sequence[tuple]) -> Sequence[tuple]:
    """`rules` and, behind them, one rule for each logical axis of te_jax, by the MeshResource in force.

    rules: pairs (logical name, mesh axis | tuple of mesh axes | None), as `flax.linen.logical_axis_rules`
           takes them.
    Without a mesh in force (`jax.set_mesh`), and without a MeshResource that names an axis of one, `rules` come back as
    they are.
    Raises ValueError for a malformed rule, for a te_jax name with another value than the MeshResource gives it, for a
    mesh without a MeshResource, and for a MeshResource that names axes without a mesh: `with mesh:` puts none in force
    that jax shows.
    """
    check("extend_logical_axis_rules", "rules", rules, _RULES)
    for rule in rules:
        _check_rule(rule)
    resource = current_mesh_resource()
    if not _axis_sizes():
        named = {} if resource is None else {f.name: getattr(resource, f.name) for f in fields(resource)}
        named = ", ".join(f"{role}={axis!r}" for role, axis in named.items() if axis is not None)
        if named:
            raise ValueError(
                f"extend_logical_axis_rules: the MeshResource in force is MeshResource({named}), but no mesh is; enter "
                "`jax.set_mesh(mesh)`, which also takes the place of `with mesh:`, or leave the MeshResource out."
            )
        return rules
    if resource is None:
        raise ValueError(
            "extend_logical_axis_rules: a mesh is in force, but no MeshResource; enter "
            "`te_jax.sharding.global_shard_guard(MeshResource(...))` or give one to `te_jax.autocast`."
        )
    extended = list(rules)
    for name, axis in logical_axis_map(resource).items():
        given = [_one(value) for key, value in rules if key == name]
        if any(value != axis for value in given):
            raise ValueError(
                f"extend_logical_axis_rules: {name!r} is given as {given}, but the MeshResource in force "
                f"makes it {axis!r}; leave the rule out, or change the MeshResource."
            )
        if not given:
            extended.append((name, axis))
    return tuple(extended)


def reorder_causal_load_balancing(x, cp_size: int, axis: int = 1):
    """x with its `axis` (the sequence) in the order that balances causal attention over cp_size devices.

    The sequence is cut into 2 cp_size chunks, and device r gets the chunks r and 2 cp_size - 1 - r: one that sees few
    keys and one that sees many (Grattafiori et al. 2024, https://arxiv.org/abs/2407.21783, section 3.3.2). Reorder all
    that has a place per token alike: tokens, targets, loss weights, positions; a `SequenceDescriptor` stays as it is.
    Works on numpy arrays, best before they are sharded. Raises ValueError if 2 cp_size does not divide the axis.
    """
    chunks, axis = _chunks("reorder_causal_load_balancing", x, cp_size, axis)
    if cp_size == 1:
        return x
    xp = np if isinstance(x, np.ndarray) else jnp
    first, second = xp.split(chunks, 2, axis)
    return xp.stack([first, xp.flip(second, axis)], axis + 1).reshape(x.shape)


def inverse_reorder_causal_load_balancing(x, cp_size: int, axis: int = 1):
    """The inverse of `reorder_causal_load_balancing`: x with its `axis` in the order of the sequence again."""
    chunks, axis = _chunks("inverse_reorder_causal_load_balancing", x, cp_size, axis)
    if cp_size == 1:
        return x
    xp = np if isinstance(x, np.ndarray) else jnp
    pairs = chunks.reshape(*x.shape[:axis], cp_size, 2, *chunks.shape[axis + 1 :])
    first, second = (xp.take(pairs, i, axis + 1) for i in (0, 1))
    return xp.concatenate([first, xp.flip(second, axis)], axis).reshape(x.shape)


def causal_load_balanced_positions(size: int, cp_size: int) -> np.ndarray:
    """i32[size]: where each token of a reordered sequence was before, as RoPE's `positions`."""
    check("causal_load_balanced_positions", "size", size, integer(1))
    return reorder_causal_load_balancing(np.arange(size, dtype=np.int32), cp_size, axis=0)


_DEVICES = Kind("how many devices share a sequence, at least 1", lambda size: True, integer(1).accepts)


def _chunks(name: str, x, cp_size: int, axis: int):
    """-> x with its `axis` cut into [2 cp_size, size of a chunk] ([1, size] for one device), the axis from the
    front."""
    check(name, "x", x, ARRAY)
    check(name, "cp_size", cp_size, _DEVICES)
    check(name, "axis", axis, integer())
    if not -x.ndim <= axis < x.ndim:
        raise ValueError(f"{name}: axis is {axis}, but x has shape {tuple(x.shape)}; pass the sequence's axis.")
    axis, chunks = axis % x.ndim, 2 * cp_size if cp_size > 1 else 1
    if x.shape[axis] % chunks:
        raise ValueError(
            f"{name}: axis {axis} of x has {x.shape[axis]} positions, which {chunks} chunks (2 for each of "
            f"cp_size={cp_size} devices) do not divide; pad the sequence."
        )
    return x.reshape(*x.shape[:axis], chunks, -1, *x.shape[axis + 1 :]), axis


def _one(value):
    return value[0] if isinstance(value, tuple) and len(value) == 1 else value


def _check_rule(rule) -> None:
    if isinstance(rule, tuple | list) and len(rule) == 2 and isinstance(rule[0], str):
        axes = rule[1] if isinstance(rule[1], tuple | list) else (rule[1],)
        if rule[1] is None or all(isinstance(axis, str) for axis in axes):
            return
    raise ValueError(f"extend_logical_axis_rules: the rule {rule!r} is not {_PAIR}.")


def head_axes() -> tuple[str, ...]:
    """The mesh axes over which attention heads are split under Auto axes, by the logical axis rules in force, or else
    by the MeshResource; () where neither says it, or no mesh is in force."""
    mesh, resource = jax.sharding.get_abstract_mesh(), current_mesh_resource()
    if mesh.empty or set(mesh.axis_types) != {AxisType.Auto}:
        return ()
    if _constrains():
        from flax import linen as nn

        (axes,) = nn.logical_to_mesh_axes((HEAD_AXES,), nn.get_logical_axis_rules())
    else:
        axes = resource and logical_axis_map(resource)[HEAD_AXES]
    return () if axes is None else (axes,) if isinstance(axes, str) else tuple(axes)


def place_axis(x: jax.Array, axis: int, names: tuple[str, ...]) -> jax.Array:
    """x, one axis of it split over the mesh axes `names` (() is over none) and the others as they were; where the types
    or the mesh in force know of shardings."""
    at = axis % x.ndim
    if on_explicit_mesh(jax.typeof(x)):
        spec = (*jax.typeof(x).sharding.spec, *[None] * x.ndim)[: x.ndim]
        return jax.sharding.reshard(x, PartitionSpec(*spec[:at], names or None, *spec[at + 1 :]))
    if not names and not head_axes():
        return x
    spec = [PartitionSpec.UNCONSTRAINED] * x.ndim
    spec[at] = names or None
    return jax.lax.with_sharding_constraint(x, PartitionSpec(*spec))


def gathered_axes(shard: Sequence[str | None] | None, whole: Sequence[str | None] | None):
    """`whole`, the logical axes of an array that lies by those of `shard` before, where the two differ on the mesh and
    the constraint below acts; else None."""
    if shard is None or whole is None or not _constrains():
        return None
    from flax import linen as nn

    specs = (nn.logical_to_mesh_axes(tuple(axes), nn.get_logical_axis_rules()) for axes in (shard, whole))
    return None if next(specs) == next(specs) else tuple(whole)


def _constrains() -> bool:
    """Whether logical axis rules are in force on a mesh of Auto axes."""
    from flax import linen as nn  # late: the ops do not need Flax

    mesh = jax.sharding.get_abstract_mesh()
    return bool(nn.get_logical_axis_rules()) and not mesh.empty and set(mesh.axis_types) == {AxisType.Auto}


def with_sharding_constraint_by_logical_axes(x: jax.Array, axes: Sequence[str | None] | None) -> jax.Array:
    """x, constrained to what Flax's logical axis rules in force make of `axes` (one name per dimension).

    Does nothing where there is nothing to say: axes None, no rules, no mesh; nor under Explicit or Manual
    mesh axes, where the array's type says it already.
    An axis that the devices of its mesh axes do not divide is split over fewer of these, or stays whole; a warning says
    so, once, unless its size is 1.
    Raises ValueError if `axes` has another length than x, or a rule names an axis that the mesh lacks.
    """
    from flax import linen as nn  # late: the ops do not need Flax

    rules = nn.get_logical_axis_rules()
    if axes is None or not rules:
        return x
    if len(axes) != x.ndim:
        raise ValueError(
            f"with_sharding_constraint: {len(axes)} logical axes {tuple(axes)} for an array of shape "
            f"{x.shape}; give one name (or None) per dimension."
        )
    mesh = jax.sharding.get_abstract_mesh()
    if not _constrains():
        return x
    spec = nn.logical_to_mesh_axes(tuple(axes), rules)
    named = {name for entry in spec if entry for name in ((entry,) if isinstance(entry, str) else entry)}
    for name in sorted(named - set(mesh.axis_names)):
        raise ValueError(
            f"with_sharding_constraint: the logical axis rules map {tuple(axes)} to mesh axis {name!r}, but "
            f"the mesh in force has the axes {mesh.axis_names}."
        )
    return jax.lax.with_sharding_constraint(x, _dividing(spec, x.shape, mesh))


def _dividing(spec, shape: tuple[int, ...], mesh) -> PartitionSpec:
    """`spec` with the mesh axes alone, the outer ones first, whose devices divide the array's axes: shards of different
    sizes suit no kernel, which would gather them, each for itself."""
    kept = []
    for axis, (entry, size) in enumerate(zip(spec, shape)):
        names = mesh_axes(entry)
        fitting = names
        while size % math.prod(mesh.shape[name] for name in fitting):
            fitting = fitting[:-1]
        if fitting != names and size > 1:
            _warn_undivided(axis, size, names, math.prod(mesh.shape[name] for name in names))
        kept.append(fitting or None)
    return PartitionSpec(*kept)


@functools.cache
def _warn_undivided(axis: int, size: int, names: tuple[str, ...], devices: int):
    warnings.warn(
        f"with_sharding_constraint: axis {axis} of an activation is {size}, which the {devices} devices of mesh axes "
        f"{names} do not divide; it is split over fewer of them, or over none. Pad it to a multiple of {devices}.",
        stacklevel=4,
    )


# Names and meaning: https://docs.jax.dev/en/latest/gpu_performance_tips.html
_XLA_FLAGS = {
    # Collectives are started early and awaited late, so that they run beside kernels. Without it most of them wait.
    "xla_gpu_enable_latency_hiding_scheduler": "true",
    # Across the steps of a loop as `nn.scan` over layers: weights of the next layer are gathered (FSDP), gradients of
    # the last one are scattered (FSDP) or summed (data parallel), while this one computes.
    "xla_gpu_enable_pipelined_all_gather": "true",
    "xla_gpu_enable_pipelined_reduce_scatter": "true",
    "xla_gpu_enable_pipelined_all_reduce": "true",
    # Two steps of such a loop become one: what one step hands to the next is not copied, and more is there to overlap.
    "xla_gpu_enable_while_loop_double_buffering": "true",
    # Collectives up to this size in all become one: large enough for the weights of a layer (8B: 218M, a byte each in
    # FP8), since few large messages use the links better than many small ones; memory for the results limits it.
    "xla_gpu_all_gather_combine_threshold_bytes": str(256 * 2**20),
    "xla_gpu_reduce_scatter_combine_threshold_bytes": str(256 * 2**20),
    "xla_gpu_all_reduce_combine_threshold_bytes": str(256 * 2**20),
}


def recommended_xla_flags() -> str:
    """Flags that let XLA overlap collectives with kernels on several NVIDIA GPUs, "--name=value --name=value".

    te_jax sets no environment itself. Put them into XLA_FLAGS before jax's first use:

        export XLA_FLAGS="$(python -c 'from te_jax import sharding; print(sharding.recommended_xla_flags())')"

    The latency-hiding scheduler; pipelining of collectives in loops, and two of their steps at a time; thresholds under
    which collectives are combined. Left out: windowed einsum (`xla_gpu_threshold_for_windowed_einsum_mib`) takes apart
    XLA's own dots, which te_gemm is not. XLA aborts at a flag that it does not know: these are known to jaxlib 0.10.2
    and 0.12.0.
    """
    return " ".join(f"--{name}={value}" for name, value in _XLA_FLAGS.items())
