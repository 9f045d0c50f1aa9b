"""What a tensor is quantized from: the ops that compute it, and what they are called with."""

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from te_jax.core.op import Op
from te_jax.recipe._granularity import TENSOR, Granularity


class PerExpert(NamedTuple):
    """How numbers of E experts, f32[E], meet the elements of a tensor."""

    spread: Callable[[jax.Array], jax.Array]  # f32[E] -> what the elements, each by its expert's, are multiplied by
    total: Callable[[jax.Array], jax.Array]  # f32, of all axes of the elements but the last -> its sums, f32[E]
    size: jax.Array  # f32[E], of elements; at least 1


class Source(NamedTuple):
    """A tensor [*m, *n] that is quantized where it is read or computed; on the host what a `Source` of
    csrc/quantize/tile.cuh is in a kernel.

    An op that writes it in FP8 has results `data` and `data_t` in this order of axes and transposed. One of scales of
    blocks has their inverses too (`scale_inv`, or `block_inv` of square blocks, and each with `_t`); one of a single
    scale has it as its last operand `scale`, and among its results `amax`, and maybe `scale_inv`. A result that it need
    not compute again has an operand, too: `known_` and its name.
    """

    ops: dict[
        int, tuple[Op, dict[str, Any]]
    ]  # the op, and its attributes beside the law of a block, by `Granularity.block`
    operands: tuple[jax.Array | None, ...]  # the first ones of each of the ops; others go by name
    split: int  # axes in m
    wide: str | None = None  # the result of the op of one scale that is the tensor itself; None: the operand is
    scales: tuple[int, ...] = ()  # the shape of the scale that the op takes: [E] of the weights of experts
    elements: Callable[[], jax.Array] | None = None  # -> the tensor's elements, where the result has others beside them
    experts: PerExpert | None = None  # whose the elements are, where `scales` is [E]
    paired: "Source | None" = None  # whose op of one scale has both layouts in one array, the result `paired`

    def offers(self, granularity: Granularity, names: Sequence[str]) -> bool:
        """Whether there is an op of this granularity that has the results `names`."""
        op, _ = self.ops.get(granularity.block, (None, None))
        return op is not None and {o.name for o in op.rule.outputs}.issuperset(names)

    def takes(self, name: str, granularity: Granularity) -> bool:
        """Whether the op of this granularity has an operand of this name. Without `scale` it finds scales itself."""
        return any(o.name == name for o in self.ops[granularity.block][0].rule.inputs)

    def run(
        self,
        names: Sequence[str],
        dtype: DTypeLike | None,
        granularity: Granularity = TENSOR,
        scale: jax.Array | None = None,
        known: Mapping[str, jax.Array] = MappingProxyType({}),
    ) -> dict[str, jax.Array]:
        """The results `names` of the op of this granularity, with the inverse scales of each layout in blocks.

        dtype: the FP8 type. scale: f32[] or of the shape `scales`, with FP8 results of an op that takes one. known:
        results of an earlier run, by name, that this one reads.
        """
        if self.paired is not None and "paired" in names:
            return self.paired.run(names, dtype, granularity, scale)
        op, attrs = self.ops[granularity.block]
        square = attrs.get("square", all(o.name != "scale_inv" for o in op.rule.outputs))
        inverse = "block_inv" if square else "scale_inv"
        scale = None if scale is None else jnp.broadcast_to(scale, self.scales)
        of_blocks = (name.replace("data", inverse) for name in names) if granularity.block else ()
        wanted = {*names, *of_blocks}
        outputs = tuple(o.name for o in op.rule.outputs if o.name in wanted or not o.optional)
        by_name = {"scale": scale, **{f"known_{name}": a for name, a in known.items()}}
        operands = (*self.operands, *(by_name.get(o.name) for o in op.rule.inputs[len(self.operands) :]))
        results = op(*operands, outputs=outputs, dtype=dtype, **attrs, **dict(granularity.law))
        return {name.replace("block_inv", "scale_inv"): a for name, a in zip(outputs, results, strict=True)}

    def exact(self, dtype: DTypeLike) -> jax.Array:
        """The tensor in f32, before any rounding; its elements in another order, where there are `elements`."""
        if self.elements is not None:
            return self.elements().astype(jnp.float32)
        if self.wide is None:
            return self.operands[0]
        wider = lambda a: a.astype(jnp.float32) if jnp.issubdtype(a.dtype, jnp.floating) else a
        operands = tuple(a if a is None else wider(a) for a in self.operands)
        return self._replace(operands=operands).run((self.wide,), dtype)[self.wide]
