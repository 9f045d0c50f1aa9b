"""Which implementation a call of attention takes: the one place where that is decided."""

from collections.abc import Mapping
from typing import NamedTuple, Unpack

from te_jax.ops.attention.context import context_refuses
from te_jax.ops.attention.form import only_band
from te_jax.ops.attention.mesh import Cut
from te_jax.ops.attention.options import AttentionKeywords, AttentionOptions, check_options, takes_options
from te_jax.ops.attention_fp8 import fp8_refuses
from te_jax.ops.attention_op import cudnn_refuses, cudnn_refuses_backward, gpu_refuses


class AttentionChoice(NamedTuple):
    """The plan of a call: the implementation that it takes, and why not the others.

    implementation: "cudnn" (its ops are plain JAX off CUDA), "xla" (plain JAX), "fp8" or "context_parallel".
    refused:        implementation -> the reason.
    """

    implementation: str
    refused: dict[str, str]

    def __str__(self):
        refused = (f"not {name}: {reason}" for name, reason in self.refused.items())
        return "; ".join([self.implementation, *refused])


def resolve(q, k, v, options: AttentionOptions, *, recipe=None) -> AttentionChoice:
    """The implementation that serves q, k, v (arrays, or their types) with `options`.

    recipe: a recipe with fp8_dpa=True where the caller has FP8 state; None for no FP8.

    Raises ValueError where an implementation, or a cut sequence, is asked for that does not serve the call.
    """
    if recipe is None:
        return _resolve_wide(q, k, v, options)
    if reason := fp8_refuses(q, k, v, options):
        choice = _resolve_wide(q, k, v, options)
        return choice._replace(refused={"fp8": reason, **choice.refused})
    served = "the recipe has fp8_dpa=True, and FP8 attention serves this call"
    return AttentionChoice("fp8", dict.fromkeys(("cudnn", "xla"), served))


def _resolve_wide(q, k, v, options: AttentionOptions) -> AttentionChoice:
    """`resolve` without FP8."""
    if options.cut is not None:
        if reason := context_refuses(q, k, v, options):
            raise ValueError(f"{options.name}: {reason}.")
        return AttentionChoice("context_parallel", dict.fromkeys(("cudnn", "xla"), options.cut.text))
    why_not = _cudnn_refuses_call(q, k, v, options)
    if options.implementation == "cudnn" and why_not:
        raise ValueError(f"{options.name}: implementation is 'cudnn', but {why_not}; pass None or 'xla'.")
    if options.implementation == "xla" or why_not:
        return AttentionChoice("xla", {"cudnn": why_not or "implementation is 'xla'"})
    reason = "cuDNN serves this call without the s x t logits in memory"
    return AttentionChoice("cudnn", {"xla": "implementation is 'cudnn'" if options.implementation else reason})


def _cudnn_refuses_call(q, k, v, options: AttentionOptions) -> str:
    """Why the cuDNN op does not serve this call; "" if it does."""
    wide = max(q.shape[-1], v.shape[-1])
    for is_asked, what in (
        (options.return_max_logit, "return_max_logit is set; cuDNN's op does not return it"),
        (options.scale <= 0, f"scale is {options.scale}; cuDNN multiplies the -inf of what it has hidden by it"),
        (options.has_bias and wide > 128, f"head dim is {wide}; cuDNN has a bias's gradient up to 128"),
    ):
        if is_asked:
            return what
    if options.dropout_rate > 0 and (reason := cudnn_refuses_backward(q)):
        return f"{reason}, and so is the mask of their dropout"
    return cudnn_refuses(q, k, v) or gpu_refuses(
        q.shape[-1], v.shape[-1], only_band=only_band(options, q, k), has_bias=options.has_bias,
        deterministic=options.deterministic, drops=options.dropout_rate > 0,
    )  # fmt: skip


@takes_options()
def explain_attention(
    q, k, v, *, recipe=None, context: Mapping | None = None, **options: Unpack[AttentionKeywords]
) -> AttentionChoice:
    """Which implementation attention takes with these arguments, and why not the others.

    recipe:  for the modules of `te_jax.flax` under `te_jax.autocast(True, recipe)`, which may have fp8_dpa=True; None
             for `dot_product_attention`.
    context: for `context_parallel_attention`, a dict of its arguments of that function's own: axis and others.

    Arrays may be `jax.ShapeDtypeStruct`s, and `dropout_rng` may be left out. Raises what that call raises.
    """
    op = "dot_product_attention" if context is None else "context_parallel_attention"
    cut = None if context is None else Cut.of(op, **context)
    checked = check_options(explain_attention, q, k, v, options, op=op, cut=cut, needs_rng=False)
    return resolve(q, k, v, checked, recipe=recipe if recipe is not None and recipe.fp8_dpa else None)
