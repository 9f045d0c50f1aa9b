"""What a tensor is quantized from: who computes it, and from what."""

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from te_jax.ops.formats import TENSOR, ScaleFormat
from te_jax.ops.producers import Producer


class PerExpert(NamedTuple):
    """How numbers of E experts, f32[E], or of all of them, f32[], meet the elements of a tensor."""

    spread: Callable[[jax.Array], jax.Array]  # f32[E] -> what the elements, each by its expert's, are multiplied by
    total: Callable[[jax.Array], jax.Array]  # f32, of all axes of the elements but the last -> its sums
    size: jax.Array  # how many elements there are


class Source(NamedTuple):
    """A tensor [*m, *n] that is quantized where it is read or computed; on the host what a `Source` of
    csrc/quantize/tile.cuh is in a kernel."""

    producer: Producer
    attrs: dict[str, Any]  # of its op of one scale, but for the FP8 type
    operands: tuple[jax.Array | None, ...]  # the first ones of each of the ops; others go by name
    split: int  # axes in m
    scales: tuple[int, ...] = ()  # the shape of the scale that the op takes: [E] of the weights of experts
    elements: Callable[[], jax.Array] | None = None  # -> the tensor's elements, where the result has other ones, too
    experts: PerExpert | None = None  # whose the elements are, where `scales` is [E] or some are none
    # (names, FP8 type, scale) -> results of the op that writes both layouts in one array, the result `paired`
    paired: Callable[..., dict[str, jax.Array]] | None = None

    @property
    def unquantized(self) -> str:
        """The result of the op of one scale that is the tensor itself; "": the operand is."""
        return self.producer.tensor

    def offers(self, form: ScaleFormat, names: Sequence[str]) -> bool:
        """Whether there is an op of this format that has the results `names`."""
        op = self.producer.op_of(form)
        return op is not None and {o.name for o in op.rule.outputs}.issuperset(names)

    def takes(self, name: str, form: ScaleFormat) -> bool:
        """Whether the op of this format has an operand of this name. Without `scale` it finds scales itself."""
        op = self.producer.op_of(form)
        return op is not None and any(o.name == name for o in op.rule.inputs)

    def run(
        self,
        names: Sequence[str],
        dtype: DTypeLike | None,
        form: ScaleFormat = TENSOR,
        scale: jax.Array | None = None,
        known: Mapping[str, jax.Array] = MappingProxyType({}),
        law: Mapping[str, Any] = MappingProxyType({}),
    ) -> dict[str, jax.Array]:
        """The results `names` of the op of this format, with the inverse scales of each layout in blocks as `scale_inv`
        and `scale_inv_t`.

        dtype: the FP8 type. scale: f32[] or of the shape `scales`, with FP8 results of an op that takes one. known:
        results of an earlier run, by name, that this one reads. law: the recipe's attributes of a format that finds
        scales. Raises ValueError where no op of the format is declared.
        """
        dtype = None if dtype is None else jnp.dtype(dtype)  # an attribute that is no number is left out of the call
        if self.paired is not None and "paired" in names:
            return self.paired(names, dtype, scale)
        op = self.producer.op_of(form)
        if op is None:
            raise ValueError(f"{self.producer.name.format('')}: no op of it writes {form.name}; declare one.")
        scale = None if scale is None else jnp.broadcast_to(scale, self.scales)
        wanted = {*names, *(inverse for layout, inverse in form.inverses.items() if layout in names)}
        outputs = tuple(o.name for o in op.rule.outputs if o.name in wanted or not o.optional)
        by_name = {"scale": scale, **{f"known_{name}": a for name, a in known.items()}}
        operands = (*self.operands, *(by_name.get(o.name) for o in op.rule.inputs[len(self.operands) :]))
        attrs = self.producer.attributes(form, **self.attrs)
        results = op(*operands, outputs=outputs, dtype=dtype, **attrs, **law)
        of_rows, of_columns = form.inverses.get("data"), form.inverses.get("data_t")
        renamed = {of_rows: "scale_inv", of_columns: "scale_inv_t"}
        return {renamed.get(name, name): a for name, a in zip(outputs, results, strict=True)}

    def exact(self, dtype: DTypeLike) -> jax.Array:
        """The tensor in f32, before any rounding; its elements in another order, where there are `elements`."""
        if self.elements is not None:
            return self.elements().astype(jnp.float32)
        if not self.unquantized:
            return self.operands[0]
        in_f32 = lambda a: a.astype(jnp.float32) if jnp.issubdtype(a.dtype, jnp.floating) else a
        operands = tuple(a if a is None else in_f32(a) for a in self.operands)
        return self._replace(operands=operands).run((self.unquantized,), dtype)[self.unquantized]
