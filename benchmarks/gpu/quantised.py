"""Measures quantised matrices: decoding against memory bandwidth, prompts against bfloat16.

The matrices of the layers of an 8B model follow each other, as in a step; there are enough layers
that a GPU's caches hold none of them until it is read again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product

import torch
from kernels import Bench, Ceilings, bound, error_of

from sylvan.kernels import ops
from sylvan.kernels.experts import ExpertWeights, Routing, reference
from sylvan.kernels.gpu.tiles import Tile
from sylvan.kernels.matmul.codes import Code, bits_of
from sylvan.kernels.matmul.weights import CodedWeight

LAYER = ((6144, 4096), (4096, 4096), (24576, 4096), (4096, 12288))
TINY_LAYER = ((96, 128), (64, 256))
BATCHES = (1, 2, 4, 8, 16)


@dataclass(frozen=True)
class Kind:
    """A weight format as kernels see it; `block`: outputs that share scales."""

    name: str
    code: Code
    group: int
    dtype: torch.dtype = torch.float16
    zeros: bool = False
    shifts: bool = False
    block: int = 1


FOUR = (
    Kind("W4A16 g128 (GPTQ)", "int4", 128),
    Kind("W4A16 g128, zero points (AWQ)", "int4", 128, zeros=True),
)
EIGHT = (
    Kind("FP8 by channel", "fp8_e4m3", 0, torch.float32),
    Kind("FP8 by block", "fp8_e4m3", 128, torch.float32, block=128),
)
OTHERS = (
    Kind("W8A16 by channel", "int8", 0, torch.float32),
    Kind("MXFP4", "fp4_e2m1", 32, torch.float32),
    Kind("NVFP4", "fp4_e2m1", 16, torch.float32),
    Kind("GGUF Q4_K", "uint4", 32, torch.float32, shifts=True),
    Kind("NF4", "nf4", 64, torch.float32),
)


def measure(bench: Bench, top: Ceilings) -> None:
    decoded = [(kind, BATCHES) for kind in FOUR]
    decoded += [(kind, (1, 16)) for kind in (*EIGHT, *OTHERS)]
    for kind, batches in decoded:
        with bench.report.part(f"decoding: {kind.name}", bench.needs(5)) as go:
            if go:
                _decode(bench, top, kind, batches)
    for kind in (*FOUR, EIGHT[1], OTHERS[1], OTHERS[2]):
        with bench.report.part(f"experts: {kind.name}", bench.needs(6)) as go:
            if go:
                _experts(bench, top, kind)
    for kind in (EIGHT[0], EIGHT[1], FOUR[0]):
        with bench.report.part(f"prompts: {kind.name}", bench.needs(6)) as go:
            if go:
                _prompts(bench, kind)


def _experts(bench: Bench, top: Ceilings, kind: Kind) -> None:
    """Measure decoding as a share of the bandwidth limit of the visited experts' bytes, and prompts
    relative to bfloat16; FP8 prompts also with activations in 8-bit floats.
    """
    dim, inner, count, top_k = (128, 128, 4, 2) if bench.tiny else (2048, 768, 128, 8)
    stacks = [_stack(bench, kind, count, *shape) for shape in ((2 * inner, dim), (dim, inner))]
    weights = ExpertWeights(gate_up=stacks[0], down=stacks[1])
    routing = Routing(top_k=top_k, normalise=True)
    size = sum(part.nbytes for stack in stacks for part in stack.tensors) / count
    for rows in (1, 16):
        x, logits = bench.randn(rows, dim), torch.randn(rows, count, device=bench.device)
        load = torch.zeros(count, dtype=torch.int64, device=bench.device)
        got = ops.experts(x, logits, routing, weights, load)
        note = error_of(got, reference.experts(x, logits, routing, weights)[0])
        hit = int((load > 0).sum())
        bound(
            bench,
            f"experts, {kind.name}, {rows} rows",
            lambda x=x, logits=logits: ops.experts(x, logits, routing, weights),
            hit * size / top.copy,
            note=f"{note}, {hit} of {count} experts",
        )
    gate_up, down = (stack.numbers().to(bench.dtype) for stack in stacks)
    plain = ExpertWeights(gate_up=gate_up, down=down)
    forms = {kind.name: weights}
    if kind in EIGHT and bench.device.type == "cuda":
        gate_up, down = (replace(stack, fp8_inputs=True) for stack in stacks)
        forms[f"{kind.name}, rows in 8 bits"] = ExpertWeights(gate_up=gate_up, down=down)
    for rows in (32,) if bench.tiny else (1024, 8192):
        x, logits = bench.randn(rows, dim), torch.randn(rows, count, device=bench.device)
        plain_s = bench.timer(lambda x=x, logits=logits: ops.experts(x, logits, routing, plain))
        for name, form in forms.items():
            coded_s = bench.timer(
                lambda x=x, logits=logits, form=form: ops.experts(x, logits, routing, form)
            )
            bench.report.add(
                "prompts",
                f"experts, {name}, {rows} rows, speed in bfloat16's",
                plain_s / coded_s,
                "x",
                note=f"{coded_s * 1e6:.0f} us",
            )


def _stack(bench: Bench, kind: Kind, count: int, outputs: int, inputs: int) -> CodedWeight:
    return made(bench, kind, count * outputs, inputs).stacked(count)


def made(bench: Bench, kind: Kind, outputs: int, inputs: int) -> CodedWeight:
    """Return random codes with scales that yield small numbers."""
    device = bench.device
    width = inputs * bits_of(kind.code) // 8
    q = torch.randint(0, 256, (outputs, width), dtype=torch.uint8, device=device)
    if kind.code == "fp8_e4m3":
        q[(q & 127) == 127] = 1
    groups = -(-inputs // kind.group) if kind.group else 1
    rows = -(-outputs // kind.block)
    scale = (torch.rand(rows, groups, device=device) + 0.5) * 1e-3
    scale = scale.repeat_interleave(kind.block, 0)[:outputs].to(kind.dtype)
    zero = shift = None
    if kind.zeros:
        zero = torch.randint(0, 16, scale.shape, dtype=torch.uint8, device=device)
    if kind.shifts:
        shift = torch.randn(scale.shape, device=device) * 1e-3
    return CodedWeight(q, scale.contiguous(), kind.code, kind.group, zero, shift)


def _layers(bench: Bench, kind: Kind) -> list[CodedWeight]:
    sizes, layers = (TINY_LAYER, 1) if bench.tiny else (LAYER, 3)
    return [made(bench, kind, *size) for size in sizes * layers]


def _swept(
    bench: Bench, weights: Sequence[CodedWeight], rows: int
) -> tuple[Callable[[], object], float]:
    """Return the products of rows with all matrices, and the bytes of these matrices."""
    x = {size: bench.randn(rows, size) for size in {weight.shape[-1] for weight in weights}}

    def sweep() -> None:
        for weight in weights:
            ops.linear(x[weight.shape[-1]], weight)

    return sweep, float(sum(part.nbytes for weight in weights for part in weight.tensors))


def _error(bench: Bench, weight: CodedWeight, rows: int) -> str:
    """Return the error of a product, relative to the product with the dequantised matrix."""
    x = bench.randn(rows, weight.shape[-1])
    some = weight[:1024]
    return error_of(ops.linear(x, weight)[:, : some.shape[0]], x.float() @ some.numbers().T)


def _decode(bench: Bench, top: Ceilings, kind: Kind, batches: Sequence[int]) -> None:
    weights = _layers(bench, kind)
    for rows in batches:
        sweep, size = _swept(bench, weights, rows)
        note = _error(bench, weights[-1], rows)
        bound(bench, f"{kind.name}, batch {rows}", sweep, size / top.copy, note=note)


def _prompts(bench: Bench, kind: Kind) -> None:
    """Measure prompts relative to the same matrices in bfloat16; FP8 also with FP8 rows."""
    size = TINY_LAYER[0] if bench.tiny else LAYER[2]
    weight = made(bench, kind, *size)
    plain = weight.numbers().to(bench.dtype)
    weight = replace(weight, fp8_inputs=kind in EIGHT and bench.device.type == "cuda")
    for rows in (32,) if bench.tiny else (128, 512, 2048, 8192):
        x = bench.randn(rows, size[1])
        coded_s = bench.timer(lambda x=x: ops.linear(x, weight))
        plain_s = bench.timer(lambda x=x: ops.linear(x, plain))
        bench.report.add(
            "prompts",
            f"{kind.name}, {rows} rows, speed in bfloat16's",
            plain_s / coded_s,
            "x",
            note=f"{coded_s * 1e6:.0f} us, {_error(bench, weight, rows)}",
        )


def _candidates() -> Iterator[Tile]:
    for cols, inner, warps, stages in (
        (32, 128, 2, 5),
        (32, 128, 4, 5),
        (64, 128, 4, 3),
        (64, 128, 4, 5),
        (64, 128, 8, 4),
        (128, 128, 4, 4),
        (128, 128, 8, 4),
        (64, 64, 4, 6),
    ):
        yield Tile(16, cols, inner, warps, stages)


def tiles(bench: Bench, top: Ceilings) -> None:
    """Time tiles other than those of the table, for few rows of 4-bit integers."""
    from sylvan.kernels.matmul.triton_few import few_rows

    weights = _layers(bench, FOUR[0])
    size = sum(part.nbytes for weight in weights for part in weight.tensors)
    ptx = bench.device.type == "cuda" and torch.version.hip is None
    for tile, programs in product(_candidates(), (0, 264, 528, 1056)):
        sizes = Tile(16, tile.cols, tile.inner, tile.warps, tile.stages, programs)
        name = f"{tile.cols} x {tile.inner}, {tile.warps} warps, {tile.stages} stages, {programs}"
        with bench.report.part(name, bench.needs(3)) as go:
            if not go:
                continue
            for rows in (1, 16):
                x = {w.shape[-1]: bench.randn(rows, w.shape[-1]) for w in weights}
                y = [bench.randn(rows, w.shape[0]) for w in weights]

                def sweep(x=x, y=y, sizes=sizes) -> None:
                    for weight, out in zip(weights, y, strict=True):
                        few_rows(x[weight.shape[-1]], weight, None, out, sizes, ptx=ptx)

                bound(bench, f"{name}, batch {rows}", sweep, size / top.copy)
