"""What the fields and call arguments of the modules may be, each declared once: for Linen and NNX, for errors, and for
the table in docs/fields.md, which tests/support/field_table.py writes.

A name means the same in every module, so `FIELDS` has it once, and a module hands it on by name (`shared_fields`). What
fields need of each other are the rules of a class, in `_field_rules.py`. Names that are there only to be refused are in
`_refused.py`.
"""

import dataclasses
import enum
import functools
import inspect
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, ClassVar

from flax import linen as nn

from te_jax.core.check import (
    BOOL,
    FLOATING,
    FLOATS_ARRAY,
    FUNCTION,
    NONE,
    RATE,
    STRING,
    Kind,
    check,
    integer,
    number,
    one_of,
    plain,
    tuple_of,
    warn_once,
)
from te_jax.flax import _refused
from te_jax.flax._calls import KnownArguments
from te_jax.flax._keys import KEYS_VALUES_OF_CALL
from te_jax.flax._refused import Refused
from te_jax.flax._state import describe
from te_jax.layers.experts.devices import EXCHANGE
from te_jax.layers.loss.head import IGNORE_INDEX
from te_jax.ops.attention.options import BIAS_TYPE, DESCRIPTOR, MASK_ARRAY, MASK_TYPE, SOFTCAP, SOFTMAX_TYPE, WINDOW
from te_jax.ops.experts.router import SCORE_FUNCTIONS
from te_jax.ops.quantize.activation import ACTIVATIONS, PARAMS
from te_jax.ops.quantize.norm import KINDS
from te_jax.ops.rope import METHOD, WINDOWS, PositionSections, Scaling
from te_jax.ops.ssm.scan import LIMIT
from te_jax.recipe import Recipe
from te_jax.sharding.logical_axes import LOGICAL_AXES
from te_jax.state.fp8 import COLLECTION

LAYOUTS = ("bs3hd", "bshd_bs2hd", "bshd_bshd_bshd", "t3hd", "thd_t2hd", "thd_thd_thd")
STRATEGIES = {"DEFAULT": "default", "ALL_GATHER": "all_gather", "ALLGATHER": "all_gather", "RING": "ring"}
LORA_SCOPES = {  # scope -> (qkv projections, output projection, MLP)
    "none": (False, False, False),
    "all": (True, True, True),
    "qkv_proj": (True, False, False),
    "output_proj": (False, True, False),
    "mlp": (False, False, True),
    "exclude_qkv_proj": (False, True, True),
    "exclude_output_proj": (True, False, True),
    "exclude_mlp": (True, True, False),
}


class TransformerLayerType(enum.Enum):
    """What a `TransformerLayer` is; the strings are accepted too."""

    ENCODER = "encoder"  # self-attention and MLP
    DECODER = "decoder"  # with cross-attention between them


# -- kinds ------------------------------------------------------------------------------------------------------


def norm_type(name: str) -> str:
    """`layernorm_type` as "layernorm" or "rmsnorm", whatever its case, "-" and "_"."""
    return plain(name).replace("_", "")


INITIALIZER = Kind("an initializer, f(key, shape, dtype) -> array", FUNCTION.is_type)
_POSITIVE, POSITIVE_INTS = integer(1), tuple_of(integer(1))
_WIDTHS = Kind(
    "a positive int, or a tuple of them",
    lambda value: _POSITIVE.is_type(value) or (POSITIVE_INTS.is_type(value) and all(map(_POSITIVE.is_type, value))),
)
_TWO_INTS = integer() | tuple_of(integer())
_SCALING = Kind(
    "None, LinearScaling, NTKScaling, Llama3Scaling, YarnScaling or ProportionalScaling of te_jax.ops.rope",
    lambda value: value is None or isinstance(value, Scaling),
)
_SECTIONS = Kind(
    "None or PositionSections of te_jax.ops.rope", lambda value: value is None or isinstance(value, PositionSections)
)


def _fields_of(module: str) -> Kind:
    is_type = lambda value: isinstance(value, Mapping) and all(isinstance(name, str) for name in value)
    named = lambda value: {"name", "parent"} & {*value}
    hint = lambda value: "name and parent are the layer's to give" if is_type(value) and named(value) else ""
    return Kind(f"a dict of fields of {module}", is_type, lambda value: not named(value), hint)


