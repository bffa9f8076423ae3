"""Runs a program without a backend, to record its nodes."""

from __future__ import annotations

import contextvars
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

from sylvan.lang import ir
from sylvan.lang.chat_templates import Message, MessageFormat
from sylvan.lang.graph import TraceGraph, TraceNode
from sylvan.lang.state import JoinMode, ProgramState, ProgramStateGroup


class UntraceableError(Exception):
    """The program reached a node other than constant text."""


_current: contextvars.ContextVar[TracerProgramState | None] = contextvars.ContextVar(
    "sylvan_tracer", default=None
)


def current_tracer() -> TracerProgramState | None:
    """The state being traced in this context, if any."""
    return _current.get()


@contextmanager
def tracing(state: TracerProgramState) -> Iterator[None]:
    """Context in which called programs are traced too, as children of `state`."""
    token = _current.set(state)
    try:
        yield
    finally:
        _current.reset(token)


@dataclass(slots=True, eq=False)
class _Chat:
    template: MessageFormat
    messages: list[Message] = field(default_factory=list)
    role: str | None = None


class TracerProgramState(ProgramState):
    """Records nodes instead of executing them.

    Roles are written with the chat template; variables become `ir.Variable` nodes, missing
    arguments `ir.Argument` nodes.
    """

    def __init__(
        self,
        template: MessageFormat,
        arguments: Mapping[str, Any],
        *,
        only_prefix: bool = False,
        graph: TraceGraph | None = None,
    ) -> None:
        self.pid = uuid.uuid4().hex
        self.arguments = arguments
        self.graph = TraceGraph() if graph is None else graph
        self.nodes: list[TraceNode] = []
        self.last_node: TraceNode | None = None
        self.variables: dict[str, ir.Variable] = {}
        self.child_states: list[TracerProgramState] = []
        self.ret_value: Any = None
        self._only_prefix = only_prefix
        self._chat = _Chat(template)
        parent = current_tracer()
        if parent is not None:
            parent.child_states.append(self)

    def append(self, expr: ir.Expr) -> None:
        """Record nodes."""
        for node in ir.flatten(expr):
            self._record(node)

    def _record(self, node: ir.Expr) -> None:
        if isinstance(node, ir.RoleBegin):
            self._role_begin(node.role)
        elif isinstance(node, ir.RoleEnd):
            self._role_end(node.role)
        elif isinstance(node, ir.ConstantText):
            self._add(node)
        elif self._only_prefix:
            raise UntraceableError
        else:
            self._add(node)
            self._declare(node)

    def _declare(self, node: ir.Expr) -> None:
        if isinstance(node, ir.Gen | ir.Select):
            kind = "gen" if isinstance(node, ir.Gen) else "select"
            name = node.name or f"{kind}_{len(self.variables)}"
        elif isinstance(node, ir.VarScopeEnd):
            name = node.name
        else:
            return
        self.variables[name] = ir.Variable(name, self.last_node)

    def _add(self, node: ir.Expr) -> None:
        self.last_node = self.graph.add(node, self.last_node, self.pid)
        self.nodes.append(self.last_node)

    def _role_begin(self, role: str) -> None:
        chat = self._chat
        if chat.role is not None:
            raise ValueError(f"a {role} message cannot begin inside a {chat.role} message")
        default = chat.template.default_system_prompt
        if not chat.messages and role != "system" and default:
            self._role_begin("system")
            self._add(ir.ConstantText(default))
            self._role_end("system")
        chat.role = role
        self._add(ir.ConstantText(chat.template.get_prefix_and_suffix(role, chat.messages)[0]))

    def _role_end(self, role: str) -> None:
        chat = self._chat
        self._add(ir.ConstantText(chat.template.get_prefix_and_suffix(role, chat.messages)[1]))
        chat.messages.append({"role": role, "content": "..."})
        chat.role = None

    def fork(
        self, size: int = 1, position_ids_offset: Sequence[int] | None = None
    ) -> ProgramStateGroup:
        """States whose nodes follow this state's."""
        del position_ids_offset
        if self._only_prefix:
            raise UntraceableError
        fork = self.graph.add(ir.Fork(size), self.last_node, self.pid)
        self.last_node = fork
        self.nodes.append(fork)
        return ProgramStateGroup([self._forked(i, fork) for i in range(size)], self)

    def _forked(self, index: int, fork: TraceNode) -> TracerProgramState:
        state = TracerProgramState(self._chat.template, self.arguments, graph=self.graph)
        state.last_node = self.graph.add(ir.GetForkItem(index), fork, state.pid)
        state.nodes.append(state.last_node)
        state.variables = dict(self.variables)
        state._chat = _Chat(self._chat.template, list(self._chat.messages), self._chat.role)
        return state

    def take_results(self, states: Sequence[ProgramState], mode: JoinMode) -> None:
        traced = [state for state in states if isinstance(state, TracerProgramState)]
        if mode == "concate_and_append":
            self._add(ir.ConcatenateAndAppend(tuple(state.last_node for state in traced)))
            return
        for state in traced:
            for name, variable in state.variables.items():
                self.variables.setdefault(name, variable)

    def end(self) -> None:
        """No-op: there is nothing to end."""

    def get_var(self, name: str, timeout: float | None = None) -> Any:
        """A variable as a node; an argument with its value."""
        del timeout
        known = self.arguments.get(name)
        return self.variables[name] if known is None else known

    def set_var(self, name: str, value: Any) -> None:
        """Record that the program sets a variable."""
        self.variables[name] = ir.Variable(name, value)

    def get_meta_info(self, name: str, timeout: float | None = None) -> Any:
        """Unknown before the program runs."""
        del name, timeout
        return None

    def text(self) -> str:
        """The constant text so far; a program that reads it cannot be traced further."""
        raise UntraceableError

    def messages(self) -> list[dict[str, Any]]:
        raise UntraceableError

    def sync(self, timeout: float | None = None) -> None:
        """No-op: there is nothing to wait for."""

    def error(self) -> None:
        """Tracing never fails."""

    def __contains__(self, name: object) -> bool:
        return name in self.variables

    def __repr__(self) -> str:
        return f"TracerProgramState({len(self.nodes)} nodes)"

    @property
    def template(self) -> MessageFormat:
        """How roles are spelt."""
        return self._chat.template

    def flatten_nodes(self) -> list[ir.Expr]:
        """The nodes of this state, in order."""
        return [node.expr for node in self.nodes]

    def to_dot(self) -> str:
        """The graph in the DOT language of Graphviz."""
        return self.graph.to_dot()

    def to_svg(self) -> str:
        """The graph as a picture."""
        return self.graph.to_svg()


@dataclass(frozen=True, slots=True)
class Traceable:
    """A program to trace: its function, and its bound arguments."""

    function: Callable[..., Any]
    arg_names: Sequence[str]
    bound: Mapping[str, Any]


def trace_program(
    program: Traceable, arguments: Mapping[str, Any], template: MessageFormat
) -> TracerProgramState:
    """Record the nodes of a run with these arguments; missing ones are unknown.

    Raises:
        TypeError: the program needs the value of an unknown argument.
    """
    unknown = {name: ir.Argument(name) for name in program.arg_names}
    values = {**unknown, **arguments, **program.bound}
    state = TracerProgramState(template, values)
    with tracing(state):
        state.ret_value = program.function(state, **values)
    return state


def extract_prefix(program: Traceable, template: MessageFormat) -> str:
    """The constant text with which every run starts, whatever its arguments."""
    values = {**{name: ir.Argument(name) for name in program.arg_names}, **program.bound}
    state = TracerProgramState(template, values, only_prefix=True)
    # Without arguments a program may fail in any way; the prefix ends there.
    with suppress(Exception), tracing(state):
        program.function(state, **values)
    texts = [node.value for node in state.flatten_nodes() if isinstance(node, ir.ConstantText)]
    return "".join(texts)
