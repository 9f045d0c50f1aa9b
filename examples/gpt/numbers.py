"""Options that are numbers: each says its range once, and argparse refuses what is outside of it in a line."""

import argparse
import math
from collections.abc import Callable


class _Number(argparse.Action):
    """Takes the text of an option as `read` has it; what `is_in` says no to is an error: "--lr is nan: give ..."."""

    def __init__(self, option_strings, dest, *, read: Callable, is_in: Callable, text: str, **options):
        super().__init__(option_strings, dest, **options)
        self.read, self.is_in, self.text = read, is_in, text

    def __call__(self, parser, namespace, value, option_string=None):
        try:
            found = self.read(value)
            fits = self.is_in(found)
        except ValueError:  # no number
            fits = False
        if not fits:
            parser.error(f"{self.option_strings[0]} is {value if len(value) < 30 else value[:30] + '...'}: {self.text}")
        setattr(namespace, self.dest, found)


HUGE = 10**9  # Nothing here is as large.


def whole(least: int = 1, most: int = HUGE) -> dict:
    """Options of `add_argument` for a whole number from `least` to `most`."""
    text = f"give a whole number from {least} to {most}" if most < HUGE else f"give {least} or more"
    return dict(action=_Number, read=int, is_in=lambda n: least <= n <= most, text=text)


def number(above: float = -math.inf, least: float = -math.inf, below: float = HUGE) -> dict:
    """Options of `add_argument` for a finite number x: above < x, least <= x, x < below."""
    named = (("above", above), ("of at least", least), ("below", below))
    bounds = " and ".join(f"{word} {bound:g}" for word, bound in named if abs(bound) < HUGE)
    is_in = lambda x: math.isfinite(x) and above < x < below and least <= x
    return dict(action=_Number, read=float, is_in=is_in, text=f"give a number {bounds}".strip())


SEED = whole(0, 2**31 - 1)
