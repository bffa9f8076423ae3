"""What the pages of a store were computed with. A store is bound to one manifest."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import msgspec

from sylvan.protocol.errors import ConfigError
from sylvan.protocol.malformed import MALFORMED
from sylvan.runtime.storage.api import PageStore

FORMAT = 1


class GroupLayout(msgspec.Struct, frozen=True):
    """The pages of a KV group, or the slots of recurrent state, as `PageMemory` exports them."""

    name: str
    kind: str
    page_bytes: int
    window: int = 0


class Manifest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """All that the bytes of a page depend on, beside the tokens. Two equal ones can share pages.

    Attributes:
        format: Of names and records.
        version: Of Sylvan.
        weights: Digest of the files that the weights were read from.
        tokenizer: Digest of the tokenizer's files.
        dtype: Of weights and activations.
        quantization: Of weights.
        kv_dtype: Of keys and values.
        runner: What computed them; kernels for other instructions round differently.
        attention: Backend of the attention, where the runner leaves a choice.
        context_len: Positions that the model was prepared for: some rotary tables depend on it.
        page_size: Tokens of a page.
        groups: Layouts of pages, in the order of page tables; states last.
        shards: Ranks that share the pages of the model, and which of them this is.
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
        """Canonical JSON, for people too."""
        return msgspec.json.format(msgspec.json.encode(self, order="sorted"), indent=2)

    @property
    def identity(self) -> bytes:
        """32 bytes that stand for it."""
        return hashlib.sha256(msgspec.json.encode(self, order="sorted")).digest()

    def differences(self, other: Manifest) -> Sequence[str]:
        """`field: ours, not theirs`, for each field that differs."""
        pairs = (
            (name, getattr(self, name), getattr(other, name)) for name in self.__struct_fields__
        )
        return [f"{name} is {theirs}, not {ours}" for name, ours, theirs in pairs if ours != theirs]


def decode_manifest(data: bytes) -> Manifest:
    """The reverse of `Manifest.encode`.

    Raises:
        ConfigError: it is no manifest, or one of another version.
    """
    try:
        return msgspec.json.decode(data, type=Manifest)
    except MALFORMED as error:
        raise ConfigError(f"its manifest cannot be read: {error}") from None


def bind(store: PageStore, manifest: Manifest, where: str) -> None:
    """Bind a store to a manifest, or find it bound to that one.

    Raises:
        ConfigError: it is bound to another one; names what differs and the way out.
        StoreError: it cannot be reached.
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
    """What a store is bound to; None if to nothing.

    Raises:
        ConfigError: its manifest cannot be read.
        StoreError: it cannot be reached.
    """
    data = store.read_manifest()
    return None if data is None else decode_manifest(data)
