"""Each kernel: is it right, and how near is it to what the memory or the matrix units allow."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from report import Report, Timer

from sylvan.kernels import ops
from sylvan.kernels.api import AttentionLayer
from sylvan.runtime.attention.reference import ReferenceAttention
from sylvan.runtime.core.forward import BatchLimits, ForwardBatch
from sylvan.runtime.executor.build import load_attention
from sylvan.runtime.executor.device.sampling import device_sampling
from sylvan.runtime.platform.api import Platform
from sylvan.runtime.pool.mha import KVShape, MHAPool
from sylvan.runtime.sampling.on_device import Rows, TorchSampling

PAGE = 64


@dataclass(frozen=True)
class Ceilings:
    """Measured: bytes a second copied (read plus written), operations a second multiplied."""

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

    def randn(self, *shape: int) -> torch.Tensor:
        return torch.randn(shape, dtype=self.dtype, device=self.device)


def ceilings(bench: Bench) -> Ceilings:
    size = 1 << (20 if bench.tiny else 30)
    source = torch.ones(size, dtype=torch.uint8, device=bench.device)
    target = torch.empty_like(source)
    copy = 2 * size / bench.timer(lambda: target.copy_(source))
    side = 128 if bench.tiny else 8192
    a, b = bench.randn(side, side), bench.randn(side, side)
    gemm = 2 * side**3 / bench.timer(lambda: a @ b)
    bench.report.add("machine", "copy bandwidth, read + write", copy / 1e12, "TB/s")
    bench.report.add("machine", f"GEMM {side}^3, {bench.dtype}", gemm / 1e12, "TFLOP/s")
    return Ceilings(copy, gemm)


def measure(bench: Bench, top: Ceilings) -> None:
    for name, part in (
        ("rows", _rows),
        ("sampling", _sampling),
        ("decode attention", _decode),
        ("extend attention", _extend),
    ):
        with bench.report.part(f"kernels: {name}", 10) as go:
            if go:
                part(bench, top)


def _bound(bench: Bench, name: str, call: Callable[[], object], floor_s: float, **more) -> None:
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
        _bound(
            bench,
            f"add + RMSNorm {rows} x {dim}",
            lambda x=x, w=weight, r=residual: ops.rms_norm(x, w, 1e-6, r),
            moved / top.copy,
            note=_error(got, want),
        )
        both = bench.randn(rows, 2 * inner)
        gate, up = both.float().chunk(2, -1)
        _bound(
            bench,
            f"SwiGLU {rows} x {inner}",
            lambda both=both: ops.glu(both, "silu"),
            3 * rows * inner * both.element_size() / top.copy,
            note=_error(ops.glu(both, "silu"), torch.nn.functional.silu(gate) * up),
        )


def _sampling(bench: Bench, top: Ceilings) -> None:
    count, vocab = (4, 320) if bench.tiny else (64, 151936)
    logits = torch.randn(count, vocab, device=bench.device) * 4

    def full(value: float, dtype: torch.dtype) -> torch.Tensor:
        return torch.full((count,), value, dtype=dtype, device=bench.device)

    position = torch.arange(count, device=bench.device)
    rows = Rows(
        greedy=full(0, torch.bool),
        temperature=full(0.8, torch.float32),
        top_k=full(50, torch.int32),
        top_p=full(0.95, torch.float32),
        min_p=full(0.0, torch.float32),
        seed=full(7, torch.int64),
        sample=full(0, torch.int64),
        position=position,
        uniform=_uniform(position),
    )
    kernels = device_sampling(bench.device)
    same = kernels.draw(logits.clone(), rows) == TorchSampling().draw(logits.clone(), rows)
    note = f"{100 * same.float().mean():.0f} % as PyTorch draws"
    floor = logits.numel() * 4 / top.copy
    _bound(bench, f"draw {count} x {vocab}", lambda: kernels.draw(logits, rows), floor, note=note)


def _uniform(position: torch.Tensor) -> torch.Tensor:
    from sylvan.runtime.sampling.philox import uniform

    place = position.cpu().numpy()
    numbers = uniform(np.full_like(place, 7), np.zeros_like(place), place)
    return torch.from_numpy(numbers).to(position.device)


class Scene:
    """Requests with KV of random numbers, and a step that computes the last tokens of each."""

    def __init__(self, bench: Bench, requests: int, context: int, new: int) -> None:
        heads, kv_heads, dim = (2, 1, 16) if bench.tiny else (32, 8, 128)
        self.spec = AttentionLayer(
            index=0, num_heads=heads, num_kv_heads=kv_heads, head_dim=dim, scale=dim**-0.5
        )
        each = -(-context // PAGE)
        shape = KVShape(
            num_layers=1,
            num_kv_heads=kv_heads,
            head_dim=dim,
            num_pages=requests * each + 1,
            page_size=PAGE,
        )
        self.pool = MHAPool(shape, bench.dtype, bench.device)
        for side in self.pool.layer(0):
            side.normal_()
        name = "auto" if bench.device.type == "cpu" else bench.platform.facts.attention[0]
        self.backend = load_attention(name, bench.platform.facts)
        limits = BatchLimits(max_tokens=requests * new, max_reqs=requests, max_pages_per_req=each)
        self.batch = ForwardBatch(limits, self.pool, self.backend, bench.device)
        host, rng = self.batch.host, np.random.default_rng(0)
        pages = rng.permutation(np.arange(1, shape.num_pages, dtype=np.int32))
        host.page_table[:, :each] = pages.reshape(requests, each)
        host.kv_lens[:], host.req_slots[:] = context, np.arange(requests)
        host.q_starts[:] = np.arange(requests + 1) * new
        at = np.arange(context - new, context)
        slots = host.page_table[:, at // PAGE] * PAGE + at % PAGE
        host.out_slots[:] = slots.flatten()
        host.positions[:] = np.tile(at, requests)
        self.batch.ready(requests * new, requests, 0)
        rows = requests * new
        self.q = bench.randn(rows, heads, dim)
        self.k, self.v = bench.randn(rows, kv_heads, dim), bench.randn(rows, kv_heads, dim)
        self.backend.plan(self.batch)

    def run(self) -> torch.Tensor:
        return self.backend.run(self.spec, self.q, self.k, self.v, self.batch)

    def error(self) -> str:
        want = ReferenceAttention().run(self.spec, self.q, self.k, self.v, self.batch)
        return _error(self.run(), want)


def _decode(bench: Bench, top: Ceilings) -> None:
    cases = [(2, 32)] if bench.tiny else [(1, 1024), (64, 2048), (256, 1024), (16, 8192)]
    for requests, context in cases:
        scene = Scene(bench, requests, context, 1)
        spec = scene.spec
        item = scene.q.element_size()
        moved = 2 * requests * context * spec.num_kv_heads * spec.head_dim * item
        name = f"decode, {requests} x {context}"
        _bound(bench, name, scene.run, moved / top.copy, note=scene.error())


def _extend(bench: Bench, top: Ceilings) -> None:
    cases = [(1, 48, 16)] if bench.tiny else [(1, 8192, 8192), (4, 4096, 512)]
    for requests, context, new in cases:
        scene = Scene(bench, requests, context, new)
        spec = scene.spec
        seen = requests * (new * (context - new) + new * (new + 1) / 2)
        work = 4 * seen * spec.num_heads * spec.head_dim
        note = scene.error() if context < 8192 else ""
        name = f"extend, {requests} x {new} of {context}"
        _bound(bench, name, scene.run, work / top.gemm, note=note)


def _error(got: torch.Tensor, want: torch.Tensor) -> str:
    got, want = got.float(), want.float().view_as(got)
    return f"max error {float((got - want).abs().max() / want.abs().max()):.1e}"
