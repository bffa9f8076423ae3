"""Low-rank adapters (LoRA) in PEFT's format: read and checked.

An adapter is `adapter_config.json` beside `adapter_model.safetensors`. A module N has
`N.lora_A.weight` (r, inputs) and `N.lora_B.weight` (outputs, r), an embedding `lora_embedding_A`
(r, ids) and `lora_embedding_B` (columns, r); DoRA adds `lora_magnitude_vector` (outputs,). Tensors
that were trained as a whole (`modules_to_save`) have their own names; `N.base_layer.weight` is the
original matrix, if it was saved.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch

from sylvan.protocol.errors import ConfigError
from sylvan.runtime.models.checkpoint import check_finite
from sylvan.runtime.models.in_memory import read_safetensors
from sylvan.runtime.models.lora_config import AdapterConfig, parse_config
from sylvan.runtime.models.lora_files import read_bounded

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
"""Allowed types of an adapter's tensors."""
MAX_CONFIG_BYTES = 4 << 20
_ANY_SIZE = 1 << 50
_PREFIX = "base_model.model."
_PART = re.compile(
    r"(.+)\.(lora_A|lora_B|lora_embedding_A|lora_embedding_B|lora_magnitude_vector|base_layer)"
    r"(\.weight)?"
)


@dataclass(slots=True)
class LowRank:
    """An adapter's change of one matrix: W + scale * B A, and optionally new row norms (DoRA)."""

    parts: dict[str, torch.Tensor] = field(default_factory=dict[str, torch.Tensor])

    @property
    def is_embedding(self) -> bool:
        """Whether the matrix is an embedding table."""
        return "lora_embedding_A" in self.parts

    @property
    def factors(self) -> tuple[torch.Tensor, torch.Tensor]:
        """A (rank, inputs) and B (outputs, rank); for an embedding the inputs are ids."""
        stem = "lora_embedding_" if self.is_embedding else "lora_"
        return self.parts[f"{stem}A"], self.parts[f"{stem}B"]

    def product(self) -> torch.Tensor:
        """B A, float32 (outputs, inputs); for an embedding (ids, columns)."""
        down, up = self.factors
        change = up.float() @ down.float()
        return change.T if self.is_embedding else change

    @property
    def rank(self) -> int:
        """Rows of A."""
        return self.factors[0].shape[0]


@dataclass(frozen=True, slots=True)
class Adapter:
    """A complete adapter; `whole` are tensors that replace those of the same names.

    `digest` identifies the contents of its files.
    """

    config: AdapterConfig
    modules: Mapping[str, LowRank]
    whole: Mapping[str, torch.Tensor]
    digest: str = ""

    @property
    def max_rank(self) -> int:
        """The largest rank of any module."""
        return max((module.rank for module in self.modules.values()), default=0)


def read_adapter(folder: Path, max_bytes: int = _ANY_SIZE, bound: str = "of tensors") -> Adapter:
    """Read the adapter in a directory.

    Args:
        folder: The adapter's directory.
        max_bytes: Maximum size of the tensor file.
        bound: Name of `max_bytes` in errors.

    Raises:
        ConfigError: it is missing, too large, of another kind, or has unknown or non-finite
          tensors; names the field or tensor.
    """
    given = read_bounded(folder / CONFIG, MAX_CONFIG_BYTES, "of a configuration").tobytes()
    config = parse_config(given, str(folder / CONFIG))
    path = folder / WEIGHTS
    if not path.exists():
        raise ConfigError(
            f"{str(folder)!r} has no {WEIGHTS}; pickles (adapter_model.bin) are not read"
        )
    data = read_bounded(path, max_bytes, bound)
    files = read_safetensors(data, str(path))
    modules: dict[str, LowRank] = {}
    whole: dict[str, torch.Tensor] = {}
    for name in files.tensors:
        tensor = files.tensor(name)
        _check_tensor(str(path), name, tensor)
        plain = name.removeprefix(_PREFIX)
        if (found := _PART.fullmatch(plain)) is not None:
            parts = modules.setdefault(found[1], LowRank()).parts
            if found[2] in parts:
                raise ConfigError(f"{str(path)!r} has {found[1]}.{found[2]} twice")
            parts[found[2]] = tensor
        elif "lora_" in plain:
            raise ConfigError(f"{str(path)!r}: the tensor {name!r} is unknown")
        else:
            whole[plain] = tensor
    for name, module in modules.items():
        _check_module(config, name, module)
    if whole and not config.modules_to_save:
        raise ConfigError(f"{str(path)!r}: the tensor {next(iter(whole))!r} is unknown")
    if not modules and not whole:
        raise ConfigError(f"{str(path)!r} has no tensors")
    digest = hashlib.sha256(given + b"\0")
    digest.update(data.data)
    return Adapter(config, modules, whole, digest.hexdigest())


def _check_tensor(where: str, name: str, tensor: torch.Tensor) -> None:
    if tensor.dtype not in DTYPES:
        kinds = ", ".join(str(dtype).removeprefix("torch.") for dtype in DTYPES)
        raise ConfigError(f"{where!r}: tensor {name!r} is of {tensor.dtype}; adapters have {kinds}")
    check_finite(name, tensor)


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
    if not module.rank:
        raise ConfigError(f"the adapter's matrices of {name!r} have no rank: {list(down.shape)}")
