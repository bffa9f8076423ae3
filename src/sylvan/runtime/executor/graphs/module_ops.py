"""Matches the torch functions of a traced module to typed ops: norms, products, activations, sums.

Each row of the result depends only on the same row of the input. Casts within a module are
omitted: an op rounds once, where the module may round several times.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import torch
from torch import nn

from sylvan.kernels import ops
from sylvan.kernels.api import ActivationKind, ExpertWeights, TracedTensor, Unsupported
from sylvan.kernels.matmul.weights import DeferredWeight
from sylvan.runtime.executor.graphs.module_trace import (
    INPUT,
    PARAMETER,
    TensorNode,
    factors,
    plain,
    trace_function,
)

_ACTS: Mapping[str, ActivationKind] = MappingProxyType(
    {"silu": "silu", "relu": "relu", "sigmoid": "sigmoid", "tanh": "tanh"}
)
_NORMS = frozenset({"rms_norm", "layer_norm"})
_LAST = (-1, (-1,), [-1])
_STACKS = "gate_up_proj", "down_proj"  # names in transformers' interface for experts
_GATE = "_apply_gate"


@dataclass(slots=True)
class ModuleOps:
    """Emits the ops of a traced module.

    Args:
        x: Input rows of the module.
        parameters: Parameters of the module, by name.

    Attributes:
        packed: Weights to pack, each with the parameters that are stacked in it by rows.
    """

    x: TracedTensor
    parameters: Mapping[str, nn.Parameter]
    packed: list[tuple[DeferredWeight | torch.Tensor, list[str]]] = field(default_factory=list)
    _found: dict[TensorNode, TracedTensor] = field(default_factory=dict[TensorNode, TracedTensor])

    def emit(self, node: Any) -> TracedTensor:
        """Emit the ops of a node and return its value.

        Raises:
            Unsupported: no ops compute it; what was emitted must be dropped.
        """
        node = plain(node)
        if not isinstance(node, TensorNode):
            raise Unsupported(f"{node!r} instead of rows")
        if node.function == INPUT:
            return self.x
        if node not in self._found:
            found = next((value for value in self._tries(node) if value is not None), None)
            if found is None:
                raise Unsupported(f"torch.{node.function} of the rows of a module")
            self._found[node] = found
        return self._found[node]

    def _tries(self, node: TensorNode) -> Iterator[TracedTensor | None]:
        yield self._linear(node)
        yield self._norm(node)
        if (gate := gate_of(node)) is not None:
            yield self._glu(*gate)
        if (act := act_of(node)) is not None:
            yield ops.activation(self.emit(act[1]), act[0])
        yield self._sum_or_scaled(node)

    def _linear(self, node: TensorNode) -> TracedTensor | None:
        if node.function != "linear":
            return None
        x, weight, bias = _of_linear(node)
        return ops.linear(self.emit(x), self._stacked(weight), self._shift(bias))

    def _norm(self, node: TensorNode) -> TracedTensor | None:
        if (norm := norm_of(node)) is None:
            return None
        x = self.emit(norm.x)
        weight, bias = self._vector(norm.weight), self._vector(norm.bias)
        if norm.centred:
            return ops.layer_norm(x, weight, bias, norm.eps)[0]
        if weight is None:
            raise Unsupported("RMS norms without a weight")
        return ops.rms_norm(x, weight, norm.eps, weight_offset=norm.offset)[0]

    def _glu(self, act: ActivationKind, gate: TensorNode, up: TensorNode) -> TracedTensor | None:
        if (both := _halves(gate, up)) is not None:
            return ops.glu(self.emit(both), act)
        if (gate.function, up.function) != ("linear", "linear"):
            return None
        (x, first, a), (other, second, b) = _of_linear(gate), _of_linear(up)
        if x is not other or first.shape != second.shape or (a is None) != (b is None):
            return None
        both = ops.linear(self.emit(x), self._stacked(first, second), self._shift(a, b))
        return ops.glu(both, act)

    def _sum_or_scaled(self, node: TensorNode) -> TracedTensor | None:
        if node.function == "add" and not node.options:
            a, b = map(plain, node.args)
            if isinstance(a, TensorNode) and isinstance(b, TensorNode) and a.shape == b.shape:
                return ops.add(self.emit(a), self.emit(b))
        parts = factors(node)
        numbers = [part for part in parts if isinstance(part, int | float)]
        rows = [part for part in parts if isinstance(part, TensorNode)]
        if not numbers or len(rows) != 1 or len(parts) != len(numbers) + 1:
            return None
        factor = torch.tensor(numbers, dtype=torch.float64).prod().item()
        return ops.scale(self.emit(rows[0]), factor)

    def _stacked(self, *weights: TensorNode) -> DeferredWeight:
        names = [weight.args[0] for weight in weights]
        weight = held(*(self.parameters[name].detach() for name in names))
        self.packed.append((weight, names))
        return weight

    def _shift(self, *biases: TensorNode | None) -> torch.Tensor | None:
        names = [bias.args[0] for bias in biases if bias is not None]
        if len(names) < 2:
            return self._vector(biases[0])
        bias = torch.cat([self.parameters[name].detach() for name in names])
        self.packed.append((bias, names))
        return bias

    def _vector(self, node: TensorNode | None) -> torch.Tensor | None:
        if node is None:
            return None
        vector = self.parameters[node.args[0]]
        self.packed.append((vector, [node.args[0]]))
        return vector


@dataclass(frozen=True, slots=True)
class Norm:
    """A norm of whole rows: by their root mean square, or `centred` by mean and variance.

    The result is multiplied by weight + offset; Gemma's norms have an offset of 1.
    """

    x: TensorNode
    weight: TensorNode | None
    eps: float
    offset: float = 0.0
    bias: TensorNode | None = None
    centred: bool = False


def norm_of(node: TensorNode) -> Norm | None:
    """Match a norm, written as a torch function or step by step."""
    if node.function not in _NORMS:
        return _spelled_norm(node)
    x, shape = plain(node.args[0]), node.argument(1, "normalized_shape")
    weight, centred = node.argument(2, "weight"), node.function == "layer_norm"
    bias = node.argument(3, "bias") if centred else None
    eps = node.argument(4, "eps", 1e-5) if centred else node.argument(3, "eps")
    if tuple(shape) != x.shape[-1:] or not isinstance(eps, float):
        return None
    known = all(vector is None or _is_parameter(vector, 1) for vector in (weight, bias))
    return Norm(x, weight, eps, 0.0, bias, centred) if known else None


def _spelled_norm(node: TensorNode) -> Norm | None:
    """Match x * rsqrt(mean(x^2) + eps) * weight."""
    parts = factors(node)
    inverses = [part for part in parts if isinstance(part, TensorNode) and _inverse_root(part)]
    if len(inverses) != 1 or len(parts) != 3:
        return None
    found = _mean_square(_inverse_root(inverses[0]))
    if found is None:
        return None
    x, eps = found
    rest = [part for part in parts if part is not inverses[0]]
    weights = [part for part in rest if part is not x]
    if len(weights) != 1 or not isinstance(weights[0], TensorNode):
        return None
    weight, offset = weights[0], 0.0
    if weight.function == "add" and (parted := _with_number(weight)) is not None:
        weight, offset = parted
    return Norm(x, weight, eps, offset) if _is_parameter(weight, 1) else None


def _inverse_root(node: TensorNode) -> TensorNode | None:
    """Match 1 / sqrt(node) and return that node."""
    if node.function == "rsqrt":
        return plain(node.args[0])
    if node.function == "pow" and node.args[1] == -0.5:
        return plain(node.args[0])
    root = plain(node.args[0]) if node.function == "pow" and node.args[1] == -1 else None
    if isinstance(root, TensorNode) and root.function == "sqrt":
        return plain(root.args[0])
    return None


def _mean_square(node: TensorNode | None) -> tuple[TensorNode, float] | None:
    """Match mean(x^2) + eps and return x and eps."""
    if node is None or node.function != "add" or (parted := _with_number(node)) is None:
        return None
    mean, eps = parted
    if mean.function != "mean" or mean.argument(1, "dim") not in _LAST:
        return None
    square = plain(mean.args[0])
    return (x, eps) if mean.shape[-1:] == (1,) and (x := _squared(square)) is not None else None


def _squared(node: TensorNode) -> TensorNode | None:
    if node.function == "square" or (node.function == "pow" and node.args[1] == 2):
        return plain(node.args[0])
    a, b = (*map(plain, node.args), None, None)[:2] if node.function == "mul" else (None, 0)
    return a if a is b else None


def _with_number(node: TensorNode) -> tuple[TensorNode, float] | None:
    """Match the sum of a node and a number and return both."""
    parts = sorted(map(plain, node.args[:2]), key=lambda part: not isinstance(part, TensorNode))
    known = (
        isinstance(parts[0], TensorNode) and isinstance(parts[1], int | float) and not node.options
    )
    return (parts[0], float(parts[1])) if known else None


def gate_of(node: TensorNode) -> tuple[ActivationKind, TensorNode, TensorNode] | None:
    """Match act(gate) * up and return the activation, gate and up."""
    parts = factors(node)
    if len(parts) != 2 or not all(isinstance(part, TensorNode) for part in parts):
        return None
    for opened, up in (parts, parts[::-1]):
        if (act := act_of(opened)) is not None:
            return act[0], act[1], up
    return None


def act_of(node: TensorNode) -> tuple[ActivationKind, TensorNode] | None:
    """Match an activation and return its kind and input."""
    inner = plain(node.args[0]) if node.args else None
    if not isinstance(inner, TensorNode):
        return None
    if node.function == "gelu":
        return ("gelu_tanh" if node.argument(1, "approximate") == "tanh" else "gelu"), inner
    if (root := _squared(node)) is not None and root.function == "relu":
        return "relu2", plain(root.args[0])
    return (_ACTS[node.function], inner) if node.function in _ACTS else None


def gate_function(run: Callable[[torch.Tensor], Any], cols: int) -> ActivationKind | None:
    """Return the activation of a function from rows [gate | up] to act(gate) * up, or None."""
    try:
        node = plain(trace_function(run, torch.empty(3, cols, device="meta")))
    except Unsupported:
        return None
    gate = gate_of(node)
    both = None if gate is None else _halves(gate[1], gate[2])
    return gate[0] if gate is not None and both is not None and both.function == INPUT else None


def _halves(first: TensorNode, second: TensorNode) -> TensorNode | None:
    """Match two halves of the columns of a node and return that node."""
    if first.function != second.function or not first.args:
        return None
    base, cols = plain(first.args[0]), first.shape[-1]
    if base is not plain(second.args[0]) or base.shape[-1] != 2 * cols or second.shape[-1] != cols:
        return None
    if first.function in ("chunk", "split"):
        by = first.argument(1, "chunks" if first.function == "chunk" else "split_size")
        along = first.argument(2, "dim", 0) in (-1, len(base.shape) - 1)
        whole = by in (2,) if first.function == "chunk" else by in (cols, [cols, cols])
        return base if along and whole and (first.part, second.part) == (0, 1) else None
    if first.function != "__getitem__":
        return None
    starts = [_columns_from(node.args[1], base.shape[-1]) for node in (first, second)]
    return base if starts == [0, cols] else None


def _columns_from(index: Any, cols: int) -> int | None:
    """Return the first column of `x[..., a:b]`."""
    known = isinstance(index, tuple) and len(index) == 2 and index[0] is Ellipsis
    if not known or not isinstance(index[1], slice):
        return None
    start, _, step = index[1].indices(cols)
    return start if step == 1 else None


def _of_linear(node: TensorNode) -> tuple[TensorNode, TensorNode, TensorNode | None]:
    """Return the input, weight and bias of a product.

    Raises:
        Unsupported: the weight or the bias is computed.
    """
    weight, bias = node.argument(1, "weight"), node.argument(2, "bias")
    if not _is_parameter(weight, 2) or not (bias is None or _is_parameter(bias, 1)):
        raise Unsupported("a product with a computed matrix")
    return plain(node.args[0]), weight, bias


def _is_parameter(node: Any, dimensions: int) -> bool:
    known = isinstance(node, TensorNode) and node.function == PARAMETER
    return known and len(node.shape) == dimensions


def held(*parts: torch.Tensor) -> DeferredWeight:
    """Stack matrices by rows; they are freed once packed."""
    shape = torch.Size((sum(part.shape[0] for part in parts), *parts[0].shape[1:]))
    kept = list(parts)

    def load() -> torch.Tensor:
        whole = torch.cat(kept) if len(kept) > 1 else kept[0].contiguous()
        kept.clear()
        return whole

    return DeferredWeight(shape, load, f"held {id(kept)}")


@dataclass(frozen=True, slots=True)
class ExpertStacks:
    """Routed experts (gated MLPs): each row gets expert ids and routing weights.

    `gate_up` is (E, 2 F, D), gate then up, and `down` (E, D, F); `transposed`: (E, D, 2 F) and
    (E, F, D).
    """

    gate_up: nn.Parameter
    down: nn.Parameter
    act: ActivationKind
    transposed: bool

    @property
    def cols(self) -> int:
        """Number of input columns, D."""
        return self.down.shape[2 if self.transposed else 1]

    def weights(self) -> ExpertWeights:
        """Return the stacks as (E, outputs, inputs)."""
        both = (stack.detach() for stack in (self.gate_up, self.down))
        stacks = [stack.transpose(1, 2) if self.transposed else stack for stack in both]
        return ExpertWeights(gate_up=held(stacks[0]), down=held(stacks[1]), act=self.act)


def experts_of(module: Any, dtype: torch.dtype) -> ExpertStacks | None:
    """Match experts of transformers' interface that have two stacks of weights and nothing else.

    The interface defines the layout of the stacks; the method between the two products is traced.
    """
    stacks: list[Any] = [getattr(module, name, None) for name in _STACKS]
    if not hasattr(type(module).forward, "__wrapped__") or not hasattr(module, "is_transposed"):
        return None
    facts = module.has_gate, module.is_concatenated, not module.has_bias
    if not all(facts) or getattr(module, "has_post_expert_norm", False):
        return None
    own = {id(part) for part in (*module.parameters(), *module.buffers())}
    if own != {id(stack) for stack in stacks}:
        return None
    if any(s.dim() != 3 or s.dtype != dtype or s.is_meta for s in stacks):
        return None
    gate_up, down = stacks
    cols = gate_up.shape[2 if module.is_transposed else 1]
    act = gate_function(getattr(module, _GATE), cols)
    return None if act is None else ExpertStacks(gate_up, down, act, module.is_transposed)
