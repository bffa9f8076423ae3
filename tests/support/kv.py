"""An executor that checks memory: every slot holds a digest of the history it stands for."""

from __future__ import annotations

import zlib
from collections import Counter
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from sylvan.protocol.requests import EmbedRequest, GenerateRequest
from sylvan.protocol.sampling import SamplingParams
from sylvan.runtime.cache.build import kv_cache
from sylvan.runtime.cache.manager import KVCacheManager
from sylvan.runtime.cache.radix import RadixCache
from sylvan.runtime.cache.types import Node
from sylvan.runtime.core.req import Batch, Req, Slice, SliceOutput, StepResult
from sylvan.runtime.executor.api import ExecutorCaps
from sylvan.runtime.sched.limits import Limits, Parts
from sylvan.runtime.sched.policies import schedule_policy
from sylvan.runtime.sched.scheduler import Scheduler
from sylvan.utils.clock import VirtualClock

VOCAB = 50


def digest(history: int, token: int, namespace: str) -> int:
    return zlib.crc32(f"{history},{token},{namespace}".encode())


def next_token(history: int, seed: int) -> int:
    """Depends on the whole history, so a wrong slot anywhere changes the output."""
    return zlib.crc32(f"{history}/{seed}".encode()) % VOCAB


def histories(request: GenerateRequest | EmbedRequest, outputs: Sequence[int] = ()) -> list[int]:
    """What the slots of the prompt and these outputs hold, after a 0."""
    found = [0]
    for position, token in enumerate([*request.input_ids.tolist(), *outputs]):
        found.append(digest(found[-1], token, space_at(request, position)))
    return found


def alone(request: GenerateRequest) -> list[int]:
    """What `request` generates when nothing else is there."""
    sampling, prompt_len = request.sampling, len(request.input_ids)
    stops = () if sampling.ignore_eos else (*request.eos_ids, *sampling.stop_token_ids)
    out: list[int] = []
    history = histories(request)[-1]
    while len(out) < (sampling.max_new_tokens or 0):
        token = next_token(history, sampling.sampling_seed or 0)
        out.append(token)
        if token in stops and len(out) > sampling.min_new_tokens:
            break
        history = digest(history, token, space_at(request, prompt_len + len(out) - 1))
    return out


class Later:
    def __init__(self, result: StepResult) -> None:
        self._result = result

    def done(self) -> bool:
        return True

    def wait(self) -> StepResult:
        return self._result


