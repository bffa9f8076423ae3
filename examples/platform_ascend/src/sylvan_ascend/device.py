"""Opens an NPU: torch_npu gives torch the module `torch.npu`, in the form of `torch.cuda`."""

from __future__ import annotations

import importlib

import torch

from sylvan.protocol.errors import ConfigError
from sylvan.runtime.platform.accelerator import Accelerator
from sylvan.runtime.platform.facts import PlatformFacts

_NEEDED = (
    "is_available",
    "current_device",
    "Stream",
    "Event",
    "stream",
    "set_stream",
    "mem_get_info",
    "memory_allocated",
    "max_memory_allocated",
    "reset_peak_memory_stats",
    "empty_cache",
    "get_device_properties",
)


def open_npu(facts: PlatformFacts) -> Accelerator:
    """The process's current NPU.

    Raises:
        ConfigError: torch_npu cannot be imported, lacks a function, or sees no NPU.
    """
    try:
        importlib.import_module("torch_npu")
    except (ImportError, OSError, RuntimeError) as error:  # its libraries are those of CANN
        raise ConfigError(
            f"device=npu: torch_npu cannot be imported: {error}; source CANN's set_env.sh, or "
            "install the torch_npu that was made for this torch"
        ) from None
    module = getattr(torch, "npu", None)
    lacking = [name for name in _NEEDED if not hasattr(module, name)]
    if lacking:
        raise ConfigError(
            f"device=npu: the installed torch_npu has no torch.npu.{lacking[0]}; install a "
            "newer one"
        )
    return Accelerator(facts)
