"""Loads and runs one of these encoders."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, Protocol

import numpy as np
import torch
from torch import nn

from sylvan.protocol.errors import ConfigError
from sylvan.protocol.media import MediaKind
from sylvan.runtime.features.multimodal.published.deepseek_vl2 import DeepseekVL2Encoder
from sylvan.runtime.features.multimodal.published.internvl import InternVLEncoder
from sylvan.runtime.features.multimodal.published.kimi_vl import KimiVLEncoder
from sylvan.runtime.features.multimodal.published.minicpmv import MiniCPMVEncoder
from sylvan.runtime.features.multimodal.published.phi3v import Phi3VEncoder
from sylvan.runtime.models.safetensors import Checkpoint
from sylvan.utils.json_files import read_json

_CPU = torch.device("cpu")


class _Kind(Protocol):
    """A class of encoders."""

    def __call__(self, raw: Mapping[str, Any], shapes: Mapping[str, torch.Size]) -> nn.Module: ...

    def convert(self, name: str, tensor: torch.Tensor) -> Mapping[str, torch.Tensor]: ...


_ENCODERS: Mapping[str, _Kind] = MappingProxyType(
    {
        "DeepseekVLV2ForCausalLM": DeepseekVL2Encoder,
        "InternVLChatModel": InternVLEncoder,
        "KimiVLForConditionalGeneration": KimiVLEncoder,
        "MiniCPMV": MiniCPMVEncoder,
        "Phi3VForCausalLM": Phi3VEncoder,
    }
)


class PublishedEncoder:
    """Implements `MediaEncoder` for the architectures here.

    Args:
        model_dir: Directory of the checkpoint.
        dtype: dtype of the model.
        device: Holds and runs it.

    Raises:
        ConfigError: its tensors do not fit, or it has a switch that is not served.
    """

    def __init__(self, model_dir: Path, dtype: torch.dtype, device: torch.device = _CPU) -> None:
        raw = read_json(model_dir / "config.json")
        kind = _ENCODERS[raw["architectures"][0]]
        checkpoint = Checkpoint(model_dir)
        tensors: dict[str, torch.Tensor] = {}
        for name in checkpoint.tensors:
            if kind.convert(name, _NOTHING):
                tensors |= kind.convert(name, checkpoint.tensor(name))
        try:
            shapes = {name: tensor.shape for name, tensor in tensors.items()}
            with torch.device("meta"):
                module = kind(raw, shapes)
            known = module.state_dict()
            used = {name: x.to(dtype, copy=True) for name, x in tensors.items() if name in known}
            module.load_state_dict(used, assign=True)
        except (KeyError, RuntimeError, TypeError, ValueError) as error:
            raise ConfigError(f"the encoder of this model cannot be loaded: {error}") from None
        self._module = module.to(device).eval().requires_grad_(requires_grad=False)
        self._known = inspect.signature(self._module.forward).parameters
        self._dtype, self._device = dtype, device

    @staticmethod
    def fits(model_dir: Path) -> bool:
        """Whether a checkpoint's encoder is one of these."""
        names = read_json(model_dir / "config.json").get("architectures") or [""]
        return names[0] in _ENCODERS

    def encode(self, kind: MediaKind, features: Mapping[str, np.ndarray]) -> Sequence[torch.Tensor]:
        if kind != "image":
            raise ValueError(f"this model sees images, no {kind}")
        given = {name: self._tensor(x) for name, x in features.items() if name in self._known}
        return [self._module(**given).cpu()]

    def _tensor(self, array: np.ndarray) -> torch.Tensor:
        tensor = torch.from_numpy(np.ascontiguousarray(array))
        kept = self._dtype if tensor.is_floating_point() else tensor.dtype
        return tensor.to(self._device, kept)


_NOTHING = torch.empty(3)
