"""What the fields and call arguments of the modules may be, each declared once: for Linen and NNX, for errors, and for
the table in docs/fields.md, which tests/support/field_table.py writes.

A name means the same in every module, so `FIELDS` has it once, and a module hands it on by name (`shared_fields`). What
fields need of each other are the rules of a class. Names that are there only to be refused are in `_refused.py`.
"""

import dataclasses
import enum
import functools
import inspect
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, ClassVar

from flax import linen as nn

from te_jax.core.check import (
    ARRAY,
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
from te_jax.flax._refused import Refused
from te_jax.flax._state import describe
from te_jax.layers.experts.devices import EXCHANGE
from te_jax.ops.attention.options import BIAS_TYPE, DESCRIPTOR, MASK_ARRAY, MASK_TYPE, SOFTCAP, SOFTMAX_TYPE, WINDOW
from te_jax.ops.experts.router import SCORE_FUNCTIONS
from te_jax.ops.quantize.activation import ACTIVATIONS, check_params
from te_jax.ops.rope import METHOD, WINDOWS, Scaling, check_rotary
from te_jax.ops.ssm.scan import LIMIT
from te_jax.recipe import Recipe
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


_INIT = Kind("an initializer, f(key, shape, dtype) -> array", FUNCTION.is_type)
_AXES = tuple_of(NONE | STRING | tuple_of(STRING))
_LOGICAL_AXES = Kind("a tuple of logical axis names and None", _AXES.is_type, _AXES.is_in)
_POSITIVE, _SIZES = integer(1), tuple_of(integer(1))
_WIDTHS = Kind(
    "a positive int, or a tuple of them",
    lambda value: _POSITIVE.is_type(value) or (_SIZES.is_type(value) and all(map(_POSITIVE.is_type, value))),
)
_TWO_INTS = integer() | tuple_of(integer())
_PARAMS = Kind("a dict of their parameters", lambda value: isinstance(value, Mapping))
_SCALING = Kind(
    "None, LinearScaling, NTKScaling, Llama3Scaling or YarnScaling of te_jax.ops.rope",
    lambda value: value is None or isinstance(value, Scaling),
)
_EXPERTS = Kind("a dict of fields of MoEBlock", lambda value: isinstance(value, Mapping))
_MAMBA = Kind("a dict of fields of Mamba2", lambda value: isinstance(value, Mapping))
_DELTA = Kind("a dict of fields of GatedDeltaNet", lambda value: isinstance(value, Mapping))
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
    **_each(NONE | _POSITIVE, "group_topk linear_num_key_heads gate_rank"),
    **_each(EXCHANGE, "exchange"),
    **_each(integer(0), "num_shared_experts"),
    **_each(integer(2), "num_buckets"),
    **_each(NONE | _POSITIVE, "num_gqa_groups kv_channels norm_groups attention_chunk_size"),
    **_each(NONE | _POSITIVE, "kv_lora_rank q_lora_rank qk_nope_head_dim qk_rope_head_dim v_head_dim"),
    **_each(_TWO_INTS, "axis"),
    # numbers
    **_each(number(above=0), "epsilon layernorm_epsilon qk_norm_eps mscale residual_multiplier"),
    **_each(number(above=0), "time_step_min time_step_max time_step_floor"),
    **_each(LIMIT, "time_step_limit"),
    **_each(RATE, "attention_dropout hidden_dropout intermediate_dropout intermediate_dropout_rate drop_path"),
    **_each(NONE | number(), "low_rank_adaptation_alpha scale_factor"),
    **_each(NONE | RATE, "cross_drop_path"),
    **_each(NONE | number(above=0), "depth_scaling capacity_factor attn_logit_scale"),
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
    **_each(NONE | integer(), "ignore_index"),
    # switches
    **_each(BOOL, "use_bias enable_layernorm zero_centered_gamma return_layernorm_output return_bias"),
    **_each(BOOL, "input_layernorm output_layernorm apply_residual_connection_post_layernorm fuse_qkv_params"),
    **_each(BOOL, "enable_low_rank_adaptation enable_sequence_parallel scale_attn_logits scaled_query_init"),
    **_each(BOOL, "float32_logits float32_attention_logits return_max_logit deterministic_gradients"),
    **_each(BOOL, "enable_rotary_pos_emb cross_rotary_pos_emb enable_relative_embedding qk_norm_before_rope"),
    **_each(BOOL, "qk_norm_across_heads mlp_layernorm router_bias weights_before_experts shared_expert_gate"),
    **_each(BOOL, "parallel_attention_mlp parallel_shared_layernorm context_parallel_causal_load_balanced post_norms"),
    **_each(BOOL, "use_pre_softmax per_sequence_loss use_expert_bias use_conv_bias norm_before_gate"),
    **_each(BOOL, "allow_neg_eigval"),
    **_each(NONE | BOOL, "normalize_weights"),  # None: as the score function's papers do
    **_each(NONE | BOOL, "transpose_batch_sequence"),  # None: False, as older code spells it
    # names
    **_each(one_of("layernorm", "rmsnorm", normalize=norm_type), "layernorm_type"),
    **_each(NONE | one_of("rmsnorm", "layernorm", "l2normalization", normalize=norm_type), "qk_norm_type"),
    **_each(MASK_TYPE, "attn_mask_type self_attn_mask_type"),
    **_each(BIAS_TYPE, "attn_bias_type self_attn_bias_type"),
    **_each(SOFTMAX_TYPE, "softmax_type"),
    **_each(one_of(*LAYOUTS, normalize=str.lower), "qkv_layout"),
    **_each(one_of(*STRATEGIES, normalize=str.upper), "context_parallel_strategy"),
    **_each(one_of(*SCORE_FUNCTIONS), "score_function"),
    **_each(one_of(*LORA_SCOPES), "low_rank_adaptation_scope"),
    **_each(_LAYER_TYPE, "layer_type"),
    **_each(STRING, "dropout_rng_name intermediate_dropout_rng_name ffn1_ckpt_name ffn2_ckpt_name"),
    **_each(NONE | STRING, "context_checkpoint_name quantization_checkpoint_name context_parallel_axis"),
    # FP8
    **_each(NONE | _RECIPE, "recipe"),
    **_each(COLLECTION, "collection"),
    # parameters
    **_each(FLOATING, "dtype"),
    **_each(NONE | FLOATING, "params_dtype"),
    **_each(_INIT, "bias_init ln_bias_init embedding_init"),
    **_each(NONE | _INIT, "kernel_init scale_init mha_kernel_init mlp_kernel_init"),
    **_each(_LOGICAL_AXES, "kernel_axes kernel_axes_1 kernel_axes_2 bias_axes bias_axes_1 bias_axes_2"),
    **_each(_LOGICAL_AXES, "scale_axes ln_bias_axes embedding_axes gate_axes"),
    **_each(NONE | _LOGICAL_AXES, "input_axes layernorm_input_axes dot_input_axes dot_1_input_axes dot_2_input_axes"),
    # activations, positions
    **_each(ACTIVATIONS, "activations mlp_activations"),
    **_each(NONE | _PARAMS, "activation_params mlp_activation_params"),
    **_each(WINDOWS, "rotary_pos_emb_windows"),
    **_each(METHOD, "rotary_pos_emb_group_method"),
    **_each(NONE | integer(), "rotary_pos_emb_dim"),
    **_each(_SCALING, "rotary_pos_emb_scaling"),
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
        _WIDTHS.text, _WIDTHS.is_type, lambda value: _SIZES.accepts(as_tuple(value)) and as_tuple(value) != ()
    ),
}

