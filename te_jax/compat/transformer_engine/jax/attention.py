"""`transformer_engine.jax.attention`: the enums of TransformerEngine, and its functions over te_jax's attention."""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from te_jax import sharding
from te_jax.compat._absent import GetAttr, absent
from te_jax.compat.transformer_engine.jax.flax.transformer import DotProductAttention
from te_jax.compat.transformer_engine_jax import (
    NVTE_Bias_Type,
    NVTE_Fused_Attn_Backend,
    NVTE_Mask_Type,
    NVTE_QKV_Format,
    NVTE_QKV_Layout,
    NVTE_Softmax_Type,
)
from te_jax.core.check import RATE, check, show, warn_once
from te_jax.layers import explain_attention
from te_jax.ops.attention import MASK_TYPES
from te_jax.ops.attention import SequenceDescriptor as SequenceDescriptor

__getattr__: GetAttr = absent("transformer_engine.jax.attention")


class AttnBiasType(Enum):
    """`attn_bias_type` of te_jax."""

    NO_BIAS = NVTE_Bias_Type.NVTE_NO_BIAS
    PRE_SCALE_BIAS = NVTE_Bias_Type.NVTE_PRE_SCALE_BIAS
    POST_SCALE_BIAS = NVTE_Bias_Type.NVTE_POST_SCALE_BIAS


class AttnMaskType(Enum):
    """`attn_mask_type` of te_jax."""

    NO_MASK = NVTE_Mask_Type.NVTE_NO_MASK
    PADDING_MASK = NVTE_Mask_Type.NVTE_PADDING_MASK
    CAUSAL_MASK = NVTE_Mask_Type.NVTE_CAUSAL_MASK
    PADDING_CAUSAL_MASK = NVTE_Mask_Type.NVTE_PADDING_CAUSAL_MASK
    CAUSAL_BOTTOM_RIGHT_MASK = NVTE_Mask_Type.NVTE_CAUSAL_BOTTOM_RIGHT_MASK
    PADDING_CAUSAL_BOTTOM_RIGHT_MASK = NVTE_Mask_Type.NVTE_PADDING_CAUSAL_BOTTOM_RIGHT_MASK

    @property
    def te_jax_name(self) -> str:
        """A name of te_jax.ops.attention.MASK_TYPES."""
        return "no_mask" if self is AttnMaskType.NO_MASK else self.name.removesuffix("_MASK").lower()

    def is_causal(self) -> bool:
        """Whether a query sees no key behind its position."""
        return MASK_TYPES[self.te_jax_name].causal

    def is_padding(self) -> bool:
        """Whether a mask or a descriptor says what is padding."""
        return MASK_TYPES[self.te_jax_name].padding

    def is_bottom_right(self) -> bool:
        """Whether the last query stands at the last key."""
        return MASK_TYPES[self.te_jax_name].bottom_right


class AttnSoftmaxType(Enum):
    """`softmax_type` of te_jax."""

    VANILLA_SOFTMAX = NVTE_Softmax_Type.NVTE_VANILLA_SOFTMAX
    OFF_BY_ONE_SOFTMAX = NVTE_Softmax_Type.NVTE_OFF_BY_ONE_SOFTMAX
    LEARNABLE_SOFTMAX = NVTE_Softmax_Type.NVTE_LEARNABLE_SOFTMAX

    @property
    def te_jax_name(self) -> str:
        """A `softmax_type` of te_jax."""
        return self.name.removesuffix("_SOFTMAX").lower()

    @classmethod
    def from_str(cls, softmax_type: str) -> "AttnSoftmaxType":
        """The member of te_jax's name "vanilla", "off_by_one" or "learnable"."""
        names = {member.te_jax_name: member for member in cls}
        if softmax_type not in names:
            raise ValueError(f"AttnSoftmaxType: softmax_type is {softmax_type!r}; pass one of {', '.join(names)}.")
        return names[softmax_type]


