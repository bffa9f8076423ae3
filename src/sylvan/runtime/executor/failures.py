"""Maps exceptions of a step to scheduler errors. Loads no torch."""

from __future__ import annotations

import re

from sylvan.protocol.errors import DeviceMemoryError, ExecutorError

FAILURES = (RuntimeError, ValueError, TypeError, IndexError, KeyError, MemoryError)
"""Exceptions that bad data or a lack of memory can cause; any other one is a bug and propagates."""
_TORCH_SHORTAGE = re.compile(r"you tried to allocate (\d+) bytes")
_OF_DEVICE = "OutOfMemoryError"  # a class of torch; if it was raised, torch is imported


def shortage(error: Exception) -> str | None:
    """Say which allocation failed; None if `error` is not about memory."""
    if isinstance(error, MemoryError):
        return str(error) or "the system has no more memory"
    found = _TORCH_SHORTAGE.search(str(error))
    return f"the system cannot allocate {int(found[1]):,} bytes" if found else None


def failure(error: Exception) -> ExecutorError:
    """Wrap an exception of the forward pass."""
    message = f"the forward pass failed: {error}"
    short = isinstance(error, MemoryError) or type(error).__name__ == _OF_DEVICE
    return DeviceMemoryError(message) if short else ExecutorError(message)
