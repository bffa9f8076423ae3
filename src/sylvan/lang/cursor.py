"""Reads a growing text piece by piece, from a thread or from an event loop."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from sylvan.lang.executor import StreamExecutor


@dataclass(frozen=True, slots=True)
class Piece:
    """New text, and the meta info of its gen."""

    text: str
    meta: Any = None


class TextCursor:
    """A reader's position in the text of a state, or in one of its variables.

    Without streaming there is a single piece: the whole text, once it is complete.
    """

    def __init__(self, executor: StreamExecutor, name: str | None) -> None:
        self._executor = executor
        self._name = name
        self._position = 0
        self._over = False

    def next(self) -> Piece | None:
        """Wait for the next piece; None at the end.

        Raises:
            ProgramError: the state failed, after its last piece.
        """
        if self._over:
            return None
        stream = self._executor.context.stream
        self._executor.wait(self._ready, may_execute=not stream)
        return self._take()

    async def next_async(self) -> Piece | None:
        """Wait for the next piece without blocking the event loop; like `next` otherwise."""
        if self._over:
            return None
        await self._executor.wait_async(self._ready)
        return self._take()

    def _ready(self) -> bool:
        if not self._executor.context.stream:
            return self._complete()
        return len(self._value()) > self._position or self._complete()

    def _complete(self) -> bool:
        executor = self._executor
        known = self._name is not None and executor.is_set(self._name)
        if not executor.context.stream:
            return executor.is_idle() if self._name is None else known
        if self._name is None or (known and self._name not in executor.variables):
            return executor.is_finished
        return known

    def _value(self) -> str:
        context = self._executor.context
        if self._name is None:
            return context.text_
        value = context.variables.get(self._name, "")
        return value if isinstance(value, str) else str(value[0] if value else "")

    def _take(self) -> Piece | None:
        executor = self._executor
        with executor.signal.lock:
            text = self._value()[self._position :]
            meta = executor.context.meta_info.get(self._name or "")
        if text:
            self._position += len(text)
            return Piece(text, meta)
        self._over = True
        if self._name is not None and not executor.context.stream:
            executor.read_var(self._name)
        elif self._name is None or not executor.is_set(self._name):
            executor.raise_error()
        return None
