"""What a package shows: its `__all__`, made of what its `__init__.py` imports under a public name."""

from collections.abc import Mapping
from types import ModuleType
from typing import Any


def public_names(namespace: Mapping[str, Any]) -> list[str]:
    """The names in `namespace`, the globals of a package, that are neither private nor modules."""
    return sorted(name for name, value in namespace.items() if name[0] != "_" and not isinstance(value, ModuleType))
