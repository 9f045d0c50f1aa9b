"""What the modules of mixers with a state share: segments, caches, initial values, and what layers ask of them."""

import math
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn

from te_jax.core.check import ARRAY, NONE, check
from te_jax.core.types import align
from te_jax.flax._common import Initializer, lora_scope, parameter
from te_jax.flax._context import cutting_axis, tokens_of_device
from te_jax.flax._fields import check_call, has_relative_embedding, is_decoder
from te_jax.flax._projections import project_output
from te_jax.flax._state import describe, recipe_of
from te_jax.flax.attention import mask_of_rows
from te_jax.flax.cache import COLLECTION, INDEX, index_of_cache, lengths_of, variable_of_cache
from te_jax.flax.mha import check_decode, input_of
from te_jax.layers._sequence import SequenceCall
from te_jax.layers.gated_norm import gated_norm_dense, gated_rmsnorm, quantizes_gated_norm
from te_jax.ops.attention import Mask
from te_jax.ops.attention.options import DESCRIPTOR
from te_jax.sharding import W_NO_SHARD_AXES, W_TP_AXES
from te_jax.sharding.resource import is_manual

MIXERS = {"ssm": "Mamba2", "delta": "GatedDeltaNet"}
"""The fields of `TransformerLayer` that put a module instead of self-attention."""


def mixers_stand_alone(module: Any) -> str | None:
    """`ssm` and `delta`, of which a layer has at most one, and `sublayers` other than "both", are for an encoder
    without `parallel_attention_mlp`; `ssm` and `delta` go without `transpose_batch_sequence`,
    `context_parallel_causal_load_balanced`, relative embedding, `kv_lora_rank`, and a `self_attn_mask_type` that is not
    causal. A layer that is "mlp" has no mixer, one that is "mixer" no `moe`. Other fields of attention have no effect
    next to `ssm` or `delta`, and are not refused: the layers of a hybrid share them."""
    given = [name for name in MIXERS if getattr(module, name) is not None]
    if len(given) > 1:
        return f"{' and '.join(given)} are given, but a layer has one mixer; set one of them None"
    one = module.sublayers != "both"
    asked = f"sublayers is {module.sublayers!r}" if one else f"{(*given, '')[0]} is given"
    if (one or given) and (is_decoder(module) or module.parallel_attention_mlp):
        other = 'layer_type is "decoder"' if is_decoder(module) else "parallel_attention_mlp is True"
        return f"{asked}, but {other}; leave one of them out"
    for name, kind in (*((name, "mlp") for name in given), ("moe", "mixer")):
        if getattr(module, name) is not None and module.sublayers == kind:
            return f"{name} is given, but sublayers is {kind!r}, which has no use for it; set {name} None there"
    return _attention_fields_are_off(module, given[0]) if given else None


def _attention_fields_are_off(module, given):
    """What is on that the mixer of field `given` has not."""
    mixer = MIXERS[given]
    for name in ("transpose_batch_sequence", "context_parallel_causal_load_balanced"):
        if getattr(module, name):
            return f"{given} is given, but {name} is on, which {mixer} has not; leave one of them out"
    if has_relative_embedding(module):
        return f"{given} is given, but relative embedding is on, which {mixer} has not; leave one of them out"
    if module.kv_lora_rank is not None:
        return f"{given} is given, but kv_lora_rank is {module.kv_lora_rank}, of attention; set one of them None"
    if Mask.of_type(module.self_attn_mask_type).band.right != 0:
        return (
            f"{given} is given, but self_attn_mask_type is {module.self_attn_mask_type!r}; {mixer} is causal: use "
            '"causal" or "padding_causal"'
        )


# -- segments and states ----------------------------------------------------------------------------------------


def begin_call(
    module: nn.Module, inputs: Any, mask: Any, decode: bool, max_decode_length: int | None, **flags: bool
) -> tuple[jax.Array, SequenceCall]:
    """-> the inputs [b, s, H]; the call of a layer, without a state. flags: other arguments of the call. Raises what
    `Mamba2` raises of its arguments."""
    check_call(module, **flags)
    check_decode(module, decode, max_decode_length)
    inputs = input_of(module, "inputs", inputs)
    mask = mask_of_rows(module, mask, inputs.shape[0])
    axis = _axis_that_cuts(module, decode)
    segments, lengths = _segments_of_mask(module, mask, *inputs.shape[:2], decode, axis)
    return inputs, SequenceCall(describe(module), segments, None, lengths, decode, axis)


def _axis_that_cuts(module: nn.Module, decode: bool) -> str | None:
    """The mesh axis that cuts the sequence, in order, or None, as where only shapes count."""
    if decode:
        return None
    axis = cutting_axis(module)
    return None if module.is_initializing() else axis


