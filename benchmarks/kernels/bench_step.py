"""Compares a whole native step with its limit: reading the weights once, or the machine's matmul
rate.

    python benchmarks/kernels/bench_step.py M --format bf16

Prints medians of interleaved runs and the share of the limit. The limit of a prompt is the time of
its products at the rate of PyTorch's own, measured between the steps: the triangle of attention at
the rate of bfloat16; linear layers at that rate too or, if quantised, at the rate of int8
(`torch._int_mm`) if it is higher. `share_own` uses the rate of our linear layers instead of
PyTorch's. Run it on a quiet machine.
"""

from __future__ import annotations

import argparse
import ctypes
import dataclasses
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

from sylvan.kernels.matmul.rounding import quantise_fp8_blocks
from sylvan.kernels.matmul.weights import (
    DeferredWeight,
    quantise_int4,
    quantise_int4_codes,
    quantise_int8,
)
from sylvan.kernels.memory import allocate
from sylvan.kernels.native.library import load
from sylvan.kernels.native.opset import Linear
from sylvan.runtime.attention.null import NullAttention
from sylvan.runtime.core.forward import BatchLimits, ForwardBatch
from sylvan.runtime.executor.graphs.pages import NativePool
from sylvan.runtime.executor.graphs.program import ProgramRunner
from sylvan.runtime.layers.build import Build
from sylvan.runtime.models.registry import load_family
from sylvan.runtime.pool.mha import KVShape

SIZES = (
    *("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"),
    *("num_key_value_heads", "vocab_size", "tie_word_embeddings"),
)
HALF_BILLION = json.loads((Path(__file__).parents[1] / "half_billion.json").read_text())
SHAPES = {
    "S": ("LlamaForCausalLM", 256, 704, 8, 4, 2, 4096, True),
    "M": ("Qwen2ForCausalLM", *(HALF_BILLION[name] for name in SIZES)),
    "L": ("LlamaForCausalLM", 2048, 8192, 16, 32, 8, 128256, True),
}
FORMATS = {
    "bf16": lambda w: w,
    "w8a8": quantise_int8,
    "w4a8": lambda w: quantise_int4(w, 64),
    "w4a16": lambda w: quantise_int4_codes(w, 128),
    "fp8-block": quantise_fp8_blocks,
}
ROUNDING_ROWS = ("w8a8", "w4a8")
PAGE = 64


@dataclasses.dataclass(frozen=True)
class Options:
    shape: str
    format: str
    threads: int
    variant: str | None
    repeats: int
    context: int