class CheckingExecutor:
    """Runs slices in order over a real page table; asserts that every slot read is right."""

    def __init__(self, num_pages: int, page_size: int) -> None:
        self.caps = ExecutorCaps(max_batch_tokens=10**6, max_running_reqs=10**6)
        self.page_size = page_size
        self.memory = np.full(num_pages * page_size, -1, np.int64)
        self.sampled: dict[tuple[str, int], int] = {}
        self.computed: list[tuple[str, int, int]] = []
        self.steps = 0
        self.states: dict[int, int] = {0: 0}
        self.watch: Callable[[Batch], None] = lambda batch: None

    def launch(self, batch: Batch) -> Later:
        self.watch(batch)
        self.steps += bool(batch.slices)
        size = self.page_size
        for source, target, count in batch.copies:
            assert count < size
            self.memory[target * size : target * size + count] = self.memory[
                source * size : source * size + count
            ]
        ids = [self._ids(s) for s in batch.slices]
        self._go_on(batch)
        for piece, tokens in zip(batch.slices, ids, strict=True):
            self._store(piece, tokens)
        return Later(StepResult([self._output(s) for s in batch.slices]))

    def close(self) -> None:
        pass

    def _go_on(self, batch: Batch) -> None:
        """Recurrent states: each must stand for exactly the tokens before its slice."""
        states = [(s, s.req.kv.state) for s in batch.slices if s.req.kv.state is not None]
        for piece, state in states:
            if piece.start == state.begun:
                self.states[state.slot] = self.states.get(state.source, 0)
        written: list[int] = []
        for piece, state in states:
            request = piece.req.request
            after = histories(request, self._history(piece)[len(request.input_ids) :])
            assert self.states[state.slot] == after[piece.start], "a state of another history"
            self.states[state.slot] = after[piece.stop]
            assert state.at == piece.stop
            for tokens, slot in state.saves:
                assert piece.start < tokens <= piece.stop
                self.states[slot] = after[tokens]
            written += [state.slot, *(slot for _, slot in state.saves)]
        assert 0 not in written
        assert len(set(written)) == len(written), "two states share a slot"

    def _ids(self, piece: Slice) -> list[int]:
        return self._history(piece)[piece.start :]

    def _history(self, piece: Slice) -> list[int]:
        """All ids up to the end of the slice; the scheduler may not know the last ones yet."""
        req = piece.req
        known = min(piece.stop, len(req.tokens))
        ids = req.tokens.view(0, known).tolist()
        return ids + [self.sampled[req.rid, at] for at in range(known, piece.stop)]

    def _slot(self, req: Req, position: int) -> int:
        pages = req.kv.view()
        return int(pages[position // self.page_size]) * self.page_size + position % self.page_size

    def _store(self, piece: Slice, ids: list[int]) -> None:
        req = piece.req
        assert req.kv is not None
        assert len(set(req.kv.view().tolist())) == req.kv.num_pages
        assert 0 not in req.kv.view()
        history = int(self.memory[self._slot(req, piece.start - 1)]) if piece.start else 0
        for position, token in enumerate(ids, piece.start):
            history = digest(history, token, space_at(req.request, position))
            self.memory[self._slot(req, position)] = history
        self.computed.append((req.rid, piece.start, piece.stop))

    def _output(self, piece: Slice) -> SliceOutput:
        if not piece.samples:
            return SliceOutput()
        req, history = piece.req, 0
        for position, token in enumerate(self._history(piece)):
            history = digest(history, token, space_at(req.request, position))
            assert self.memory[self._slot(req, position)] == history, "a slot holds other KV"
        if isinstance(req.request, EmbedRequest):
            return SliceOutput(vector=np.array([history]))
        token = next_token(history, req.request.sampling.sampling_seed)
        self.sampled[req.rid, piece.stop] = token
        return SliceOutput((token,))


class World:
    """A scheduler over checked memory, and what it told its clients."""

    def __init__(
        self,
        *,
        pages: int = 100,
        page_size: int = 4,
        policy: str = "fcfs",
        eviction: str = "lru",
        prefix: bool = True,
        features: tuple = (),
        states: int = 0,
        tenant_weights: Mapping[str, float] | None = None,
        **limits,
    ) -> None:
        kind = "radix" if prefix else "none"
        self.cache = kv_cache(pages + 1, page_size, kind, eviction, states)
        self.allocator = self.cache._allocator
        self.tree, self.states = self.cache.tree, self.cache.states
        self.executor = CheckingExecutor(pages + 1, page_size)
        self.clock = VirtualClock(100.0)
        self.tokens: dict[str, list[int]] = {}
        self.finish: dict[str, object] = {}
        self.outputs: dict[str, list] = {}
        parts = Parts(
            cache=self.cache,
            executor=self.executor,
            policy=schedule_policy(policy),
            emit=self._emit,
            features=features,
            clock=self.clock,
            tenant_weights=tenant_weights or {},
        )
        limits = {"max_batch_tokens": 16, "chunk_tokens": 16, "max_running_reqs": 4} | limits
        self.scheduler = Scheduler(parts, Limits(**limits))

    def _emit(self, outputs) -> None:
        for out in outputs:
            assert out.rid not in self.finish, "an output after the finish"
            self.tokens.setdefault(out.rid, []).extend(out.token_ids)
            self.outputs.setdefault(out.rid, []).append(out)
            if out.finish:
                self.finish[out.rid] = out.finish

    def run(self, steps: int = 5000) -> None:
        for _ in range(steps):
            self.clock.advance(0.01)
            if not self.scheduler.step() and self.scheduler.idle:
                return
        raise AssertionError(f"not done after {steps} steps")

    def check(self) -> None:
        """Each page and state slot has exactly one owner; the tree keeps its promises."""
        check_memory(self.scheduler, self.cache)

    def check_empty(self) -> None:
        """Nothing is held once all requests are done."""
        self.check()
        free = self.allocator.free_pages + self.tree.evictable_pages
        assert free == self.allocator.num_pages
        assert self.scheduler.load().num_used_tokens == 0


def holders_in(scheduler: Scheduler) -> list[Req]:
    """Requests that have memory, those included that have ended."""
    ended = [*scheduler._closing.values(), *scheduler._held.values()]
    return [req for req in [*scheduler.running, *ended] if req.kv is not None]


def check_memory(scheduler: Scheduler, cache: KVCacheManager) -> None:
    """Each page and state slot has exactly one owner; the tree keeps its promises."""
    allocator, tree, states = cache._allocator, cache.tree, cache.states
    owners = np.zeros(allocator.num_pages + 1, np.int64)
    owners += allocator.free_mask()
    assert owners[0] == 1
    assert all(req.kv is not None for req in scheduler.running)
    holders = holders_in(scheduler)
    for req in holders:
        owners[req.kv.pages[req.kv.shared : req.kv.num_pages]] += 1
    if isinstance(tree, RadixCache):
        check_tree(tree, owners)
        check_locks(tree, [req.kv.node for req in holders])
    assert (owners == 1).all(), "a page is lost or has two owners"
    if states is not None:
        held = [req.kv.state.slot for req in holders]
        kept = list(tree.states.holders) if isinstance(tree, RadixCache) else []
        assert len({*held, *kept}) == len(held) + len(kept)
        total = states.free_slots + len(held) + len(kept)
        assert total == states.num_slots, "a state slot is lost or has two owners"


def check_tree(tree: RadixCache, owners: np.ndarray | None = None) -> None:
    """The invariants of `RadixCache`, by its own words."""
    evictable = total = nodes = 0
    stack = list(tree.roots().values())
    for root in stack:
        assert root.children
    while stack:
        node = stack.pop()
        assert list(node.children) != [] or node.parent is not None
        assert node.order == (sorted(node.children) if tree.page_size > 1 else [])
        for name, child in node.children.items():
            assert name
            assert child.parent is node
            assert child.start == node.stop
            assert node.locks >= child.locks or node.parent is None
            assert len(child.pages) == -(-len(child.tokens) // tree.page_size)
            assert not child.children or len(child.tokens) % tree.page_size == 0
            evictable += 0 if child.locks else len(child.pages)
            total, nodes = total + len(child.pages), nodes + 1
            if owners is not None:
                owners[child.pages] += 1
            stack.append(child)
    assert (evictable, total, nodes) == (tree.evictable_pages, tree.total_pages, tree.num_nodes)


def check_locks(tree: RadixCache, ends: list[Node]) -> None:
    """Each node is locked once for every request whose prefix ends at or below it."""
    wanted = Counter()
    for end in ends:
        node = end
        while node.parent is not None:
            wanted[node] += 1
            node = node.parent
    stack = [child for root in tree.roots().values() for child in root.children.values()]
    while stack:
        node = stack.pop()
        stack.extend(node.children.values())
        assert node.locks == wanted.pop(node, 0), "a lock is lost, or left behind"
    assert not wanted, "a request uses a node that is not in the tree"


def space_at(request: GenerateRequest | EmbedRequest, position: int) -> str:
    """What sets a position apart: the adapter, and the salt but in a start declared public."""
    if isinstance(request, EmbedRequest):
        return f"embed:{request.cache_salt}"
    shared = position < request.shared_tokens
    salt = "" if shared else request.cache_salt
    return f"{request.lora}:{salt}" if request.lora else salt


def request(rid: str, ids, new: int = 4, **fields) -> GenerateRequest:
    sampling = fields.pop("sampling", None) or SamplingParams(
        max_new_tokens=new, sampling_seed=fields.pop("seed", 0)
    )
    return GenerateRequest(
        rid=rid,
        input_ids=np.array(ids, np.int32),
        output_ids=np.array(fields.pop("output_ids", ()), np.int32),
        sampling=sampling,
        **fields,
    )
