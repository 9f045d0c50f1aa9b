"""Which implementation a call of attention takes: the one place where that is decided."""

from typing import NamedTuple, Unpack

from te_jax.ops.attention.form import only_band
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


def resolve(q, k, v, options: AttentionOptions, *, recipe=None, cut=None) -> AttentionChoice:
    """The implementation that serves q, k, v (arrays, or their types) with `options`.

    recipe: a recipe with fp8_dpa=True where the caller has FP8 state; None for no FP8.
    cut:    how a mesh axis cuts the sequence; its method `refuses(q, k, v, options)` says why the devices cannot
            attend together, "" if they can. None for whole sequences.

    Raises ValueError where an implementation is asked for that does not serve the call.
    """
    refused = {}
    if recipe is not None:
        reason = "a mesh axis cuts the sequence" if cut is not None else fp8_refuses(q, k, v, options)
        if not reason:
            served = "the recipe has fp8_dpa=True, and FP8 attention serves this call"
            return AttentionChoice("fp8", dict.fromkeys(("cudnn", "xla"), served))
        refused["fp8"] = reason
    if cut is None:
        choice = _resolve_wide(q, k, v, options)
        return choice._replace(refused=refused | choice.refused)
    if reason := cut.refuses(q, k, v, options):
        raise ValueError(f"{options.name}: {reason}")
    return AttentionChoice(
        "context_parallel", refused | dict.fromkeys(("cudnn", "xla"), "a mesh axis cuts the sequence")
    )


def _resolve_wide(q, k, v, options: AttentionOptions) -> AttentionChoice:
    """`resolve` without FP8."""
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
def explain_attention(q, k, v, **options: Unpack[AttentionKeywords]) -> AttentionChoice:
    """Which implementation `dot_product_attention` takes with these arguments, and why not the others.

    Arrays may be `jax.ShapeDtypeStruct`s, and `dropout_rng` may be left out. Raises what that call raises.
    """
    return resolve(
        q, k, v, check_options(explain_attention, q, k, v, options, op="dot_product_attention", needs_rng=False)
    )
