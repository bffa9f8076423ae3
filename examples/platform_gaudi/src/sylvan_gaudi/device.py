"""Opens a Gaudi by `torch.hpu`, which Intel's bridge gives torch."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from sylvan.protocol.errors import ConfigError
from sylvan.runtime.platform.accelerator import DeviceStream
from sylvan.runtime.platform.api import Memory, PlatformGraph, PlatformStream
from sylvan.runtime.platform.facts import PlatformFacts

_NEEDED = (
    *("is_available", "current_device", "get_device_name", "Stream", "Event", "stream"),
    *("set_stream", "mem_get_info", "memory_allocated", "max_memory_allocated"),
    "reset_peak_memory_stats",
)


class GaudiPlatform:
    """Implements `Platform` for the process's one device."""

    def __init__(self, facts: PlatformFacts, module: Any) -> None:
        """`module` is `torch.hpu`."""
        self.facts, self._module = facts, module
        self.device = torch.device("hpu", module.current_device())
        self.chip: str = module.get_device_name()
        self._stream = DeviceStream(module, self.device)
        # Everything of this thread, loading included, is ordered by the one stream.
        module.set_stream(self._stream.raw)

    def memory(self) -> Memory:
        free, total = self._module.mem_get_info()
        return Memory(free, total)

    def peak(self, work: Callable[[], None]) -> int:
        before = self._module.memory_allocated()
        self._module.reset_peak_memory_stats()
        self._stream.run(work)
        self._stream.event().wait()
        return max(0, self._module.max_memory_allocated() - before)

    def pinned(self, size: int, dtype: torch.dtype) -> torch.Tensor:
        """Memory that the device reads without a copy."""
        return torch.zeros(size, dtype=dtype).pin_memory("hpu")

    def stream(self) -> PlatformStream:
        return self._stream

    def side_stream(self) -> PlatformStream:
        return DeviceStream(self._module, self.device)

    def graph(self) -> PlatformGraph | None:
        return None

    @contextmanager
    def unsynced(self) -> Iterator[None]:
        """The bridge cannot tell; its `set_sync_debug_mode` switches streams off."""
        yield

    def trim(self) -> None:
        """Nothing is cached outside of what `mem_get_info` calls free."""


def open_hpu(facts: PlatformFacts) -> GaudiPlatform:
    """The process's Gaudi.

    Raises:
        ConfigError: the bridge cannot be imported, lacks a function, or sees no device.
    """
    try:
        importlib.import_module("habana_frameworks.torch")
    except (ImportError, OSError, RuntimeError) as error:
        raise ConfigError(
            f"device=hpu: habana_frameworks.torch cannot be imported: {error}; use Intel's image, "
            "whose torch it was made for"
        ) from None
    module = getattr(torch, "hpu", None)
    lacking = [name for name in _NEEDED if not hasattr(module, name)]
    if module is None or lacking:
        raise ConfigError(
            f"device=hpu: the installed bridge has no torch.hpu.{lacking[0]}; install a newer one"
        )
    if not module.is_available():
        raise ConfigError(
            "device=hpu: the driver shows a Gaudi that this process cannot use; end the process "
            "that holds it, or choose device=cpu"
        )
    return GaudiPlatform(facts, module)
