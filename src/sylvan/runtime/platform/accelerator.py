"""GPUs through torch's device interface, which CUDA, ROCm and XPU share."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import torch

from sylvan.protocol.errors import ConfigError
from sylvan.runtime.platform.api import Event, Memory, PlatformGraph, PlatformStream
from sylvan.runtime.platform.facts import PlatformFacts
from sylvan.utils.garbage import gc_paused


class DeviceEvent:
    """Implements `Event`."""

    def __init__(self, event: Any) -> None:
        self.raw = event

    def done(self) -> bool:
        return self.raw.query()

    def wait(self) -> None:
        self.raw.synchronize()


class DeviceStream:
    """A side stream, which graphs can be captured on."""

    def __init__(self, module: ModuleType, device: torch.device) -> None:
        self._module = module
        self.raw = module.Stream(device)

    def run(self, work: Callable[[], None]) -> None:
        with self._module.stream(self.raw):
            work()

    def event(self) -> Event:
        event = self._module.Event()
        event.record(self.raw)
        return DeviceEvent(event)

    def after(self, event: Event) -> None:
        assert isinstance(event, DeviceEvent)
        self.raw.wait_event(event.raw)


class DeviceGraph:
    """A captured graph. Captures share one memory pool, so capture the largest first."""

    def __init__(self, module: ModuleType, graph: Any, pool: Any, stream: Any) -> None:
        self._module, self._graph, self._pool, self._stream = module, graph, pool, stream

    def capture(self, work: Callable[[], torch.Tensor]) -> torch.Tensor:
        with (
            gc_paused(),  # collecting may free another graph, which ends a capture
            self._module.graph(self._graph, pool=self._pool, stream=self._stream),
        ):
            return work()

    def replay(self) -> None:
        self._graph.replay()


class Accelerator:
    """Implements `Platform` for the current device of this process."""

    def __init__(self, facts: PlatformFacts) -> None:
        """Open the device.

        Raises:
            ConfigError: torch cannot use it.
        """
        self.facts = facts
        self._module: Any = getattr(torch, facts.device_type)
        if not self._module.is_available():
            raise ConfigError(
                f"device={facts.name}: there is a driver, but torch {torch.__version__} cannot use "
                "it; update the driver, make a GPU visible to this process, or choose device=cpu"
            )
        self.device = torch.device(facts.device_type, self._module.current_device())
        self.chip = _chip(self._module, self.device)
        self._stream = DeviceStream(self._module, self.device)
        # One stream orders all work of this thread, including the loading of weights.
        self._module.set_stream(self._stream.raw)
        self._graph_type = getattr(self._module, f"{facts.device_type.upper()}Graph", None)
        self._pool = self._module.graph_pool_handle() if self._graph_type else None

    def memory(self) -> Memory:
        free, total = self._module.mem_get_info(self.device)
        return Memory(free, total)

    def peak(self, work: Callable[[], None]) -> int:
        before = self._module.memory_allocated(self.device)
        self._module.reset_peak_memory_stats(self.device)
        self._stream.run(work)
        self._stream.event().wait()
        return self._module.max_memory_allocated(self.device) - before

    def pinned(self, size: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.zeros(size, dtype=dtype, pin_memory=True)

    def stream(self) -> PlatformStream:
        return self._stream

    def side_stream(self) -> PlatformStream:
        return DeviceStream(self._module, self.device)

    def graph(self) -> PlatformGraph | None:
        if self._graph_type is None:
            return None
        return DeviceGraph(self._module, self._graph_type(), self._pool, self._stream.raw)

    @contextmanager
    def unsynced(self) -> Iterator[None]:
        """Available on CUDA only."""
        if not hasattr(self._module, "set_sync_debug_mode"):
            yield
            return
        before = self._module.get_sync_debug_mode()
        self._module.set_sync_debug_mode("error")
        try:
            yield
        finally:
            self._module.set_sync_debug_mode(before)

    def trim(self) -> None:
        self._module.empty_cache()


def _chip(module: Any, device: torch.device) -> str:
    properties = module.get_device_properties(device)
    architecture = getattr(properties, "gcnArchName", "")
    if architecture.startswith("gfx"):  # NVIDIA devices have the name of the card there
        return architecture.split(":")[0]  # without modes, such as xnack
    if hasattr(properties, "major"):
        return f"sm_{properties.major}{properties.minor}"
    return str(properties.name)


def open_accelerator(facts: PlatformFacts) -> Accelerator:
    """Return the accelerator that these facts describe."""
    return Accelerator(facts)