class QKVFormat(Enum):
    """The order of the axes: sequence first, batch first, or batch first with several segments per row."""

    SBHD = NVTE_QKV_Format.NVTE_SBHD
    BSHD = NVTE_QKV_Format.NVTE_BSHD
    THD = NVTE_QKV_Format.NVTE_THD


class QKVLayout(Enum):
    """`qkv_layout` of te_jax: which of query, key and value lie in one array."""

    BS3HD = NVTE_QKV_Layout.NVTE_BS3HD
    BSHD_BS2HD = NVTE_QKV_Layout.NVTE_BSHD_BS2HD
    BSHD_BSHD_BSHD = NVTE_QKV_Layout.NVTE_BSHD_BSHD_BSHD
    T3HD = NVTE_QKV_Layout.NVTE_T3HD
    THD_T2HD = NVTE_QKV_Layout.NVTE_THD_T2HD
    THD_THD_THD = NVTE_QKV_Layout.NVTE_THD_THD_THD

    @property
    def arrays(self) -> int:
        """How many arrays the layout has."""
        return self.name.count("_") + 1

    def get_qkv_format(self) -> QKVFormat:
        """BSHD or THD."""
        return QKVFormat.THD if self.is_thd() else QKVFormat.BSHD

    def is_qkvpacked(self) -> bool:
        """Whether query, key and value are one array."""
        return self.arrays == 1

    def is_kvpacked(self) -> bool:
        """Whether key and value are one array."""
        return self.arrays == 2

    def is_separate(self) -> bool:
        """Whether query, key and value are three arrays."""
        return self.arrays == 3

    def is_thd(self) -> bool:
        """Whether a row has several segments."""
        return self.name.startswith("T")

    def _with(self, arrays: int) -> "QKVLayout":
        return next(each for each in QKVLayout if each.is_thd() == self.is_thd() and each.arrays == arrays)

    def to_qkvpacked(self) -> "QKVLayout":
        """The layout of this format with one array."""
        return self._with(1)

    def to_kvpacked(self) -> "QKVLayout":
        """The layout of this format with key and value in one array."""
        return self._with(2)

    def to_separate(self) -> "QKVLayout":
        """The layout of this format with three arrays."""
        return self._with(3)


class CPStrategy(Enum):
    """`context_parallel_strategy` of te_jax, by name."""

    DEFAULT = 0
    ALL_GATHER = 1
    RING = 2


class ReorderStrategy(Enum):
    """Which tokens a device of context parallelism gets: two chunks, one from either end, or every n-th stripe.

    te_jax's attention knows only the first of them, so that `Striped` reorders data that only code of the user's
    own can attend to.
    """

    DualChunkSwap = 0
    Striped = 1


def canonicalize_attn_mask_type(attn_mask_type: str) -> AttnMaskType:
    """The member of a mask type of te_jax, in any of its spellings. Raises ValueError for another string."""
    if attn_mask_type not in MASK_TYPES:
        raise ValueError(f"attn_mask_type is {attn_mask_type!r}; pass one of {', '.join(MASK_TYPES)}.")
    kind = MASK_TYPES[attn_mask_type]
    return next(member for member in AttnMaskType if MASK_TYPES[member.te_jax_name] == kind)


# -- attention ---------------------------------------------------------------------------------------------------


