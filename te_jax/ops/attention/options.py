"""What attention is asked for: the keywords of the public functions, and the one value that they become."""

import inspect
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields, replace
from typing import Annotated, Any, TypedDict

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from te_jax.core.check import (
    ARRAY,
    BOOL,
    NONE,
    RANDOM_KEY,
    RATE,
    STRING,
    Kind,
    array_of,
    check,
    check_names,
    integer,
    number,
    one_of,
    plain,
    tuple_of,
    warn_once,
)
from te_jax.ops.attention.bias import alibi_bias
from te_jax.ops.attention.mask import MASK_TYPES, Band, Mask, SequenceDescriptor, mask_type
from te_jax.ops.attention.mesh import Cut

BIAS_TYPES = ("no_bias", "pre_scale_bias", "post_scale_bias")
SOFTMAX_TYPES = ("vanilla", "off_by_one", "learnable")  # off-by-one is the same as off_by_one
MASK_TYPE = replace(one_of(*MASK_TYPES, normalize=plain), text=f"one of {', '.join(MASK_TYPES)}")
BIAS_TYPE = NONE | one_of(*BIAS_TYPES, normalize=plain)
SOFTMAX_TYPE = one_of(*SOFTMAX_TYPES, normalize=plain)
_INTS = tuple_of(integer(), 2)
WINDOW = Kind(
    "None or (left, right), two ints, negative for open",
    lambda window: True,
    lambda window: window is None or _INTS.accepts(window),
)
MASK_ARRAY = array_of(jnp.bool_, jnp.integer, text="a bool or integer array, True where a key is masked out")
DESCRIPTOR = Kind("a SequenceDescriptor", lambda value: isinstance(value, SequenceDescriptor))
_SCALE = Kind(
    "None or a finite Python number (scale q for one that is traced)",
    lambda scale: number().accepts(scale),
)
SOFTCAP = NONE | number(above=0)
_IMPLEMENTATION = NONE | one_of("cudnn", "xla")


class AttentionKeywords(TypedDict, total=False):
    """The keywords of the public functions, each with its type and default. `dot_product_attention` explains them."""

    bias: Annotated[jax.Array | None, None]
    mask: Annotated[jax.Array | None, None]
    attn_mask_type: Annotated[str, "no_mask"]
    attn_bias_type: Annotated[str | None, None]
    alibi_slopes: Annotated[jax.Array | None, None]
    softmax_type: Annotated[str, "vanilla"]
    softmax_offset: Annotated[jax.Array | None, None]
    scale: Annotated[float | None, None]
    logit_softcap: Annotated[float | None, None]
    window_size: Annotated[tuple[int, int] | None, None]
    dropout_rate: Annotated[float, 0.0]
    dropout_rng: Annotated[jax.Array | None, None]
    sequence_descriptor: Annotated[SequenceDescriptor | None, None]
    deterministic: Annotated[bool, False]
    implementation: Annotated[str | None, None]
    return_max_logit: Annotated[bool, False]
    return_lse: Annotated[bool, False]
    seq_major: Annotated[bool, False]
    context_checkpoint_name: Annotated[str | None, None]
    name: Annotated[str | None, None]


_DEFAULTS = {name: kind.__metadata__[0] for name, kind in AttentionKeywords.__annotations__.items()}
_PARAMETERS = [
    inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=_DEFAULTS[name], annotation=kind.__origin__)
    for name, kind in AttentionKeywords.__annotations__.items()
]


def takes_options(*, without: Iterable[str] = ()) -> Callable:
    """Decorates a function of `**options: Unpack[AttentionKeywords]`: its signature shows them all but `without`."""

    def with_signature(function):
        signature = inspect.signature(function)
        own = [p for p in signature.parameters.values() if p.kind is not p.VAR_KEYWORD]
        shown = [p for p in _PARAMETERS if p.name not in without]
        function.__signature__ = signature.replace(parameters=[*own, *shown])
        return function

    return with_signature


