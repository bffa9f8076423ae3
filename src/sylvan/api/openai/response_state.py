"""`reasoning.encrypted_content`: thinking that clients keep for servers that store nothing.

It is packed, not encrypted: a client may read it, as it may read the thinking itself.
"""

from __future__ import annotations

import base64
import binascii
import zlib

_PREFIX = "sylvan-reasoning-1."
_MAX_BYTES = 16 * 2**20


def pack(thinking: str) -> str:
    """Thinking as clients keep it."""
    data = zlib.compress(thinking.encode("utf-8", "surrogatepass"))
    return _PREFIX + base64.urlsafe_b64encode(data).decode("ascii")


def unpack(kept: object) -> str | None:
    """Thinking that `pack` made; None for anything else."""
    if not isinstance(kept, str) or not kept.startswith(_PREFIX):
        return None
    try:
        data = base64.urlsafe_b64decode(kept[len(_PREFIX) :])
        reader = zlib.decompressobj()
        text = reader.decompress(data, _MAX_BYTES)
        return text.decode("utf-8", "surrogatepass") if reader.eof else None
    except (binascii.Error, zlib.error, UnicodeError):
        return None
