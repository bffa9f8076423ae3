"""Unguessable names."""

from __future__ import annotations

import os


def random_hex(num_bytes: int) -> str:
    """So many random bytes as hexadecimal digits; `secrets.token_hex` takes thrice as long."""
    return os.urandom(num_bytes).hex()
