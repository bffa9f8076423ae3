"""Errors of the gateway, and the status each maps to.

* RequestError (of `sylvan.protocol.errors`)
  - UnknownModelError   404: no worker serves the model
  - UnauthorizedError   401 or 403
* CapacityError
  - NoWorkerError       503: no worker can take the request now
  - QueueFullError      429: too many requests are queued
  - QueueTimeoutError   408: the request was queued too long
  - UpstreamError       502, 503 or 504: a worker failed; another may succeed
"""

from __future__ import annotations

from sylvan.protocol.errors import CapacityError, RequestError


class UnknownModelError(RequestError):
    """No worker serves the model; OpenAI clients recognise the error by its code."""

    def __init__(self, message: str, *, status: int = 404) -> None:
        super().__init__(message, param="model", status=status, code="model_not_found")


class UnauthorizedError(RequestError):
    """The credentials are missing (401) or insufficient (403)."""

    def __init__(self, message: str, *, status: int = 401) -> None:
        super().__init__(message, status=status)


class NoWorkerError(CapacityError):
    """No worker can take the request now."""


class QueueFullError(CapacityError):
    """Too many requests are queued."""

    def __init__(self, message: str, *, retry_after_s: float = 1.0) -> None:
        super().__init__(message, status=429, retry_after_s=retry_after_s)


class QueueTimeoutError(CapacityError):
    """The request was queued too long."""

    def __init__(self, message: str) -> None:
        super().__init__(message, status=408)


class UpstreamError(CapacityError):
    """A worker failed while serving a request.

    Args:
        message: What happened.
        kind: One word for metrics: `connect`, `closed`, `stall`, `protocol`, `status`.
        status: Status for the client if no other worker can serve the request.
    """

    def __init__(self, message: str, *, kind: str, status: int = 502) -> None:
        super().__init__(message, status=status)
        self.kind = kind
