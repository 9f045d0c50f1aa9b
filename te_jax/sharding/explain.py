"""What crosses devices in a compiled program, where, and what is computed meanwhile."""

import collections
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax

from te_jax.core.arrays import bytes_text
from te_jax.sharding.collectives import Collective, compiled

WIDTH = 44  # columns of a module's path in the table
_TARGETS = re.compile(r'custom_call_target="(te_gemm\w*|te_attention\w*|te_ssd\w*|__cublas\S*?|__cudnn\S*?)"')
_PRODUCTS = re.compile(r"__triton_gemm| (?:dot|convolution)\(")
# What jax puts between the names of modules: transformations, loops, methods.
_BETWEEN_MODULES = re.compile(
    r"^(while|body|cond|branch_\d+_fun|eval_jaxpr|closed_call|checkpoint|remat\w*|shard_map|pjit)$|[(\[.]"
)


@dataclass(frozen=True)
class Crossing:
    """Arrays that cross devices, or several that are alike.

    path:    of the module that sends them, "" outside of modules; of gathered weights the module that reads them.
    what:    the op of te_jax or the operation of jax that they belong to, with the product of a layer in front where it
             is one: "wgrad te_gemm".
    is_backward: whether they cross in the backward pass; not those of the forward pass, and of what autodiff has not
             made, such as an optimizer's.
    kind:    "all-gather", "all-reduce", "reduce-scatter", "all-to-all", "collective-permute".
    dtype:   as XLA names it, "f8e4m3fn", "bf16".
    axes:    the mesh axes whose devices take part.
    bytes:   of one of them on a device, of the larger side: of an all-gather its result.
    times:   how many there are.
    in_loop: whether each step of a loop, such as `nn.scan`, has them.
    next_to: how many products run while each crosses; None where that is not known: on a CPU, and where XLA joined them
             with others, or has them wait.
    under:   these products: "layers/mlp fprop te_gemm".
    """

    path: str
    what: str
    is_backward: bool
    kind: str
    dtype: str
    axes: tuple[str, ...]
    bytes: int
    times: int
    in_loop: bool
    next_to: int | None
    under: tuple[str, ...] = ()


@dataclass(frozen=True)
class ShardingExplanation:
    """What `te_jax.explain_sharding` found; `str` of it is a table. crossings: in the program's order."""

    crossings: tuple[Crossing, ...]

    def __str__(self) -> str:
        if not self.crossings:
            return "nothing crosses devices"
        rows = [("module", "what", "crosses", "over", "bytes", "times", "next to")]
        rows += [_row(each) for each in self.crossings]
        widths = [max(map(len, column)) for column in zip(*rows)]
        lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip() for row in rows]
        lines += [_sum("forward pass and the rest", self.crossings, False), _sum("backward pass", self.crossings, True)]
        if any(each.in_loop for each in self.crossings):
            lines.append("times with *: in each step of a loop; sums count one step.")
        if any(each.next_to is None for each in self.crossings):
            lines.append("What runs next to them is known where the program is compiled for a GPU.")
        return "\n".join(lines)


def _row(each: Crossing) -> tuple[str, ...]:
    path = each.path if len(each.path) <= WIDTH else "..." + each.path[3 - WIDTH :]
    next_to = "" if each.next_to is None else _list_products(each.under) or "nothing"
    passed = ", backward" if each.is_backward else ""
    crosses, times = f"{each.kind} {each.dtype}", f"{each.times}{'*' * each.in_loop}"
    return path, each.what + passed, crosses, "+".join(each.axes), bytes_text(each.bytes), times, next_to


def _list_products(under: tuple[str, ...]) -> str:
    """ "2 x mlp fprop te_gemm, 1 x mlp wgrad te_gemm", by the last name of a module."""
    counts = collections.Counter(name.rsplit("/", 1)[-1] for name in under)
    return ", ".join(f"{count} x {name}" for name, count in counts.items())


