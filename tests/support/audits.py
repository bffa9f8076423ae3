"""Checks that a server lost no pages. Audits reclaim lost pages, so each loss is a bug."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import httpx

PATIENCE_S = 60


def assert_nothing_lost(load: Mapping[str, Any]) -> None:
    """Check a `Load`, given as a mapping."""
    repaired = {name: load[f"repaired_{name}"] for name in ("pages", "locks", "states")}
    assert repaired == {"pages": 0, "locks": 0, "states": 0}, "memory was lost while serving"


def assert_server_lost_nothing(url: str, key: str = "") -> None:
    """Check a server that is still running."""
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    for _ in range(2):  # between the two its scheduler audits, if it came to rest only now
        answer = httpx.get(f"{url}/server_info", headers=headers, timeout=PATIENCE_S)
        assert answer.status_code == 200, answer.text
        state = answer.json()["internal_states"][0]
    assert_nothing_lost(state["load"])
