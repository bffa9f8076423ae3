"""Native matrix products inside models that PyTorch runs.

The Python of a transformers model depends on the values of tensors in its attention and routing, so
the model cannot be traced as a whole. Modules that map rows to rows are traced one by one (see
`module_trace`), outer ones first: a norm or an MLP becomes one program. Every other `nn.Linear`
becomes a program of one op, routed experts a program of six. An embedding that is tied to a matrix
reads the packed weight.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from types import MappingProxyType

import torch
from torch import nn

from sylvan.kernels import ops
from sylvan.kernels.api import TracedTensor, Unsupported
from sylvan.kernels.matmul.weights import DeferredWeight
from sylvan.kernels.native.compile import compile_graph
from sylvan.kernels.native.graph import ProgramLimits
from sylvan.kernels.native.library import LibraryMissing
from sylvan.kernels.native.library import load as load_library
from sylvan.kernels.native.program import Program
from sylvan.kernels.native.tracer import NativeTracer
from sylvan.runtime.executor.graphs.module_ops import ModuleOps, experts_of, held, norm_of
from sylvan.runtime.executor.graphs.module_trace import INPUT, plain, takes, trace_module
from sylvan.runtime.executor.graphs.native_modules import (
    MAX_ROWS,
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

    Also replaces other modules that can be traced, experts, and embeddings with a tied weight.
    Weights are packed one at a time, and PyTorch's copy is freed. A tied embedding that is more
    than a row lookup keeps its weight, and its head stays with PyTorch.

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
        limits = ProgramLimits(max_tokens=MAX_ROWS, max_outputs=1)
        trial = partial(NativeTracer, dtype, limits, {}, library.constants)
        tracer = trial()
    except (LibraryMissing, Unsupported):
        return None
    names: dict[nn.Module, list[str]] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        names.setdefault(module, []).append(name)
    visits = {model.get_submodule(name): count for name, count in chosen.items()}
    tracing = _Tracing(tracer, trial, dtype, visits, origins or Origins(model))
    tracing.index(names)
    for module in names:
        if module is not model:
            tracing.take(module)
    if not tracing.found:
        return None
    library.dll.sylvan_threads(threads)
    layout = compile_graph(tracer.graph)
    tile = tile_rows(library, dtype)
    for one in tracing.found:
        program = Program(library, layout, one.segment, one.segment + 1)
        single = len(program.ops) == 1
        rows = 1 if one.is_norm or one.choice is not None else tile
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


@dataclass(frozen=True, slots=True)
class _Found:
    """A module to replace, and the segment of its ops; `choice` of experts."""

    module: nn.Module
    x: TracedTensor
    out: TracedTensor
    segment: int
    is_norm: bool = False
    choice: _Choice | None = None


def _made(one: _Found, native: RowProgram) -> nn.Module:
    if one.choice is not None:
        return NativeExperts(one.module, native, one.choice.both, one.choice.num_experts)
    if isinstance(one.module, nn.Embedding):
        return NativeEmbedding(one.module, native)
    kinds = NativeNorm if one.is_norm else NativeRowsModule
    return (NativeLinear if isinstance(one.module, nn.Linear) else kinds)(one.module, native)


@dataclass(slots=True)
class _Tracing:
    """Traces modules, outer ones first; the ops of each form a segment.

    `trial`: makes a tracer for a module that may turn out to be untraceable.
    """

    tracer: NativeTracer
    trial: Callable[[], NativeTracer]
    dtype: torch.dtype
    visits: Mapping[nn.Module, int]
    origins: Origins
    found: list[_Found] = field(default_factory=list["_Found"])
    _inputs: dict[int, TracedTensor] = field(default_factory=dict[int, TracedTensor])
    # By id of a weight: the modules that own it, and the weight to pack.
    _owners: dict[int, set[nn.Module]] = field(default_factory=dict[int, set[nn.Module]])
    _packed: dict[int, DeferredWeight] = field(default_factory=dict[int, DeferredWeight])
    _inside: set[nn.Module] = field(default_factory=set[nn.Module])  # parts of traced modules

    def index(self, modules: Iterable[nn.Module]) -> None:
        """Index modules by their weights."""
        for module in modules:
            for parameter in module.parameters(recurse=False):
                self._owners.setdefault(id(parameter), set()).add(module)

    def take(self, module: nn.Module) -> None:
        """Replace a module, if it can be traced; then its parts stay as they are."""
        if module in self._inside:
            return
        if type(module) is nn.Linear:
            if module.weight.dtype == self.dtype and not module.weight.is_meta:
                self._linear(module)
        elif module in self.visits:
            self._experts(module, self.visits[module])
        elif self._owns_weights(module):
            with contextlib.suppress(Unsupported):
                self._traced(module)

    def _owns_weights(self, module: nn.Module) -> bool:
        """Whether its parameters are of the rows' type and belong to nothing outside of it."""
        inside = set(module.modules())
        parameters = list(module.parameters())
        return bool(parameters) and all(
            p.dtype == self.dtype and not p.is_meta and self._owners[id(p)] <= inside
            for p in parameters
        )

    def _linear(self, linear: nn.Linear) -> None:
        key, weight = id(linear.weight), linear.weight
        tied = [m for m in self._owners[key] if isinstance(m, nn.Embedding)]
        if key in self._packed:
            tied = []
        elif all(map(only_looks_up, tied)):
            self._packed[key] = held(weight.detach())
            self.origins.note(self._packed[key], weight)
        else:
            return
        packed, x = self._packed[key], self._input(linear.in_features)
        if linear.bias is not None:
            self.origins.note(linear.bias, linear.bias)
        segment = self.tracer.next_segment()
        self._add(_Found(linear, x, ops.linear(x, packed, linear.bias), segment))
        _free_weight(linear, "weight")
        for table in tied:
            segment = self.tracer.next_segment()
            rows = ops.embedding(self.tracer.input_ids, packed)
            table.weight = linear.weight
            self._add(_Found(table, self.tracer.input_ids, rows, segment))

    def _traced(self, module: nn.Module) -> None:
        """Replace a module by the ops that it consists of.

        Raises:
            Unsupported: it does something else.
        """
        if not takes(module, 1) or isinstance(module, nn.Sequential):  # models index its parts
            raise Unsupported("a list of modules, or several arguments")
        parameters = dict(module.named_parameters())
        cols = next(iter(parameters.values())).shape[-1]
        node = plain(trace_module(module, cols, self.dtype))
        ModuleOps(self.trial().input(cols, self.tracer.dtype), parameters).emit(node)
        x, segment = self._input(cols), self.tracer.next_segment()
        emitted = ModuleOps(x, parameters)
        out = emitted.emit(node)
        norm = norm_of(node)
        is_norm = norm is not None and norm.x.function == INPUT
        self._add(_Found(module, x, out, segment, is_norm=is_norm))
        self._inside.update(module.modules())
        for packed, names in emitted.packed:
            self.origins.note(packed, *(parameters[name] for name in names))
            if isinstance(packed, DeferredWeight):
                for name in names:
                    owner, _, own = name.rpartition(".")
                    _free_weight(module.get_submodule(owner), own)

    def _experts(self, module: nn.Module, top_k: int) -> None:
        experts = experts_of(module, self.dtype)
        if experts is None:
            return
        x, segment = self._input(experts.cols), self.tracer.next_segment()
        try:
            ids, shares, out = self.tracer.chosen_experts(x, top_k, experts.weights())
        except Unsupported:  # nothing has been traced
            return
        self.tracer.external(ids)
        self.tracer.external(shares)
        choice = _Choice((ids, shares), len(experts.down))
        self.origins.lose(module)
        for name, _ in list(module.named_parameters()):
            _free_weight(module, name)
        self._add(_Found(module, x, out, segment, choice=choice))

    def _add(self, one: _Found) -> None:
        self.tracer.external(one.out)
        self.found.append(one)

    def _input(self, cols: int) -> TracedTensor:
        if cols not in self._inputs:
            self._inputs[cols] = self.tracer.input(cols, self.tracer.dtype)
        return self._inputs[cols]


def _free_weight(module: nn.Module, name: str) -> None:
    """Free a weight, but keep its shape and type."""
    nothing = torch.empty_like(getattr(module, name), device="meta")
    module.register_parameter(name, nn.Parameter(nothing, requires_grad=False))
