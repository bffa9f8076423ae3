"""Faults that a server injects into itself for testing: `--chaos`."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, fields

from sylvan.config.fields import nearest
from sylvan.protocol.errors import ConfigError

_SECONDS = {"us": 1e-6, "ms": 1e-3, "s": 1.0, "": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0}
_TIME = re.compile(r"(\d+(?:\.\d+)?)(us|ms|s|min|m|h)?", re.ASCII)
MAX_S = 366 * 86_400.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Faults:
    """Fault types and their rates.

    Attributes:
        kill_scheduler: Probability per second that the scheduler process is killed.
        kill_detokenizer: Probability per second that the detokenizer process is killed.
        stop_scheduler: Probability per second that the scheduler process is suspended for a while.
        stop_s: Duration of the suspension.
        ipc_delay_s: Maximum delay of messages between processes.
        disk_full: Probability that a write to the database of files and batches fails for lack of
          space.
        disk_delay_s: Maximum delay of reads and writes of the database.
        clock_jump_s: Maximum error of the system clock; it jumps every few seconds.
        seed: Seed of all faults.
    """

    kill_scheduler: float = 0.0
    kill_detokenizer: float = 0.0
    stop_scheduler: float = 0.0
    stop_s: float = 2.0
    ipc_delay_s: float = 0.0
    disk_full: float = 0.0
    disk_delay_s: float = 0.0
    clock_jump_s: float = 0.0
    seed: float = 0.0

    @property
    def of_processes(self) -> tuple[str, ...]:
        """Return the names of the configured faults that need separate processes."""
        names = ("kill_scheduler", "kill_detokenizer", "stop_scheduler", "ipc_delay_s")
        return tuple(_spelt(name) for name in names if getattr(self, name))


NONE = Faults()


def read_faults(given: Mapping[str, str]) -> Faults:
    """Parse the setting `chaos`.

    Raises:
        ConfigError: a fault does not exist, or its value is invalid.
    """
    known = {_spelt(field.name): field.name for field in fields(Faults)}
    values: dict[str, float] = {}
    for name, text in given.items():
        field = known.get(name.replace("_", "-"))
        if field is None:
            raise ConfigError(f"chaos: unknown fault {name!r}{nearest(name, known)}")
        values[field] = _time(name, text) if field.endswith("_s") else _number(name, text, field)
    return Faults(**values)


def _spelt(field: str) -> str:
    return field.removesuffix("_s").replace("_", "-")


def _time(name: str, text: str) -> float:
    found = _TIME.fullmatch(text.strip())
    seconds = float(found[1]) * _SECONDS[found[2] or ""] if found else -1.0
    if not 0 <= seconds <= MAX_S:
        raise ConfigError(f"chaos: {name}: expected a time such as 50ms, 2s or 1h, not {text!r}")
    return seconds


def _number(name: str, text: str, field: str) -> float:
    most = 2.0**32 if field == "seed" else 1.0
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value <= most:
        raise ConfigError(f"chaos: {name}: expected a number from 0 to {most:g}, not {text!r}")
    return value