_EXPERTS, _MAMBA, _DELTA = map(_fields_of, ("MoEBlock", "Mamba2", "GatedDeltaNet"))
_LAYER_TYPE = Kind(
    "one of ('encoder', 'decoder') or a TransformerLayerType",
    lambda value: isinstance(value, str | TransformerLayerType),
    lambda value: isinstance(value, TransformerLayerType) or value in [kind.value for kind in TransformerLayerType],
)
_RELATIVE = Kind(
    "a module as RelativePositionBiases is, None or False (enable_relative_embedding switches on T5's)",
    lambda value: value is None or isinstance(value, bool) or FUNCTION.is_type(value),
    lambda value: value is not True,
)
_RECIPE = Kind("a recipe, such as te_jax.recipe.DelayedScaling()", lambda value: isinstance(value, Recipe))
_REQUIRED = Kind(  # None, a default that stands before other fields, is a ValueError
    _POSITIVE.text, lambda value: value is None or _POSITIVE.is_type(value), _POSITIVE.accepts
)


def _each(kind: Kind, names: str) -> dict[str, Kind]:
    return dict.fromkeys(names.split(), kind)


FIELDS: dict[str, Kind] = {
    # sizes
    **_each(_WIDTHS, "features"),
    **_each(_REQUIRED, "head_dim num_attention_heads ssm_num_heads linear_num_value_heads"),
    **_each(_POSITIVE, "ssm_head_dim ssm_state_size ssm_num_groups linear_key_head_dim linear_value_head_dim"),
    **_each(integer(2, 4), "conv_width"),
    **_each(_POSITIVE, "hidden_size mlp_hidden_size intermediate_dim"),
    **_each(_POSITIVE, "low_rank_adaptation_dim max_segments_per_seq max_distance"),
    **_each(_POSITIVE, "num_experts num_experts_per_tok num_groups"),
    **_each(NONE | _POSITIVE, "group_topk linear_num_key_heads gate_rank latent_size"),
    **_each(EXCHANGE, "exchange"),
    **_each(integer(0), "num_shared_experts"),
    **_each(integer(2), "num_buckets"),
    **_each(NONE | _POSITIVE, "layer_input_size num_gqa_groups kv_channels norm_groups attention_chunk_size"),
    **_each(NONE | _POSITIVE, "kv_lora_rank q_lora_rank qk_nope_head_dim qk_rope_head_dim v_head_dim"),
    **_each(_TWO_INTS, "axis"),
    # numbers
    **_each(number(above=0), "epsilon layernorm_epsilon qk_norm_eps mscale residual_multiplier"),
    **_each(number(above=0), "time_step_min time_step_max time_step_floor"),
    **_each(LIMIT, "time_step_limit"),
    **_each(RATE, "attention_dropout hidden_dropout intermediate_dropout intermediate_dropout_rate drop_path"),
    **_each(NONE | number(), "low_rank_adaptation_alpha scale_factor"),
    **_each(NONE | RATE, "cross_drop_path"),
    **_each(NONE | number(above=0), "depth_scaling capacity_factor attn_logit_scale latent_norm_epsilon v_norm_eps"),
    **_each(number(), "scaling_factor"),
    **_each(number(least=0), "aux_loss_coeff z_loss_coeff"),
    **_each(tuple_of(integer(-3, 2)), "hidden_dropout_dims intermediate_dropout_dims"),
    **_each(tuple_of(integer()), "intermediate_hidden_dropout_dims"),
    **_each(SOFTCAP, "attn_logit_softcap"),
    **_each(NONE | tuple_of(number(above=0), 2), "attn_temperature"),
    **_each(WINDOW, "window_size cross_window_size"),
    # the loss
    **_each(RATE, "label_smoothing"),
    **_each(number(least=0), "z_loss"),
    **_each(NONE | number(above=0), "logit_softcap"),
    **_each(IGNORE_INDEX, "ignore_index"),
    # switches
    **_each(BOOL, "use_bias enable_layernorm zero_centered_gamma return_layernorm_output return_bias"),
    **_each(BOOL, "input_layernorm output_layernorm apply_residual_connection_post_layernorm fuse_qkv_params"),
    **_each(BOOL, "enable_low_rank_adaptation enable_sequence_parallel scale_attn_logits scaled_query_init"),
    **_each(BOOL, "float32_logits float32_attention_logits return_max_logit deterministic_gradients"),
    **_each(BOOL, "enable_rotary_pos_emb cross_rotary_pos_emb enable_relative_embedding qk_norm_before_rope"),
    **_each(BOOL, "qk_norm_across_heads mlp_layernorm router_bias weights_before_experts shared_expert_gate"),
    **_each(BOOL, "parallel_attention_mlp parallel_shared_layernorm context_parallel_causal_load_balanced post_norms"),
    **_each(BOOL, "use_pre_softmax per_sequence_loss use_expert_bias use_conv_bias norm_before_gate"),
    **_each(BOOL, "allow_neg_eigval attn_output_gate latent_rotary keys_as_values layer_scalar"),
    **_each(BOOL, "router_norm expert_scales mlp_next_to_experts"),
    **_each(NONE | BOOL, "normalize_weights"),  # None: as the score function's papers do
    **_each(NONE | BOOL, "transpose_batch_sequence"),  # None: False, as older code spells it
    # names
    **_each(one_of(*KINDS, normalize=norm_type), "layernorm_type"),
    **_each(NONE | one_of("rmsnorm", "layernorm", "l2normalization", normalize=norm_type), "qk_norm_type"),
    **_each(MASK_TYPE, "attn_mask_type self_attn_mask_type"),
    **_each(BIAS_TYPE, "attn_bias_type self_attn_bias_type"),
    **_each(SOFTMAX_TYPE, "softmax_type"),
    **_each(one_of(*LAYOUTS, normalize=str.lower), "qkv_layout"),
    **_each(one_of(*STRATEGIES, normalize=str.upper), "context_parallel_strategy"),
    **_each(one_of(*SCORE_FUNCTIONS), "score_function"),
    **_each(one_of(*LORA_SCOPES), "low_rank_adaptation_scope"),
    **_each(_LAYER_TYPE, "layer_type"),
    **_each(NONE | one_of("give", "take"), "kv_sharing"),
    **_each(STRING, "dropout_rng_name intermediate_dropout_rng_name ffn1_ckpt_name ffn2_ckpt_name"),
    **_each(NONE | STRING, "context_checkpoint_name quantization_checkpoint_name context_parallel_axis"),
    # FP8
    **_each(NONE | _RECIPE, "recipe"),
    **_each(COLLECTION, "collection"),
    # parameters
    **_each(FLOATING, "dtype"),
    **_each(NONE | FLOATING, "params_dtype"),
    **_each(INITIALIZER, "bias_init ln_bias_init embedding_init"),
    **_each(NONE | INITIALIZER, "kernel_init scale_init mha_kernel_init mlp_kernel_init"),
    **_each(LOGICAL_AXES, "kernel_axes kernel_axes_1 kernel_axes_2 bias_axes bias_axes_1 bias_axes_2"),
    **_each(LOGICAL_AXES, "scale_axes ln_bias_axes embedding_axes gate_axes"),
    **_each(NONE | LOGICAL_AXES, "input_axes layernorm_input_axes dot_input_axes dot_1_input_axes dot_2_input_axes"),
    # activations, positions
    **_each(ACTIVATIONS, "activations mlp_activations"),
    **_each(PARAMS, "activation_params mlp_activation_params"),
    **_each(WINDOWS, "rotary_pos_emb_windows"),
    **_each(METHOD, "rotary_pos_emb_group_method"),
    **_each(NONE | integer(), "rotary_pos_emb_dim"),
    **_each(_SCALING, "rotary_pos_emb_scaling"),
    **_each(_SECTIONS, "rotary_pos_emb_sections"),
    **_each(NONE | _EXPERTS, "moe"),
    **_each(NONE | _MAMBA, "ssm"),
    **_each(NONE | _DELTA, "delta"),
    **_each(one_of("head", "channel"), "gate"),
    **_each(one_of("both", "mixer", "mlp"), "sublayers"),
    **_each(_RELATIVE, "relative_embedding"),
    **_refused.FIELDS,
}

