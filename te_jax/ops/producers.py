"""Ops that write a tensor in FP8: what is computed is said once (`Producer`), how it lies once (`ScaleFormat`), and
`declare` makes the op of both.

The results of such an op come in this order; an op has those that its producer and its format know:

the tensor itself   in its type, which is the first operand's where none is declared, by the producer's name for it; of
                    formats with one scale
data, data_t        FP8: saturate(f32 tensor * scale), and the transpose. Blocks are of the tensor in its type, and
                    each layout has the blocks along the axis that its product contracts
inverse scales      of blocks: what data and data_t are multiplied by, as `ScaleFormat.rule_of_inverses` says
further results     of the producer
amax                f32[]: max |f32 tensor|; NaN or inf where it has one; of formats with one scale
dbias               f32: the sum over the rows, for the gradient of a bias; where a kernel writes blocks, of the tensor
                    in its type
scale_inv           f32[]: 1 / scale

Its attributes are the producer's, `dtype`, the FP8 type as a jnp.dtype, and the format's: `power_2` and `epsilon` as of
`scale_of_amax`; `square`, of an op that has blocks of 1 x 128 and of 128 x 128.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from te_jax.core.amax import amax
from te_jax.core.op import Op
from te_jax.ops.formats import IN_USE, ScaleFormat, ceil_div, fp8_type, invert, saturate, transpose

_TILE_ROWS, _TILE_COLUMNS = 256, 64  # csrc/quantize/tile.cuh


def tiles(m: Any, n: Any) -> tuple[Any, Any]:
    """Rows and columns of tiles: one partial amax for each, one partial column sum for each row of them."""
    return ceil_div(m, _TILE_ROWS), ceil_div(n, _TILE_COLUMNS)


class Owners(NamedTuple):
    """How numbers of experts meet the rows of a tensor in f32: each row's scale, and the statistics of each expert."""

    spread: Callable[[jax.Array, int], jax.Array]  # f32[E] or [1], the number of axes -> what rows are multiplied by
    amax: Callable[[jax.Array], jax.Array]
    total: Callable[[jax.Array], jax.Array]


@dataclass(frozen=True, eq=False)
class Producer:
    """A tensor [*lead, *m, *n] that ops of several formats write in FP8.

    name:     of the ops, with {} for the suffix of a format.
    operands: the rule's left side, without the scale, where {m} and {n} stand for the axes of m and n.
    rows, columns: these axes. With blocks a group of them has one more axis, along which the blocks lie.
    slots:    axes in front of the columns that operands lack.
    value:    (operands, **attributes) -> (the tensor, in f32 or as the operand is, the other results by name): what is
              computed, with `split` for the number of axes in *lead and *m.
    split:    (the tensor, **attributes) -> how many axes *lead has, and *lead and *m.
    tensor:   the name of the result that is the tensor itself; "" where an operand is.
    type:     its type, where that is none of the first operand's.
    again:    operands of formats with one scale: other results, `known_` and their name, that a call need not compute.
    more:     the rule of the other results; {may} stands for ? where there is `again`.
    lead:     axes whose entries have a scale each.
    each:     the axis of experts, whose rows have scales and statistics of their own.
    owners:   (operands) -> these rows' Owners.
    dbias:    whether there are column sums.
    inverse:  whether formats with one scale have its inverse.
    check:    (the op's name, the operands' types, **attributes): raises for what is none of the op's.
    ranks:    as of an Op of one scale; `split` there is `lead`, one less, with blocks.
    matrix:   (the operands' shapes, **attributes) -> the products of *m but its last axis, its last axis, and of *n:
              what kernels cut into tiles.
    op:       further arguments of each Op.
    kernels:  by the suffix of a format: further arguments of an Op that has a kernel, where `cuda` is a function of
              (the op's name, its format, its reference). A format that has no entry is plain JAX on CUDA, too.
    """

    name: str
    operands: str
    rows: str
    columns: str
    value: Callable[..., tuple[jax.Array, Mapping[str, Any]]]
    split: Callable[..., tuple[int, int]]
    slots: str = ""
    tensor: str = ""
    type: Any = None
    again: str = ""
    more: str = ""
    lead: str = ""
    each: str = ""
    owners: Callable[..., Owners] | None = None
    dbias: bool = False
    inverse: bool = False
    check: Callable[..., None] = lambda op, *types, **attrs: None
    ranks: Mapping[str, str] = field(default_factory=dict)
    matrix: Callable[..., tuple[Any, Any, Any]] | None = None
    op: Mapping[str, Any] = field(default_factory=dict)
    kernels: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)

    def op_of(self, form: ScaleFormat) -> Op | None:
        """The op that writes this tensor in a format, None where none is declared."""
        return _declared.get((self.name, form))

    def attributes(self, form: ScaleFormat, **attrs: Any) -> dict[str, Any]:
        """The op's attributes of this format, from the attributes of the op of one scale."""
        op = self.op_of(form)
        if form.block and "split" in self.ranks.values():
            attrs["lead"] = attrs.pop("split") - 1
        with_square = op is not None and any(f.square != form.square for f in _formats_of(self, op))
        return attrs | (dict(square=form.square) if with_square else {})


