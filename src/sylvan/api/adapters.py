"""Bodies of the routes about LoRA adapters."""

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
    """Serve an adapter in a directory of the server's machine."""

    lora_name: Name
    """Name by which requests ask for it."""
    lora_path: Annotated[str, Field(min_length=1, max_length=4096)]
    """Its directory, in PEFT's format."""
    pinned: bool = False
    """Keep its place in host memory and on the device."""


class SentAdapterBody(WireModel):
    """Serve an adapter that is sent."""

    lora_name: Name
    """Name by which requests ask for it."""
    config_dict: dict[str, Any]
    """What `adapter_config.json` has."""
    serialized_named_tensors: str | SharedFile | list[str | SharedFile]
    """Its tensors as a safetensors file: base64, or where it lies in shared memory. Pickles are
    refused."""
    load_format: str | None = None
    """Only safetensors are read."""
    added_tokens_config: dict[str, Any] | None = None
    """Must have no entries: an adapter cannot add tokens."""
    expected_checksums: Annotated[dict[str, str], Field(max_length=100_000)] | None = None
    """XXH3-128 of the bytes of tensors, by name, in hexadecimal digits: nothing is loaded if one
    differs."""
    pinned: bool = False
    """Keep its place in host memory and on the device."""


class UnloadAdapterBody(WireModel):
    """Serve no new requests with an adapter."""

    lora_name: Name
    """Its name."""
    abort_requests: bool = False
    """End its requests with an error; else those that have come finish."""


class AdapterReply(BaseModel):
    """Outcome, and all adapters that are served, with their directories."""

    success: bool
    error_message: str = ""
    loaded_adapters: dict[str, str] = {}


def sent_file(body: SentAdapterBody) -> bytes | SharedFile:
    """The safetensors file of a body.

    Raises:
        RequestError: it is none, or not one for one rank.
    """
    field = "serialized_named_tensors"
    if body.load_format not in (None, "safetensors", "direct"):
        raise RequestError(
            f"load_format is {body.load_format[:64]!r}; only safetensors are read",
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
        raise RequestError(f"{field} is no base64", param=field) from None


def check_sums(data: bytes, expected: Mapping[str, str]) -> None:
    """Compare tensors of a safetensors file with checksums.

    Raises:
        RequestError: it is no such file, lacks a tensor, or one differs; names the tensor.
    """
    field = "expected_checksums"
    try:
        found = dict(deserialize(data))
    except SafetensorError as error:
        message = f"serialized_named_tensors is no safetensors file: {error}"
        raise RequestError(message, param="serialized_named_tensors") from None
    for name, wanted in expected.items():
        if name not in found:
            raise RequestError(f"{field}: {name[:200]!r} was not sent", param=field)
        if xxhash.xxh3_128_hexdigest(found[name]["data"]) != wanted.lower():
            raise RequestError(f"{field}: {name[:200]!r} has another checksum", param=field)
