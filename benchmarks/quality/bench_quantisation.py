"""Measures the quality loss of each number format, on the built-in model and held-out
conversations.

    python -m benchmarks.quality.bench_quantisation

Deterministic: nothing is timed. Calibrated copies are written into a temporary folder.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Mapping
from pathlib import Path

from benchmarks.quality.fidelity import SAPLING, Predictor, held_out, losses
from sylvan.cli.main import main as sylvan
from sylvan.cli.quantize import CALIBRATED
from sylvan.config.checkpoint import model_dir
from sylvan.kernels.paged.cache import SmallNumbers

FORMATS = {
    "float32": ("float32", None),
    "bfloat16": ("bfloat16", None),
    "w8a8": ("bfloat16", "w8a8"),
    "w4a8": ("bfloat16", "w4a8"),
    "w4a16": ("bfloat16", "w4a16"),
    "fp8": ("bfloat16", "fp8"),
    "fp8-block": ("bfloat16", "fp8-block"),
    "mxfp8": ("bfloat16", "mxfp8"),
    "mxfp4": ("bfloat16", "mxfp4"),
    "nvfp4": ("bfloat16", "nvfp4"),
}
KV: Mapping[str, SmallNumbers] = {
    f"bfloat16, {kind} KV cache": kind for kind in ("int8", "fp8_e4m3", "fp8_e5m2", "int4")
}
FILES = tuple(
    f"gguf:{kind}" for kind in ("Q8_0", "Q6_K", "Q5_K_M", "Q4_K_M", "Q4_0", "Q3_K_M", "Q2_K")
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--per-class", type=int, default=20)
    parser.add_argument("--tokens", type=int, default=4096, help="calibration tokens")
    args = parser.parse_args()
    texts = held_out(args.per_class)
    with tempfile.TemporaryDirectory() as folder:
        copies = {name: _written(Path(folder) / name, name, args.tokens) for name in CALIBRATED}
        predictors = [Predictor(*arguments) for arguments in FORMATS.values()]
        files = {name: _written_file(Path(folder), name) for name in FILES}
        copies |= files
        predictors += [Predictor("bfloat16", model=path) for path in copies.values()]
        predictors += [Predictor("bfloat16", kv=kind) for kind in KV.values()]
        found = losses(predictors, texts)
    tokens = sum(len(text.rows) for text in texts)
    print(f"{len(texts)} conversations, {tokens} tokens of answers\n")
    print("| format | KL from float32 (nats) | perplexity | same best token |")
    print("|---|---:|---:|---:|")
    for name, loss in zip([*FORMATS, *copies, *KV], found, strict=True):
        print(f"| {name} | {loss.kl:.5f} | {loss.perplexity:.4f} | {loss.same_top:.2%} |")


def _written(path: Path, name: str, tokens: int) -> Path:
    given = ["quantize", str(SAPLING), str(path), "--quantization", name, "--tokens", str(tokens)]
    if sylvan(given):
        raise SystemExit(f"{name} could not be made")
    return path


def _written_file(folder: Path, name: str) -> Path:
    path = folder / f"{name.partition(':')[2]}.gguf"
    if sylvan(["quantize", str(SAPLING), str(path), "--format", name]):
        raise SystemExit(f"{name} could not be made")
    return model_dir(str(path))


if __name__ == "__main__":
    main()
