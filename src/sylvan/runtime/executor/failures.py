"""What a step can fail with, in the words of the scheduler."""

from __future__ import annotations

import re

import torch

from sylvan.protocol.errors import DeviceMemoryError, ExecutorError

FAILURES = (RuntimeError, ValueError, TypeError, IndexError, KeyError, MemoryError)
"""What arithmetic on bad data raises; anything else is a defect and passes through."""
_TORCH_SHORTAGE = re.compile(r"you tried to allocate (\d+) bytes")


def shortage(error: Exception) -> str | None:
    """Which bytes the system refused, if that is what failed."""
    if isinstance(error, MemoryError):
        return str(error) or "the system refuses more"
    found = _TORCH_SHORTAGE.search(str(error))
    return f"the system refuses {int(found[1]):,} bytes" if found else None


def failure(error: Exception) -> ExecutorError:
    """What a forward pass that raised `error` comes to."""
    message = f"the forward pass failed: {error}"
    short = isinstance(error, torch.OutOfMemoryError | MemoryError)
    return DeviceMemoryError(message) if short else ExecutorError(message)