@dataclass(frozen=True, kw_only=True)
class AttentionOptions:
    """What attention is asked for, checked, in its plain form. A public function makes it; all below takes it whole."""

    mask: Mask = Mask()
    bias: jax.Array | None = None
    pre_scale: bool = False  # the scale multiplies the bias too
    alibi_slopes: jax.Array | None = None
    softmax_type: str = "vanilla"
    softmax_offset: jax.Array | None = None
    scale: float
    logit_softcap: float | None = None
    dropout_rate: float = 0.0
    dropout_rng: jax.Array | None = None
    deterministic: bool = False
    return_max_logit: bool = False
    return_lse: bool = False
    seq_major: bool = False  # the arrays were turned from [s, b, heads, d]
    interleaved: bool = False  # joined arrays were turned from [b..., tokens, heads, 3 or 2, d]
    implementation: str | None = None
    context_checkpoint_name: str | None = None
    cut: Cut | None = None  # the mesh axis that cuts the sequence
    name: str = "dot_product_attention"  # what errors call the caller

    def replace(self, **changes: Any) -> "AttentionOptions":
        """These options with `changes`."""
        return replace(self, **changes)

    def static(self, band: Band) -> "AttentionOptions":
        """These options without arrays, and with `band` as the mask: what may stand where jax takes no arrays."""
        return replace(
            self, mask=Mask(band), bias=None, alibi_slopes=None, softmax_type="vanilla", softmax_offset=None,
            dropout_rng=None, seq_major=False, interleaved=False,
        )  # fmt: skip

    @property
    def has_bias(self) -> bool:
        return self.bias is not None or self.alibi_slopes is not None

    def total_bias(self, s: int, t: int) -> jax.Array | None:
        """The sum of `bias` and ALiBi's; None without both."""
        if self.alibi_slopes is None:
            return self.bias
        at, described, band = {}, self.mask.segments, self.mask.band
        if described is not None and band.bottom_right:
            queries, keys = (jnp.clip(x, 0, size) for x, size in zip(described.seqlens, (s, t)))
            at = dict(q_offset=keys - queries)
        elif band.bottom_right:
            at = dict(bottom_right=True)
        alibi = alibi_bias(self.alibi_slopes, s, t, **at)
        alibi = alibi if alibi.ndim == 4 else alibi[None]
        return alibi if self.bias is None else self.bias + alibi

    def offset(self, q: ArrayLike) -> jax.Array | None:
        """The logit that joins the softmax, [h, 1, 1] or [1, 1, 1]; None if nothing does."""
        dtype = jnp.promote_types(q.dtype, jnp.float32)
        if self.softmax_type == "learnable":
            return self.softmax_offset.astype(dtype).reshape(-1, 1, 1)
        return jnp.zeros((1, 1, 1), dtype) if self.softmax_type == "off_by_one" else None


def check_options(
    function: Callable[..., Any], q: Any, k: Any, v: Any, given: Mapping[str, Any], *, op: str = "",
    cut: Cut | None = None, interleaved: bool = False, needs_rng: bool = True, warns: bool = False,
) -> AttentionOptions:  # fmt: skip
    """The options that a call of `function`, which `takes_options`, was given for q, k, v (arrays, or their types).

    op: what errors call the function unless `given` has a name; "" is its own name.
    cut, interleaved: see `AttentionOptions`.
    needs_rng: dropout without its key is an error.
    warns: warn of a padding type without padding, unless `given` has a name: who has one warns.

    Raises ValueError or TypeError that names the function, the argument, its value and the way out.
    """
    op = given.get("name") or op or function.__name__
    check_names(op, given, (p.name for p in function.__signature__.parameters.values() if p.kind is p.KEYWORD_ONLY))
    given, is_named = _DEFAULTS | given, given.get("name") is not None
    mask, described = sort_masks(op, given["mask"], given["sequence_descriptor"])
    given |= dict(mask=mask, sequence_descriptor=described)
    _check_operands(op, q, k, v)
    q, k, v = (q, k, v) if cut is None else cut.whole(q, k, v)
    batch, h, d = q.shape[:-3], q.shape[-2], q.shape[-1]
    shape = (*batch, h, q.shape[-3], k.shape[-3])
    bias_type = _bias_type(op, given, shape)
    checked = given | dict(
        mask=_mask(op, given, shape, k.shape[-2]),
        pre_scale=bias_type == "pre_scale_bias",
        softmax_type=_softmax_type(op, given["softmax_type"], given["softmax_offset"], h),
        scale=_scale(op, given["scale"], d),
        dropout_rate=_dropout_rate(op, given["dropout_rate"], given["dropout_rng"], needs_rng),
        cut=cut,
        interleaved=interleaved,
        name=op,
    )
    for name in ("deterministic", "return_max_logit", "return_lse", "seq_major"):
        check(op, name, given[name], BOOL)
        checked[name] = bool(given[name])
    check(op, "context_checkpoint_name", given["context_checkpoint_name"], NONE | STRING)
    check(op, "logit_softcap", softcap := given["logit_softcap"], SOFTCAP)
    checked["logit_softcap"] = softcap if softcap is None else float(softcap)
    check(op, "implementation", given["implementation"], _IMPLEMENTATION)
    if given["alibi_slopes"] is not None:
        _check_alibi(op, given["alibi_slopes"], len(batch), h, bias_type, given["sequence_descriptor"])
    if warns and not is_named:
        warn_of_padding(op, given["attn_mask_type"], given["mask"], given["sequence_descriptor"])
    return AttentionOptions(**{field.name: checked[field.name] for field in fields(AttentionOptions)})


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
    want += " (or [b..., g, h / g, s, t])" if name == "mask" else ""
    if x.ndim not in (2, len(shape)):
        raise ValueError(f"{op}: {name} has shape {tuple(x.shape)}; pass {want}. Axes are not guessed.")
    if any(got not in (1, size) for got, size in zip(x.shape, shape[-x.ndim :])):
        raise ValueError(f"{op}: {name} has shape {tuple(x.shape)}, which does not broadcast; pass {want}.")


