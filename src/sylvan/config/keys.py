"""Files of API keys: the tenant of each key, and the tenant's budgets.

A key file is JSON: `{"keys": [{"sha256": "<hex of the key>", "tenant": "acme",
"requests_per_minute": 600, "tokens_per_minute": 100000, "adapters": ["legal"]}]}`. Budgets are
optional and must be positive; without `adapters` the tenant may use all LoRA adapters. The file
contains only hashes, so reading it gives no access. A key that is removed from the file is
rejected.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Annotated

import msgspec

from sylvan.protocol.errors import ConfigError
from sylvan.protocol.malformed import MALFORMED

PerMinute = Annotated[float, msgspec.Meta(gt=0)]


class KeyEntry(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One key of a key file."""

    sha256: str
    tenant: str = ""
    requests_per_minute: PerMinute | None = None
    tokens_per_minute: PerMinute | None = None
    adapters: list[str] | None = None


class _KeyFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    keys: list[KeyEntry]


def read_key_file(path: str) -> list[KeyEntry]:
    """Read a key file.

    Raises:
        ConfigError: It cannot be read, or is not of the documented form.
    """
    try:
        return msgspec.json.decode(Path(path).read_bytes(), type=_KeyFile).keys
    except (OSError, *MALFORMED) as error:
        raise ConfigError(f"The key file {path} cannot be used: {error}") from error


def key_digest(key: str) -> str:
    """The hash under which a key is stored, in hex."""
    return hashlib.sha256(key.encode()).hexdigest()
