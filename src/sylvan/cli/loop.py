"""The event loop of servers."""

from __future__ import annotations

import asyncio
import sys


def fast_loop() -> type[asyncio.AbstractEventLoop] | None:
    """A faster one where there is one; None: Python's own."""
    if sys.platform == "win32":
        return None
    import uvloop  # not made for Windows

    return uvloop.new_event_loop  # pyright: ignore[reportReturnType]
