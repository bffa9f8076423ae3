"""NVIDIA GPUs."""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar

from sylvan.runtime.platform.facts import PlatformFacts
from sylvan.runtime.platform.probe import (
    FindCapability,
    TorchBuild,
    find_build,
    nvidia_capability,
    nvidia_memory,
    nvidia_problem,
)


class CudaKind:
    """NVIDIA GPUs; looks for the driver before it imports torch."""

    facts: ClassVar = PlatformFacts(
        name="cuda",
        device_type="cuda",
        attention=("triton", "flashinfer", "torch", "reference"),
        runners=("graph", "eager"),
        dtypes=frozenset({"float32", "float16", "bfloat16"}),
        float8=(
            ("sm_89", "float8_e4m3fn"),
            ("sm_9", "float8_e4m3fn"),
            ("sm_1", "float8_e4m3fn"),
        ),
        collective="nccl",
        automatic=True,
        state="run on an H100; compiled for sm_80, sm_89, sm_90 and sm_100",
        how="a driver of 525 or newer, torch for CUDA, pip install 'sylvan[gpu]'",
        opener="sylvan.runtime.platform.accelerator:open_accelerator",
    )

    def __init__(
        self,
        root: Path = Path("/"),
        build: TorchBuild | None = None,
        capability: FindCapability = nvidia_capability,
    ) -> None:
        """The arguments replace this machine, the installed torch and the GPU in tests."""
        self._root, self._build, self._capability = root, build, capability

    def problem(self) -> str | None:
        return nvidia_problem(self._root, lambda: self._build or find_build(), self._capability)

    def memory(self) -> tuple[int, int] | None:
        return nvidia_memory()


KIND = CudaKind()
