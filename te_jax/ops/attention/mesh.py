"""What meshes ask of attention: whole groups of heads, whole rows, a dropout key for each device, cut sequences."""

from collections.abc import Callable
from math import prod
from typing import Any, NamedTuple

import jax
from jax import lax
from jax.sharding import AxisType, PartitionSpec

from te_jax.core.check import BOOL, check
from te_jax.core.placement import mesh_axes
from te_jax.core.types import on_explicit_mesh, splittable_axes, varying_axes

STRATEGIES = ("default", "all_gather", "ring")
Axes = str | tuple[str, ...] | None


def undivided_groups(q: jax.Array, g: int) -> tuple[jax.Array, Callable[[jax.Array], jax.Array]]:
    """-> q, its heads gathered if an Explicit mesh cuts through groups, and what shards out as q was."""
    spec, mesh = jax.typeof(q).sharding.spec, jax.typeof(q).sharding.mesh
    if g % prod(mesh.shape[name] for name in mesh_axes(spec[-2])) == 0:
        return q, lambda out: out
    gathered = jax.sharding.reshard(q, PartitionSpec(*spec[:-2], None, spec[-1]))
    return gathered, lambda out: jax.sharding.reshard(out, PartitionSpec(*spec[:-1], None))


def whole_rows(x: jax.Array) -> tuple[jax.Array, Callable[[jax.Array], jax.Array]]:
    """-> x [b..., tokens, heads, d], on an Explicit mesh with the tokens on every device, for types would split logits
    and sums by them; and what shards out as x was."""
    spec = jax.typeof(x).sharding.spec
    if not on_explicit_mesh(jax.typeof(x)) or spec[-3] is None:
        return x, lambda out: out
    shard = lambda a, names: jax.sharding.reshard(
        a, PartitionSpec(*jax.typeof(a).sharding.spec[:-3], names, *spec[-2:])
    )
    return shard(x, None), lambda out: shard(out, spec[-3])


def own_key(key: jax.Array, *arrays: jax.Array) -> jax.Array:
    """`key`, made another one on every device of the manual mesh axes over which the arrays vary and it does not."""
    for name in sorted(frozenset().union(*map(varying_axes, arrays)) - varying_axes(key)):
        key = jax.random.fold_in(key, lax.axis_index(name))
    return key


