"""Native matrix products inside a model that computes everything else through PyTorch.

A model of transformers cannot be recorded: its forward is anybody's Python. But most of its time
goes into `nn.Linear`, and each of these is a program of one op. So is a norm; a gated product of
three matrices is one of three ops, and experts of which each row visits some are one of six, where
trying them shows that they are just that. An embedding that shares the weight of a matrix reads the
packed one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

import torch
from torch import nn

from sylvan.kernels import ops
from sylvan.kernels.api import ExpertWeights, Unsupported, Value
from sylvan.kernels.native.library import Library, LibraryMissing
from sylvan.kernels.native.library import load as load_library
from sylvan.kernels.native.plan import place
from sylvan.kernels.native.program import Program
from sylvan.kernels.native.recorder import NativeRecorder, RecorderLimits
from sylvan.runtime.executor.graphs.recognise import (
    Experts,
    Gated,
    Norm,
    experts_of,
    gated_of,
    norm_of,
)
from sylvan.runtime.executor.graphs.routers import use_native_routers
from sylvan.runtime.executor.graphs.standins import (
    MOST_ROWS,
    Native,
    NativeEmbedding,
    NativeExperts,
    NativeLinear,
    NativeNorm,
    NativeRows,
    only_looks_up,
    tile_rows,
)

_NO_CHOICES: Mapping[str, int] = MappingProxyType({})


def use_native_linears(
    model: nn.Module, dtype: torch.dtype, threads: int, chosen: Mapping[str, int] = _NO_CHOICES
) -> Library | None:
    """Replace each `nn.Linear` whose weight is of `dtype`, if there are kernels for it here.

    With them go norms, gated products and experts, and embeddings that share a weight. The weights
    are packed one at a time, and PyTorch's copy is let go. An embedding that goes by more than rows
    keeps its weight, and PyTorch its head.

    Args:
        model: Has its weights.
        dtype: Of its rows.
        threads: Of the kernels.
        chosen: Modules, by name, that are told which experts each row visits, and how many.

    Returns:
        The library in use; None: nothing has been replaced.
    """
    try:
        library = load_library()
        limits = RecorderLimits(max_tokens=MOST_ROWS, max_outputs=1)
        recorder = NativeRecorder(dtype, limits, {}, library.constants)
    except (LibraryMissing, Unsupported):
        return None
    names: dict[nn.Module, list[str]] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        names.setdefault(module, []).append(name)
    visits = {model.get_submodule(name): count for name, count in chosen.items()}
    recording = _Recording(recorder, dtype, visits)
    recording.tables(list(names))
    for module in names:
        recording.take(module)
    if not recording.found:
        return None
    library.dll.sylvan_threads(threads)
    placed = place(recorder.draft)
    tile = tile_rows(library, dtype)
    for one in recording.found:
        program = Program(library, placed, one.start, one.stop)
        single = one.stop - one.start == 1
        rows = 1 if isinstance(one.what, Norm | _Choice) else tile
        made = _made(one, Native(program, one.x, one.out, dtype, rows, single=single))
        for name in names[one.module]:
            model.set_submodule(name, made)
    use_native_routers(model, library, dtype, chosen)
    return library


@dataclass(frozen=True, slots=True)
class _Choice:
    """Experts as recorded; `both`: which of them rows visit, and with what shares."""

    both: tuple[Value, Value]
    num_experts: int


_What = nn.Linear | nn.Embedding | Gated | Norm | _Choice


@dataclass(frozen=True, slots=True)
class _Found:
    """A module to be replaced, what it is, and its ops from `start` to `stop`."""

    module: nn.Module
    what: _What
    x: Value
    out: Value
    start: int
    stop: int


def _made(one: _Found, native: Native) -> nn.Module:
    if isinstance(one.what, nn.Linear):
        return NativeLinear(one.what, native)
    if isinstance(one.what, nn.Embedding):
        return NativeEmbedding(one.what, native)
    if isinstance(one.what, Norm):
        return NativeNorm(one.module, native)
    if isinstance(one.what, _Choice):
        return NativeExperts(one.module, native, one.what.both, one.what.num_experts)
    return NativeRows(one.module, native)


@dataclass(slots=True)
class _Recording:
    """Notes the ops of modules, the outer ones first."""

    recorder: NativeRecorder
    dtype: torch.dtype
    visits: Mapping[nn.Module, int]
    found: list[_Found] = field(default_factory=list["_Found"])
    _inputs: dict[int, Value] = field(default_factory=dict[int, Value])
    # By the identity of a weight: embeddings that have it, and its packed copy, without contents.
    _tables: dict[int, list[nn.Embedding]] = field(default_factory=dict[int, list[nn.Embedding]])
    _packed: dict[int, torch.Tensor] = field(default_factory=dict[int, torch.Tensor])

    def tables(self, modules: list[nn.Module]) -> None:
        """Remember embeddings by their weights."""
        for module in modules:
            if isinstance(module, nn.Embedding):
                self._tables.setdefault(id(module.weight), []).append(module)

    def take(self, module: nn.Module) -> None:
        """Note what a module computes, if that is known here."""
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
            # The recorder frees what it has packed, but this may be shared or part of a file.
            self._packed[key] = linear.weight.detach().clone()
        else:
            return
        weight, x, start = self._packed[key], self._input(linear.in_features), self._now
        self._note(linear, linear, x, ops.linear(x, weight, linear.bias), start)
        _let_go(linear)
        for table in tied:
            start = self._now
            rows = ops.embedding(self.recorder.input_ids, weight)
            table.weight = linear.weight
            self._note(table, table, self.recorder.input_ids, rows, start)

    def _gated(self, module: nn.Module, gated: Gated) -> None:
        gate, up, down, start = gated.gate, gated.up, gated.down, self._now
        x = self._input(gate.in_features)
        bias = None
        if gate.bias is not None and up.bias is not None:
            bias = torch.cat((gate.bias.detach(), up.bias.detach()))
        joined = torch.cat((gate.weight.detach(), up.weight.detach()))
        both = ops.linear(x, joined, bias)
        _let_go(gate)
        _let_go(up)
        weight = down.weight.detach().clone()
        self._note(module, gated, x, ops.linear(ops.glu(both, gated.act), weight, down.bias), start)
        _let_go(down)

    def _norm(self, module: nn.Module, norm: Norm) -> None:
        x, start = self._input(len(norm.weight)), self._now
        out, _ = ops.rms_norm(x, norm.weight, norm.eps, weight_offset=norm.offset)
        self._note(module, norm, x, out, start)

    def _experts(self, module: nn.Module, top_k: int) -> None:
        experts = experts_of(module, self.dtype, top_k)
        if experts is None:
            return
        start = self._now
        weights = ExpertWeights(
            gate_up=_stack(experts.gate_up, experts),
            down=_stack(experts.down, experts),
            act=experts.act,
        )
        x = self._input(weights.gate_up.shape[2])
        try:
            ids, shares, out = self.recorder.chosen_experts(x, top_k, weights)
        except Unsupported:  # so many of them; nothing has been noted or packed
            return
        self.recorder.elsewhere(ids)
        self.recorder.elsewhere(shares)
        choice = _Choice((ids, shares), len(experts.down))
        for name, parameter in list(module.named_parameters()):
            nothing = torch.empty_like(parameter, device="meta")
            module.register_parameter(name, nn.Parameter(nothing, requires_grad=False))
        self._note(module, choice, x, out, start)

    @property
    def _now(self) -> int:
        return len(self.recorder.draft.calls)

    def _note(
        self,
        module: nn.Module,
        what: _What,
        x: Value,
        out: object,
        start: int,
    ) -> None:
        assert isinstance(out, Value)
        self.recorder.elsewhere(out)
        self.found.append(_Found(module, what, x, out, start, self._now))

    def _input(self, cols: int) -> Value:
        if cols not in self._inputs:
            name = "bf16" if self.dtype == torch.bfloat16 else "f32"
            self._inputs[cols] = self.recorder.input(cols, name)
        return self._inputs[cols]


def _stack(stack: nn.Parameter, experts: Experts) -> torch.Tensor:
    """A copy with outputs before inputs, for the recorder to free."""
    values = stack.detach()
    return values.transpose(1, 2).contiguous() if experts.turned else values.clone()


def _let_go(linear: nn.Linear) -> None:
    """Keep the shape and type of a weight only."""
    nothing = torch.empty_like(linear.weight, device="meta")
    linear.weight = nn.Parameter(nothing, requires_grad=False)
