"""Native matrix products inside models that PyTorch runs.

A model of the transformers library cannot be traced, because its forward is arbitrary Python. Most
of its time goes into `nn.Linear`, so each of these becomes a program of one op, and so does each
norm. A gated MLP becomes three ops and routed experts six, if a numeric check confirms what the
module computes. An embedding that shares the weight of a matrix reads the packed weight.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

import torch
from torch import nn

from sylvan.kernels import ops
from sylvan.kernels.api import ExpertWeights, TracedTensor, Unsupported
from sylvan.kernels.matmul.weights import DeferredWeight
from sylvan.kernels.native.compile import compile_graph
from sylvan.kernels.native.graph import ProgramLimits
from sylvan.kernels.native.library import LibraryMissing
from sylvan.kernels.native.library import load as load_library
from sylvan.kernels.native.program import Program
from sylvan.kernels.native.tracer import NativeTracer
from sylvan.runtime.executor.graphs.module_patterns import (
    ExpertsPattern,
    Gated,
    Norm,
    experts_of,
    gated_of,
    norm_of,
)
from sylvan.runtime.executor.graphs.native_modules import (
    MOST_ROWS,
    NativeEmbedding,
    NativeExperts,
    NativeLinear,
    NativeNorm,
    NativeRowsModule,
    RowProgram,
    only_looks_up,
    tile_rows,
)
from sylvan.runtime.executor.graphs.natives import NativeKernels as InUse
from sylvan.runtime.executor.graphs.origins import Origins
from sylvan.runtime.executor.graphs.routers import use_native_routers

_NO_CHOICES: Mapping[str, int] = MappingProxyType({})


def use_native_linears(
    model: nn.Module,
    dtype: torch.dtype,
    threads: int,
    chosen: Mapping[str, int] = _NO_CHOICES,
    origins: Origins | None = None,
) -> InUse | None:
    """Replace each `nn.Linear` with a weight of `dtype`, if there are kernels for this CPU.

    Also replaces norms, gated MLPs, experts, and embeddings with a tied weight. Weights are packed
    one at a time, and PyTorch's copy is freed. A tied embedding that is more than a row lookup
    keeps its weight, and its head stays with PyTorch.

    Args:
        model: The model with its weights.
        dtype: Type of the rows.
        threads: Threads of the kernels.
        chosen: Number of expert ids per row, by name of the modules that receive them.
        origins: Records which parameters are packed, and how.

    Returns:
        The library and its weight copies; None: nothing was replaced.
    """
    try:
        library = load_library()
        limits = ProgramLimits(max_tokens=MOST_ROWS, max_outputs=1)
        tracer = NativeTracer(dtype, limits, {}, library.constants)
    except (LibraryMissing, Unsupported):
        return None
    names: dict[nn.Module, list[str]] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        names.setdefault(module, []).append(name)
    visits = {model.get_submodule(name): count for name, count in chosen.items()}
    tracing = _Tracing(tracer, dtype, visits, origins or Origins(model))
    tracing.tables(list(names))
    for module in names:
        tracing.take(module)
    if not tracing.found:
        return None
    library.dll.sylvan_threads(threads)
    layout = compile_graph(tracer.graph)
    tile = tile_rows(library, dtype)
    for one in tracing.found:
        program = Program(library, layout, one.segment, one.segment + 1)
        single = len(program.ops) == 1
        rows = 1 if isinstance(one.what, Norm | _Choice) else tile
        made = _made(one, RowProgram(program, one.x, one.out, dtype, rows, single=single))
        for name in names[one.module]:
            model.set_submodule(name, made)
    for router in use_native_routers(model, library, dtype, chosen):
        tracing.origins.lose(router)
    return InUse(library, copies=layout.copies)


@dataclass(frozen=True, slots=True)
class _Choice:
    """Traced experts; `both` is the tensor of expert ids and routing weights of the rows."""

    both: tuple[TracedTensor, TracedTensor]
    num_experts: int


_What = nn.Linear | nn.Embedding | Gated | Norm | _Choice


@dataclass(frozen=True, slots=True)
class _Found:
    """A module to replace, its kind, and the segment of its ops."""

    module: nn.Module
    what: _What
    x: TracedTensor
    out: TracedTensor
    segment: int


def _made(one: _Found, native: RowProgram) -> nn.Module:
    if isinstance(one.what, nn.Linear):
        return NativeLinear(one.what, native)
    if isinstance(one.what, nn.Embedding):
        return NativeEmbedding(one.what, native)
    if isinstance(one.what, Norm):
        return NativeNorm(one.module, native)
    if isinstance(one.what, _Choice):
        return NativeExperts(one.module, native, one.what.both, one.what.num_experts)
    return NativeRowsModule(one.module, native)


@dataclass(slots=True)
class _Tracing:
    """Traces modules, outer ones first; the ops of each form a segment."""

    tracer: NativeTracer
    dtype: torch.dtype
    visits: Mapping[nn.Module, int]
    origins: Origins
    found: list[_Found] = field(default_factory=list["_Found"])
    _inputs: dict[int, TracedTensor] = field(default_factory=dict[int, TracedTensor])
    # By id of a weight: the embeddings tied to it, and the weight to pack.
    _tables: dict[int, list[nn.Embedding]] = field(default_factory=dict[int, list[nn.Embedding]])
    _packed: dict[int, DeferredWeight] = field(default_factory=dict[int, DeferredWeight])

    def tables(self, modules: list[nn.Module]) -> None:
        """Index embeddings by their weights."""
        for module in modules:
            if isinstance(module, nn.Embedding):
                self._tables.setdefault(id(module.weight), []).append(module)

    def take(self, module: nn.Module) -> None:
        """Trace a module, if its kind is supported."""
        if type(module) is nn.Linear:
            if module.weight.dtype == self.dtype and not module.weight.is_meta:
                self._linear(module)
        elif (gated := gated_of(module, self.dtype)) is not None:
            self._gated(module, gated)
        elif (norm := norm_of(module, self.dtype)) is not None:
            self._norm(module, norm)
        elif module in self.visits:
            self._experts(module, self.visits[module])

    def _linear(self, linear: nn.Linear) -> None:
        key = id(linear.weight)
        tied = self._tables.get(key, [])
        if key in self._packed:
            tied = []
        elif all(map(only_looks_up, tied)):
            self._packed[key] = _held(linear.weight.detach())
            self.origins.note(self._packed[key], linear.weight)
        else:
            return
        weight, x = self._packed[key], self._input(linear.in_features)
        if linear.bias is not None:
            self.origins.note(linear.bias, linear.bias)
        segment = self.tracer.next_segment()
        self._add(linear, linear, x, ops.linear(x, weight, linear.bias), segment)
        _free_weights(linear)
        for table in tied:
            segment = self.tracer.next_segment()
            rows = ops.embedding(self.tracer.input_ids, weight)
            table.weight = linear.weight
            self._add(table, table, self.tracer.input_ids, rows, segment)

    def _gated(self, module: nn.Module, gated: Gated) -> None:
        gate, up, down = gated.gate, gated.up, gated.down
        segment = self.tracer.next_segment()
        x = self._input(gate.in_features)
        bias = None
        if gate.bias is not None and up.bias is not None:
            bias = torch.cat((gate.bias.detach(), up.bias.detach()))
            self.origins.note(bias, gate.bias, up.bias)
        if down.bias is not None:
            self.origins.note(down.bias, down.bias)
        first = _held(gate.weight.detach(), up.weight.detach())
        second = _held(down.weight.detach())
        self.origins.note(first, gate.weight, up.weight)
        self.origins.note(second, down.weight)
        both = ops.linear(x, first, bias)
        inner = ops.glu(both, gated.act)
        out = ops.linear(inner, second, down.bias)
        self._add(module, gated, x, out, segment)
        for linear in (gate, up, down):
            _free_weights(linear)

    def _norm(self, module: nn.Module, norm: Norm) -> None:
        x, segment = self._input(len(norm.weight)), self.tracer.next_segment()
        self.origins.note(norm.weight, norm.weight)
        out, _ = ops.rms_norm(x, norm.weight, norm.eps, weight_offset=norm.offset)
        self._add(module, norm, x, out, segment)

    def _experts(self, module: nn.Module, top_k: int) -> None:
        experts = experts_of(module, self.dtype, top_k)
        if experts is None:
            return
        segment = self.tracer.next_segment()
        weights = ExpertWeights(
            gate_up=_stack(experts.gate_up, experts),
            down=_stack(experts.down, experts),
            act=experts.act,
        )
        x = self._input(weights.gate_up.shape[2])
        try:
            ids, shares, out = self.tracer.chosen_experts(x, top_k, weights)
        except Unsupported:  # nothing has been traced
            return
        self.tracer.external(ids)
        self.tracer.external(shares)
        choice = _Choice((ids, shares), len(experts.down))
        self.origins.lose(module)
        for name, parameter in list(module.named_parameters()):
            nothing = torch.empty_like(parameter, device="meta")
            module.register_parameter(name, nn.Parameter(nothing, requires_grad=False))
        self._add(module, choice, x, out, segment)

    def _add(
        self,
        module: nn.Module,
        what: _What,
        x: TracedTensor,
        out: object,
        segment: int,
    ) -> None:
        assert isinstance(out, TracedTensor)
        self.tracer.external(out)
        self.found.append(_Found(module, what, x, out, segment))

    def _input(self, cols: int) -> TracedTensor:
        if cols not in self._inputs:
            name = "bf16" if self.dtype == torch.bfloat16 else "f32"
            self._inputs[cols] = self.tracer.input(cols, name)
        return self._inputs[cols]


def _stack(stack: nn.Parameter, experts: ExpertsPattern) -> DeferredWeight:
    """Return the stack, transposed to (outputs, inputs) if necessary."""
    values = stack.detach()
    return _held(values.transpose(1, 2) if experts.transposed else values)


def _held(*parts: torch.Tensor) -> DeferredWeight:
    """Matrices, stacked by rows, that are freed once packed."""
    shape = torch.Size((sum(part.shape[0] for part in parts), *parts[0].shape[1:]))
    held = list(parts)

    def load() -> torch.Tensor:
        whole = torch.cat(held) if len(held) > 1 else held[0].contiguous()
        held.clear()
        return whole

    return DeferredWeight(shape, load, f"held {id(held)}")


def _free_weights(linear: nn.Linear) -> None:
    """Free a weight, but keep its shape and type."""
    nothing = torch.empty_like(linear.weight, device="meta")
    linear.weight = nn.Parameter(nothing, requires_grad=False)
