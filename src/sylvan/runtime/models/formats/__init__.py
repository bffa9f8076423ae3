"""Formats of quantised checkpoints: one module per `quant_method` of config.json.

`stored_format` selects the reader, and `stored` defines the interface. To add a format, write its
module here and put its function into `METHODS`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, Literal

from sylvan.config.quantization import BOTH, STORED
from sylvan.protocol.errors import ConfigError
from sylvan.runtime.models.config import ModelConfig
from sylvan.runtime.models.formats.awq import awq
from sylvan.runtime.models.formats.bitsandbytes import bitsandbytes
from sylvan.runtime.models.formats.compressed_tensors import CompressedTensors, compressed_tensors
from sylvan.runtime.models.formats.fp8 import of_deepseek, of_modelopt
from sylvan.runtime.models.formats.gptq import auto_round, gptq
from sylvan.runtime.models.formats.hqq import hqq
from sylvan.runtime.models.formats.int8 import of_int8
from sylvan.runtime.models.formats.microscaling import of_mxfp8
from sylvan.runtime.models.formats.mlx import mlx
from sylvan.runtime.models.formats.quark import quark
from sylvan.runtime.models.formats.stored import StoredFormat
from sylvan.runtime.models.formats.torchao import torchao
from sylvan.runtime.models.quantise import Format, check_model, format_of

Settings = Mapping[str, Any]


def _auto_round(settings: Settings) -> StoredFormat:
    return (awq if settings.get("packing_format") == "auto_round:auto_awq" else auto_round)(
        settings
    )


METHODS: Mapping[str, Callable[[Settings], StoredFormat]] = MappingProxyType(
    {
        "compressed-tensors": compressed_tensors,
        "gptq": gptq,
        "awq": awq,
        "auto-round": _auto_round,
        "intel/auto-round": _auto_round,
        "fp8": of_deepseek,
        "fbgemm_fp8": of_deepseek,
        "modelopt": of_modelopt,
        "modelopt_fp4": of_modelopt,
        "blockwise_int8": of_int8,
        "w8a8_int8": of_int8,
        "mxfp8": of_mxfp8,
        "bitsandbytes": bitsandbytes,
        "torchao": torchao,
        "hqq": hqq,
        "quark": quark,
        "mlx": mlx,
    }
)
"""Readers of `quantization_config`, by `quant_method`."""

REFUSED: Mapping[str, str] = MappingProxyType(
    {
        "exl2": "EXL2 mixes widths within a matrix; use a GGUF or GPTQ file of the model",
        "exl3": "EXL3 codes vectors by trellises; use a GGUF or GPTQ file of the model",
        "aqlm": "AQLM codes vectors by learned tables",
        "vptq": "VPTQ codes vectors by learned tables",
        "quip": "QuIP# codes vectors by lattices",
        "spqr": "SpQR keeps outliers in a sparse matrix",
        "higgs": "HIGGS codes vectors by grids on rotated inputs",
        "marlin": "Marlin is the layout of a single kernel; its tools can write GPTQ's",
        "eetq": "EETQ is the layout of a single kernel",
        "quanto": "Quanto stores no plain layout; torchao and GPTQ do",
        "bitnet": "its numbers are packed for a single kernel; serve the unpacked checkpoint",
        "fp_quant": "it rotates inputs, for which there is no kernel",
        "w4afp8": "its experts are made for FP8 products by int4; the FP8 checkpoint is read",
        "modelslim": "its layouts are those of Ascend devices",
        "ascend": "its layouts are those of Ascend devices",
        "mxfp_w4a8": "its layouts are those of Ascend devices",
    }
)
"""Why other methods are not supported, by `quant_method`."""

UNSPECIFIED = CompressedTensors()
"""Readers of files without a config: the tensor names identify the format."""


@dataclass(frozen=True, slots=True)
class Formats:
    """The in-memory form of a model, and the conversions while reading it."""

    loaded: Format | None = None
    converted: Format | None = None
    blocks: bool = False  # matrices of GGUF and MXFP4 keep their format
    plain: bool = False  # quantised matrices are read as plain numbers


Multiplier = Literal["cpu", "triton", "none"]
"""Kernels for quantised matrices: the CPU's, Triton's on a GPU, or none."""


def choose(config: ModelConfig, asked: str | None, *, by: Multiplier = "cpu") -> Formats:
    """The checkpoint's own format, or the one that is set in `quantization`.

    Raises:
        ConfigError: the two differ, or the model cannot be quantised.
    """
    own = kept_format(config.raw)
    wanted = None if asked is None or _says(config.raw, asked) else format_of(asked)
    if own is None and wanted is None:
        return Formats(blocks=by != "none" and config.path == "native")
    if wanted is None and config.path != "native":
        return Formats()  # transformers gets plain numbers
    check_model(config)
    if wanted is not None and by != "cpu":
        _check_device(wanted, by)
    if own is None:
        return Formats(wanted, wanted)
    if wanted is not None and wanted.name != own.name:
        raise ConfigError(
            f"quantization: the checkpoint is {own.name} already, not {asked}; leave it at none"
        )
    own = replace(own, head_bits=8) if wanted else own
    return Formats(own, replace(own, bits=None), plain=by == "none")


def _says(raw: Settings, asked: str) -> bool:
    """Whether a value of `quantization` only names the format in which the checkpoint is stored.

    Raises:
        ConfigError: the checkpoint is stored otherwise.
    """
    found = raw.get("quantization_config") or raw.get("compression_config") or {}
    method = str(found.get("quant_method")) if isinstance(found, dict) and found else ""
    if asked not in STORED:
        return bool(method) and BOTH.get(asked) == method
    if method not in STORED[asked]:
        stored = f"quantised by {method!r}" if method else "not quantised"
        raise ConfigError(
            f"quantization={asked} names the format of a checkpoint, but this one is {stored}; "
            "leave it at none"
        )
    return True


def _check_device(wanted: Format, by: Multiplier) -> None:
    """Reject formats that a device has no kernels for."""
    if by == "none":
        raise ConfigError(
            f"quantization={wanted.name}: only CPUs, and GPUs with Triton, have kernels for "
            "quantised matrices; leave it at none"
        )
    if wanted.code is None:
        raise ConfigError(
            f"quantization={wanted.name} quantises activations to 8 bits, on CPUs only; choose "
            "w4a16 or fp8, or device=cpu"
        )


def stored_format(raw: Settings) -> StoredFormat | None:
    """How a checkpoint is quantised, by its config.json; None: it is not.

    Raises:
        ConfigError: The method is not supported; the message says which.
    """
    found = raw.get("quantization_config") or raw.get("compression_config")
    if not found:
        return None
    if not isinstance(found, dict):
        raise ConfigError("config.json: quantization_config must be an object")
    method = str(found.get("quant_method"))
    if method == "mxfp4":  # recognised by its tensors; devices dequantise it
        return None
    if method not in METHODS:
        why = f" ({REFUSED[method]})" if method in REFUSED else ""
        raise ConfigError(
            f"the checkpoint is quantised by {method!r}, which is not supported{why}; "
            f"supported are {', '.join(METHODS)}"
        )
    return METHODS[method](found)


def kept_format(raw: Settings) -> Format | None:
    """The in-memory form of a stored format.

    Raises:
        ConfigError: see `stored_format`.
    """
    own = stored_format(raw)
    if own is None:
        return None
    kept = raw.get("sylvan")
    head = kept.get("head_bits") if isinstance(kept, dict) else None
    name = own.name
    if isinstance(own, CompressedTensors) and all(scheme.rounds_rows for scheme in own.schemes):
        name = "w4a8" if own.bits <= 4 else "w8a8"
    return Format(name, own.bits, head if head == 8 else None)