def _sum(name: str, crossings: tuple[Crossing, ...], is_backward: bool) -> str:
    by_type = collections.Counter()
    for each in crossings:
        if each.is_backward == is_backward:
            by_type[each.dtype] += each.bytes * each.times
    parts = ", ".join(f"{bytes_text(size)} of {dtype}" for dtype, size in by_type.most_common() if size)
    return f"{name}: {parts or 'nothing'}"


def explain_program(fn: Callable[..., Any], args: tuple[Any, ...], mesh: jax.sharding.Mesh) -> ShardingExplanation:
    """Of `fn`, jitted or not, compiled for these arguments."""
    program, found = compiled(fn, *args, mesh=mesh)
    is_gpu = mesh.devices.flat[0].platform == "gpu"
    next_to = _next_to(program.as_text()) if is_gpu else {}
    alike = collections.Counter()
    for one in found:
        path, what, name = _place_of(one)
        is_backward, in_loop = "transpose(" in name, "while/body" in name
        under = next_to.get(one.channel)  # None: it was joined with others, or waits
        alike[path, what, is_backward, one.kind, one.dtype, one.axes, one.bytes, in_loop, under] += 1
    crossings = []
    for (*head, in_loop, under), times in alike.items():
        crossings.append(Crossing(*head, times, in_loop, None if under is None else len(under), under or ()))
    return ShardingExplanation(tuple(crossings))


def _place_of(one: Collective) -> tuple[str, str, str]:
    """-> the path of the module, what it is of, the name that both are of: the first one that is of an op of te_jax,
    else of a module, else the first."""
    parsed = [(*_parts(name), name) for name in one.names] or [("", one.kind, "")]
    of_ops = [each for each in parsed if re.search(r"(^| )te_", each[1])]
    return next(iter(of_ops + [each for each in parsed if each[0]]), parsed[0])


def _parts(name: str) -> tuple[str, str]:
    """The path and what of one of jax's names: "jit(f)/jvp(Net)/mlp/te_product[wgrad]/jit(te_gemm)/..."."""
    *parts, last = name.split("/")
    product = next((match[1] for part in parts if (match := re.match(r"te_product\[(\w+)\]", part))), "")
    op = next((match[1] for part in (*parts, last) if (match := re.match(r"jit\((te_\w+)\)", part))), last)
    return "/".join(part for part in parts if not _BETWEEN_MODULES.search(part)), f"{product} {op}".strip()


def _next_to(text: str) -> dict[int, tuple[str, ...]]:
    """{channel of a collective: the products that run between its start and its end}, of a scheduled program's text."""
    within, running, products, found = _fused_products(text), {}, [], {}
    for line in text.splitlines():
        if match := re.search(r"^\s*(?:ROOT )?(%\S+) = .*? [\w-]+-start\(", line):
            channel = re.search(r"channel_id=(\d+)", line)
            running[match[1]] = channel and int(channel[1]), len(products)
        elif match := re.search(r" [\w-]+-done\((%[\w.-]+)", line):
            channel, before = running.pop(match[1], (None, len(products)))
            if channel is not None:
                found[channel] = min(found.get(channel, tuple(products)), tuple(products[before:]), key=len)
        elif _is_product(line):
            products.append(_product_name(line))
        elif (match := re.search(r" fusion\(.*calls=(%[\w.-]+)", line)) and match[1] in within:
            products.append(within[match[1]])
    return found


def _is_product(line: str) -> bool:
    return bool(_TARGETS.search(line) or _PRODUCTS.search(line))


def _product_name(line: str) -> str:
    match = re.search(r'op_name="(.*?)"', line)
    return " ".join(filter(None, _parts(match[1]))) if match else "product"


def _fused_products(text: str) -> dict[str, str]:
    """{computation: the product in it}: XLA puts a kernel into one with the slices that it reads and writes."""
    found, name = {}, ""
    for line in text.splitlines():
        if match := re.match(r"(%[\w.-]*fusion[\w.-]*) \(.*\{$", line):
            name = match[1]
        elif line.startswith("}"):
            name = ""
        elif name and _is_product(line):
            found[name] = _product_name(line)
    return found
