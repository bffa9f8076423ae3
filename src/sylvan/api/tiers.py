"""Bodies of the KV store routes."""

from __future__ import annotations

import json
from typing import Annotated, Any

from pydantic import Field

from sylvan.api.validation import ClosedModel
from sylvan.config.hicache import extra_settings, storage_of
from sylvan.protocol.errors import RequestError
from sylvan.protocol.tiers import AttachStore, PrefetchWait, WritePolicy


class StoreBody(ClosedModel):
    """Body of `PUT /hicache/storage-backend`."""

    hicache_storage_backend: Annotated[str, Field(min_length=1, max_length=4096)]
    """`file`, a directory, or a URL: `redis://HOST/0`, `s3://BUCKET/PREFIX`."""
    hicache_storage_backend_extra_config_json: Annotated[str, Field(max_length=65536)] | None = None
    """JSON object: `file_storage_path`, `prefetch_threshold`, `prefetch_timeout_base`,
    `prefetch_timeout_per_ki_token`, `max_bytes`, `namespace_bytes`, `ttl_s`."""
    hicache_storage_prefetch_policy: PrefetchWait | None = None
    """How long requests wait for the store."""
    hicache_write_policy: WritePolicy | None = None
    """When KV is written to the store."""


def attach_of(body: StoreBody) -> AttachStore:
    """Convert a body to the command.

    Raises:
        RequestError: The store is unknown, or a setting is out of range.
    """
    settings: dict[str, Any] = {}
    text = body.hicache_storage_backend_extra_config_json
    try:
        url = storage_of(body.hicache_storage_backend)
    except ValueError as error:
        raise RequestError(str(error), param="hicache_storage_backend") from None
    try:
        if text:
            settings = dict(extra_settings(json.loads(text)))
        _check(settings)
    except ValueError as error:
        param = "hicache_storage_backend_extra_config_json"
        raise RequestError(f"{param}: {error}", param=param) from None
    directory = settings.pop("directory", None)
    return AttachStore(
        url=url if url != "file" or directory is None else str(directory),
        write_policy=body.hicache_write_policy,
        prefetch=body.hicache_storage_prefetch_policy,
        **settings,
    )


def _check(settings: dict[str, Any]) -> None:
    if "key_file" in settings:
        raise ValueError("key_file is given when the server starts")
    for name, value in settings.items():
        if name == "directory":
            continue
        whole = name in ("max_bytes", "namespace_bytes", "prefetch_min_tokens")
        number = isinstance(value, int if whole else int | float) and not isinstance(value, bool)
        least = 1 if whole else 0
        if not number or not least <= value < 1 << 62:
            kind = "a whole number" if whole else "a number"
            raise ValueError(f"{name} must be {kind} of at least {least}, not {value!r}")
