"""Program states `s`, and groups of forked states."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import contextmanager
from types import TracebackType
from typing import Any, Literal

from sylvan.lang import ir
from sylvan.lang.cursor import TextCursor
from sylvan.lang.executor import StreamExecutor

JoinMode = Literal["gather_variable", "concate_and_append"]


class Scope:
    """Nodes before and after the body of a `with` block."""

    def __init__(self, state: ProgramState, begin: ir.Expr, end: ir.Expr) -> None:
        self._state = state
        self._begin = begin
        self._end = end

    def __enter__(self) -> None:
        self._state.append(self._begin)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if error is None:
            self._state.append(self._end)


class Results:
    """The reading interface of a state: text, messages, variables.

    Reading blocks until the value is available, and raises `ProgramError`, with the program's line,
    if a node failed before.
    """

    def __init__(self, stream_executor: StreamExecutor) -> None:
        self.stream_executor = stream_executor
        self.ret_value: Any = None

    def text(self) -> str:
        """The whole text, once all nodes are executed."""
        self.stream_executor.sync()
        self.stream_executor.raise_error()
        return self.stream_executor.context.text_

    def messages(self) -> list[dict[str, Any]]:
        """The chat messages in OpenAI's format, once all nodes are executed."""
        self.stream_executor.sync()
        self.stream_executor.raise_error()
        return self.stream_executor.context.messages_

    def sync(self, timeout: float | None = None) -> None:
        """Wait until all appended nodes are executed, or one failed.

        Raises:
            TimeoutError: it took longer than `timeout` seconds.
        """
        self.stream_executor.sync(timeout)

    def error(self) -> BaseException | None:
        """The error of the program, or None, once everything has finished."""
        self.stream_executor.sync()
        return self.stream_executor.failure

    def cancel(self) -> None:
        """Stop this state and its forks; aborts calls in flight."""
        self.stream_executor.context.scope.cancel()

    def get_var(self, name: str, timeout: float | None = None) -> Any:
        """Wait for the value of a variable.

        Raises:
            KeyError: nothing sets it.
            ProgramError: the program failed before.
            TimeoutError: it took longer than `timeout` seconds.
        """
        return self.stream_executor.get_var(name, timeout)

    def set_var(self, name: str, value: Any) -> None:
        """Set a variable."""
        self.stream_executor.context.variables[name] = value

    def get_meta_info(self, name: str, timeout: float | None = None) -> Any:
        """Meta info of the gen or select that set `name`; None without any."""
        executor = self.stream_executor
        executor.wait(lambda: executor.is_set(name), timeout)
        if name not in executor.context.meta_info:
            executor.raise_error()
        return executor.context.meta_info.get(name)

    async def async_get_var(self, name: str) -> Any:
        """Like `get_var`, without blocking the event loop."""
        await self.stream_executor.wait_async(lambda: self.stream_executor.is_set(name))
        return self.stream_executor.read_var(name)

    async def async_sync(self) -> None:
        """Like `sync`, without blocking the event loop."""
        await self.stream_executor.wait_async(self.stream_executor.is_idle)

    def text_iter(self, var_name: str | None = None) -> Iterator[str]:
        """Pieces of the text or of a variable as they arrive; one piece without `stream=True`.

        Raises:
            ProgramError: the program failed; raised after the pieces before.
        """
        cursor = TextCursor(self.stream_executor, var_name)
        while (piece := cursor.next()) is not None:
            yield piece.text

    async def text_async_iter(
        self, var_name: str | None = None, return_meta_data: bool = False
    ) -> AsyncIterator[Any]:
        """Like `text_iter`, without blocking the event loop.

        With `return_meta_data` each item is (piece, meta info).
        """
        cursor = TextCursor(self.stream_executor, var_name)
        while (piece := await cursor.next_async()) is not None:
            yield (piece.text, piece.meta) if return_meta_data else piece.text

    def __getitem__(self, name: str) -> Any:
        return self.get_var(name)

    def __setitem__(self, name: str, value: Any) -> None:
        self.set_var(name, value)

    def __contains__(self, name: object) -> bool:
        return name in self.stream_executor.context.variables