PRODUCERS: dict[str, Producer] = {}  # all that have an op, by name
_declared: dict[tuple[str, ScaleFormat], Op] = {}


def _formats_of(producer: Producer, op: Op) -> list[ScaleFormat]:
    return [form for (name, form), each in _declared.items() if name == producer.name and each is op]


def _rule_of(p: Producer, forms: tuple[ScaleFormat, ...]) -> str:
    """The text of the rule of the op of a producer and these formats."""
    block = forms[0].block
    group = lambda axes: "m..." if block and axes == "..." else axes
    along = lambda axes: f"{axes} {axes.rstrip('.')}" if block and axes.endswith("...") else axes
    m, n = along(group(p.rows)), along(p.columns)
    inputs = [p.operands, *([p.again] if p.again and not block else [])]
    inputs += [] if block else [f"scale?: {p.lead or (p.each and f'~{p.each}')}"]
    operands_n, n = n, f"{p.slots} {n}"
    outputs = [f"{p.tensor}?: {m} {n}"] if p.tensor and not block else []
    outputs += [f"data?: {p.lead} {m} {n}", f"data_t?: {p.lead} {n} {m}"]
    outputs += [text for form in forms if block for text in form.rule_of_inverses(m, n, p.lead)]
    outputs += [p.more] if p.more else []
    outputs += [] if block else [f"amax?: {p.lead or p.each}"]
    outputs += [f"dbias?: {p.each} {n}"] if p.dbias else []
    outputs += ["scale_inv?:"] if p.inverse and not block else []
    return f"{', '.join(inputs)} -> {', '.join(outputs)}".format(m=m, n=operands_n, may="" if block else "?")


def _reference_of(p: Producer, forms: tuple[ScaleFormat, ...], names: list[str], rounds: bool):
    """The reference of the op of a producer and these formats, whose results are `names`. rounds: whether the column
    sums of blocks are of rounded numbers."""

    def reference(*operands, dtype, square=False, **attrs):
        form = next((f for f in forms if f.square == square), forms[0])
        law = {name: attrs.pop(name) for name in form.attributes}
        if "lead" in attrs:
            attrs["split"] = attrs.pop("lead") + 1
        *operands, scale = operands if not form.block else (*operands, None)
        y, more = p.value(*operands, **attrs)
        own_type = p.type or operands[0].dtype
        lead, split = p.split(y, **attrs)
        owners = p.owners(*operands) if p.owners else None
        if form.block:
            rounded = y.astype(own_type).astype(jnp.float32)
            got = _over(lambda a: form.write(a, split - lead, dtype, **law), lead)(rounded)
            y = rounded if rounds or y.dtype == own_type else y.astype(jnp.float32)
        else:
            got = {p.tensor: y.astype(own_type)} if p.tensor else {}
            y = y.astype(jnp.float32)
            one = lambda a, scale: _in_one_scale(a, scale, split - lead, dtype, owners)
            got |= _over(one, lead)(y, scale)
            got |= {"scale_inv": None if scale is None else invert(scale)}
        if p.dbias:
            got["dbias"] = owners.total(y) if owners else jnp.sum(y, tuple(range(lead, split)))
        got |= more
        return [got.get(name) for name in names]

    return reference


