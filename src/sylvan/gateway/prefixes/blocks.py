"""An exact index of cached blocks: which worker holds which tokens, according to cache events."""

from __future__ import annotations

import hashlib
import logging
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from sylvan.gateway.prefixes.events import BlockRemoved, BlockStored, CacheEvent, Hash
from sylvan.gateway.prefixes.nodes import below

logger = logging.getLogger(__name__)

ID_BYTES = 4
BLOCK_BYTES = 400
"""Approximate memory of a block without its tokens and holders, in bytes."""
HOLDER_BYTES = 160
"""Approximate memory of one worker's entry for a block, in bytes."""


class _Block:
    """A block of tokens below its parent block.

    A worker may hold a block without its parent; the block is unusable until the parent returns.
    """

    __slots__ = ("children", "holders", "key", "parent", "promised")

    def __init__(self, key: bytes, parent: _Block | None) -> None:
        self.key = key
        self.parent = parent
        self.children: dict[bytes, _Block] = {}
        self.holders: dict[str, int] = {}  # number of hashes that map here
        self.promised: dict[str, int] = {}

    def holds(self, worker: str) -> bool:
        return worker in self.holders or worker in self.promised


@dataclass(slots=True)
class _View:
    """The cache of one worker, according to its events.

    Attributes:
        block_size: Tokens per block; 0: unknown.
        blocks: Block of each hash, and the media that hold it.
    """

    block_size: int = 0
    blocks: dict[Hash, tuple[_Block, set[str | None]]] = field(
        default_factory=dict[Hash, tuple[_Block, set[str | None]]]
    )


class Promise:
    """A prompt that a worker is computing; closed when the request finishes.

    By then, cache events have reported the resulting blocks.
    """

    __slots__ = ("_index", "_path", "_worker")

    def __init__(self, index: BlockIndex, worker: str, path: Sequence[_Block]) -> None:
        self._index = index
        self._worker = worker
        self._path = path

    def close(self) -> None:
        """Withdraw the promise; closing again has no effect."""
        for block in reversed(self._path):
            block.promised[self._worker] -= 1
            if not block.promised[self._worker]:
                del block.promised[self._worker]
            self._index.prune(block)
        self._path = ()


