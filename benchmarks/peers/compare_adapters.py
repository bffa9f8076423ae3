"""Compares Sylvan with its peers with LoRA adapters: tokens per second relative to the bare model.

    python benchmarks/peers/compare_adapters.py [--peers sylvan vllm llama.cpp] [--rounds 3]
        [--shape 0.5B] [--batch 1 32] [--new 32] [--adapters 16] [--cache ~/.cache/sylvan-peers]

Adapters have rank 16 on `q_proj` and `v_proj`, PEFT's defaults for such models. Each peer runs in a
separate process that holds the model once and decodes with no adapter, with one adapter for all
requests, and with `--adapters` of them in turn (not llama.cpp, where all requests of a context use
the same), interleaved in every round. Environments are those of `compare.py`.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
from collections import defaultdict
from pathlib import Path

import torch
from checkpoints import SHAPES, write_checkpoint
from environments import CommandFailedError, Environment, end_with_processes
from peers import PEERS
from safetensors.torch import save_file

RANK = 16
KNOWN = ("sylvan", "vllm", "llama.cpp")


def write_adapter(folder: Path, shape: str, seed: int) -> None:
    """Write an adapter in PEFT's format, with random numbers."""
    raw = SHAPES[shape]
    dim, head = raw["hidden_size"], raw["head_dim"]
    outputs = {
        "q_proj": head * raw["num_attention_heads"],
        "v_proj": head * raw["num_key_value_heads"],
    }
    generator = torch.Generator().manual_seed(seed)
    tensors: dict[str, torch.Tensor] = {}
    for layer in range(raw["num_hidden_layers"]):
        for name, rows in outputs.items():
            module = f"base_model.model.model.layers.{layer}.self_attn.{name}"
            for part, size in (("lora_A", (RANK, dim)), ("lora_B", (rows, RANK))):
                values = torch.randn(size, generator=generator) * 0.02
                tensors[f"{module}.{part}.weight"] = values.bfloat16()
    folder.mkdir()
    save_file(tensors, folder / "adapter_model.safetensors")
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": RANK,
        "lora_alpha": RANK,
        "target_modules": list(outputs),
        "base_model_name_or_path": shape,
    }
    (folder / "adapter_config.json").write_text(json.dumps(config))


def prepared(name: str, options: argparse.Namespace) -> tuple[Environment, list[str]]:
    """Return a peer's environment, and its format, model and converted model."""
    peer, cache = PEERS[name], options.cache
    environment = Environment(name, peer, cache, options.threads)
    environment.prepare(3600.0)
    model, form = cache / "models" / options.shape, peer.formats["bf16"]
    if not model.exists():
        write_checkpoint(options.shape, model)
    extra = cache / "converted" / f"{name}-{options.shape}-{form}"
    if peer.convert and not extra.exists():
        extra.parent.mkdir(parents=True, exist_ok=True)
        part = extra.with_name(extra.name + ".partial")
        environment.work("convert", name, form, str(model), str(part), limit_s=3600.0)
        part.rename(extra)
    return environment, [name, form, str(model), str(extra)]


def measure(name: str, adapters: Path, options: argparse.Namespace) -> None:
    """Print a line of JSON for each batch size."""
    environment, words = prepared(name, options)
    words += [str(adapters), "--threads", str(options.threads), "--new", str(options.new)]
    words += ["--rounds", str(options.rounds), "--batch", *map(str, options.batch)]
    told = environment.work(*words, limit_s=options.limit_s, script="adapters_worker.py")
    rates: dict[tuple[int, str], list[float]] = defaultdict(list)
    version = ""
    for line in told.splitlines():
        if line.startswith("{"):
            found = json.loads(line)
            version = found.get("version", version)
            if "rate" in found:
                rates[found["batch"], found["what"]].append(found["rate"])
    for (batch, what), values in rates.items():
        bare = rates[batch, "none"]
        ratios = sorted(a / b for a, b in zip(values, bare, strict=True))
        line = {
            "peer": version,
            "batch": batch,
            "adapters": what,
            "tokens_per_s": round(statistics.median(values), 1),
        }
        if what != "none":
            line["ratio"] = round(statistics.median(ratios), 3)
            line["ratio_spread"] = [round(ratios[0], 3), round(ratios[-1], 3)]
        print(json.dumps(line), flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--peers", nargs="+", choices=KNOWN, default=KNOWN)
    parser.add_argument("--shape", choices=SHAPES, default="0.5B")
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 32])
    parser.add_argument("--adapters", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--new", type=int, default=32)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--limit-s", type=float, default=900.0)
    parser.add_argument("--cache", type=Path, default=Path.home() / ".cache" / "sylvan-peers")
    options = parser.parse_args()
    end_with_processes()
    failed = 0
    with tempfile.TemporaryDirectory() as folder:
        for number in range(options.adapters):
            write_adapter(Path(folder) / f"a{number}", options.shape, number)
        for name in options.peers:
            try:
                measure(name, Path(folder), options)
            except CommandFailedError as why:
                print(f"left out: {name}: {why}", file=sys.stderr, flush=True)
                failed = 1
    return failed


if __name__ == "__main__":
    sys.exit(main())
