"""`transformer_engine.jax.flax.module`."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn

from te_jax.compat._absent import GetAttr, absent
from te_jax.compat.transformer_engine.jax.dense import grouped_dense
from te_jax.compat.transformer_engine.jax.quantize.quantizer import QuantizerSet
from te_jax.core.check import FUNCTION, check
from te_jax.flax import DenseGeneral as DenseGeneral
from te_jax.flax import LayerNorm as LayerNorm
from te_jax.flax import LayerNormDenseGeneral as LayerNormDenseGeneral
from te_jax.flax import LayerNormMLP as LayerNormMLP
from te_jax.flax import dot_general as _dot_general
from te_jax.flax.dot_general import make_dot_general_cls as make_dot_general_cls
from te_jax.recipe import Recipe

__getattr__: GetAttr = absent("transformer_engine.jax.flax.module")


class TransformerEngineBase(_dot_general.QuantizingModule):
    """The base of modules that call functions of `.dense` with quantizers of their own."""

    def generate_quantizer_set(self, *args: Any, **kwargs: Any) -> QuantizerSet:
        """As `te_jax.flax.dot_general.QuantizingModule.generate_quantizer_set`, whose arguments it takes; a pytree."""
        return QuantizerSet(**super().generate_quantizer_set(*args, **kwargs)._asdict())


def wrap_function_in_te_state_module(
    f: Callable,
    quantization_recipe: Recipe | None,
    name: str | None = None,
    quantization_checkpoint_name: str | None = None,
) -> type[_dot_general.QuantizingModule]:
    """`te_jax.flax.wrap_function_in_te_state_module`, whose f gets quantizer sets that are pytrees."""
    check("wrap_function_in_te_state_module", "f", f, FUNCTION)

    @functools.wraps(f)
    def with_pytrees(generate, *args, **kwargs):
        generate_quantizer_set = lambda *given, **named: QuantizerSet(**generate(*given, **named)._asdict())
        return f(generate_quantizer_set, *args, **kwargs)

    name = f.__name__ if name is None else name
    return _dot_general.wrap_function_in_te_state_module(
        with_pytrees, quantization_recipe, name, quantization_checkpoint_name
    )


def make_grouped_dense_cls(
    quantization_recipe: Recipe | None, quantization_checkpoint_name: str | None = None
) -> type[nn.Module]:
    """A module, not a class, which is called as `(x, kernel, group_sizes, **options)` and gives their `grouped_dense`.

    quantization_recipe: None: the recipe of the autocast in force. Any recipe is served; one with state has a scale for
                         all groups.
    """

    def ragged_dot(generate_quantizer_set, x, kernel, group_sizes, **kwargs):
        return grouped_dense(x, kernel, group_sizes, quantizer_set=generate_quantizer_set(), **kwargs)

    return wrap_function_in_te_state_module(
        ragged_dot, quantization_recipe, quantization_checkpoint_name=quantization_checkpoint_name
    )()


def _normalize_axes(axes, ndim: int) -> tuple[int, ...]:
    return tuple(axis % ndim for axis in axes)


def _apply_low_rank_adaptation(x: jax.Array, axis, features, lora_a_kernel, lora_b_kernel, alpha) -> jax.Array:
    """x.A.B * (alpha / r): x [..., *C], A [*C, *G, r], B [*G, r, f] -> [..., *G, f]. The factor of alpha None is 1."""
    contracted, shared = "abcde"[: len(axis)], "ghijk"[: len(features) - 1]
    spec = f"...{contracted},{contracted}{shared}r,{shared}rf->...{shared}f"
    factor = 1.0 if alpha is None else alpha / lora_a_kernel.shape[-1]
    return jnp.einsum(spec, x, lora_a_kernel, lora_b_kernel) * factor
