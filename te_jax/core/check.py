"""Kinds of argument values, each declared once, and the one wording of errors about arguments.

check("LayerNorm `norm`", "epsilon", epsilon, number(above=0))
# ValueError: LayerNorm `norm`: epsilon is -1.0; pass a number above 0.
"""

import enum
import inspect
import math
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import ShapedArray

from te_jax.core.names import asked, closest, meant


@dataclass(frozen=True)
class Kind:
    """The values that an argument may take.

    text:    Completes "pass ...", as in "a positive int". The docs' tables of fields show it too.
    is_type: value -> whether it has the right type. If not, `check` raises TypeError.
    is_in:   value of that type -> whether it is in range. If not, `check` raises ValueError.
    hint:    A refused value -> what the caller may have meant, "" if nothing is known.
    """

    text: str
    is_type: Callable[[Any], bool]
    is_in: Callable[[Any], bool] = lambda value: True
    hint: Callable[[Any], str] = lambda value: ""

    def accepts(self, value: Any) -> bool:
        """Whether `value` is of this kind."""
        return bool(self.is_type(value) and self.is_in(value))

    def __or__(self, other: "Kind") -> "Kind":
        """Values of either kind."""
        return Kind(
            f"{self.text} or {other.text}",
            lambda value: self.is_type(value) or other.is_type(value),
            lambda value: self.accepts(value) or other.accepts(value),
            lambda value: self.hint(value) or other.hint(value),
        )


def check(where: str, name: str, value: Any, kind: Kind) -> None:
    """Raises TypeError or ValueError, "{where}: {name} is {value!r}; pass {kind}.", unless `value` is of `kind`."""
    if kind.accepts(value):
        return
    error = ValueError if kind.is_type(value) else TypeError
    hint = kind.hint(value)
    raise error(f"{where}: {name} is {show(value)}; pass {kind.text}{f' ({hint})' if hint else ''}.")


_LONGEST = 300  # characters of a value in an error


def show(value: Any) -> str:
    """`value` as errors show it: an array by its dtype and shape, and no more than a line."""
    try:
        text = " ".join(_text(value).splitlines())
    except RecursionError:
        text = f"a {type(value).__name__} of too many {type(value).__name__}s in each other"
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}..."


def _text(value):
    if isinstance(value, tuple | list) and not hasattr(value, "_fields"):
        inner = ", ".join(map(_text, value))
        return f"[{inner}]" if isinstance(value, list) else f"({inner}{',' if len(value) == 1 else ''})"
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{key!r}: {_text(each)}" for key, each in value.items()) + "}"
    is_array = ARRAY.is_type(value) and (value.shape or isinstance(value, jax.core.Tracer))
    text = f"{value.dtype}{list(value.shape)}" if is_array else repr(value)
    return text if "\n" not in text else f"<{type(value).__name__}>"  # A module of several lines.


def check_names(
    where: str,
    given: Iterable[str],
    known: Iterable[str],
    *,
    refused: Iterable[str] = (),
    elsewhere: Iterable[str] = (),
    other: str = "",
) -> None:
    """Raises TypeError for a keyword in `given` that is not `known`, with the known one that is meant if there is one.

    refused: Known names that take only None: no hint offers them. elsewhere: Names that `other` takes, such as the
             module's call.
    """
    known, refused, elsewhere = tuple(known), set(refused), set(elsewhere)
    for name in given:
        if name not in known:
            ways = [each for each in known if each not in refused]
            hint = f"{other} takes it: pass it there." if name in elsewhere else meant(name, ways)
            hint = hint or f"it takes {', '.join(ways)}."
            raise TypeError(f"{where}: got an unexpected keyword argument {name!r}; {hint}")


def bind(
    where: str, signature: inspect.Signature, args: tuple[Any, ...], kwargs: dict[str, Any], **names: Any
) -> inspect.BoundArguments:
    """`signature.bind(*args, **kwargs)`, whose TypeErrors name `where`, as `check_names` does for unknown keywords.

    names: As of `check_names`.
    """
    check_names(where, kwargs, signature.parameters, **names)
    try:
        return signature.bind(*args, **kwargs)
    except TypeError as error:
        raise TypeError(f"{where}: {error}; it takes {', '.join(signature.parameters)}.") from None


told: set[str] = set()  # The texts of `warn_once` in this process.


_NOT_OF_USERS = {"te_jax", "jax", "flax", "optax", "contextlib", "functools"}


def warn(text: str) -> None:
    """Warns at the line of the user's program that led here."""
    frame, level = inspect.currentframe(), 1
    while frame and frame.f_back and frame.f_globals.get("__name__", "").partition(".")[0] in _NOT_OF_USERS:
        frame, level = frame.f_back, level + 1
    warnings.warn(text, stacklevel=level)


def warn_once(where: str, text: str) -> None:
    """Warns "{where}: {text}", once for each text, whichever module comes first."""
    if text not in told:
        told.add(text)
        warn(f"{where}: {text}")


def did_you_mean(name: Any, known: Iterable[str]) -> str:
    """ "did you mean 'x'?" where a known name is `name` but for typos, or the name of an enum's member, else ""."""
    return asked(closest(name.name if isinstance(name, enum.Enum) else str(name), known, unfinished=True))