def fused_attn(
    qkv: Sequence[jax.Array],
    bias: jax.Array | None,
    sequence_descriptor: SequenceDescriptor | jax.Array | None = None,
    seed: jax.Array | None = None,
    attn_bias_type: AttnBiasType = AttnBiasType.NO_BIAS,
    attn_mask_type: AttnMaskType = AttnMaskType.NO_MASK,
    qkv_layout: QKVLayout = QKVLayout.BSHD_BSHD_BSHD,
    softmax_type: AttnSoftmaxType = AttnSoftmaxType.VANILLA_SOFTMAX,
    scaling_factor: float | None = None,
    dropout_probability: float = 0.0,
    is_training: bool = True,
    max_segments_per_seq: int = 1,
    window_size: tuple[int, int] | None = None,
    context_parallel_strategy: CPStrategy = CPStrategy.DEFAULT,
    context_parallel_causal_load_balanced: bool = False,
    context_parallel_axis: str = "",
    context_checkpoint_name: str = "context",
    softmax_offset: jax.Array | None = None,
    stripe_size: int | None = None,
    score_mod: Any = None,
    score_mod_bprop: Any = None,
    score_mod_tensors: Any = None,
    score_mod_bprop_tensors: Any = None,
    *,
    mask: jax.Array | None = None,
) -> jax.Array:
    """Attention of `qkv`, (qkv,), (q, kv) or (q, k, v) as `qkv_layout` says, by `te_jax.flax.DotProductAttention`.

    sequence_descriptor: or a mask [b, 1, s, t] instead, True where a key is masked out. As in TransformerEngine, a mask
        counts only for the types with padding, and a warning says so. There it is exact, with holes and by head.
    seed: for dropout, which there is only with is_training: a key, an array of them, of which the first counts, or at
        least two words of 32 bits.
    softmax_offset: [1, h, 1, 1], of AttnSoftmaxType.LEARNABLE_SOFTMAX, or of OFF_BY_ONE_SOFTMAX instead of 0.
    context_parallel_causal_load_balanced: tokens are in the order of ReorderStrategy.DualChunkSwap, if an axis cuts
        them.
    mask: the name of `sequence_descriptor` in older code.

    Returns [b, s, h, dv]. Raises TypeError for strings and the like where an enum is due, ValueError for score_mod and
    what belongs to it, for stripe_size, for dropout without a seed and for a mask next to a sequence_descriptor, and
    what the module raises.
    """
    _check_enums(attn_bias_type, attn_mask_type, qkv_layout, softmax_type, context_parallel_strategy)
    _check_served(
        score_mod=score_mod, score_mod_bprop=score_mod_bprop, score_mod_tensors=score_mod_tensors,
        score_mod_bprop_tensors=score_mod_bprop_tensors, stripe_size=stripe_size,
    )  # fmt: skip
    descriptor, mask = _descriptor_or_mask(sequence_descriptor, mask, attn_mask_type)
    query, last = qkv[0], qkv[-1]
    softmax_type = _type_with_offset(softmax_type, softmax_offset)
    learnable = softmax_type is AttnSoftmaxType.LEARNABLE_SOFTMAX
    module = DotProductAttention(
        parent=None,  # A caller that is a module itself would own it.
        head_dim=query.shape[-1],
        num_attention_heads=query.shape[-2],
        num_gqa_groups=last.shape[-2],
        attention_dropout=dropout_probability,
        attn_mask_type=attn_mask_type.te_jax_name,
        attn_bias_type=attn_bias_type.name.lower(),
        qkv_layout=qkv_layout.name.lower(),
        scale_factor=scaling_factor,
        window_size=window_size,
        max_segments_per_seq=max_segments_per_seq,
        context_parallel_causal_load_balanced=context_parallel_causal_load_balanced and _is_cut(context_parallel_axis),
        context_parallel_axis=context_parallel_axis,
        context_parallel_strategy=context_parallel_strategy.name,
        context_checkpoint_name=context_checkpoint_name,
        softmax_type=softmax_type.te_jax_name,
    )
    variables = {"params": {"_FusedDotProductAttention_0": {"softmax_offset": softmax_offset}}} if learnable else {}
    descriptor = _first_segments(descriptor, max_segments_per_seq)
    return module.apply(
        variables, *qkv, *(None,) * (3 - len(qkv)), descriptor, bias, mask=mask, deterministic=not is_training,
        rngs=_rngs(seed, dropout_probability, is_training),
    )  # fmt: skip


