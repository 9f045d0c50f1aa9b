"""What the models are made of: embeddings, a stack of layers, scanned or not, and the norm behind it."""

import dataclasses
import functools
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import linen as nn
from flax.traverse_util import flatten_dict, unflatten_dict
from jax.sharding import PartitionSpec

import te_jax.flax as te_flax
from te_jax.core.check import BOOL, FUNCTION, INTEGERS, NONE, Kind, check
from te_jax.core.types import on_explicit_mesh
from te_jax.flax._common import parameter
from te_jax.flax._fields import Module, warn_unused
from te_jax.flax._mixers import MIXERS
from te_jax.flax.kernels import KERNEL_COLLECTION
from te_jax.flax.moe import BIAS_COLLECTION, LOSSES
from te_jax.models.config import ModelConfig
from te_jax.models.rows import TokenRows, cut_by_context, mask_of_lengths, token_rows
from te_jax.sharding import BATCH_AXES, HIDDEN_AXES, SEQLEN_AXES, W_FSDP_AXES, W_NO_SHARD_AXES, W_TP_AXES
from te_jax.sharding import with_sharding_constraint_by_logical_axes as constrain
from te_jax.sharding.constraints import explicit_spec
from te_jax.state.fp8 import FP8_COLLECTION

# What each layer has of its own. The last three are of experts: the bias of the choice, terms of the loss, the loads.
_STACKED = (
    *("params", FP8_COLLECTION, KERNEL_COLLECTION, "cache", "wgrads", "_overwrite_with_gradient"),
    *(BIAS_COLLECTION, LOSSES, "intermediates"),
)
TABLE_INIT = nn.initializers.normal(0.02)
_TABLE = dict(num_buckets=32, max_distance=128)  # T5's


class Block(nn.Module):
    """One transformer layer, in the shape that `nn.scan` wants: (carry, ...) -> (carry, None), or the keys and values
    that the layer gives. given: keys and values of layers before it, by `_sharing_key`. layer_input: the layer's
    own."""

    fields: Mapping[str, Any]  # of the TransformerLayer
    deterministic: bool
    decode: bool = False
    max_decode_length: int | None = None

    @nn.compact
    def __call__(
        self,
        x: jax.Array,
        encoded: jax.Array | None,
        mask: Any,
        encoded_mask: Any,
        positions: jax.Array | None,
        table: jax.Array | None,
        given: Mapping[str, Any],
        layer_input: jax.Array | None,
    ) -> tuple[jax.Array, Any]:
        fields = dict(self.fields)
        if table is not None:
            fields["relative_embedding"] = _biases_of(table)
        if mask is None and fields.get("self_attn_mask_type") == "padding":
            fields["self_attn_mask_type"] = "no_mask"  # nobody said what is padding
        layer = te_flax.TransformerLayer(**fields)
        of_latents = layer.kv_lora_rank is not None
        turns = layer.latent_rotary if of_latents else layer.enable_rotary_pos_emb or layer.attn_temperature is not None
        several = positions is not None and positions.ndim == 3  # of a token, which a cache does not count
        more = dict(positions=positions) if turns and (several or not self.decode) else {}
        more |= {} if layer_input is None else dict(layer_input=layer_input)
        more |= dict(keys_values=given[_sharing_key(fields)]) if layer.kv_sharing == "take" else {}
        out = layer(
            x,
            encoded,
            mask,
            encoded_mask,
            deterministic=self.deterministic,
            decode=self.decode,
            max_decode_length=self.max_decode_length,
            **more,
        )
        return out if layer.kv_sharing == "give" else (out, None)


