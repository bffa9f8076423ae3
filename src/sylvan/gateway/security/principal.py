"""Who calls."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Role = Literal["admin", "user"]
ROLES: tuple[Role, ...] = ("admin", "user")


@dataclass(frozen=True, slots=True)
class Principal:
    """A caller whose credentials were accepted.

    Attributes:
        name: For logs; "" for a client without a name.
        role: `admin` may steer the gateway, `user` may have requests served.
        tenant: Whose requests these are: for fairness, budgets and isolation of caches.
    """

    name: str = ""
    role: Role = "user"
    tenant: str = ""
