"""A call of an op: of small sizes in tests, of large ones in benchmarks."""

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from te_jax.core.op import Op, ops
from te_jax.ops.experts import paired

E4M3, E5M2 = jnp.dtype(jnp.float8_e4m3fn), jnp.dtype(jnp.float8_e5m2)
f32, bf16, e8m0, u32, i32 = jnp.float32, jnp.bfloat16, jnp.float8_e8m0fnu, jnp.uint32, jnp.int32


@dataclass(frozen=True)
class Large:
    """What a case is in benchmarks.

    row:     the computation, with {m} for the sizes of the axes m and m..., multiplied.
    sizes:   of axes; each set of sizes is a row.
    changes: fields of the case that are others. What is a dict is put on top of the case's own.
    impl:    the name of the op's kernel in these rows. Next to "te_jax" there is "xla": the op's reference.
    """

    row: str
    sizes: tuple[dict, ...]
    changes: dict[str, Any]
    impl: str = "te_jax"


@dataclass(frozen=True)
class Case:
    """A call: sizes of the rule's axes, types of the operands, attributes, chosen results.

    ranks: of the groups of axes; 2 where nothing is said.
    ones:  {operand: its factors that are broadcast}.
    large: the rows of benchmarks, where sizes, types and results are others.
    """

    name: str
    op: str
    sizes: dict
    dtypes: tuple
    attrs: dict = field(default_factory=dict)
    outputs: tuple | None = None
    ranks: dict = field(default_factory=dict)
    ones: dict = field(default_factory=dict)
    large: tuple[Large, ...] = ()

    @property
    def declared(self) -> Op:
        return ops[self.op]

    def shapes(self) -> list[tuple[int, ...]]:
        ranks = {g: self.ranks.get(g, 2) for g in self.declared.rule.groups}
        operands = [replace(o, ones=frozenset(self.ones.get(o.name, ()))) for o in self.declared.rule.inputs]
        sizes = defaultdict(lambda: 1, self.sizes)  # of what is broadcast, too, and of what is absent
        return [self.declared.rule.shape(o, ranks, sizes) for o in operands]

    def types(self) -> list[jax.ShapeDtypeStruct | None]:
        """The types of `args`."""
        return [
            None if dtype is None else jax.ShapeDtypeStruct(shape, dtype)
            for shape, dtype in zip(self.shapes(), self.dtypes, strict=True)
        ]

    def args(self, rng: np.random.Generator) -> list:
        """Fresh random operands; None where absent. lse and the like are made consistent by `prepare`."""
        args, is_grouped = [], any(o.name == "counts" for o in self.declared.rule.inputs)
        for operand, shape, dtype in zip(self.declared.rule.inputs, self.shapes(), self.dtypes, strict=True):
            is_scale = "scale" in operand.name or operand.name == "fp8_max" or operand.name.endswith("_inv")
            values = rng.uniform(0.5, 2.0, shape) if is_scale else rng.standard_normal(shape)
            if is_grouped and operand.name == "offsets":  # of groups of 128 rows, with a tail behind them
                args.append(128 * np.arange(shape[0], dtype=np.int32))
            elif is_grouped and operand.name == "counts":
                args.append(rng.integers(0, 129, shape, np.int32))
            elif dtype == u32:  # random bits
                args.append(rng.integers(0, 2**32, shape, np.uint32))
            elif operand.name == "offsets":  # of groups that take up all rows
                args.append(np.full(shape, 2**20, np.int32))
            elif len(shape) == 4 and dtype == bf16 and self.op.startswith("te_gemm_grouped_paired"):
                data = values.reshape(*shape[:2], -1)
                args.append(paired.pair(jnp.asarray(data, self.attrs["dtype"]), dtype))
            elif self.op == "te_router_bwd" and dtype == i32:  # the experts of a token, each another one
                args.append(np.argsort(rng.random((*shape[:-1], self.sizes["e"])))[..., : shape[-1]].astype(np.int32))
            elif dtype == i32:  # a segment: its first query, its queries, its first key, its keys
                args.append(rng.integers(0, 6, shape, np.int32))
            else:
                args.append(None if dtype is None else np.asarray(values, np.float32).astype(dtype))
        return jax.device_put(args)

    def small(self) -> "Case":
        """With two blocks for four: programs that do not optimize take long for so many numbers."""
        if 512 not in self.sizes.values():
            return self
        return replace(self, sizes={f: n // 2 if n in (4, 512) else n for f, n in self.sizes.items()})

    @property
    def is_small(self) -> bool:
        """Whether it has no more than two blocks."""
        return 256 in self.sizes.values()

    def measured(self, tiny: bool) -> Iterator[tuple[str, str, "Case"]]:
        """Rows: the computation, the kernel's name in it, and the call; `tiny`: one of each, of the tests' sizes."""
        for large in self.large:
            merged = lambda name, new: getattr(self, name) | new if isinstance(new, dict) else new
            changed = replace(self, **{name: merged(name, new) for name, new in large.changes.items()})
            for sizes in [{}] if tiny else large.sizes:
                case = replace(changed, sizes=changed.sizes | sizes)
                yield large.row.format_map(case.totals()), large.impl, case

    def totals(self) -> dict[str, int]:
        """The sizes of the axes m and m..., multiplied, by m; of ... by "rows"."""
        totals = defaultdict(lambda: 1)
        for axis, size in self.sizes.items():
            group, dots, place = axis.partition("...")
            if not dots or int(place) < self.ranks.get(group + dots, 2):
                totals[group or "rows"] *= size
        return totals

    def bytes(self) -> int:
        """The bytes of operands, read once, and of results, written once."""
        results = jax.eval_shape(self, *self.types())
        return sum(prod(a.shape) * a.dtype.itemsize for a in jax.tree.leaves((self.types(), results)))

    def __call__(self, *args):
        return self.declared(*args, outputs=self.outputs, **self.attrs)

    def __str__(self):
        return self.name
