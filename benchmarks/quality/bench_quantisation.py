"""What each number format costs in quality, on the built-in model and held-out conversations.

    python -m benchmarks.quality.bench_quantisation

Deterministic: no times are taken.
"""

from __future__ import annotations

import argparse

from benchmarks.quality.fidelity import Predictor, held_out, losses

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
INT8_KV = "bfloat16, int8 KV cache"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--per-class", type=int, default=20)
    texts = held_out(parser.parse_args().per_class)
    predictors = [Predictor(*arguments) for arguments in FORMATS.values()]
    predictors.append(Predictor("bfloat16", int8_kv=True))
    tokens = sum(len(text.rows) for text in texts)
    print(f"{len(texts)} conversations, {tokens} tokens of answers\n")
    print("| format | KL from float32 (nats) | perplexity | same best token |")
    print("|---|---:|---:|---:|")
    for name, loss in zip([*FORMATS, INT8_KV], losses(predictors, texts), strict=True):
        print(f"| {name} | {loss.kl:.5f} | {loss.perplexity:.4f} | {loss.same_top:.2%} |")


if __name__ == "__main__":
    main()
