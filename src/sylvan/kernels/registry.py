"""Registry of kernels by op, with their requirements: Sylvan's own and those of other packages.

Imports no torch. Calls that no kernel supports run the op's PyTorch reference.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import EntryPoint, entry_points
from types import MappingProxyType
from typing import Any

from sylvan.protocol.errors import ConfigError

GROUP = "sylvan.kernels"
"""Entry point group of other packages; an entry is a `KernelSpec` or several."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelSpec:
    """A kernel of an op, and its requirements.

    Attributes:
        op: Folder of the op and name of its reference, as `norm.rms_norm`. A folder alone: kernels
            that a step program, a sampler or a pool selects once, instead of per call.
        backend: Name for display, for example `triton`.
        device: Device type of the tensors, as in torch.
        target: `module:function`, with the arguments and results of the reference.
        package: Module that must be installed, if any.
        dtypes: Dtypes of the first tensor; empty: any.
        chips: Prefixes of chip names, as `sm_9` or `gfx94`; empty: any.
        takes: `module:function` that gets the arguments of a call (shapes, formats) and returns
            whether the kernel supports it.
    """

    op: str
    backend: str
    device: str
    target: str
    package: str = ""
    dtypes: frozenset[str] = frozenset()
    chips: tuple[str, ...] = ()
    takes: str = ""

    @property
    def folder(self) -> str:
        """Folder of the op."""
        return self.op.partition(".")[0]

    def unusable_reason(self) -> str:
        """Reason why this installation cannot use it; "" if it can."""
        if self.package and not is_installed(self.package):
            return f"{self.package} is not installed"
        return ""

    def fits(self, device: str, dtype: str, chip: str) -> bool:
        """Whether it supports this dtype on this device and chip; `chip` "": not checked."""
        return (
            device == self.device
            and (not self.dtypes or dtype in self.dtypes)
            and (not self.chips or chip.startswith(self.chips))
        )


@functools.cache
def is_installed(module: str) -> bool:
    """Whether a module is installed; does not import it."""
    return importlib.util.find_spec(module) is not None


def load(target: str) -> Any:
    """Import the object of `module:name`, or the module if there is no name."""
    module, _, name = target.partition(":")
    found = importlib.import_module(module)
    return getattr(found, name) if name else found


_NATIVE = (
    *("cast", "collective", "compressed", "copy", "embed", "experts", "gating", "latent", "lora"),
    *("matmul", "norm", "paged", "rows", "sample", "scan", "sparse", "streams"),
)
_TRITON: Mapping[str, str] = MappingProxyType(
    {
        "collective": "collective.triton_sum",
        "copy": "copy.triton_copy",
        "embed.embedding": "embed.triton_embed",
        "experts.experts": "experts.triton_experts",
        "gating.activation": "gating.triton_gating",
        "gating.glu": "gating.triton_gating",
        "lora.lora": "lora.triton_lora",
        "matmul.gated_linear": "matmul.triton_linear",
        "matmul.linear": "matmul.triton_linear",
        "norm.layer_norm": "norm.triton_norm",
        "norm.rms_norm": "norm.triton_norm",
        "paged": "paged.triton_attention",
        "rows.add": "rows.triton_rows",
        "rows.scale": "rows.triton_rows",
        "rows.softcap": "rows.triton_rows",
        "rows.take_rows": "rows.triton_rows",
        "sample": "sample.triton_sample",
        "scan": "scan.triton_scan",
        "sparse.attend_slots": "sparse.triton_sparse",
        "sparse.choose_tokens": "sparse.triton_sparse",
    }
)


def _triton(op: str, module: str) -> KernelSpec:
    name = op.partition(".")[2]
    target = f"sylvan.kernels.{module}" + (f":{name}" if name else "")
    # CUDA and ROCm devices are both `cuda`.
    return KernelSpec(op=op, backend="triton", device="cuda", target=target, package="triton")


OWN: tuple[KernelSpec, ...] = (
    *(KernelSpec(op=op, backend="native", device="cpu", target="") for op in _NATIVE),
    *(_triton(op, module) for op, module in _TRITON.items()),
)
"""Kernels of this package. Native ones are compiled into one library for all ops."""


class KernelRegistry:
    """Finds kernels by op; those of other packages take precedence over Sylvan's own.

    Args:
        others: Kernels of other packages; by default from their entry points.

    Raises:
        ConfigError: The kernels of a package cannot be loaded; the message names the package.
    """

    def __init__(self, others: Iterable[EntryPoint] | None = None) -> None:
        found = entry_points(group=GROUP) if others is None else others
        self.specs = (*(spec for entry in found for spec in _loaded(entry)), *OWN)

    def of(self, op: str, device: str) -> Sequence[KernelSpec]:
        """Kernels of an op (or of all in a folder) for a type of device, best first."""
        return [s for s in self.specs if op in (s.op, s.folder) and s.device == device]

    def usable(self, op: str, device: str) -> Sequence[KernelSpec]:
        """Return the kernels of `found` that this installation can run."""
        return [spec for spec in self.of(op, device) if not spec.unusable_reason()]


@functools.cache
def registry() -> KernelRegistry:
    """The kernels of all installed packages."""
    return KernelRegistry()


def _loaded(entry: EntryPoint) -> Sequence[KernelSpec]:
    try:
        found = entry.load()
    except (ImportError, AttributeError) as error:
        raise ConfigError(
            f"the kernels {entry.name!r} cannot be loaded from {entry.value!r}: {error}; uninstall "
            "or fix the package that provides them"
        ) from None
    specs = (found,) if isinstance(found, KernelSpec) else tuple(found)
    for spec in specs:
        if not isinstance(spec, KernelSpec) or not spec.target:
            raise ConfigError(
                f"the entry point {entry.name!r} ({entry.value!r}) must be a KernelSpec or several"
            )
    return specs