# The kinds of the sizes that the constructors of NNX take in addition to the fields, by annotation.
SIZES: dict[object, Kind] = {
    int: _POSITIVE,
    int | None: NONE | _POSITIVE,
    int | tuple[int, ...]: Kind(
        _WIDTHS.text, _WIDTHS.is_type, lambda value: POSITIVE_INTS.accepts(as_tuple(value)) and as_tuple(value) != ()
    ),
}

_MASK = NONE | DESCRIPTOR | MASK_ARRAY

CALL: dict[str, Kind] = {
    **_each(BOOL, "deterministic decode norm_output residual return_input operands bidirectional"),
    **_each(NONE | _POSITIVE, "max_decode_length"),
    **_each(_POSITIVE, "q_seqlen k_seqlen"),
    **_each(_MASK, "mask attention_mask encoder_decoder_mask"),
    **_each(KEYS_VALUES_OF_CALL, "keys_values"),
    **_each(NONE | FLOATS_ARRAY, "bias"),
    **_each(Kind("an array [..., H]", lambda x: True, lambda x: getattr(x, "ndim", 1) > 0), "inputs x"),
    **_refused.CALL,
}


def check_call(module: nn.Module, **arguments) -> None:
    """Raises TypeError or ValueError for a call argument that is not of its kind."""
    for name, value in arguments.items():
        _refuse(module, name, value, CALL[name])
        check(describe(module), name, value, CALL[name])


