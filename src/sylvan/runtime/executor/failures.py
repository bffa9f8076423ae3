"""What a step can fail with, in the words of the scheduler."""

from __future__ import annotations

import torch

from sylvan.protocol.errors import DeviceMemoryError, ExecutorError

FAILURES = (RuntimeError, ValueError, TypeError, IndexError, KeyError, MemoryError)
"""What arithmetic on bad data raises; anything else is a defect and passes through."""


def failure(error: Exception) -> ExecutorError:
    """What a forward pass that raised `error` comes to."""
    message = f"the forward pass failed: {error}"
    short = isinstance(error, torch.OutOfMemoryError | MemoryError)
    return DeviceMemoryError(message) if short else ExecutorError(message)
