"""Lists which implementation of each op this machine uses, and why. Imports no torch.

The PyTorch reference of an op defines its results, and runs where there is no other implementation.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from sylvan.kernels.native.library import Description
from sylvan.kernels.registry import KernelRegistry, KernelSpec, registry

_ROOT = Path(__file__).parent
_DEVICES = {"sample": "device.py", "scan": "space.py"}  # where PyTorch computes these
_NOT_OPS = frozenset({"aot", "gpu", "lib", "native", "ngram", "xla"})  # ngram: no tensors
_HINTS = {"triton": "pip install 'sylvan[gpu]'"}


@dataclass(frozen=True, slots=True)
class OpUse:
    """The implementation of an op here, and why. `degraded`: faster code exists but cannot run."""

    name: str
    detail: str
    degraded: bool = False


def op_uses(
    found: Description,
    devices: Mapping[str, str],
    kernels: KernelRegistry | None = None,
    root: Path = _ROOT,
) -> list[OpUse]:
    """One entry for each op.

    Args:
        found: The compiled kernels.
        devices: Usable devices other than CPUs, and the device types of their tensors.
        kernels: Kernels to list; by default those of all installed packages.
        root: Directory with the folders of ops.
    """
    known = kernels or registry()
    uses: list[OpUse] = []
    for name in sorted(path.name for path in root.iterdir() if _is_op(path)):
        native, degraded = _on_cpu(name, found, known)
        parts = [native, *(_on_device(name, *device, known) for device in devices.items())]
        uses.append(OpUse(name, "; ".join(parts), degraded))
    return uses


def _is_op(path: Path) -> bool:
    needed = _DEVICES.get(path.name, "reference.py")
    return path.name not in _NOT_OPS and (path / needed).is_file()


def _on_cpu(op: str, found: Description, kernels: KernelRegistry) -> tuple[str, bool]:
    own = [spec for spec in kernels.of(op, "cpu") if spec.backend == "native"]
    others = [spec for spec in kernels.usable(op, "cpu") if spec.backend != "native"]
    before = "".join(f"{spec.backend} for {spec.op}, else " for spec in others)
    if not own:
        return f"cpu: {before}PyTorch (there is no native kernel)", False
    if found.variant is None:
        return f"cpu: {before}PyTorch (its native kernel is not compiled)", True
    return f"cpu: {before}native ({found.variant}, the fastest that works here)", False


def _on_device(op: str, name: str, device: str, kernels: KernelRegistry) -> str:
    specs = kernels.of(op, device)
    usable = [spec for spec in specs if not spec.unusable_reason()]
    if usable:
        return f"{name}: {', '.join(dict.fromkeys(_shown(spec) for spec in usable))}"
    if not specs:
        return f"{name}: PyTorch (there is no kernel)"
    hint = _HINTS.get(specs[0].package, "")
    return f"{name}: PyTorch ({specs[0].unusable_reason()}{': ' if hint else ''}{hint})"


def _shown(spec: KernelSpec) -> str:
    """Return the kernel's backend, and its requirements beyond the device."""
    needs = [*sorted(spec.dtypes), *(f"{chip}*" for chip in spec.chips)]
    return f"{spec.backend} ({', '.join(needs)})" if needs else spec.backend
