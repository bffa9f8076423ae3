"""Native matrix products inside a model that computes everything else through PyTorch.

A model of transformers cannot be recorded: its forward is anybody's Python. But most of its time
goes into `nn.Linear`, and each of these is a program of one op. So is a norm, and a gated product
of three matrices is one of three ops, where trying them shows that they are just that. An
embedding that shares the weight of a matrix reads the packed one.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import nn

from sylvan.kernels import ops
from sylvan.kernels.api import Unsupported, Value
from sylvan.kernels.native.library import Library, LibraryMissing
from sylvan.kernels.native.library import load as load_library
from sylvan.kernels.native.plan import place
from sylvan.kernels.native.program import Program
from sylvan.kernels.native.recorder import NativeRecorder, RecorderLimits
from sylvan.runtime.executor.graphs.recognise import Gated, Norm, gated_of, norm_of
from sylvan.runtime.executor.graphs.standins import (
    MOST_ROWS,
    Native,
    NativeEmbedding,
    NativeLinear,
    NativeNorm,
    NativeRows,
    only_looks_up,
)

_TILE_ROWS = 16  # that a matrix tile reads, also where there are fewer


def use_native_linears(model: nn.Module, dtype: torch.dtype, threads: int) -> Library | None:
    """Replace each `nn.Linear` whose weight is of `dtype`, if there are kernels for it here.

    With them go norms and gated products, and embeddings that share a weight. The weights are
    packed one at a time, and PyTorch's copy is let go. An embedding that goes by more than rows
    keeps its weight, and PyTorch its head.

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
    recording = _Recording(recorder, dtype)
    recording.tables(list(names))
    for module in names:
        recording.take(module)
    if not recording.found:
        return None
    library.dll.sylvan_threads(threads)
    placed = place(recorder.draft)
    tile = _TILE_ROWS if library.variant == "amx" and dtype == torch.bfloat16 else 1
    for one in recording.found:
        program = Program(library, placed, one.start, one.stop)
        single = one.stop - one.start == 1
        rows = 1 if isinstance(one.what, Norm) else tile
        made = _made(one, Native(program, one.x, one.out, dtype, rows, single=single))
        for name in names[one.module]:
            model.set_submodule(name, made)
    return library


@dataclass(frozen=True, slots=True)
class _Found:
    """A module to be replaced, what it is, and its ops from `start` to `stop`."""

    module: nn.Module
    what: nn.Linear | nn.Embedding | Gated | Norm
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
    return NativeRows(one.module, native)


@dataclass(slots=True)
class _Recording:
    """Notes the ops of modules, the outer ones first."""

    recorder: NativeRecorder
    dtype: torch.dtype
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

    @property
    def _now(self) -> int:
        return len(self.recorder.draft.calls)

    def _note(
        self,
        module: nn.Module,
        what: nn.Linear | nn.Embedding | Gated | Norm,
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


def _let_go(linear: nn.Linear) -> None:
    """Keep the shape and type of a weight only."""
    nothing = torch.empty_like(linear.weight, device="meta")
    linear.weight = nn.Parameter(nothing, requires_grad=False)
