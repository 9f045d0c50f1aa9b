"""What strangers do wrong, or only just right: a call, and how it must end. Lists of probes stand in probes_*.py."""

import re
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

from te_jax.core import check


class Probe(NamedTuple):
    """One mistake or edge input.

    name:    what is probed.
    call:    makes it, in a few ms: only shapes where they do (`jax.eval_shape`).
    outcome: the class of the error or the warning that it ends with; None: it works, and returns something true.
    words:   a regex in the message: what it names, and the way out.
    """

    name: str
    call: Callable[[], Any]
    outcome: type[Exception] | type[Warning] | None = None
    words: str = ""


def ended(probe: Probe) -> str:
    """How `probe` ends otherwise than it should; "" if it ends so."""
    check.told.clear()  # each probe hears its own
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        try:
            out, error = probe.call(), None
        except Exception as raised:
            out, error = None, raised
    if probe.outcome is None:
        return repr(error) if error else "" if out else f"returns {out!r}"
    if issubclass(probe.outcome, Warning):
        found = [w.message for w in heard if isinstance(w.message, probe.outcome)]
        return "" if error is None and any(map(_said(probe), found)) else f"{error!r}, warnings {found}"
    return "" if isinstance(error, probe.outcome) and _said(probe)(error) else repr(error)


def _said(probe: Probe):
    return lambda message: re.search(probe.words, str(message), re.DOTALL) is not None
