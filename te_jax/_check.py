"""What an argument may be: declared once as a `Kind`, checked and worded alike everywhere.

check("LayerNorm `norm`", "epsilon", epsilon, number(above=0))
# ValueError: LayerNorm `norm`: epsilon is -1.0; pass a number above 0.
"""

import difflib
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


@dataclass(frozen=True)
class Kind:
    """The values that an argument may take.

    text:    completes "pass ...", as in "a positive int"; the docs' tables of fields show it too.
    is_type: value -> whether it is of the right type; a TypeError where not.
    is_in:   value of that type -> whether it is in range; a ValueError where not.
    hint:    value that was refused -> what the caller may have meant, "" if nothing is known.
    """

    text: str
    is_type: Callable[[Any], bool]
    is_in: Callable[[Any], bool] = lambda value: True
    hint: Callable[[Any], str] = lambda value: ""

    def accepts(self, value) -> bool:
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


def check(where: str, name: str, value, kind: Kind) -> None:
    """Raises TypeError or ValueError, "{where}: {name} is {value!r}; pass {kind}.", unless `value` is of `kind`."""
    if kind.accepts(value):
        return
    error = ValueError if kind.is_type(value) else TypeError
    hint = kind.hint(value)
    raise error(f"{where}: {name} is {value!r}; pass {kind.text}{f' ({hint})' if hint else ''}.")


def did_you_mean(name: Any, known: Iterable[str]) -> str:
    """ "did you mean 'x'?" where a known name is close to `name`, else ""."""
    lower = {each.lower(): each for each in known}
    close = difflib.get_close_matches(str(name).lower(), lower, n=1, cutoff=0.6)
    return f"did you mean {lower[close[0]]!r}?" if close else ""


def _is_int(value) -> bool:
    return isinstance(value, int | np.integer) and not isinstance(value, bool | np.bool_)


def _is_number(value) -> bool:
    return _is_int(value) or isinstance(value, float | np.floating)


def _dtype(value) -> np.dtype | None:
    try:
        return jnp.dtype(value)
    except TypeError:
        return None


def integer(least: int | None = None) -> Kind:
    """Ints, but no bools: all, or those from `least` on."""
    text = {None: "an int", 0: "an int of at least 0", 1: "a positive int"}.get(least, f"an int of at least {least}")
    return Kind(text, _is_int, lambda value: least is None or value >= least)


def number(least: float | None = None, above: float | None = None, below: float | None = None) -> Kind:
    """Finite ints and floats within bounds: from `least` on, above `above`, below `below`."""
    bounds = [
        f"{word} {bound:g}"
        for word, bound in (("at least", least), ("above", above), ("below", below))
        if bound is not None
    ]

    def is_in(value):
        return (
            math.isfinite(value)
            and (least is None or value >= least)
            and (above is None or value > above)
            and (below is None or value < below)
        )

    return Kind(
        " ".join(["a finite number" if not bounds else "a number", " and ".join(bounds)]).strip(), _is_number, is_in
    )


def one_of(*names: str, normalize: Callable[[str], str] = str) -> Kind:
    """Strings that `normalize` makes one of `names`."""
    text = "one of " + ", ".join(map(repr, names))
    return Kind(text, lambda v: isinstance(v, str), lambda v: normalize(v) in names, lambda v: did_you_mean(v, names))


def tuple_of(kind: Kind, length: int | None = None) -> Kind:
    """Tuples and lists of `kind`, of `length` if that is given."""
    count = "a tuple" if length is None else f"a tuple of {length}"
    is_type = lambda value: isinstance(value, Sequence) and not isinstance(value, str | bytes)
    is_in = lambda value: (length is None or len(value) == length) and all(map(kind.accepts, value))
    return Kind(f"{count}, each {kind.text}", is_type, is_in)


NONE = Kind("None", lambda value: value is None)
BOOL = Kind("True or False", lambda value: isinstance(value, bool | np.bool_))
STRING = Kind("a string", lambda value: isinstance(value, str))
FUNCTION = Kind("a function", callable)
RATE = number(least=0, below=1)  # of dropout
FLOATING = Kind(
    "a floating dtype, such as jnp.bfloat16",
    lambda value: _dtype(value) is not None,
    lambda value: jnp.issubdtype(_dtype(value), jnp.floating),
    lambda value: did_you_mean(value, ("bfloat16", "float16", "float32", "float64")) if isinstance(value, str) else "",
)
ARRAY = Kind("an array", lambda value: isinstance(value, jax.Array | np.ndarray | np.generic))