_ENUMS = dict(
    attn_bias_type=AttnBiasType, attn_mask_type=AttnMaskType, qkv_layout=QKVLayout, softmax_type=AttnSoftmaxType,
    context_parallel_strategy=CPStrategy,
)  # fmt: skip


def _check_enums(*given: Any) -> None:
    """Raises TypeError for an argument that is no member of its enum; `given` in the order of `_ENUMS`."""
    for (name, enum), value in zip(_ENUMS.items(), given, strict=True):
        if not isinstance(value, enum):
            kind = f"pass a member of {enum.__name__}, such as {next(iter(enum))}"
            raise TypeError(f"fused_attn: {name} is {show(value)}; {kind}.")


def _rngs(seed, rate: float, is_training: bool) -> dict[str, jax.Array] | None:
    """The keys of a call. Raises ValueError where there is dropout, but no seed."""
    check("fused_attn", "dropout_probability", rate, RATE)
    if not is_training or rate == 0:
        return None
    if seed is None:
        raise ValueError(
            f"fused_attn: seed is None, but dropout_probability is {rate}; pass jax.random.key(number), or "
            "is_training=False."
        )
    return {"dropout": _dropout_key(seed)}


def _type_with_offset(softmax_type: AttnSoftmaxType, softmax_offset: jax.Array | None) -> AttnSoftmaxType:
    """The type whose offset is read: the 1 in OFF_BY_ONE_SOFTMAX's denominator is exp of an offset of 0."""
    if softmax_offset is None or not softmax_offset.size:
        return softmax_type
    if softmax_type is AttnSoftmaxType.VANILLA_SOFTMAX:
        warn_once("fused_attn", f"softmax_offset is given, which {softmax_type} ignores; leave it out.")
        return softmax_type
    return AttnSoftmaxType.LEARNABLE_SOFTMAX


def _descriptor_or_mask(sequence_descriptor, mask, attn_mask_type: AttnMaskType):
    """(descriptor or None, mask or None) of an argument with two names, of which older code has the second."""
    if mask is not None and sequence_descriptor is not None:
        raise ValueError(
            "fused_attn: mask and sequence_descriptor are one argument, and both are given; leave one out."
        )
    given = mask if sequence_descriptor is None else sequence_descriptor
    if isinstance(given, SequenceDescriptor):
        return given, None
    if given is not None and not attn_mask_type.is_padding():
        warn_once("fused_attn", f"a mask of {given.shape} is given, which {attn_mask_type} ignores; leave it out.")
        given = None
    return None, given


def _dropout_key(seed: jax.Array) -> jax.Array:
    """The key that a seed gives: the first of typed keys, or the first two words of other arrays."""
    words = jnp.asarray(seed).reshape(-1)
    if jnp.issubdtype(words.dtype, jax.dtypes.prng_key):
        return words[0]
    return jax.random.wrap_key_data(words[:2].astype(jnp.uint32), impl="threefry2x32")


def _check_served(**given: Any) -> None:
    for name, value in given.items():
        if value is not None:
            way_out = "use ReorderStrategy.DualChunkSwap" if name == "stripe_size" else "give a bias or a mask"
            raise ValueError(f"fused_attn: {name} is {value!r}, which te_jax does not have; {way_out}.")


def _is_cut(axis: str) -> bool:
    """Whether the mesh in force cuts the sequence along `axis`, "" for the cp_resource in force."""
    resource = sharding.current_mesh_resource()
    axis = axis or (resource and resource.cp_resource)
    return jax.sharding.get_abstract_mesh().shape.get(axis, 1) > 1


def _first_segments(descriptor: SequenceDescriptor | None, most: int) -> SequenceDescriptor | None:
    """The descriptor without the columns of lengths and offsets past `most` segments, of which the caller has none."""
    if descriptor is None or descriptor.seq_offsets is None:
        return descriptor
    cut = lambda pair, columns: tuple(each[..., :columns] for each in pair)
    return SequenceDescriptor.from_seqlens_and_offsets(
        cut(descriptor.seqlens, most), cut(descriptor.seq_offsets, most + 1)
    )