class Cut(NamedTuple):
    """How the sequence is cut along mesh axis `axis` of cp devices, each of which has s / cp queries and t / cp keys.

    ring:          keys and values go around the devices; else each device collects all of them.
    load_balanced: the sequence is in the order of `te_jax.sharding.reorder_causal_load_balancing`.
    batch, heads:  the mesh axes, of more than one device, that are to shard q's first axis, and its heads and groups.
    mesh:          the mesh in force.
    """

    axis: str
    ring: bool
    load_balanced: bool
    batch: tuple[str, ...]
    heads: tuple[str, ...]
    mesh: jax.sharding.AbstractMesh

    @classmethod
    def of(
        cls, op: str, axis: str, strategy: str = "default", load_balanced: bool = False, batch_axis: Axes = None,
        head_axis: Axes = None,
    ) -> "Cut | None":  # fmt: skip
        """The cut that the arguments of `context_parallel_attention` say; None where `axis` has one device.

        Raises ValueError, naming `op`, for axes that the mesh in force lacks, for one that is given twice, and for an
        unknown strategy; TypeError for a load_balanced that is no bool.
        """
        mesh = jax.sharding.get_abstract_mesh()
        named = {"axis": axis, "batch_axis": batch_axis, "head_axis": head_axis}
        by_role = {role: _names(op, role, value) for role, value in named.items()}
        if len(by_role["axis"]) != 1:
            raise ValueError(f"{op}: axis is {axis!r}; pass the name of one mesh axis.")
        roles: dict[str, str] = {}
        for role, names in by_role.items():
            for name in names:
                if name not in mesh.axis_names:
                    has = f"has the axes {mesh.axis_names}" if mesh.axis_names else "is none; enter jax.set_mesh(mesh)"
                    raise ValueError(f"{op}: {role} is {named[role]!r}, but the mesh in force {has}.")
                if name in roles and mesh.shape[name] > 1:
                    raise ValueError(
                        f"{op}: mesh axis {name!r} is both {roles[name]} and {role}; an axis cuts one of them: name "
                        "another."
                    )
                roles[name] = role
        if strategy not in STRATEGIES:
            raise ValueError(f"{op}: strategy is {strategy!r}; pass one of {', '.join(STRATEGIES)}.")
        check(op, "load_balanced", load_balanced, BOOL)
        split = lambda names: tuple(name for name in names if mesh.shape[name] > 1)
        batch, heads = (split(by_role[role]) for role in ("batch_axis", "head_axis"))
        cut = cls(axis, strategy == "ring", bool(load_balanced), batch, heads, mesh)
        return cut if cut.cp > 1 else None

    @property
    def cp(self) -> int:
        """The number of devices along `axis`."""
        return self.mesh.shape[self.axis]

    @property
    def text(self) -> str:
        """Why no implementation for whole sequences is taken."""
        return f"mesh axis {self.axis!r} cuts the sequence"

    @property
    def is_inside(self) -> bool:
        """Whether the call is traced for each device along `axis`: arrays are what a device has."""
        return self._type(self.axis) == AxisType.Manual

    def _type(self, name: str):
        return dict(zip(self.mesh.axis_names, self.mesh.axis_types))[name]

    def whole(self, *arrays: Any) -> tuple[Any, ...]:
        """The types of q, k, v [b..., tokens, heads, d] with the tokens of all devices."""
        by = self.cp if self.is_inside else 1
        shape = lambda x: (*x.shape[:-3], by * x.shape[-3], *x.shape[-2:])
        return tuple(jax.ShapeDtypeStruct(shape(x), x.dtype) for x in arrays)

    def refuses(self, q: Any, k: Any) -> str:
        """Why the mesh axes do not shard q and k as they are named; "" if they do."""
        lead, heads = self._sharded(q)
        for where, names in (("batch", sum(lead, ())), ("head", heads)):
            if self.axis in names:
                return (
                    f"mesh axis {self.axis!r} cuts the sequence, but q has its {where} axis on it: "
                    f"{jax.typeof(q).sharding.spec}; name another axis, or reshard q"
                )
        for name, size, named in (("b", q.shape[0] if lead else 1, self.batch), ("g", k.shape[-2], self.heads)):
            devices = prod(self.mesh.shape[n] for n in named if self._type(n) != AxisType.Manual)
            if size % devices:
                return (
                    f"axis `{name}` is {size}, which the {devices} devices of mesh axes {named} do not divide; name "
                    "others, or none"
                )
        return ""

    def _sharded(self, q) -> tuple[list[tuple[str, ...]], tuple[str, ...]]:
        """The Explicit mesh axes that shard each batch axis of q, and its heads."""
        given = jax.typeof(q).sharding
        explicit = [()] * q.ndim
        if given.mesh.axis_names == self.mesh.axis_names:
            explicit = [tuple(n for n in mesh_axes(e) if self._type(n) == AxisType.Explicit) for e in given.spec]
        *lead, _, heads, _ = explicit
        return lead, heads

    def _split_axes(self, q, k) -> tuple[list[tuple[str, ...]], tuple[str, ...]]:
        """The mesh axes, other than `axis` and Manual ones, that shard each batch axis, and the heads."""
        lead, heads = self._sharded(q)
        heads = heads if k.shape[-2] % prod(self.mesh.shape[n] for n in heads) == 0 else ()  # no axis cuts a group
        known = {n for names in (*lead, heads) for n in names}
        more = lambda named: tuple(n for n in named if n not in known and self._type(n) != AxisType.Manual)
        if lead:
            lead[0] += more(self.batch)
        return lead, heads + more(self.heads)

    def run(self, function: Callable[..., Any], q: Any, k: Any, v: Any, sink: Any, rows: Any) -> Any:
        """function(q, k, v, sink, rows) -> out, lse on every device, by `shard_map` over `axis`, the axes that are
        named, and Explicit ones: the kernels then see what is on one device.

        sink: f32[h] or [1], or None. rows: a pytree of arrays [b..., ...], whole on every device along `axis`.
        """
        if self.is_inside:  # jax 0.10 has no residuals of a shard_map in a shard_map
            q, restored = undivided_groups(q, k.shape[-2])
            out, lse = function(q, k, v, sink, rows)
            return restored(out), lse
        lead, heads = self._split_axes(q, k)
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
            function,
            in_specs=specs,
            out_specs=(tokens, PartitionSpec(*batch, one(heads), self.axis)),
            axis_names=manual,
        )
        return jax.jit(run)(*arrays)

    def _explicit(self, spec) -> PartitionSpec:
        """The part of `spec` that types show."""
        kept = (tuple(n for n in mesh_axes(entry) if self._type(n) == AxisType.Explicit) for entry in spec)
        return PartitionSpec(*(names or None for names in kept))


def _names(op: str, role: str, value) -> tuple[str, ...]:
    names = mesh_axes(value)
    if not all(isinstance(name, str) and name for name in names):
        raise ValueError(f"{op}: {role} is {value!r}; pass names of mesh axes.")
    return names
