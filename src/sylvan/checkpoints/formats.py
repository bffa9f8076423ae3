"""Finds the weight files of a model directory, by file names only."""

from __future__ import annotations

from collections.abc import Container, Mapping
from pathlib import Path
from typing import Any, Literal, cast

from sylvan.protocol.errors import ConfigError
from sylvan.utils.json_files import read_json

WeightFormat = Literal["safetensors", "gguf", "pt"]

GGUF_INDEX = "sylvan-gguf.json"
"""File in the directory view of a GGUF file: the path of that file, and its table of tensors."""
PT_WEIGHTS = "pytorch_model*.bin"
PT_INDEX = "pytorch_model.bin.index.json"
SAFETENSORS_INDEX = "model.safetensors.index.json"
_MODELOPT = "hf_quant_config.json"
PICKLED = (
    "holds PyTorch .bin weights only, which are pickles; --load-format pt reads them, tensors "
    "only and no code, or convert them to safetensors"
)
"""Error for a directory whose weights need the operator's consent to read."""


def with_quantization_config(config: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """Return the config with a `quantization_config`, wherever the checkpoint's tool wrote it.

    mlx-lm writes it as `quantization`, and older versions of ModelOpt into a file of their own.

    Raises:
        ConfigError: The file cannot be read.
    """
    mlx, beside = config.get("quantization"), config.get("quantization_config") or {}
    unnamed = isinstance(beside, dict) and "quant_method" not in beside
    if unnamed and isinstance(mlx, dict) and {"bits", "group_size"} <= mlx.keys():
        return {**config, "quantization_config": {**mlx, "quant_method": "mlx"}}
    file = folder / _MODELOPT
    if "quantization_config" in config or not file.is_file():
        return dict(config)
    try:
        found: object = read_json(file)["quantization"]
    except (OSError, ValueError, KeyError, TypeError):
        raise ConfigError(f"{str(file)!r} does not contain a readable `quantization`") from None
    if not isinstance(found, dict):
        raise ConfigError(f"{str(file)!r}: quantization must be an object")
    if not found.get("quant_algo"):
        return dict(config)
    return {**config, "quantization_config": {"quant_method": "modelopt", **found}}


def weight_format(folder: Path) -> WeightFormat | None:
    """The kind of weights to read from `folder`; None: it has none."""
    if (folder / GGUF_INDEX).is_file():
        return "gguf"
    if (folder / SAFETENSORS_INDEX).is_file() or any(folder.glob("*.safetensors")):
        return "safetensors"
    if (folder / PT_INDEX).is_file() or any(folder.glob(PT_WEIGHTS)):
        return "pt"
    return None


def weight_map(index: Path) -> dict[str, str]:
    """Map tensors to files by the shard index; empty if there is none.

    Raises:
        ConfigError: The index is malformed, or names a file outside of the directory.
    """
    if not index.is_file():
        return {}
    try:
        found: object = read_json(index)["weight_map"]
    except (OSError, ValueError, KeyError, TypeError):
        raise ConfigError(f"{str(index)!r} is not an index of weight files") from None
    if not isinstance(found, dict):
        raise ConfigError(f"{str(index)!r} is not an index of weight files")
    places = cast("dict[str, object]", found)
    for file in places.values():
        if not isinstance(file, str) or Path(file).name != file:
            raise ConfigError(f"{str(index)!r} names {file!r}, which is not a plain file name")
    return cast("dict[str, str]", places)


def weight_files(folder: Path, index: str, whole: str, pattern: str) -> list[Path]:
    """The files of one kind of weights: those of the index, the single file, or all matching files.

    Raises:
        ConfigError: There are none, or a file of the index is missing.
    """
    names = sorted(set(weight_map(folder / index).values())) or [whole]
    files = [folder / name for name in names]
    if not files[0].exists() and len(files) == 1:
        files = sorted(folder.glob(pattern))
    if not files:
        raise ConfigError(f"{str(folder)!r} holds no {pattern} file with weights")
    for file in files:
        if not file.is_file():
            raise ConfigError(f"the weight file {str(file)!r} is missing")
    return files


def check_index(index: Path, there: Container[str]) -> None:
    """Check that the files contain all tensors of the index.

    Raises:
        ConfigError: A tensor is not in the file that the index names.
    """
    for name, file in weight_map(index).items():
        if name not in there:
            raise ConfigError(f"tensor {name!r} is missing from {file}, where the index says it is")
