"""AMD GPUs. Tests compile the kernels for them; nothing has been run on one."""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar

from sylvan.runtime.platform.facts import PlatformFacts
from sylvan.runtime.platform.probe import TorchBuild, amd_memory, amd_problem, find_build


class RocmKind:
    """Devices of the kernel driver amdkfd; torch calls them `cuda`."""

    facts: ClassVar = PlatformFacts(
        name="rocm",
        device_type="cuda",
        attention=("triton", "aiter", "torch", "reference"),
        runners=("graph", "eager"),
        dtypes=frozenset({"float32", "float16", "bfloat16"}),
        float8=(
            ("gfx942", "float8_e4m3fnuz"),
            ("gfx95", "float8_e4m3fn"),
            ("gfx12", "float8_e4m3fn"),
        ),
        collective="nccl",
        automatic=True,
        state="compiled for gfx942 and gfx950, never run",
        how="ROCm, torch for ROCm, pip install 'sylvan[gpu]'",
        opener="sylvan.runtime.platform.accelerator:open_accelerator",
    )

    def __init__(self, root: Path = Path("/"), build: TorchBuild | None = None) -> None:
        """`root` and `build` replace this machine and the installed torch in tests."""
        self._root, self._build = root, build

    def problem(self) -> str | None:
        return amd_problem(self._root, lambda: self._build or find_build())

    def memory(self) -> tuple[int, int] | None:
        return amd_memory(self._root)


KIND = RocmKind()
