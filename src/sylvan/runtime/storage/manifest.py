"""Describes how the pages of a store were computed. A store is bound to one manifest."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import msgspec

from sylvan.protocol.errors import ConfigError
from sylvan.protocol.malformed import MALFORMED
from sylvan.runtime.storage.api import PageStore

FORMAT = 1


class GroupLayout(msgspec.Struct, frozen=True):
    """The pages of a KV group, or recurrent state slots, as `PageMemory` exports them."""

    name: str
    kind: str
    page_bytes: int
    window: int = 0


class Manifest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Everything that the bytes of a page depend on, besides the tokens.

    Attributes:
        format: Version of names and records.
        version: Version of Sylvan.
        weights: Digest of the weight files.
        tokenizer: Digest of the tokenizer's files.
        dtype: dtype of weights and activations.
        quantization: Quantisation of weights.
        kv_dtype: dtype of KV.
        runner: The runner; kernels for other instruction sets round differently.
        attention: Attention backend, if the runner has several.
        context_len: Context length; some rotary tables depend on it.
        page_size: Tokens per page.
        groups: Page layouts, in page table order; recurrent states last.
        shards: Number of ranks that share the pages, and the rank; 0 in a store, which has all.
    """

    format: int = FORMAT
    version: str
    weights: str
    tokenizer: str
    dtype: str
    quantization: str
    kv_dtype: str
    runner: str
    attention: str
    context_len: int
    page_size: int
    groups: tuple[GroupLayout, ...]
    shards: tuple[int, int] = (1, 0)

    def encode(self) -> bytes:
        """Encode as canonical JSON, which people can read too."""
        return msgspec.json.format(msgspec.json.encode(self, order="sorted"), indent=2)

    @property
    def identity(self) -> bytes:
        """Return 32 bytes that identify it."""
        return hashlib.sha256(msgspec.json.encode(self, order="sorted")).digest()

    def differences(self, other: Manifest) -> Sequence[str]:
        """Return `field: ours, not theirs` for each differing field."""
        pairs = (
            (name, getattr(self, name), getattr(other, name)) for name in self.__struct_fields__
        )
        return [f"{name} is {theirs}, not {ours}" for name, ours, theirs in pairs if ours != theirs]


def decode_manifest(data: bytes) -> Manifest:
    """Decode the result of `Manifest.encode`.

    Raises:
        ConfigError: It is malformed, or of another version.
    """
    try:
        return msgspec.json.decode(data, type=Manifest)
    except MALFORMED as error:
        raise ConfigError(f"its manifest cannot be read: {error}") from None


def bind(store: PageStore, manifest: Manifest, where: str) -> None:
    """Bind a store to a manifest, or confirm that it is.

    Raises:
        ConfigError: It is bound to another one; the message names the differences and the cure.
        StoreError: It is unreachable.
    """
    try:
        found = decode_manifest(store.write_manifest(manifest.encode()))
        others = manifest.differences(found)
    except ConfigError as error:
        others = [str(error)]
    if others:
        raise ConfigError(
            f"{where} holds KV pages of another model or server: {'; '.join(others)}. Use another "
            f"place, or empty this one: sylvan cache prune --all {where}"
        )


def manifest_of(store: PageStore) -> Manifest | None:
    """Return what a store is bound to; None if nothing.

    Raises:
        ConfigError: Its manifest is unreadable.
        StoreError: It is unreachable.
    """
    data = store.read_manifest()
    return None if data is None else decode_manifest(data)
