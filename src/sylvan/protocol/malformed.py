"""Exceptions of decoding bytes from untrusted senders."""

from __future__ import annotations

import msgspec

MALFORMED = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)
"""All exceptions of `msgspec` for malformed bytes: invalid UTF-8 and values that are nested too
deep raise others than its own."""
