"""Static properties of device kinds, known without a device; imports no torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, kw_only=True, slots=True)
class PlatformFacts:
    """Properties of every device of a kind.

    Attributes:
        name: Name of the kind in the setting `device`.
        device_type: torch's device type; `cuda` for ROCm.
        attention: Attention backends for it, the preferred one first.
        runners: Step runners for it, the preferred one first.
        dtypes: Types of weights that it computes with at full speed.
        float8: Names in torch of the 8-bit floats with 4 exponent bits that kernels read and write,
            by prefix of the chip's name; other chips have none.
        collective: Backend of `torch.distributed`.
        streams: Whether the device works asynchronously to the CPU.
        state: How Sylvan was tested on such devices: run, or compiled for only.
        how: Requirements for serving on one, in one line.
        automatic: Whether `device=auto` may choose it.
        opener: `module:function` that opens the `Platform`; imported when the device is used.
        lowering: `module:function` that lowers step programs to it, from a `ModelPlan` and a model
            without weights to a `BuiltModel`; empty: the device computes with tensors.
    """

    name: str
    device_type: str
    attention: tuple[str, ...]
    runners: tuple[str, ...]
    dtypes: frozenset[str]
    float8: tuple[tuple[str, str], ...] = ()
    collective: str = "gloo"
    streams: bool = True
    state: str = "never run"
    how: str = ""
    automatic: bool = False
    opener: str = ""
    lowering: str = ""

    def float8_of(self, chip: str) -> str | None:
        """The 8-bit float type of a chip; None: it has none."""
        return next((name for start, name in self.float8 if chip.startswith(start)), None)


class DeviceKind(Protocol):
    """A kind of device. Other packages add kinds by entry points of group `sylvan.platforms`."""

    facts: PlatformFacts

    def problem(self) -> str | None:
        """Why no device of this kind can be used here, and what to do; None if one can be used.

        One sentence without a full stop. Must be fast on machines without such a device.
        """
        ...

    def memory(self) -> tuple[int, int] | None:
        """Free and total bytes of the device, without opening it; None: unknown."""
        ...
