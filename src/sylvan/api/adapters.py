"""Bodies of the LoRA adapter routes."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Mapping
from typing import Annotated, Any

import xxhash
from pydantic import BaseModel, Field
from safetensors import SafetensorError, deserialize

from sylvan.api.validation import WireModel
from sylvan.api.weights import Name, SharedFile
from sylvan.protocol.errors import RequestError


class LoadAdapterBody(WireModel):
    """Load an adapter from a directory on the server."""

    lora_name: Name
    """Name with which requests select it."""
    lora_path: Annotated[str, Field(min_length=1, max_length=4096)]
    """Its directory, in PEFT's format."""
    pinned: bool = False
    """Never evict it from host memory or the device."""


class SentAdapterBody(WireModel):
    """Load an adapter whose tensors are in the request."""

    lora_name: Name
    """Name with which requests select it."""
    config_dict: dict[str, Any]
    """Contents of `adapter_config.json`."""
    serialized_named_tensors: str | SharedFile | list[str | SharedFile]
    """Its tensors as a safetensors file: base64, or a reference to shared memory. Pickles are
    rejected."""
    load_format: str | None = None
    """Only safetensors is supported."""
    added_tokens_config: dict[str, Any] | None = None
    """Must be empty: an adapter cannot add tokens."""
    expected_checksums: Annotated[dict[str, str], Field(max_length=100_000)] | None = None
    """XXH3-128 of the bytes of each tensor, by name, in hex: on a mismatch nothing is
    loaded."""
    pinned: bool = False
    """Never evict it from host memory or the device."""


class UnloadAdapterBody(WireModel):
    """Unload an adapter: new requests cannot use it."""

    lora_name: Name
    """Its name."""
    abort_requests: bool = False
    """Abort its requests; otherwise they finish."""


class AdapterReply(BaseModel):
    """Result, and the directories of all loaded adapters."""

    success: bool
    error_message: str = ""
    loaded_adapters: dict[str, str] = {}


def sent_file(body: SentAdapterBody) -> bytes | SharedFile:
    """Read the safetensors file of a body.

    Raises:
        RequestError: It is malformed, or not for exactly one rank.
    """
    field = "serialized_named_tensors"
    if body.load_format not in (None, "safetensors", "direct"):
        raise RequestError(
            f"load_format: expected safetensors, got {body.load_format[:64]!r}",
            param="load_format",
        )
    if body.added_tokens_config:
        raise RequestError(
            "added_tokens_config: an adapter cannot add tokens", param="added_tokens_config"
        )
    given = body.serialized_named_tensors
    parts = given if isinstance(given, list) else [given]
    if len(parts) != 1:
        raise RequestError(f"{field} has {len(parts)} entries, for 1 rank", param=field)
    if isinstance(parts[0], SharedFile):
        return parts[0]
    try:
        return base64.b64decode(parts[0], validate=True)
    except (binascii.Error, ValueError):
        raise RequestError(f"{field} is not base64", param=field) from None


def check_sums(data: bytes, expected: Mapping[str, str]) -> None:
    """Compare the tensors of a safetensors file with checksums.

    Raises:
        RequestError: The file is malformed, or a tensor is missing or differs; it is named.
    """
    field = "expected_checksums"
    try:
        found = dict(deserialize(data))
    except SafetensorError as error:
        message = f"serialized_named_tensors is not a safetensors file: {error}"
        raise RequestError(message, param="serialized_named_tensors") from None
    for name, wanted in expected.items():
        if name not in found:
            raise RequestError(f"{field}: {name[:200]!r} is listed but was not sent", param=field)
        if xxhash.xxh3_128_hexdigest(found[name]["data"]) != wanted.lower():
            raise RequestError(f"{field}: {name[:200]!r} does not match its checksum", param=field)
