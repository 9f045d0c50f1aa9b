"""Logical axis names: what Flax's rules and the MeshResource in force make of them."""

from collections.abc import Sequence
from typing import Any

from jax.sharding import PartitionSpec

from te_jax.core.check import NONE, STRING, Kind, check, did_you_mean, tuple_of
from te_jax.core.placement import mesh_axes
from te_jax.sharding.resource import MeshResource, auto_mesh, check_mesh_resource, current_mesh_resource, mesh_sizes

# Logical axes of activations.
BATCH_AXES = "nvte_batch"
SEQLEN_AXES = "nvte_seqlen"
SEQLEN_TP_AXES = "nvte_seqlen_tp"
SEQLEN_CP_AXES = "nvte_seqlen_cp"
HEAD_AXES = "nvte_head"
HIDDEN_AXES = "nvte_hidden"
HIDDEN_TP_AXES = "nvte_hidden_tp"
JOINED_AXES = "nvte_joined"
# Logical axes of weights. W_JOINED_AXES stacks q, k, v or the parts of a gated activation.
W_NO_SHARD_AXES = "nvte_w_no_shard"
W_FSDP_AXES = "nvte_w_fsdp"
W_TP_AXES = "nvte_w_tp"
W_JOINED_AXES = "nvte_w_joined"

_OF_TE = "nvte_"
NAMES = (
    *(BATCH_AXES, SEQLEN_AXES, SEQLEN_TP_AXES, SEQLEN_CP_AXES, HEAD_AXES, HIDDEN_AXES, HIDDEN_TP_AXES, JOINED_AXES),
    *(W_NO_SHARD_AXES, W_FSDP_AXES, W_TP_AXES, W_JOINED_AXES),
)


def _unknown(axes) -> list[str]:
    """The names among `axes` that look like te_jax's, but are not, and that no rule in force names."""
    names = [name for entry in axes for name in (entry if isinstance(entry, tuple | list) else (entry,))]
    unknown = [name for name in names if name is not None and name.startswith(_OF_TE) and name not in NAMES]
    if not unknown:
        return []
    from flax import linen as nn  # as in `resolve_logical_axes`

    ruled = {rule[0] for rule in nn.get_logical_axis_rules()}
    return [name for name in unknown if name not in ruled]


def _hint(axes) -> str:
    unknown = _unknown(axes) if _AXES.accepts(axes) else []
    if not unknown:
        return ""
    return f"{unknown[0]!r} is none of te_jax's: {did_you_mean(unknown[0], NAMES) or ', '.join(NAMES)}"


_AXES = tuple_of(NONE | STRING | tuple_of(STRING))
LOGICAL_AXES = Kind(
    "a tuple of logical axis names and None",
    _AXES.is_type,
    lambda axes: _AXES.accepts(axes) and not _unknown(axes),
    _hint,
)
_AXES_OR_NONE = NONE | LOGICAL_AXES
_RULE_FORM = "a pair (logical name, mesh axis, tuple of them or None)"
_RULES = Kind(f"a tuple, each {_RULE_FORM}", lambda rules: isinstance(rules, tuple | list))


def logical_axis_map(resource: MeshResource) -> dict[str, str | tuple[str, ...] | None]:
    """Logical axis name -> mesh axis (None: replicated), for `resource` on the mesh in force.

    The batch lies on dp, fsdp and ep, as far as they have more than one device: all are data parallelism. The
    sequence outside the GEMMs lies on cp and tpsp likewise, cp first: a GEMM then gathers it only over tpsp.
    Raises ValueError for a resource that does not fit the mesh.
    """
    check_mesh_resource(resource)
    sizes = mesh_sizes()

    def together(*axes: str | None, alone: str | None) -> str | tuple[str, ...] | None:
        used = tuple(axis for axis in axes if sizes.get(axis, 1) > 1)
        return used if len(used) > 1 else used[0] if used else alone

    batch = together(*batch_axes(resource), alone=resource.dp_resource)
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
        "heads": tensor,  # The table of RelativePositionBiases has this axis and the next.
        "relpos_buckets": None,
    } | ({} if resource.ep_resource is None else {"expert": resource.ep_resource})


def batch_axes(resource: MeshResource) -> tuple[str, ...]:
    """The mesh axes that split the batch."""
    named = resource.dp_resource, resource.fsdp_resource, resource.ep_resource
    return tuple(dict.fromkeys(axis for axis in named if axis is not None))


