"""Puts te_jax.compat's packages at the names `transformer_engine` and `transformer_engine_jax`."""

import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import sys

from te_jax.compat._absent import why_absent

HOME = "te_jax.compat."
NAMES = ("transformer_engine", "transformer_engine_jax")


class _Alias(importlib.abc.Loader):
    """Loads te_jax.compat's module instead of one of another name: one module with two names."""

    def create_module(self, spec):
        module = importlib.import_module(HOME + spec.name)
        self.spec = module.__spec__
        return module

    def exec_module(self, module):
        module.__spec__ = self.spec  # The import machinery has put the alias's spec there.


class _Finder(importlib.abc.MetaPathFinder):
    """Finds the modules of NAMES and below in te_jax.compat."""

    def find_spec(self, fullname, path=None, target=None):
        if fullname.partition(".")[0] not in NAMES:
            return None
        try:
            served = importlib.util.find_spec(HOME + fullname) is not None
        except ModuleNotFoundError:
            served = False
        if not served and sys._getframe(2).f_code is importlib.util.find_spec.__code__:
            return None  # A program only asks whether the module is there.
        if not served:
            text = why_absent(fullname) or "te_jax has nothing of that name"
            raise ModuleNotFoundError(f"{fullname} is not in te_jax.compat; {text}.", name=fullname)
        package = importlib.util.find_spec(HOME + fullname).submodule_search_locations is not None
        return importlib.machinery.ModuleSpec(fullname, _Alias(), origin="te_jax.compat", is_package=package)


def _is_installed() -> bool:
    return any(isinstance(finder, _Finder) for finder in sys.meta_path)


def install() -> None:
    """Makes `import transformer_engine` find te_jax.compat in this process. A second call changes nothing.

    Raises ImportError where another `transformer_engine` is imported already, or can be: nothing is ever replaced.
    """
    if _is_installed():
        return
    for name in NAMES:
        if name in sys.modules:
            where = getattr(sys.modules[name], "__file__", None) or "unknown"
            raise ImportError(
                f"te_jax.compat.install: {name} is imported already, from {where}; call install() before the first "
                "import of it."
            )
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.origin is not None:
            raise ImportError(
                f"te_jax.compat.install: {name} is here, at {spec.origin}; uninstall it, or run from a folder that "
                "does not hold it, for te_jax replaces no other package."
            )
    sys.meta_path.insert(0, _Finder())
