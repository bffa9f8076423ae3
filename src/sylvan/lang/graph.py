"""The graph of a traced program, and its drawing."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from html import escape

from sylvan.lang import ir

_COLUMN, _ROW, _WIDTH, _HEIGHT = 220, 46, 190, 30
_FILL = {"Gen": "#cfe8cf", "Select": "#cfe0f5", "Fork": "#f5e6c4", "ConstantText": "#eeeeee"}
_LABEL_CHARS = 28


@dataclass(frozen=True, slots=True, eq=False)
class TraceNode:
    """A node of a program, and its place in the trace."""

    node_id: int
    expr: ir.Expr
    prev_node: TraceNode | None
    pid: str  # state that it belongs to

    def sources(self) -> tuple[TraceNode, ...]:
        """Nodes that this one follows or reads."""
        expr = self.expr
        read: tuple[object, ...] = ()
        if isinstance(expr, ir.Variable):
            read = (expr.source,)
        elif isinstance(expr, ir.ConcatenateAndAppend):
            read = expr.states
        before = () if self.prev_node is None else (self.prev_node,)
        return (*before, *(node for node in read if isinstance(node, TraceNode)))

    def print_graph_dfs(self) -> str:
        """The nodes that lead to this one, one per line, in order of dependence."""
        return "\n".join(_lines(self)) + "\n"

    def __repr__(self) -> str:
        return f"%{self.node_id} = {self.expr!r}"


def _lines(last: TraceNode) -> Iterator[str]:
    done: set[TraceNode] = set()
    stack: list[tuple[TraceNode, bool]] = [(last, False)]
    while stack:
        node, expanded = stack.pop()
        if expanded:
            before = "" if node.prev_node is None else f"%{node.prev_node.node_id} + "
            yield f"%{node.node_id} = {before}{node.expr!r}"
        elif node not in done:
            done.add(node)
            stack.append((node, True))
            stack.extend((source, False) for source in reversed(node.sources()))


@dataclass(slots=True)
class TraceGraph:
    """All nodes of a trace, forks included, in the order they were recorded."""

    nodes: list[TraceNode] = field(default_factory=list)

    def add(self, expr: ir.Expr, prev: TraceNode | None, pid: str) -> TraceNode:
        """Record `expr` of state `pid` after `prev`."""
        node = TraceNode(len(self.nodes), expr, prev, pid)
        self.nodes.append(node)
        return node

    def to_dot(self) -> str:
        """The graph in the DOT language of Graphviz; dashed edges are reads of variables."""
        lines = ["digraph program {", "  node [shape=box, style=filled, fontname=monospace];"]
        for node in self.nodes:
            label = _label(node.expr).replace("\\", "\\\\").replace('"', '\\"')
            fill = _FILL.get(type(node.expr).__name__, "#ffffff")
            lines.append(f'  n{node.node_id} [label="{label}", fillcolor="{fill}"];')
        for source, node in self._edges():
            style = "" if source is node.prev_node else " [style=dashed]"
            lines.append(f"  n{source.node_id} -> n{node.node_id}{style};")
        return "\n".join([*lines, "}"]) + "\n"

    def to_svg(self) -> str:
        """Draw the graph: a column per state, time downwards."""
        places = self._places()
        width = max((x for x, _ in places.values()), default=0) + _WIDTH + 20
        height = max((y for _, y in places.values()), default=0) + _HEIGHT + 20
        parts = [
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" '
            'font-family="monospace" font-size="11">'
        ]
        for source, node in self._edges():
            (x1, y1), (x2, y2) = places[source], places[node]
            dash = "" if source is node.prev_node else ' stroke-dasharray="4 3"'
            parts.append(
                f'<line x1="{x1 + _WIDTH // 2}" y1="{y1 + _HEIGHT}" x2="{x2 + _WIDTH // 2}" '
                f'y2="{y2}" stroke="#888"{dash}/>'
            )
        for node, (x, y) in places.items():
            fill = _FILL.get(type(node.expr).__name__, "#ffffff")
            parts.append(
                f'<rect x="{x}" y="{y}" width="{_WIDTH}" height="{_HEIGHT}" rx="4" '
                f'fill="{fill}" stroke="#444"/>'
                f'<text x="{x + 6}" y="{y + 19}">{escape(_label(node.expr))}</text>'
            )
        return "\n".join([*parts, "</svg>"]) + "\n"

    def _edges(self) -> Iterator[tuple[TraceNode, TraceNode]]:
        for node in self.nodes:
            for source in node.sources():
                yield source, node

    def _places(self) -> dict[TraceNode, tuple[int, int]]:
        columns: dict[str, int] = {}
        rows: dict[TraceNode, int] = {}
        for node in self.nodes:
            columns.setdefault(node.pid, len(columns))
            rows[node] = max((rows[source] + 1 for source in node.sources()), default=0)
        return {
            node: (10 + columns[node.pid] * _COLUMN, 10 + rows[node] * _ROW) for node in self.nodes
        }


def _label(expr: ir.Expr) -> str:
    text = repr(expr.value) if isinstance(expr, ir.ConstantText) else repr(expr)
    return text if len(text) <= _LABEL_CHARS else text[: _LABEL_CHARS - 3] + "..."
