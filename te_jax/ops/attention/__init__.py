"""Scaled dot-product attention: read api, options, plan, then what it says."""

import importlib
from typing import Any

from te_jax.ops.attention.api import dot_product_attention as dot_product_attention
from te_jax.ops.attention.api import dot_product_attention_kv_packed as dot_product_attention_kv_packed
from te_jax.ops.attention.api import dot_product_attention_packed as dot_product_attention_packed
from te_jax.ops.attention.mask import MASK_TYPES as MASK_TYPES
from te_jax.ops.attention.mask import Mask as Mask
from te_jax.ops.attention.mask import SequenceDescriptor as SequenceDescriptor
from te_jax.ops.attention.op import attention_bwd as attention_bwd
from te_jax.ops.attention.op import attention_fwd as attention_fwd
from te_jax.ops.attention.options import AttentionKeywords as AttentionKeywords
from te_jax.ops.attention.options import AttentionOptions as AttentionOptions
from te_jax.ops.attention.plan import AttentionChoice as AttentionChoice


def __getattr__(name: str) -> Any:
    """`explain_attention`, which answers for a layer and is one of `te_jax.layers`."""
    if name == "explain_attention":
        return importlib.import_module("te_jax.layers").explain_attention
    raise AttributeError(f"module 'te_jax.ops.attention' has no attribute {name!r}")