class Bench:
    """A program over random weights, and its steps."""

    def __init__(self, options: Options) -> None:
        family, dim, inner, layers, heads, kv_heads, vocab, tied = SHAPES[options.shape]
        raw = {
            "architectures": [family],
            "hidden_size": dim,
            "intermediate_size": inner,
            "num_hidden_layers": layers,
            "num_attention_heads": heads,
            "num_key_value_heads": kv_heads,
            "vocab_size": vocab,
            "tie_word_embeddings": tied,
            "max_position_embeddings": 4096,
            "rms_norm_eps": 1e-6,
            "hidden_act": "silu",
            "rope_theta": 10000.0,
        }
        parsed = load_family(family)
        config = parsed.parse(raw)
        self.library = load(options.variant)
        build = Build(dtype=torch.bfloat16, length=4096)
        model = parsed.model(config, build)
        _fill(model, FORMATS[options.format])
        self.limits = BatchLimits(max_tokens=2048, max_reqs=64, max_pages_per_req=64)
        shape = KVShape(
            num_layers=layers,
            num_kv_heads=kv_heads,
            head_dim=config.head_dim,
            num_pages=64 * 32,
            page_size=PAGE,
        )
        pool = NativePool(shape, torch.bfloat16)
        self.runner = ProgramRunner(
            model, self.limits, pool, self.library, dtype=torch.bfloat16, threads=options.threads
        )
        self.batch = ForwardBatch(self.limits, pool, NullAttention())
        self.flop_per_token = 2 * sum(
            p.shape.numel() for p in _weights(model).values() if p.shape[0] != vocab
        )
        self.attention_flop_per_pair = 4 * layers * heads * config.head_dim
        self.inputs, self.outputs = dim, 2 * inner  # of the widest layer
        self.vocab = vocab
        self._floor = allocate(self.runner.weight_bytes)
        self._floor[:] = 1
        rng = np.random.default_rng(0)
        pages = rng.permutation(64 * 32 - 1) + 1
        self.batch.host.page_table[:32, :40] = pages[: 32 * 40].reshape(32, 40)

    def prepare(self, reqs: int, start: int, tokens: int) -> None:
        """Prepare a step: `reqs` requests with `start` tokens compute `tokens` more."""
        host = self.batch.host
        total = reqs * tokens
        position = np.tile(np.arange(start, start + tokens), reqs)
        row = np.repeat(np.arange(reqs), tokens)
        host.input_ids[:total] = np.arange(total) * 7919 % self.vocab
        host.positions[:total] = position
        host.out_slots[:total] = host.page_table[row, position // PAGE] * PAGE + position % PAGE
        host.kv_lens[:reqs] = start + tokens
        host.q_starts[: reqs + 1] = np.arange(reqs + 1) * tokens
        host.req_slots[:reqs] = np.arange(reqs)
        host.sample_rows[:reqs] = np.arange(1, reqs + 1) * tokens - 1
        self.batch.ready(total, reqs, reqs)

    def step(self) -> None:
        self.runner.run(self.batch)

    def read_floor(self) -> None:
        """Read as many bytes as the weights have."""
        self.library.dll.sylvan_read(
            ctypes.c_void_p(self._floor.ctypes.data), ctypes.c_int64(self._floor.nbytes)
        )


def _weights(model: torch.nn.Module) -> dict[int, DeferredWeight]:
    found = (getattr(m, "weight", None) for m in model.modules())
    return {id(w): w for w in found if isinstance(w, DeferredWeight)}


def _fill(model: torch.nn.Module, convert: Callable) -> None:
    """Repeat one block of random numbers, which is fast and suffices for timing."""
    block = torch.randn(1 << 20).mul(0.02).bfloat16()
    made: dict[int, DeferredWeight] = {}
    for module in model.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            if parameter.dim() == 1:
                parameter.data.fill_(1.0)
                continue
            if id(parameter) not in made:
                shape = parameter.shape
                made[id(parameter)] = DeferredWeight(
                    shape,
                    lambda s=shape: convert(
                        block.repeat(-(-s.numel() // len(block)))[: s.numel()].view(s)
                    ),
                    str(len(made)),
                )
            delattr(module, name)
            setattr(module, name, made[id(parameter)])


def median_ms(repeats: int, *actions: Callable[[], object]) -> list[float]:
    """Medians of interleaved runs, one warm-up each."""
    for action in actions:
        action()
    times: list[list[float]] = [[] for _ in actions]
    for _ in range(repeats):
        for spent, action in zip(times, actions, strict=True):
            start = time.perf_counter()
            action()
            spent.append((time.perf_counter() - start) * 1e3)
    return [statistics.median(t) for t in times]


def products(bench: Bench, rows: int) -> tuple[float, Callable[[], object], Callable[[], object]]:
    """Time PyTorch's own products in the shape of gate-up: operations, then in bfloat16 and in
    int8.
    """
    x, w = torch.randn(rows, bench.inputs).bfloat16(), torch.randn(bench.outputs, bench.inputs)
    dense, levels = w.bfloat16(), (w * 30).to(torch.int8).t()
    small = (x * 30).to(torch.int8)
    flop = 2.0 * rows * bench.inputs * bench.outputs
    return flop, lambda: torch.nn.functional.linear(x, dense), lambda: torch._int_mm(small, levels)


def prefill(bench: Bench, tokens: int, repeats: int, *, quantised: bool) -> dict[str, float]:
    """Compare a prompt's step with the time of its products."""
    bench.prepare(1, 0, tokens)
    flop, *both = products(bench, tokens)
    spent, *times = median_ms(repeats, bench.step, *both)
    bf16, int8 = (flop / ms / 1e6 for ms in times)
    linear = bench.flop_per_token * tokens / 1e6
    attention = bench.attention_flop_per_pair * tokens * (tokens + 1) / 2e6 / bf16
    floor = linear / (max(bf16, int8) if quantised else bf16) + attention
    ops = bench.runner.profile(bench.batch)
    own = sum(ns for op, ns in ops if isinstance(op, Linear)) / 1e6
    return {
        "ms": spent,
        "tokens_per_s": tokens / spent * 1e3,
        "floor_ms": floor,
        "share": floor / spent,
        "share_own": (own + attention) / (sum(ns for _, ns in ops) / 1e6),
        "own_gops": linear / own,
        "torch_bf16_gflops": bf16,
        "torch_int8_gops": int8,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("shape", choices=SHAPES)
    parser.add_argument("--format", choices=FORMATS, default="bf16")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--variant")
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--context", type=int, default=256)
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--json", type=Path)
    raw = vars(parser.parse_args())
    profile, out = raw.pop("profile"), raw.pop("json")
    options = Options(**raw)
    bench = Bench(options)
    results: dict[str, dict[str, float]] = {}
    torch.set_num_threads(options.threads)
    for reqs in (1, 8, 32):
        bench.prepare(reqs, options.context, 1)
        spent, floor = median_ms(options.repeats, bench.step, bench.read_floor)
        results[f"decode {reqs}"] = {"ms": spent, "floor_ms": floor, "share": floor / spent}
        _profile(bench, profile)
    for tokens in (512, 2048):
        repeats = max(3, options.repeats // 3)
        quantised = options.format in ROUNDING_ROWS
        results[f"prefill {tokens}"] = prefill(bench, tokens, repeats, quantised=quantised)
        _profile(bench, profile)
    for name, values in results.items():
        print(name, {key: round(value, 3) for key, value in values.items()})
    if out:
        out.write_text(json.dumps({"options": raw, "variant": bench.library.variant, **results}))


def _profile(bench: Bench, wanted: bool) -> None:
    if not wanted:
        return
    total: dict[str, float] = {}
    for op, ns in bench.runner.profile(bench.batch):
        name = type(op).__name__
        total[name] = total.get(name, 0.0) + ns / 1e3
    print({name: round(us) for name, us in total.items()})


if __name__ == "__main__":
    main()
