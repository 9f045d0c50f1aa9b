"""What a probe is: one mistake, or one edge input, and how it has to end."""

from collections.abc import Callable
from typing import Any, NamedTuple


class Probe(NamedTuple):
    name: str
    call: Callable[[], Any]
    outcome: type[Exception] | type[Warning] | None = None
    words: str = ""
