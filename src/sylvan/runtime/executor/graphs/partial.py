"""Runs untraceable modules through PyTorch between the native parts of a program.

The rest of the model stays in the program: norms, residuals, the other modules of the block, the
embedding and the head. Layers inside the untraceable module still use kernels where they exist.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from sylvan.config.env import threads_are_calm
from sylvan.kernels import ops
from sylvan.kernels.api import TracedTensor, Unsupported
from sylvan.kernels.matmul.weights import DeferredWeight
from sylvan.kernels.native.copies import WeightCopy
from sylvan.kernels.native.tracer import NativeTracer
from sylvan.runtime.core.forward import ForwardBatch
from sylvan.runtime.executor.graphs.layers import use_native_layers
from sylvan.runtime.layers.attention import PagedAttention
from sylvan.runtime.layers.compressed import CompressedKeyAttention
from sylvan.runtime.layers.latent import LatentAttention
from sylvan.runtime.layers.linear import Linear
from sylvan.runtime.layers.norm import LayerNorm, RMSNorm
from sylvan.runtime.models.checkpoint import load_deferred


class SymbolicBatch:
    """The batch as the model sees it during tracing.

    Attributes:
        edits: Values that steps may edit, in order: the layer, the next segment, and the value.
    """

    def __init__(self, tracer: NativeTracer) -> None:
        self.edits: list[tuple[int, int, TracedTensor]] = []
        self._tracer = tracer
        self.input_ids_T = tracer.input_ids
        self.positions_T = tracer.positions
        self.sample_rows = tracer.sample_rows
        self.token_types_T = tracer.token_types

    def edited(self, layer: int, x: TracedTensor) -> TracedTensor:
        """Mark a value that steps may edit before the program continues."""
        self._tracer.pin(x)
        self.edits.append((layer, self._tracer.next_segment(), x))
        return x

    def __getattr__(self, name: str) -> Any:
        raise Unsupported(f"{name} of a batch")


@contextlib.contextmanager
def host_modules(
    model: object, trial: NativeTracer, *, attending: bool = False
) -> Iterator[list[nn.Module]]:
    """Context in which untraceable modules of blocks emit host calls.

    Args:
        model: Its `layers` contain the blocks. Modules within these take rows, and optionally the
          batch, and return as many rows and columns. Norms do not.
        trial: A tracer that tries each module first; its program is discarded.
        attending: Whether host calls can attend in any way over the program's pages.

        Yields: the modules called this way, in order.
    """
    found: list[nn.Module] = []
    blocks: Any = getattr(model, "layers", ())
    # a dict: blocks may share a part
    parts = dict.fromkeys(part for block in blocks for part in block.children())
    parts = [part for part in parts if not isinstance(part, RMSNorm | LayerNorm)]
    for part in parts:
        part.forward = _traced_or_called(part, trial, found, attending)
    try:
        yield found
    finally:
        for part in parts:
            del part.forward


def _traced_or_called(
    module: nn.Module, trial: NativeTracer, found: list[nn.Module], attending: bool
) -> Callable[..., Any]:
    forward = module.forward

    def run(x: TracedTensor, *batch: SymbolicBatch) -> Any:
        try:
            forward(trial.input(x.cols, x.dtype), *(SymbolicBatch(trial) for _ in batch))
        except Unsupported:
            if not attending:
                _check_attention(module, trial)
            found.append(module)
            return x.tracer.host_call(x, _on_tensors(forward, with_batch=bool(batch)))
        return forward(x, *batch)

    return run


def _check_attention(module: nn.Module, trial: NativeTracer) -> None:
    """Reject attention inside the module that cannot use the program's pages by host calls.

    Raises:
        Unsupported: the message says why.
    """
    for part in module.modules():
        if isinstance(part, LatentAttention | CompressedKeyAttention):
            raise Unsupported("attention over latents outside of the program")
        if isinstance(part, PagedAttention) and part.reads_pages:
            raise Unsupported("attention that reads pages outside of the program")
        if isinstance(part, PagedAttention):
            layer = part.layer
            cols = (layer.num_heads + layer.num_kv_heads) * layer.head_dim
            qkv = trial.input(cols + layer.num_kv_heads * layer.value_dim, trial.dtype)
            ops.attention(qkv, layer)


def _on_tensors(
    forward: Callable[..., torch.Tensor], *, with_batch: bool
) -> Callable[[torch.Tensor, ForwardBatch], torch.Tensor]:
    return forward if with_batch else lambda x_TD, batch: forward(x_TD)


def finish_host_modules(
    modules: list[nn.Module], dtype: torch.dtype, threads: int
) -> list[WeightCopy]:
    """Load the weights of PyTorch modules, and use kernels for their layers.

    Returns: their weight copies.
    """
    inner = nn.ModuleList(modules)
    for part in inner.modules():
        if isinstance(part, Linear) and part.lora is not None:
            part.lora.packed = False  # restore: trial tracing set it
    native = use_native_layers(inner, dtype, threads)
    load_deferred(inner)
    return [] if native is None else list(native.copies)


def check_host_modules(modules: list[nn.Module]) -> None:
    """Reject modules that cannot run between the parts of a program.

    Raises:
        Unsupported: the message names them.
    """
    if modules and not threads_are_calm():
        raise Unsupported(
            f"PyTorch computes {names_of(modules)}, and its threads would busy-wait between parts "
            "of a program; set OMP_WAIT_POLICY=PASSIVE before Python starts"
        )


def weight_bytes(module: nn.Module) -> int:
    """Bytes of the weights; weights not read yet count with the type of the others."""
    held = [value for part in module.modules() for value in vars(part).values()]
    deferred = [value for value in held if isinstance(value, DeferredWeight)]
    found = list(module.parameters())
    size = found[0].element_size() if found else torch.get_default_dtype().itemsize
    return sum(p.nbytes for p in found) + sum(w.shape.numel() * size for w in deferred)


def names_of(modules: list[nn.Module]) -> str:
    """Class names of the modules, for messages."""
    return ", ".join(sorted({type(module).__name__ for module in modules}))
