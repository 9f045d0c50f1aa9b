"""The projections of MultiHeadAttention: to queries, keys and values by heads, and from the heads' output."""

import math
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import linen as nn
from jax.ad_checkpoint import checkpoint_name

from te_jax.core.types import on_explicit_mesh
from te_jax.flax._common import (
    Initializer,
    activation_axes,
    kernel_initializer,
    lora_scope,
    residual_axes,
    stack_kernels,
)
from te_jax.flax._fields import groups_of, shared_fields
from te_jax.flax._state import describe, recipe_of
from te_jax.flax.dense import DenseGeneral, LayerNormDenseGeneral
from te_jax.sharding import (
    BATCH_AXES,
    HEAD_AXES,
    HIDDEN_AXES,
    HIDDEN_TP_AXES,
    JOINED_AXES,
    SEQLEN_AXES,
    W_FSDP_AXES,
    W_JOINED_AXES,
    W_NO_SHARD_AXES,
    W_TP_AXES,
)
from te_jax.sharding import with_sharding_constraint_by_logical_axes as constrain
from te_jax.sharding.constraints import entries, place_axis, spec_of, split_over
from te_jax.sharding.logical_axes import gathered_axes

_COUNTS_OF_HEADS = "ssm_num_heads", "linear_num_value_heads", "num_attention_heads"  # fields that devices must divide
QKV, QUERY_KV, QUERY_KEY_VALUE = ("qkv",), ("query", "kv"), ("query", "key", "value")
QUERY_KEY = ("query", "key")  # whose keys are values too
QUERY = ("query",)  # keys and values are another module's
_GATE = "gate"  # the projection of attn_output_gate


class Projected(NamedTuple):
    """What the projections make of the inputs.

    arrays: by heads, as attention reads them: (qkv [b, s, 3, h, d],), or (query [b, s, h, d], kv [b, t, 2, g, d]), or
        (query, key [b, t, g, d], value [b, t, g, d]), or (query,) for keys and values of another module; with
        transpose_batch_sequence [s, b, ...].
    normed: the norm's output [b, s, H], or None.
    through: the inputs for the residual connection, whose gradient the norm's kernel adds; or None.
    gate: of attention's result, [b, s, h, d] or, with transpose_batch_sequence, [s, b, h, d]; None: it has none.
    """

    arrays: tuple[jax.Array, ...]
    normed: jax.Array | None
    through: jax.Array | None
    gate: jax.Array | None


def projection_names(module: nn.Module, inputs_q, inputs_kv) -> tuple[str, ...]:
    """The names of the projections that the fields ask for, or that the parameters have.

    Raises ValueError for parameters of another configuration, naming both.
    """
    self_attention = inputs_kv is None
    fusable = module.fuse_qkv_params and groups_of(module) == module.num_attention_heads and not module.keys_as_values
    fused = QKV if self_attention and fusable else QUERY_KV
    due = QUERY_KEY if module.keys_as_values else fused if module.fuse_qkv_params else QUERY_KEY_VALUE
    due = QUERY if module.kv_sharing == "take" else due
    held = tuple(name for name in ("qkv", *QUERY_KEY_VALUE, "kv") if module.has_variable("params", name))
    if module.is_initializing() or not held:
        return due
    if (gated := module.has_variable("params", _GATE)) != module.attn_output_gate:
        raise ValueError(
            f"{describe(module)}: attn_output_gate is {module.attn_output_gate}, but the parameters hold "
            f"{'a' if gated else 'no'} `{_GATE}`; pass the field that they were made with."
        )
    if set(held) == set(due):
        return due
    if held == QKV and fusable and inputs_kv.shape == inputs_q.shape:
        return QKV  # self-attention whose two arguments lost their identity on the way
    kind = "self-attention" if self_attention else "cross-attention"
    raise ValueError(
        f"{describe(module)}: the parameters hold {held}, but {kind} with "
        f"fuse_qkv_params={module.fuse_qkv_params}, keys_as_values={module.keys_as_values}, "
        f"kv_sharing={module.kv_sharing!r}, "
        f"num_attention_heads={module.num_attention_heads}, num_gqa_groups={groups_of(module)} reads {due}. "
        "Pass inputs_kv=None for self-attention, or the fields that the parameters were made with."
    )


