"""How devices share a mixture of experts: which mesh axes split its tokens, its experts and their hidden features.

On Explicit mesh axes the types say it, elsewhere the MeshResource in force. Each device then runs its part inside
`jax.shard_map`: its tokens go to the devices of their experts (`exchange`).
"""

from collections.abc import Iterable
from dataclasses import dataclass
from fractions import Fraction
from math import prod
from typing import Any, NamedTuple

import jax
from jax.sharding import AxisType, PartitionSpec

from te_jax.core import extension
from te_jax.core.check import NONE, Kind, KnownFields, check, integer, number, one_of
from te_jax.core.placement import mesh_axes
from te_jax.core.types import on_explicit_mesh, splittable_axes, varying_axes
from te_jax.layers.experts.exchange import PEER_ACCESS, STRATEGIES, WHOLE, Exchange
from te_jax.ops.experts.permute import ALIGNMENT
from te_jax.ops.experts.router import MOST_EXPERTS
from te_jax.ops.formats import ceil_div
from te_jax.sharding.constraints import entries
from te_jax.sharding.logical_axes import batch_axes
from te_jax.sharding.resource import current_mesh_resource


@dataclass(frozen=True)
class ExpertExchange(KnownFields):
    """How tokens reach the devices of their experts, where a mesh axis divides the experts.

    strategy: "all_gather": every device gets the tokens of all. "all_to_all": each device sends each other one a block
              of the tokens that have an expert there. "peer_access": as all_gather, but what experts made of a token is
              read from their devices' memory where it is wanted, and tokens likewise where few experts are chosen;
              for GPUs of one process that have access to each other's memory. "auto": without block_factor
              peer_access on such GPUs and all_gather elsewhere; with it, whichever of these and all_to_all sends fewer
              bytes.
    block_factor: a block has places for ceil(block_factor T k / devices) tokens, at most T, of T tokens of a device
              that choose k experts each. A token takes one place in the block of a device, however many of its experts
              are there. What finds no place is dropped. all_to_all needs it; T k / devices is the mean for even loads.
    rows_factor: a device has rows for ceil(rows_factor T k) pairs of a token and an expert, 1 being the mean; pairs
              beyond that are dropped. None: rows for all that may come, so that nothing is dropped.
    pieces: the last product of the experts is computed in this many pieces of its features, and sums of one come back
              while the next is multiplied. It must divide the features into multiples of 128. In the backward pass
              wgrad runs while sums come back; under a recipe, where wi is not differentiated, they come in pieces too.

    `MoEAux.dropped` counts what is dropped. Raises ValueError (TypeError for a wrong type) that names the field, its
    value and what is allowed.
    """

    strategy: str = "auto"
    block_factor: float | None = None
    rows_factor: float | None = None
    pieces: int = 1

    def __post_init__(self) -> None:
        name = type(self).__name__
        check(name, "strategy", self.strategy, one_of("auto", *STRATEGIES))
        for what in ("block_factor", "rows_factor"):
            check(name, what, getattr(self, what), NONE | number(above=0))
        check(name, "pieces", self.pieces, integer(1))
        if self.strategy == "all_to_all" and self.block_factor is None:
            raise ValueError(
                f"{name}: strategy is 'all_to_all', but block_factor is None, and blocks need a size; pass a number, "
                "such as 2.0 for twice the mean."
            )
        if self.strategy in ("all_gather", PEER_ACCESS) and self.block_factor is not None:
            raise ValueError(
                f"{name}: strategy is {self.strategy!r}, which has no blocks, but block_factor is {self.block_factor}; "
                "leave it None."
            )


EXCHANGE = Kind("an ExpertExchange", lambda value: isinstance(value, ExpertExchange))


class ExpertPlacement(NamedTuple):
    """Which mesh axes split what; static."""

    tokens: tuple[tuple[str, ...], ...]  # of each axis of tokens
    experts: tuple[str, ...]
    hidden: tuple[str, ...]  # F
    shards: frozenset[str]  # what a `jax.shard_map` makes manual; empty inside one
    sizes: tuple[tuple[str, int], ...]  # devices along each mesh axis

    def devices(self, axes: Iterable[str]) -> int:
        """The devices along these mesh axes."""
        sizes = dict(self.sizes)
        return prod(sizes[axis] for axis in axes)

    @property
    def token_axes(self) -> tuple[str, ...]:
        """The mesh axes that split tokens."""
        return tuple(name for names in self.tokens for name in names)

    @property
    def crossed(self) -> tuple[str, ...]:
        """The mesh axes along which devices have different tokens, and different experts or features of them."""
        return tuple(axis for axis in (*self.experts, *self.hidden) if axis in self.token_axes)

    @property
    def summed(self) -> tuple[str, ...]:
        """The mesh axes along which devices have the same tokens, and different experts or features of them."""
        return tuple(axis for axis in (*self.experts, *self.hidden) if axis not in self.token_axes)


