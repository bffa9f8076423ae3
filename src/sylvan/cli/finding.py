"""The result of one check."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Status = Literal["ok", "slow", "missing"]


@dataclass(frozen=True, slots=True)
class Finding:
    """The result of one check. `cost` says what a failure costs, and what to do."""

    status: Status
    what: str
    detail: str
    cost: str = ""
