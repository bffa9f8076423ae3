"""Looks up requests in the prefix cache."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence

from sylvan.protocol.requests import EmbedRequest
from sylvan.runtime.cache.by_rank import KVMemory
from sylvan.runtime.cache.prefix import ANY
from sylvan.runtime.cache.types import (
    CacheKey,
    MediaSpan,
    common_prefix_len,
    media_divergence,
    tenant_span,
)
from sylvan.runtime.core.req import Req
from sylvan.runtime.sched.capability import Hooks


class Lookup:
    """Answers questions about cached tokens of requests, cheaply enough for each step."""

    def __init__(self, cache: KVMemory, hooks: Hooks) -> None:
        self._tree = cache.tree
        self._roots = cache.tree.roots()
        self._hooks = hooks

    def key(self, req: Req) -> CacheKey:
        """Cache key of all known tokens of `req`; the same object until tokens are added."""
        key = req.key
        if key is None or len(key.tokens) != req.tokens.length:
            key = req.key = _key(req, self._hooks.cache_namespace(req))
            key.first = self._tree.first_page(key)
        return key

    def limit(self, req: Req) -> int:
        """The longest prefix that may come from the cache; at least one token is computed."""
        return self._hooks.cache_limit(req, req.tokens.length + req.pending - 1)

    def cached_tokens(self, req: Req, *, on_device: bool = False) -> int:
        """Number of cached tokens of `req`, optionally only those on the device."""
        key = req.key
        if key is None or len(key.tokens) != req.tokens.length:
            key = self.key(req)
        limit = req.tokens.length + req.pending - 1  # `limit`, inlined for speed
        if self._hooks.limits_cache:
            limit = self._hooks.cache_limit(req, limit)
        return self._tree.peek(key, limit, 0 if on_device else ANY)

    def likely_hits(self, reqs: Iterable[Req]) -> Iterator[Req]:
        """Return the requests whose first page is cached.

        A cheap test before `cached_tokens`; hits shorter than a page are ignored.
        """
        root_of = self._roots.get
        for req in reqs:
            key = req.key or self.key(req)
            root = root_of(key.namespace)
            if root is not None and key.first in root.children:
                yield req

    def could_share_more(self, req: Req, leaders: Sequence[Req], at_least: int) -> bool:
        """Whether `req` could reuse much more of a running request's prompt than is cached."""
        key, known = self.key(req), None
        for leader in leaders:
            if leader.kv is None or leader.kv.key.namespace != key.namespace:
                continue
            n = min(leader.prompt_len, req.prompt_len)
            shared = common_prefix_len(leader.tokens.view(0, n), req.tokens.view(0, n))
            theirs = leader.kv.key.media
            if key.media or theirs:
                shared = media_divergence(theirs, key.media, 0, shared)
            if shared < at_least:
                continue
            known = self.cached_tokens(req) if known is None else known
            if shared - known >= at_least:
                return True
        return False


def _key(req: Req, namespace: str) -> CacheKey:
    request = req.request
    tokens = req.tokens.view(0, len(req.tokens))
    media = tuple(MediaSpan(item.start, item.stop, item.digest) for item in request.media)
    if isinstance(request, EmbedRequest):
        return CacheKey(tokens, f"embed:{request.cache_salt}{namespace}", media)
    if request.cache_salt and request.shared_tokens:
        tenant = tenant_span(request.shared_tokens, request.cache_salt)
        return CacheKey(tokens, f"{request.lora or ''}:{namespace}", (*media, tenant))
    return CacheKey(tokens, f"{request.lora or ''}:{request.cache_salt}{namespace}", media)


# clients choose the rest of the namespace, which might resemble an adapter's
_OTHERS = (":", "embed:")
_ADAPTER = re.compile(r"(?s)(.+?@[0-9a-f]{16}):")


def adapter_of(namespace: str) -> str | None:
    """The adapter id (name, `@`, digest) in a key's namespace; None without one."""
    found = None if namespace.startswith(_OTHERS) else _ADAPTER.match(namespace)
    return None if found is None else found[1]