class BlockIndex:
    """Blocks of tokens by prefix, with the workers that hold each.

    It contains only workers whose events are known from the start (`begin`); nothing exact is known
    of the others.

    Args:
        max_bytes: Limit of its estimated memory. At the limit, the worker with the most blocks is
            dropped.

    Attributes:
        num_blocks: Number of blocks.
        num_bytes: Estimated memory.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._roots: dict[int, _Block] = {}  # root by block size
        self._views: dict[str, _View] = {}
        self.num_blocks = 0
        self.num_bytes = 0

    def begin(self, worker: str) -> None:
        """Start to track a worker whose cache is empty."""
        self.drop(worker)
        self._views[worker] = _View()

    def drop(self, worker: str) -> None:
        """Stop tracking a worker: its cache is no longer known."""
        view = self._views.pop(worker, None)
        if view is not None:
            self._clear(worker, view)

    def knows(self, worker: str) -> bool:
        """Whether a worker's cache is known exactly."""
        view = self._views.get(worker)
        return view is not None and view.block_size > 0

    def apply(self, worker: str, event: CacheEvent, *, plain: bool) -> None:
        """Apply an event of a tracked worker.

        Args:
            worker: ID of the worker.
            event: The event.
            plain: Its hashes are Sylvan's, which distinguish plain prompts from those of adapters,
                tenants and images. The latter are left out: equal tokens are not equal there.
        """
        view = self._views.get(worker)
        if view is None:
            return
        if isinstance(event, BlockStored):
            self._store(worker, view, event, plain=plain)
        elif isinstance(event, BlockRemoved):
            for name in event.block_hashes:
                self._remove(worker, view, name, event.medium)
        else:
            self._clear(worker, view)

    def matched(self, token_ids: bytes) -> Mapping[str, int]:
        """Return how many tokens of a prompt each worker holds; 0 if it holds none.

        Args:
            token_ids: The prompt, as int32.
        """
        found: dict[str, int] = {}
        for size, root in self._roots.items():
            holding = {name for name, view in self._views.items() if view.block_size == size}
            found.update(_walk(root, token_ids, size * ID_BYTES, holding))
        return found

    def promise(self, worker: str, token_ids: bytes) -> Promise | None:
        """Record that a worker is computing a prompt; None if its blocks are unknown."""
        view = self._views.get(worker)
        if view is None or not view.block_size:
            return None
        step = view.block_size * ID_BYTES
        block = self._roots[view.block_size]
        path: list[_Block] = []
        for start in range(0, len(token_ids) - step + 1, step):
            block = self._child(block, token_ids[start : start + step])
            block.promised[worker] = block.promised.get(worker, 0) + 1
            path.append(block)
        return Promise(self, worker, path)

    def prune(self, block: _Block) -> None:
        """Remove a block without holders, and ancestors that only existed for it."""
        while block.parent is not None and not (block.holders or block.promised or block.children):
            parent, block.parent = block.parent, None
            del parent.children[block.key]
            self.num_blocks -= 1
            self.num_bytes -= BLOCK_BYTES + len(block.key)
            block = parent

    def _store(self, worker: str, view: _View, event: BlockStored, *, plain: bool) -> None:
        size = event.block_size
        if size < 1 or len(event.token_ids) < size * len(event.block_hashes):
            return
        if view.block_size not in (0, size):
            self._clear(worker, view)
        view.block_size = size
        root = self._roots.setdefault(size, _Block(b"", None))
        try:
            data = array("i", event.token_ids).tobytes()
        except (OverflowError, TypeError):
            return
        step, block = size * ID_BYTES, root
        if event.parent_block_hash is not None:
            before = view.blocks.get(event.parent_block_hash)
            if before is None:
                return  # child of a block that was left out
            block = before[0]
        elif plain and event.block_hashes and event.block_hashes[0] != first_hash(data[:step]):
            return
        for i, name in enumerate(event.block_hashes):
            block = self._child(block, data[i * step : (i + 1) * step])
            known = view.blocks.get(name)
            if known is None:
                view.blocks[name] = (block, {event.medium})
                block.holders[worker] = block.holders.get(worker, 0) + 1
                self.num_bytes += HOLDER_BYTES
            else:
                known[1].add(event.medium)
        self._bound()

    def _child(self, parent: _Block, key: bytes) -> _Block:
        child = parent.children.get(key)
        if child is None:
            child = parent.children[key] = _Block(key, parent)
            self.num_blocks += 1
            self.num_bytes += BLOCK_BYTES + len(key)
        return child

    def _remove(self, worker: str, view: _View, name: Hash, medium: str | None) -> None:
        known = view.blocks.get(name)
        if known is None:
            return
        block, media = known
        media.discard(medium)
        if not media:
            del view.blocks[name]
            self._release(worker, block)

    def _release(self, worker: str, block: _Block) -> None:
        self.num_bytes -= HOLDER_BYTES
        block.holders[worker] -= 1
        if not block.holders[worker]:
            del block.holders[worker]
        self.prune(block)

    def _clear(self, worker: str, view: _View) -> None:
        blocks = [block for block, _ in view.blocks.values()]
        view.blocks.clear()
        for block in blocks:
            self._release(worker, block)

    def _bound(self) -> None:
        while self.num_bytes > self._max_bytes and self._views:
            largest = max(self._views, key=lambda name: len(self._views[name].blocks))
            logger.warning("the cache events of worker %s take too much memory", largest)
            self.drop(largest)

    def check(self) -> None:
        """Assert the invariants of this module; for tests."""
        blocks = [block for root in self._roots.values() for block in below(root)]
        holds = sum(len(view.blocks) for view in self._views.values())
        assert self.num_blocks == len(blocks)
        size = sum(BLOCK_BYTES + len(block.key) for block in blocks)
        assert self.num_bytes == size + HOLDER_BYTES * holds
        assert holds == sum(sum(block.holders.values()) for block in blocks)
        for block in blocks:
            assert block.parent is not None
            assert block.parent.children[block.key] is block
            assert block.holders or block.promised or block.children


def first_hash(token_ids: bytes) -> int:
    """Return Sylvan's hash of the first block of a prompt without namespace and images."""
    digest = hashlib.blake2b(bytes(8) + token_ids, digest_size=8).digest()
    return int.from_bytes(digest, "little", signed=True)


def _walk(root: _Block, token_ids: bytes, step: int, holding: set[str]) -> dict[str, int]:
    """Return the tokens that each worker holds from the start of a prompt, without gaps."""
    found: dict[str, int] = {}
    block, start = root, 0
    while holding:
        child = block.children.get(token_ids[start : start + step])
        if child is None or start + step > len(token_ids):
            break
        if not holding <= child.holders.keys():
            lost = {worker for worker in holding if not child.holds(worker)}
            found.update(dict.fromkeys(lost, start // ID_BYTES))
            holding = holding - lost
        block, start = child, start + step
    found.update(dict.fromkeys(holding, start // ID_BYTES))
    return found