class Period(nn.Module):
    """The layers of one round of a pattern, `layer_0`, `layer_1`, ..., in the shape that `nn.scan` wants."""

    block: type[Block]  # or what `nn.remat` makes of it
    fields: tuple[Mapping[str, Any], ...]  # of the layers
    call: Mapping[str, Any]  # the other fields of each Block

    @nn.compact
    def __call__(self, x: jax.Array, *args: Any) -> tuple[jax.Array, None]:
        *args, inputs = args
        for index, fields in enumerate(self.fields):
            own = None if inputs is None else inputs[index]
            x, _ = self.block(fields, **self.call, name=f"layer_{index}")(x, *args, own)
        return x, None


class Place(NamedTuple):
    """Where a layer of a stack is."""

    path: str  # of its parameters
    index: int | None  # along their leading axis; None: they have none


def place_of_layer(config: ModelConfig, index: int, count: int, scan: bool) -> Place:
    """The place of layer `index` of a stack of `count`. With `scan` whole rounds of the pattern behind the first layers
    are in `layers`; what no round takes, and without it all, is `layer_0`, `layer_1`, ..."""
    period, behind = len(config.pattern) or 1, index - len(config.first)
    if not scan or behind < 0 or behind >= (count - len(config.first)) // period * period:
        return Place(f"layer_{index}", None)
    return Place("layers" if period == 1 else f"layers/layer_{behind % period}", behind // period)


def unscan(model: "Model", variables: Mapping[str, Any]) -> tuple["Model", dict[str, Any]]:
    """(model, variables) with `scan=False`: each layer of a stack has its own arrays, `layer_0`, ...

    variables: of the model, boxed or not: parameters, kernels in FP8 among them, FP8 state, a cache. The arrays are
               copies; `te_jax.hf.load(folder, scan=False)` has no stacks from the start.

    So a model generates faster: in a loop over layers XLA copies the weights of each, if they have 16
    bits, out of their stack for every token, and runs the kernels of each layer apart. A model without scan comes back
    as it is.

    Raises TypeError for what is no model of `te_jax.models` and for variables that are no mapping, ValueError for
    variables without stacks and for stacks of another number of layers than the model has.
    """
    name, config = "te_jax.models.unscan", model.config if isinstance(model, Model) else None
    check(name, "model", model, MODEL)
    check(name, "variables", variables, VARIABLES)
    if not model.scan:
        return model, dict(variables)
    first, period, flat = len(config.first), len(config.pattern) or 1, {}
    held_at = flatten_dict(variables).keys()
    if held_at and config.num_layers - first >= period and not any("layers" in path for path in held_at):
        raise ValueError(f"{name}: variables have no stack of `layers`; pass those of this model, which has scan=True.")
    for path, leaf in flatten_dict(variables).items():
        if "layers" not in path:
            flat[path] = leaf
            continue
        at = path.index("layers")
        count = (config.num_decoder_layers if "decoder" in path[:at] else None) or config.num_layers
        rounds, held = (count - first) // period, jax.tree.leaves(leaf)[0].shape[0]
        if held != rounds:
            raise ValueError(
                f"{name}: {'/'.join(path)} is a stack of {held}, but the model has {rounds} there; pass its variables."
            )
        place, inner = (0, path[at + 1 :]) if period == 1 else (int(path[at + 1].split("_")[-1]), path[at + 2 :])
        for i in range(rounds):
            flat[*path[:at], f"layer_{first + i * period + place}", *inner] = _of_layer(leaf, i)
    return model.clone(scan=False), unflatten_dict(flat)


def _of_layer(variable, index: int):
    """Entry `index` of a stacked variable: of an array, of a box with one, or of each array of a kernel in FP8."""

    def one(a):
        if not isinstance(a, nn.meta.AxisMetadata):
            return a[index]
        return a.replace_boxed(jax.tree.map(one, a.unbox())).remove_axis(0, {nn.PARTITION_NAME: None})

    return jax.tree.map(one, variable, is_leaf=lambda a: isinstance(a, nn.meta.AxisMetadata))


def _biases_of(table):
    """A function as `TransformerLayer.relative_embedding` wants one, of a table [h, buckets] that layers share."""
    module = te_flax.RelativePositionBiases(
        **_TABLE, num_attention_heads=table.shape[0], dtype=table.dtype, parent=None
    )

    def biases(*args, **options):
        return module.apply({"params": {"rel_embedding": table}}, *args, **options)

    return biases


OF_IMAGES = ("image_size", "patch_size", "image_channels", "pooling_head", "class_token", "num_labels")
_KINDS_OF_MODEL = {
    "config": Kind("a te_jax.models.ModelConfig", lambda config: isinstance(config, ModelConfig)),
    "remat_policy": NONE | FUNCTION,
    **dict.fromkeys(("scan", "remat", "embed_by_product"), BOOL),
}


def policies_are_of_remat(model: Any) -> str | None:
    """`remat_policy` needs `remat`."""
    if model.remat_policy is not None and not model.remat:
        return "remat_policy is given, but remat is False, so that everything is kept; pass remat=True, or leave it out"


def reads_its_config(model: Any) -> str | None:
    """What the config sets, the model reads."""
    for field in dataclasses.fields(ModelConfig):
        value = getattr(model.config, field.name)
        if field.name in model.unread and value != field.default:
            name = type(model).__name__
            article = "an" if name[0] in "AEIOU" else "a"
            return f"config.{field.name} is {value!r}, which {article} {name} does not read; leave it out"


class Model(Module):
    """What the models share.

    A token, position or token type that a table has no row for gives NaN, as in Flax's `nn.Embed`; -1 is the last row.
    What stands in padding, by `lengths`, is not read. Learned positions follow the tokens of a sequence that devices
    share, whose order the layers' fields `context_parallel_*` say.

    config:       the architecture.
    dtype:        of activations.
    params_dtype: of parameters.
    scan:         one layer is traced and compiled, whatever their number, and parameters, FP8 state and caches have a
                  leading axis of layers, in `layers`; for layers with a pattern one round of it, with one of rounds, in
                  `layers/layer_0`, `layers/layer_1`, ... The config's first layers, layers behind the last whole round,
                  and without scan all layers, are `layer_0`, `layer_1`, ..., each with its own.
    remat:        each layer keeps only its input, or what `remat_policy` names, for the backward pass.
    embed_by_product: embeddings are products with one-hot rows instead of a look-up. The gradient of a look-up is a
                  scatter, whose sums have no fixed order on a GPU; a product costs as much as a head.
    """

    config: ModelConfig
    dtype: jnp.dtype = jnp.bfloat16
    params_dtype: jnp.dtype = jnp.float32
    scan: bool = True
    remat: bool = False
    remat_policy: Any = None
    embed_by_product: bool = False

    if not TYPE_CHECKING:  # as `Module` says
        own_kinds, rules = _KINDS_OF_MODEL, (policies_are_of_remat, reads_its_config)
        unread = ()  # fields of `config`

    @property
    def dtypes(self) -> dict[str, Any]:
        return dict(dtype=self.dtype, params_dtype=self.params_dtype)

    transpose_batch_sequence = False

    @property
    def context_parallel_axis(self) -> str | None:
        """The order of tokens is one for all layers."""
        return self._of_layers("context_parallel_axis")

    @property
    def context_parallel_strategy(self) -> str:
        return self._of_layers("context_parallel_strategy")

    @property
    def context_parallel_causal_load_balanced(self) -> bool:
        return self._of_layers("context_parallel_causal_load_balanced")

    def _of_layers(self, name: str) -> Any:
        """A field of the first layer that has it, or its default."""
        layers = map(self.config.fields_of_layer, range(self.config.num_layers))
        return next((fields[name] for fields in layers if name in fields), getattr(te_flax.TransformerLayer, name))

    def _table(self, name: str, rows: int, split_rows: bool = False) -> jax.Array:
        axes = (W_TP_AXES if split_rows else W_NO_SHARD_AXES, W_FSDP_AXES)
        return parameter(self, name, TABLE_INIT, axes, (rows, self.config.hidden_size))

    def _rows(self, tokens: jax.Array, lengths: Any, decode: bool = False) -> TokenRows:
        return token_rows(self, tokens, lengths, counts=self.config.max_positions is not None, decode=decode)

    def _embed(self, embedding, rows: TokenRows, positions=None, token_types=None) -> jax.Array:
        """[b, s, H] of `dtype`, NaN for a token, position or type that the tables lack."""
        c, tokens = self.config, rows.tokens
        for name, value in dict(positions=positions, token_types=token_types).items():
            check(type(self).__name__, name, value, NONE | INTEGERS)
        x = look_up(self, embedding, tokens)
        if c.embedding_scale != 1.0:
            x = x * jnp.asarray(c.embedding_scale, self.dtype).astype(x.dtype)
        if c.max_positions is not None:
            learned = self._table("positions", c.max_positions)
            if positions is None and rows.whole > c.max_positions:
                raise ValueError(
                    f"{type(self).__name__}: {rows.whole} tokens, but max_positions is {c.max_positions}; pass "
                    "fewer, or positions."
                )
            s = tokens.shape[1]
            if positions is not None and positions.shape not in (tokens.shape, (1, s), (s,)):
                raise ValueError(
                    f"{type(self).__name__}: positions has the shape {positions.shape}; pass {tokens.shape}, as of "
                    "tokens."
                )
            at = rows.positions if positions is None else rows.of_tokens(positions)
            x = x + (gather_whole(learned)[: tokens.shape[1]] if at is None else _look_up(learned, at))
        if c.token_types:
            if token_types is not None and token_types.shape != tokens.shape:
                raise ValueError(
                    f"{type(self).__name__}: token_types has the shape {token_types.shape}; pass {tokens.shape}, as of "
                    "tokens."
                )
            kinds = jnp.zeros_like(tokens) if token_types is None else rows.of_tokens(token_types)
            x = x + _look_up(self._table("token_types", c.token_types), kinds)
        x = constrain(x.astype(self.dtype), (BATCH_AXES, SEQLEN_AXES, HIDDEN_AXES))
        return self._norm("embedding_norm", x) if c.embedding_norm else x

    def _norm(self, name: str, x):
        return te_flax.LayerNorm(**self.config.norm_fields(), **self.dtypes, name=name)(x)

    def _layers(
        self,
        x,
        fields,
        *,
        count=None,
        lengths=None,
        encoded=None,
        encoded_lengths=None,
        positions=None,
        layer_inputs=None,
        **call,
    ):
        """x [b, s, H] through the layers and the last norm. fields: index -> the fields of a TransformerLayer.
        layer_inputs: [layers, b, s, P], or None. call: fields of `Block`."""
        c, count = self.config, self.config.num_layers if count is None else count
        of = lambda index: {**fields(index), **self.dtypes}
        _check_order([of(index) for index in range(count)])
        if layer_inputs is None:
            _check_no_inputs([of(index) for index in range(count)])
        table = None
        if of(0).get("enable_relative_embedding"):
            biases = te_flax.RelativePositionBiases(
                **_TABLE, num_attention_heads=of(0)["num_attention_heads"], parent=None
            )
            shape = (biases.num_attention_heads, biases.num_buckets)
            table = parameter(self, "relpos_bias", biases.embedding_init, biases.embedding_axes, shape)
        x = x if call.get("decode") else cut_by_context(self, x)
        args = (encoded, mask_of_lengths(lengths), mask_of_lengths(encoded_lengths), positions, table)
        given: dict[str, Any] = {}
        own = lambda index: None if layer_inputs is None else layer_inputs[index]
        places = [place_of_layer(c, index, count, self.scan) for index in range(count)]
        scanned = [index for index, place in enumerate(places) if place.index is not None]
        _check_sharing([of(index) for index in range(count)], scanned)
        for index, place in enumerate(places):
            if place.index is None:
                x, kept = self._block()(of(index), **call, name=f"layer_{index}")(x, *args, given, own(index))
                given = given if kept is None else {**given, _sharing_key(of(index)): kept}
            elif index == scanned[0]:
                inputs = None if layer_inputs is None else layer_inputs[index : index + len(scanned)]
                x = self._scan_layers([of(i) for i in scanned], call, x, (*args, given), inputs)
        return self._norm("final_norm", x) if c.final_norm else x

    def _block(self, in_loop: bool = False):
        # A loop of XLA's keeps the second computation apart by itself.
        return nn.remat(Block, prevent_cse=not in_loop, policy=self.remat_policy) if self.remat else Block

    def _scan_layers(self, fields, call, x, args, inputs):
        """x through a loop over layers of these fields, whole rounds of the pattern. inputs: [layers, b, s, P], what
        each has for itself, or None."""
        block, period = self._block(in_loop=True), len(self.config.pattern) or 1
        scan = functools.partial(
            nn.scan,
            variable_axes=dict.fromkeys(_STACKED, 0),
            split_rngs={"params": True, "dropout": True},
            in_axes=(*[nn.broadcast] * len(args), 0),
            length=len(fields) // period,
            metadata_params={nn.PARTITION_NAME: None},
        )
        if period == 1:
            layers = scan(block)(fields[0], **call, name="layers")
        else:
            layers = scan(Period)(block, tuple(fields[:period]), call, name="layers")
        if inputs is not None and period > 1:
            inputs = inputs.reshape(len(fields) // period, period, *inputs.shape[1:])
        return layers(x, *args, inputs)[0]

    def _head(self, x, labels, embedding, reduction: str, bias=None):
        """Logits f32 of hidden states x [..., H], or the loss of labels. bias: [V], of the logits."""
        c = self.config
        kernel = embedding if c.tie_embeddings else self._table("head", c.vocab_size, split_rows=True)
        x = x if c.output_scale == 1.0 else x * jnp.asarray(c.output_scale, x.dtype)
        if bias is not None:  # one more channel, which is 1
            x = jnp.concatenate([x, jnp.ones_like(x[..., :1])], -1)
            kernel = jnp.concatenate([gather_whole(kernel), gather_whole(bias)[:, None].astype(kernel.dtype)], -1)
        head = te_flax.LMHead(c.vocab_size, logit_softcap=c.logit_softcap, **self.dtypes, name="lm_head")
        return head(x, labels, kernel=kernel, reduction=reduction)


_OF_SHARED_KEYS = (
    *("window_size", "attention_chunk_size", "enable_rotary_pos_emb"),
    *(f"rotary_pos_emb_{name}" for name in ("windows", "group_method", "dim", "scaling", "sections")),
)


def _sharing_key(fields: Mapping[str, Any]) -> str:
    """What layers that share keys and values have in common: what they see, and how keys are turned."""
    return str([fields.get(name) for name in _OF_SHARED_KEYS])


def _check_sharing(layers, scanned):
    """Raises ValueError for a layer that takes keys and values which no layer before it gives, and for one that gives
    them out of a loop over layers."""
    given = set()
    for index, fields in enumerate(layers):
        window, sharing = fields.get("window_size"), fields.get("kv_sharing")
        if sharing == "give" and index in scanned:
            raise ValueError(
                f"te_jax.models: layer {index} has kv_sharing='give', but is one of a loop over layers; put it into "
                "ModelConfig.first, or pass scan=False."
            )
        if sharing == "take" and _sharing_key(fields) not in given:
            raise ValueError(
                f"te_jax.models: layer {index} has kv_sharing='take' and window_size={window}, but no layer before it "
                "has 'give', this window and this RoPE; set that one's fields, or leave this one's out."
            )
        given |= {_sharing_key(fields)} if sharing == "give" else set()


def _check_order(layers):
    """Raises ValueError for attention over tokens in a balanced order next to mixers that have them in order."""
    if found := [name for fields in layers for name in MIXERS if fields.get(name) is not None]:
        for index, fields in enumerate(layers):
            if fields.get("context_parallel_causal_load_balanced") and fields.get("sublayers") != "mlp":
                raise ValueError(
                    f"te_jax.models: context_parallel_causal_load_balanced is True in layer {index}, but other layers "
                    f"have {found[0]}, whose devices have the tokens in order; leave one of them out."
                )


def _check_no_inputs(layers):
    """Raises ValueError for layers with inputs of their own, of a model that makes none."""
    for index, fields in enumerate(layers):
        if (size := fields.get("layer_input_size")) is not None:
            raise ValueError(
                f"te_jax.models: layer_input_size is {size} in layer {index}, but only a CausalLM has inputs of "
                "layers; leave it out of ModelConfig."
            )


VARIABLES = Kind("the variables of the model, a dict of collections", lambda value: isinstance(value, Mapping))
MODEL = Kind("a model of te_jax.models", lambda model: isinstance(model, Model))


def warn_of_causal_layers(model: Model) -> None:
    """Warns, once, of an encoder whose config does not say what tokens see, as layers are causal then."""
    fields = map(model.config.fields_of_layer, range(model.config.num_layers))
    if any(not {"self_attn_mask_type", *MIXERS} & each.keys() for each in fields):
        text = "config.layer has no self_attn_mask_type, so that no token sees those behind it, as in a decoder"
        warn_unused(model, f"{text}; pass 'no_mask' or 'padding' there, or 'causal', if that is meant")


def gather_whole(a: jax.Array) -> jax.Array:
    """The array, on a mesh of Explicit axes gathered on each device."""
    return jax.sharding.reshard(a, PartitionSpec(*[None] * a.ndim)) if on_explicit_mesh(jax.typeof(a)) else a


def _look_up(table, indices):
    """table [n, H], indices int[...] -> [..., H]: as `jnp.take`, which `nn.Embed` uses, -1 is the last row, and an
    index that no row has gives NaN, which has no gradient."""
    if not on_explicit_mesh(jax.typeof(table)):
        return jnp.take(table, indices, axis=0)
    spec = explicit_spec(jax.typeof(indices))
    sharding = PartitionSpec(*(spec or [None] * indices.ndim), None)
    return gather_whole(table).at[indices].get(mode="fill", out_sharding=sharding)


def look_up(model: Model, table: jax.Array, tokens: jax.Array) -> jax.Array:
    """The rows of table [n, H] of the tokens, NaN for one that has none."""
    return (_look_up_by_product if model.embed_by_product else _look_up)(table, tokens)


def _look_up_by_product(table, indices):
    """`_look_up` as a product, which is exact in f32 at the highest precision: one row times 1, plus zeros."""
    count = table.shape[0]
    if jnp.iinfo(indices.dtype).bits < 32:  # They might not hold `count`.
        indices = indices.astype(jnp.int32)
    places = jnp.where(indices < 0, indices + count, indices)
    rows = jnp.matmul(jax.nn.one_hot(places, count), gather_whole(table), precision=jax.lax.Precision.HIGHEST)
    return jnp.where(((places >= 0) & (places < count))[..., None], rows, jnp.nan)


def rows_at(x: jax.Array, at: jax.Array) -> jax.Array:
    """x [b, s, H], at int[b] -> [b, H], the rows of these tokens, NaN where there is none."""
    check("te_jax.models", "at", at, INTEGERS)
    if at.shape != x.shape[:1]:
        raise ValueError(f"te_jax.models: at has the shape {at.shape}; pass {x.shape[:1]}, a token of each row.")
    return jnp.take_along_axis(x, at[:, None, None], axis=1)[:, 0]
