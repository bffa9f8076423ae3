"""CPUs."""

from __future__ import annotations

from typing import ClassVar

from sylvan.runtime.platform.facts import PlatformFacts


class CpuKind:
    """The CPU, which is always usable."""

    facts: ClassVar = PlatformFacts(
        name="cpu",
        device_type="cpu",
        attention=("native", "torch", "reference"),
        runners=("program", "eager"),
        dtypes=frozenset({"float32", "bfloat16"}),
        float8=(("", "float8_e4m3fn"),),
        streams=False,
        state="run, on x86-64 and in an emulator of aarch64",
        how="pip install sylvan",
        opener="sylvan.runtime.platform.host:open_host",
    )

    def problem(self) -> str | None:
        return None

    def memory(self) -> tuple[int, int] | None:
        return None


KIND = CpuKind()
