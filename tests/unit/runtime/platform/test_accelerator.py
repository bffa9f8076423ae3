"""Calls of torch's device modules, checked with a fake module: no device is needed."""

from __future__ import annotations

import gc
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch

from sylvan.protocol.errors import ConfigError
from sylvan.runtime.platform.accelerator import DeviceGraph, open_accelerator
from sylvan.runtime.platform.facts import PlatformFacts
from sylvan.runtime.platform.kinds.cuda import CudaKind
from sylvan.runtime.platform.kinds.rocm import RocmKind

SPARE = "privateuseone"  # the name that torch keeps for devices of others


class Module:
    """As torch.cuda."""

    Stream = staticmethod(lambda device: "stream")

    def __init__(self, **properties) -> None:
        self.properties = SimpleNamespace(name="A device", **properties)
        self.available, self.mode, self.current = True, "default", None

    def is_available(self):
        return self.available

    def current_device(self):
        return 0

    def set_stream(self, stream):
        self.current = stream

    def get_device_properties(self, device):
        return self.properties

    def mem_get_info(self, device):
        return 100, 1000

    def get_sync_debug_mode(self):
        return self.mode

    def set_sync_debug_mode(self, mode):
        self.mode = mode


def opened(monkeypatch, module, facts=CudaKind.facts):
    monkeypatch.setattr(torch, SPARE, module, raising=False)
    values = {name: getattr(facts, name) for name in PlatformFacts.__dataclass_fields__}
    return open_accelerator(PlatformFacts(**values | {"device_type": SPARE}))


def test_a_driver_that_torch_cannot_use_is_one_sentence(monkeypatch):
    module = Module()
    module.available = False

    with pytest.raises(ConfigError, match=r"^device=cuda: there is a driver, but torch .* cannot"):
        opened(monkeypatch, module)


@pytest.mark.parametrize(
    ("facts", "properties", "chip", "float8"),
    [
        (CudaKind.facts, {"major": 8, "minor": 0}, "sm_80", None),
        (
            CudaKind.facts,
            {"major": 9, "minor": 0, "gcnArchName": "NVIDIA H100 80GB HBM3"},  # torch 2.11
            "sm_90",
            "float8_e4m3fn",
        ),
        (
            RocmKind.facts,
            {"major": 9, "minor": 4, "gcnArchName": "gfx942:sramecc+:xnack-"},
            "gfx942",
            "float8_e4m3fnuz",
        ),
        (RocmKind.facts, {}, "A device", None),
    ],
)
def test_the_chip_has_the_name_that_compilers_give_it(monkeypatch, facts, properties, chip, float8):
    platform = opened(monkeypatch, Module(**properties), facts)

    assert platform.chip == chip
    assert platform.facts.float8_of(platform.chip) == float8


def test_memory_is_what_the_driver_says(monkeypatch):
    memory = opened(monkeypatch, Module()).memory()

    assert (memory.free, memory.total) == (100, 1000)


def test_calls_that_wait_are_errors_until_the_end(monkeypatch):
    module = Module()
    platform = opened(monkeypatch, module)

    def wait():
        with platform.unsynced():
            assert module.mode == "error"
            raise RuntimeError("called a synchronizing operation")

    with pytest.raises(RuntimeError, match="synchronizing"):
        wait()
    assert module.mode == "default"


def test_loading_is_ordered_by_the_stream_of_steps(monkeypatch):
    module = Module()

    assert opened(monkeypatch, module).stream().raw == module.current == "stream"


def test_no_garbage_is_collected_while_a_graph_is_captured():
    module = SimpleNamespace(graph=lambda graph, pool, stream: nullcontext())
    graph = DeviceGraph(module, None, None, None)

    assert not graph.capture(gc.isenabled)
    assert gc.isenabled()