@dataclass(frozen=True)
class FusedAttnHelper:
    """The arguments of `is_fused_attn_kernel_available`."""

    is_training: bool
    q_dtype: jnp.dtype
    kv_dtype: jnp.dtype
    qkv_layout: QKVLayout
    attn_bias_type: AttnBiasType
    attn_mask_type: AttnMaskType
    softmax_type: AttnSoftmaxType
    dropout_probability: float
    q_num_heads: int
    kv_num_heads: int
    q_max_seqlen: int
    kv_max_seqlen: int
    head_dim_qk: int
    head_dim_v: int
    window_size: tuple[int, int] | None = None

    def is_fused_attn_kernel_available(self) -> bool:
        """Whether te_jax takes cuDNN for such attention, where there is a GPU; what it does not take it for is served
        in plain JAX."""
        kv = (1, self.kv_max_seqlen, self.kv_num_heads)
        struct = jax.ShapeDtypeStruct
        q = struct((1, self.q_max_seqlen, self.q_num_heads, self.head_dim_qk), self.q_dtype)
        k, v = (struct((*kv, d), self.kv_dtype) for d in (self.head_dim_qk, self.head_dim_v))
        biased = self.attn_bias_type is not AttnBiasType.NO_BIAS
        learnable = self.softmax_type is AttnSoftmaxType.LEARNABLE_SOFTMAX
        choice = explain_attention(
            q,
            k,
            v,
            bias=struct((1, self.q_num_heads, self.q_max_seqlen, self.kv_max_seqlen), self.q_dtype) if biased else None,
            attn_bias_type=self.attn_bias_type.name.lower(),
            attn_mask_type=self.attn_mask_type.te_jax_name,
            softmax_type=self.softmax_type.te_jax_name,
            softmax_offset=struct((self.q_num_heads,), jnp.float32) if learnable else None,
            window_size=self.window_size,
            dropout_rate=self.dropout_probability if self.is_training else 0.0,
            platform="cuda",
        )
        return choice.implementation in ("cudnn", "fp8")

    def get_fused_attn_backend(self) -> NVTE_Fused_Attn_Backend:
        """`is_fused_attn_kernel_available` as a member of TransformerEngine's enum."""
        found = self.is_fused_attn_kernel_available()
        return NVTE_Fused_Attn_Backend["NVTE_F16_arbitrary_seqlen" if found else "NVTE_No_Backend"]

    @staticmethod
    def is_non_deterministic_allowed() -> bool:
        """True: te_jax asks for deterministic gradients by an argument, and reads no environment variable for it."""
        return True


def is_fused_attn_kernel_available(*args: Any, **kwargs: Any) -> bool:
    """Whether te_jax takes cuDNN for attention with the fields of `FusedAttnHelper`, where there is a GPU."""
    return FusedAttnHelper(*args, **kwargs).is_fused_attn_kernel_available()


# -- orders and masks --------------------------------------------------------------------------------------------


def reorder_causal_load_balancing(
    tensor: jax.Array, strategy: ReorderStrategy, cp_size: int, seq_dim: int, stripe_size: int | None = None
) -> jax.Array:
    """`tensor` with its axis `seq_dim` in the order that balances causal attention over cp_size devices.

    stripe_size: of ReorderStrategy.Striped, how many tokens lie together; None is 1.

    Raises ValueError for a size that does not divide the axis, and for stripe_size with another strategy.
    """
    if _check_strategy("reorder_causal_load_balancing", strategy, stripe_size) is ReorderStrategy.Striped:
        return _exchange(tensor, seq_dim, (-1, cp_size, stripe_size or 1))
    return sharding.reorder_causal_load_balancing(tensor, cp_size, axis=seq_dim)


