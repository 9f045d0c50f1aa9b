"""What in a program that is written for TransformerEngine te_jax does not serve, found in its syntax tree."""

import ast
import dataclasses
import importlib
import inspect
import warnings
from types import ModuleType
from typing import Any

from te_jax.compat._absent import INTERNAL, why_absent
from te_jax.compat._install import HOME, NAMES
from te_jax.core.names import meant
from te_jax.flax._fields import Module, kinds_of
from te_jax.flax._refused import Refused
from te_jax.recipe import Recipe

Finding = tuple[int, str]  # A line, and what is wrong there.


def findings(source: str, name: str = "<program>") -> list[Finding]:
    """What in the Python `source` needs an edit: imports and attributes of transformer_engine that te_jax.compat lacks,
    and calls with arguments that are refused. Names that a program gets in other ways are not followed."""
    program = _Program()
    program.visit(ast.parse(source, name))
    return sorted(set(program.found))


def find_served(path: str) -> Any:
    """The object at the dotted `path` of TransformerEngine. Raises ImportError or AttributeError, with the reason."""
    at, *names = path.split(".")
    found = _module(at)
    for name in names:
        at = f"{at}.{name}"
        is_submodule = isinstance(found, ModuleType) and not hasattr(found, name)
        found = _module(at) if is_submodule else getattr(found, name)
    return found


def _module(path: str) -> ModuleType:
    try:
        return importlib.import_module(HOME + path)
    except ModuleNotFoundError as error:
        if error.name != HOME + path:
            raise
        text = why_absent(path) or "te_jax has nothing of that name"
        raise ImportError(f"{path} is not in te_jax.compat; {text}.") from None


