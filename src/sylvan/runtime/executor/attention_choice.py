"""Loads attention backends by name."""

from __future__ import annotations

from typing import Any

import torch

from sylvan.protocol.errors import ConfigError
from sylvan.runtime import attention as attention_backends
from sylvan.runtime.platform.facts import PlatformFacts
from sylvan.utils import plugins


def load_attention(name: str, device: PlatformFacts | torch.device) -> Any:
    """Build the attention backend `name`; `auto` selects PyTorch's fused attention.

    Raises:
        ConfigError: no such backend, or not for this device.
    """
    backend = plugins.load(attention_backends, "torch" if name == "auto" else name).BACKEND
    kind = device.name if isinstance(device, PlatformFacts) else device.type
    also = device.device_type if isinstance(device, PlatformFacts) else kind
    offered = isinstance(device, PlatformFacts) and name in device.attention
    if not offered and not {kind, also} & backend.caps.devices:
        raise ConfigError(f"the attention backend {name!r} does not run on {kind}")
    if "eager" not in backend.caps.runners:
        runners = ", ".join(sorted(backend.caps.runners))
        raise ConfigError(f"the attention backend {name!r} is part of runner {runners} only")
    return backend()
