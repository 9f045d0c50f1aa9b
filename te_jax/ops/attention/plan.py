"""What a call of attention does: the one place where types decide it."""

from collections.abc import Sequence
from typing import Any, NamedTuple

from te_jax.ops.attention.context import context_refuses
from te_jax.ops.attention.form import Form, form_of
from te_jax.ops.attention.fp8 import fp8_refuses
from te_jax.ops.attention.op import cudnn_refuses, cudnn_refuses_backward, gpu_refuses, operand_types
from te_jax.ops.attention.options import AttentionOptions
from te_jax.recipe import Recipe


class AttentionChoice(NamedTuple):
    """The implementation that a call takes, and why not the others.

    implementation: "cudnn", "xla" (plain JAX), "fp8" or "context_parallel". The ops of "cudnn" are plain JAX off CUDA:
                    `attention_plan` makes one for all devices, `explain_attention` says "xla" where there is no GPU.
    refused:        implementation -> the reason.
    decodes:        "cudnn" computes the one query of each row as a step of decoding: the query heads of a group are
                    queries of one head, and long rows are cut into pieces where few rows keep the GPU busy. That is in
                    the op's CUDA lowering, which knows the rows of a device; k, v joined in one array stay as they lie.
    """

    implementation: str
    refused: dict[str, str]
    decodes: bool = False

    def __str__(self) -> str:
        refused = (f"not {name}: {reason}" for name, reason in self.refused.items())
        return "; ".join([self.implementation + " (a step of decoding)" * self.decodes, *refused])


class AttentionPlan(NamedTuple):
    """What a call of attention does: `api.run_attention` does it to arrays."""

    choice: AttentionChoice
    options: AttentionOptions
    form: Form | None = None  # of "cudnn"


def attention_plan(
    operands: Sequence[Any], options: AttentionOptions, *, recipe: Recipe | None = None
) -> AttentionPlan:
    """The plan of a call of (q, k, v), (q, kv) or (qkv,), arrays or their types, with `options`.

    recipe: the recipe of a caller that attends in FP8 where it can; None for no FP8.

    Raises ValueError where an implementation, or a cut sequence, is asked for that does not serve the call.
    """
    (q, k, v), refused, form = operand_types(*operands), {}, None
    made = lambda name, reasons: AttentionPlan(AttentionChoice(name, refused | reasons), options)
    if recipe is not None:
        reason = fp8_refuses(q, k, v, options)
        if not reason:
            served = "the recipe asks for FP8 attention, which serves this call"
            return made("fp8", dict.fromkeys(("cudnn", "xla"), served))
        refused["fp8"] = reason
    if options.cut is not None:
        if reason := context_refuses(q, k, v, options):
            raise ValueError(f"{options.name}: {reason}.")
        return made("context_parallel", dict.fromkeys(("cudnn", "xla"), options.cut.text))
    reason = _cudnn_refuses_call(q, k, v, options)
    if not reason:
        form = form_of(options, q, k)
        reason = gpu_refuses(
            q.shape[-1], v.shape[-1], only_band=form.only_band, has_bias=options.has_bias,
            deterministic=options.deterministic, drops=options.dropout_rate > 0,
        )  # fmt: skip
    if options.implementation == "cudnn" and reason:
        raise ValueError(f"{options.name}: implementation is 'cudnn', but {reason}; pass None or 'xla'.")
    if options.implementation == "xla" or reason:
        return made("xla", {"cudnn": reason or "implementation is 'xla'"})
    asked = "implementation is 'cudnn'" if options.implementation else ""
    refused["xla"] = asked or "cuDNN serves this call without s x t logits in memory"
    return AttentionPlan(AttentionChoice("cudnn", refused, form.decodes(q.shape[-3])), options, form)


def _cudnn_refuses_call(q, k, v, options: AttentionOptions) -> str:
    """Why no GPU's cuDNN op serves this call; "" if one may."""
    head_dim = max(q.shape[-1], v.shape[-1])
    for is_asked, what in (
        (options.logit_softcap, f"logit_softcap is {options.logit_softcap}; cuDNN's op does not have it"),
        (options.scale <= 0, f"scale is {options.scale}; cuDNN multiplies the -inf of what it has hidden by it"),
        (options.has_bias and head_dim > 128, f"head dim is {head_dim}; cuDNN has a bias's gradient up to 128"),
    ):
        if is_asked:
            return what
    if options.dropout_rate > 0 and (reason := cudnn_refuses_backward(q)):
        return f"{reason}, and so is the mask of their dropout"
    return cudnn_refuses(q, k, v)
