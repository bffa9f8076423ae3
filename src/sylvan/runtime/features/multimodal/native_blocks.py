"""Runs the blocks of an encoder as native programs on the CPU, concurrently with steps.

transformers still computes the rest of the encoder: patches, position tables, windows and
projectors. The forward of each block is replaced: it copies its rows into the program, which
computes norms, products, rotary positions and attention of all sequences in one native call.

Shapes: T rows of all sequences, D columns of a row, R rotated columns of a head.
"""

from __future__ import annotations

import inspect
import itertools
import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import nn

from sylvan.kernels import ops
from sylvan.kernels.api import AttentionLayer, HeadNorm, Rope, TracedTensor, Unsupported
from sylvan.kernels.matmul.weights import DeferredWeight
from sylvan.kernels.native.binding import StepRun
from sylvan.kernels.native.compile import compile_graph
from sylvan.kernels.native.copies import VectorCopy
from sylvan.kernels.native.graph import ProgramLimits
from sylvan.kernels.native.library import Library, LibraryMissing
from sylvan.kernels.native.library import load as load_library
from sylvan.kernels.native.program import Program
from sylvan.kernels.native.tracer import NativeTracer
from sylvan.protocol.arrays import IntArray
from sylvan.protocol.errors import ConfigError
from sylvan.runtime.features.multimodal.block_patterns import BlockNorm, EncoderBlock, block_of

logger = logging.getLogger(__name__)

_MAX_ROWS = 1 << 16  # per call: Qwen2-VL's largest image; unused memory is not resident
_MAX_SEQUENCES = 1024
_TRIAL_ROWS = 21
_SLOPE = 1.702  # slope of quick GELU
_BOUNDS = {torch.float32: 1e-4, torch.bfloat16: 3e-2}  # relative tolerance of a block's change

Sequences = Sequence[tuple[int, int]]


def use_native_blocks(model: nn.Module, dtype: torch.dtype, threads: int) -> int:
    """Replace the forward of each encoder block of `model` that kernels support.

    A stack is replaced if its first block matches PyTorch numerically. Weights are packed one at a
    time, and PyTorch's are freed.

    Args:
        model: The model, with loaded weights.
        dtype: Dtype of its rows.
        threads: Threads of the kernels.

    Returns: The number of replaced blocks.

    Raises:
        ConfigError: There is too little memory.
    """
    try:
        library = load_library()
    except LibraryMissing:
        return 0
    replaced = 0
    for stack in _block_lists(model):
        try:
            checked = _checked(stack, library, dtype)
            if checked is not None:
                _replace(stack, checked, library, dtype, threads)
                replaced += len(stack)
        except Unsupported as why:
            logger.warning("PyTorch computes %s: %s", type(stack[0]).__name__, why)
        except MemoryError as why:  # some weights have already been freed
            raise ConfigError(
                f"the encoder's kernels need more memory: {why}; see media.encoder_backend"
            ) from None
    return replaced


def _block_lists(model: nn.Module) -> Iterator[list[nn.Module]]:
    """Return lists of encoder blocks of one class."""
    for module in model.modules():
        if isinstance(module, nn.ModuleList) and len(module):
            stack = list(module)
            if len({type(part) for part in stack}) == 1 and all(map(block_of, stack)):
                yield stack


def _blocks(stack: Sequence[nn.Module], like: EncoderBlock) -> list[EncoderBlock]:
    found = [block for part in stack if (block := block_of(part)) is not None]
    return [replace(block, as_tuple=like.as_tuple) for block in found]


# ---- the check


