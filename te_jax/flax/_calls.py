"""Unknown keywords of a module's constructor and of its call, and parameters that it does not read: what is said of
them, whichever module it is."""

import dataclasses
import functools
import inspect
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, ClassVar

import jax
from flax import linen as nn

from te_jax.core.check import KnownFields, check_names, warn_once
from te_jax.flax import _refused
from te_jax.flax._state import describe


class KnownArguments(KnownFields, nn.Module):
    """Base of Flax modules whose constructor and `__call__` raise for unknown keywords as `check_names` does, and whose
    `__call__` warns of parameters that it did not read.

    Keywords of a `__call__` with **keywords are not checked. Signatures stay as they are.
    """

    if TYPE_CHECKING:  # Annotations would make fields of them where it runs.
        read_by_argument: ClassVar[tuple[str, ...]]
    else:
        read_by_argument = ()  # parameters, by path, that some calls read, by their arguments, and others do not

    def __init_subclass__(cls, **kwargs: Any) -> None:
        call = vars(cls).get("__call__")
        if call is not None and not hasattr(call, "method_handler_wrapped"):  # `nn.remat` wraps one that is checked
            type.__setattr__(cls, "__call__", _with_check(call))  # An assignment would be a field to type checkers.
        super().__init_subclass__(**kwargs)

    @classmethod
    def _names(cls) -> dict[str, Any]:
        return names_of_constructor(cls)


def _with_check(call: Callable[..., Any]) -> Callable[..., Any]:
    """`call`, a method of a module, which refuses unknown keywords in the words of `check_names`, and warns of
    parameters that it did not read."""
    parameters = inspect.signature(call).parameters
    takes_all = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    known = [name for name in parameters][1:]  # Without self.

    @functools.wraps(call)
    def call_checked(self, *args, **kwargs):
        if not takes_all and kwargs.keys() - parameters.keys():
            check_names(describe(self), kwargs, known, **names_of_call(type(self)))
        out = call(self, *args, **kwargs)
        _warn_of_unused_variables(self)
        return out

    return call_checked


@functools.cache
def _reads_by_itself(cls: type[nn.Module]) -> bool:
    """Whether one call reads all parameters: a subclass's may read others, before or behind its base's."""
    return sum("__call__" in vars(base) for base in cls.__mro__ if base is not nn.Module) == 1


def _warn_of_unused_variables(module: nn.Module) -> None:
    """Warns, once, of variables that `module` was given and did not read, such as those of a field that is off."""
    if module.scope is None or module.is_initializing() or not _reads_by_itself(type(module)):
        return
    held, read = module.variables, module.scope.reservations
    for collection in ("params", "expert_bias"):
        unread = [
            name
            for name, value in held.get(collection, {}).items()
            if not read.get(name, set()) & {None, collection}
            and name not in module.read_by_argument
            and f"{module.name}/{name}" not in getattr(module.parent, "read_by_argument", ())
            and (leaves := jax.tree.leaves(value))
            and not _is_of_another(module, collection, name, leaves[0])
        ]
        if unread:
            warn_once(
                describe(module),
                f"the collection {collection!r} has {', '.join(sorted(unread))}, which the fields of this module have "
                "no use for; pass the fields that it was made with, or leave them out of the collection.",
            )


def _is_of_another(module: nn.Module, collection: str, name: str, leaf: Any) -> bool:
    """Whether a module around `module` or next to it holds this very variable, too, so that it may be what reads it:
    they share a scope (`nn.share_scope`)."""
    around = module.parent if isinstance(module.parent, nn.Module) else None
    others = [around, *(vars(around).values() if around else ()), *_running()]
    return any(
        other is not module
        and isinstance(other, nn.Module)
        and other.scope is not None
        and any(leaf is each for each in jax.tree.leaves(other.variables.get(collection, {}).get(name)))
        for other in others
    )


def _running() -> Iterator[Any]:
    """What has methods that are running, such as modules whose calls led here."""
    frame = inspect.currentframe()
    while frame:
        yield frame.f_locals.get("self")
        frame = frame.f_back


@functools.cache
def call_signature(cls: type[nn.Module]) -> inspect.Signature:
    """The signature of a module's call, without self."""
    signature = inspect.signature(cls.__call__)
    return signature.replace(parameters=list(signature.parameters.values())[1:])


@functools.cache
def field_names(cls: type[nn.Module]) -> tuple[str, ...]:
    """The fields of a module's class, without Flax's own."""
    return tuple(f.name for f in dataclasses.fields(cls) if f.name not in ("parent", "name"))


def names_of_constructor(cls: type[nn.Module]) -> dict[str, Any]:
    """The keywords of `check_names` for the constructor of a module."""
    named = [p.name for p in call_signature(cls).parameters.values() if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    return dict(refused=_refused.names(cls), elsewhere=named, other=f"the call of {cls.__name__}")


def names_of_call(cls: type[nn.Module]) -> dict[str, Any]:
    """The keywords of `check_names` for the call of a module."""
    return dict(refused=_refused.names(cls), elsewhere=field_names(cls), other=f"the constructor of {cls.__name__}")
