"""Maps exceptions of a step to errors of the scheduler."""

from __future__ import annotations

import re

import torch

from sylvan.protocol.errors import DeviceMemoryError, ExecutorError

FAILURES = (RuntimeError, ValueError, TypeError, IndexError, KeyError, MemoryError)
"""Exceptions of arithmetic on bad data; any other is a bug and propagates."""
_TORCH_SHORTAGE = re.compile(r"you tried to allocate (\d+) bytes")


def shortage(error: Exception) -> str | None:
    """Which memory ran out, if an allocation failed."""
    if isinstance(error, MemoryError):
        return str(error) or "the system refuses more"
    found = _TORCH_SHORTAGE.search(str(error))
    return f"the system refuses {int(found[1]):,} bytes" if found else None


def failure(error: Exception) -> ExecutorError:
    """The error for a forward pass that raised `error`."""
    message = f"the forward pass failed: {error}"
    short = isinstance(error, torch.OutOfMemoryError | MemoryError)
    return DeviceMemoryError(message) if short else ExecutorError(message)
