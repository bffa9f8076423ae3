"""What decoding raises for bytes that somebody else sent."""

from __future__ import annotations

import msgspec

MALFORMED = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)
"""All that `msgspec` raises for bytes that are not of the form asked for: texts that are no UTF-8
and values that are nested too deep have errors of their own."""
