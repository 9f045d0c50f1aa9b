"""What products are for, in jax's name stack, and notes of why they are not in FP8: what `te_jax.explain_fp8` reads.

The name stack is part of each equation of a jaxpr, in the forward and in the backward pass, so the kernels in a profile
have these names too. Notes are taken only while a function is explained.
"""

import contextlib
import functools
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeVar

import jax

from te_jax.core.scope import Scope

# The three products of a layer, which a recipe may put into FP8.
FPROP, DGRAD, WGRAD = OF_LAYER = "fprop", "dgrad", "wgrad"
ATTENTION = "attention"
# Products that no recipe puts into FP8, and why.
NEVER = {
    "router": "the router is never in FP8",
    "lora": "the products of low rank are never in FP8",
    "condition": "the projection of a condition is never in FP8",
    "logits": "logits are never in FP8; with labels the head computes its loss, which is",
    "attention in 16 bits": "cuDNN has no FP8 gradients of this call, or bf16 ones take less time",
}

NO_RECIPE = "no recipe is in force"
_NAMED_PRODUCT, _NAMED_PATH = "te_product", "te_path"
_Function = TypeVar("_Function", bound=Callable[..., Any])


def product(name: str) -> Callable[[_Function], _Function]:
    """A decorator of functions whose products are `name`: one of OF_LAYER, ATTENTION or a key of NEVER."""

    def decorate(function):
        @functools.wraps(function)
        def run(*args, **kwargs):
            with jax.named_scope(f"{_NAMED_PRODUCT}[{name}]"):
                return function(*args, **kwargs)

        return run

    return decorate


class Noted(NamedTuple):
    """A module, of whatever library."""

    kind: str  # its class
    hook: str | None  # how its products come into FP8; None of a module of te_jax, where the recipe says that


@dataclass(eq=False)
class Notes:
    """What a traced function says of its modules, by their paths."""

    modules: dict[str, Noted] = field(default_factory=dict)
    recipes: dict[str, Any] = field(default_factory=dict)  # the recipe that is in force there, or None
    why: dict[str, list[str]] = field(default_factory=dict)  # reasons for what is not in FP8
    path: str = ""  # of the module that is being traced


_notes = Scope("te_jax.explain_fp8")  # part of the key of jit's caches, so that all is traced anew


@contextlib.contextmanager
def taking_notes() -> Iterator[Notes]:
    """Notes are taken within the block."""
    with _notes(notes := Notes()):
        yield notes


def is_explained() -> bool:
    """Whether notes are taken."""
    return _notes.value is not None


@contextlib.contextmanager
def at(path: str, module: Noted) -> Iterator[None]:
    """What is traced within the block belongs to `module`, which is at `path`. Notes are taken."""
    notes = _notes.value
    outer, notes.path = notes.path, path
    notes.modules.setdefault(path, module)
    try:
        with jax.named_scope(f"{_NAMED_PATH}[{path}]"):
            yield
    finally:
        notes.path = outer


def note(why: str) -> None:
    """Notes why products of the module that is being traced are not in FP8."""
    if (notes := _notes.value) is not None:
        reasons = notes.why.setdefault(notes.path, [])
        reasons += [] if why in reasons else [why]


def note_recipe(recipe: Any, why: str | None = None, default: bool = False) -> None:
    """Notes the recipe of the module that is being traced; None, and then `why`, for no FP8. default: only where no
    other is noted, as by a layer that no module calls."""
    notes = _notes.value
    if notes is None or (default and notes.path in notes.recipes):
        return
    notes.recipes[notes.path] = recipe
    if recipe is None:
        note(why or NO_RECIPE)


class Provenance(NamedTuple):
    """Where an equation stands, as the names around it say.

    path:     of the module; None outside of modules.
    product:  what `product` says, "" without.
    backward: whether autodiff made it of the forward pass.
    again:    whether `jax.checkpoint` computes it a second time.
    """

    path: str | None
    product: str
    backward: bool
    again: bool

    @classmethod
    def of(cls, names: str) -> "Provenance":
        """names: the name stacks of the equation and of those it is in, outermost first."""
        *_, path = re.findall(rf"{_NAMED_PATH}\[([^\]]*)\]", names) or [None]
        *_, within = names.split(f"{_NAMED_PATH}[")
        *_, label = re.findall(rf"{_NAMED_PRODUCT}\[([^\]]*)\]", within) or [""]
        return cls(path, label, "transpose(" in names, "rematted_computation" in names)
