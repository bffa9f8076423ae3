"""Loads attention backends by name."""

from __future__ import annotations

from typing import Any

import torch

from sylvan.kernels.gpu.choice import triton_installed
from sylvan.protocol.errors import ConfigError
from sylvan.runtime import attention as attention_backends
from sylvan.runtime.executor.parts import ModelPlan
from sylvan.runtime.platform.api import Platform
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


def choose_attention(plan: ModelPlan, platform: Platform | None) -> Any:
    """Build the attention backend of a model; `auto` takes the first that its device offers."""
    name = plan.options.attention
    if name == "auto" and platform is not None:
        order = platform.facts.attention
        name = next((n for n in order if n != "triton" or triton_installed()), name)
        name = "torch" if name in ("flashinfer", "aiter") else name
    return load_attention(name, platform.facts if platform else plan.build.device)
