"""NVIDIA GPUs."""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar

from sylvan.runtime.platform.facts import PlatformFacts
from sylvan.runtime.platform.probe import Build, find_build, nvidia_memory, nvidia_problem


class CudaKind:
    """Looks for the driver before it imports torch."""

    facts: ClassVar = PlatformFacts(
        name="cuda",
        device_type="cuda",
        attention=("triton", "flashinfer", "torch", "reference"),
        runners=("graph", "eager"),
        dtypes=frozenset({"float32", "float16", "bfloat16"}),
        float8="float8_e4m3fn",
        collective="nccl",
        automatic=True,
        opener="sylvan.runtime.platform.accelerator:open_accelerator",
    )

    def __init__(self, root: Path = Path("/"), build: Build | None = None) -> None:
        """`root` and `build` stand for this machine and the installed torch, in tests."""
        self._root, self._build = root, build

    def problem(self) -> str | None:
        """See `Kind.problem`."""
        return nvidia_problem(self._root, lambda: self._build or find_build())

    def memory(self) -> tuple[int, int] | None:
        """See `Kind.memory`."""
        return nvidia_memory()


KIND = CudaKind()