def devices_inside_shard_map() -> int:
    """How many devices hold experts of their own, where the call is traced for each of them: along an `ep_resource`
    that is a Manual mesh axis. Else 1."""
    axes = _divided_axes(AxisType.Manual)
    return prod(jax.sharding.get_abstract_mesh().shape[axis] for axis in axes)


def _divided_axes(*kinds: AxisType) -> tuple[str, ...]:
    """The ep_resource in force, where it is a mesh axis of such a kind that has several devices."""
    mesh, resource = jax.sharding.get_abstract_mesh(), current_mesh_resource()
    axis = None if resource is None else resource.ep_resource
    kind = dict(zip(mesh.axis_names, mesh.axis_types)).get(axis)
    return (axis,) if axis is not None and kind in kinds and mesh.shape[axis] > 1 else ()


def find_placement(
    name: str, x: Any, wi: Any, num_experts: int, token_spec: PartitionSpec | None, hidden_block: int
) -> ExpertPlacement | None:
    """The placement of x [*B, H] and the weights wi [E, H, F], of num_experts in all; without axes of experts where
    devices only have tokens of their own. None where ops share the work by their rules, as on one device.

    token_spec: of Auto axes, how x lies; None for dp_resource, fsdp_resource and ep_resource along the first axis.
    hidden_block: a device's part of F is a multiple of it; 0: F stays whole.

    Raises ValueError, naming the layer, for experts that the devices don't divide.
    """
    if on_explicit_mesh(jax.typeof(x)):
        found = _of_types(x, wi)
    else:
        found = _of_resource(name, x, wi, token_spec)
    if found is None:
        return None
    devices = found.devices(found.experts)
    if num_experts % devices:
        raise ValueError(
            f"{name}: {num_experts} experts are divided among the {devices} devices of mesh axis "
            f"{', '.join(map(repr, found.experts))}; pass a number of experts that is a multiple of {devices}, or name "
            "another axis."
        )
    if not found.shards and wi.shape[0] * devices != num_experts:
        raise ValueError(
            f"{name}: wi has {wi.shape[0]} experts on each of the {devices} devices of mesh axis "
            f"{', '.join(map(repr, found.experts))}, but gate_kernel {num_experts}; pass a device's own "
            f"{num_experts // devices} experts (in_specs of `jax.shard_map`), or leave ep_resource None."
        )
    if found.shards and (not hidden_block or wi.shape[-1] % (hidden_block * found.devices(found.hidden))):
        found = found._replace(hidden=())
    if found.experts and set(found.experts) <= set(found.token_axes):
        return found
    # Tokens that are the same on devices of different experts, or features, cross nothing, and what these make of them
    # is added up.
    return found._replace(
        tokens=tuple(tuple(a for a in axes if a not in (*found.experts, *found.hidden)) for axes in found.tokens)
    )


def _of_types(x, wi) -> ExpertPlacement | None:
    """What the types show. Without an axis of experts ops share the work by their rules."""
    mesh = jax.typeof(x).sharding.mesh
    shards = splittable_axes(mesh)
    experts, _, hidden = entries(jax.typeof(wi))
    if not experts or not {*experts, *hidden} <= shards:
        return None
    hidden = tuple(axis for axis in hidden if axis not in experts)
    return ExpertPlacement(entries(jax.typeof(x))[:-1], experts, hidden, shards, tuple(mesh.shape.items()))


def _of_resource(name, x, wi, token_spec) -> ExpertPlacement | None:
    mesh, resource = jax.sharding.get_abstract_mesh(), current_mesh_resource()
    sizes = tuple(mesh.shape.items())
    if experts := _divided_axes(AxisType.Manual):
        if not varying_axes(jax.lax.axis_index(experts)):
            raise ValueError(
                f"{name}: experts are divided along {experts} inside a jax.shard_map(check_vma=False), which hides "
                "whose tokens x has; leave check_vma True, or ep_resource None."
            )
        tokens = tuple(axis for axis in experts if axis in varying_axes(x))
        return ExpertPlacement((tokens,), experts, (), frozenset(), sizes)
    experts = _divided_axes(AxisType.Auto)
    if resource is None or (not experts and AxisType.Manual in mesh.axis_types):
        return None
    auto = frozenset(axis for axis, kind in zip(mesh.axis_names, mesh.axis_types) if kind == AxisType.Auto)
    several = lambda *axes: tuple(dict.fromkeys(a for a in axes if a in auto and mesh.shape[a] > 1))
    spec = token_spec or (several(*batch_axes(resource)),)
    named = [several(*mesh_axes(entry)) for entry in (*spec, *[None] * x.ndim)[: x.ndim - 1]]
    named[0] += tuple(axis for axis in experts if axis not in sum(named, ()))
    hidden = tuple(axis for axis in several(resource.tp_resource, resource.tpsp_resource) if axis not in experts)
    tokens = _that_divide(named, x.shape, mesh.shape)
    return ExpertPlacement(tokens, experts, hidden, auto, sizes) if experts or any(tokens) else None


