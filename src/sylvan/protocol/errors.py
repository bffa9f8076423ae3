"""Every error raised on purpose.

* SylvanError
  - ConfigError        the operator's fault; refuse to start (exit code 2)
  - RequestError       the client's fault; fails one request (HTTP 4xx)
  - CapacityError      nobody's fault; retry later (HTTP 429 or 503)
  - ExecutorError      a device or rank failed; its requests are retried or aborted
    - DeviceMemoryError  a step did not fit; its requests are retried in smaller ones
"""

from __future__ import annotations


class SylvanError(Exception):
    """Base of all errors of this package."""


class ConfigError(SylvanError):
    """The configuration, or the model it names, cannot be served."""


class RequestError(SylvanError):
    """The request cannot be served, whatever the load.

    Args:
        message: One sentence that names the field and the limit.
        param: Path of the offending field as the client spelt it, if one is to blame.
        status: HTTP status that tells the client best.
    """

    def __init__(self, message: str, *, param: str | None = None, status: int = 400) -> None:
        super().__init__(message)
        self.param = param
        self.status = status


class CapacityError(SylvanError):
    """The request could be served at another time.

    Args:
        message: What is full, and its size.
        status: 503 or 429.
        retry_after_s: When it is worth trying again.
    """

    def __init__(self, message: str, *, status: int = 503, retry_after_s: float = 1.0) -> None:
        super().__init__(message)
        self.status = status
        self.retry_after_s = retry_after_s


class ExecutorError(SylvanError):
    """A step failed on a device or rank."""


class DeviceMemoryError(ExecutorError):
    """The device had no memory for a step; a smaller one may fit."""
