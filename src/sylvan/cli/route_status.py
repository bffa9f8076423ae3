"""`sylvan route status`: shows the state of a running gateway and its servers."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import httpx

from sylvan.cli.client import ServerError
from sylvan.cli.main import DONE, FAILED

TIMEOUT_S = 10.0
_COLUMNS = ("server", "model", "kind", "health", "breaker", "load", "queued tokens")


def show(url: str, key: str | None, *, as_json: bool) -> int:
    """Print a table of a gateway's servers; return 0 if it is ready.

    Raises:
        ServerError: The gateway is unreachable, or rejects the call.
    """
    headers = {"authorization": f"Bearer {key}"} if key else {}
    try:
        with httpx.Client(base_url=url, headers=headers, timeout=TIMEOUT_S) as http:
            readiness, workers = http.get("/readiness"), http.get("/workers")
    except httpx.TransportError as error:
        raise ServerError(f"no gateway answers at {url}: {error}") from error
    if workers.is_error:
        raise ServerError(f"the gateway answered {workers.status_code}: {workers.text[:500]}")
    state, listed = readiness.json(), workers.json()["workers"]
    if as_json:
        print(json.dumps({**state, "workers": listed}, indent=2))
    else:
        print(f"{url}: {state['status']}, {state['healthy_workers']} of {state['total_workers']}")
        print(table([_row(worker) for worker in listed]))
    return DONE if readiness.is_success else FAILED


def table(rows: Sequence[Sequence[str]]) -> str:
    """Format aligned columns with headings."""
    cells = [_COLUMNS, *rows]
    widths = [max(len(row[i]) for row in cells) for i in range(len(_COLUMNS))]
    lines = ("  ".join(map(str.ljust, row, widths)).rstrip() for row in cells)
    return "\n".join(lines)


def _row(worker: dict[str, Any]) -> Sequence[str]:
    if "worker_type" not in worker:  # it is being added
        job = worker["job_status"]
        return (worker["url"], "", "", f"{job['job_type']} {job['status']}", "", "", "")
    health = "healthy" if worker["is_healthy"] else "unhealthy"
    return (
        worker["url"],
        worker["model_id"],
        worker["worker_type"],
        "draining" if worker["is_draining"] else health,
        worker["circuit_breaker"],
        str(worker["load"]),
        str(worker["queued_tokens"]),
    )