def extend_logical_axis_rules(rules: Sequence[tuple[Any, ...]]) -> Sequence[tuple[Any, ...]]:
    """`rules`, followed by one rule for each logical axis of te_jax, by the MeshResource in force.

    rules: Pairs (logical name, mesh axis | tuple of mesh axes | None), as `flax.linen.logical_axis_rules` takes them.

    Returns `rules` itself where neither a mesh (`jax.set_mesh`) nor a MeshResource that names axes is in force.

    Raises ValueError for a malformed rule, for a rule of a te_jax name that contradicts the MeshResource, for a mesh
    without a MeshResource, and for a MeshResource that names axes without a mesh. `with mesh:` does not count as one:
    jax does not show that it is in force.
    """
    check("extend_logical_axis_rules", "rules", rules, _RULES)
    for rule in rules:
        _check_rule(rule)
    resource = current_mesh_resource()
    if not mesh_sizes():
        named = {} if resource is None else resource.axes
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


def _one(value):
    """A tuple of one mesh axis as that axis; other values unchanged."""
    return value[0] if isinstance(value, tuple) and len(value) == 1 else value


def _check_rule(rule) -> None:
    if isinstance(rule, tuple | list) and len(rule) == 2 and isinstance(rule[0], str):
        axes = rule[1] if isinstance(rule[1], tuple | list) else (rule[1],)
        if rule[1] is None or all(isinstance(axis, str) for axis in axes):
            return
    raise ValueError(f"extend_logical_axis_rules: the rule {rule!r} is not {_RULE_FORM}.")


def head_axes() -> tuple[str, ...]:
    """The mesh axes that split attention heads on a mesh of Auto axes.

    The logical axis rules in force say it, or the MeshResource where there are none. () where neither says it, and
    without a mesh of Auto axes.
    """
    if auto_mesh() is None:
        return ()
    spec, resource = resolve_logical_axes((HEAD_AXES,)), current_mesh_resource()
    if spec is not None:
        return mesh_axes(spec[0])
    return () if resource is None else mesh_axes(logical_axis_map(resource)[HEAD_AXES])


def resolve_logical_axes(
    axes: Sequence[str | None] | None, shape: tuple[int, ...] | None = None
) -> PartitionSpec | None:
    """What Flax's logical axis rules in force make of the logical names `axes`, one name or None per dimension.

    shape: The array's shape, which must have as many dimensions; None is not checked.

    Returns None where there is nothing to constrain: for axes None, without rules, and without a mesh of Auto axes
    (under Explicit and Manual axes the type of an array says how it is sharded).

    Raises TypeError for axes that are no tuple, ValueError for another number of axes than of dimensions, for a name
    that begins with "nvte_" and is none of te_jax's, and for a rule whose mesh axis the mesh lacks.
    """
    check("with_sharding_constraint", "axes", tuple(axes) if isinstance(axes, PartitionSpec) else axes, _AXES_OR_NONE)
    from flax import linen as nn  # Flax takes a second to import, and the ops do not need it.

    rules, mesh = nn.get_logical_axis_rules(), auto_mesh()
    if axes is None or not rules:
        return None
    if shape is not None and len(axes) != len(shape):
        raise ValueError(
            f"with_sharding_constraint: {len(axes)} logical axes {tuple(axes)} for an array of shape "
            f"{shape}; give one name (or None) per dimension."
        )
    if mesh is None:
        return None
    spec = nn.logical_to_mesh_axes(tuple(axes), rules)
    for name in sorted(set().union(*map(mesh_axes, spec)) - set(mesh.axis_names)):
        raise ValueError(
            f"with_sharding_constraint: the logical axis rules map {tuple(axes)} to mesh axis {name!r}, but "
            f"the mesh in force has the axes {mesh.axis_names}."
        )
    return spec


def gathered_axes(
    shard: Sequence[str | None] | None, whole: Sequence[str | None] | None
) -> tuple[str | None, ...] | None:
    """`whole` where `gathered_spec` is not None, else None."""
    return None if gathered_spec(shard, whole) is None else tuple(whole)


def gathered_spec(
    shard: Sequence[str | None] | None, whole: Sequence[str | None] | None, shape: tuple[int, ...] | None = None
) -> PartitionSpec | None:
    """The spec of the logical axes `whole`, for an array of `shape` that lies by the logical axes `shard` before.

    Returns None where `resolve_logical_axes` gives None for either, or the same spec for both.
    """
    before, after = (resolve_logical_axes(axes, shape) for axes in (shard, whole))
    return None if before is None or before == after else after


def split_tokens(shard: Sequence[str | None] | None, whole: Sequence[str | None] | None) -> PartitionSpec | None:
    """The spec of the logical axes `shard` of tokens that lie by `whole` in products; None where `gathered_spec` is,
    and where nobody asks for pieces of them."""
    resource = current_mesh_resource()
    if resource is None or resource.tpsp_pieces == 1:
        return None
    return None if gathered_spec(shard, whole) is None else resolve_logical_axes(shard)
