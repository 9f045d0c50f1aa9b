"""How devices share a mixture of experts, and what crosses between them, asked before the call is made."""

from math import prod
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jax.typing import DTypeLike

from te_jax.core.check import check
from te_jax.layers.experts.block import OPTIONS, MoEOptions, check_mixture
from te_jax.layers.experts.devices import ExpertExchange, find_exchange, find_placement
from te_jax.layers.experts.exchange import PEER_ACCESS, WHOLE, Exchange
from te_jax.layers.experts.weights import arrays_of, hidden_block, resolve_experts
from te_jax.layers.experts.wire import reads_tokens
from te_jax.ops.experts.permute import buffer_rows
from te_jax.ops.formats import ROWS_128, ScaleFormat, ceil_div, format_of
from te_jax.ops.quantize.array import FLOAT
from te_jax.recipe import Recipe
from te_jax.sharding.constraints import check_spec
from te_jax.state.fp8 import check_recipe, current_recipe


class MoEExplanation(NamedTuple):
    """How devices share a mixture of experts. `str` of it is text.

    Bytes are those that a device receives from others in one call; what it reads where others have it is given for even
    choices.
    """

    # "all_gather", "all_to_all", "peer_access"; "whole": tokens are where their experts are; "none": no divided experts
    strategy: str
    why: str
    expert_axes: tuple[str, ...]  # the mesh axes that divide experts
    token_axes: tuple[str, ...]  # and tokens
    hidden_axes: tuple[str, ...]  # and F
    experts: int  # of a device
    tokens: int  # of a device
    received: int  # tokens that a device has room for, its own among them
    rows: int  # of the buffer of a device's experts
    forward: dict[str, int]  # what crosses in the forward pass -> its bytes
    backward: dict[str, int]
    pieces: int = 1  # of the features, in which the sums of the forward pass come back

    def __str__(self) -> str:
        split = lambda axes: f" ({' x '.join(axes)})" if axes else ""
        lines = [
            f"strategy {self.strategy}: {self.why}",
            f"{self.experts} experts a device{split(self.expert_axes)}, {self.tokens} tokens{split(self.token_axes)}, "
            f"F {'split' if self.hidden_axes else 'whole'}{split(self.hidden_axes)}",
            f"room for {self.received} tokens, {self.rows} rows",
        ]
        for name, crossing in (("forward", self.forward), ("backward", self.backward)):
            each = ", ".join(f"{what} {_size(size)}" for what, size in crossing.items())
            lines.append(f"{name} pass receives {each or 'nothing'}")
        if self.pieces > 1:
            lines.append(f"sums come back in {self.pieces} pieces: one travels while the next is multiplied")
        return "\n".join(lines)


def _size(count: int) -> str:
    return f"{count / 1e6:.1f} MB" if count >= 1e5 else f"{count} B"


