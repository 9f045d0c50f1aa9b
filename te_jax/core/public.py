"""What a package shows: its `__all__`, made of what its `__init__.py` imports under a public name, and its modules."""

import importlib
import sys
from collections.abc import Callable, Collection, Mapping
from types import ModuleType
from typing import Any

from te_jax.core.names import asked, closest


def public_names(namespace: Mapping[str, Any]) -> list[str]:
    """The names in `namespace`, the globals of a package, that are neither private nor modules."""
    return sorted(name for name, value in namespace.items() if name[0] != "_" and not isinstance(value, ModuleType))


def lazy_modules(package: str, names: Collection[str]) -> Callable[[str], Any]:
    """The `__getattr__` of a package, which imports its modules `names` at first use."""

    def __getattr__(name: str) -> Any:
        if name in names:
            return importlib.import_module(f"{package}.{name}")
        known = vars(sys.modules[package]).get("__all__", names)
        hint = asked(closest(name, known), most=1)
        raise AttributeError(f"module {package!r} has no attribute {name!r}{hint and f'; {hint}'}")

    return __getattr__
