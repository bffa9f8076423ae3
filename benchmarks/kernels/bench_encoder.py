"""Times an encoder's forward pass in milliseconds: the native step program against PyTorch op by
op.

    python benchmarks/kernels/bench_encoder.py base --format bf16

Shapes are those of BERT, XLM-R and ModernBERT, with random weights. PyTorch computes in bf16
whatever the format of the program. Run it on a quiet machine.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from bench_step import median_ms

from sylvan.kernels.native.library import load
from sylvan.runtime.attention.null import NullAttention
from sylvan.runtime.core.forward import BatchLimits, ForwardBatch
from sylvan.runtime.executor.graphs.program import ProgramRunner
from sylvan.runtime.executor.runner import EagerRunner
from sylvan.runtime.layers.build import Build
from sylvan.runtime.models.dummy import dummy_weights
from sylvan.runtime.models.quantise import FORMATS
from sylvan.runtime.models.registry import load_family
from sylvan.runtime.pool.none import NoPool

SHAPES = {  # family, hidden, inner, layers, heads
    "small": ("BertModel", 384, 1536, 12, 12),
    "base": ("BertModel", 768, 3072, 12, 12),
    "large": ("BertModel", 1024, 4096, 24, 16),
    "modern": ("ModernBertModel", 768, 1152, 22, 12),
}
TEXTS = ((1, 16), (1, 512), (32, 16), (32, 64))  # how many, tokens of each
LIMITS = BatchLimits(max_tokens=2048, max_reqs=64, max_pages_per_req=8)
VOCAB = 30522


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("shape", choices=SHAPES)
    parser.add_argument("--format", choices=("bf16", *FORMATS), default="bf16")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    batch = ForwardBatch(LIMITS, NoPool(64, 64), NullAttention())
    native = ProgramRunner(
        _model(args.shape, args.format),
        LIMITS,
        NoPool(64, 64),
        load(),
        dtype=torch.bfloat16,
        threads=args.threads,
    )
    eager = EagerRunner(_model(args.shape, "bf16"))
    results = {}
    for count, length in TEXTS:
        _fill(batch, count, length)
        with torch.inference_mode():
            mine, theirs = median_ms(
                args.repeats, lambda: native.run(batch), lambda: eager.run(batch)
            )
        name = f"{count} x {length}"
        results[name] = {"native_ms": mine, "pytorch_ms": theirs, "ratio": theirs / mine}
        print(name, {key: round(value, 2) for key, value in results[name].items()})
        if args.profile:
            _profile(native, batch)
    if args.json:
        args.json.write_text(json.dumps(results))


def _model(shape: str, form: str) -> Any:
    family, dim, inner, layers, heads = SHAPES[shape]
    raw = {
        "architectures": [family],
        "hidden_size": dim,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "vocab_size": VOCAB,
        "max_position_embeddings": 512,
        "hidden_act": "gelu",
    }
    parsed = load_family(family)
    model = parsed.model(parsed.parse(raw), Build(dtype=torch.bfloat16, length=512))
    dummy_weights(model, 0, None if form == "bf16" else FORMATS[form])
    return model


def _fill(batch: ForwardBatch, count: int, length: int) -> None:
    host, total = batch.host, count * length
    host.input_ids[:total] = np.arange(total) * 7919 % VOCAB
    host.positions[:total] = np.tile(np.arange(length), count)
    host.kv_lens[:count] = length
    host.q_starts[: count + 1] = np.arange(count + 1) * length
    batch.ready(total, count, 0)


def _profile(runner: ProgramRunner, batch: ForwardBatch) -> None:
    total: dict[str, float] = {}
    for op, ns in runner.profile(batch):
        name = type(op).__name__
        total[name] = total.get(name, 0.0) + ns / 1e3
    print({name: round(us) for name, us in total.items()})


if __name__ == "__main__":
    main()
