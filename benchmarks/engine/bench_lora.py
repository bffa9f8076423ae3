"""Claim: LoRA adapters cost little, and nothing if no request uses one.

Ratios of tokens per second with adapters to those without; runs are interleaved, so that load on
the machine affects both alike. Cases: `decode` (32 requests over 16 adapters of rank 16), `one` (a
single request), `prompts`, `idle` (a server with adapters but no request that uses one, against a
server without), and `zipf` (many adapters with Zipf-distributed popularity, few slots and host
copies, against a server with a slot for each adapter; also the time to the first token of an
adapter that has to be read from disk, and of the same adapter again). Weights are random, in the
shape of a model of 0.5 B parameters. `--targets default` are PEFT's defaults for such models
(`q_proj`, `v_proj`). `read` is the model's share of the bytes that a step reads, which bounds
`decode` and `one` where memory bandwidth limits them.

    python benchmarks/engine/bench_lora.py [--what decode one prompts idle zipf] [--layers 24]
        [--targets default all-linear] [--format none|w8a8|w4a8] [--adapters 16]
        [--many 1000] [--slots 32] [--pairs 5]
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file

from sylvan.config.sources import from_keywords, gather
from sylvan.protocol.adapters import decode_adapters
from sylvan.protocol.arrays import EMPTY_IDS
from sylvan.protocol.messages import TokenOutput
from sylvan.protocol.requests import GenerateRequest
from sylvan.protocol.sampling import SamplingParams
from sylvan.runtime.engine.build import build_scheduler
from sylvan.runtime.engine.engine_core import EngineCore

SHAPE = json.loads((Path(__file__).parents[1] / "half_billion.json").read_text())
RANK, REQUESTS, TOKENS, PROMPT = 16, 32, 64, 256
DEFAULT = ("q_proj", "v_proj")
TARGETS: dict[str, Sequence[str]] = {"default": DEFAULT, "all-linear": ()}
BYTES = {"none": 2.0, "w8a8": 1.0, "w4a8": 0.5}  # of a weight, except the head's


def write_model(folder: Path, layers: int) -> Path:
    raw = SHAPE | {
        "architectures": ["Qwen2ForCausalLM"],
        "model_type": "qwen2",
        "torch_dtype": "bfloat16",
        "num_hidden_layers": layers,
    }
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(raw))
    return folder


def write_adapter(folder: Path, layers: int, seed: int, only: Sequence[str] = ()) -> Path:
    """Write an adapter for all linear layers, or for the named ones."""
    dim, inner = SHAPE["hidden_size"], SHAPE["intermediate_size"]
    kv = dim // SHAPE["num_attention_heads"] * SHAPE["num_key_value_heads"]
    sizes = {
        "self_attn.q_proj": (dim, dim),
        "self_attn.k_proj": (kv, dim),
        "self_attn.v_proj": (kv, dim),
        "self_attn.o_proj": (dim, dim),
        "mlp.gate_proj": (inner, dim),
        "mlp.up_proj": (inner, dim),
        "mlp.down_proj": (dim, inner),
    }
    generator = torch.Generator().manual_seed(seed)
    tensors: dict[str, torch.Tensor] = {}
    for layer in range(layers):
        for name, (outputs, inputs) in sizes.items():
            if only and name.rpartition(".")[2] not in only:
                continue
            module = f"base_model.model.model.layers.{layer}.{name}"
            for part, shape in (("lora_A", (RANK, inputs)), ("lora_B", (outputs, RANK))):
                values = torch.randn(shape, generator=generator) * 0.02
                tensors[f"{module}.{part}.weight"] = values.to(torch.bfloat16)
    folder.mkdir()
    save_file(tensors, folder / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": RANK, "lora_alpha": RANK, "number": seed}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder


def linked(folder: Path, original: Path, number: int) -> Path:
    """Write another adapter that links to the same tensor file."""
    folder.mkdir()
    os.link(original / "adapter_model.safetensors", folder / "adapter_model.safetensors")
    config = json.loads((original / "adapter_config.json").read_text()) | {"number": number}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder


@dataclass
class Engine:
    """A scheduler with all its parts; `ids` are the IDs of its adapters."""

    built: EngineCore
    first: dict[str, float] = field(default_factory=dict)
    ids: list[str] = field(default_factory=list)

    @classmethod
    def start(cls, model: Path, args: argparse.Namespace, **lora: object) -> Engine:
        first: dict[str, float] = {}

        def emit(outputs: Sequence[TokenOutput]) -> None:
            for output in outputs:
                first.setdefault(output.rid, time.perf_counter())

        keywords = {
            "model": str(model),
            "load_format": "dummy",
            "max_running_requests": 2 * REQUESTS,
            "context_length": 1024,
            "quantization": None if args.format == "none" else args.format,
            "log_level": "warning",
            "grammar_backend": "none",
            "disable_radix_cache": True,
        }
        config = gather(from_keywords(keywords | lora)).config
        built = build_scheduler(config, emit)
        adapters = decode_adapters(str(built.facts["adapters"] or "[]"))
        return cls(built, first, [info.id for info in adapters])

    def run(self, count: int, adapters: Sequence[str | None], tokens: int) -> tuple[float, float]:
        """Return the seconds until all requests have a first token, and from then on to the end."""
        scheduler, rng = self.built.scheduler, np.random.default_rng(1)
        sampling = SamplingParams(
            max_new_tokens=tokens, temperature=0.0, ignore_eos=True, sampling_seed=0
        )
        length = PROMPT if tokens == 1 else 16
        begun = time.perf_counter()
        for number in range(count):
            ids = rng.integers(0, 1000, length).astype(np.int32)
            scheduler.add(
                GenerateRequest(
                    rid=str(number),
                    input_ids=ids,
                    output_ids=EMPTY_IDS,
                    sampling=sampling,
                    lora=adapters[number % len(adapters)],
                )
            )
        while len(scheduler.waiting) or any(not req.num_outputs for req in scheduler.running):
            scheduler.step()
        started = time.perf_counter()
        while not scheduler.idle:
            scheduler.step()
        return started - begun, time.perf_counter() - started


def compare(args: argparse.Namespace, off: Callable[[], float], on: Callable[[], float]) -> dict:
    """Return the ratios of speeds of `on` to `off`, alternating which runs first; the first pair
    does not count.
    """
    pairs: list[tuple[float, float]] = []
    for number in range(args.pairs + 1):
        if number % 2:
            second, first = on(), off()
        else:
            first, second = off(), on()
        pairs.append((first, second))
    del pairs[0]
    ratios = sorted(a / b for a, b in pairs)
    return {
        "ratio": round(statistics.median(ratios), 3),
        "ratio_spread": [round(ratios[0], 3), round(ratios[-1], 3)],
        "off_s": round(statistics.median(a for a, _ in pairs), 3),
        "on_s": round(statistics.median(b for _, b in pairs), 3),
    }


def few(args: argparse.Namespace, folder: Path, model: Path) -> None:
    """Measure with a slot for every adapter."""
    folder.mkdir()
    only = TARGETS[args.target]
    paths = {
        f"a{n}": str(write_adapter(folder / f"a{n}", args.layers, n, only))
        for n in range(args.adapters)
    }
    size = (folder / "a0" / "adapter_model.safetensors").stat().st_size
    engine = Engine.start(model, args, lora_paths=paths, max_loras_per_batch=args.adapters)
    cases = {"decode": (REQUESTS, TOKENS, 1), "one": (1, TOKENS, 1), "prompts": (8, 1, 0)}
    for name, (count, tokens, part) in cases.items():
        if name in args.what:
            found = compare(
                args,
                lambda c=count, t=tokens, p=part: engine.run(c, (None,), t)[p],
                lambda c=count, t=tokens, p=part: engine.run(c, engine.ids, t)[p],
            )
            read = read_share(args, size * min(count, args.adapters))
            bound = {} if name == "prompts" else {"read": read}
            report(args, name, engine, found | bound)
    if "idle" in args.what:
        plain = Engine.start(model, args)
        found = compare(
            args,
            lambda: plain.run(REQUESTS, (None,), TOKENS)[1],
            lambda: engine.run(REQUESTS, (None,), TOKENS)[1],
        )
        report(args, "idle", engine, found)
        plain.built.close()
    engine.built.close()


def many(args: argparse.Namespace, folder: Path, model: Path) -> None:
    """Measure with more adapters than slots and host copies, chosen by Zipf's law."""
    folder.mkdir()
    first = write_adapter(folder / "z0", args.layers, 0, TARGETS[args.target])
    paths = {"z0": str(first)}
    for n in range(1, args.many):
        paths[f"z{n}"] = str(linked(folder / f"z{n}", first, n))
    lora = {"lora_paths": paths}
    size = (first / "adapter_model.safetensors").stat().st_size
    memory = {"lora__memory": 2 * args.many * size}
    whole = Engine.start(model, args, **lora, **memory, max_loras_per_batch=args.many)
    copies = {"max_loaded_loras": 2 * args.slots}
    tight = Engine.start(model, args, **lora, **copies, max_loras_per_batch=args.slots)
    weights = 1 / np.arange(1, args.many + 1)
    asked = np.random.default_rng(2).choice(args.many, 4 * REQUESTS, p=weights / weights.sum())

    def seconds(engine: Engine) -> float:
        return sum(engine.run(len(asked), [engine.ids[n] for n in asked], TOKENS // 4))

    found = compare(args, lambda: seconds(whole), lambda: seconds(tight))
    last = tight.ids[-min(20, args.slots, args.many) :]
    for name in ("cold", "warm"):
        found[f"{name}_ttft_ms"] = round(
            statistics.median(first_token(tight, adapter) for adapter in last), 1
        )
    report(args, "zipf", tight, found)
    whole.built.close()
    tight.built.close()


def first_token(engine: Engine, adapter: str) -> float:
    """Return the milliseconds to the first token of a single prompt."""
    engine.first.clear()
    begun = time.perf_counter()
    engine.run(1, (adapter,), 1)
    return 1e3 * (engine.first["0"] - begun)


def read_share(args: argparse.Namespace, adapters: int) -> float:
    """Return the model's share of the bytes that a decode step reads."""
    dim, inner, vocab = (SHAPE[n] for n in ("hidden_size", "intermediate_size", "vocab_size"))
    kv = dim // SHAPE["num_attention_heads"] * SHAPE["num_key_value_heads"]
    layer = 2 * dim * dim + 2 * dim * kv + 3 * dim * inner
    model = args.layers * layer * BYTES[args.format] + 2 * vocab * dim
    return round(model / (model + adapters), 3)


def report(args: argparse.Namespace, name: str, engine: Engine, found: dict) -> None:
    about = {"what": name, "targets": args.target, "format": args.format}
    about["runner"] = engine.built.facts["runner"]
    print(json.dumps(about | found), flush=True)


def main() -> int:
    kinds = ("decode", "one", "prompts", "idle", "zipf")
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--what", nargs="*", choices=kinds, default=kinds)
    parser.add_argument("--targets", nargs="*", choices=TARGETS, default=[*TARGETS])
    parser.add_argument("--format", choices=("none", "w8a8", "w4a8"), default="none")
    parser.add_argument("--layers", type=int, default=SHAPE["num_hidden_layers"])
    parser.add_argument("--adapters", type=int, default=16)
    parser.add_argument("--many", type=int, default=1000)
    parser.add_argument("--slots", type=int, default=32)
    parser.add_argument("--pairs", type=int, default=5)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        model = write_model(folder / "model", args.layers)
        for target in args.targets:
            args.target = target
            if set(args.what) - {"zipf"}:
                few(args, folder / args.target, model)
            if "zipf" in args.what and (args.target == "default" or len(args.targets) == 1):
                many(args, folder / f"zipf-{args.target}", model)
    return 0


if __name__ == "__main__":
    sys.exit(main())