class _Program(ast.NodeVisitor):
    """Walks a program and collects findings; `names` maps the program's names to dotted paths of TransformerEngine."""

    def __init__(self):
        self.names: dict[str, str] = {}
        self.found: list[Finding] = []

    def _say(self, node: ast.AST, text: str):
        self.found.append((node.lineno, text))

    def _serves(self, node: ast.AST, path: str) -> bool:
        try:
            find_served(path)
        except (ImportError, AttributeError) as error:
            self._say(node, str(error))
            return False
        return True

    def visit_Import(self, node: ast.Import):
        for alias in node.names:
            top = alias.name.partition(".")[0]
            if top in NAMES and self._serves(node, alias.name):
                self.names[alias.asname or top] = alias.name if alias.asname else top

    def visit_ImportFrom(self, node: ast.ImportFrom):
        if node.level or (node.module or "").partition(".")[0] not in NAMES:
            return
        for alias in node.names:
            path = f"{node.module}.{alias.name}"
            if alias.name == "*":
                self._serves(node, node.module)
            elif self._serves(node, path):
                self.names[alias.asname or alias.name] = path

    def visit_Try(self, node: ast.Try):
        """A program that catches what te_jax.compat raises needs no edit for it."""
        caught = {name for handler in node.handlers for name in _names_of(handler.type)}
        before = len(self.found)
        for each in node.body:
            self.visit(each)
        if caught & _CAUGHT:
            del self.found[before:]
        for each in (*node.handlers, *node.orelse, *node.finalbody):
            self.visit(each)

    def _path(self, node: ast.AST) -> str | None:
        """The dotted path of TransformerEngine that an expression means."""
        if isinstance(node, ast.Name):
            return self.names.get(node.id)
        if isinstance(node, ast.Attribute) and (path := self._path(node.value)):
            return f"{path}.{node.attr}"
        return None

    def visit_Attribute(self, node: ast.Attribute):
        path = self._path(node)
        if path is None:
            self.generic_visit(node)
        elif self._is_static(path):
            self._serves(node, path)

    def _is_static(self, path: str) -> bool:
        """Whether all but the last name of `path` are modules and classes: attributes of other values are not looked
        up."""
        try:
            owner = find_served(path.rpartition(".")[0])
        except (ImportError, AttributeError):
            return True
        return isinstance(owner, ModuleType | type)

    def visit_Call(self, node: ast.Call):
        self.generic_visit(node)
        called, arguments = node.func, node.args
        if ast.unparse(called) in ("partial", "functools.partial") and arguments:
            called, *arguments = arguments
        path = self._path(called)
        if path is None or not self._is_static(path):
            return
        try:
            target = find_served(path)
        except (ImportError, AttributeError):
            return
        if isinstance(target, ModuleType):  # `cpp_extensions.gemm` is a function of TransformerEngine, and a module.
            self._say(node, f"{path} is no function in te_jax.compat; {INTERNAL}.")
            return
        given = {keyword.arg: keyword.value for keyword in node.keywords if keyword.arg}
        if isinstance(target, type) and issubclass(target, Recipe):
            self._check_recipe(node, target, arguments, given)
        elif isinstance(target, type) and issubclass(target, Module):
            self._check_module(target, given)
        else:
            self._check_signature(target, given)

    def _check_recipe(self, node: ast.Call, cls: type[Recipe], arguments, given: dict[str, ast.expr]):
        """Makes the recipe, where all of its arguments are literals or members of te_jax's enums."""
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # What is only warned of needs no edit.
                cls(*map(self._value, arguments), **{name: self._value(value) for name, value in given.items()})
        except _Unknown:
            pass
        except (TypeError, ValueError) as error:
            self._say(node, str(error))

    def _value(self, node: ast.expr) -> Any:
        if path := self._path(node):
            return find_served(path)
        try:
            return ast.literal_eval(node)
        except ValueError:
            raise _Unknown from None

    def _check_module(self, cls: type[Module], given: dict[str, ast.expr]):
        fields, kinds = {field.name for field in dataclasses.fields(cls)}, dict(kinds_of(cls))
        for name, value in given.items():
            if name not in fields:
                hint = meant(name, [field for field in fields if not isinstance(kinds.get(field), Refused)])
                self._say(value, f"{cls.__name__} has no field {name!r}{f' ({hint})' if hint else ''}; leave it out.")
            elif isinstance(kinds.get(name), Refused) and not _is_none(value):
                text = kinds[name].error.format(name=name, value=ast.unparse(value))
                self._say(value, f"{cls.__name__}: {text}.")

    def _check_signature(self, target, given: dict[str, ast.expr]):
        try:
            parameters = inspect.signature(target).parameters.values()
        except (TypeError, ValueError):
            return
        if any(p.kind is p.VAR_KEYWORD for p in parameters):
            return
        known = [p.name for p in parameters if p.kind is not p.POSITIONAL_ONLY]
        for name, value in given.items():
            if name not in known:
                self._say(value, f"{target.__name__} has no argument {name!r}; it takes {', '.join(known)}.")
            elif (way_out := _REFUSED.get((target.__name__, name))) and not _is_none(value):
                self._say(value, f"{target.__name__}: te_jax has no {name}; {way_out}.")


_REFUSED = {  # (function, argument): the way out
    ("activation", "quantizer"): "use layernorm_mlp, which quantizes in the kernel",
    ("fused_attn", "score_mod"): "give a bias or a mask",
    ("fused_attn", "stripe_size"): "use ReorderStrategy.DualChunkSwap",
    ("layernorm", "quantizer"): "use layernorm_dense or layernorm_mlp, which quantize in the kernel",
}
_CAUGHT = {"ImportError", "ModuleNotFoundError", "AttributeError", "TypeError", "ValueError", "Exception"}


class _Unknown(Exception):
    """An argument's value is not known before the program runs."""


def _names_of(node: ast.expr | None) -> list[str]:
    """The names of what an `except` catches; a bare one is "Exception"."""
    if node is None:
        return ["Exception"]
    return [ast.unparse(each) for each in (node.elts if isinstance(node, ast.Tuple) else [node])]


def _is_none(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and node.value is None
