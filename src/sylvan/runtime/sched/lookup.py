"""What of a request the prefix cache holds."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from sylvan.protocol.requests import EmbedRequest, GenerateRequest
from sylvan.runtime.cache.manager import KVCacheManager
from sylvan.runtime.cache.types import CacheKey, tenant_span
from sylvan.runtime.core.req import Req
from sylvan.runtime.sched.outputs import PromptLogprobs


class Lookup:
    """Asks the cache about requests; many that wait are asked about at each step."""

    def __init__(
        self, cache: KVCacheManager, prompt_logprobs: PromptLogprobs, *, pool_all: bool
    ) -> None:
        self._tree = cache.tree
        self._roots = cache.tree.roots()
        self._prompt_logprobs = prompt_logprobs
        self._pool_all = pool_all

    def key(self, req: Req) -> CacheKey:
        """Of all tokens of `req` that are known; the same object until there are more."""
        key = req.key
        if key is None or len(key.tokens) != req.tokens.length:
            key = req.key = _key(req)
            key.first = self._tree.first_page(key)
        return key

    def limit(self, req: Req) -> int:
        """Longest prefix that may come from the cache: one token is always computed."""
        request = req.request
        limit = req.tokens.length + req.pending - 1
        if isinstance(request, EmbedRequest):
            return 0 if self._pool_all else limit
        if request.logprobs is None:
            return limit
        start = self._prompt_logprobs.wanted(req)
        return limit if start is None else min(limit, start)

    def cached_tokens(self, req: Req) -> int:
        """Tokens of `req` that the cache holds now."""
        key, request = req.key, req.request
        length = req.tokens.length
        if key is None or len(key.tokens) != length:
            key = self.key(req)
        plain = isinstance(request, GenerateRequest) and request.logprobs is None
        return self._tree.peek(key, length + req.pending - 1 if plain else self.limit(req))

    def likely_hits(self, reqs: Iterable[Req]) -> Iterator[Req]:
        """Those whose first page is cached.

        A cheap test before `cached_tokens`; a hit inside the first page is not looked for.
        """
        root_of = self._roots.get
        for req in reqs:
            key = req.key or self.key(req)
            root = root_of(key.namespace)
            if root is not None and key.first in root.children:
                yield req


def _key(req: Req) -> CacheKey:
    request = req.request
    tokens = req.tokens.view(0, len(req.tokens))
    if isinstance(request, EmbedRequest):
        return CacheKey(tokens, f"embed:{request.cache_salt}")
    if request.cache_salt and request.shared_tokens:
        apart = (tenant_span(request.shared_tokens, request.cache_salt),)
        return CacheKey(tokens, f"{request.lora or ''}:", apart)
    return CacheKey(tokens, f"{request.lora or ''}:{request.cache_salt}")
