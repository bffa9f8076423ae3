"""SGLang's names of KV stores, and its table of further store settings."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import cast

import yaml

ELSEWHERE = frozenset(
    {
        *("sim", "npu_memcache", "hf3fs", "aibrix", "dynamic", "eic", "simm"),
        *("mori", "shm", "tensorcast", "seaweedfs", "lmcache"),
    }
)
"""SGLang's stores that we do not support."""
_AS_URLS: Mapping[str, str] = {
    "mooncake": "mooncake://MASTER:PORT?protocol=rdma&segment=4GiB",
    "nixl": "nixl:///DIRECTORY?plugin=POSIX",
}
_NAMES: Mapping[str, str] = {
    "prefetch_threshold": "prefetch_min_tokens",
    "prefetch_timeout_base": "prefetch_timeout_s",
    "prefetch_timeout_per_ki_token": "prefetch_timeout_per_ki_token_s",
    "file_storage_path": "directory",
    "max_size": "max_bytes",
}
_OURS = frozenset({"max_bytes", "namespace_bytes", "ttl_s", "key_file"})
_NO_EFFECT = frozenset({"hicache_storage_pass_prefix_keys"})  # prefixes are part of our names


def storage_of(value: object) -> str:
    """`tiers.storage` for SGLang's name of a backend; URLs and directories stay as they are.

    Raises:
        ValueError: the backend is not supported, or must be given as a URL.
    """
    name = str(value)
    if (url := _AS_URLS.get(name.lower())) is not None:
        raise ValueError(f"the store {name!r} must be given as a URL: {url}")
    if name.lower() in ELSEWHERE:
        raise ValueError(
            f"not supported yet: the store {name!r}; give `file`, a directory, or a URL such as "
            "redis://HOST/0 or s3://BUCKET/PREFIX"
        )
    return name


def extra_settings(value: object) -> Mapping[str, object]:
    """Our settings, without their section, from a JSON object or an `@file` that contains one.

    Raises:
        ValueError: it is not a table, is unreadable, or contains unknown settings.
    """
    table = _table(value)
    found: dict[str, object] = {}
    for name, setting in table.items():
        if name in _NO_EFFECT:
            continue
        ours = _NAMES.get(name, name)
        if ours not in _OURS and name not in _NAMES:
            known = ", ".join(sorted({*_NAMES, *_OURS}))
            raise ValueError(f"unknown store setting {name!r}; known are {known}")
        found[ours] = setting
    return found


def _table(value: object) -> Mapping[str, object]:
    if isinstance(value, Mapping):
        return cast("Mapping[str, object]", value)
    text, suffix = str(value), ".json"
    if text.startswith("@"):
        path = Path(text[1:]).expanduser()
        try:
            text, suffix = path.read_text("utf-8"), path.suffix.lower()
        except (OSError, UnicodeDecodeError) as error:
            raise ValueError(f"{str(path)!r} cannot be read: {error}") from None
    try:
        match suffix:
            case ".toml":
                found: object = tomllib.loads(text)
            case ".yaml" | ".yml":
                found = yaml.safe_load(text)
            case _:
                found = json.loads(text)
    except (ValueError, yaml.YAMLError, RecursionError) as error:
        raise ValueError(f"expected a JSON object, got {text[:80]!r}: {error}") from None
    match found:
        case dict():
            return cast("Mapping[str, object]", found)
        case _:
            raise ValueError(f"expected a JSON object, got {text[:80]!r}")