def project(module: nn.Module, names, inputs_q, inputs_kv, norm_output: bool, residual: bool) -> Projected:
    """The projections `names` of inputs_q [b, s, H] and inputs_kv [b, t, Hk]; None is self-attention.

    norm_output, residual: whether `normed` and `through` are wanted.
    """
    each = _fields_by_name(module)
    fields = {name: each[name] for name in (*names, *((_GATE,) if module.attn_output_gate else ()))}
    products, normed, through = project_normed(module, fields, inputs_q, inputs_kv, norm_output, residual)
    arrays = tuple(by_heads(module, name, x, module.head_dim) for name, x in zip(fields, products))
    arrays, gate = (arrays[:-1], arrays[-1]) if module.attn_output_gate else (arrays, None)
    return Projected((*arrays, arrays[1]) if names == QUERY_KEY else arrays, normed, through, gate)


def project_normed(module: nn.Module, fields: dict[str, dict], inputs_q, inputs_kv, norm_output: bool, residual: bool):
    """-> the products of the projections `fields` (name: the fields of its module), the first of which has the norm of
    inputs_q, and `normed` and `through` of `Projected`. The others but the gate are of inputs_kv; None: of the norm."""
    norm = dict(
        enable_layernorm=module.input_layernorm,
        epsilon=module.layernorm_epsilon,
        scale_axes=(W_NO_SHARD_AXES,),
        ln_bias_axes=(W_NO_SHARD_AXES,),
        layernorm_input_axes=residual_axes(module),
        dot_input_axes=activation_axes(module, BATCH_AXES, SEQLEN_AXES, HIDDEN_AXES),
    )
    shared = shared_fields(module, LayerNormDenseGeneral) | norm
    name, *rest = fields
    others = {other: DenseGeneral(**fields[other], name=other) for other in rest}
    of_norm = [other for other in others if inputs_kv is None or other == _GATE]
    # Several projections of one norm: it is quantized once, and under FP8 not even written.
    alike = len({recipe_of(module, reader) for reader in (name, *of_norm)}) == 1
    share = bool(of_norm) and alike and not lora_scope(module)[0]
    also = [others[other](inputs_q, operands=True) for other in of_norm] if share else ()
    if of_norm and (norm_output or not share):
        shared["return_layernorm_output"] = True
    first = LayerNormDenseGeneral(**shared | fields[name], name=name)
    products, normed, *through = first(inputs_q, return_input=residual, also=also)
    made = dict(zip((name, *of_norm), products)) if share else {name: products}
    made |= {other: others[other](normed if other in of_norm else inputs_kv) for other in rest if other not in made}
    return [made[each] for each in fields], normed, through[0] if through else None


def _fields_by_name(module) -> dict[str, dict]:
    """The fields of each projection's module, by its name."""
    of_heads, of_groups = module.num_attention_heads * module.head_dim, groups_of(module) * module.head_dim
    each = kernel_initializer(module.kernel_init, distribution="normal")
    draw_query = _divide_init(each, math.sqrt(module.head_dim)) if module.scaled_query_init else each
    shared = shared_fields(module, DenseGeneral) | dict(enable_low_rank_adaptation=lora_scope(module)[0])
    joined = dict(kernel_axes=(W_FSDP_AXES, W_JOINED_AXES, W_TP_AXES), bias_axes=(W_JOINED_AXES, W_TP_AXES))
    single = dict(kernel_axes=(W_FSDP_AXES, W_TP_AXES), bias_axes=(W_TP_AXES,))
    own = dict(
        qkv=dict(features=(3, of_heads), kernel_init=_stack_inits(draw_query, each, each), **joined),
        query=dict(features=of_heads, kernel_init=draw_query, **single),
        gate=dict(features=of_heads, kernel_init=each, **single),
        kv=dict(features=(2, of_groups), kernel_init=_stack_inits(each, each), **joined),
        key=dict(features=of_groups, kernel_init=each, **single),
        value=dict(features=of_groups, kernel_init=each, **single),
    )
    return {name: shared | fields for name, fields in own.items()}


@partial(jax.checkpoint, prevent_cse=False)  # Keeps its operands, and no sigmoid in f32.
def gate_output(context: jax.Array, gate: jax.Array) -> jax.Array:
    """Attention's result [b, s, h, d] times sigmoid(gate), rounded once."""
    wide = jnp.promote_types(context.dtype, jnp.float32)
    return (context.astype(wide) * jax.nn.sigmoid(gate.astype(wide))).astype(context.dtype)


