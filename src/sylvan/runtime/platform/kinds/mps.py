"""Apple GPUs by PyTorch's MPS; never run, chosen only by name. CPU programs have NEON kernels."""

from __future__ import annotations

from typing import ClassVar

from sylvan.runtime.platform.facts import PlatformFacts
from sylvan.runtime.platform.probe import apple_problem


class MpsKind:
    """PyTorch computes each op on memory that the CPU shares."""

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
