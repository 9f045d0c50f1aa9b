"""Cases of the ops around experts' grouped products: the router, permute and combine, grouped activations, and the
quantization of stacked weights. Bytes are of each input read once and each result written once; of buffers, the rows
that are tokens'."""

from collections.abc import Callable, Iterator
from functools import partial

import jax
import jax.numpy as jnp

from te_jax.ops.experts import permute, router
from te_jax.ops.experts import rows as grouped
from te_jax.ops.quantize import activation, quantize_stacked, quantize_stacked_block

from .cases import Case
from .experts import Experts, groups, models
from .ops import BLOCKS, E4M3, E5M2, FP8_RESULTS, named
from .timing import compiled, normal

SWIGLU = activation.attributes(("silu", "linear"))
IMPLS = ("te_jax fp8", "te_jax fp8 block", "xla fp8")  # a scale for a tensor or an expert; for 1 x 128; as the first
_ROWS_IN_BLOCKS = ("data", "data_t", "scale_inv", "scale_inv_t")
_SQUARES = ("data", "data_t", "block_inv", "block_inv_t")


def cases(tiny: bool) -> Iterator[Case]:
    for model in models(tiny):
        yield from _router(model)
        yield from _permute(model)
        yield from _combine(model)
        yield from _activation(model)
    for model in [model for model in models(tiny) if not model.skewed]:
        yield from _stacked(model)


def _case(model: Experts, name: str, impl: str, build: Callable, moved: int) -> Case:
    return Case(f"{model.label}: {name}", impl, build, bytes=moved, suite="grouped")


def _quantizing(op, block_op, impl: str, outputs, outputs_in_blocks, dtype, **attrs) -> Callable:
    """(operands, scale) -> the results by name; blocks make no use of the scale."""
    if impl == "te_jax fp8 block":
        block = dict(outputs=outputs_in_blocks, dtype=E4M3, **BLOCKS, **attrs)
        return lambda operands, scale: named(block_op, False, *operands, **block)
    one_scale = dict(outputs=outputs, dtype=dtype, **attrs)
    return lambda operands, scale: named(op, impl.startswith("xla"), *operands, scale, **one_scale)


def _random_weights(model: Experts):
    return jax.nn.softmax(normal(7, (model.tokens, model.topk), jnp.float32), -1)


# -- router --------------------------------------------------------------------------------------------------


def _router(model: Experts) -> Iterator[Case]:
    options, logits = router.RouterOptions(model.topk), (model.tokens, model.experts)
    moved, chosen = 4 * model.tokens * model.experts, 8 * model.pairs

    def forward(logits):
        return router.route(logits, options)

    def both(logits, dweights):
        weights, transpose, *rest = jax.vjp(lambda logits: _weights_first(forward(logits)), logits, has_aux=True)
        return weights, rest, transpose(dweights)

    draw = partial(normal, dtype=jnp.float32)
    build = lambda: compiled(forward, [(draw(1, logits),)])
    yield _case(model, "router", "te_jax", build, moved + chosen)
    build = lambda: compiled(both, [(draw(1, logits), draw(2, (model.tokens, model.topk)))])
    yield _case(model, "router fwd+bwd", "te_jax", build, 3 * moved + 2 * chosen)
    build = lambda: compiled(lambda experts: permute.group(experts, model.experts), [(jnp.asarray(model.choices),)])
    yield _case(model, "group", "te_jax", build, 4 * (2 * model.pairs + model.rows))


def _weights_first(routing):
    return routing.weights, routing[1:]


# -- permute and combine -------------------------------------------------------------------------------------


def _gather(model: Experts, impl: str, dtype, weighted: bool):
    """Tokens' rows in both FP8 layouts. weighted: times the weights, as the gradient of combine's rows is."""
    run = _quantizing(
        permute.permute_op, permute.permute_block_op, impl, FP8_RESULTS, _ROWS_IN_BLOCKS, dtype, topk=model.topk
    )

    def fn(x, groups, weights, scale):
        return run((x, groups.slots, groups.offsets, weights if weighted else None), scale)

    return fn