def _segments_of_mask(
    module: nn.Module, mask: Any, b: int, s: int, decode: bool, axis: str | None
) -> tuple[jax.Array | None, jax.Array | None]:
    """-> the segments i32[b, s] of tokens, or None; the lengths i32[b] of rows that a cache is to know, or None.

    Raises ValueError for masks that are arrays, and for descriptors of other rows.
    """
    if mask is None:
        return None, None
    if ARRAY.accepts(mask):
        raise ValueError(
            f"{describe(module)}: mask is an array; the scan is causal, and knows only segments: pass a "
            "SequenceDescriptor, or None."
        )
    check(describe(module), "mask", mask, NONE | DESCRIPTOR)
    if decode:
        return None, lengths_of(module, mask, b, s)
    if module.is_initializing():  # in a `jax.shard_map` too, where no axis is known to cut
        return None, None
    inside = axis is not None and is_manual(axis)
    whole = s * jax.lax.axis_size(axis) if inside else s
    mask.check(describe(module), (b,), whole, whole)
    if mask.starts_at_zero:  # padding on the right: no token sees it
        return None, None
    ids = mask.tokens(whole, whole)[0][0].astype(jnp.int32)
    return tokens_of_device(ids, axis, s) if inside else ids, None


def states_in_cache(module: nn.Module, names: Sequence[str], shapes: Any, dtypes: Any, like: jax.Array) -> list[Any]:
    """The variables of the cache, 0 where this call makes them, of `like`'s mesh axes. Raises ValueError for a cache
    that is not mutable, of another shape, or that lacks some of them, TypeError for another dtype."""
    index_of_cache(module, names)

    def variable(name, shape, dtype):
        return variable_of_cache(module, name, lambda: align(jnp.zeros(shape, dtype), like)[0], shape, dtype)

    return [variable(*each) for each in zip(names, shapes, dtypes, strict=True)]


def write_states(module: nn.Module, states: Sequence[Any], new: Sequence[jax.Array], tokens: int) -> None:
    """The states behind a call of so many tokens, and their count, unless the module is initializing."""
    if not module.is_initializing():
        module.put_variable(COLLECTION, INDEX, module.get_variable(COLLECTION, INDEX) + tokens)
        for variable, value in zip(states, new, strict=True):
            variable.value = value


# -- parameters and the projection back -------------------------------------------------------------------------


def parameters_of_convs(
    module: nn.Module, channels: Mapping[str, int], whole: Collection[str]
) -> tuple[list[jax.Array], list[jax.Array | None]]:
    """Kernels [w, channels] and biases [channels], or None, of convolutions by name. whole: those that every device of
    tensor parallelism has."""
    axes = {name: W_NO_SHARD_AXES if name in whole else W_TP_AXES for name in channels}
    kernels = [
        parameter(module, f"{name}_conv_kernel", of_taps, (None, axes[name]), (module.conv_width, width))
        for name, width in channels.items()
    ]
    biases = [
        parameter(module, f"{name}_conv_bias", module.bias_init, (axes[name],), (width,))
        if module.use_conv_bias
        else None
        for name, width in channels.items()
    ]
    return kernels, biases


def project_gated_norm(
    module: nn.Module, y: Any, z: Any, gamma: Any, norm: dict[str, Any], inputs: Any, residual: Any
) -> jax.Array:
    """[b, s, H], as inputs, from the gated norm of y and z [b, s, h, p], whose arguments are `norm`. Under a recipe the
    norm is quantized where it is computed, unless an adapter reads it, too."""
    if lora_scope(module)[1] or not quantizes_gated_norm(y, z, gamma, norm["groups"], recipe_of(module, "out")):
        return project_output(module, gated_rmsnorm(y, z, gamma, **norm, name=describe(module)), inputs, residual)

    def multiply(joined, *weights, **options):
        return gated_norm_dense(joined.reshape(z.shape), z, gamma, *weights, **norm, **options)

    return project_output(module, y, inputs, residual, multiply)


# -- initial values ---------------------------------------------------------------------------------------------


def of_taps(key: jax.Array, shape: tuple[int, ...], dtype: Any) -> jax.Array:
    """As convolutions of each channel by itself begin: within 1 / sqrt(w)."""
    bound = 1 / math.sqrt(shape[0])
    return jax.random.uniform(key, shape, dtype, -bound, bound)


def of_decay(key: jax.Array, shape: tuple[int, ...], dtype: Any) -> jax.Array:
    """log(-A) with -A between 1 and 16, as in the paper's models."""
    return jnp.log(jax.random.uniform(key, shape, minval=1.0, maxval=16.0)).astype(dtype)


def of_step(module: Any) -> Initializer:
    """softplus of it is spread between the fields time_step_min and time_step_max, by its logarithm."""

    def init(key, shape, dtype):
        low, high = math.log(module.time_step_min), math.log(module.time_step_max)
        step = jnp.exp(jax.random.uniform(key, shape, minval=low, maxval=high))
        step = jnp.maximum(step, module.time_step_floor)
        return (step + jnp.log(-jnp.expm1(-step))).astype(dtype)  # The inverse of softplus.

    return init


def steps_are_in_order(module: Any) -> str | None:
    """`time_step_min` and `time_step_floor` are at most `time_step_max`."""
    if module.time_step_min > module.time_step_max:
        return f"time_step_min is {module.time_step_min}, above time_step_max={module.time_step_max}; swap them"
    if module.time_step_floor > module.time_step_max:
        return (
            f"time_step_floor is {module.time_step_floor}, above time_step_max={module.time_step_max}, so that all "
            "steps began there; pass a floor up to that"
        )
