"""The event loop of servers."""

from __future__ import annotations

import asyncio
import sys


def fast_loop() -> type[asyncio.AbstractEventLoop] | None:
    """Return a faster event loop if one is installed; None: Python's own."""
    if sys.platform == "win32":
        return None
    import uvloop  # not available on Windows

    return uvloop.new_event_loop  # pyright: ignore[reportReturnType]
