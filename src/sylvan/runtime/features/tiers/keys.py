"""Names of pages: digests chained over the prefix, so that a name identifies all tokens before it.

The chain starts with the manifest and the namespace. It includes tenants' salts and media digests:
without a salt, the name of a page can neither be computed nor requested.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

from sylvan.runtime.cache.matching import page_name
from sylvan.runtime.cache.types import TENANT, CacheKey, MediaSpan

KV, STATE = "kv", "state"
_SPACE_CHARS = 16


def window_kind(index: int) -> str:
    """Return the kind of a window group's pages; `index` among the window groups."""
    return f"w{index}"


class PageNames:
    """Computes the names of pages under one manifest.

    Args:
        identity: `Manifest.identity`, and what else separates pages.
        page_size: Tokens per page.
    """

    def __init__(self, identity: bytes, page_size: int) -> None:
        self._identity, self._page_size = identity, page_size

    def names(self, key: CacheKey, first: int, stop: int, before: str = "") -> Sequence[str]:
        """Return the first group's names of the whole pages [first, stop) of a prefix.

        `before`, the name of the preceding page, saves hashing the tokens before it.
        """
        size = self._page_size
        start = first if before else 0
        digest = digest_of(before) if before else self._root(key.namespace)
        found: list[str] = []
        for page in range(start, stop):
            at = page * size
            digest = hashlib.sha256(digest + page_name(key, at, stop * size, size)).digest()
            if page >= first:
                space = self._space(key.namespace, key.media, at)
                found.append(f"{space}/{digest.hex()}.{KV}")
        return found

    def _root(self, namespace: str) -> bytes:
        return hashlib.sha256(b"prefix" + self._identity + namespace.encode()).digest()

    def _space(self, namespace: str, media: tuple[MediaSpan, ...], at: int) -> str:
        """Return the quota's space: the namespace, or the tenant of a position."""
        owner = namespace.encode()
        for span in media:
            if span.start <= at < span.stop and span.digest.startswith(TENANT):
                owner += b"\0" + span.digest
        found = hashlib.sha256(b"space" + self._identity + owner)
        return found.hexdigest()[:_SPACE_CHARS]


def digest_of(name: str) -> bytes:
    """Return the digest in a name."""
    return bytes.fromhex(name[_SPACE_CHARS + 1 : _SPACE_CHARS + 65])


def sibling(name: str, kind: str) -> str:
    """Return the name of other data of the same prefix."""
    return f"{name.rpartition('.')[0]}.{kind}"
