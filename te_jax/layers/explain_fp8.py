"""What a traced function multiplies, in FP8 or not, and what it keeps for its backward pass: read off its jaxpr."""

import re
import textwrap
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.extend.core import Jaxpr, JaxprEqn, Var, jaxprs_in_params

from te_jax.core.arrays import bytes_text
from te_jax.core.op import Op, ops
from te_jax.core.products import NEVER, OF_LAYER, Noted, Notes, Provenance
from te_jax.core.rule import block_of
from te_jax.layers.contraction import why_not_fp8
from te_jax.ops.formats import FORMATS, TENSOR
from te_jax.recipe import Recipe

WIDTH = 100  # columns of the table
_WHOLE_WORDS = {"break_long_words": False, "break_on_hyphens": False}
_OF_XLA = ("dot_general", "ragged_dot", "ragged_dot_general", "conv_general_dilated", "scaled_matmul")
_MULTIPLIED = re.compile(r"(lhs|rhs)\d*|q|k|v|kv|qkv")  # the operands that te_jax's products multiply


@dataclass(frozen=True)
class Fp8Product:
    """A product of a model, or several that are alike.

    path:     of the module, in NNX of attributes, else as messages and a recipe's `exclude` have it; outside of modules
              the names of `jax.named_scope`. Projections that share a norm stand at the first of them.
    product:  "fprop", "dgrad" or "wgrad" of a layer in FP8, or which could be; "attention", "router", "lora", "logits";
              others are "forward". "... grad" and "backward" are what autodiff makes of them, "... again" what
              `jax.checkpoint` computes a second time.
    times:    how many there are: steps of an `nn.scan` count.
    in_fp8:   whether its operands are in FP8.
    operands: their types and shapes, in short. Weights of experts have an axis of experts in front.
    formats:  what shares a scale, of each operand (names of te_jax.ops.formats); () of one that is not in FP8.
    op:       the op of te_jax (`docs/ops.md`) or the primitive of jax. An op of te_jax has the name of its kernel;
              te_gemm_sum is te_gemm for each of its terms in FP8, XLA's products for others; te_gemm_into is te_gemm of
              a piece of the tokens (`MeshResource.tpsp_pieces`).
    why:      why it is not in FP8; "" of one that is.
    """

    path: str
    product: str
    times: int
    in_fp8: bool
    operands: tuple[str, ...]
    formats: tuple[str, ...]
    op: str
    why: str


@dataclass(frozen=True)
class Fp8Explanation:
    """What `te_jax.explain_fp8` found; `str` of it is a table.

    recipe:   in force, or None.
    products: module by module, in the order in which the function comes to them.
    modules:  the class of the module at each path.
    kept:     the bytes that each module keeps for the backward pass.
    """

    recipe: Recipe | None
    products: tuple[Fp8Product, ...]
    modules: Mapping[str, str]
    kept: Mapping[str, int]

    def __str__(self) -> str:
        count = lambda products: sum(p.times for p in products)
        head = (
            f"{count(p for p in self.products if p.in_fp8)} of {count(self.products)} products in FP8, "
            f"{bytes_text(sum(self.kept.values()))} kept for the backward pass; "
            f"{'no recipe is in force' if self.recipe is None else f'the recipe is {type(self.recipe).__name__}'}"
        )
        return "\n".join([head, *self._table()])

    def reasons(self, path: str) -> dict[str, list[str]]:
        """{why not in FP8: the products of which it is true} of the module at `path`."""
        out: dict[str, list[str]] = {}
        for p in self.products:
            if p.path == path and p.why and p.product not in out.setdefault(p.why, []):
                out[p.why].append(p.product)
        return out

    def _table(self) -> Iterator[str]:
        """The lines of each module: its path, its products, why some are not in FP8."""
        lines = self._lines(shapes=True)
        if _width(lines) > WIDTH:
            lines = self._lines(shapes=False)
        widths = [max(map(len, column)) for column in zip(*(cells for of_path in lines.values() for cells in of_path))]
        for path in dict.fromkeys([*self.modules, *lines, *self.kept]):
            kept = self.kept.get(path, 0)
            if not (path in lines or kept):
                continue
            about = [self.modules.get(path), f"{bytes_text(kept)} kept" * bool(kept)]
            yield f"{path or '.'}  {', '.join(filter(None, about))}".rstrip()
            for cells in lines.get(path, ()):
                yield "  " + "  ".join(map(str.ljust, cells, widths)).rstrip()
            for why, names in self.reasons(path).items():
                text = f"{', '.join(names)} not in FP8: {why}"
                yield from textwrap.wrap(text, WIDTH, initial_indent=" " * 4, subsequent_indent=" " * 6, **_WHOLE_WORDS)

    def _lines(self, shapes: bool) -> dict[str, list[list[str]]]:
        """{path: cells of its lines}, one line for products whose cells are alike."""
        times: dict[str, dict[tuple[str, ...], int]] = {}
        for p in self.products:
            operands = " x ".join(each if shapes else each.partition("[")[0] for each in p.operands)
            formats = " x ".join(p.formats if len({*p.formats}) > 1 else p.formats[:1])
            of_path, cells = times.setdefault(p.path, {}), (p.product, operands, p.op, formats)
            of_path[cells] = of_path.get(cells, 0) + p.times
        of = lambda counts: [[cells[0], f"{n} x", *cells[1:]] for cells, n in counts.items()]
        return {path: of(counts) for path, counts in times.items()}


