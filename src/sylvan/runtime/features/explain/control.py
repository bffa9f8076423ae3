"""Records what is needed to explain the cache hits of recent requests."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from sylvan.protocol.arrays import IntArray
from sylvan.protocol.messages import CachePrompts, CacheRequest, CacheTree, Inspection
from sylvan.protocol.names import rid_of
from sylvan.runtime.cache.curve import Hashes, block_hashes
from sylvan.runtime.cache.radix import RadixCache
from sylvan.runtime.cache.types import CacheKey
from sylvan.runtime.cache.view import Reason, divergence, owned, tree_view, why_missed
from sylvan.runtime.core.req import Req, Slice
from sylvan.runtime.sched.capability import Capability

MAX_REQUESTS = 1024
MAX_KEPT_TOKENS = 4 << 20
MAX_NODES = 10_000


@dataclass(frozen=True, slots=True, eq=False)
class Record:
    """A request at its start."""

    key: CacheKey
    cached: int
    reason: Reason
    loaded: int = 0  # cached tokens that came from a store
    from_host: int = 0  # cached tokens that came from the host tier


class CacheExplain(Capability):
    """Records each prompt as it starts, and answers queries about the newest ones."""

    def __init__(self, tree: RadixCache) -> None:
        self._tree = tree
        self._records: OrderedDict[str, Record] = OrderedDict()
        self._kept_tokens = 0
        self._prompts: deque[Hashes] = deque(maxlen=MAX_REQUESTS)

    def on_start(self, piece: Slice) -> None:
        if piece.req.kv and not piece.req.retractions:
            self._keep(piece.req, piece.start)

    def answer(self, command: Inspection) -> Mapping[str, Any] | None:
        """Answer a query of a route; None if there is no answer."""
        match command:
            case CacheTree(max_nodes=max_nodes, owner=owner):
                return self.tree(max_nodes, owner)
            case CacheRequest(rid=rid, owner=owner):
                return self.explain(rid, owner)
            case CachePrompts():
                return {"prompts": [hashes.tolist() for hashes in self.prompts()]}

    def explain(self, rid: str, owner: str | None = None) -> Mapping[str, Any] | None:
        """Explain the prompt of `rid`; None if it is unknown, or no longer known.

        With an `owner`, requests of others are unknown, and their prefixes read as never seen.
        """
        record = self._newest(rid, owner)
        if record is None:
            return None
        found = divergence(self._tree, record.key, record.cached, owner)
        hidden = owner is not None and record.reason == "other_namespace"
        return {
            "rid": rid,
            "prompt_tokens": len(record.key.tokens),
            "cached_tokens": record.cached,
            "tiers": {
                "device": record.cached - record.loaded - record.from_host,
                "host": record.from_host,
                "storage": record.loaded,
            },
            "reason": "never_seen" if hidden else record.reason,
            "divergence": asdict(found),
        }

    def tree(self, max_nodes: int, owner: str | None = None) -> Mapping[str, Any]:
        """Return the prefix tree, at most `MAX_NODES` nodes."""
        return tree_view(self._tree, max_nodes=min(max_nodes, MAX_NODES), owner=owner)

    def prompts(self) -> Sequence[Hashes]:
        """Return the block hashes of recent prompts, oldest first, for `hit_curve`."""
        return tuple(self._prompts)

    def _newest(self, rid: str, owner: str | None) -> Record | None:
        """Return the owner's newest record of that ID: samples and replays have their own."""
        for name, record in reversed(self._records.items()):
            if rid_of(name) == rid and owned(record.key.namespace, record.key.media, owner):
                return record
        return None

    def _keep(self, req: Req, cached: int) -> None:
        assert req.kv is not None
        tokens: IntArray = req.request.input_ids
        key = CacheKey(tokens, req.kv.key.namespace, req.kv.key.media)
        cached = min(cached, len(tokens))
        loaded = min(req.kv.loaded, cached)
        self._records[req.rid] = Record(
            key,
            cached,
            why_missed(self._tree, key, cached, len(tokens) - 1),
            loaded,
            min(req.kv.from_host, cached - loaded),
        )
        self._prompts.append(block_hashes(key))
        self._kept_tokens += len(tokens)
        while len(self._records) > MAX_REQUESTS or self._kept_tokens > MAX_KEPT_TOKENS:
            _, old = self._records.popitem(last=False)
            self._kept_tokens -= len(old.key.tokens)
