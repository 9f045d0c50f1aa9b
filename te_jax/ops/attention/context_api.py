"""Context-parallel attention: dot_product_attention of sequences that are cut along a mesh axis."""

from typing import Any, Unpack

import jax

from te_jax.core.arrays import as_jax
from te_jax.ops.attention.api import run_attention
from te_jax.ops.attention.mesh import Axes, Cut
from te_jax.ops.attention.options import AttentionKeywords, check_options, takes_options
from te_jax.ops.attention.plan import attention_plan


@takes_options(without=("implementation", "seq_major", "name"))
def context_parallel_attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    *,
    axis: str,
    strategy: str = "default",
    load_balanced: bool = False,
    batch_axis: Axes = None,
    head_axis: Axes = None,
    **options: Unpack[AttentionKeywords],
) -> Any:
    """`dot_product_attention` with the sequence cut along a mesh axis: each device has s / cp queries, and t / cp keys.

    q [b..., s, h, d], k [b..., t, g, d], v [b..., t, g, e] of one floating dtype: whole arrays, which a mesh in force
    (`jax.set_mesh`) shards or will shard; or, inside a `jax.shard_map` over `axis`, each device's part.

    axis:           the mesh axis, of cp devices.
    strategy:       "ring": keys and values go around, and a device never holds more than two parts of them;
                    "all_gather" (the default): each device collects them all, and in the backward pass once more.
    load_balanced:  the sequence is in the order of `te_jax.sharding.reorder_causal_load_balancing`: under a causal mask
                    all devices then have the same work. The result is in that order too.
    batch_axis, head_axis: the mesh axes that shard q's first axis, and its heads and groups. Auto axes should be named,
                    or the kernels gather along them; Explicit axes are known from the arrays. Without effect inside a
                    `jax.shard_map` over `axis`: make these axes manual there, too.
    sequence_descriptor: of whole rows, in the order of the sequence also if load_balanced. Segments of queries and
                    keys must be the same tokens where a causal type, or a window, goes with lengths or offsets, and
                    with any bottom-right type: rows where they are not become NaN. Segment ids, and segments with a
                    window (all_gather: one that is not causal) become biases of b * (s / chunks) * (t / chunks)
                    numbers (all_gather: b * (s / chunks) * t), chunks = cp or 2 cp, and skip no block.
    attn_mask_type, window_size, softmax_type, softmax_offset, scale, deterministic, return_lse,
    context_checkpoint_name: as in `dot_product_attention`. The saved residuals are q, k, v, out and lse of the device.
    bias, mask, alibi_slopes, dropout_rate, logit_softcap, return_max_logit: refused, unless `axis` has one device:
                    nothing is cut then, and the call is `dot_product_attention`.

    Sums over devices, of partial results and of gradients, are f32. Returns as `dot_product_attention`; with
    return_lse a pair.
    Raises ValueError for an axis that the mesh lacks, that another part has, or whose devices do not divide s or t; for
    what is refused; and what `dot_product_attention` raises.
    Source: Ring Attention (https://arxiv.org/abs/2310.01889); Llama 3 (https://arxiv.org/abs/2407.21783), section
    3.3.2.
    """
    q, k, v = as_jax(q, k, v)
    op = context_parallel_attention.__name__
    cut = Cut.of(op, axis, strategy, load_balanced, batch_axis, head_axis)
    checked = check_options(context_parallel_attention, q, k, v, options, cut=cut, needs_rng=cut is None, warns=True)
    return run_attention(attention_plan((q, k, v), checked), (q, k, v))
