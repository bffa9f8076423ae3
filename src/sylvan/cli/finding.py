"""What a check says of one thing."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Status = Literal["ok", "slow", "missing"]


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing looked at. `cost` is what its lack costs, and what to do."""

    status: Status
    what: str
    detail: str
    cost: str = ""