def _refuse(module: nn.Module, name: str, value, kind: Kind) -> None:
    """Raises ValueError, in the words of `_refused.py`, for a value of a name that is there only to be refused."""
    if isinstance(kind, Refused) and not kind.accepts(value):
        raise ValueError(f"{describe(module)}: {kind.error.format(name=name, value=value)}.")


def warn_unused(module: nn.Module, text: str) -> None:
    """Warns, once, of what was asked of `module` and has no effect."""
    warn_once(describe(module), f"{text}.")


# -- the modules ------------------------------------------------------------------------------------------------

Rule = Callable[["Module"], str | None]  # -> what is wrong with the fields; nothing: None, "" or False


class Module(KnownArguments):
    """A Flax module whose fields are checked when it gets its scope and so its path: a submodule where it is made, any
    other by `init` and `apply`.

    A class may name kinds of its own for names that mean something else there, and the rules between its fields; a
    rule's docstring stands in the docs.
    """

    # Annotations would make fields of them where it runs; without these a type checker has to guess their types.
    if TYPE_CHECKING:
        own_kinds: ClassVar[Mapping[str, Kind]]
        rules: ClassVar[tuple[Rule, ...]]
    else:
        own_kinds = {}  # field -> Kind
        rules = ()

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, kind in kinds_of(type(self)):
            _refuse(self, name, getattr(self, name), kind)
        if self.scope is not None:
            check_fields(self)


def check_fields(module: Module) -> None:
    """Raises TypeError or ValueError for a field that is not of its kind, and where a rule says no."""
    where = describe(module)
    for name, kind in kinds_of(type(module)):
        check(where, name, getattr(module, name), kind)
    for rule in module.rules:
        if text := rule(module):
            raise ValueError(f"{where}: {text}.")


@functools.lru_cache(256)  # `nn.remat` and others make classes
def kinds_of(cls: type[Module]) -> tuple[tuple[str, Kind], ...]:
    """(field, kind) of a module class. A field that a user's subclass adds has none, whatever its name."""
    kinds = FIELDS | cls.own_kinds
    bases = [base for base in cls.__mro__ if base.__module__.partition(".")[0] == __name__.partition(".")[0]]
    ours = kinds.keys() & {name for base in bases for name in inspect.get_annotations(base)}
    return tuple((field.name, kinds[field.name]) for field in dataclasses.fields(cls) if field.name in ours)


# -- what follows from fields -----------------------------------------------------------------------------------


def as_tuple(value) -> tuple[int, ...]:
    """An int, or a tuple or list of them, as a tuple."""
    return tuple(value) if isinstance(value, tuple | list) else (value,)


def shared_fields(module: Module, cls: type[Module]) -> dict:
    """The fields of `module` that mean the same in `cls`: fields of one name and one kind."""
    kinds = dict(kinds_of(type(module)))
    return {name: getattr(module, name) for name, kind in kinds_of(cls) if kinds.get(name) is kind}


def is_decoder(module) -> bool:
    """Whether `layer_type` of a module that has it says so."""
    return getattr(module, "layer_type", None) in (TransformerLayerType.DECODER, TransformerLayerType.DECODER.value)


def groups_of(module) -> int:
    """g, the heads of keys and values."""
    return module.num_gqa_groups or module.num_attention_heads


def head_width(module) -> int:
    """d, the channels of a head."""
    if hasattr(module, "head_dim"):
        return module.head_dim
    return module.kv_channels or module.hidden_size // module.num_attention_heads


def has_relative_embedding(module) -> bool:
    """Whether a `TransformerLayer` adds relative position biases."""
    return module.enable_relative_embedding or bool(callable(module.relative_embedding))
