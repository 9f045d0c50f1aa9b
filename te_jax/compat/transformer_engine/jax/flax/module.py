"""`transformer_engine.jax.flax.module`."""

import jax
import jax.numpy as jnp

from te_jax.compat._absent import absent
from te_jax.compat.transformer_engine.jax.dense import grouped_dense
from te_jax.compat.transformer_engine.jax.quantize.quantizer import QuantizerSet
from te_jax.flax import DenseGeneral as DenseGeneral
from te_jax.flax import LayerNorm as LayerNorm
from te_jax.flax import LayerNormDenseGeneral as LayerNormDenseGeneral
from te_jax.flax import LayerNormMLP as LayerNormMLP
from te_jax.flax.dot_general import QuantizingModule
from te_jax.flax.dot_general import make_dot_general_cls as make_dot_general_cls
from te_jax.flax.dot_general import wrap_function_in_te_state_module as wrap_function_in_te_state_module
from te_jax.recipe import Recipe

__getattr__ = absent("transformer_engine.jax.flax.module")


class TransformerEngineBase(QuantizingModule):
    """The base of modules that call functions of `.dense` with quantizers of their own."""

    def generate_quantizer_set(self, *args, **kwargs) -> QuantizerSet:
        """As `te_jax.flax.dot_general.QuantizingModule.generate_quantizer_set`, whose arguments it takes; a pytree."""
        return QuantizerSet(**super().generate_quantizer_set(*args, **kwargs)._asdict())


def make_grouped_dense_cls(quantization_recipe: Recipe | None, quantization_checkpoint_name: str | None = None):
    """A module, not a class, which is called as `(x, kernel, group_sizes, **options)` and gives `grouped_dense` of them.

    quantization_recipe: None: that of the autocast in force. Any recipe is served; one with state has a scale for all
                         groups.
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
