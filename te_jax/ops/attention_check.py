"""The arguments of `dot_product_attention`, checked and put into their plain forms."""

import math
from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp

from te_jax._check import (
    ARRAY,
    BOOL,
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
from te_jax.ops.attention_bias import alibi_bias
from te_jax.ops.attention_mask import MASK_TYPES, Band, SequenceDescriptor, either

BIAS_TYPES = ("no_bias", "pre_scale_bias", "post_scale_bias")
SOFTMAX_TYPES = ("vanilla", "off_by_one", "learnable")  # off-by-one is the same as off_by_one
MASK_TYPE = replace(one_of(*MASK_TYPES), text=f"one of {', '.join(MASK_TYPES)}")
BIAS_TYPE = NONE | one_of(*BIAS_TYPES, normalize=plain)
SOFTMAX_TYPE = one_of(*SOFTMAX_TYPES, normalize=plain)
_INTS = tuple_of(integer(), 2)
WINDOW = Kind(
    "None or (left, right), two ints, negative for open",
    lambda window: True,
    lambda window: window is None or _INTS.accepts(window),
)
_KEY = NONE | Kind("a jax.random key", ARRAY.is_type)
_SCALE = Kind(
    "None or a finite Python number (scale q for one that is traced)",
    lambda scale: number().accepts(scale),
)


@dataclass(frozen=True, eq=False)
class Options:
    """All arguments but q, k, v, the key and the implementation."""

    bias: jax.Array | None
    pre_scale: bool
    mask: jax.Array | None
    attn_mask_type: str
    band: Band
    window_size: tuple[int, int] | None
    softmax_type: str
    softmax_offset: jax.Array | None
    scale: float
    dropout_rate: float
    deterministic: bool
    sequence_descriptor: SequenceDescriptor | None
    return_max_logit: bool
    return_lse: bool
    seq_major: bool
    alibi_slopes: jax.Array | None

    @property
    def has_bias(self) -> bool:
        return self.bias is not None or self.alibi_slopes is not None

    def total_bias(self, s: int, t: int) -> jax.Array | None:
        """`bias` and that of ALiBi."""
        if self.alibi_slopes is None:
            return self.bias
        at, described = {}, self.sequence_descriptor
        if described is not None and self.band.bottom_right:
            queries, keys = (jnp.clip(x, 0, size) for x, size in zip(described.seqlens, (s, t)))
            at = dict(q_offset=keys - queries)
        elif self.band.bottom_right:
            at = dict(bottom_right=True)
        alibi = alibi_bias(self.alibi_slopes, s, t, **at)
        alibi = alibi if alibi.ndim == 4 else alibi[None]
        return alibi if self.bias is None else self.bias + alibi

    def masked(self) -> jax.Array | None:
        """True where `mask` hides a key; None without one."""
        return None if self.mask is None else jnp.asarray(self.mask) != 0

    def hidden(self, s: int, t: int) -> jax.Array | None:
        """True where a key is hidden, broadcastable to [b..., h, s, t]; None: nowhere."""
        described = self.sequence_descriptor
        if described is None:
            by_type = self.band.trimmed(s, t).hides_of(s, t)
        else:
            by_type = described.hides(self.band, s, t)[..., None, :, :]
        return either(by_type, self.masked())

    def offset(self, q) -> jax.Array | None:
        """What joins the softmax, as a logit: [h, 1, 1], or a number; None: nothing."""
        wide = jnp.promote_types(q.dtype, jnp.float32)
        if self.softmax_type == "learnable":
            return self.softmax_offset.astype(wide).reshape(-1, 1, 1)
        return jnp.zeros((1, 1, 1), wide) if self.softmax_type == "off_by_one" else None


def check_options(
    op, q, k, v, *, bias=None, mask=None, attn_mask_type="no_mask", attn_bias_type=None,
    softmax_type="vanilla", softmax_offset=None, scale=None, window_size=None, dropout_rate=0.0,
    dropout_rng=None, sequence_descriptor=None,
    deterministic=False, return_max_logit=False, return_lse=False, seq_major=False,
    context_checkpoint_name=None, needs_rng=True, alibi_slopes=None, name=None,
) -> Options:  # fmt: skip
    """Raises ValueError or TypeError that names `op` (or the caller's `name`), the argument, its value and the way
    out."""
    op = name or op
    _check_operands(op, q, k, v)
    batch, s, h, t = q.shape[:-3], q.shape[-3], q.shape[-2], k.shape[-3]
    check(op, "attn_mask_type", attn_mask_type, MASK_TYPE)
    _check_broadcast(op, "bias", bias, (*batch, h, s, t), "a floating", jnp.floating)
    _check_broadcast(op, "mask", mask, (*batch, h, s, t), "a bool or integer", jnp.bool_, jnp.integer)
    attn_bias_type = _bias_type(op, attn_bias_type, bias)
    if sequence_descriptor is not None:
        if not isinstance(sequence_descriptor, SequenceDescriptor):
            kind = type(sequence_descriptor).__name__
            raise TypeError(f"{op}: sequence_descriptor is a {kind}; pass a SequenceDescriptor, or use `mask`.")
        sequence_descriptor.check(op, batch, s, t)
    for argument, flag in (
        ("deterministic", deterministic),
        ("return_max_logit", return_max_logit),
        ("return_lse", return_lse),
        ("seq_major", seq_major),
    ):
        check(op, argument, flag, BOOL)
    check(op, "context_checkpoint_name", context_checkpoint_name, NONE | STRING)
    if alibi_slopes is not None:
        _check_alibi(op, alibi_slopes, len(batch), h, attn_bias_type, sequence_descriptor)
    window = _window(op, window_size)
    return Options(
        bias=bias,
        pre_scale=attn_bias_type == "pre_scale_bias",
        mask=mask,
        attn_mask_type=attn_mask_type,
        band=Band.of(MASK_TYPES[attn_mask_type], window),
        window_size=window,
        softmax_type=_softmax_type(op, softmax_type, softmax_offset, h),
        softmax_offset=softmax_offset,
        scale=_scale(op, scale, q.shape[-1]),
        dropout_rate=_dropout_rate(op, dropout_rate, dropout_rng, needs_rng),
        deterministic=bool(deterministic),
        sequence_descriptor=sequence_descriptor,
        return_max_logit=bool(return_max_logit),
        return_lse=bool(return_lse),
        seq_major=bool(seq_major),
        alibi_slopes=alibi_slopes,
    )


def _check_operands(op, q, k, v):
    for name, x in (("q", q), ("k", k), ("v", v)):
        check(op, name, x, ARRAY)
    shapes = (
        f"q[b..., s, h, d] is {tuple(q.shape)}, k[b..., t, g, d] {tuple(k.shape)}, v[b..., t, g, e] {tuple(v.shape)}"
    )
    for name, x in (("q", q), ("k", k), ("v", v)):
        if x.dtype not in (jnp.bfloat16, jnp.float16, jnp.float32, jnp.float64):
            raise TypeError(f"{op}: {name} is {x.dtype}; pass bfloat16, float16 or float32.")
        if x.dtype != q.dtype:
            raise TypeError(f"{op}: {name} is {x.dtype}, but q is {q.dtype}; cast them to one type.")
        if x.ndim < 3 or x.ndim != q.ndim:
            raise ValueError(f"{op}: {shapes}; pass the same number of axes, at least 3.")
    for axis, ours, theirs in (
        ("b...", q.shape[:-3], k.shape[:-3]),
        ("b...", q.shape[:-3], v.shape[:-3]),
        ("d", q.shape[-1], k.shape[-1]),
        ("t", k.shape[-3], v.shape[-3]),
        ("g", k.shape[-2], v.shape[-2]),
    ):
        if ours != theirs:
            raise ValueError(f"{op}: axis `{axis}` is {ours} here and {theirs} there: {shapes}; make both equal.")
    h, g = q.shape[-2], k.shape[-2]
    if g == 0 or h % g:
        raise ValueError(f"{op}: {h} query heads do not split into {g} groups: {shapes}; h must be a multiple of g.")


def _check_broadcast(op, name, x, shape, kind, *dtypes):
    """x is None, or has one of `dtypes` and broadcasts to `shape` (the last two axes of it, or all)."""
    if x is None:
        return
    if not hasattr(x, "dtype") or not any(jnp.issubdtype(x.dtype, d) for d in dtypes):
        got = getattr(x, "dtype", type(x).__name__)
        other = "bias" if name == "mask" else "mask"
        raise TypeError(f"{op}: {name} is {got}; pass {kind} array (the other kind goes into `{other}`).")
    want = f"[s, t] or [b..., h, s, t] = {list(shape)} with 1 where it broadcasts"
    if x.ndim not in (2, len(shape)):
        raise ValueError(f"{op}: {name} has shape {tuple(x.shape)}; pass {want}. Axes are not guessed.")
    if any(got not in (1, size) for got, size in zip(x.shape, shape[-x.ndim :])):
        raise ValueError(f"{op}: {name} has shape {tuple(x.shape)}, which does not broadcast; pass {want}.")


def _bias_type(op, given, bias) -> str | None:
    """`given` in lower case."""
    check(op, "attn_bias_type", given, BIAS_TYPE)
    kind = given and plain(given)
    if kind == "no_bias" and bias is not None:
        raise ValueError(f"{op}: attn_bias_type is 'no_bias', but bias has shape {tuple(bias.shape)}; leave one out.")
    if kind not in (None, "no_bias") and bias is None:
        raise ValueError(f"{op}: attn_bias_type is {kind!r}, but bias is None; pass a bias, or leave the type None.")
    return kind


def _check_alibi(op, slopes, batch_axes, h, bias_type, described):
    if not hasattr(slopes, "dtype") or not jnp.issubdtype(slopes.dtype, jnp.floating):
        got = slopes.dtype if hasattr(slopes, "dtype") else f"a {type(slopes).__name__}"
        raise TypeError(f"{op}: alibi_slopes is {got}; pass a floating array.")
    if tuple(slopes.shape) != (h,) or batch_axes != 1:
        raise ValueError(
            f"{op}: alibi_slopes has shape {tuple(slopes.shape)}, q {batch_axes} batch axes; pass [h], h = {h}, and "
            "q [b, s, h, d]."
        )
    if bias_type == "pre_scale_bias":
        raise ValueError(f"{op}: alibi_slopes are a bias of scaled logits; attn_bias_type 'pre_scale_bias' is not.")
    if described is not None and not described.starts_at_zero:
        raise ValueError(
            f"{op}: alibi_slopes with a sequence_descriptor of several segments a row; pass SequenceDescriptor."
            "from_seqlens, or a bias (`te_jax.ops.attention_bias.alibi_bias`)."
        )


def _softmax_type(op, kind, offset, h) -> str:
    check(op, "softmax_type", kind, SOFTMAX_TYPE)
    name = plain(kind)
    if (name == "learnable") != (offset is not None):
        given = "None" if offset is None else f"given, of shape {tuple(offset.shape)}"
        raise ValueError(f"{op}: softmax_type is {kind!r}, but softmax_offset is {given}; 'learnable' alone takes it.")
    if offset is None:
        return name
    if not jnp.issubdtype(offset.dtype, jnp.floating):
        raise TypeError(f"{op}: softmax_offset is {offset.dtype}; pass a floating array.")
    if tuple(offset.shape) not in ((h,), (h, 1, 1), (1, h, 1, 1)):
        raise ValueError(f"{op}: softmax_offset has shape {tuple(offset.shape)}; pass [h] or [1, h, 1, 1], h = {h}.")
    return name


def _window(op, window) -> tuple[int, int] | None:
    check(op, "window_size", window, WINDOW)
    return None if window is None else (int(window[0]), int(window[1]))


def _scale(op, scale, d) -> float:
    if scale is None:
        return 1.0 / math.sqrt(d) if d else 1.0
    check(op, "scale", scale, _SCALE)
    return float(scale)


def _dropout_rate(op, rate, rng, needs_rng) -> float:
    check(op, "dropout_rate", rate, RATE)
    check(op, "dropout_rng", rng, _KEY)
    if rate > 0 and rng is None and needs_rng:
        raise ValueError(f"{op}: dropout_rate is {rate}, but dropout_rng is None; pass a jax.random key.")
    return float(rate)


def warn_of_padding(op: str, mask_type: str, mask, described: SequenceDescriptor | None) -> None:
    """Warns, once, where a padding type has nothing that tells what is padding."""
    if MASK_TYPES[mask_type].padding and mask is None and described is None:
        warn_once(
            op,
            f"attn_mask_type is {mask_type!r}, but neither mask nor sequence_descriptor says what is padding, so "
            "nothing is; pass one of them, or a type without padding.",
        )