def _width(lines: Mapping[str, list[list[str]]]) -> int:
    every = [cells for of_path in lines.values() for cells in of_path]
    return sum(2 + max(map(len, column)) for column in zip(*every))


# -- the trace ------------------------------------------------------------------------------------------------


class Traced(NamedTuple):
    """A function, and the types of its two arguments: of the first the floating leaves are differentiated, unless their
    places are among `frozen`."""

    function: Callable[[Any, Any], Any]
    moving: Any
    fixed: Any = ()
    frozen: frozenset[int] = frozenset()


def explain_traced(traced: Traced, notes: Notes, recipe: Recipe | None, train: bool) -> Fp8Explanation:
    """What a function multiplies, and with `train` its gradients too. notes: those that are taken of its trace."""
    leaves, tree = jax.tree.flatten((traced.moving, traced.fixed))
    moving = enumerate(jax.tree.leaves(traced.moving))
    places = [i for i, a in moving if _is_float(a) and i not in traced.frozen]

    def forward(floats, leaves):
        leaves = list(leaves)
        for place, value in zip(places, floats):
            leaves[place] = value
        # Here, for variables of NNX belong to the trace in which they are made.
        out = traced.function(*jax.tree.unflatten(tree, leaves))
        return [a for a in map(jnp.asarray, jax.tree.leaves(out)) if _is_float(a)]

    def both(floats, leaves):
        out, pull = jax.vjp(lambda floats: forward(floats, leaves), floats)
        return jax.tree.leaves(pull), pull([jnp.ones_like(a) for a in out])

    run = both if train else forward
    closed, out = jax.make_jaxpr(run, return_shape=True)([leaves[i] for i in places], leaves)
    return _explanation(closed.jaxpr, len(out[0]) if train else 0, notes, recipe)


def _is_float(a) -> bool:
    return jnp.issubdtype(a.dtype, jnp.floating) and a.dtype.itemsize > 1


def _of_one_byte(a) -> bool:
    return jnp.issubdtype(a.dtype, jnp.floating) and a.dtype.itemsize == 1


def _explanation(jaxpr: Jaxpr, residuals: int, notes: Notes, recipe) -> Fp8Explanation:
    """residuals: how many of the first results are kept for the backward pass."""
    found: dict[Fp8Product, int] = {}
    for eqn, names, times in _equations(jaxpr):
        for product in _products_of(eqn, names, notes):
            found[product] = found.get(product, 0) + times
    products = [replace(product, times=times) for product, times in found.items()]
    order = {path: i for i, path in enumerate(dict.fromkeys([*notes.modules, *(p.path for p in products)]))}
    products.sort(key=lambda p: order[p.path])
    kept: dict[str, int] = {}
    makers = _Makers()
    for var in dict.fromkeys(v for v in jaxpr.outvars[:residuals] if isinstance(v, Var)):
        if (names := makers.names_of(jaxpr, var)) is not None:
            path = _path_of(names, Provenance.of(names))
            kept[path] = kept.get(path, 0) + var.aval.size * var.aval.dtype.itemsize
    modules = {path: module.kind for path, module in notes.modules.items()}
    return Fp8Explanation(recipe, tuple(products), modules, kept)


def _stack_of(eqn: JaxprEqn) -> str:
    return f"/{eqn.source_info.name_stack}"


def _equations(jaxpr: Jaxpr, names: str = "", times: int = 1) -> Iterator[tuple[JaxprEqn, str, int]]:
    """All of a jaxpr and of those within it, but what lies inside of te_jax's ops; the names that each stands in, and
    how many times loops run it, as far as that is known."""
    for eqn in jaxpr.eqns:
        within = names + _stack_of(eqn)
        yield eqn, within, times
        if eqn.primitive.name not in ops:
            count = eqn.params["length"] if eqn.primitive.name == "scan" else 1
            for inner in jaxprs_in_params(eqn.params):
                yield from _equations(inner, within, times * count)


class _Makers:
    """Which equation of a jaxpr, or of those within it, computes a variable."""

    def __init__(self) -> None:
        self._found: dict[int, dict[Var, JaxprEqn]] = {}

    def names_of(self, jaxpr: Jaxpr, var: Var) -> str | None:
        """The names that it stands in; None where the variable is an argument."""
        if id(jaxpr) not in self._found:
            self._found[id(jaxpr)] = {var: eqn for eqn in jaxpr.eqns for var in eqn.outvars}
        eqn = self._found[id(jaxpr)].get(var)
        if eqn is None:
            return None
        at = eqn.outvars.index(var)
        inside = [inner for inner in jaxprs_in_params(eqn.params) if len(inner.outvars) == len(eqn.outvars)]
        within = inside[0].outvars[at] if inside else None
        more = self.names_of(inside[0], within) if isinstance(within, Var) else None
        return _stack_of(eqn) + (more or "")


