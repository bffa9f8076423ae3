"""Traces modules of other libraries on tensors without numbers, as graphs of torch functions.

The module's own Python runs once, on the meta device. Its shapes, methods and helper functions are
those of a real call; what depends on numbers cannot be traced.
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

_ROWS = 3  # of a trial; leading dimensions (1, 3), as models have them
_CHANGES_NOTHING = frozenset(
    {"to", "type", "type_as", "float", "bfloat16", "contiguous", "clone", "detach", "dropout"}
)
INPUT, PARAMETER = "input", "parameter"


@dataclass(frozen=True, slots=True, eq=False)
class Node:
    """A tensor of a traced module.

    Attributes:
        function: Name of the torch function that returned it, `INPUT` or `PARAMETER`.
        shape: Its shape in the trial.
        args: Arguments of the function: nodes and other values; the name of a parameter.
        options: Keyword arguments.
        part: Which of the tensors that the function returned.
    """

    function: str
    shape: tuple[int, ...]
    args: tuple[Any, ...] = ()
    options: Mapping[str, Any] = field(default_factory=dict[str, Any])
    part: int = 0

    def argument(self, index: int, name: str, default: Any = None) -> Any:
        """An argument, given by position or by name."""
        return self.args[index] if index < len(self.args) else self.options.get(name, default)


def trace_module(module: nn.Module, cols: int, dtype: torch.dtype) -> Node:
    """What a module returns for rows (1, T, cols).

    Raises:
        Unsupported: it cannot be traced, or returns anything but rows.
    """
    held = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    without = {name: torch.empty_like(value, device="meta") for name, value in held.items()}
    names = {id(value): name for name, value in without.items()}
    x = torch.empty(1, _ROWS, cols, dtype=dtype, device="meta")
    return _traced(lambda rows: functional_call(module, without, (rows,)), x, names)


def trace_function(run: Callable[[torch.Tensor], Any], x: torch.Tensor) -> Node:
    """What a function returns for a tensor on the meta device; raises as `trace_module`."""
    return _traced(run, x, {})


def takes(module: nn.Module, count: int) -> bool:
    """Whether a module takes exactly that many arguments."""
    taken = inspect.signature(module.forward).parameters.values()
    return [p.kind for p in taken] == [inspect.Parameter.POSITIONAL_OR_KEYWORD] * count


def plain(node: Any) -> Any:
    """A node without casts and copies around it; another value as it is."""
    while isinstance(node, Node) and node.function in _CHANGES_NOTHING:
        node = node.args[0]
    return node


def factors(node: Any) -> list[Any]:
    """The factors of a product, in any order; a quotient has the reciprocal of its divisor."""
    node = plain(node)
    known = isinstance(node, Node) and node.function in ("mul", "div", "neg")
    if not known or node.options:
        return [node]
    if node.function == "neg":
        return [-1.0, *factors(node.args[0])]
    a, b = node.args[:2]
    if node.function == "mul":
        return factors(a) + factors(b)
    divisor = plain(b)
    if not isinstance(divisor, Node):
        return [*factors(a), 1.0 / divisor]
    return [*factors(a), Node("pow", divisor.shape, (divisor, -1))]


def _traced(
    run: Callable[[torch.Tensor], Any], x: torch.Tensor, parameters: Mapping[int, str]
) -> Node:
    trace = _Trace(x, parameters)
    try:
        with torch.inference_mode(), trace:
            found = run(x)
    except UNTRACEABLE as error:
        raise Unsupported(f"a module that cannot be traced: {error}") from None
    node = trace.node(found)
    if not isinstance(node, Node) or found.dtype != x.dtype:
        raise Unsupported(f"a module that returns {getattr(found, 'dtype', type(found).__name__)}")
    return node


class _Trace(TorchFunctionMode):
    """Mode that records each torch function with its arguments."""

    def __init__(self, x: torch.Tensor, parameters: Mapping[int, str]) -> None:
        super().__init__()
        self._parameters = parameters
        self._nodes = {id(x): Node(INPUT, tuple(x.shape))}
        self._kept: list[Any] = [x]  # so that ids stay theirs

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        options, name = kwargs or {}, func.__name__
        given = tuple(map(self.node, args)), {key: self.node(x) for key, x in options.items()}
        found = func(*args, **options)
        changes = name.endswith("_") and not name.endswith("__")
        if name == "__setitem__" or changes or options.get("inplace") or options.get("training"):
            raise Unsupported(f"{name}, which changes tensors or draws numbers")
        parts = found if isinstance(found, tuple | list) else (found,)
        for index, part in enumerate(parts):
            if isinstance(part, torch.Tensor) and id(part) not in self._nodes:
                self._nodes[id(part)] = Node(name, tuple(part.shape), *given, index)
        self._kept.append(found)
        return found

    def node(self, value: Any) -> Any:
        """The node of a tensor; another value as it is."""
        if not isinstance(value, torch.Tensor):
            return value
        if id(value) in self._parameters:
            return Node(PARAMETER, tuple(value.shape), (self._parameters[id(value)],))
        return self._nodes.get(id(value), Node("constant", tuple(value.shape)))
