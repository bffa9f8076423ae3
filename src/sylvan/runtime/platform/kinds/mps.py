"""Apple GPUs through PyTorch's MPS; never run. On the CPUs of Macs, NEON kernels run programs."""

from __future__ import annotations

from typing import ClassVar

from sylvan.runtime.platform.facts import PlatformFacts
from sylvan.runtime.platform.probe import apple_problem


class MpsKind:
    """Apple GPUs; PyTorch computes each op. Never chosen by `auto`."""

    facts: ClassVar = PlatformFacts(
        name="mps",
        device_type="mps",
        attention=("torch", "reference"),
        runners=("eager",),
        dtypes=frozenset({"float32", "float16", "bfloat16"}),
        state="never run",
        how="macOS on Apple silicon, torch from PyPI",
        opener="sylvan.runtime.platform.apple:open_mps",
    )

    def problem(self) -> str | None:
        return apple_problem()

    def memory(self) -> tuple[int, int] | None:
        return None


KIND = MpsKind()