class KnownFields:
    """Base of dataclasses whose constructor raises for unknown names as `check_names` does.

    A subclass with an `__init__` of its own is not checked.
    """

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:
        owner = next(each for each in cls.__mro__ if "__init__" in vars(each))
        if "__dataclass_params__" in vars(owner) and owner.__dataclass_params__.init:
            names = [f.name for f in cls.__dataclass_fields__.values() if f.init]
            check_names(cls.__name__, kwargs, names, **cls._names())
        return super().__new__(cls)

    @classmethod
    def _names(cls) -> dict[str, Any]:
        """The keywords of `check_names` for the constructor."""
        return {}


def plain(name: str) -> str:
    """`name` in lower case with "_" for "-", for comparisons that ignore both: "NO-BIAS" -> "no_bias"."""
    return name.lower().replace("-", "_")


def _is_int(value) -> bool:
    return isinstance(value, int | np.integer) and not isinstance(value, bool | np.bool_)


def _is_number(value) -> bool:
    return _is_int(value) or isinstance(value, float | np.floating)


def _is_finite(value) -> bool:
    try:
        return math.isfinite(value)
    except OverflowError:  # an int that no float holds
        return False


def _dtype(value) -> np.dtype | None:
    try:
        # numpy takes whatever has a dtype of its own for it: an array is a mistake.
        return None if value is None or isinstance(value, _ARRAY_TYPES) else jnp.dtype(value)
    except TypeError:
        return None


def _is_float64(value) -> bool:
    """Whether it is float64, of which no kernel and no layer has any. Python's float is jax's default type."""
    return _dtype(value) == np.float64 and (value is not float or jax.config.jax_enable_x64)


def _meant_dtype(name: str) -> str:
    short = {"bf16": "bfloat16", "fp16": "float16", "f16": "float16", "fp32": "float32", "f32": "float32"}
    return did_you_mean(short.get(name.lower(), name), ("bfloat16", "float16", "float32"))


def is_dtype(value: Any) -> bool:
    """Whether `value` is a dtype, or the name or class of one."""
    return _dtype(value) is not None


def integer(least: int | None = None, most: int | None = None) -> Kind:
    """Ints from `least` to `most` (None: without that bound). A bool is a TypeError, a float a ValueError."""
    text = {None: "an int", 0: "an int of at least 0", 1: "a positive int"}.get(least, f"an int of at least {least}")
    text = text if most is None else f"an int from {least} to {most}"
    is_in = lambda value: _is_int(value) and (least is None or value >= least) and (most is None or value <= most)
    return Kind(text, _is_number, is_in)


def number(
    least: float | None = None, above: float | None = None, below: float | None = None, most: float | None = None
) -> Kind:
    """Finite ints and floats x with least <= x, above < x, x < below and x <= most (None: without that bound)."""
    bounds = [
        f"{word} {bound:g}"
        for word, bound in (("at least", least), ("above", above), ("below", below), ("at most", most))
        if bound is not None
    ]

    def is_in(value):
        return (
            _is_finite(value)
            and (least is None or value >= least)
            and (above is None or value > above)
            and (below is None or value < below)
            and (most is None or value <= most)
        )

    text = " ".join(["a finite number" if not bounds else "a number", " and ".join(bounds)]).strip()
    return Kind(text, _is_number, is_in)


def one_of(*names: str, normalize: Callable[[str], str] = str) -> Kind:
    """Strings that are one of `names` after `normalize`."""
    text = "one of " + ", ".join(map(repr, names))
    return Kind(text, lambda v: isinstance(v, str), lambda v: normalize(v) in names, lambda v: did_you_mean(v, names))


def _is_sequence(value) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, str | bytes)


def tuple_of(kind: Kind, length: int | None = None) -> Kind:
    """Tuples and lists whose elements are of `kind`, of `length` elements (None: of any number)."""
    count = "a tuple" if length is None else f"a tuple of {length}"
    is_in = lambda value: (length is None or len(value) == length) and all(map(kind.accepts, value))
    return Kind(f"{count}, each {kind.text}", _is_sequence, is_in)


NONE = Kind("None", lambda value: value is None)
BOOL = Kind("True or False", lambda value: isinstance(value, bool | np.bool_))
STRING = Kind("a string", lambda value: isinstance(value, str))
FUNCTION = Kind("a function", lambda value: callable(value) and not isinstance(value, type))
RATE = number(least=0, below=1)  # Rates of dropout.
FLOATING = Kind(
    "a floating dtype, such as jnp.bfloat16",
    is_dtype,
    # FP8 is refused.
    lambda value: jnp.issubdtype(_dtype(value), jnp.floating) and _dtype(value).itemsize > 1 and not _is_float64(value),
    lambda value: (
        "te_jax has no float64" if _is_float64(value) else _meant_dtype(value) if isinstance(value, str) else ""
    ),
)
_ARRAY_TYPES = jax.Array | np.ndarray | np.generic | jax.ShapeDtypeStruct | ShapedArray  # Types of arrays count too.
ARRAY = Kind("an array", lambda value: isinstance(value, _ARRAY_TYPES))
RANDOM_KEY = Kind("a jax.random key", ARRAY.is_type)


def array_of(*dtypes: Any, text: str) -> Kind:
    """Arrays whose dtype is one of `dtypes`, each a dtype or a class of dtypes."""
    is_one = lambda value: any(jnp.issubdtype(value.dtype, dtype) for dtype in dtypes)
    return Kind(text, lambda value: ARRAY.is_type(value) and is_one(value))


FLOATS_ARRAY = Kind(
    "an array of a floating dtype of 16 bits or more",  # jax promotes no FP8
    lambda value: ARRAY.is_type(value) and jnp.issubdtype(value.dtype, jnp.floating) and value.dtype.itemsize > 1,
)
INTEGERS = array_of(jnp.integer, text="an integer array")
