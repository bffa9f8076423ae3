"""Architecture (as in a checkpoint's config.json) -> the module that serves it.

Adding a family is one file beside this one and one line in `MODELS`.
"""

from __future__ import annotations

import difflib
import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Protocol, runtime_checkable

import torch

from sylvan.protocol.errors import ConfigError
from sylvan.runtime.core.forward import ForwardBatch
from sylvan.runtime.layers.build import Build
from sylvan.runtime.models.config import ModelConfig, architecture_of, read_config

MODELS: dict[str, str] = {
    "LlamaForCausalLM": "sylvan.runtime.models.llama",
    "MistralForCausalLM": "sylvan.runtime.models.llama",
    "Qwen2ForCausalLM": "sylvan.runtime.models.llama",
    "Qwen3ForCausalLM": "sylvan.runtime.models.llama",
}


@runtime_checkable
class Model(Protocol):
    """A model as the runners and the loader see it; an `nn.Module` in practice.

    The three steps also accept symbolic values, and are then recorded.
    """

    fused: ClassVar[Mapping[str, tuple[str, ...]]]
    """Last part of a module's name -> names of the checkpoint tensors it joins, in order."""

    def embed(self, batch: ForwardBatch) -> torch.Tensor:
        """Token embeddings. Shape: float32 (T, D)."""
        ...

    def forward(self, x_TD: torch.Tensor, batch: ForwardBatch) -> torch.Tensor:
        """Hidden vectors after the final norm. Shape: (T, D)."""
        ...

    def head(self, hidden_RD: torch.Tensor) -> torch.Tensor:
        """Logits of chosen rows. Shape: float32 (R, V)."""
        ...


@dataclass(frozen=True, slots=True)
class Family:
    """What a model module gives: `parse(raw)` of config.json, and the class."""

    parse: Callable[[dict[str, Any]], ModelConfig]
    model: Callable[[ModelConfig, Build], torch.nn.Module]


def load_family(architecture: str) -> Family:
    """Import the module that serves `architecture`; it defines `parse` and `MODEL`.

    Raises:
        ConfigError: nothing serves it; lists what is supported.
    """
    if architecture not in MODELS:
        close = difflib.get_close_matches(architecture, MODELS, n=1)
        hint = f" (did you mean {close[0]}?)" if close else ""
        raise ConfigError(
            f"the architecture {architecture!r} is not supported{hint}; "
            f"supported are {', '.join(sorted(MODELS))}"
        )
    module = importlib.import_module(MODELS[architecture])
    return Family(module.parse, module.MODEL)


def load_config(model_dir: Path) -> ModelConfig:
    """Read and check config.json of a checkpoint.

    Raises:
        ConfigError: one sentence that says what cannot be served.
    """
    raw = read_config(model_dir)
    return load_family(architecture_of(raw)).parse(raw)