def explain_moe(
    x: Any,
    gate_kernel: Any,
    wi: Any,
    wo: Any,
    *,
    options: MoEOptions,
    router_input: Any = None,
    recipe: Recipe | None = None,
    token_spec: PartitionSpec | None = None,
) -> MoEExplanation:
    """How devices share `te_jax.layers.moe` with these arguments on the mesh in force, and what crosses between them.

    x, gate_kernel, wi, wo, options, router_input, token_spec: as in `moe`, without quantized kernels; arrays may be
            `jax.ShapeDtypeStruct`s.
    recipe: the recipe of the call; None is the one in force (`te_jax.autocast`).

    Raises ValueError, or TypeError, for arguments that `moe` refuses, and for experts that the devices don't divide.
    """
    name = "explain_moe"
    for what, a, kind in (("options", options, OPTIONS), ("x", x, FLOAT), ("gate_kernel", gate_kernel, FLOAT)):
        check(name, what, a, kind)
    recipe = current_recipe() if recipe is None else recipe
    if recipe is not None:
        check_recipe(name, recipe)
    found = []

    def look(x, gate_kernel, router_input, wi, wo):
        wi, wo = resolve_experts(name, "wi", wi, recipe), resolve_experts(name, "wo", wo, recipe)
        check_mixture(name, x, (gate_kernel, None, router_input), wi, wo, None, None, options)
        check_spec(name, "token_spec", token_spec, x.ndim, free=False)
        experts, block = gate_kernel.shape[-1], hidden_block((), recipe)
        found.append((x.shape, x.dtype, find_placement(name, x, arrays_of(wi)[0], experts, token_spec, block)))

    jax.eval_shape(look, x, gate_kernel, router_input, wi, wo)
    (*lead, width), dtype, placement = found[0]
    tokens, topk, num_experts = prod(lead), options.router.topk, gate_kernel.shape[-1]
    if placement is not None and placement.shards:
        tokens //= placement.devices(placement.token_axes)
    if placement is None or not placement.experts:
        rows = buffer_rows(tokens * topk, num_experts)
        why = "no mesh axis divides the experts (ep_resource, or the sharding of wi on an Explicit mesh)"
        axes = () if placement is None else placement.token_axes, () if placement is None else placement.hidden
        return MoEExplanation("none", why, (), *axes, num_experts, tokens, tokens, rows, {}, {})
    experts = num_experts // placement.devices(placement.experts)
    exchange = find_exchange(placement, options.exchange, tokens, width, topk, experts)
    crossing = _crossing(exchange, width, topk, dtype, recipe)
    axes = placement.experts, placement.token_axes, placement.hidden
    sizes = experts, tokens, exchange.received, exchange.rows
    why = _why(exchange, options.exchange, tokens)
    return MoEExplanation(exchange.strategy, why, *axes, *sizes, *crossing, exchange.pieces)


def _why(exchange: Exchange, options: ExpertExchange, tokens: int) -> str:
    if exchange.strategy == WHOLE:
        return "devices of different experts have the same tokens" if tokens else "there are no tokens"
    if options.strategy != "auto":
        return "options.exchange asks for it"
    if exchange.strategy == PEER_ACCESS:
        return "these GPUs can read each other's memory"
    if exchange.strategy == "all_gather" and options.block_factor is None:
        return "no token may be dropped, so that a block would have room for all tokens, too"
    if exchange.strategy == "all_gather":
        return f"block_factor is {options.block_factor}, for which a block has room for all tokens, too"
    return f"block_factor is {options.block_factor}: a block has room for {exchange.block} of {tokens} tokens"


def _crossing(exchange: Exchange, width: int, topk: int, dtype: DTypeLike, recipe: Recipe | None):
    """What crosses in each pass -> bytes."""
    if exchange.strategy == WHOLE:
        return {}, {}
    others, unquantized = exchange.block * (exchange.devices - 1), width * dtype.itemsize
    positions = 4 * topk if exchange.strategy == PEER_ACCESS else 0
    in_fp8 = recipe is not None and not any(recipe.override_linear_precision[::2])
    form = format_of(recipe, "x") if in_fp8 else None
    forward = {"tokens": width + _bytes_of_scales(form, width) if in_fp8 else unquantized}
    forward |= {"choices": 8 * topk + positions, "sums": unquantized}
    backward = {
        "gradients": unquantized if recipe is None else width + _bytes_of_scales(ROWS_128, width),
        "sums": unquantized,
    }
    backward |= {"gradients of weights": 4 * topk}
    reads = _rows_read(exchange, topk, recipe, in_fp8)
    of_all = lambda each: {what: round(others * size * reads.get(what, 1)) for what, size in each.items()}
    return of_all(forward), of_all(backward)


def _rows_read(exchange: Exchange, topk: int, recipe: Recipe | None, in_fp8: bool) -> dict[str, float]:
    """What is read from memory -> the rows that a device reads of it, over the tokens of others; choices being even."""
    if exchange.strategy != PEER_ACCESS:
        return {}
    of_rows = topk / exchange.devices
    if recipe is None or not exchange.direct:
        return {"sums": 1 - (1 - 1 / exchange.devices) ** topk}
    return {"sums": of_rows} | ({"tokens": of_rows} if in_fp8 and reads_tokens(exchange, recipe) else {})


def _bytes_of_scales(form: ScaleFormat, width: int) -> int:
    """The bytes of a row's inverse scales."""
    return ceil_div(width, form.block) * jnp.dtype(form.scale_dtype).itemsize if form.block else 0
