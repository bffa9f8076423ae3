"""Which implementation of each op runs where on this machine, and why. Needs no torch.

A PyTorch reference defines the results of each op, and runs where no other implementation does.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from sylvan.kernels.native.library import Description
from sylvan.kernels.registry import KernelRegistry, KernelSpec, registry

_ROOT = Path(__file__).parent
_DEVICES = {"sample": "device.py", "scan": "space.py"}  # where PyTorch computes these
_NOT_OPS = frozenset({"aot", "gpu", "lib", "native", "ngram", "xla"})  # ngram: of texts, no tensors
_HINTS = {"triton": "pip install 'sylvan[gpu]'"}


@dataclass(frozen=True, slots=True)
class OpUse:
    """What computes an op here, and why. `degraded`: it has faster code, which cannot run."""

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
        devices: Devices other than CPUs that can be used, and the types of their tensors.
        kernels: Instead of those of all installed packages.
        root: Where the folders of ops are.
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
    usable = [spec for spec in specs if not spec.obstacle()]
    if usable:
        return f"{name}: {', '.join(dict.fromkeys(_shown(spec) for spec in usable))}"
    if not specs:
        return f"{name}: PyTorch (there is no kernel)"
    hint = _HINTS.get(specs[0].package, "")
    return f"{name}: PyTorch ({specs[0].obstacle()}{': ' if hint else ''}{hint})"


def _shown(spec: KernelSpec) -> str:
    """Its backend, and what it needs beyond the device."""
    needs = [*sorted(spec.dtypes), *(f"{chip}*" for chip in spec.chips)]
    return f"{spec.backend} ({', '.join(needs)})" if needs else spec.backend
