"""Checks each kernel except attention against its reference, and its speed against the hardware
limit.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from report import Report, Timer

from sylvan.kernels import ops
from sylvan.kernels.experts import ExpertWeights, Routing, reference
from sylvan.runtime.executor.device.sampling import device_sampling
from sylvan.runtime.platform.api import Platform
from sylvan.runtime.sampling.on_device import (
    DeviceLogitEdits,
    DeviceRowParams,
    Entries,
    MaskBits,
    Penalties,
    TorchSampling,
)
from sylvan.runtime.sampling.philox import uniform


@dataclass(frozen=True)
class Ceilings:
    """Measured limits: bytes copied per second (read plus written), operations per second."""

    copy: float
    gemm: float


@dataclass(frozen=True)
class Bench:
    platform: Platform
    report: Report
    timer: Timer
    tiny: bool

    @property
    def device(self) -> torch.device:
        return self.platform.device

    @property
    def dtype(self) -> torch.dtype:
        return torch.float32 if self.device.type == "cpu" else torch.bfloat16

    def needs(self, seconds: float) -> float:
        """Of a part; next to nothing where sizes are tiny."""
        return 1.0 if self.tiny else seconds

    def randn(self, *shape: int) -> torch.Tensor:
        return torch.randn(shape, dtype=self.dtype, device=self.device)


def ceilings(bench: Bench) -> Ceilings:
    size = 1 << (20 if bench.tiny else 30)
    source = torch.ones(size, dtype=torch.uint8, device=bench.device)
    target = torch.empty_like(source)
    copy = 2 * size / bench.timer.launched(lambda: target.copy_(source))
    side = 128 if bench.tiny else 8192
    a, b = bench.randn(side, side), bench.randn(side, side)
    gemm = 2 * side**3 / bench.timer(lambda: a @ b)
    bench.report.add("machine", "copy bandwidth, read + write", copy / 1e12, "TB/s")
    bench.report.add("machine", f"GEMM {side}^3, {bench.dtype}", gemm / 1e12, "TFLOP/s")
    return Ceilings(copy, gemm)


def measure(bench: Bench, top: Ceilings) -> None:
    for name, part in (
        ("rows", _rows),
        ("gather", _gather),
        ("sampling", _sampling),
        ("edits of logits", _edits),
        ("experts", _experts),
    ):
        with bench.report.part(f"kernels: {name}", bench.needs(10)) as go:
            if go:
                part(bench, top)


def bound(bench: Bench, name: str, call: Callable[[], object], floor_s: float, **more) -> None:
    seconds = bench.timer(call)
    us, floor = seconds * 1e6, floor_s * 1e6
    bench.report.add("kernel", name, us, "us", floor=floor, share=floor / us, **more)


def _rows(bench: Bench, top: Ceilings) -> None:
    for rows in (4,) if bench.tiny else (64, 8192):
        dim, inner = (64, 96) if bench.tiny else (4096, 12288)
        x, weight = bench.randn(rows, dim), bench.randn(dim)
        residual = torch.randn(rows, dim, device=bench.device)
        got = ops.rms_norm(x, weight, 1e-6, residual.clone())[0]
        whole = residual + x.float()
        want = whole * torch.rsqrt(whole.square().mean(-1, keepdim=True) + 1e-6) * weight.float()
        moved = rows * dim * (2 * x.element_size() + 8)
        bound(
            bench,
            f"add + RMSNorm {rows} x {dim}",
            lambda x=x, w=weight, r=residual: ops.rms_norm(x, w, 1e-6, r),
            moved / top.copy,
            note=error_of(got, want),
        )
        both = bench.randn(rows, 2 * inner)
        gate, up = both.float().chunk(2, -1)
        if rows == 64:
            seconds = bench.timer.launched(
                lambda x=x, w=weight, r=residual: ops.rms_norm(x, w, 1e-6, r)
            )
            bench.report.add(
                "machine", "a launch of a small kernel from Python", seconds * 1e6, "us"
            )
        bound(
            bench,
            f"SwiGLU {rows} x {inner}",
            lambda both=both: ops.glu(both, "silu"),
            3 * rows * inner * both.element_size() / top.copy,
            note=error_of(ops.glu(both, "silu"), torch.nn.functional.silu(gate) * up),
        )


def _sampling(bench: Bench, top: Ceilings) -> None:
    vocab = 320 if bench.tiny else 151936
    kernels = device_sampling(bench.device)
    for count in (4,) if bench.tiny else (1, 64):
        logits = torch.randn(count, vocab, device=bench.device) * 4
        floor = logits.numel() * 4 / top.copy
        for how, top_k, top_p in (("temperature", vocab, 1.0), ("top-k and top-p", 50, 0.95)):
            rows = _drawn(bench, count, top_k, top_p)
            same = kernels.draw(logits.clone(), rows) == TorchSampling().draw(logits.clone(), rows)
            bound(
                bench,
                f"draw by {how}, {count} x {vocab}",
                lambda logits=logits, rows=rows: kernels.draw(logits, rows),
                floor,
                note=f"{100 * same.float().mean():.0f} % as PyTorch draws",
            )


def _drawn(bench: Bench, count: int, top_k: int, top_p: float) -> DeviceRowParams:
    def full(value: float, dtype: torch.dtype) -> torch.Tensor:
        return torch.full((count,), value, dtype=dtype, device=bench.device)

    position = torch.arange(count, device=bench.device)
    return DeviceRowParams(
        greedy=full(0, torch.bool),
        temperature=full(0.8, torch.float32),
        top_k=full(top_k, torch.int32),
        top_p=full(top_p, torch.float32),
        min_p=full(0.0, torch.float32),
        seed=full(7, torch.int64),
        sample=full(0, torch.int64),
        position=position,
        uniform=_uniform(position),
    )


def _uniform(position: torch.Tensor) -> torch.Tensor:
    place = position.cpu().numpy()
    numbers = uniform(np.full_like(place, 7), np.zeros_like(place), place)
    return torch.from_numpy(numbers).to(position.device)


def _edits(bench: Bench, top: Ceilings) -> None:
    count, vocab = (4, 320) if bench.tiny else (64, 151936)
    logits = torch.randn(count, vocab, device=bench.device)
    rows = torch.arange(count, dtype=torch.int32, device=bench.device)
    number = torch.full((count,), 0.5, device=bench.device)
    counts = torch.randint(0, 3, (count, vocab), device=bench.device).float()
    words = torch.randint(-(2**31), 2**31 - 1, (count, -(-vocab // 32)), dtype=torch.int64)
    edits = DeviceLogitEdits(
        penalties=Penalties(
            counts=counts, count_rows=rows, frequency=number, presence=number, repetition=2 * number
        ),
        masks=MaskBits(words.int().to(bench.device), rows),
        entries=Entries(rows, rows, number),
    )
    kernels = device_sampling(bench.device)
    got, want = logits.clone(), logits.clone()
    kernels.edit(got, edits)
    TorchSampling().edit(want, edits)
    same = bool((got.isinf() == want.isinf()).all())
    note = error_of(got.nan_to_num(neginf=0.0), want.nan_to_num(neginf=0.0))
    moved = logits.numel() * (4 + 4 + 4 + 1 / 8)
    bound(
        bench,
        f"penalties, mask, bias {count} x {vocab}",
        lambda: kernels.edit(logits, edits),
        moved / top.copy,
        note=note if same else "WRONG MASK",
    )


def _gather(bench: Bench, top: Ceilings) -> None:
    rows, dim, vocab = (8, 64, 320) if bench.tiny else (8192, 4096, 151936)
    table = bench.randn(vocab, dim)
    ids = torch.randint(0, vocab, (rows,), dtype=torch.int32, device=bench.device)
    floor = rows * dim * (table.element_size() + 4) / top.copy
    note = error_of(ops.embedding(ids, table), table[ids.long()])
    bound(bench, f"embedding {rows} x {dim}", lambda: ops.embedding(ids, table), floor, note=note)
    some = ids[: max(1, rows // 128)].clamp_max(rows - 1)
    x = bench.randn(rows, dim)
    note = error_of(ops.take_rows(x, some), x[some.long()])
    floor = 2 * len(some) * dim * x.element_size() / top.copy
    bound(bench, f"rows for logits {len(some)}", lambda: ops.take_rows(x, some), floor, note=note)


def _experts(bench: Bench, top: Ceilings) -> None:
    dim, inner, count, top_k = (64, 32, 4, 2) if bench.tiny else (2048, 768, 128, 8)
    small = 0.02
    weights = ExpertWeights(
        gate_up=small * bench.randn(count, 2 * inner, dim),
        down=small * bench.randn(count, dim, inner),
    )
    routing = Routing(top_k=top_k, normalise=True)
    for rows in (4,) if bench.tiny else (1, 64, 8192):
        x, logits = bench.randn(rows, dim), torch.randn(rows, count, device=bench.device)
        load = torch.zeros(count, dtype=torch.int64, device=bench.device)
        got = ops.experts(x, logits, routing, weights, load)
        note = error_of(got, reference.experts(x, logits, routing, weights)[0])
        numbers = 3 * dim * inner
        hit = int((load > 0).sum())
        bytes_s = hit * numbers * x.element_size() / top.copy
        work_s = 2 * rows * top_k * numbers / top.gemm
        bound(
            bench,
            f"experts, {rows} rows",
            lambda x=x, logits=logits: ops.experts(x, logits, routing, weights),
            max(bytes_s, work_s),
            note=f"{note}, {hit} of {count} experts",
        )


def worst(got: torch.Tensor, want: torch.Tensor) -> float:
    """Return the largest difference, relative to the largest number."""
    got, want = got.float(), want.float().view_as(got)
    return float((got - want).abs().max() / want.abs().max().clamp_min(1e-30))


def error_of(got: torch.Tensor, want: torch.Tensor) -> str:
    return f"max error {worst(got, want):.1e}"
