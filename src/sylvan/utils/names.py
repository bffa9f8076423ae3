"""Random, unguessable names."""

from __future__ import annotations

import os


def random_hex(num_bytes: int) -> str:
    """Return this many random bytes in hex; `secrets.token_hex` takes three times as long."""
    return os.urandom(num_bytes).hex()
