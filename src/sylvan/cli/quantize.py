"""`sylvan quantize`: writes a checkpoint with its matrices in 8 or 4 bits, or a GGUF file."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from sylvan.checkpoints.gguf.recipes import PREFIX
from sylvan.cli.calibration import generated, read_text, windows
from sylvan.cli.main import DONE, Spec
from sylvan.cli.progress import counting
from sylvan.config.checkpoint import model_dir
from sylvan.config.fields import size_text
from sylvan.config.flags import Option, Parsed
from sylvan.protocol.errors import ConfigError

CALIBRATED = ("w4a16-gptq", "w4a16-awq", "w8a8-smoothquant")
_WINDOW, _TOKENS, _MOST = 512, 16_384, 1 << 22

SPEC = Spec(
    usage="quantize MODEL OUT [--quantization w8a8] [--calibration TEXT] [--load-format auto]",
    doc="Write the model directory MODEL to the new directory OUT with the weights of its linear "
    "layers in 8 or 4 bits, in the format of compressed-tensors that other tools read too. "
    "`sylvan serve OUT` then starts faster than with --quantization, and gives the same answers. "
    "gguf:KIND writes one GGUF file instead, which llama.cpp reads as well; OUT ends in .gguf.",
    options=(
        Option(
            "quantization",
            "w8a8 (or int8), w4a8 (or int4), w4a16, fp8, fp8-block, mxfp8, mxfp4, nvfp4, "
            "or with calibration: w4a16-gptq, w4a16-awq, w8a8-smoothquant; gguf:Q4_K_M and other "
            "mixtures of llama.cpp; default w8a8.",
            metavar="FORMAT",
        ),
        Option("format", "Alias of --quantization.", metavar="FORMAT"),
        Option(
            "calibration",
            "UTF-8 text for calibration; without one, the model generates it.",
            metavar="PATH",
        ),
        Option(
            "tokens",
            f"Calibration tokens to use, in windows of {_WINDOW}; default {_TOKENS}.",
            metavar="N",
        ),
        Option("load_format", "As in serve; pt reads PyTorch's .bin files.", metavar="KIND"),
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


def _texts(args: Parsed, source: Path) -> list[list[int]]:
    """Return the calibration texts of a model."""
    given = args.options.get("tokens", str(_TOKENS))
    if not given.isdecimal() or not 2 <= int(given) <= _MOST:
        raise ConfigError(f"--tokens: expected a number from 2 to {_MOST}, not {given!r}")
    window = min(_WINDOW, int(given))
    if (file := args.options.get("calibration")) is None:
        return generated(source, window, int(given))
    text = read_text("calibration", file)
    return windows("calibration", text, source, window, int(given))


def _calibrated(args: Parsed, name: str, source: Path, folder: Path) -> Mapping[str, Any]:
    """Return the results of a calibration, for `write_quantised`."""
    from sylvan.runtime.executor.calibrate import calibrated  # brings torch
    from sylvan.runtime.executor.smooth import smoothed

    load_format = _load_format(args)
    with counting(f"calibrating {args.positions[0]}") as progress:
        given = source, _texts(args, source), folder, progress, load_format
        match name:
            case "w4a16-gptq":
                return calibrated(*given)
            case "w4a16-awq":
                return smoothed("awq", *given)
            case _:
                return smoothed("smoothquant", *given)


def _format(args: Parsed) -> str:
    given = [args.options[key] for key in ("quantization", "format") if key in args.options]
    if len(given) > 1:
        raise ConfigError("--quantization and --format are synonyms; give one of them")
    return given[0] if given else "w8a8"


def _gguf(args: Parsed, name: str, source: Path, target: Path) -> int:
    from sylvan.runtime.models.gguf_writer import write_gguf  # imports torch

    if "calibration" in args.options:
        raise ConfigError(f"--calibration is used by {', '.join(CALIBRATED)} only, not by {name}")
    with counting(f"writing {target.name}") as progress:
        written = write_gguf(source, target, name, progress, _load_format(args))
    note = f"\n  note for llama.cpp: {written.problem}\n" if written.problem else ""
    print(
        f"{target}: {written.num_matrices} matrices, {size_text(written.bytes_before)} -> "
        f"{size_text(written.bytes_after)}\n{note}\n  sylvan serve {target}"
    )
    return DONE


def run(args: Parsed) -> int:
    if len(args.positions) != SPEC.max_positions:
        raise ConfigError(f"MODEL and OUT are needed; usage: sylvan {SPEC.usage}")
    source, target = model_dir(args.positions[0]), Path(args.positions[1]).expanduser()
    from sylvan.runtime.models.writer import check_new, write_quantised  # imports torch

    name, found = _format(args), None
    if name.startswith(PREFIX):
        return _gguf(args, name, source, target)
    layers = target.with_name(target.name + ".calibrated")  # stays if this is interrupted
    if name in CALIBRATED:
        check_new(source, target)
        found = _calibrated(args, name, source, layers)
        name = name.partition("-")[0]
    elif "calibration" in args.options:
        known = ", ".join(CALIBRATED)
        raise ConfigError(f"--calibration is used by {known} only, not by {name}")
    with counting(f"quantising {args.positions[0]} to {name}") as progress:
        written = write_quantised(source, target, name, progress, _load_format(args), found)
    shutil.rmtree(layers, ignore_errors=True)
    print(
        f"{target}: {written.num_matrices} matrices, {size_text(written.bytes_before)} -> "
        f"{size_text(written.bytes_after)}\n\n  sylvan serve {target}"
    )
    return DONE
