"""Which implementation of each op runs where on this machine, found from its files. Needs no torch.

An op's folder contains its implementations: C++ for CPUs, `triton_*.py` for GPUs, and a PyTorch
reference, which defines the results and runs where no other implementation does.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from sylvan.kernels.native.library import Description

_ROOT = Path(__file__).parent
_DEVICES = {"sample": "device.py", "scan": "space.py"}  # where PyTorch computes these
_NOT_OPS = frozenset({"aot", "gpu", "lib", "native", "ngram"})  # ngram: of texts, no tensors


@dataclass(frozen=True, slots=True)
class OpUse:
    """What computes an op here, and why. `degraded`: it has faster code, which cannot run."""

    name: str
    detail: str
    degraded: bool = False


def op_uses(found: Description, gpus: Sequence[str], root: Path = _ROOT) -> list[OpUse]:
    """One entry for each op.

    Args:
        found: The compiled kernels.
        gpus: Names of the devices other than CPUs that can be used.
        root: Where the folders of ops are.
    """
    triton = importlib.util.find_spec("triton") is not None
    uses: list[OpUse] = []
    for folder in sorted(path for path in root.iterdir() if _is_op(path)):
        native, degraded = _on_cpu(folder, found)
        parts = [native, *(_on_gpu(folder, gpu, triton=triton) for gpu in gpus)]
        uses.append(OpUse(folder.name, "; ".join(parts), degraded))
    return uses


def _is_op(path: Path) -> bool:
    needed = _DEVICES.get(path.name, "reference.py")
    return path.name not in _NOT_OPS and (path / needed).is_file()


def _on_cpu(folder: Path, found: Description) -> tuple[str, bool]:
    if not any(folder.glob("*.cpp")):
        return "cpu: PyTorch (there is no native kernel)", False
    if found.variant is None:
        return "cpu: PyTorch (its native kernel is not compiled)", True
    return f"cpu: native ({found.variant}, the fastest that works here)", False


def _on_gpu(folder: Path, gpu: str, *, triton: bool) -> str:
    if not any(folder.glob("triton_*.py")):
        return f"{gpu}: PyTorch (there is no Triton kernel)"
    if not triton:
        return f"{gpu}: PyTorch (Triton is not installed: pip install 'sylvan[gpu]')"
    return f"{gpu}: Triton"