def _checked(
    stack: Sequence[nn.Module], library: Library, dtype: torch.dtype
) -> tuple[EncoderBlock, int] | None:
    """Return the first block with its calling convention and rotated columns, if results match."""
    block = block_of(stack[0])
    assert block is not None
    if block.down.weight.dtype != dtype:
        return None
    widths = (block.head_dim, block.head_dim // 2) if block.takes_rotary else (0,)
    agreed: list[tuple[EncoderBlock, int]] = []
    for rotated, batched in itertools.product(widths, (False, True)):
        found = _expected(stack[0], block, dtype, rotated, batched=batched)
        if found is None:
            continue
        inputs, expected, as_tuple = found
        own = replace(block, as_tuple=as_tuple)
        programs = BlockPrograms([own], library, dtype, rotated, rows=64, keep=True)
        rows, limits, angles = inputs
        cuts = list(itertools.pairwise(limits))
        made = programs.run(0, rows, cuts, angles)
        change, error = expected.float() - rows.float(), made.float() - expected.float()
        if error.norm() <= _BOUNDS[dtype] * change.norm():
            agreed.append((own, rotated))
    if len({rotated for _, rotated in agreed}) > 1:
        # The number of rotated columns equals that of the angles, which only calls show.
        logger.warning("PyTorch computes %s: its rotary width is unknown", type(stack[0]).__name__)
        return None
    if agreed:
        return agreed[0]
    logger.warning("PyTorch computes %s: kernels differ", type(stack[0]).__name__)
    return None


_Angles = tuple[torch.Tensor, torch.Tensor]


def _expected(
    module: nn.Module, block: EncoderBlock, dtype: torch.dtype, rotated: int, *, batched: bool
) -> tuple[tuple[torch.Tensor, list[int], _Angles | None], torch.Tensor, bool] | None:
    """Return trial inputs, PyTorch's results for them, and whether these came in a tuple."""
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(_TRIAL_ROWS, block.width, generator=generator).to(dtype)
    limits = [0, 8, _TRIAL_ROWS] if block.packed else [0, _TRIAL_ROWS]
    given: dict[str, Any] = {}
    angles = None
    if block.packed:
        given["cu_seqlens"] = torch.tensor(limits, dtype=torch.int32)
    elif "attention_mask" in inspect.signature(module.forward).parameters:
        given["attention_mask"] = None
    if rotated:
        half = torch.randn(_TRIAL_ROWS, rotated // 2, generator=generator).repeat(1, 2)
        angles = half.cos().to(dtype), half.sin().to(dtype)
        given["position_embeddings"] = tuple(x[None] if batched else x for x in angles)
    try:
        with torch.inference_mode():
            found = module(rows if block.packed else rows[None], **given)
    except (RuntimeError, ValueError, TypeError, IndexError):
        return None
    as_tuple = isinstance(found, tuple)
    made = found[0] if as_tuple else found
    return (rows, limits, angles), made.reshape(rows.shape), as_tuple


# ---- programs


class BlockPrograms:
    """The blocks of a stack as programs that share their buffers.

    Args:
        blocks: Blocks of one kind.
        library: The kernels.
        dtype: Dtype of rows.
        rotated: Rotated columns of a head; 0: no rotary positions.
        rows: Most rows of a call.
        keep: Whether PyTorch keeps its weights.

    Raises:
        Unsupported: The kernels do not support a block.
        MemoryError: There is too little memory for the buffers.
    """

    def __init__(
        self,
        blocks: Sequence[EncoderBlock],
        library: Library,
        dtype: torch.dtype,
        rotated: int,
        *,
        rows: int = _MAX_ROWS,
        keep: bool = False,
    ) -> None:
        limits = ProgramLimits(max_tokens=rows, max_outputs=min(rows, _MAX_SEQUENCES))
        tracer = NativeTracer(dtype, limits, {}, library.constants, whole_steps=False)
        self._limits = limits
        self._rope: Rope | None = None
        if rotated:
            self._rope = Rope(torch.zeros(rows, rotated))
        self._x = tracer.input(blocks[0].width, tracer.dtype)
        outs: list[tuple[int, TracedTensor]] = []
        for block in blocks:
            segment = tracer.next_segment()
            outs.append((segment, _trace(block, self._x, self._rope, keep=keep)))
        layout = compile_graph(tracer.graph)
        self._programs = [(Program(library, layout, s, s + 1), out) for s, out in outs]
        copies = [c for c in layout.copies if isinstance(c, VectorCopy)]
        self._table_TR: torch.Tensor | None = None
        if self._rope is not None:
            table = self._rope.cos_sin
            copy = next(c for c in copies if c.source is table)
            self._table_TR = copy.numbers().view(table.shape)
        self._angles: _Angles | None = None
        self._positions = np.arange(rows, dtype=np.int32)
        self._step = StepRun(groups=1)

    def run_in_background(self) -> None:
        """Compute concurrently with the steps from now on."""
        for program, _ in self._programs:
            program.run_in_background()

    def run(
        self,
        index: int,
        rows_TD: torch.Tensor,
        sequences: Sequences,
        angles: _Angles | None,
        positions: IntArray | None = None,
    ) -> torch.Tensor:
        """Return the output rows of a block. Shape: (T, D).

        Args:
            index: Index of the block.
            rows_TD: Its input rows.
            sequences: First row and end of each sequence; together they cover all rows, in order.
            angles: Cosines and sines of all positions, (P, R) each.
            positions: Index of each row in `angles`; None: P is T.

        Raises:
            ValueError: A sequence is too long, or the angles have another shape.
        """
        if angles is not None:
            self._fill_rotary_table(angles)
        places = self._positions if positions is None else positions
        out_TD = torch.empty_like(rows_TD)
        for group in self._groups(sequences):
            start, stop = group[0][0], group[-1][1]
            self._run(index, rows_TD[start:stop], group, places[start:stop], out_TD[start:stop])
        return out_TD

    def _run(
        self,
        index: int,
        rows_TD: torch.Tensor,
        group: Sequences,
        places: IntArray,
        out_TD: torch.Tensor,
    ) -> None:
        program, out = self._programs[index]
        first = group[0][0]
        starts = np.array([start - first for start, _ in group] + [len(rows_TD)], np.int32)
        lengths = np.diff(starts).astype(np.int32)
        places = np.ascontiguousarray(places)
        step = self._step
        step.tokens, step.seqs = len(rows_TD), len(group)
        step.row_start, step.kv_len = starts.ctypes.data, lengths.ctypes.data
        step.positions = places.ctypes.data
        program.write(self._x, rows_TD)
        program.run(step)
        out_TD.copy_(program.read(out, len(rows_TD)))

    def _groups(self, sequences: Sequences) -> Iterator[list[tuple[int, int]]]:
        """Divide sequences among calls."""
        group: list[tuple[int, int]] = []
        for start, stop in sequences:
            if stop - start > self._limits.max_tokens:
                raise ValueError(
                    f"{stop - start} patches of one image are more than {self._limits.max_tokens}"
                )
            full = group and stop - group[0][0] > self._limits.max_tokens
            if full or len(group) == self._limits.max_outputs:
                yield group
                group = []
            group.append((start, stop))
        if group:
            yield group

    def _fill_rotary_table(self, angles: _Angles) -> None:
        """Fill the rotary table, once for all blocks that get the same angles."""
        if self._angles is not None and self._angles[0] is angles[0]:
            return
        assert self._table_TR is not None
        cos, sin = (part.reshape(-1, part.shape[-1]).float() for part in angles)
        half = cos.shape[1] // 2
        fits = cos.shape[1] == self._table_TR.shape[1] and len(cos) <= len(self._table_TR)
        if not fits or not torch.equal(cos[:, :half], cos[:, half:]):
            raise ValueError(f"rotary positions of shape {tuple(cos.shape)}")
        self._table_TR[: len(cos), :half] = cos[:, :half]
        self._table_TR[: len(cos), half:] = sin[:, :half]
        self._angles = angles


def _trace(block: EncoderBlock, x: TracedTensor, rope: Rope | None, *, keep: bool) -> TracedTensor:
    first, second = block.norms
    h, stream = _normed(first, x, None)
    attention = AttentionLayer(
        index=0,
        num_heads=block.num_heads,
        num_kv_heads=block.num_kv_heads,
        head_dim=block.head_dim,
        scale=block.scale,
        causal=False,
    )
    h = ops.linear(h, _weight(block.qkv, keep=keep), _bias(block.qkv))
    q_norm, k_norm = (None if n is None else _head_norm(n) for n in block.head_norms)
    h = ops.attention(h, attention, rope, q_norm, k_norm)
    before, after = block.factors
    h = ops.linear(h, _weight([block.out], before, keep=keep), _bias([block.out], before))
    h, stream = _normed(second, h, stream)
    h = ops.linear(h, _weight(block.inner, keep=keep), _bias(block.inner))
    h = _activated(block, h)
    h = ops.linear(h, _weight([block.down], after, keep=keep), _bias([block.down], after))
    return x.tracer.cast(ops.add(stream, h))


def _activated(block: EncoderBlock, h: TracedTensor) -> TracedTensor:
    gated = len(block.inner) == 2
    if block.act == "quick_gelu":  # x sigmoid(1.702 x) is silu(1.702 x) / 1.702
        if gated:
            raise Unsupported("a gate by quick GELU")
        return ops.scale(ops.activation(ops.scale(h, _SLOPE), "silu"), 1 / _SLOPE)
    return ops.glu(h, block.act) if gated else ops.activation(h, block.act)


def _normed(
    norm: BlockNorm, x: TracedTensor, residual: TracedTensor | None
) -> tuple[TracedTensor, TracedTensor]:
    if norm.rms:
        return ops.rms_norm(x, norm.weight, norm.eps, residual)
    return ops.layer_norm(x, norm.weight, norm.bias, norm.eps, residual)


def _head_norm(norm: BlockNorm) -> HeadNorm:
    if not norm.rms:
        raise Unsupported("a LayerNorm of heads")
    return HeadNorm(norm.weight, norm.eps)


def _weight(
    linears: Sequence[nn.Linear], factor: torch.Tensor | None = None, *, keep: bool
) -> DeferredWeight:
    """Concatenate matrices along their outputs, each output times its factor."""
    shape = torch.Size((sum(x.out_features for x in linears), linears[0].in_features))

    def load() -> torch.Tensor:
        parts = [linear.weight.detach() for linear in linears]
        whole = torch.cat(parts) if len(parts) > 1 else parts[0].contiguous()
        if factor is not None:
            whole = (whole.float() * factor.detach().float()[:, None]).to(whole.dtype)
        if not keep:
            for linear in linears:
                nothing = torch.empty_like(linear.weight, device="meta")
                linear.weight = nn.Parameter(nothing, requires_grad=False)
        return whole

    return DeferredWeight(shape, load, f"block {id(linears[0])} {id(linears[-1])}")


def _bias(linears: Sequence[nn.Linear], factor: torch.Tensor | None = None) -> torch.Tensor | None:
    """Concatenate the biases of such matrices; zeros for a missing one (Whisper's keys)."""
    if all(linear.bias is None for linear in linears):
        return None
    parts = [
        torch.zeros(linear.out_features) if linear.bias is None else linear.bias.detach().float()
        for linear in linears
    ]
    whole = torch.cat(parts)
    return whole if factor is None else whole * factor.detach().float()


# ---- calls


def _replace(
    stack: Sequence[nn.Module],
    checked: tuple[EncoderBlock, int],
    library: Library,
    dtype: torch.dtype,
    threads: int,
) -> None:
    like, rotated = checked
    blocks = _blocks(stack, like)
    programs = BlockPrograms(blocks, library, dtype, rotated)
    programs.run_in_background()
    threaded = _Threads(library, threads)
    for index, (module, block) in enumerate(zip(stack, blocks, strict=True)):
        module.forward = _forward(module, block, index, programs, threaded)


class _Threads:
    """Starts a program's threads from the thread that runs it first, to inherit its priority."""

    def __init__(self, library: Library, count: int) -> None:
        self._library, self._count = library, count
        self._started = False

    def start(self) -> None:
        if not self._started:
            self._library.dll.sylvan_background_threads(self._count)
            self._started = True


def _forward(
    module: nn.Module,
    block: EncoderBlock,
    index: int,
    programs: BlockPrograms,
    threads: _Threads,
) -> Callable[..., Any]:
    bind = inspect.signature(module.forward).bind

    def run(*args: Any, **kwargs: Any) -> Any:
        given = dict(bind(*args, **kwargs).arguments)
        given |= given.pop("kwargs", {})
        threads.start()
        hidden: torch.Tensor = given["hidden_states"]
        rows = hidden.reshape(-1, hidden.shape[-1])
        angles: _Angles | None = given.get("position_embeddings")
        places = None
        if block.packed:
            limits: list[int] = given["cu_seqlens"].tolist()
            sequences = [cut for cut in itertools.pairwise(limits) if cut[0] < cut[1]]
        else:
            batch, length = hidden.shape[:2]
            sequences = _sequences(given.get("attention_mask"), batch, length)
            if angles is not None and angles[0].numel() // angles[0].shape[-1] == length:
                places = np.tile(np.arange(length, dtype=np.int32), batch)
        out = programs.run(index, rows, sequences, angles, places).view(hidden.shape)
        return (out,) if block.as_tuple else out

    return run


def _sequences(mask: torch.Tensor | None, batch: int, length: int) -> list[tuple[int, int]]:
    """Return the sequences of a batch: each item, and its padding as a sequence of its own.

    Raises:
        ValueError: The mask is not padding at the end.
    """
    counts = [length] * batch
    if mask is not None:
        seen = (mask if mask.dtype == torch.bool else mask > -1)[:, 0]
        seen = seen.expand(batch, *seen.shape[1:])
        counts = seen[:, 0].sum(-1).tolist()
        ends = torch.tensor(counts)[:, None, None]
        if not torch.equal(seen, (torch.arange(length) < ends).expand_as(seen)):
            raise ValueError("a mask of attention that is not padding at the end")
    found: list[tuple[int, int]] = []
    for item, count in enumerate(counts):
        start = item * length
        cuts = (start, start + count), (start + count, start + length)
        found += [cut for cut in cuts if cut[0] < cut[1]]
    return found
