"""Encryption at rest, and other secrets derived from the operator's key."""

from __future__ import annotations

import hashlib
import hmac
import importlib
import secrets
from pathlib import Path
from typing import Any

from sylvan.config.tree import TiersConfig
from sylvan.protocol.errors import ConfigError

_NONCE_BYTES = 12
MIN_KEY_BYTES = 32


class Cipher:
    """AES-256-GCM with a fresh nonce per page; the page's name is authenticated too."""

    def __init__(self, key: bytes) -> None:
        """`key`: the result of `read_key`.

        Raises:
            ConfigError: The package `cryptography` is not installed.
        """
        try:
            ciphers = importlib.import_module("cryptography.hazmat.primitives.ciphers.aead")
            self._invalid = importlib.import_module("cryptography.exceptions").InvalidTag
        except ImportError:
            raise ConfigError(
                "tiers.key_file needs another package: pip install 'sylvan[encrypt]'"
            ) from None
        self._aead: Any = ciphers.AESGCM(derived(key, "pages"))

    def seal(self, payload: bytes | memoryview, name: bytes) -> bytes:
        """Return nonce, ciphertext and tag."""
        nonce = secrets.token_bytes(_NONCE_BYTES)
        return nonce + self._aead.encrypt(nonce, payload, name)

    def open(self, sealed: memoryview, name: bytes) -> bytes | None:
        """Decrypt what was sealed under that name; None if it was not, or with another key."""
        if len(sealed) <= _NONCE_BYTES:
            return None
        try:
            return self._aead.decrypt(bytes(sealed[:_NONCE_BYTES]), sealed[_NONCE_BYTES:], name)
        except self._invalid:
            return None


def read_key(path: Path) -> bytes:
    """Read the operator's key: the bytes of a file, without surrounding white space.

    Raises:
        ConfigError: It is unreadable or too short, or other users can read it.
    """
    try:
        key, mode = path.read_bytes().strip(), path.stat().st_mode
    except OSError as error:
        why = error.strerror or str(error)
        raise ConfigError(f"tiers.key_file: {str(path)!r} cannot be read: {why}") from None
    if len(key) < MIN_KEY_BYTES:
        raise ConfigError(
            f"tiers.key_file: {str(path)!r} has {len(key)} bytes, a key has at least "
            f"{MIN_KEY_BYTES}; make one with `openssl rand -hex 32 > {path}`"
        )
    if mode & 0o077:
        raise ConfigError(
            f"tiers.key_file: {str(path)!r} can be read by others; `chmod 600 {path}`"
        )
    return key


def derived(key: bytes, purpose: str) -> bytes:
    """Derive 32 bytes for one purpose: HKDF-SHA256 (RFC 5869) with one block."""
    pseudorandom = hmac.new(b"sylvan kv tiers", key, hashlib.sha256).digest()
    return hmac.new(pseudorandom, purpose.encode() + b"\x01", hashlib.sha256).digest()


def tenants_secret(settings: TiersConfig | None) -> bytes | None:
    """Return the secret for tenants' salts, so that they are stable across restarts.

    None: use a random one; nothing outlives the server.

    Raises:
        ConfigError: There is a key, but it is unreadable.
    """
    if settings is None or settings.key_file is None:
        return None
    return derived(read_key(Path(settings.key_file)), "tenants")
