"""Traces modules of other libraries on tensors without numbers, as graphs of torch functions.

The module's own Python runs once, on the meta device, with the shapes of a real call. A module that
depends on the values of tensors cannot be traced.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.func import functional_call
from torch.overrides import TorchFunctionMode

from sylvan.kernels.api import Unsupported
from sylvan.runtime.models.skeleton import UNTRACEABLE

_ROWS = 3  # of a traced call; leading dimensions (1, 3), as models have them
_CHANGES_NOTHING = frozenset(
    {"to", "type", "type_as", "float", "bfloat16", "contiguous", "clone", "detach", "dropout"}
)
INPUT, PARAMETER = "input", "parameter"


@dataclass(frozen=True, slots=True, eq=False)
class TensorNode:
    """A tensor of a traced module.

    Attributes:
        function: Name of the torch function that returned it, `INPUT` or `PARAMETER`.
        shape: Its shape in the traced call.
        dtype: Its type.
        args: Arguments of the function: nodes and other values; the name of a parameter.
        options: Keyword arguments.
        part: Index among the tensors that the function returned.
    """

    function: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    args: tuple[Any, ...] = ()
    options: Mapping[str, Any] = field(default_factory=dict[str, Any])
    part: int = 0

    def argument(self, index: int, name: str, default: Any = None) -> Any:
        """An argument, given by position or by name."""
        return self.args[index] if index < len(self.args) else self.options.get(name, default)


def trace_module(module: nn.Module, cols: int, dtype: torch.dtype) -> TensorNode:
    """Trace a module on rows (1, T, cols); return the node of its result.

    Raises:
        Unsupported: the module cannot be traced, or does not return rows.
    """
    x = torch.empty(1, _ROWS, cols, dtype=dtype, device="meta")
    without, names = _without_numbers(module)
    return _result(_Trace(x, names), lambda rows: functional_call(module, without, (rows,)), x)


def trace_function(run: Callable[[torch.Tensor], Any], x: torch.Tensor) -> TensorNode:
    """Trace a function on a meta tensor; return the node of its result. See `trace_module`."""
    return _result(_Trace(x, {}), run, x)


def products_of(module: nn.Module, cols: int, dtype: torch.dtype) -> list[TensorNode]:
    """Return the matrix products that a module computes for rows (T, cols).

    Raises:
        Unsupported: it cannot be traced.
    """
    x = torch.empty(_ROWS, cols, dtype=dtype, device="meta")
    without, names = _without_numbers(module)
    trace = _Trace(x, names)
    trace.run(lambda rows: functional_call(module, without, (rows,)), x)
    return [node for node in trace.nodes if node.function == "linear"]


def takes(module: nn.Module, count: int) -> bool:
    """Whether a module takes exactly this many arguments."""
    taken = inspect.signature(module.forward).parameters.values()
    return [p.kind for p in taken] == [inspect.Parameter.POSITIONAL_OR_KEYWORD] * count


def plain(node: Any) -> Any:
    """Return a node without the casts and copies around it; other values unchanged."""
    while isinstance(node, TensorNode) and node.function in _CHANGES_NOTHING:
        node = node.args[0]
    return node


def factors(node: Any) -> list[Any]:
    """Return the factors of a product; a quotient has the reciprocal of its divisor."""
    node = plain(node)
    known = isinstance(node, TensorNode) and node.function in ("mul", "div", "neg")
    if not known or node.options:
        return [node]
    if node.function == "neg":
        return [-1.0, *factors(node.args[0])]
    a, b = node.args[:2]
    if node.function == "mul":
        return factors(a) + factors(b)
    divisor = plain(b)
    if not isinstance(divisor, TensorNode):
        return [*factors(a), 1.0 / divisor]
    return [*factors(a), TensorNode("pow", divisor.shape, divisor.dtype, (divisor, -1))]


def _without_numbers(module: nn.Module) -> tuple[dict[str, torch.Tensor], Mapping[int, str]]:
    """Return the tensors of a module on the meta device, and their names by id."""
    held = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    without = {name: torch.empty_like(value, device="meta") for name, value in held.items()}
    return without, {id(value): name for name, value in without.items()}


def _result(trace: _Trace, run: Callable[[torch.Tensor], Any], x: torch.Tensor) -> TensorNode:
    found = trace.run(run, x)
    node = trace.node(found)
    if not isinstance(node, TensorNode) or node.dtype != x.dtype:
        raise Unsupported(f"a module that returns {getattr(found, 'dtype', type(found).__name__)}")
    if trace.changes:
        raise Unsupported(f"torch.{trace.changes}, which writes in place or draws random numbers")
    return node


class _Trace(TorchFunctionMode):
    """Mode that records each torch function with its arguments.

    Attributes:
        nodes: Nodes of the tensors that the functions returned, in order.
        changes: Name of a function that writes in place or draws random numbers; empty: none did.
    """

    def __init__(self, x: torch.Tensor, parameters: Mapping[int, str]) -> None:
        super().__init__()
        self._parameters = parameters
        self._nodes = {id(x): _node(INPUT, x)}
        self._kept: list[Any] = [x]  # keeps tensors alive, so that no id is reused
        self.nodes: list[TensorNode] = []
        self.changes = ""

    def run(self, run: Callable[[torch.Tensor], Any], x: torch.Tensor) -> Any:
        """Call a function in this mode.

        Raises:
            Unsupported: it cannot be traced.
        """
        try:
            with torch.inference_mode(), self:
                return run(x)
        except UNTRACEABLE as error:
            raise Unsupported(f"a module that cannot be traced: {error}") from None

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        options, name = kwargs or {}, func.__name__
        given = tuple(map(self.node, args)), {key: self.node(x) for key, x in options.items()}
        found = func(*args, **options)
        in_place = name == "__setitem__" or (name.endswith("_") and not name.endswith("__"))
        if in_place or options.get("inplace") or options.get("training"):
            self.changes = name
        parts = found if isinstance(found, tuple | list) else (found,)
        for index, part in enumerate(parts):
            if isinstance(part, torch.Tensor) and id(part) not in self._nodes:
                self.nodes.append(_node(name, part, *given, index))
                self._nodes[id(part)] = self.nodes[-1]
        self._kept.append(found)
        return found

    def node(self, value: Any) -> Any:
        """Return the node of a tensor; other values unchanged."""
        if not isinstance(value, torch.Tensor):
            return value
        if id(value) in self._parameters:
            return _node(PARAMETER, value, (self._parameters[id(value)],))
        return self._nodes.get(id(value)) or _node("constant", value)


def _node(function: str, value: torch.Tensor, *rest: Any) -> TensorNode:
    return TensorNode(function, tuple(value.shape), value.dtype, *rest)