def sort_masks(op: str, mask: Any, described: Any) -> tuple[jax.Array | None, SequenceDescriptor | None]:
    """(the array, the descriptor) of the arguments `mask` and `sequence_descriptor`, each of which may be either.

    Raises ValueError, naming `op`, for two of a kind; TypeError for an array of one axis instead of a descriptor.
    """
    if MASK_ARRAY.accepts(described) and described.ndim < 2:
        raise TypeError(
            f"{op}: sequence_descriptor is an array of shape {described.shape}; pass a SequenceDescriptor, or use "
            "`mask` for an array [s, t] or wider. SequenceDescriptor.from_seqlens makes one of lengths."
        )
    moved = MASK_ARRAY.accepts(described), DESCRIPTOR.accepts(mask)
    if not any(moved):
        return mask, described
    if all(moved) or (mask if moved[0] else described) is None:
        return described, mask
    what = "arrays" if moved[0] else "SequenceDescriptors"
    way = "pass one array that is True where one of them is" if moved[0] else "pass one of them"
    raise ValueError(f"{op}: mask and sequence_descriptor are both {what}; {way}.")


def _ungrouped(mask, shape, g: int):
    """A mask [b..., g, h / g, s, t], with 1 where it broadcasts, as [b..., h or 1, s, t]; another as it is."""
    heads = (g, shape[-3] // max(g, 1))
    if getattr(mask, "ndim", 0) != len(shape) + 1 or any(n not in (1, m) for n, m in zip(mask.shape[-4:-2], heads)):
        return mask
    if mask.shape[-4:-2] == (1, 1):
        return mask.reshape(*mask.shape[:-4], *mask.shape[-3:])
    whole = jnp.broadcast_to(mask, (*mask.shape[:-4], *heads, *mask.shape[-2:]))
    return whole.reshape(*mask.shape[:-4], shape[-3], *mask.shape[-2:])


def _mask(op, given: Mapping, shape, g: int) -> Mask:
    """The mask that hides all that the keywords hide."""
    kind, window, described = given["attn_mask_type"], given["window_size"], given["sequence_descriptor"]
    check(op, "attn_mask_type", kind, MASK_TYPE)
    check(op, "window_size", window, WINDOW)
    array = _ungrouped(given["mask"], shape, g)
    _check_broadcast(op, "mask", array, shape, "a bool or integer", jnp.bool_, jnp.integer)
    if described is not None:
        check(op, "sequence_descriptor", described, DESCRIPTOR | MASK_ARRAY)
        described.check(op, shape[:-3], *shape[-2:])
    window = None if window is None else (int(window[0]), int(window[1]))
    return Mask.of_type(kind, window) & Mask(segments=described) & Mask(array=array)


def _bias_type(op, given: Mapping, shape) -> str | None:
    """The type of the bias in lower case."""
    kind, bias = given["attn_bias_type"], given["bias"]
    _check_broadcast(op, "bias", bias, shape, "a floating", jnp.floating)
    check(op, "attn_bias_type", kind, BIAS_TYPE)
    kind = kind and plain(kind)
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
    check(op, "softmax_offset", offset, NONE | ARRAY)
    if (name == "learnable") != (offset is not None):
        given = "None" if offset is None else f"given, of shape {tuple(offset.shape)}"
        raise ValueError(f"{op}: softmax_type is {kind!r}, but softmax_offset is {given}; only 'learnable' takes it.")
    if offset is None:
        return name
    if not jnp.issubdtype(offset.dtype, jnp.floating):
        raise TypeError(f"{op}: softmax_offset is {offset.dtype}; pass a floating array.")
    if tuple(offset.shape) not in ((h,), (h, 1, 1), (1, h, 1, 1)):
        raise ValueError(f"{op}: softmax_offset has shape {tuple(offset.shape)}; pass [h] or [1, h, 1, 1], h = {h}.")
    return name


def _scale(op, scale, d) -> float:
    if scale is None:
        return 1.0 / math.sqrt(d) if d else 1.0
    check(op, "scale", scale, _SCALE)
    return float(scale)


def _dropout_rate(op, rate, rng, needs_rng) -> float:
    check(op, "dropout_rate", rate, RATE)
    check(op, "dropout_rng", rng, NONE | RANDOM_KEY)
    if rate > 0 and rng is None and needs_rng:
        raise ValueError(f"{op}: dropout_rate is {rate}, but dropout_rng is None; pass a jax.random key.")
    return float(rate)


def warn_of_padding(op: str, kind: str, mask: Any, described: SequenceDescriptor | None) -> None:
    """Warns, once, where a padding type has nothing that tells what is padding."""
    if mask_type(kind).padding and mask is None and described is None:
        warn_once(
            op,
            f"attn_mask_type is {kind!r}, but neither mask nor sequence_descriptor says what is padding, so "
            "nothing is; pass one of them, or a type without padding.",
        )
