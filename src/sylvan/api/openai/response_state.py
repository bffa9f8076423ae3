"""`reasoning.encrypted_content`: reasoning that clients keep for stateless servers.

It is packed, not encrypted: clients may read it, as they may read the reasoning itself.
"""

from __future__ import annotations

import base64
import binascii
import zlib

_PREFIX = "sylvan-reasoning-1."
_MAX_BYTES = 16 * 2**20


def pack(thinking: str) -> str:
    """Pack reasoning for the client."""
    data = zlib.compress(thinking.encode("utf-8", "surrogatepass"))
    return _PREFIX + base64.urlsafe_b64encode(data).decode("ascii")


def unpack(kept: object) -> str | None:
    """Unpack the result of `pack`; None for anything else."""
    if not isinstance(kept, str) or not kept.startswith(_PREFIX):
        return None
    try:
        data = base64.urlsafe_b64decode(kept[len(_PREFIX) :])
        reader = zlib.decompressobj()
        text = reader.decompress(data, _MAX_BYTES)
        return text.decode("utf-8", "surrogatepass") if reader.eof else None
    except (binascii.Error, zlib.error, UnicodeError):
        return None
