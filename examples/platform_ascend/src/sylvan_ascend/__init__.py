"""Huawei Ascend NPUs: facts that need no device, and the reason if none can be used."""

from __future__ import annotations

import importlib.metadata
from pathlib import Path
from typing import ClassVar

from sylvan.runtime.platform.facts import PlatformFacts

ELSE = "or choose device=cpu or auto"


class AscendKind:
    """Looks for the driver's devices, then for torch_npu; imports neither it nor torch."""

    facts: ClassVar = PlatformFacts(
        name="npu",
        device_type="npu",
        attention=("torch", "reference"),
        runners=("graph", "eager"),
        dtypes=frozenset({"float32", "float16", "bfloat16"}),
        collective="hccl",
        automatic=True,
        state="never run",
        how="Ascend's driver, CANN, and torch-npu with its torch",
        opener="sylvan_ascend.device:open_npu",
    )

    def __init__(self, root: Path = Path("/")) -> None:
        """`root` stands for this machine, in tests."""
        self._root = root

    def problem(self) -> str | None:
        if not any(self._root.glob("dev/davinci[0-9]*")):
            return (
                "no Ascend driver shows an NPU (/dev/davinci*) on this machine; install the driver "
                f"and firmware, until npu-smi info lists it, {ELSE}"
            )
        try:
            importlib.metadata.version("torch-npu")
        except importlib.metadata.PackageNotFoundError:
            return (
                "the package torch-npu is not installed; install the release for this torch and "
                f"CANN, {ELSE}"
            )
        return None

    def memory(self) -> tuple[int, int] | None:
        return None  # the driver's library tells it only to its own tools


KIND = AscendKind()
