"""Measures attention kernels in the layers of real models, against the reference and the hardware
limit.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import torch
from kernels import Bench, Ceilings, bound, error_of, worst

from sylvan.kernels.api import AttentionLayer, HeadNorm, Rope
from sylvan.kernels.gpu.choice import triton_installed
from sylvan.kernels.paged import reference
from sylvan.kernels.paged.pages import Cache, Rotary
from sylvan.runtime.attention.reference import ReferenceAttention
from sylvan.runtime.core.forward import BatchLimits, ForwardBatch
from sylvan.runtime.executor.attention_choice import load_attention
from sylvan.runtime.pool.latent import LatentPool
from sylvan.runtime.pool.mha import KVShape, MHAPool

PAGE = 64
_NEW = 512  # rows of one request that are compared with the reference at once


@dataclass(frozen=True)
class Kind:
    """The attention of one model; sizes are divided by 8 for a trial."""

    name: str
    heads: int
    kv_heads: int
    width: int
    value: int = 0  # 0: as wide as the keys; else values are the first columns of the keys
    window: int | None = None
    softcap: float | None = None
    sinks: bool = False
    narrow: bool = False  # a cache of 8 bits

    def layer(self, bench: Bench) -> AttentionLayer:
        small = 8 if bench.tiny else 1
        heads = max(1, self.heads // small)
        return AttentionLayer(
            index=0,
            num_heads=heads,
            num_kv_heads=max(1, self.kv_heads // small),
            head_dim=self.width // small,
            v_head_dim=self.value // small or None,
            scale=(self.width // small) ** -0.5,
            window=self.window and self.window // small,
            softcap=self.softcap,
            sinks=torch.linspace(-1, 1, heads, device=bench.device) if self.sinks else None,
        )


LLAMA = Kind("8B", 32, 8, 128)
OTHERS = (
    replace(LLAMA, name="8B, fp8 cache", narrow=True),
    Kind("gpt-oss", 64, 8, 64, window=128, sinks=True),
    Kind("gemma 2", 16, 8, 256, window=4096, softcap=50.0),
    Kind("deepseek", 128, 1, 576, value=512),
)


class Scene:
    """Requests with random KV, and a step that computes the last tokens of each."""

    def __init__(self, bench: Bench, kind: Kind, requests: int, context: int, new: int) -> None:
        self.spec = layer = kind.layer(bench)
        each = -(-context // PAGE)
        shape = KVShape(
            num_layers=1,
            num_kv_heads=layer.num_kv_heads,
            head_dim=layer.head_dim,
            num_pages=requests * each + 1,
            page_size=PAGE,
        )
        dtype = _narrow(bench) if kind.narrow else bench.dtype
        place = dtype, bench.device
        self.pool = (
            LatentPool(shape, layer.value_dim, *place) if kind.value else MHAPool(shape, *place)
        )
        for side in self.pool.layer(0)[: 1 if kind.value else 2]:
            side.copy_(torch.randn(side.shape, dtype=bench.dtype, device=bench.device))
        order = bench.platform.facts.attention
        name = "torch" if bench.device.type == "cpu" else order[0]
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
        self.q = bench.randn(rows, layer.num_heads, layer.head_dim)
        self.k = bench.randn(rows, layer.num_kv_heads, layer.head_dim)
        self.v = self.k[..., : layer.value_dim]
        self.backend.plan(self.batch)

    def run(self) -> torch.Tensor:
        return self.backend.run(self.spec, self.q, self.k, self.v, self.batch)

    def error(self) -> str:
        want = ReferenceAttention().run(self.spec, self.q, self.k, self.v, self.batch)
        return error_of(self.run(), want)

    def kv_bytes(self, requests: int, context: int) -> float:
        """Return the bytes of KV that a decode step reads: keys and values, or keys alone if they
        contain the values.
        """
        seen = min(context, self.spec.window or context)
        sides = self.pool.layer(0)[: 1 if isinstance(self.pool, LatentPool) else 2]
        return requests * seen * sum(s.shape[2] * s.shape[3] * s.element_size() for s in sides)


def measure(bench: Bench, top: Ceilings) -> None:
    for name, part in (
        ("heads", _heads),
        ("decode attention", _decode),
        ("extend attention", _extend),
        ("attention of other models", _others),
    ):
        with bench.report.part(f"kernels: {name}", bench.needs(10)) as go:
            if go:
                part(bench, top)


def _narrow(bench: Bench) -> torch.dtype:
    found = bench.platform.facts.float8_of(bench.platform.chip)
    if found is None:
        raise ValueError(f"{bench.platform.chip} has no floats of 8 bits")
    return getattr(torch, found)


def _decode(bench: Bench, top: Ceilings) -> None:
    cases = [(2, 40)] if bench.tiny else [(1, 1024), (64, 2048), (256, 1024), (16, 8192)]
    for requests, context in cases:
        _decode_one(bench, top, LLAMA, requests, context)


def _decode_one(bench: Bench, top: Ceilings, kind: Kind, requests: int, context: int) -> None:
    scene = Scene(bench, kind, requests, context, 1)
    name = f"decode {kind.name}, {requests} x {context}"
    floor = scene.kv_bytes(requests, context) / top.copy
    bound(bench, name, scene.run, floor, note=scene.error())


def _extend(bench: Bench, top: Ceilings) -> None:
    cases = [(1, 48, 16)] if bench.tiny else [(1, 8192, 8192), (4, 4096, 512)]
    for requests, context, new in cases:
        _extend_one(bench, top, LLAMA, requests, context, new)


def _extend_one(
    bench: Bench, top: Ceilings, kind: Kind, requests: int, context: int, new: int
) -> None:
    scene = Scene(bench, kind, requests, context, new)
    spec = scene.spec
    before = context - new
    window = spec.window or context
    seen = sum(min(before + i + 1, window) for i in range(new))
    work = 2 * requests * seen * spec.num_heads * (spec.head_dim + spec.value_dim)
    # The reference holds all scores of a request: compared where they are few.
    note = scene.error() if new <= _NEW else ""
    name = f"extend {kind.name}, {requests} x {new} of {context}"
    bound(bench, name, scene.run, work / top.gemm, note=note)


def _others(bench: Bench, top: Ceilings) -> None:
    for kind in OTHERS:
        with bench.report.part(f"kernels: attention of {kind.name}", bench.needs(5)) as go:
            if not go:
                continue
            if kind.narrow and bench.platform.facts.float8_of(bench.platform.chip) is None:
                bench.report.skip(f"attention of {kind.name}", f"{bench.platform.chip} has no fp8")
                continue
            _decode_one(bench, top, kind, *((2, 40) if bench.tiny else (64, 2048)))
            _extend_one(bench, top, kind, *((1, 48, 16) if bench.tiny else (2, 2048, 512)))


def _heads(bench: Bench, top: Ceilings) -> None:
    """Measure norms of heads, rotary positions, and the store of keys and values."""
    for rows in (4,) if bench.tiny else (64, 8192):
        scene = Scene(bench, LLAMA, rows, 64, 1)
        spec = scene.spec
        qkv = bench.randn(rows, (spec.num_heads + 2 * spec.num_kv_heads) * spec.head_dim)
        rope = Rope(torch.randn(64, spec.head_dim, device=bench.device))
        norm = HeadNorm(bench.randn(spec.head_dim), 1e-6)
        both, rotary = scene.pool.layer(0), Rotary(rope, norm, norm)
        want, stored = _turned(scene, qkv, rotary), [side.clone() for side in both]
        call = _fused(scene, qkv, rotary)
        pairs = zip((call(), *both), (want, *stored), strict=True)
        error = max(worst(mine, theirs) for mine, theirs in pairs)
        floor = 2 * qkv.numel() * qkv.element_size() / top.copy
        bound(bench, f"norm, rope, store {rows} rows", call, floor, note=f"max error {error:.1e}")


def _turned(scene: Scene, qkv: torch.Tensor, how: Rotary) -> torch.Tensor:
    """Compute by the definition, and store keys and values."""
    batch, norms = scene.batch, (how.q_norm, how.k_norm)
    q, k, v = reference.split_heads(qkv, scene.spec, batch.positions_T, how.rope, norms)
    scene.pool.store(0, batch.slots_of(0), k, v)
    return q


def _fused(scene: Scene, qkv: torch.Tensor, how: Rotary) -> Callable[[], torch.Tensor]:
    """Compute with one fused kernel, if there is one."""
    if not (qkv.is_cuda and triton_installed()):
        return lambda: _turned(scene, qkv, how)
    store_heads = importlib.import_module("sylvan.kernels.paged.triton_heads").store_heads
    keys, values = scene.pool.layer(0)
    cache = Cache(keys=keys, values=values, slots_T=scene.batch.slots_of(0))
    return lambda: store_heads(qkv, scene.spec, scene.batch.positions_T, how, cache)
