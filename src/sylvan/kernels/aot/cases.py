"""Shapes that kernels are compiled for: those of real models, so that every branch is covered.

A case calls the wrapper that the runtime calls, with meta tensors, so the kernel is compiled with
the types, strides and constants of the real call.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import torch

from sylvan.kernels.adapters import DeviceRows, LoraLayer, LoraRows, LoraShape
from sylvan.kernels.api import (
    AttentionLayer,
    Clamping,
    ExpertWeights,
    HeadNorm,
    KVScales,
    Rope,
    Routing,
)
from sylvan.kernels.collective.triton_sum import PeerBuffers, one_shot, two_shot
from sylvan.kernels.copy.triton_copy import copy_pages, gather_pages, scatter_pages
from sylvan.kernels.experts.triton_experts import experts
from sylvan.kernels.experts.triton_route import route
from sylvan.kernels.gating.triton_gating import activation, glu
from sylvan.kernels.lora.triton_lora import grouped
from sylvan.kernels.matmul.codes import Code, bits_of
from sylvan.kernels.matmul.triton_linear import gated_linear, linear
from sylvan.kernels.matmul.weights import CodedWeight
from sylvan.kernels.norm.triton_norm import layer_norm, rms_norm
from sylvan.kernels.paged.pages import NIBBLES, SCALED, Cache, LayerKV, Rotary
from sylvan.kernels.paged.triton_attention import decode, extend
from sylvan.kernels.paged.triton_heads import store_heads, store_kv
from sylvan.kernels.paged.triton_scaled import rotate_heads
from sylvan.kernels.rows.triton_rows import add, gather, scale, softcap, take_rows
from sylvan.kernels.sample.device import LogitEdits, RowParams
from sylvan.kernels.sample.triton_sample import draw, edit
from sylvan.kernels.scan.delta import DeltaInputs
from sylvan.kernels.scan.device_spans import DeviceSpans
from sylvan.kernels.scan.space import SpaceInputs
from sylvan.kernels.scan.triton_scan import TritonScans
from sylvan.kernels.sparse.triton_sparse import attend_slots, choose_tokens

GPT_OSS, STEP = Clamping(7.0, "gpt_oss", 1.702), Clamping(7.0, "outputs")
BF16, F16, F32, I32 = torch.bfloat16, torch.float16, torch.float32, torch.int32


@dataclass(frozen=True, slots=True)
class CompileCase:
    """A call to compile. `sample`: included in the quick run."""

    name: str
    call: Callable[[], object]
    sample: bool = False


@dataclass(frozen=True, slots=True)
class _Attention:
    """The attention shapes of a served model."""

    name: str
    layer: AttentionLayer
    cache: torch.dtype = BF16
    page: int = 64
    dtype: torch.dtype = BF16
    scaled: bool = False  # by the checkpoint


def _like(heads: int, kv_heads: int, width: int) -> AttentionLayer:
    return AttentionLayer(
        index=0, num_heads=heads, num_kv_heads=kv_heads, head_dim=width, scale=0.1
    )


_LLAMA = _like(32, 8, 128)
_LATENT = replace(_like(128, 1, 576), v_head_dim=512)


def _empty(*shape: int, dtype: torch.dtype = BF16) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def _attentions(fp8: torch.dtype | None) -> list[_Attention]:
    sinks = _empty(64)
    narrow = (
        ("llama 8b, fp8 cache", _LLAMA),
        ("deepseek, fp8 cache", _LATENT),
        ("deepseek lite, fp8 cache", replace(_LATENT, num_heads=16)),
    )
    return [
        *(_Attention(name, layer, cache=fp8) for name, layer in narrow if fp8),
        *(
            [_Attention("llama 8b, scaled fp8 cache", _LLAMA, cache=fp8, scaled=True)]
            if fp8
            else []
        ),
        _Attention("llama 8b, int8 cache", _LLAMA, cache=torch.int8),
        _Attention("llama 8b, int4 cache", _LLAMA, cache=NIBBLES),
        _Attention("gemma 3, int4 cache", replace(_like(8, 4, 256), window=1024), cache=NIBBLES),
        _Attention("llama 8b", _LLAMA),
        _Attention("llama 8b, pages of 16", _LLAMA, page=16),
        _Attention("llama 8b, fp16", _LLAMA, cache=F16, dtype=F16),
        _Attention("llama 8b, fp32", _LLAMA, cache=F32, dtype=F32),
        _Attention("qwen2 7b", _like(28, 4, 128)),
        _Attention("gpt-oss", replace(_like(64, 8, 64), window=128, sinks=sinks)),
        _Attention("gemma 2", replace(_like(16, 8, 256), softcap=50.0, window=4096)),
        _Attention("phi 3", _like(32, 32, 96)),
        _Attention("deepseek", _LATENT),
        _Attention("deepseek lite", replace(_LATENT, num_heads=16)),
        _Attention("deepseek, a quarter", replace(_LATENT, num_heads=32)),
    ]


def _side(page: int, layer: AttentionLayer, dtype: torch.dtype) -> torch.Tensor:
    """Pages of keys or values, as a pool has them."""
    heads, width = layer.num_kv_heads, layer.head_dim // (2 if dtype == NIBBLES else 1)
    row = heads * (width + (4 if dtype in SCALED else 0))
    whole = _empty(1000, page, row, dtype=dtype)
    return whole[..., : heads * width].unflatten(-1, (heads, width))


def _scales(layer: AttentionLayer) -> KVScales:
    return KVScales(*(_empty(layer.num_kv_heads, dtype=F32) for _ in range(2)))


def _sparse_cases() -> list[CompileCase]:
    """Sparse attention of DeepSeek V3.2: latent rows, followed by the key of the indexer."""
    kept = _empty(1000, 64, 1, 576 + 128)
    q, weights = _empty(64, 64, 128, dtype=F32), _empty(64, 64, dtype=F32)
    pages = _empty(512, dtype=torch.int64)
    slots = _empty(64, 2048, dtype=torch.int64)
    rows = _empty(64, 128, 576)
    return [
        CompileCase("index scores", lambda: choose_tokens(q, weights, kept, pages, 32768, 2048)),
        CompileCase("chosen tokens", lambda: attend_slots(rows, kept, slots, _LATENT, 512)),
    ]


def _pages(a: _Attention) -> LayerKV:
    layer = a.layer
    keys = _side(a.page, layer, a.cache)
    values = _side(a.page, layer, a.cache)
    values = keys[..., : layer.v_head_dim] if layer.v_head_dim else values
    return LayerKV(
        scales=_scales(layer) if a.scaled else None,
        keys=keys,
        values=values,
        table_SP=_empty(64, 128, dtype=I32),
        rows_R=_empty(64, dtype=I32),
        lens_R=_empty(64, dtype=I32),
    )


def _attention_cases(fp8: torch.dtype | None) -> list[CompileCase]:
    cases = []
    for a in _attentions(fp8):
        q = _empty(64, a.layer.num_heads, a.layer.head_dim, dtype=a.dtype)
        starts = _empty(65, dtype=I32)
        sample = a.name == "llama 8b"
        calls: list[tuple[str, Callable[[], object]]] = [
            ("decode", lambda a=a, q=q: decode(q, _pages(a), a.layer)),
            ("extend", lambda a=a, q=q, starts=starts: extend(q, _pages(a), starts, a.layer)),
        ]
        cases += [CompileCase(f"{op}, {a.name}", call, sample) for op, call in calls]
    return cases


def _cache(layer: AttentionLayer, dtype: torch.dtype = BF16) -> Cache:
    keys, values = _side(64, layer, dtype), _side(64, layer, dtype)
    return Cache(keys=keys, values=values, slots_T=_empty(64, dtype=I32))


def _store_heads(
    rotary: Rotary, layer: AttentionLayer = _LLAMA, dtype: torch.dtype = BF16
) -> object:
    columns = (layer.num_heads + 2 * layer.num_kv_heads) * layer.head_dim
    cache = _cache(layer, dtype)
    return store_heads(_empty(64, columns), layer, _empty(64, dtype=I32), rotary, cache)


def _narrow_cases(fp8: torch.dtype) -> list[CompileCase]:
    rope, new = Rope(_empty(4096, 128, dtype=F32)), _empty(64, 8, 128)
    return [
        CompileCase("heads, fp8 cache", lambda: _store_heads(Rotary(rope), dtype=fp8)),
        CompileCase("store, fp8 cache", lambda: store_kv(new, new, _cache(_LLAMA, fp8))),
        CompileCase(
            "store, scaled fp8 cache",
            lambda: store_kv(new, new, replace(_cache(_LLAMA, fp8), scales=_scales(_LLAMA))),
        ),
    ]


def _head_cases() -> list[CompileCase]:
    rope = Rope(_empty(4096, 128, dtype=F32))
    norm, long = HeadNorm(_empty(128), 1e-6), HeadNorm(_empty(4096), 1e-6)
    long_k = HeadNorm(_empty(1024), 1e-6)
    wide = replace(_LLAMA, head_dim=256, num_heads=16)
    new = _empty(64, 8, 128)
    return [
        CompileCase("heads, rope", lambda: _store_heads(Rotary(rope))),
        CompileCase(
            "heads, norms and rope", lambda: _store_heads(Rotary(rope, norm, norm)), sample=True
        ),
        CompileCase(
            "heads, interleaved", lambda: _store_heads(Rotary(replace(rope, interleaved=True)))
        ),
        CompileCase("heads, norms of all", lambda: _store_heads(Rotary(rope, long, long_k))),
        CompileCase("heads, partial rotary", lambda: _store_heads(Rotary(rope), wide)),
        CompileCase("store", lambda: store_kv(new, new, _cache(_LLAMA))),
        *(
            CompileCase(
                f"store, {name} cache", lambda dtype=dtype: _store_heads(Rotary(), dtype=dtype)
            )
            for name, dtype in (("int8", torch.int8), ("int4", NIBBLES))
        ),
        CompileCase("rotate heads", lambda: rotate_heads(new)),
    ]


def _linear_cases() -> list[CompileCase]:
    x, odd = _empty(1, 4096), _empty(1, 4100)
    bias = _empty(6144)
    return [
        CompileCase(
            "linear, one row", lambda: linear(x, _empty(6144, 4096), None, out_f32=False), True
        ),
        CompileCase(
            "linear, one row, bias", lambda: linear(x, _empty(6144, 4096), bias, out_f32=False)
        ),
        CompileCase(
            "linear, one row, f32", lambda: linear(x, _empty(151936, 4096), None, out_f32=True)
        ),
        CompileCase(
            "linear, one row, gated",
            lambda: gated_linear(x, _empty(24576, 4096), None, "silu"),
            sample=True,
        ),
        CompileCase(
            "linear, one odd row", lambda: linear(odd, _empty(6145, 4100), None, out_f32=False)
        ),
    ]


_CODES: tuple[tuple[Code, int, bool, bool], ...] = (
    ("int4", 128, False, False),
    ("int4", 128, True, False),
    ("uint4", 32, False, True),
    ("int8", 0, False, False),
    ("fp8_e4m3", 128, False, False),
    ("fp8_e4m3", 0, False, False),
    ("fp4_e2m1", 32, False, False),
    ("fp4_e2m1", 16, False, False),
    ("nf4", 64, False, False),
    ("iq4_nl", 32, False, False),
    ("int8", 32, False, True),
)
"""Code, inputs of a group, zero points, shifts."""


def _coded(
    kind: tuple[Code, int, bool, bool], outputs: int, inputs: int, *stack: int
) -> CodedWeight:
    code, group, zeros, shifts = kind
    groups = inputs // group if group else 1
    scale = F32 if shifts or code != "int4" else F16
    return CodedWeight(
        _empty(*stack, outputs, inputs * bits_of(code) // 8, dtype=torch.uint8),
        _empty(*stack, outputs, groups, dtype=scale),
        code,
        group,
        _empty(*stack, outputs, groups, dtype=torch.uint8) if zeros else None,
        _empty(*stack, outputs, groups, dtype=F32) if shifts else None,
    )


def _code_name(kind: tuple[Code, int, bool, bool]) -> str:
    code, group, zeros, shifts = kind
    more = f"{', zero points' if zeros else ''}{', shifts' if shifts else ''}"
    return f"{code} g{group}{more}" if group else f"{code}{more}"


def _code_cases() -> list[CompileCase]:
    """Quantised matrices times one row, few rows and prompts; for some formats experts, too."""
    found: list[CompileCase] = []
    for kind in _CODES:
        for rows in (1, 16, 64, 512):
            x, weight = _empty(rows, 4096), _coded(kind, 6144, 4096)
            call = partial(linear, x, weight, None, out_f32=False)
            sample = rows == 1 and kind == _CODES[0]
            found.append(CompileCase(f"codes, {_code_name(kind)}, {rows} rows", call, sample))
    for kind in _CODES:
        weights = _coded_experts(kind)
        for rows in (1, 512):
            call = partial(_of_experts, rows, weights)
            found.append(CompileCase(f"experts, {_code_name(kind)}, {rows} rows", call))
    scaled = Routing(top_k=1, scores="sigmoid", scale_inputs=True)
    found.append(
        CompileCase(
            "experts, int4 g128, scaled inputs",
            partial(_of_experts, 1, _coded_experts(_CODES[0]), scaled),
        )
    )
    gpt_oss = ExpertWeights(
        gate_up=_coded(_CODES[6], 5760, 2880, 32),
        down=_coded(_CODES[6], 2880, 2880, 32),
        gate_up_bias=_empty(32, 5760),
        down_bias=_empty(32, 2880),
        clamping=GPT_OSS,
    )
    for rows in (1, 512):
        call = partial(_of_experts, rows, gpt_oss, Routing(top_k=4, scores="softmax_chosen"))
        found.append(CompileCase(f"experts, gpt-oss in MXFP4, {rows} rows", call))
    return found


def _coded_experts(kind: tuple[Code, int, bool, bool], *, fp8: bool = False) -> ExpertWeights:
    gate_up, down = (_coded(kind, *shape, 128) for shape in ((1536, 2048), (2048, 768)))
    return ExpertWeights(
        gate_up=replace(gate_up, fp8_inputs=fp8), down=replace(down, fp8_inputs=fp8)
    )


def _of_experts(rows: int, weights: ExpertWeights, routing: Routing | None = None) -> object:
    num_experts, dim, _ = weights.down.shape
    logits = _empty(rows, num_experts, dtype=F32)
    return experts(_empty(rows, dim), logits, routing or Routing(top_k=8), weights)


def _fp8_cases(fp8: torch.dtype | None) -> list[CompileCase]:
    """FP8 rows times FP8 matrices; on chips without FP8 units only the rounding of rows."""
    found: list[CompileCase] = []
    for kind in (_CODES[4], _CODES[5]):
        weight = replace(_coded(kind, 6144, 4096), fp8_inputs=True)
        for rows in (1, 128, 2048) if fp8 is torch.float8_e4m3fn else (1,):
            call = partial(linear, _empty(rows, 4096), weight, None, out_f32=False)
            found.append(CompileCase(f"8-bit floats, {_code_name(kind)}, {rows} rows", call))
        weights = _coded_experts(kind, fp8=True)
        for rows in (1, 2048) if fp8 is torch.float8_e4m3fn else (1,):
            call = partial(_of_experts, rows, weights)
            name = f"experts, 8-bit floats, {_code_name(kind)}, {rows} rows"
            found.append(CompileCase(name, call))
    return found


def _row_cases() -> list[CompileCase]:
    x, wide, weight = _empty(64, 4096), _empty(64, 28672), _empty(4096)
    stream, ids = _empty(64, 4096, dtype=F32), _empty(64, dtype=I32)
    return [
        CompileCase("rms norm", lambda: rms_norm(x, weight, 1e-6, stream, 0.0), sample=True),
        CompileCase("rms norm, first", lambda: rms_norm(x, weight, 1e-6, None, 0.0)),
        CompileCase(
            "rms norm, 16k", lambda: rms_norm(_empty(64, 16384), _empty(16384), 1e-6, None, 0.0)
        ),
        CompileCase("layer norm", lambda: layer_norm(x, weight, weight, 1e-6, stream)),
        CompileCase("silu glu", lambda: glu(wide, "silu"), sample=True),
        CompileCase("gelu glu", lambda: glu(wide, "gelu")),
        CompileCase("gelu tanh glu", lambda: glu(wide, "gelu_tanh")),
        CompileCase("clamped glu", lambda: glu(wide, "silu", GPT_OSS)),
        CompileCase("clamped outputs", lambda: glu(wide, "silu", STEP)),
        CompileCase("gelu", lambda: activation(wide, "gelu")),
        CompileCase("embedding", lambda: gather(_empty(151936, 4096), ids, 2.0, F32)),
        CompileCase("take rows", lambda: take_rows(stream, ids)),
        CompileCase("add", lambda: add(x, x, 0.5)),
        CompileCase("scale", lambda: scale(x, 0.5)),
        CompileCase("softcap", lambda: softcap(stream, 30.0)),
    ]


def _sample_cases() -> list[CompileCase]:
    logits, ids = _empty(64, 151936, dtype=F32), _empty(64, dtype=I32)
    odd, small, large = (_empty(64, v, dtype=F32) for v in (50257, 4096, 600_000))
    number, key = _empty(64, dtype=F32), _empty(64, dtype=torch.int64)
    rows = RowParams(
        greedy=_empty(64, dtype=torch.bool),
        temperature=number,
        top_k=ids,
        top_p=number,
        min_p=number,
        seed=key,
        sample=key,
        position=key,
    )
    masks = LogitEdits(mask_bits=_empty(8, 4748, dtype=I32), mask_rows=ids)
    counts = LogitEdits(
        counts=logits, count_rows=ids, frequency=number, presence=number, repetition=number
    )
    both = replace(counts, mask_bits=masks.mask_bits, mask_rows=ids)
    bias = LogitEdits(entry_rows=ids, entry_ids=ids, entry_values=number)
    return [
        CompileCase("draw", lambda: draw(logits, rows), sample=True),
        CompileCase("draw, odd vocabulary", lambda: draw(odd, rows)),
        CompileCase("draw, small vocabulary", lambda: draw(small, rows)),
        CompileCase("draw, largest vocabulary", lambda: draw(large, rows)),
        CompileCase("masks", lambda: edit(logits, masks)),
        CompileCase("penalties", lambda: edit(logits, counts)),
        CompileCase("penalties and masks", lambda: edit(logits, both)),
        CompileCase("bias", lambda: edit(logits, bias)),
    ]


def _experts(
    rows: int,
    dtype: torch.dtype = BF16,
    *,
    gpt_oss: bool = False,
    clamping: Clamping | None = None,
) -> object:
    dim, inner, count, top_k = (2880, 2880, 32, 4) if gpt_oss else (2048, 768, 128, 8)
    weights = ExpertWeights(
        gate_up=_empty(count, 2 * inner, dim, dtype=dtype),
        down=_empty(count, dim, inner, dtype=dtype),
        gate_up_bias=_empty(count, 2 * inner, dtype=dtype) if gpt_oss else None,
        down_bias=_empty(count, dim, dtype=dtype) if gpt_oss else None,
        clamping=clamping,
    )
    routing = Routing(top_k=top_k, scale_inputs=gpt_oss)
    logits = _empty(rows, count, dtype=F32)
    return experts(_empty(rows, dim, dtype=dtype), logits, routing, weights)


def _expert_cases() -> list[CompileCase]:
    return [
        CompileCase("experts, 1 row", lambda: _experts(1), sample=True),
        CompileCase("experts, 1 row, gpt-oss", lambda: _experts(1, gpt_oss=True, clamping=GPT_OSS)),
        CompileCase("experts, 64 rows", lambda: _experts(64), sample=True),
        CompileCase("experts, 512 rows", lambda: _experts(512)),
        CompileCase("experts, 2048 rows", lambda: _experts(2048)),
        CompileCase("experts, 8192 rows", lambda: _experts(8192)),
        CompileCase("experts, gpt-oss", lambda: _experts(8192, gpt_oss=True, clamping=GPT_OSS)),
        CompileCase("experts, step 3.5", lambda: _experts(8192, clamping=STEP)),
        CompileCase("experts, fp32", lambda: _experts(64, F32)),
    ]


def _route_cases() -> list[CompileCase]:
    best = Routing(top_k=6, groups=8, kept_groups=3, scale=16.0)
    two = replace(
        best, scores="sigmoid", bias=_empty(256, dtype=F32), group_rank="best_two", normalise=True
    )
    models = (
        ("gpt-oss", 32, Routing(top_k=4, scores="softmax_chosen")),
        ("mixtral", 8, Routing(top_k=2, normalise=True)),
        ("deepseek v2", 160, best),
        ("deepseek v3", 256, two),
    )
    return [
        CompileCase(f"route, {name}", lambda n=n, how=how: route(_empty(64, n, dtype=F32), how))
        for name, n, how in models
    ]


def _copy_cases() -> list[CompileCase]:
    pages, small = (
        _empty(64, 1000, width, dtype=torch.uint8) for width in (64 * 8 * 128 * 2, 64 * 33)
    )
    numbers = _empty(8, dtype=torch.int64)
    host, narrow = (_empty(8, 64, x.shape[2], dtype=torch.uint8) for x in (pages, small))
    return [
        CompileCase("pages to the host", lambda: gather_pages(pages, numbers, host), sample=True),
        CompileCase("pages from the host", lambda: scatter_pages(pages, numbers, host)),
        CompileCase("pages to the host, odd", lambda: gather_pages(small, numbers, narrow)),
        CompileCase(
            "copies of pages", lambda: copy_pages(pages, [(1, 2, 1 << 16)] * 2), sample=True
        ),
    ]


def _lora(parts: tuple[int, ...], rank: int, inputs: int, out: torch.dtype = BF16) -> object:
    rows, device = LoraRows(8, 64, rank), torch.device("meta")
    layer = LoraLayer(rows, LoraShape(inputs, parts), BF16, device)
    there = DeviceRows(_empty(64, dtype=I32), _empty(8, 3, dtype=I32))
    return grouped(_empty(64, inputs), _empty(64, sum(parts), dtype=out), there, layer)


def _lora_cases() -> list[CompileCase]:
    return [
        CompileCase("lora, joined parts", lambda: _lora((4096, 1024, 1024), 16, 4096), sample=True),
        CompileCase("lora, odd inputs", lambda: _lora((4096,), 64, 4100)),
        CompileCase("lora, partial sums", lambda: _lora((4096,), 128, 14336, F32)),
    ]


def _scan_cases() -> list[CompileCase]:
    """LFM2's convolution, Mamba, Mamba 2, delta nets of Qwen3-Next and of Kimi Linear."""
    scans, rows = TritonScans(), 64
    starts, slots, saves = _empty(9, dtype=I32), _empty(8, dtype=I32), _empty(8, 3, dtype=I32)
    plain, saved = DeviceSpans(starts, slots), DeviceSpans(starts, slots, starts, saves)

    def conv(spans: DeviceSpans) -> object:
        x, state = _empty(rows, 2048), _empty(99, 3, 2048)
        return scans.conv(x, _empty(2048, 3), None, state, spans)

    def space(heads: int, width: int, states: int, spans: DeviceSpans) -> object:
        decay = _empty(heads, states, dtype=F32) if width == 1 else _empty(heads, dtype=F32)
        b = _empty(rows, 1, states)
        x, dt = _empty(rows, heads, width), _empty(rows, heads, dtype=F32)
        inputs = SpaceInputs(x, dt, decay, b, b, _empty(heads))
        return scans.space(inputs, _empty(99, heads, width, states, dtype=F32), spans)

    def delta(spans: DeviceSpans) -> object:
        q, v = _empty(rows, 16, 128), _empty(rows, 32, 128)
        inputs = DeltaInputs(q, q, v, _empty(rows, 32, dtype=F32), _empty(rows, 32))
        return scans.delta(inputs, _empty(99, 32, 128, 128, dtype=F32), spans)

    def by_key() -> object:
        q = _empty(rows, 32, 128)
        inputs = DeltaInputs(q, q, q, _empty(rows, 32, 128, dtype=F32), _empty(rows, 32))
        return scans.delta(inputs, _empty(99, 32, 128, 128, dtype=F32), saved)

    return [
        CompileCase("scan, convolution", lambda: conv(saved)),
        CompileCase("scan, mamba", lambda: space(5120, 1, 16, plain)),
        CompileCase("scan, mamba 2", lambda: space(128, 64, 128, saved)),
        CompileCase("scan, delta", lambda: delta(plain), sample=True),
        CompileCase("scan, delta, saves", lambda: delta(saved)),
        CompileCase("scan, delta by key", by_key),
    ]


def _sum_cases() -> list[CompileCase]:
    found: list[CompileCase] = []
    for size in (2, 8):
        addresses = _empty(size, dtype=torch.int64)
        buffers = PeerBuffers(addresses, addresses, 0, 1 << 20)
        short, long = (_empty(n, dtype=F32) for n in (4 * 4096, 64 * 4096))
        found += [
            CompileCase(f"sum of {size} ranks, one shot", partial(one_shot, short, buffers)),
            CompileCase(f"sum of {size} ranks, two shots", partial(two_shot, long, buffers)),
        ]
    return found


def cases(fp8: torch.dtype | None) -> list[CompileCase]:
    """All cases; `fp8` is the chip's dtype for an FP8 cache, if it has one."""
    return [
        *_attention_cases(fp8),
        *_sparse_cases(),
        *(_narrow_cases(fp8) if fp8 else []),
        *_head_cases(),
        *_copy_cases(),
        *_linear_cases(),
        *_code_cases(),
        *_fp8_cases(fp8),
        *_row_cases(),
        *_sample_cases(),
        *_route_cases(),
        *_expert_cases(),
        *_lora_cases(),
        *_scan_cases(),
        *_sum_cases(),
    ]
