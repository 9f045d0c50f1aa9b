"""Rotary position embeddings (Su et al. 2021, https://arxiv.org/abs/2104.09864)."""

import abc
import math
from dataclasses import dataclass, fields
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from te_jax.core.arrays import as_jax, as_rank
from te_jax.core.check import (
    BOOL,
    FLOATS_ARRAY,
    INTEGERS,
    Kind,
    KnownFields,
    array_of,
    check,
    integer,
    number,
    one_of,
    tuple_of,
)
from te_jax.core.derivatives import custom_vjp
from te_jax.core.op import Op
from te_jax.core.types import align
from te_jax.ops.quantize.array import FLOATS

GROUP_METHODS = ("consecutive", "alternate")
METHOD = one_of(*GROUP_METHODS)
_PAIR = tuple_of(number(above=0), 2)
_POSITIONS = array_of(jnp.integer, jnp.float32, jnp.float64, text="an array of integers or float32")  # bf16 ends at 256
WINDOWS = Kind("(w0, w1) with 0 < w0 < w1", _PAIR.is_type, lambda pair: _PAIR.accepts(pair) and pair[0] < pair[1])


_FACTOR = number(above=0)


@dataclass(frozen=True)
class Scaling(KnownFields, abc.ABC):
    """Makes a model's frequencies fit for `factor` times the positions that it was trained with."""

    factor: float

    def __post_init__(self) -> None:
        name = type(self).__name__
        for field in fields(self):
            value = getattr(self, field.name)
            if field.type is bool:
                check(name, field.name, value, BOOL)
            elif not _FACTOR.accepts(value):
                raise ValueError(f"{name}: {field.name} is {value!r}; pass a positive finite number.")
        if self.factor < 1:
            raise ValueError(f"{name}: factor is {self.factor}; pass how many times more positions, at least 1.")

    @abc.abstractmethod
    def scale_frequencies(self, inv_freq: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        """f64[r/2], the highest first -> f64[r/2]."""


@dataclass(frozen=True)
class LinearScaling(Scaling):
    """Position interpolation (Chen et al. 2023, https://arxiv.org/abs/2306.15595): all positions / factor."""

    def scale_frequencies(self, inv_freq: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        return inv_freq / self.factor


@dataclass(frozen=True)
class NTKScaling(Scaling):
    """NTK-aware scaling (Peng et al. 2023, https://arxiv.org/abs/2309.00071, section 3.1): the base, windows[1] /
    windows[0], becomes base * factor**(r / (r - 2)), r = rotary_dim. The lowest frequency falls by factor, the highest
    stays."""

    def scale_frequencies(self, inv_freq: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        return inv_freq * self.factor ** -np.linspace(0, 1, inv_freq.size)


@dataclass(frozen=True)
class Llama3Scaling(Scaling):
    """Llama 3.1's rule (Grattafiori et al. 2024, https://arxiv.org/abs/2407.21783, and the models' published code).

    A frequency that turns more than high_freq_factor times within original_max_position stays, one that turns less than
    low_freq_factor times is divided by factor; between them the frequencies are interpolated.
    """

    factor: float = 8.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position: int = 8192

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.low_freq_factor > self.high_freq_factor:
            raise ValueError(
                f"Llama3Scaling: low_freq_factor is {self.low_freq_factor}, high_freq_factor {self.high_freq_factor}; "
                "the second must be at least as large."
            )

    def scale_frequencies(self, inv_freq: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        turns = self.original_max_position * inv_freq / (2 * np.pi)
        between = self.high_freq_factor - self.low_freq_factor
        kept = np.clip((turns - self.low_freq_factor) / between, 0, 1) if between else turns >= self.low_freq_factor
        return inv_freq * (kept + (1 - kept) / self.factor)


@dataclass(frozen=True)
class YarnScaling(Scaling):
    """YaRN (Peng et al. 2023, https://arxiv.org/abs/2309.00071, section 3.2, and the models' published code).

    Pairs up to the one that turns beta_fast times within original_max_position keep their frequency, those from the one
    that turns beta_slow times on have it divided by factor; between them the share grows with the pair's number. Models
    trained so have logits scaled by `mscale`**2 too, which `rope` does not do. truncate: these two numbers of pairs are
    rounded outwards, to whole ones.
    """

    factor: float = 40.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    original_max_position: int = 4096
    truncate: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.beta_slow >= self.beta_fast:
            raise ValueError(
                f"YarnScaling: beta_fast is {self.beta_fast}, beta_slow {self.beta_slow}; the first must be the larger."
            )

    @property
    def mscale(self) -> float:
        """0.1 ln(factor) + 1, by which queries and keys are to be scaled (section 3.4)."""
        return 0.1 * math.log(self.factor) + 1

    def scale_frequencies(self, inv_freq: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        turns, ratio = self.original_max_position * inv_freq[0] / (2 * np.pi), inv_freq[0] / inv_freq[1]
        pair = lambda times: math.log(turns / times) / math.log(ratio)
        first, last = pair(self.beta_fast), pair(self.beta_slow)
        if self.truncate:
            first, last = math.floor(first), math.ceil(last)
        first, last = max(first, 0), min(last, 2 * inv_freq.size - 1)
        slowed = np.clip((np.arange(inv_freq.size) - first) / max(last - first, 1e-3), 0, 1)
        return inv_freq * (1 - slowed + slowed / self.factor)


_SIZES = tuple_of(integer(0))


@dataclass(frozen=True)
class PositionSections(KnownFields):
    """Which pairs of channels turn by which of several positions of a token, such as the time, the row and the column
    of a patch of a film (Wang et al. 2024, https://arxiv.org/abs/2409.12191, section 2.1).

    sizes:       how many pairs, from the first on, turn by the first position, how many by the second, ...
    interleaved: of n positions pair i turns by position i % n instead, as long as i < n * sizes[i % n], and by the
                 first one behind that, as in Qwen3-VL.
    """

    sizes: tuple[int, ...]
    interleaved: bool = False

    def __post_init__(self) -> None:
        name = type(self).__name__
        check(name, "sizes", self.sizes, _SIZES)
        check(name, "interleaved", self.interleaved, BOOL)
        if not self.sizes:
            raise ValueError(f"{name}: sizes is (); pass how many pairs of channels turn by each position.")
        object.__setattr__(self, "sizes", tuple(map(int, self.sizes)))

    def fits(self, pairs: int) -> bool:
        """Whether so many pairs can turn so."""
        return self.interleaved or sum(self.sizes) == pairs

    def of_pairs(self, pairs: int) -> np.ndarray[Any, Any]:
        """int[pairs], the number of the position that each turns by."""
        if not self.interleaved:
            return np.repeat(np.arange(len(self.sizes)), self.sizes)
        pair, n = np.arange(pairs), len(self.sizes)
        return np.where(pair < n * np.asarray(self.sizes)[pair % n], pair % n, 0)


@dataclass(frozen=True)
class ProportionalScaling(Scaling):
    """The RoPE of layers of Gemma 4 that see all tokens: only the first `share` of a head's pairs turn, the fastest
    ones, by frequencies / factor; the others stand. Unlike with `rotary_dim`, pairs and frequencies belong to the
    whole width."""

    factor: float = 1.0
    share: float = 0.25

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.share > 1:
            raise ValueError(f"ProportionalScaling: share is {self.share}; pass the part of the pairs, at most 1.")

    def scale_frequencies(self, inv_freq: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        turn = np.arange(inv_freq.size) < int(self.share * 2 * inv_freq.size // 2)
        return np.where(turn, inv_freq / self.factor, 0)


def _inverse_frequencies(windows, rotary_dim: int, scaling: Scaling | None) -> np.ndarray:
    """f32[r/2], radians per position. The powers are f64: an f32 power's error would turn far positions wrong."""
    w0, w1 = map(float, windows)
    inv_freq = 1 / (w0 * (w1 / w0) ** (np.arange(0, rotary_dim, 2) / rotary_dim))
    return (scaling.scale_frequencies(inv_freq) if scaling else inv_freq).astype(np.float32)


def _reference(x, positions, inv_freq, *, turned, consecutive, inverse):
    half = inv_freq.shape[0]
    # An f32 frequency and an f32 product: an angle is off by angle * 2**-23 at most, as those that models train with.
    angle = positions[..., None] * as_rank(inv_freq, positions.ndim + 1)  # [b..., s, r/2]
    cos, sin = (f(angle)[..., None, None, :] for f in (jnp.cos, jnp.sin))  # [b..., s, 1, 1, r/2]
    sin = -sin if inverse else sin
    x, slots = x[..., :turned, :, :], x[..., turned:, :, :]
    x, channels = x[..., : 2 * half], x[..., 2 * half :]
    x32 = x.astype(jnp.promote_types(x.dtype, jnp.float32))
    pairs = x32.reshape(*x.shape[:-1], half, 2) if consecutive else x32.reshape(*x.shape[:-1], 2, half)
    axis = -1 if consecutive else -2
    x1, x2 = (jax.lax.index_in_dim(pairs, i, axis, keepdims=False) for i in (0, 1))
    y = jnp.stack([x1 * cos - x2 * sin, x2 * cos + x1 * sin], axis).reshape(x.shape).astype(x.dtype)
    for copied, axis in ((channels, -1), (slots, -3)):
        y = jnp.concatenate([y, copied], axis) if copied.shape[axis] else y
    return (y,)


def _cuda(call, x, positions, inv_freq, **attrs):
    if x.dtype not in FLOATS:  # f64
        return _reference(x, positions, inv_freq, **attrs)
    return call(x, positions, inv_freq, **attrs)


rope_op: Op = Op(
    "te_rope",
    "x: b... s n h d, positions: b... s, inv_freq: r -> y: b... s n h d",
    replicated="n d r",
    fenced="y",
    dtypes=lambda x, positions, inv_freq, **attrs: (x,),
    reference=_reference,
    cuda=_cuda,
)
"""x of a floating type [b..., s, n, h, d], positions f32[b..., s], inv_freq f32[r/2] in radians per position -> y of
x's type: `rope`, with `inverse` its inverse.

turned: how many of the n slots are turned, the others are copied, as channels from r on are. consecutive: group_method
is "consecutive", else "alternate".
"""


def rope(
    x: jax.Array,
    positions: jax.Array | None = None,
    *,
    windows: tuple[float, float] = (1, 10000),
    group_method: str = "consecutive",
    turned: int | None = None,
    rotary_dim: int | None = None,
    scaling: Scaling | None = None,
    sections: PositionSections | None = None,
) -> jax.Array:
    """Turns each pair of channels of x by an angle that grows with its position.

    x:            [b, s, h, d], d even, floating
    positions:    [b, s] or [s], in tokens, integers or float32; None is 0 .. s-1; with sections also [n, b, s], the n
                  positions of each token
    windows:      (w0, w1): pair i turns by positions / (w0 * (w1 / w0)**(2i / r)) radians
    group_method: "consecutive" pairs channels (2i, 2i + 1), "alternate" pairs (i, i + r/2)
    turned:       given, x is [b, s, n, h, d], as a joined projection gives queries, keys and values: the first
                  `turned` of its n slots are turned, the others copied
    rotary_dim:   r, even: the first r channels of a head are turned, the others copied; None is d
    scaling:      of the frequencies: `LinearScaling`, `NTKScaling`, `Llama3Scaling`, `YarnScaling` or
                  `ProportionalScaling`; None: as trained
    sections:     which pairs turn by which of the n positions. By one position, as of text, they all turn alike. By n,
                  x is read and written n times.

    Returns an array as x, computed in float32: (x1 cos - x2 sin, x2 cos + x1 sin). Differentiable in x.
    Raises ValueError for wrong shapes, windows, widths, sections or method, TypeError for a dtype that is not floating
    and for a scaling or sections of another type.
    """
    x, positions = as_jax(x, positions)
    _check(x, positions, windows, group_method, turned, rotary_dim, scaling, sections)
    positions = jnp.arange(x.shape[1]) if positions is None else positions
    inv_freq = _inverse_frequencies(windows, rotary_dim or x.shape[-1], scaling)
    attrs = (("turned", turned or 1), ("consecutive", group_method == "consecutive"))
    y = x if turned else x[:, :, None]
    if sections is None or positions.ndim < 3:
        turns = [(positions, inv_freq)]
    else:  # By each position the others' pairs turn by 0, which keeps their bits.
        own = sections.of_pairs(inv_freq.size)
        turns = [(each, np.where(own == i, inv_freq, np.float32(0))) for i, each in enumerate(positions)]
    for each, frequencies in turns:
        at = jnp.broadcast_to(each, x.shape[:2]).astype(jnp.float32)
        y = _rope(*align(y, at, jnp.asarray(frequencies)), attrs)
    return y.reshape(x.shape)


@custom_vjp(3)
def _rope(x, positions, inv_freq, attrs):
    return rope_op(x, positions, inv_freq, inverse=False, **dict(attrs))[0]


def _rope_fwd(x, positions, inv_freq, attrs):
    return _rope(x, positions, inv_freq, attrs), (positions, inv_freq)


def _rope_bwd(attrs, saved, dy):
    return rope_op(dy, *saved, inverse=True, **dict(attrs))[0], None, None


_rope.defvjp(_rope_fwd, _rope_bwd)


def _check(x, positions, windows, group_method, turned, rotary_dim, scaling, sections):
    check("rope", "x", x, FLOATS_ARRAY)
    if x.ndim != (4 if turned is None else 5) or x.shape[-1] % 2:
        axes = "[b, s, h, d]" if turned is None else "[b, s, n, h, d]"
        raise ValueError(f"rope: x has shape {x.shape}; pass {axes} with an even d.")
    if turned is not None:
        check("rope", "turned", turned, integer(1, x.shape[2]))
    check("rope", "group_method", group_method, METHOD)
    check("rope", "windows", windows, WINDOWS)
    check_rotary("rope", x.shape[-1], rotary_dim, scaling, sections)
    if positions is not None:
        check_positions("rope", positions, x.shape[:2], sections, _POSITIONS)


def check_positions(
    caller: str,
    positions: Any,
    rows: tuple[int, ...],
    sections: PositionSections | None = None,
    kind: Kind = INTEGERS,
) -> None:
    """Raises TypeError for positions not of `kind`, ValueError for others than [b, s] or [s] of b, s = `rows`, or, with
    sections, [n, b, s]."""
    check(caller, "positions", positions, kind)
    one = (rows, (1, *rows[1:]))
    several = [] if sections is None else [(len(sections.sizes), *each) for each in one]
    if positions.shape not in (*one, rows[1:], *several):
        also = f", or {list(several[0])}" if several else ""
        raise ValueError(
            f"{caller}: positions has shape {positions.shape}; pass a position of each token, {list(rows)} or "
            f"{list(rows[1:])}{also}."
        )


def check_rotary(caller: str, d: int, dim: Any, scaling: Any, sections: Any = None, prefix: str = "") -> None:
    """The rotary width, the scaling and the sections that heads of d channels get; prefix: of their names in the
    caller.

    Raises ValueError for a width that is not an even int of 2 to d, or too small for the scaling, and for sections of
    another width; TypeError for another type of scaling or sections.
    """
    dim_name, scaling_name = (f"{prefix}dim", f"{prefix}scaling") if prefix else ("rotary_dim", "scaling")
    if dim is not None and not (integer(2, d).accepts(dim) and dim % 2 == 0):
        raise ValueError(f"{caller}: {dim_name} is {dim!r}; pass None or an even int of 2 to {d}, a head's width.")
    if scaling is not None and not isinstance(scaling, Scaling):
        raise TypeError(
            f"{caller}: {scaling_name} is {scaling!r}; pass None, LinearScaling, NTKScaling, Llama3Scaling, "
            "YarnScaling or ProportionalScaling of te_jax.ops.rope."
        )
    if isinstance(scaling, NTKScaling | YarnScaling) and (dim or d) == 2:
        raise ValueError(
            f"{caller}: {scaling_name} is {scaling}, but a single pair has no base; turn at least 4 channels of a "
            "head, or pass LinearScaling."
        )
    if sections is not None and not isinstance(sections, PositionSections):
        raise TypeError(
            f"{caller}: {prefix}sections is {sections!r}; pass None or PositionSections of te_jax.ops.rope."
        )
    if sections is not None and not sections.fits((dim or d) // 2):
        raise ValueError(
            f"{caller}: {prefix}sections is {sections}, but {(dim or d) // 2} pairs of channels turn; pass sizes that "
            "add up to them."
        )