def project_output(module: nn.Module, context, inputs_q, residual, multiply=None):
    """The last projection, context [b, s, h, d] -> [b, s, H], as inputs_q; with `residual` added if it is not None.

    multiply: as in `DenseGeneral`.
    """
    context = context.reshape(*context.shape[:2], math.prod(context.shape[2:]))
    context = constrain(context, activation_axes(module, BATCH_AXES, SEQLEN_AXES, HIDDEN_TP_AXES))
    outside, whole = residual_axes(module), activation_axes(module, BATCH_AXES, SEQLEN_AXES, HIDDEN_AXES)
    own = dict(
        features=inputs_q.shape[-1],
        kernel_init=kernel_initializer(module.kernel_init, distribution="normal"),
        kernel_axes=(W_TP_AXES, W_FSDP_AXES),
        bias_axes=(W_NO_SHARD_AXES,),
        enable_low_rank_adaptation=lora_scope(module)[1],
    )
    dense = DenseGeneral(**shared_fields(module, DenseGeneral) | own, name="out")
    axes = dict(grad_axes=gathered_axes(outside, whole), out_axes=outside)
    out = dense(context, residual=residual, out=inputs_q, **axes, multiply=multiply)
    return checkpoint_name(constrain(out, outside), "out_proj")


# -- heads ------------------------------------------------------------------------------------------------------


def by_heads(module, name: str, x, width: int):
    """x [b, s, heads*d] or [b, s, n, heads*d] of projection `name`, d = width -> [..., heads, d], placed by the logical
    axes.

    Where the devices of tensor parallelism do not divide the heads, as may be with heads of keys and values, x is whole
    on every device. ValueError where they do not divide the heads of queries either.
    """
    joined, heads = x.ndim == 4, x.shape[-1] // width
    x = checkpoint_name(x, f"combined_{name}_proj" if joined else f"{name}_proj")
    names, devices = split_over(x, -1)
    shape = (*x.shape[:-1], heads, width)
    if heads % devices == 0:
        axes = (BATCH_AXES, SEQLEN_AXES, *((JOINED_AXES,) if joined else ()), HEAD_AXES, HIDDEN_AXES)
        return constrain(x.reshape(shape), activation_axes(module, *axes))
    field = next(name for name in _COUNTS_OF_HEADS if hasattr(module, name))
    if (count := getattr(module, field)) % devices:
        raise ValueError(
            f"{describe(module)}: {field} is {count}, but tensor parallelism over the mesh axes "
            f"{names} has {devices} devices; use a multiple of {devices} heads, or fewer devices."
        )
    return place_axis(x, -1, ()).reshape(shape)


def spread_over_heads(x, like):
    """x [b, t, 1, c] for each head of like [b, t, h, ...]: [b, t, h, c], placed as these heads are."""
    shape, aval = (*like.shape[:-1], x.shape[-1]), jax.typeof(like)
    if not on_explicit_mesh(aval):
        return place_axis(jnp.broadcast_to(x, shape), -2, split_over(like, -2)[0])
    # The one head may lie otherwise, as under sequence parallelism. It crosses devices, and so does the sum over heads
    # of its gradient, for which the broadcast has to be sharded where it is made.
    x = jax.sharding.reshard(x, spec_of((*entries(aval)[:-2], (), ())))
    spec = spec_of((*entries(aval)[:-1], ()))
    return jax.lax.broadcast_in_dim(x, shape, range(x.ndim), out_sharding=spec)


# -- initial values ---------------------------------------------------------------------------------------------


def _stack_inits(*inits: Initializer) -> Initializer:
    """One initializer of n kernels as [in, n, out]. Each has a key of its own and is drawn as (in, out): fan-in is
    `in`."""

    def init(key, shape, dtype):
        keys = jax.random.split(key, len(inits))
        each = (shape[0], shape[-1])
        return stack_kernels([draw(k, each, dtype) for draw, k in zip(inits, keys)], -2, W_JOINED_AXES)

    return init


def _divide_init(init: Initializer, by: float) -> Initializer:
    return lambda key, shape, dtype: jax.tree.map(lambda x: x / by, init(key, shape, dtype))  # in a box or not
