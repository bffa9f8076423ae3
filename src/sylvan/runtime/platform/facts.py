"""Static properties of device kinds, known without a device; imports no torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, kw_only=True, slots=True)
class PlatformFacts:
    """Facts that hold for every device of a kind.

    Attributes:
        name: What `device` in the configuration calls it.
        device_type: What torch calls it; ROCm's devices are `cuda` there.
        attention: Attention backends that may be chosen for it, the preferred one first.
        runners: Ways to execute a step, the preferred one first.
        dtypes: Types of weights that it computes with at full speed.
        float8: torch's names of 8-bit floats with 4 exponent bits that kernels read and write, by
            how the chip's name begins; chips that are not listed have none.
        collective: Backend of `torch.distributed`.
        streams: Whether work runs beside the CPU.
        state: What was done with such devices: run, or compiled for only.
        how: How to get what serving on one needs, in one line.
        automatic: Whether `device=auto` may choose it.
        opener: `module:function` that makes the `Platform`; imported when the device is used.
        lowering: `module:function` that runs step programs on it instead of tensors: from a
            `ModelPlan` and a model without contents to a `BuiltModel`; empty: it takes tensors.
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
        """The 8-bit float of a chip; None: it has none."""
        return next((name for start, name in self.float8 if chip.startswith(start)), None)


class DeviceKind(Protocol):
    """A kind of device. Packages offer their own as entry points of group `sylvan.platforms`."""

    facts: PlatformFacts

    def problem(self) -> str | None:
        """Why no device of this kind can be used here, with a remedy; None if one can.

        One sentence without a full stop. Must be quick where there is no such device.
        """
        ...

    def memory(self) -> tuple[int, int] | None:
        """Free and total bytes of the device, without using it; None: unknown."""
        ...
