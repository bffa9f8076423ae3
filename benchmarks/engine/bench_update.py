"""Claim: replacing all weights costs little more than copying them.

Compares the seconds of an update from shared memory with those of a copy of the same file into
memory that is already resident; runs are interleaved, so that load on the machine affects all
alike. `ratio` includes the checks of all numbers, packing and quantisation. `rest_ratio` leaves out
the time that quantising and packing the same matrices takes alone, with the kernels that updates
use. Weights are random, in the shape of a model of 0.5 B parameters.

    python benchmarks/engine/bench_update.py [--formats bf16 w8a8 w4a8] [--layers 24] [--pairs 5]
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file, save_file

from sylvan.kernels.matmul.pack import pack
from sylvan.kernels.matmul.weights import Int4Weight, Int8Weight, quantise_int4, quantise_int8
from sylvan.kernels.native.packing import pack_rows
from sylvan.protocol.commands import SharedTensors, UpdateWeights
from sylvan.runtime.executor.api import Executor
from sylvan.runtime.executor.build import build_executor
from sylvan.runtime.executor.options import LocalOptions
from sylvan.runtime.layers.build import Build
from sylvan.runtime.models.registry import family_of, load_config
from sylvan.runtime.models.slots import slots

HALF_BILLION = json.loads((Path(__file__).parents[1] / "half_billion.json").read_text())
FORMATS = {"bf16": None, "w8a8": "w8a8", "w4a8": "w4a8"}
ROUNDED: dict[str, Callable[[torch.Tensor], torch.Tensor | Int8Weight | Int4Weight]] = {
    "bf16": lambda matrix: matrix,
    "w8a8": quantise_int8,
    "w4a8": quantise_int4,
}
SHARED = Path("/dev/shm")


def write_config(folder: Path, layers: int) -> Path:
    raw = HALF_BILLION | {
        "architectures": ["LlamaForCausalLM"],
        "num_hidden_layers": layers,
        "torch_dtype": "bfloat16",
    }
    (folder / "config.json").write_text(json.dumps(raw))
    return folder


def write_tensors(model_dir: Path, file: Path) -> int:
    """Write random weights for the whole model, as a trainer would; return their bytes."""
    config = load_config(model_dir)
    build = Build(dtype=torch.bfloat16, length=64, device=torch.device("meta"))
    generator = torch.Generator().manual_seed(0)
    tensors: dict[str, torch.Tensor] = {}
    for slot in slots(family_of(config).model(config, build)):
        parts = getattr(slot.module, "parts", None) or (slot.shape[0],)
        rows = parts if len(parts) == len(slot.sources) else (slot.shape[0],)
        for source, count in zip(slot.sources, rows, strict=True):
            shape = (count, *slot.shape[1:])
            values = torch.randn(shape, generator=generator) * 0.02
            tensors[source] = values.to(torch.bfloat16)
    save_file(tensors, file)
    return file.stat().st_size


def update(executor: Executor, file: Path, size: int) -> float:
    """Return the seconds of one update."""
    begun = time.perf_counter()
    result = executor.control(UpdateWeights(SharedTensors(file.name, size), partial=False)).wait()
    seconds = time.perf_counter() - begun
    assert not result.error, result.error
    return seconds


def copy(target: torch.Tensor, file: Path) -> float:
    """Return the seconds of one copy, by PyTorch's threads, as packing."""
    begun = time.perf_counter()
    target.copy_(torch.from_numpy(np.memmap(file, np.uint8, "c")))
    return time.perf_counter() - begun


class Packing:
    """Quantises and packs all matrices of a file into memory that is already resident."""

    def __init__(self, name: str, file: Path) -> None:
        tensors = load_file(file)
        self._matrices = [tensor for tensor in tensors.values() if tensor.dim() == 2]
        self._packed = [pack(ROUNDED[name](m), torch.bfloat16) for m in self._matrices]

    def run(self) -> float:
        """Return the seconds of one run."""
        begun = time.perf_counter()
        for matrix, packed in zip(self._matrices, self._packed, strict=True):
            assert pack_rows(matrix, packed)
        return time.perf_counter() - begun


def measure(name: str, args: argparse.Namespace) -> dict[str, object]:
    with tempfile.TemporaryDirectory() as folder:
        model_dir = write_config(Path(folder), args.layers)
        file = SHARED / f"sylvan-bench-{os.getpid()}"
        try:
            size = write_tensors(model_dir, file)
            (model_dir / "model.safetensors").symlink_to(file)
            options = LocalOptions(
                page_size=16,
                num_pages=64,
                max_batch_tokens=64,
                max_running_reqs=4,
                context_len=64,
                quantization=FORMATS[name],
            )
            executor, facts = build_executor(model_dir, options)
            target = torch.ones(size, dtype=torch.uint8)
            update(executor, file, size)
            copy(target, file)
            packing = Packing(name, file)
            updates: list[float] = []
            copies: list[float] = []
            packs: list[float] = []
            for _ in range(args.pairs):
                updates.append(update(executor, file, size))
                copies.append(copy(target, file))
                packs.append(packing.run())
            executor.close()
        finally:
            file.unlink(missing_ok=True)
    ratios = sorted(u / c for u, c in zip(updates, copies, strict=True))
    rests = sorted((u - p) / c for u, p, c in zip(updates, packs, copies, strict=True))
    return {
        "format": name,
        "runner": facts.runner,
        "gigabytes": round(size / 1e9, 3),
        "update_s": round(statistics.median(updates), 3),
        "copy_s": round(statistics.median(copies), 3),
        "pack_s": round(statistics.median(packs), 3),
        "ratio": round(statistics.median(ratios), 2),
        "ratio_spread": [round(ratios[0], 2), round(ratios[-1], 2)],
        "rest_ratio": round(statistics.median(rests), 2),
        "rest_ratio_spread": [round(rests[0], 2), round(rests[-1], 2)],
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--formats", nargs="*", choices=FORMATS, default=list(FORMATS))
    parser.add_argument("--layers", type=int, default=HALF_BILLION["num_hidden_layers"])
    parser.add_argument("--pairs", type=int, default=5)
    args = parser.parse_args()
    for name in args.formats:
        print(json.dumps(measure(name, args)), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
