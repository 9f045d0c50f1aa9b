"""What strangers do wrong, or only just right: a call, and how it must end. Lists of probes stand in probes_*.py."""

from collections.abc import Callable
from typing import Any, NamedTuple


class Probe(NamedTuple):
    """One mistake or edge input.

    name:    what is probed.
    call:    makes it, in a few ms: shapes alone where they do (`jax.eval_shape`).
    outcome: the class of the error or the warning that it ends with; None: it works, and returns something true.
    words:   a regex in the message: what it names, and the way out.
    """

    name: str
    call: Callable[[], Any]
    outcome: type[Exception] | type[Warning] | None = None
    words: str = ""
