"""Keeps what is needed to explain recent requests to their senders."""

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
    """A request when it started."""

    key: CacheKey
    cached: int
    reason: Reason
    loaded: int = 0  # of those cached, from a store
    from_host: int = 0  # of those cached, from the tier in host memory


class CacheExplain(Capability):
    """Notes the fate of each prompt as it starts; answers questions about the newest ones."""

    def __init__(self, tree: RadixCache) -> None:
        self._tree = tree
        self._records: OrderedDict[str, Record] = OrderedDict()
        self._kept_tokens = 0
        self._prompts: deque[Hashes] = deque(maxlen=MAX_REQUESTS)

    def on_start(self, piece: Slice) -> None:
        if piece.req.kv and not piece.req.retractions:
            self._keep(piece.req, piece.start)

    def answer(self, command: Inspection) -> Mapping[str, Any] | None:
        """Answer a question that came from outside; None if there is nothing to tell."""
        match command:
            case CacheTree(max_nodes=max_nodes, owner=owner):
                return self.tree(max_nodes, owner)
            case CacheRequest(rid=rid, owner=owner):
                return self.explain(rid, owner)
            case CachePrompts():
                return {"prompts": [hashes.tolist() for hashes in self.prompts()]}

    def explain(self, rid: str, owner: str | None = None) -> Mapping[str, Any] | None:
        """What became of the prompt of `rid`; None if it is not (or no longer) known.

        With an `owner`, requests of others are not known, and what others hold reads as never seen.
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
        """Bounded by `MAX_NODES`."""
        return tree_view(self._tree, max_nodes=min(max_nodes, MAX_NODES), owner=owner)

    def prompts(self) -> Sequence[Hashes]:
        """Block hashes of recent prompts, oldest first: what `hit_curve` takes."""
        return tuple(self._prompts)

    def _newest(self, rid: str, owner: str | None) -> Record | None:
        """The newest of `owner` under that rid: samples and replays have records of their own."""
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
