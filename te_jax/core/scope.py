"""Values in force within a `with` block: part of the jit cache key, and distinct for each task and thread.

A jax user context is part of the jit cache key, but belongs to a thread. A coroutine that waits inside its block leaves
the value in force for the tasks that its thread runs next. A task or thread that is started inside a block may run
after it, or in a thread that never entered it. Python's context variables belong to a task. So a block sets both, and
it is an error to read the value where they differ.
"""

import contextlib
import threading
from collections.abc import Iterator
from contextvars import ContextVar
from typing import Any

import jax


class _Block:
    """A `with` block: the block around it, its jax user context, and whether it is still open."""

    def __init__(self, outer: "_Block | None", user_context):
        self.outer, self.user_context, self.open = outer, user_context, True


class Scope:
    """A value that `with scope(value):` puts in force.

    name:    The function that enters such blocks, for errors.
    default: The value outside of all blocks.
    """

    def __init__(self, name: str, default: Any = None) -> None:
        self._name = name
        self._user_context = jax.make_user_context(default)
        self._of_thread = threading.local()  # .block: the innermost block that this thread has entered.
        self._of_task: ContextVar[_Block | None] = ContextVar(name, default=None)

    @property
    def value(self) -> Any:
        """The value in force.

        Raises RuntimeError where another task entered the block in force, and where this task or thread was started
        inside a block that is not in force here.
        """
        entered, ours = self._innermost(), self._of_task.get()
        if entered is ours:
            return self._user_context.value
        if entered is None:
            raise RuntimeError(self._error("this task or thread was started inside of a block that is not in force"))
        raise RuntimeError(self._error("the block in force was entered by another task, which waits inside of it"))

    @contextlib.contextmanager
    def __call__(self, value) -> Iterator[None]:
        """Puts `value` (hashable) in force within the block.

        Raises RuntimeError inside a block of another task, and where blocks are left in another order than they were
        entered; they are left all the same.
        """
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
            raise  # It says more than an error about the order of blocks.
        if not self._leave(block):
            raise RuntimeError(self._error("a block was left before one that was entered inside of it, or elsewhere"))

    def _leave(self, block: _Block) -> bool:
        """Leaves `block`. Returns whether it was the innermost block of this thread."""
        in_order = self._innermost() is block
        block.open = False
        self._innermost()
        if self._of_task.get() is block:
            self._of_task.set(_first_open(block.outer))
        return in_order

    def _innermost(self) -> _Block | None:
        """The innermost open block of this thread. Blocks inside it that were left out of order, or by another thread,
        are undone first."""
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
    """The innermost open block among `block` and the blocks around it."""
    while block is not None and not block.open:
        block = block.outer
    return block