# -- one product ----------------------------------------------------------------------------------------------


class _Factors(NamedTuple):
    """What a product multiplies: types of arrays, and the formats of those in FP8."""

    types: tuple[Any, ...]
    formats: tuple[str, ...]


def _products_of(eqn: JaxprEqn, names: str, notes: Notes) -> Iterator[Fp8Product]:
    """The products of an equation, with times=1."""
    name = eqn.primitive.name
    for factors in _factors_of(eqn):
        origin = Provenance.of(names)
        in_fp8 = all(map(_of_one_byte, factors.types))
        path = _path_of(names, origin)
        why = "" if in_fp8 else _why_not(eqn, factors, origin, path, notes)
        operands, formats = tuple(map(_short, factors.types)), factors.formats if in_fp8 else ()
        yield Fp8Product(path, _name_of(origin), 1, in_fp8, operands, formats, name, why)


def _factors_of(eqn: JaxprEqn) -> list[_Factors]:
    name, types = eqn.primitive.name, [v.aval for v in eqn.invars]
    if name in _OF_XLA:
        return [_Factors(tuple(types[:2]), (TENSOR.name,) * 2)]
    if name not in ops:
        return []
    given = dict(zip(eqn.params["inputs"], types, strict=True))
    factors = [each for each in given if _MULTIPLIED.fullmatch(each)]
    terms = [factors[i : i + 2] for i in range(0, len(factors), 2)] if name == "te_gemm_sum" else [factors]
    if any(_of_one_byte(given[factor]) for factor in factors):  # what is paired has FP8 in words of 16 bits
        paired = [factor for factor in factors if not _of_one_byte(given[factor])]
        given |= {factor: given[factor].update(dtype=eqn.params["dtype"]) for factor in paired}
    form = lambda factor: _format_of(ops[name], factor, given)
    return [_Factors(tuple(given[f] for f in term), tuple(map(form, term))) for term in terms if term]


def _format_of(op: Op, factor: str, given: Mapping[str, Any]) -> str:
    """The format of an operand, as the axes of its inverse scales declare it."""
    blocks = []
    for operand in op.rule.inputs:
        if operand.name in given and re.fullmatch(rf"{factor}_\w+_inv", operand.name):
            blocks = [block_of(axis)[1] for axis in operand.axes if isinstance(axis, str) and "/" in axis]
    block, square = max(blocks, default=0), len(blocks) > 1
    return next(form.name for form in FORMATS.values() if (form.block, form.square) == (block, square))


def _short(aval: Any) -> str:
    """Its type and shape, as "e4m3[8,16]"."""
    names = {"bfloat16": "bf16", "float8_e4m3fn": "e4m3", "float8_e5m2": "e5m2"}
    name = names.get(aval.dtype.name, aval.dtype.name.replace("float", "f").replace("int", "i"))
    return f"{name}[{','.join(map(str, aval.shape))}]"


def _path_of(names: str, origin: Provenance) -> str:
    if origin.path is not None:
        return origin.path
    plain = re.sub(r"\w+\(|\)|te_product\[[^\]]*\]", "", names)  # without transforms and names of products
    return "/".join(part for part in plain.split("/") if part)


def _name_of(origin: Provenance) -> str:
    name = origin.product.removesuffix(" in 16 bits")
    backward = origin.backward and not origin.again
    if name not in OF_LAYER:
        name = f"{name} grad" if name and backward else name or ("backward" if backward else "forward")
    return name + " again" * origin.again


def _why_not(eqn: JaxprEqn, factors: _Factors, origin: Provenance, path: str, notes: Notes) -> str:
    """Why a product is not in FP8, as what decided it has noted."""
    if origin.product in NEVER:
        return NEVER[origin.product]
    if reasons := notes.why.get(path):
        return "; ".join(reasons)
    recipe, primitive = notes.recipes.get(path), eqn.primitive.name
    if origin.product in OF_LAYER and recipe is not None:
        at = OF_LAYER.index(origin.product)
        if recipe.override_linear_precision[at]:
            return f"the recipe's override_linear_precision has True for {origin.product}"
    if primitive in ops:
        return f"its operands are {factors.types[0].dtype.name}"
    if primitive != "dot_general":
        return f"te_jax has no {primitive} in FP8"
    if why := why_not_fp8(*factors.types, eqn.params["dimension_numbers"]):
        return why
    module = notes.modules.get(path, Noted("", _WAY_OF_FUNCTIONS))
    return f"{module.kind} leaves it to XLA under every recipe" if module.hook is None else f"no hook; {module.hook}"


_WAY_OF_FUNCTIONS = "a product of jax.numpy or jax.lax, where te_jax.layers.dense would be in FP8"
