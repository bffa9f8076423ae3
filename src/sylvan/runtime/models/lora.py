"""Low-rank adapters (LoRA) in PEFT's format: read and checked.

An adapter is `adapter_config.json` beside `adapter_model.safetensors`. A module N has
`N.lora_A.weight` (r, inputs) and `N.lora_B.weight` (outputs, r), an embedding `lora_embedding_A`
(r, ids) and `lora_embedding_B` (columns, r); DoRA adds `lora_magnitude_vector` (outputs,). Tensors
that were trained whole (`modules_to_save`) have their own names, and `N.base_layer.weight` is what
the matrix was, where that was saved.
"""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray

from sylvan.protocol.errors import ConfigError
from sylvan.runtime.models.checkpoint import check_finite
from sylvan.runtime.models.in_memory import read_safetensors

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_PREFIX = "base_model.model."
_PART = re.compile(
    r"(.+)\.(lora_A|lora_B|lora_embedding_A|lora_embedding_B|lora_magnitude_vector|base_layer)"
    r"(\.weight)?"
)


class AdapterConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The fields of `adapter_config.json` that decide what an adapter means."""

    r: int
    lora_alpha: float
    peft_type: str = "LORA"
    use_rslora: bool = False
    use_dora: bool = False
    fan_in_fan_out: bool = False
    bias: str = "none"
    lora_bias: bool = False
    target_modules: list[str] | str | None = None
    alpha_pattern: dict[str, float] | None = None
    modules_to_save: list[str] | None = None
    target_parameters: list[str] | None = None
    layer_replication: list[Any] | None = None

    def scale(self, module: str, rank: int) -> float:
        """What the product of a module's matrices is multiplied by."""
        patterns = self.alpha_pattern or {}
        found = (a for key, a in patterns.items() if re.fullmatch(rf"(.*\.)?({key})", module))
        alpha = next(found, self.lora_alpha)
        return alpha / (math.sqrt(rank) if self.use_rslora else rank)


@dataclass(slots=True)
class LowRank:
    """What an adapter does to one matrix: W + scale * B A, and perhaps new lengths of its rows."""

    parts: dict[str, torch.Tensor] = field(default_factory=dict[str, torch.Tensor])

    @property
    def is_embedding(self) -> bool:
        """Whether the matrix is a table of rows by id."""
        return "lora_embedding_A" in self.parts

    @property
    def factors(self) -> tuple[torch.Tensor, torch.Tensor]:
        """A (rank, inputs) and B (outputs, rank); of an embedding inputs are ids."""
        stem = "lora_embedding_" if self.is_embedding else "lora_"
        return self.parts[f"{stem}A"], self.parts[f"{stem}B"]

    def product(self) -> torch.Tensor:
        """B A, float32 (outputs, inputs); of an embedding (ids, columns)."""
        down, up = self.factors
        change = up.float() @ down.float()
        return change.T if self.is_embedding else change

    @property
    def rank(self) -> int:
        """Rows of A."""
        return self.factors[0].shape[0]


@dataclass(frozen=True, slots=True)
class Adapter:
    """A whole adapter; `whole` are tensors that replace those of the same names.

    `digest` is made of the contents of its files.
    """

    config: AdapterConfig
    modules: Mapping[str, LowRank]
    whole: Mapping[str, torch.Tensor]
    digest: str = ""

    @property
    def max_rank(self) -> int:
        """The largest rank of any module."""
        return max((module.rank for module in self.modules.values()), default=0)


def read_adapter(folder: Path) -> Adapter:
    """The adapter in a directory.

    Raises:
        ConfigError: it is not there, of another kind, or has tensors that are not understood or not
            finite; names the field or tensor.
    """
    config = _config(folder / CONFIG)
    path = folder / WEIGHTS
    if not path.exists():
        raise ConfigError(
            f"{str(folder)!r} has no {WEIGHTS}; pickles (adapter_model.bin) are not read"
        )
    data = _bytes(path)
    files = read_safetensors(data, str(path))
    modules: dict[str, LowRank] = {}
    whole: dict[str, torch.Tensor] = {}
    for name in files.tensors:
        tensor = files.tensor(name)
        check_finite(name, tensor)
        plain = name.removeprefix(_PREFIX)
        if (found := _PART.fullmatch(plain)) is not None:
            modules.setdefault(found[1], LowRank()).parts[found[2]] = tensor
        elif "lora_" in plain:
            raise ConfigError(f"{str(path)!r}: the tensor {name!r} is not understood")
        else:
            whole[plain] = tensor
    for name, module in modules.items():
        _check_module(config, name, module)
    if whole and not config.modules_to_save:
        raise ConfigError(f"{str(path)!r}: the tensor {next(iter(whole))!r} is not understood")
    if not modules and not whole:
        raise ConfigError(f"{str(path)!r} has no tensors")
    digest = hashlib.sha256((folder / CONFIG).read_bytes() + b"\0")
    digest.update(data.data)
    return Adapter(config, modules, whole, digest.hexdigest())


def _config(path: Path) -> AdapterConfig:
    try:
        config = msgspec.json.decode(path.read_bytes(), type=AdapterConfig)
    except OSError as error:
        raise ConfigError(f"cannot read {str(path)!r}: {error.strerror}") from None
    except msgspec.MsgspecError as error:
        raise ConfigError(f"{str(path)!r} is no configuration of an adapter: {error}") from None
    lacking = ""
    if config.peft_type != "LORA":
        lacking = f"peft_type {config.peft_type}"
    elif config.bias != "none" or config.lora_bias:
        lacking = "biases that were trained (bias, lora_bias)"
    elif config.layer_replication:
        lacking = "layer_replication"
    if lacking:
        raise ConfigError(f"{str(path)!r}: adapters with {lacking} cannot be used")
    if config.r < 1:
        raise ConfigError(f"{str(path)!r}: r must be 1 or more, not {config.r}")
    return config


def _check_module(config: AdapterConfig, name: str, module: LowRank) -> None:
    pair = ("lora_embedding_A", "lora_embedding_B") if module.is_embedding else ("lora_A", "lora_B")
    lacking = [part for part in pair if part not in module.parts]
    if config.use_dora and not module.is_embedding:
        lacking += ["lora_magnitude_vector"] if "lora_magnitude_vector" not in module.parts else []
    if lacking:
        raise ConfigError(f"the adapter lacks {name}.{lacking[0]}")
    down, up = (module.parts[part] for part in pair)
    if down.dim() != 2 or up.dim() != 2 or down.shape[0] != up.shape[1]:
        raise ConfigError(
            f"the adapter's matrices of {name!r} are {list(down.shape)} and {list(up.shape)}"
        )


def _bytes(path: Path) -> NDArray[np.uint8]:
    try:
        return np.fromfile(path, np.uint8)
    except OSError as error:
        raise ConfigError(f"cannot read {str(path)!r}: {error.strerror}") from None
