"""The authenticated caller."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Role = Literal["admin", "user"]
ROLES: tuple[Role, ...] = ("admin", "user")


@dataclass(frozen=True, slots=True)
class Principal:
    """An authenticated caller.

    Attributes:
        name: Name in logs; "" for an unnamed client.
        role: `admin` may operate the gateway, `user` may send requests.
        tenant: Tenant, for fairness, budgets and cache isolation.
    """

    name: str = ""
    role: Role = "user"
    tenant: str = ""