def _over(one, lead: int):
    """`one` for each entry of the first `lead` axes of all operands and results."""
    return one if lead == 0 else jax.vmap(_over(one, lead - 1))


def _in_one_scale(y, scale, split, dtype, owners):
    """data, data_t and amax of y f32 [*m, *n]."""
    each = scale if owners is None or scale is None else owners.spread(scale, y.ndim)
    data = None if scale is None else saturate(y * each, dtype)
    seen = amax(y) if owners is None else owners.amax(y)
    return dict(data=data, data_t=None if data is None else transpose(data, split), amax=seen)


def _partials_of(p: Producer, form: ScaleFormat, names: list[str]) -> dict[str, Callable[..., tuple[Any, ...]]]:
    """`Op.partials` of a kernel that cuts `matrix` into tiles."""
    if p.matrix is None:
        return {}

    def rows_of_tiles(*shapes, **attrs):
        if "lead" in attrs:
            attrs["split"] = attrs.pop("lead") + 1
        return p.matrix(*shapes, **attrs)

    def amaxes(*shapes, **attrs):
        outer, rows, columns = rows_of_tiles(*shapes, **attrs)
        return tiles(outer * rows, columns)

    def sums(*shapes, **attrs):
        outer, rows, columns = rows_of_tiles(*shapes, **attrs)
        return (outer * ceil_div(rows, form.block),) if form.block else tiles(outer * rows, columns)[:1]

    return {name: of for name, of in (("amax", amaxes), ("dbias", sums)) if name in names}


def declare(p: Producer, *forms: ScaleFormat) -> Op:
    """The op that writes a producer's tensor in a format, or in one of two that share a kernel."""
    form, name = forms[0], p.name.format(forms[0].suffix)
    rule = _rule_of(p, forms)
    names = [each.partition(":")[0].strip(" ?") for each in rule.partition("->")[2].split(",")]
    inverses = {result for each in forms for result in each.inverses.values()}

    def dtypes(*types, dtype, **attrs):
        p.check(name, *types, **attrs)
        known = {p.tensor: p.type or types[0], "data": fp8_type(name, dtype), "data_t": dtype}
        known |= dict.fromkeys(inverses, form.scale_dtype)
        return tuple(known.get(each, jnp.float32) for each in names)

    kernel = dict(p.kernels.get(form.suffix, ()))
    has_kernel = form.suffix in p.kernels
    reference = _reference_of(p, forms, names, has_kernel)
    if "cuda" in kernel:
        kernel["cuda"] = kernel["cuda"](name, form, reference)
    combine = {} if form.block else {"amax": "max"}
    combine |= {"dbias": "sum"} if p.dbias and not p.each else {}
    op = Op(
        name,
        rule,
        dtypes=dtypes,
        reference=reference,
        combine=combine,
        ranks={group: attr.replace("split", "lead") if form.block else attr for group, attr in p.ranks.items()},
        partials=kernel.pop("partials", None) or (_partials_of(p, form, names) if has_kernel else None),
        aside={"scale_inv": ("scale", invert)} if p.inverse and not form.block else None,
        composed=not has_kernel,
        **p.op,
        **kernel,
    )
    PRODUCERS[p.name] = p
    _declared.update({(p.name, each): op for each in forms})
    return op


def declare_all(p: Producer, *, tensors: bool = True, weights: bool = False) -> tuple[Op, ...]:
    """The ops that write a producer's tensor, one for each entry of `IN_USE`: as tensors are written, or weights, or
    both by one kernel."""
    chosen = ([form for form, is_written in zip(pair, (tensors, weights)) if is_written] for pair in IN_USE)
    return tuple(declare(p, *dict.fromkeys(forms)) for forms in chosen)


def on_its_gpu(name: str, form: ScaleFormat, reference: Callable[..., Any]) -> Callable[..., Any]:
    """The `cuda` of an op that is one custom call, on GPUs that multiply its format."""

    def run(call, *operands, **attrs):
        form.check_gpu(name)
        return call(*operands, **attrs)

    return run
