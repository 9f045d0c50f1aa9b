"""Cases of grouped products: fprop, dgrad and wgrad of experts' weights, next to dense products of as many rows, a loop
of dense products over the experts, torch's grouped products and `jax.lax.ragged_dot`.

A row is bounded by the dense product of te_jax with the same operand types, scales, accumulation, N and K, whose rows
are all tokens of all experts, and by its traffic: the weights of the experts that have tokens, and each token's rows.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property, partial

import jax
import jax.numpy as jnp
import numpy as np

from te_jax.ops.experts.rows import expert_of_row, only_tokens
from te_jax.ops.formats import ROWS_128, SQUARES_128, TENSOR
from te_jax.ops.gemm.dense import gemm
from te_jax.ops.gemm.grouped import gemm_grouped, gemm_grouped_wgrad, gemm_grouped_wide_wgrad

from . import torch_peers
from .cases import Case
from .experts import Experts, groups, models
from .ops import E4M3, E5M2
from .timing import Call, compiled, normal

BF16 = jnp.dtype(jnp.bfloat16)
FORMS = ("fp8 fast", "fp8 split", "fp8 block", "bf16")  # types and scales, and how FP8 is accumulated
LOOP, RAGGED = "loop of dense fp8 fast", "ragged_dot bf16"
TORCH = {True: "torch fp8 rowwise fast", False: "torch bf16"}  # by whether it is in FP8
PRODUCTS = ("fprop", "dgrad", "wgrad")


def cases(tiny: bool) -> list[Case]:
    found = [Product(model, weight, kind) for model in models(tiny) for weight in model.weights for kind in PRODUCTS]
    return [case for product in found for case in product.cases()]


def _positive(seed: int, shape) -> jax.Array:
    """f32 scales around 1."""
    return jnp.exp2(0.5 * normal(seed, shape, jnp.float32))


def _blocks(size: int) -> int:
    return -(-size // ROWS_128.block)


@dataclass(frozen=True)
class Product:
    """One product of a training step. fprop and dgrad: rows [R, k] times weights [E, n, k]; wgrad: [n, R] times [k, R]
    -> [E, n, k], where n is the inputs of the layer and k its features, for lhs is x and rhs the gradient of y. In bf16
    te_jax reads kernels and rows as they lie: weights are [E, k, n] in fprop, rows [R, n] and [R, k] in wgrad."""

    model: Experts
    weight: str
    kind: str

    @property
    def name(self) -> str:
        return f"{self.model.label}: {self.kind} {self.weight} n{self.n} k{self.k}"

    @property
    def _sizes(self) -> tuple[int, int]:
        inputs, features = self.model.weights[self.weight]
        return (features, inputs) if self.kind == "fprop" else (inputs, features)

    n = property(lambda self: self._sizes[0])
    k = property(lambda self: self._sizes[1])
    contracted = property(lambda self: self.kind == "wgrad")
    flops = property(lambda self: 2 * self.model.pairs * self.n * self.k)

    def bytes(self, size: int, weights: int) -> int:
        """With operands of `size` bytes an element, a result in bf16, and so many weights [n, k] read or written."""
        pairs = self.model.pairs
        if self.contracted:
            return size * pairs * (self.n + self.k) + 2 * weights * self.n * self.k
        return size * (pairs * self.k + weights * self.n * self.k) + 2 * pairs * self.n

    def types(self, form: str) -> tuple[jnp.dtype, jnp.dtype]:
        """Of lhs and rhs, as a training step has them: gradients are E5M2, with scales of blocks E4M3."""
        if form == "bf16":
            return BF16, BF16
        gradient = E4M3 if form == "fp8 block" else E5M2
        return {"fprop": (E4M3, E4M3), "dgrad": (gradient, E4M3), "wgrad": (E4M3, gradient)}[self.kind]

    def cases(self) -> Iterator[Case]:
        beside = {"fp8 fast": (TORCH[True], LOOP), "bf16": (TORCH[False], RAGGED)}
        for form in FORMS:
            yield self._case(f"te_jax {form}", partial(self._te_jax, form), beside=beside.get(form, ()))
            yield self._case(f"dense {form}", partial(self._dense, form))
        yield self._case(LOOP, self._loop)
        for fp8, impl in TORCH.items():
            yield self._case(impl, measure=partial(self._torch, fp8))
        yield self._case(RAGGED, self._ragged)

    def _case(self, impl: str, build=None, measure=None, beside=()) -> Case:
        form = next((form for form in FORMS if form in impl), "fp8 fast")
        fp8_flops, size = (0, 2) if form == "bf16" else (self.flops, 1)
        weights = 1 if impl == f"dense {form}" else self.model.experts if self.contracted else self.model.active
        more = dict(suite="grouped", bound=f"dense {form}", beside=beside)
        return Case(self.name, impl, build, self.flops, self.bytes(size, weights), fp8_flops, measure, **more)

    # -- operands ------------------------------------------------------------------------------------------------

    @cached_property
    def _is_token(self):
        of = groups(self.model)
        return expert_of_row(of.offsets, of.counts, self.model.rows)[1]

    def _operand(self, seed, of_rows, size, dtype):
        """Rows [R, size], of wgrad [size, R], with zeros in those that pad; or stacked weights [E, n, k]; or as bf16
        ones lie."""
        is_wide = dtype == BF16
        if not of_rows:
            axes = (self.k, self.n) if is_wide and self.kind == "fprop" else (self.n, self.k)
            return normal(seed, (self.model.experts, *axes), dtype)
        last = self.contracted and not is_wide
        shape = (size, self.model.rows) if last else (self.model.rows, size)
        return jax.jit(only_tokens, static_argnums=2)(normal(seed, shape, dtype), self._is_token, int(last))

    def _scales(self, form):
        """The inverse scales of lhs and rhs: of all x and all gradients one, of weights one for each expert."""
        if form == "bf16":
            return ()
        rows, experts = self.model.rows, self.model.experts
        if form != "fp8 block":
            return _positive(3, ()), _positive(4, () if self.contracted else (experts,))
        if self.contracted:
            return _positive(3, (_blocks(rows), self.n)), _positive(4, (_blocks(rows), self.k))
        return _positive(3, (_blocks(self.k), rows)), _positive(4, (experts, _blocks(self.n), _blocks(self.k)))

    def _formats(self, form):
        """The formats of lhs and rhs."""
        if form != "fp8 block":
            return TENSOR, TENSOR
        return ROWS_128, ROWS_128 if self.contracted else SQUARES_128

    # -- implementations -----------------------------------------------------------------------------------------

    def _te_jax(self, form) -> Call:
        left, right = self.types(form)
        lhs = self._operand(1, True, self.n if self.contracted else self.k, left)
        rhs = self._operand(2, self.contracted, self.k, right)
        of = groups(self.model)
        fast, k_first = form == "fp8 fast", form == "bf16" and self.kind == "fprop"
        formats = self._formats(form)
        product = partial(gemm_grouped, k_first=k_first, fast_accum=fast, formats=formats)
        if self.contracted:
            wide = form == "bf16"
            product = gemm_grouped_wide_wgrad if wide else partial(gemm_grouped_wgrad, fast_accum=fast, formats=formats)
        return compiled(product, [(lhs, rhs, of.offsets, of.counts, *self._scales(form))])

    def _k_major(self, rows: int, weights: tuple[int, ...], form: str) -> list[jax.Array]:
        """lhs and rhs of dense products of so many rows, K-major as `gemm` takes them. weights: the axes in front of
        those of one weight."""
        rhs = (self.k, rows) if self.contracted else (*weights, self.n, self.k)
        shapes = (self.n, rows) if self.contracted else (rows, self.k), rhs
        return [normal(i, shape, dtype) for i, (shape, dtype) in enumerate(zip(shapes, self.types(form)))]

    def _dense(self, form) -> Call:
        pairs, square, scales = self.model.pairs, form == "fp8 block" and not self.contracted, ()
        if form == "fp8 block":
            m, n, k = (self.n, self.k, pairs) if self.contracted else (pairs, self.n, self.k)
            right = (_blocks(n), _blocks(k)) if square else (_blocks(k), n)
            scales = _positive(3, (_blocks(k), m)), _positive(4, right)
        elif form != "bf16":
            scales = _positive(3, ()), _positive(4, ())
        product = partial(gemm, fast_accum=form == "fp8 fast", formats=self._formats(form))
        return compiled(product, [(*self._k_major(pairs, (), form), *scales)])

    def _loop(self) -> Call:
        """A product in FP8, accumulated fast, for each expert that has tokens. Their numbers are known on the host
        here, and each has arrays of its own, so that nothing is copied."""
        counts = [count for count in self.model.counts if count]
        counts = [_blocks(count) * ROWS_128.block for count in counts] if self.contracted else counts
        ends = np.cumsum(counts).tolist()
        of_rows = lambda a, axis: [jax.lax.slice_in_dim(a, b - n, b, axis=axis) for n, b in zip(counts, ends)]

        def split(lhs, rhs):
            if self.contracted:
                return list(zip(of_rows(lhs, 1), of_rows(rhs, 1)))
            return list(zip(of_rows(lhs, 0), rhs))

        each = jax.jit(split)(*self._k_major(ends[-1], (len(counts),), "fp8 fast"))
        loop = lambda each, *scales: [gemm(*operands, *scales, fast_accum=True) for operands in each]
        return compiled(loop, [(each, _positive(3, ()), _positive(4, ()))])

    def _torch(self, fp8: bool, calls: int, repeat: int) -> list[float]:
        sizes = dict(fp8=fp8, contracted=self.contracted, n=self.n, k=self.k, counts=self.model.counts)
        return [torch_peers.measure_grouped(calls, **sizes) for _ in range(repeat)]

    def _ragged(self) -> Call:
        """Rows without padding; weights [E, k, n], as `ragged_dot` has them."""
        pairs, sizes = self.model.pairs, np.asarray(self.model.counts, np.int32)
        if self.contracted:
            contract_rows = jax.lax.RaggedDotDimensionNumbers((((0,), (0,)), ((), ())), (0,), ())
            product = partial(jax.lax.ragged_dot_general, ragged_dot_dimension_numbers=contract_rows)
            return compiled(product, [(normal(1, (pairs, self.n)), normal(2, (pairs, self.k)), sizes)])
        weights = normal(2, (self.model.experts, self.k, self.n))
        return compiled(jax.lax.ragged_dot, [(normal(1, (pairs, self.k)), weights, sizes)])
