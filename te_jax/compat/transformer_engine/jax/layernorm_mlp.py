"""`transformer_engine.jax.layernorm_mlp`."""

from collections.abc import Callable, Sequence
from typing import Any

import jax

from te_jax import layers
from te_jax.compat._absent import GetAttr, absent
from te_jax.compat._axes import resolve_logical_axes
from te_jax.compat._axes import with_sharding_constraint_by_logical_axes as constrain
from te_jax.compat._collective import CollectiveOpSet, noop_collective_op_set
from te_jax.compat.transformer_engine.jax.dense import check_collective
from te_jax.compat.transformer_engine.jax.layernorm import canonicalize_norm_type
from te_jax.compat.transformer_engine.jax.quantize.quantizer import QuantizerSet, layer_options, noop_quantizer_set
from te_jax.core.check import warn_once
from te_jax.core.policies import with_names

__getattr__: GetAttr = absent("transformer_engine.jax.layernorm_mlp")


def layernorm_mlp(
    x: jax.Array,
    gamma: jax.Array,
    beta: jax.Array | None,
    kernels: Sequence[jax.Array],
    biases: Sequence[jax.Array | None],
    norm_type: str,
    zero_centered_gamma: bool = False,
    epsilon: float = 1e-6,
    transpose_batch_sequence: bool = False,
    norm_input_axes: tuple[str, ...] | None = None,
    dot_1_input_axes: tuple[str, ...] | None = None,
    dot_2_input_axes: tuple[str, ...] | None = None,
    kernel_1_axes: tuple[str, ...] | None = None,
    kernel_2_axes: tuple[str, ...] | None = None,
    ffn1_ckpt_name: str = "ffn1",
    ffn2_ckpt_name: str = "ffn2",
    activation_type: Sequence[str | Callable[..., Any]] = ("gelu",),
    activation_params: dict[str, Any] | None = None,
    collective_op_sets: Sequence[CollectiveOpSet] = (noop_collective_op_set,) * 2,
    quantizer_sets: Sequence[QuantizerSet] = (noop_quantizer_set,) * 2,
) -> jax.Array:
    """The MLP of kernels [h, A, F] and [F, o] behind a norm (`te_jax.layers.layernorm_mlp`).

    transpose_batch_sequence and dot_1_input_axes are without effect: the norm's output is no array of its own in FP8.
    The recipe of both quantizer sets must be the same. What both products keep has the first set's `checkpoint_name`.
    """
    del transpose_batch_sequence, dot_1_input_axes
    for each in collective_op_sets:
        check_collective("layernorm_mlp", each)
    for name, given in (("kernels", kernels), ("biases", biases), ("quantizer_sets", quantizer_sets)):
        if len(given or ()) != 2:
            raise ValueError(
                f"layernorm_mlp: {name} has {len(given or ())} entries; pass one for each of the two products."
            )
    first, second = (layer_options("layernorm_mlp", each, "quantizer_sets") for each in quantizer_sets)
    if first["recipe"] != second["recipe"]:
        raise ValueError(
            f"layernorm_mlp: quantizer_sets have the recipes {first['recipe']} and {second['recipe']}; give both one."
        )
    if first["checkpoint"] != second["checkpoint"]:
        names = f"{first['checkpoint']!r} and {second['checkpoint']!r}"
        warn_once("layernorm_mlp", f"checkpoint_name of quantizer_sets is {names}; what both keep has the first.")
    metas = (first.pop("metas"), second["metas"])
    y = layers.layernorm_mlp(
        constrain(x, norm_input_axes),
        gamma,
        beta,
        constrain(kernels[0], kernel_1_axes),
        constrain(kernels[1], kernel_2_axes),
        *biases,
        activations=activation_type,
        activation_params=activation_params,
        norm=canonicalize_norm_type(norm_type),
        zero_centered_gamma=zero_centered_gamma,
        epsilon=epsilon,
        metas=None if metas[0] is None else metas,
        middle_name=ffn1_ckpt_name,
        middle_spec=resolve_logical_axes(dot_2_input_axes),
        **first,
    )
    return with_names(y, ffn2_ckpt_name)