class ProgramState(Results):
    """The state of a running program: text so far, variables, and pending nodes.

    Appending returns at once. See `Results` for reading.
    """

    def append(self, expr: ir.Expr) -> None:
        """Add nodes."""
        self.stream_executor.submit(expr)

    def __iadd__(self, other: object) -> ProgramState:
        self.append(ir.as_expr(other))
        return self

    def system(self, expr: Any = None) -> Any:
        """A system message with `expr`; without it, a `with` block for its parts."""
        return self._role("system", expr)

    def user(self, expr: Any = None) -> Any:
        """A user message. See `system`."""
        return self._role("user", expr)

    def assistant(self, expr: Any = None) -> Any:
        """An assistant message. See `system`."""
        return self._role("assistant", expr)

    def _role(self, role: str, expr: Any) -> ir.Expr | Scope:
        begin, end = ir.RoleBegin(role), ir.RoleEnd(role)
        if expr is None:
            return Scope(self, begin, end)
        message = begin + expr + end
        self.append(message)
        return message

    def var_scope(self, name: str) -> Scope:
        """A `with` block whose text becomes the variable `name`."""
        return Scope(self, ir.VarScopeBegin(name), ir.VarScopeEnd(name))

    def fork(
        self, size: int = 1, position_ids_offset: Sequence[int] | None = None
    ) -> ProgramStateGroup:
        """Copies that run in parallel from here, and share the text computed so far.

        Args:
            size: Number of copies.
            position_ids_offset: Accepted for SGLang's programs; has no effect there either.
        """
        del position_ids_offset
        return ProgramStateGroup([ProgramState(x) for x in self.stream_executor.fork(size)], self)

    @contextmanager
    def copy(self, position_ids_offset: Sequence[int] | None = None) -> Iterator[ProgramState]:
        """A single copy in a `with` block; its variables are gathered as by `join`."""
        group = self.fork(1, position_ids_offset)
        try:
            yield group[0]
        finally:
            group.join()

    def take_results(self, states: Sequence[ProgramState], mode: JoinMode) -> None:
        """Update this state with the results of its forks; see `ProgramStateGroup.join`."""
        for state in states:
            state.stream_executor.raise_error()
        if mode == "concate_and_append":
            self.append(ir.ConcatenateAndAppend(tuple(x.stream_executor for x in states)))
            self.sync()
            return
        variables = self.stream_executor.context.variables
        before = set(variables)
        for state in states:
            for name, value in state.stream_executor.context.variables.items():
                if name not in before:
                    variables.setdefault(name, []).append(value)

    def end(self) -> None:
        """Declare that no more nodes will be appended."""
        self.stream_executor.end()

    def __repr__(self) -> str:
        return f"ProgramState({self.stream_executor.context.text_!r})"


class ProgramStateGroup:
    """States forked from one, to be joined."""

    def __init__(
        self, states: Sequence[ProgramState], src_state: ProgramState | None = None
    ) -> None:
        self.states = list(states)
        self.src_state = src_state

    def join(self, mode: JoinMode = "gather_variable") -> None:
        """Wait for the states, and merge their results into the state they were forked from.

        Args:
            mode: `gather_variable` sets each variable that is new in a fork to the list of its
                values in all forks; `concate_and_append` appends the forks' new texts.

        Raises:
            ProgramError: a fork failed.
            ValueError: an unknown mode.
        """
        if mode not in ("gather_variable", "concate_and_append"):
            raise ValueError(
                f"join mode must be gather_variable or concate_and_append, not {mode!r}"
            )
        for state in self.states:
            state.sync()
        if self.src_state is not None:
            self.src_state.take_results(self.states, mode)
        for state in self.states:
            state.end()

    def cancel(self) -> None:
        """Stop all states of the group."""
        for state in self.states:
            state.cancel()

    def __len__(self) -> int:
        return len(self.states)

    def __iter__(self) -> Iterator[ProgramState]:
        return iter(self.states)

    def __getitem__(self, index: int) -> ProgramState:
        return self.states[index]

    def __setitem__(self, index: int, value: ProgramState) -> None:
        # `group[i] += x` assigns the state to itself.
        if self.states[index] is not value:
            raise ValueError("states of a group cannot be replaced")

    def __iadd__(self, other: object) -> ProgramStateGroup:
        for i, state in enumerate(self.states):
            state.append(ir.as_expr(_share(other, i, len(self.states))))
        return self


def _share(other: object, index: int, size: int) -> object:
    """The value for state `index` of a group: a common value, its item, or a call's result."""
    if isinstance(other, list | tuple):
        if len(other) != size:
            raise ValueError(f"{len(other)} items were appended to a group of {size} states")
        return other[index]
    if callable(other):
        function: Callable[[int], object] = other
        return function(index)
    return other
