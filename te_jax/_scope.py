"""Values in force within a `with` block: part of the jit cache key, and told from those of other tasks and threads.

A jax user context is part of the jit cache key, but belongs to a thread. A coroutine that waits inside of its block
leaves the value in force for whatever its thread runs next, as other tasks; a task or thread that is started inside of
a block may run after it, or where it never was. Python's context variables belong to a task. So a block sets both, and
where they differ nobody can say what is meant.
"""

import contextlib
import threading
from collections.abc import Iterator
from contextvars import ContextVar
from typing import Any

import jax


class _Block:
    """A `with` block: the one around it, jax's user context, and whether it has not been left yet."""

    def __init__(self, outer: "_Block | None", user_context):
        self.outer, self.user_context, self.open = outer, user_context, True


class Scope:
    """A value that `with scope(value):` puts in force.

    name:    of the function that enters such blocks, for errors.
    default: the value outside of all blocks.
    """

    def __init__(self, name: str, default=None):
        self._name = name
        self._user_context = jax.make_user_context(default)
        self._of_thread = threading.local()  # .block: the innermost one that this thread has entered
        self._of_task: ContextVar[_Block | None] = ContextVar(name, default=None)

    @property
    def value(self) -> Any:
        """The value in force. Raises RuntimeError where it is that of another task, and for one that this task or
        thread was started under, but that is not in force here."""
        entered, ours = self._innermost(), self._of_task.get()
        if entered is ours:
            return self._user_context.value
        if entered is None:
            raise RuntimeError(self._error("this task or thread was started inside of a block that is not in force"))
        raise RuntimeError(self._error("the block in force was entered by another task, which waits inside of it"))

    @contextlib.contextmanager
    def __call__(self, value) -> Iterator[None]:
        """Puts `value` (hashable) in force. Raises RuntimeError over a block of another task; and where blocks are left
        in another order than they were entered, which are then left all the same."""
        outer = self._innermost()
        if outer is not None and outer is not self._of_task.get():
            raise RuntimeError(self._error("another task waits inside of a block of its own"))
        block = _Block(outer, self._user_context(value))
        block.user_context.__enter__()
        self._of_thread.block = block
        self._of_task.set(block)
        try:
            yield
        except BaseException:
            self._leave(block)
            raise  # which says more than the order
        if not self._leave(block):
            raise RuntimeError(self._error("a block was left before one that was entered inside of it, or elsewhere"))

    def _leave(self, block: _Block) -> bool:
        """Whether it was the innermost block of this thread."""
        in_order = self._innermost() is block
        block.open = False
        self._innermost()
        if self._of_task.get() is block:
            self._of_task.set(_first_open(block.outer))
        return in_order

    def _innermost(self) -> _Block | None:
        """The innermost open block of this thread; what was left in another order, or elsewhere, is undone first."""
        block = getattr(self._of_thread, "block", None)
        while block is not None and not block.open:
            block.user_context.__exit__(None, None, None)
            block = block.outer
        self._of_thread.block = block
        return block

    def _error(self, what: str) -> str:
        return (
            f"{self._name}: {what}; enter it around the call itself, in the task or thread that makes the call, and "
            "never around an `await` or a `yield`."
        )


def _first_open(block: _Block | None) -> _Block | None:
    while block is not None and not block.open:
        block = block.outer
    return block