def _permute(model: Experts) -> Iterator[Case]:
    x = (model.tokens, model.hidden)
    moved = 2 * model.hidden * (model.tokens + model.pairs)
    for impl in IMPLS:
        inputs = lambda: (normal(1, x), groups(model), None, jnp.float32(64.0))
        build = lambda impl=impl, inputs=inputs: compiled(_gather(model, impl, E4M3, False), [inputs()])
        yield _case(model, "permute to fp8, both layouts", impl, build, moved)


def _combine(model: Experts) -> Iterator[Case]:
    """Forward; backward: the gradient of the weights, and that of the rows in FP8."""
    y, rows = (model.tokens, model.hidden), (model.rows, model.hidden)
    of_tokens, of_rows = 2 * model.hidden * model.tokens, 2 * model.hidden * model.pairs

    def forward(impl, rows, groups, weights):
        return named(permute.combine_op, impl.startswith("xla"), rows, groups.rows, weights, outputs=("y",))

    def backward(impl, rows, groups, weights, dy, scale):
        of_weights = (dy, rows, groups.rows)
        dweights = named(permute.combine_bwd_op, impl.startswith("xla"), *of_weights, outputs=("dweights",))
        return dweights, _gather(model, impl, E5M2, True)(dy, groups, weights, scale)

    inputs = lambda: (normal(1, rows), groups(model), _random_weights(model))
    for impl in ("te_jax", "xla"):
        build = lambda impl=impl: compiled(partial(forward, impl), [inputs()])
        yield _case(model, "combine", impl, build, of_rows + of_tokens)
    for impl in IMPLS:
        more = lambda: (normal(2, y), jnp.float32(64.0))
        build = lambda impl=impl, more=more: compiled(partial(backward, impl), [(*inputs(), *more())])
        yield _case(model, "combine bwd, rows to fp8, both layouts", impl, build, 2 * of_rows + of_tokens)


# -- activations ---------------------------------------------------------------------------------------------


def _activation(model: Experts) -> Iterator[Case]:
    y, x = (model.rows, model.ffn), (model.rows, 2, model.ffn)

    def build(impl, backward):
        op, block_op = grouped.activation_grouped_fwd, grouped.activation_grouped_block_fwd
        if backward:
            op, block_op = grouped.activation_grouped_bwd, grouped.activation_grouped_block_bwd
        run = _quantizing(op, block_op, impl, FP8_RESULTS, _ROWS_IN_BLOCKS, E5M2 if backward else E4M3, **SWIGLU)

        def fn(values, groups, scale):
            return run((*values, groups.offsets, groups.counts, None), scale)

        values = (normal(2, y), normal(1, x)) if backward else (normal(1, x),)
        return compiled(fn, [(values, groups(model), jnp.full(model.experts, 64.0))])

    for backward in (False, True):
        # Forward, of each element of y: x of both slots, both layouts. Backward: dy, x, both layouts of both slots.
        moved = model.pairs * model.ffn * (10 if backward else 6)
        for impl in IMPLS:
            name = f"{'d' * backward}swiglu to fp8, both layouts"
            yield _case(model, name, impl, partial(build, impl, backward), moved)


# -- stacked weights -----------------------------------------------------------------------------------------


def _stacked(model: Experts) -> Iterator[Case]:
    """The two weights of a gated activation are two arrays, which lie side by side in the results."""

    def build(impl, shape, slots):
        of_stack = dict(stack=1, slots=slots - 1)
        attrs = dict(of_stack, lead=0) if impl == "te_jax fp8 block" else dict(of_stack, split=1)
        ops = quantize_stacked, quantize_stacked_block
        run = _quantizing(*ops, impl, FP8_RESULTS, _SQUARES, E4M3, **attrs)
        fn = lambda weights, scale: run((*weights, None)[:2], scale)
        weights = tuple(normal(1 + s, (model.experts, *shape)) for s in range(slots))
        return compiled(fn, [(weights, jnp.full(model.experts, 64.0))])

    for weight, (inputs, features) in model.weights.items():
        slots = 2 if weight == "wi" else 1
        for impl in IMPLS:
            name = f"quantize {weight} {model.experts}x{inputs}x{features}, both layouts"
            shape = inputs, features // slots
            moved = 4 * model.experts * inputs * features
            yield _case(model, name, impl, partial(build, impl, shape, slots), moved)
