"""Intel Gaudi: facts that need no device, and the reason if it cannot be used."""

from __future__ import annotations

import importlib.metadata
from pathlib import Path
from typing import ClassVar

from sylvan.runtime.platform.facts import PlatformFacts

ELSE = "or choose device=cpu or auto"
_VENDOR = "0x1da3"
"""PCI number of Habana Labs."""


class GaudiKind:
    """Looks for the driver's devices, then for the bridge; imports neither it nor torch."""

    facts: ClassVar = PlatformFacts(
        name="hpu",
        device_type="hpu",
        attention=("torch", "reference"),
        runners=("eager",),
        dtypes=frozenset({"float32", "bfloat16"}),
        collective="hccl",
        state="never run",
        how="Gaudi's driver, habana-torch-plugin and its torch",
        opener="sylvan_gaudi.device:open_hpu",
    )

    def __init__(self, root: Path = Path("/")) -> None:
        """`root` stands for this machine, in tests."""
        self._root = root

    def problem(self) -> str | None:
        if not self._has_device():
            return (
                "the driver habanalabs shows no Gaudi on this machine; install it and the "
                f"firmware, until hl-smi lists the device, {ELSE}"
            )
        try:
            importlib.metadata.version("habana-torch-plugin")
        except importlib.metadata.PackageNotFoundError:
            return (
                "the package habana-torch-plugin is not installed; use Intel's image for Gaudi, "
                f"which has it and its torch, {ELSE}"
            )
        return None

    def memory(self) -> tuple[int, int] | None:
        return None  # only the bridge tells, and it takes the device

    def _has_device(self) -> bool:
        if any(self._root.glob("dev/hl[0-9]*")):
            return True
        found = self._root.glob("sys/class/accel/accel*/device/vendor")
        return any(path.read_text().strip() == _VENDOR for path in found)


KIND = GaudiKind()
