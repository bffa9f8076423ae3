"""Intel GPUs through torch's device interface; never run."""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar

from sylvan.runtime.platform.facts import PlatformFacts
from sylvan.runtime.platform.probe import TorchBuild, find_build, intel_problem


class XpuKind:
    """Intel GPUs; PyTorch computes each op, without kernels of Sylvan. Never chosen by `auto`."""

    facts: ClassVar = PlatformFacts(
        name="xpu",
        device_type="xpu",
        attention=("torch", "reference"),
        runners=("eager",),
        dtypes=frozenset({"float32", "float16", "bfloat16"}),
        collective="xccl",
        state="never run",
        how="Intel's GPU driver, torch for XPU",
        opener="sylvan.runtime.platform.accelerator:open_accelerator",
    )

    def __init__(self, root: Path = Path("/"), build: TorchBuild | None = None) -> None:
        """`root` and `build` replace this machine and the installed torch in tests."""
        self._root, self._build = root, build

    def problem(self) -> str | None:
        return intel_problem(self._root, lambda: self._build or find_build())

    def memory(self) -> tuple[int, int] | None:
        return None


KIND = XpuKind()
