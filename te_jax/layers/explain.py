"""Which implementation a call of attention takes, asked before the call is made."""

from typing import Unpack

from jax.typing import ArrayLike

from te_jax.core import extension
from te_jax.core.check import NONE, check, one_of
from te_jax.ops.attention.mesh import Axes, Cut
from te_jax.ops.attention.options import AttentionKeywords, check_options, takes_options
from te_jax.ops.attention.plan import AttentionChoice, attention_plan
from te_jax.recipe import Recipe
from te_jax.state.fp8 import check_recipe, current_recipe


@takes_options()
def explain_attention(
    q: ArrayLike, k: ArrayLike, v: ArrayLike, *, recipe: Recipe | None = None, axis: str | None = None,
    strategy: str = "default", load_balanced: bool = False, batch_axis: Axes = None, head_axis: Axes = None,
    platform: str | None = None, **options: Unpack[AttentionKeywords],
) -> AttentionChoice:  # fmt: skip
    """Which implementation attention takes with these arguments, and why not the others.

    q, k, v, options: as in `dot_product_attention`; arrays may be `jax.ShapeDtypeStruct`s, and `dropout_rng` may be
            left out.
    recipe: the recipe of the call; None is the one in force (`te_jax.autocast`). With fp8_dpa=True the answer is what
            `te_jax.flax.DotProductAttention` does, which attends in FP8 where FP8 attention serves the call;
            `dot_product_attention` itself is never in FP8.
    axis, strategy, load_balanced, batch_axis, head_axis: as in `context_parallel_attention`, whose answer it is with an
            axis.
    platform: "cuda" or "cpu", where the call is to run; None is "cuda" in a process with an NVIDIA GPU, else "cpu".
            "cuda" asks on any machine what a GPU does; without a GPU here, what a Hopper does.

    Raises what the call raises.
    """
    check("explain_attention", "platform", platform, NONE | one_of("cuda", "cpu"))
    op = "dot_product_attention" if axis is None else "context_parallel_attention"
    cut = None if axis is None else Cut.of(op, axis, strategy, load_balanced, batch_axis, head_axis)
    checked = check_options(explain_attention, q, k, v, options, op=op, cut=cut, needs_rng=False)
    recipe = current_recipe() if recipe is None else recipe
    if recipe is not None:
        check_recipe("explain_attention", recipe)
    choice = attention_plan((q, k, v), checked, recipe=recipe if recipe is not None and recipe.fp8_dpa else None).choice
    found = "cuda" if extension.has_cuda_device() else "cpu"
    if choice.implementation != "cudnn" or (platform or found) == "cuda":
        return choice
    others = {name: reason for name, reason in choice.refused.items() if name != "xla"}
    where = "platform is 'cpu'" if platform else "this process has no NVIDIA GPU"
    return AttentionChoice("xla", {"cudnn": f"{where}; on a GPU it serves this call (platform='cuda')", **others})
