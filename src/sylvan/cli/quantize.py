"""`sylvan quantize`: writes a checkpoint with its matrices in 8 or 4 bits."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from sylvan.cli.main import DONE, Spec
from sylvan.cli.progress import counting
from sylvan.config.checkpoint import model_dir
from sylvan.config.fields import size_text
from sylvan.config.flags import Option, Parsed
from sylvan.protocol.errors import ConfigError

SPEC = Spec(
    usage="quantize MODEL OUT [--quantization w8a8] [--load-format auto]",
    doc="Write the model directory MODEL to the new directory OUT with the weights of its linear "
    "layers in 8 or 4 bits, in the format of compressed-tensors that other tools read too. "
    "`sylvan serve OUT` then starts faster than with --quantization, and gives the same answers.",
    options=(
        Option(
            "quantization",
            "w8a8 (or int8), w4a8 (or int4), w4a16, fp8; default w8a8.",
            metavar="FORMAT",
        ),
        Option("load_format", "As of serve; pt reads PyTorch's .bin files.", metavar="KIND"),
    ),
    tree=None,
    max_positions=2,
)


def _load_format(args: Parsed) -> Literal["auto", "safetensors", "gguf", "pt"]:
    match args.options.get("load_format", "auto"):
        case "auto" | "safetensors" | "gguf" | "pt" as kind:
            return kind
        case kind:
            raise ConfigError(
                f"--load-format: expected auto | safetensors | gguf | pt, not {kind!r}"
            )


def run(args: Parsed) -> int:
    if len(args.positions) != SPEC.max_positions:
        raise ConfigError(f"MODEL and OUT are needed; usage: sylvan {SPEC.usage}")
    source, target = model_dir(args.positions[0]), Path(args.positions[1]).expanduser()
    from sylvan.runtime.models.writer import write_quantised  # imports torch

    name = args.options.get("quantization", "w8a8")
    with counting(f"quantising {args.positions[0]} to {name}") as progress:
        written = write_quantised(source, target, name, progress, _load_format(args))
    print(
        f"{target}: {written.num_matrices} matrices, {size_text(written.bytes_before)} -> "
        f"{size_text(written.bytes_after)}\n\n  sylvan serve {target}"
    )
    return DONE