def inverse_reorder_causal_load_balancing(
    tensor: jax.Array, strategy: ReorderStrategy, cp_size: int, seq_dim: int, stripe_size: int | None = None
) -> jax.Array:
    """The inverse of `reorder_causal_load_balancing`."""
    name = "inverse_reorder_causal_load_balancing"
    if _check_strategy(name, strategy, stripe_size) is ReorderStrategy.Striped:
        return _exchange(tensor, seq_dim, (cp_size, -1, stripe_size or 1))
    return sharding.inverse_reorder_causal_load_balancing(tensor, cp_size, axis=seq_dim)


def _check_strategy(name: str, strategy, stripe_size) -> ReorderStrategy:
    if not isinstance(strategy, ReorderStrategy):
        raise TypeError(f"{name}: strategy is {strategy!r}; pass a ReorderStrategy.")
    if stripe_size is not None and (strategy is not ReorderStrategy.Striped or stripe_size < 1):
        raise ValueError(f"{name}: stripe_size is {stripe_size!r}; pass at least 1, only with ReorderStrategy.Striped.")
    return strategy


def _exchange(x, axis: int, shape: tuple[int, int, int]):
    """x with the first two of the three axes of `shape`, which make its `axis`, exchanged. One of the sizes is -1."""
    xp, axis = (np if isinstance(x, np.ndarray) else jnp), axis % x.ndim
    known = -shape[0] * shape[1] * shape[2]
    if x.shape[axis] % known:
        raise ValueError(f"axis {axis} has {x.shape[axis]} tokens, which {known} do not divide; pad the sequence.")
    parts = x.reshape(*x.shape[:axis], *shape, *x.shape[axis + 1 :])
    return xp.swapaxes(parts, axis, axis + 1).reshape(x.shape)


def run_length_fill(segment_ids: jax.Array) -> jax.Array:
    """i32 of the shape of segment_ids [..., s]: how many tokens the run has that a token is in; 0 where the id is 0."""
    ids = jnp.asarray(segment_ids)
    index, last = jnp.arange(ids.shape[-1]), ids.ndim - 1
    changes = ids[..., 1:] != ids[..., :-1]
    edge = jnp.ones((*ids.shape[:-1], 1), bool)
    begins, ends = jnp.concatenate([edge, changes], -1), jnp.concatenate([changes, edge], -1)
    first = jax.lax.cummax(jnp.where(begins, index, 0), axis=last)
    final = jax.lax.cummin(jnp.where(ends, index, ids.shape[-1]), axis=last, reverse=True)
    return jnp.where(ids == 0, 0, final - first + 1).astype(jnp.int32)


def make_swa_mask(
    segment_pos_q: jax.Array,
    segment_pos_kv: jax.Array,
    window_size: tuple[int, int] | None = None,
    dtype: DTypeLike = jnp.float32,
    segment_ids_q: jax.Array | None = None,
    segment_ids_kv: jax.Array | None = None,
) -> jax.Array:
    """[b, 1, s, t] of `dtype`: 1 where the window (left, right) around a query's position shows a key, else 0.

    Positions count from the start of a segment, or from its end where both ids are given; the right side is then open.
    A negative side, and a window of None, is open.
    """
    left, right = (None if side < 0 else side for side in window_size or (-1, -1))
    if segment_ids_q is not None and segment_ids_kv is not None:
        segment_pos_q = segment_pos_q - run_length_fill(segment_ids_q)
        segment_pos_kv = segment_pos_kv - run_length_fill(segment_ids_kv)
        right = None
    distance = (segment_pos_kv[..., None, :] - segment_pos_q[..., :, None])[..., None, :, :]
    seen = jnp.ones(distance.shape, bool)
    seen = seen if left is None else seen & (distance >= -left)
    return (seen if right is None else seen & (distance <= right)).astype(dtype)
