"""Native layers for native models whose forward cannot be traced as a whole.

The model's Python runs on tensors. Feed-forward blocks, matrix products, norms, a tied embedding
and attention are traced separately, each as a program of a few ops, and native modules with these
programs replace the PyTorch layers.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import nn

from sylvan.config.env import threads_are_calm
from sylvan.kernels.api import Dtype, TracedTensor, Unsupported
from sylvan.kernels.matmul.weights import DeferredWeight, QuantisedWeight
from sylvan.kernels.native.builder import padded
from sylvan.kernels.native.compile import compile_graph
from sylvan.kernels.native.graph import ProgramLimits
from sylvan.kernels.native.library import Library, LibraryMissing
from sylvan.kernels.native.library import load as load_library
from sylvan.kernels.native.program import Program
from sylvan.kernels.native.tracer import NativeTracer
from sylvan.kernels.scan.native import NativeScans
from sylvan.runtime.executor.graphs.native_layers import (
    NativeLayerLinear,
    NativeLayerNorm,
    NativeTable,
)
from sylvan.runtime.executor.graphs.native_modules import MAX_ROWS, NativeRowsModule, tile_rows
from sylvan.runtime.executor.graphs.native_modules import RowProgram as Part
from sylvan.runtime.executor.graphs.natives import NativeKernels, with_attention
from sylvan.runtime.layers.attention import PagedAttention
from sylvan.runtime.layers.embedding import Embedding
from sylvan.runtime.layers.latent import LatentAttention
from sylvan.runtime.layers.linear import Linear
from sylvan.runtime.layers.mlp import MLP, GatedMLP
from sylvan.runtime.layers.moe import MoE, Router
from sylvan.runtime.layers.norm import LayerNorm, RMSNorm
from sylvan.runtime.layers.recurrent import use_scans
from sylvan.runtime.models.config import ModelConfig
from sylvan.runtime.pool.mha import KVShape

logger = logging.getLogger(__name__)


def use_layer_kernels(
    model: nn.Module,
    dtype: torch.dtype,
    threads: int,
    pages: tuple[ModelConfig, KVShape] | None,
) -> NativeKernels | None:
    """Replace the layers of `model` that have kernels, and optionally its attention.

    Args:
        model: A native model with loaded or deferred weights; packed weights are freed.
        dtype: Type of the rows.
        threads: Threads of the kernels.
        pages: Config and shape for native attention; None keeps PyTorch's attention.
    """
    if not threads_are_calm():
        logger.warning("set OMP_WAIT_POLICY=PASSIVE before Python starts for faster products")
        return None
    native = use_native_layers(model, dtype, threads)
    if native is None or pages is None or pages[0].latent is not None or _reads_pages(model):
        return native
    try:
        attends = with_attention(native.library, dtype, *pages)
    except Unsupported as why:
        logger.warning("PyTorch computes attention: %s", why)
        return native
    return replace(attends, copies=native.copies)


def _reads_pages(model: nn.Module) -> bool:
    """Whether the attention of some layer reads pages as tensors."""
    latent = any(isinstance(part, LatentAttention) for part in model.modules())
    paged = (part for part in model.modules() if isinstance(part, PagedAttention))
    return latent or any(part.reads_pages for part in paged)


def use_native_layers(model: nn.Module, dtype: torch.dtype, threads: int) -> NativeKernels | None:
    """Replace each layer that can be traced on its own.

    Returns:
        The library and its weight copies; None: nothing was replaced.
    """
    try:
        library = load_library()
        trial = _tracer(library, dtype)
    except (LibraryMissing, Unsupported):
        return None
    layers = list(_layers(model, trial))
    if not layers:
        return None
    tracer = _tracer(library, dtype)
    traced = [_Traced.of(layer, tracer) for layer in layers]
    library.dll.sylvan_threads(threads)
    layout = compile_graph(tracer.graph)
    tile = tile_rows(library, dtype)

    buffers: dict[int, torch.Tensor] = {}

    def part(call: _Call, rows: int = tile) -> Part:
        program = Program(library, layout, call.segment, call.segment + 1)
        cols = padded(call.x.cols)
        buffer = buffers.setdefault(cols, torch.zeros(MAX_ROWS, cols, dtype=dtype))
        single = len(program.ops) == 1
        return Part(program, call.x, call.out, dtype, rows, single=single, buffer=buffer)

    use_scans(model, NativeScans(library, dtype))
    for one in traced:
        _free_weights(one.layer.module)
        made = _replacement(one, part)
        for name in one.layer.names:
            model.set_submodule(name, made)
    return NativeKernels(library, copies=layout.copies)


def _tracer(library: Library, dtype: torch.dtype) -> NativeTracer:
    limits = ProgramLimits(max_tokens=MAX_ROWS, max_outputs=1)
    return NativeTracer(dtype, limits, {}, library.constants, whole_steps=False)


@dataclass(frozen=True, slots=True)
class _Layer:
    """A module that can be traced, and all its names in the model."""

    module: Any
    names: list[str]


def _layers(model: nn.Module, trial: NativeTracer) -> Iterator[_Layer]:
    """Yield layers to replace, without nested ones; `trial` is a tracer that is discarded."""
    names: dict[nn.Module, list[str]] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        names.setdefault(module, []).append(name)
    kept = _only_read(model)
    tied: set[int] = set()
    for module, its_names in names.items():
        alone = isinstance(module, _KINDS) and not isinstance(module, Router)
        if module in kept or not alone:
            continue
        try:
            _Traced.of(_Layer(module, its_names), trial)
        except Unsupported:
            continue
        kept |= set(module.modules())  # parts of the layer that is replaced
        tied |= {id(part.weight) for part in module.modules() if isinstance(part, Linear)}
        yield _Layer(module, its_names)
    for module, its_names in names.items():
        if isinstance(module, Embedding) and id(module.weight) in tied:
            yield _Layer(module, its_names)


_KINDS = (GatedMLP, MLP, MoE, Linear, RMSNorm, LayerNorm)


def _only_read(model: nn.Module) -> set[nn.Module]:
    """Modules that are never called: other modules read their weights."""
    latent = [part for part in model.modules() if isinstance(part, LatentAttention)]
    return {module for part in latent for module in (part.kv_b_proj, part.kv_a_layernorm)}


@dataclass(frozen=True, slots=True)
class _Call:
    """A call of a layer: its input rows, its results, and the segment of its ops."""

    x: TracedTensor
    out: TracedTensor
    segment: int
    residual: TracedTensor | None = None


@dataclass(slots=True)
class _Traced:
    """A traced layer and its calls, by name.

    Each call has input rows of its own, because their quantisation is part of one program.
    """

    layer: _Layer
    tracer: NativeTracer
    calls: dict[str, _Call] = field(default_factory=dict[str, _Call])

    @classmethod
    def of(cls, layer: _Layer, tracer: NativeTracer) -> _Traced:
        """Trace a layer.

        Raises:
            Unsupported: the layer cannot be traced.
        """
        found, module, own = cls(layer, tracer), layer.module, tracer.dtype
        if isinstance(module, Embedding):
            found._call("", tracer.input_ids, module.looked_up)
        elif isinstance(module, Linear):
            if module.lora is not None and module.is_collective:
                raise Unsupported("adapters of a layer whose ranks meet")
            cols, run = module.weight.shape[1], module if module.lora is None else module.product
            found._call("own", tracer.bound(cols, own), partial(run, out_f32=False))
            if own != "f32":
                found._call("f32", tracer.bound(cols, own), partial(run, out_f32=True))
        elif isinstance(module, RMSNorm | LayerNorm):
            found._norm(module)
        else:
            first = module.gate if isinstance(module, MoE) else _first_linear(module)
            found._call("", tracer.bound(first.weight.shape[1], own), module)
        return found

    def _norm(self, module: RMSNorm | LayerNorm) -> None:
        cols, own = module.weight.shape[0], self.tracer.dtype
        kinds: tuple[Dtype, ...] = ("f32",) if own == "f32" else ("f32", own)
        for kind in kinds:
            self._call(kind, self.tracer.bound(cols, kind), lambda x: module(x)[0])
        residual = self.tracer.bound(cols, "f32")
        x = self.tracer.bound(cols, own)
        self._call("residual", x, lambda x: module(x, residual)[0], residual)

    def _call(
        self,
        name: str,
        x: TracedTensor,
        run: Callable[[TracedTensor], TracedTensor],
        residual: TracedTensor | None = None,
    ) -> None:
        segment = self.tracer.next_segment()
        out = run(x)
        self.tracer.external(out)
        self.calls[name] = _Call(x, out, segment, residual)


def _free_weights(layer: nn.Module) -> None:
    """Free packed weights but keep their shapes, and release the checkpoint file."""
    for module in layer.modules():
        weights = {name: w for name, w in module.named_parameters(recurse=False) if w.dim() > 1}
        weights |= {n: w for n, w in vars(module).items() if isinstance(w, _NOT_PLAIN)}
        for name, weight in weights.items():
            delattr(module, name)
            setattr(module, name, torch.empty(weight.shape, device="meta"))


_NOT_PLAIN = (DeferredWeight, QuantisedWeight)


def _first_linear(module: GatedMLP | MLP) -> Linear:
    return module.gate_up_proj if isinstance(module, GatedMLP) else module.up_proj


def _replacement(one: _Traced, part: Callable[..., Part]) -> nn.Module:
    module, calls = one.layer.module, one.calls
    if isinstance(module, Embedding):
        return NativeTable(module, part(calls[""]))
    if isinstance(module, Linear):
        own = NativeRowsModule(module, part(calls["own"]))
        return NativeLayerLinear(
            module, own, NativeRowsModule(module, part(calls.get("f32", calls["own"])))
        )
    if isinstance(module, RMSNorm | LayerNorm):
        residual = calls["residual"].residual
        assert residual is not None
        alone = {name: part(call, 1) for name, call in calls.items() if name != "residual"}
        return NativeLayerNorm(module, alone, part(calls["residual"], 1), residual)
    return NativeRowsModule(module, part(calls[""]))