def _that_divide(named, shape, sizes) -> tuple[tuple[str, ...], ...]:
    """The mesh axes of each axis of tokens. One that does not divide an axis may divide the next."""
    tokens, left = [], ()
    for axes, size in zip(named, shape):
        kept = ()
        for axis in (*axes, *left):
            if size % prod(sizes[a] for a in (*kept, axis)) == 0:
                kept += (axis,)
        left = tuple(axis for axis in (*axes, *left) if axis not in kept)
        tokens.append(kept)
    return tuple(tokens)


def find_exchange(
    placement: ExpertPlacement, options: ExpertExchange, tokens: int, width: int, topk: int, experts: int
) -> Exchange:
    """The exchange of a device that has this many tokens, of `width` features, and experts.

    Raises ValueError for pieces that do not divide these, and for peer_access where devices have none.
    """
    axes, sharing = placement.crossed, placement.devices(axis for axis in placement.hidden if axis in placement.crossed)
    devices, owners, mean = placement.devices(axes), placement.devices(placement.experts), tokens * topk
    block, strategy = tokens, options.strategy
    if options.block_factor is not None:
        block = min(tokens, ceil_times(options.block_factor, mean, owners))
    if not axes or tokens == 0:
        strategy, devices, block = WHOLE, 1, tokens
    elif strategy == "auto":
        reads = extension.has_peer_access() and not _lacks_peer_access()
        strategy = "all_to_all" if block < tokens else PEER_ACCESS if reads else "all_gather"
    elif strategy == PEER_ACCESS and (lack := _lacks_peer_access()):
        raise ValueError(
            f"ExpertExchange: strategy is {PEER_ACCESS!r}, for GPUs of one process that have access to each other's "
            f"memory, but {lack}; pass 'all_gather'."
        )
    pairs = devices * block * min(topk, experts)
    if options.rows_factor is not None:
        pairs = min(pairs, max(1, ceil_times(options.rows_factor, mean * devices, owners)))
    pieces = 1 if strategy == WHOLE else options.pieces
    _check_pieces(pieces, width, experts)
    sizes = experts, experts * owners, strategy, block, pairs, pieces
    direct = strategy == PEER_ACCESS and sharing == 1 and _reads_few(topk, devices)
    exchange = Exchange(axes, devices, placement.experts, sharing, *sizes, direct)
    return _with_few_rows(exchange, options)


def _with_few_rows(exchange: Exchange, options: ExpertExchange) -> Exchange:
    """Positions of rows in the memory of all devices are of 32 bits."""
    rows = max(exchange.rows, exchange.received) if isinstance(exchange.block, int) else 0
    if exchange.strategy != PEER_ACCESS or exchange.devices * rows < 2**31:
        return exchange
    if options.strategy == "auto":
        return exchange._replace(strategy="all_gather", direct=False)
    raise ValueError(
        f"ExpertExchange: strategy is {PEER_ACCESS!r}, and {exchange.devices} devices have {rows} rows each; pass "
        "'all_gather', or a rows_factor for less than 2**31 rows in all."
    )


def _lacks_peer_access() -> str:
    """Why devices cannot read each other's memory; "" where they can, and where plain JAX runs instead of kernels."""
    if jax.process_count() > 1:
        return f"there are {jax.process_count()} processes"
    return "these GPUs have none" if extension.has_cuda_device() and not extension.has_peer_access() else ""


def _reads_few(topk: int, devices: int) -> bool:
    """Whether a token has hardly more rows on other devices than it has other devices, choices being even."""
    rows, reached = topk * (1 - 1 / devices), (devices - 1) * (1 - (1 - 1 / devices) ** topk)
    return rows <= 1.5 * reached


def _check_pieces(pieces: int, width: int, experts: int):
    if pieces > 1 and width % (ALIGNMENT * pieces):
        raise ValueError(
            f"ExpertExchange: pieces is {pieces}, which does not divide {width} features in multiples of {ALIGNMENT}; "
            "pass a number that does, or 1."
        )
    if pieces > 1 and pieces * experts > MOST_EXPERTS:
        raise ValueError(
            f"ExpertExchange: pieces is {pieces}, and a device has {experts} experts; pass at most "
            f"{max(1, MOST_EXPERTS // experts)}: grouped products take {MOST_EXPERTS} kernels."
        )


def ceil_times(factor: float, count: int, by: int) -> int:
    """factor * count / by, rounded up, of the decimal number that factor is written as: in floats 1.1 * 100 / 10 is
    above 11. count: also symbolic, as in `jax.export`."""
    exact = Fraction(str(float(factor)))
    return ceil_div(exact.numerator * count, exact.denominator * by)