_MASK = NONE | DESCRIPTOR | MASK_ARRAY

CALL: dict[str, Kind] = {
    **_each(BOOL, "deterministic decode norm_output return_input operands bidirectional"),
    **_each(NONE | _POSITIVE, "max_decode_length"),
    **_each(_POSITIVE, "q_seqlen k_seqlen"),
    **_each(BOOL | ARRAY, "residual"),
    **_each(_MASK, "mask attention_mask encoder_decoder_mask"),
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


# -- rules ------------------------------------------------------------------------------------------------------


def as_tuple(value) -> tuple[int, ...]:
    """An int, or a tuple or list of them, as a tuple."""
    return tuple(value) if isinstance(value, tuple | list) else (value,)


def widths_are_positive(module) -> str | None:
    """`features` are at least 1, and at least one."""
    features = as_tuple(module.features)
    if not _SIZES.accepts(features) or not features:
        return f"features is {features}; pass positive ints"


def last_axis_alone(module) -> str | None:
    """`axis` is the last one, -1."""
    if len(as_tuple(module.axis)) != 1:
        return f"axis is {module.axis!r}; this module contracts only the last axis: leave it -1"


def groups_divide_heads(module) -> str | None:
    """`num_gqa_groups` divides `num_attention_heads`."""
    heads, groups = module.num_attention_heads, module.num_gqa_groups
    if groups is not None and heads % groups:
        return f"num_attention_heads={heads} does not split into num_gqa_groups={groups}; pass a divisor of it"


def head_width_is_known(module) -> str | None:
    """`num_attention_heads` divides `hidden_size`, unless `kv_channels` or `kv_lora_rank` is given."""
    free = module.kv_channels is not None or module.kv_lora_rank is not None
    if not free and module.hidden_size % module.num_attention_heads:
        return (
            f"hidden_size={module.hidden_size} does not split into num_attention_heads={module.num_attention_heads}; "
            "pass a divisor, or kv_channels"
        )


def rotary_fields_fit(module) -> str | None:
    """`rotary_pos_emb_dim` and `rotary_pos_emb_scaling` need RoPE; it turns an even number of a head's channels."""
    if getattr(module, "kv_lora_rank", None) is not None:
        return None  # see `latent_widths_fit`
    decoder = getattr(module, "cross_rotary_pos_emb", False) and is_decoder(module)
    on = module.enable_rotary_pos_emb or decoder
    names = "enable_rotary_pos_emb" + (" or cross_rotary_pos_emb" if is_decoder(module) else "")
    for name in ("rotary_pos_emb_dim", "rotary_pos_emb_scaling"):
        if not on and getattr(module, name) is not None:
            return f"{name} is {getattr(module, name)!r}, but RoPE is off; set {names}, or leave {name} out"
    if not on:
        return None
    width, by = head_width(module), "head_dim" if hasattr(module, "head_dim") else "kv_channels"
    check_rotary(describe(module), width, module.rotary_pos_emb_dim, module.rotary_pos_emb_scaling, "rotary_pos_emb_")
    if width % 2:
        return f"RoPE is on, but a head has {width} channels; give it an even number of them, by {by}"


def logits_have_one_scale(module) -> str | None:
    """`attn_logit_scale` goes without `scale_attn_logits=False`."""
    if module.attn_logit_scale is not None and not module.scale_attn_logits:
        return (
            f"attn_logit_scale is {module.attn_logit_scale}, but scale_attn_logits is False, which is a scale of 1; "
            "leave one of them out"
        )


_LATENT_WIDTHS = ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
_NOT_LATENT = (
    "num_gqa_groups kv_channels fuse_qkv_params scale_attn_logits scaled_query_init rotary_pos_emb_dim qk_norm_type "
    "enable_relative_embedding self_attn_bias_type attn_logit_softcap attn_logit_scale attention_chunk_size "
    "attn_temperature"
).split()


def latent_widths_fit(module) -> str | None:
    """`kv_lora_rank`, `qk_nope_head_dim`, `qk_rope_head_dim` and `v_head_dim` are given, `qk_rope_head_dim` is even."""
    for name in _LATENT_WIDTHS:
        if getattr(module, name) is None:
            return f"{name} is None; pass all of {', '.join(_LATENT_WIDTHS)}"
    if module.qk_rope_head_dim % 2:
        return f"qk_rope_head_dim is {module.qk_rope_head_dim}, but RoPE turns pairs of channels; pass an even number"
    check_rotary(describe(module), module.qk_rope_head_dim, None, module.rotary_pos_emb_scaling, "rotary_pos_emb_")


def latent_attention_stands_alone(module) -> str | None:
    """`kv_lora_rank` makes self-attention a `MultiHeadLatentAttention`, in encoders: the other fields of that need it,
    and fields of other attention it has no use for."""
    changed = lambda name: getattr(module, name) != getattr(type(module), name)
    if module.kv_lora_rank is None:
        for name in filter(changed, (*_LATENT_WIDTHS, "q_lora_rank", "mscale")):
            return f"{name} is {getattr(module, name)!r}, but kv_lora_rank is None; pass both, or leave {name} out"
        return None
    if is_decoder(module):
        return (
            'kv_lora_rank is given, but layer_type is "decoder"; use "encoder" (with self_attn_mask_type "causal" for '
            "a language model): cross-attention has no latents"
        )
    for name in filter(changed, _NOT_LATENT):
        return f"{name} is {getattr(module, name)!r}, which attention with a kv_lora_rank has no use for; leave it out"
    if has_relative_embedding(module):
        return "relative_embedding is given, which attention with a kv_lora_rank has no use for; leave it out"
    return latent_widths_fit(module)


def qk_norm_fields_fit(module) -> str | None:
    """`qk_norm_eps`, `qk_norm_before_rope` and `qk_norm_across_heads` need `qk_norm_type`."""
    names = ("qk_norm_before_rope", "qk_norm_across_heads", "qk_norm_eps")
    changed = [name for name in names if getattr(module, name) != getattr(type(module), name)]
    if module.qk_norm_type is None and changed:
        name = changed[0]
        return f"{name} is {getattr(module, name)!r}, but qk_norm_type is None; pass 'rmsnorm', or leave {name} out"


def cross_fields_need_a_decoder(module) -> str | None:
    """`cross_window_size`, `cross_rotary_pos_emb` and `cross_drop_path` are only for a decoder; else a warning."""
    for name in ("cross_window_size", "cross_rotary_pos_emb", "cross_drop_path"):
        if getattr(module, name) and not is_decoder(module):
            text = f'{name} is {getattr(module, name)!r}, but layer_type is "encoder", which has no cross-attention'
            warn_unused(module, f'{text}; leave it out, or use "decoder"')


def activations_take_their_params(module) -> str | None:
    """The activation parameters are parameters of the activations that are named."""
    field = "activations" if hasattr(module, "activations") else "mlp_activations"
    params = field.replace("activations", "activation_params")
    check_params(describe(module), params, getattr(module, field), getattr(module, params))


def experts_take_the_place_of_the_mlp(module) -> str | None:
    """`moe` goes without `intermediate_dropout`, low-rank adaptation of the MLP and
    `apply_residual_connection_post_layernorm`."""
    adapted = LORA_SCOPES[module.low_rank_adaptation_scope][2] and f"{module.low_rank_adaptation_scope!r}"
    for name, value in (
        ("intermediate_dropout", module.intermediate_dropout),
        ("low_rank_adaptation_scope", adapted),
        ("apply_residual_connection_post_layernorm", module.apply_residual_connection_post_layernorm),
    ):
        if module.moe is not None and value:
            return f"{name} is {value}, which experts have not; leave it out, or moe"


def norms_in_front_are_there(module) -> str | None:
    """`input_layernorm` and `mlp_layernorm` stay True with `parallel_shared_layernorm`, `output_layernorm` and
    `apply_residual_connection_post_layernorm`, which say otherwise where norms are."""
    for name in ("input_layernorm", "mlp_layernorm"):
        for other in ("parallel_shared_layernorm", "output_layernorm", "apply_residual_connection_post_layernorm"):
            if not getattr(module, name) and getattr(module, other):
                return f"{name} is False, but {other} is True, which says where the norms are; leave one of them out"


def relative_embedding_is_a_bias(module) -> str | None:
    """`self_attn_bias_type` and relative embedding go together: the layer has no other bias."""
    on, kind = has_relative_embedding(module), module.self_attn_bias_type
    if module.enable_relative_embedding and module.relative_embedding is False:
        return "enable_relative_embedding is True, but relative_embedding is False; leave one of them out"
    if on and kind is not None and plain(kind) == "no_bias":
        return f"self_attn_bias_type is {kind!r}, but relative embedding is on; leave the type None"
    if not on and kind is not None and plain(kind) != "no_bias":
        return f"self_attn_bias_type is {kind!r}, but relative embedding is off; set it on, or leave the type None"


def parallel_layers_are_encoders(module) -> str | None:
    """`parallel_attention_mlp` is only for an encoder, with its norms before attention and MLP, not behind;
    `parallel_shared_layernorm` needs it."""
    if not module.parallel_attention_mlp:
        return module.parallel_shared_layernorm and (
            "parallel_shared_layernorm is True, but parallel_attention_mlp is False; set both, or neither: one after "
            "the other, attention and MLP cannot share a norm"
        )
    if is_decoder(module):
        return (
            'parallel_attention_mlp is True, but layer_type is "decoder"; use "encoder" (with self_attn_mask_type '
            '"causal" for a language model): cross-attention has no place in it'
        )
    for name in ("apply_residual_connection_post_layernorm", "output_layernorm", "post_norms"):
        if getattr(module, name):
            return (
                f"parallel_attention_mlp and {name} are both True; set one of them: a parallel layer has its norms "
                "before attention and MLP, its residual connection before the norms"
            )


# -- what follows from fields -----------------------------------------------------------------------------------


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
