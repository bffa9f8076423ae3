"""An executor that checks memory: every slot holds a digest of the tokens up to it."""

from __future__ import annotations

import zlib
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from sylvan.protocol.requests import EmbedRequest, GenerateRequest
from sylvan.protocol.sampling import SamplingParams
from sylvan.runtime.cache.build import kv_cache
from sylvan.runtime.cache.by_rank import KVMemory
from sylvan.runtime.cache.groups import KVGroup
from sylvan.runtime.cache.radix import RadixCache
from sylvan.runtime.cache.residency import Tier, TierPolicy
from sylvan.runtime.cache.types import Node
from sylvan.runtime.core.req import Batch, Req
from sylvan.runtime.core.states import StateWork
from sylvan.runtime.core.step import SliceOutput, StepPlan, StepResult
from sylvan.runtime.executor.api import ExecutorCaps
from sylvan.runtime.executor.capability import CapabilityWorker
from sylvan.runtime.features.standard import standard_capabilities
from sylvan.runtime.sched.capability import Capability
from sylvan.runtime.sched.limits import SchedulerDeps, SchedulerLimits
from sylvan.runtime.sched.policies import schedule_policy
from sylvan.runtime.sched.scheduler import Scheduler
from sylvan.utils.clock import VirtualClock
from tests.support.cache_checks import check_cache

VOCAB = 50


def digest(history: int, token: int, namespace: str) -> int:
    return zlib.crc32(f"{history},{token},{namespace}".encode())


def next_token(history: int, seed: int) -> int:
    """Return a token that depends on the whole history, so a wrong slot anywhere changes the
    output.
    """
    return zlib.crc32(f"{history}/{seed}".encode()) % VOCAB


def histories(request: GenerateRequest | EmbedRequest, outputs: Sequence[int] = ()) -> list[int]:
    """Return the expected contents of the slots of the prompt and these outputs, after a 0."""
    found = [0]
    for position, token in enumerate([*request.input_ids.tolist(), *outputs]):
        found.append(digest(found[-1], token, space_at(request, position)))
    return found


def alone(request: GenerateRequest) -> list[int]:
    """Return the outputs of `request` when it runs alone."""
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


@dataclass
class Occupant:
    """A request in its slot, reconstructed from plans."""

    request: GenerateRequest | EmbedRequest
    ids: list[int]
    pages: list[dict[int, int]]  # of each KV group, by entry
    newest: int = -1

    @property
    def seed(self) -> int:
        return self.request.sampling.sampling_seed or 0


@dataclass(frozen=True)
class Piece:
    """A slice of a plan with its token ids."""

    index: int
    rid: str
    occupant: Occupant
    start: int
    stop: int  # draft tokens excluded
    samples: bool
    drafted: tuple[int, ...] = ()
    parents: tuple[int, ...] = ()


class CheckingExecutor:
    """Executes plans: runs slices in order and asserts that every slot read is right.

    Drafts have slots, too; `accepted` counts the drafts of a request that its last step accepted.
    """

    def __init__(
        self, groups: Sequence[KVGroup], num_slots: int = 10**4, max_samples: int = 0
    ) -> None:
        self.caps = ExecutorCaps(
            max_batch_tokens=10**6,
            max_running_reqs=num_slots,
            kv_groups=tuple(groups),
            max_samples=max_samples,
            draft_chains=True,
            draft_trees=True,
        )
        self.accepted: dict[str, int] = {}
        self.drafted = 0
        self.groups = [group for group in groups if group.kind != "state"]
        self.page_size = groups[0].page_size
        sizes = [group.num_pages * self.page_size for group in self.groups]
        self.memory = [np.full(size, -1, np.int64) for size in sizes]
        self.sampled: dict[tuple[str, int], int] = {}
        self.computed: list[tuple[str, int, int]] = []
        self.steps = 0
        self.states: dict[int, int] = {0: 0}
        self.slots: dict[int, Occupant] = {}
        self.workers: dict[str, CapabilityWorker] = {}  # that need no model

    def launch(self, plan: StepPlan) -> Later:
        self.steps += bool(plan.num_slices)
        for name, worker in self.workers.items():
            if name in plan.work:
                worker.prepare(plan.work[name])
        self._apply(plan)
        pieces = self._pieces(plan)
        self._advance_states(pieces, plan.work.get("recurrent"))
        for piece in pieces:
            self._store(piece)
        result = StepResult.of([self._output(piece) for piece in pieces])
        vectors = {p.index: self._vector(p) for p in pieces if self._embeds(p) and self._last(p)}
        if vectors:
            result.reports["embeddings"] = vectors
        for name, worker in self.workers.items():
            if name in plan.work and (report := worker.idle_step(plan.work[name])) is not None:
                result.reports[name] = report()
        return Later(result)

    def spoil(self) -> None:
        """Invalidate all memory, so that nothing in it may be read any more."""
        for memory in self.memory:
            memory[:] = -2
        self.states.update(dict.fromkeys(self.states.keys() - {0}, -2))  # tiers hold the mapping

    def close(self) -> None:
        pass

    def _apply(self, plan: StepPlan) -> None:
        for slot in plan.leaves:
            self.slots.pop(slot, None)
        for join in plan.joins:
            assert join.slot not in self.slots, "two requests in one slot"
            ids = [*join.request.input_ids.tolist(), *join.outputs.tolist()]
            self.slots[join.slot] = Occupant(join.request, ids, [{} for _ in self.groups])
        for group, slot, entry, page in plan.pages.T.tolist():
            assert page or self.groups[group].window, "a page that does not exist"
            self.slots[slot].pages[group][entry] = page
        size = self.page_size
        for copy in plan.copies:
            assert copy.num_tokens < size
            memory = self.memory[copy.group]
            source = memory[copy.source * size :][: copy.num_tokens]
            memory[copy.target * size :][: copy.num_tokens] = source

    def _pieces(self, plan: StepPlan) -> list[Piece]:
        found: list[Piece] = []
        samples, in_flight = set(plan.samples.tolist()), set(plan.in_flight.tolist())
        row = 0
        drafts = {draft.index: draft.parents for draft in plan.drafts}
        most = self.caps.max_samples or 10**6
        assert plan.num_samples <= most
        spans = zip(plan.slots.tolist(), plan.starts.tolist(), plan.stops.tolist(), strict=True)
        for index, (slot, start, stop) in enumerate(spans):
            occupant = self.slots[slot]
            ids = plan.input_ids[row : row + stop - start].tolist()
            ids = [occupant.newest if row + i in in_flight else t for i, t in enumerate(ids)]
            row += stop - start
            rid, parents = occupant.request.rid, drafts.get(index, ())
            end = stop - len(parents)
            occupant.ids[start:end] = ids[: end - start]
            shape = tuple(ids[end - start :]), parents
            found.append(Piece(index, rid, occupant, start, end, index in samples, *shape))
        return found

    def _advance_states(self, pieces: list[Piece], work: StateWork | None) -> None:
        """Check that each recurrent state has seen exactly the tokens before its slice."""
        if work is None:
            return
        for source, target in work.copies:
            self.states[target] = self.states.get(source, 0)
        written: list[int] = []
        for piece, slot in zip(pieces, work.slots.tolist(), strict=True):
            request = piece.occupant.request
            after = histories(request, self._outputs(piece))
            assert self.states[slot] == after[piece.start], "a state of another history"
            self.states[slot] = after[piece.stop]
            saves = [(tokens, at) for index, tokens, at in work.saves if index == piece.index]
            for tokens, at in saves:
                assert 0 < tokens <= piece.stop - piece.start
                self.states[at] = after[piece.start + tokens]
            written += [slot, *(at for _, at in saves)]
        assert 0 not in written
        assert len(set(written)) == len(written), "two states share a slot"

    def _slot(self, occupant: Occupant, group: int, position: int) -> int:
        page = occupant.pages[group][position // self.page_size]
        assert page, "a token without a page"
        return page * self.page_size + position % self.page_size

    def _store(self, piece: Piece) -> None:
        occupant = piece.occupant
        for group, memory in enumerate(self.memory):
            history = 0
            if piece.start and self.groups[group].window == 1:  # it does not have the token before
                history = histories(occupant.request, self._outputs(piece))[piece.start]
            elif piece.start:
                history = int(memory[self._slot(occupant, group, piece.start - 1)])
            for position in range(piece.start, piece.stop):
                space = space_at(occupant.request, position)
                history = digest(history, occupant.ids[position], space)
                memory[self._slot(occupant, group, position)] = history
        self.computed.append((piece.rid, piece.start, piece.stop))
        after = [history]  # of the newest token, then of each draft token
        for node, (token, parent) in enumerate(zip(piece.drafted, piece.parents, strict=True)):
            position = piece.stop + depth(piece.parents, node) - 1
            space = space_at(occupant.request, position)
            after.append(digest(after[parent + 1], token, space))
            for group, memory in enumerate(self.memory):
                memory[self._slot(occupant, group, piece.stop + node)] = after[-1]
        self.drafted += len(piece.drafted)

    def _outputs(self, piece: Piece) -> list[int]:
        return piece.occupant.ids[len(piece.occupant.request.input_ids) :]

    def _history(self, piece: Piece) -> int:
        """Return the digest of all tokens up to the end of the slice, which memory must hold.

        Window groups must hold what the tokens of the slice read.
        """
        occupant, history = piece.occupant, 0
        first = [max(0, piece.start - g.window + 1) if g.window else 0 for g in self.groups]
        for position, token in enumerate(occupant.ids[: piece.stop]):
            history = digest(history, token, space_at(occupant.request, position))
            for group, memory in enumerate(self.memory):
                if position >= first[group]:
                    held = memory[self._slot(occupant, group, position)]
                    assert held == history, "a slot holds other KV"
        return history

    def _output(self, piece: Piece) -> SliceOutput:
        if not piece.samples:
            return SliceOutput()
        token = next_token(self._history(piece), piece.occupant.seed)
        piece.occupant.newest = self.sampled[piece.rid, piece.stop] = token
        return SliceOutput((token, *self._verify(piece, token)))

    def _verify(self, piece: Piece, token: int) -> list[int]:
        """Return the tokens after `token` by accepted drafts, whose KV is moved into place."""
        occupant, found, last = piece.occupant, list[int](), -1
        if piece.drafted:
            del occupant.ids[piece.stop :]
        while True:
            children = [i for i, p in enumerate(piece.parents) if p == last]
            right = [i for i in children if piece.drafted[i] == token]
            if not right:
                break
            last, position = right[0], piece.stop + len(found)
            for group, memory in enumerate(self.memory):
                history = memory[self._slot(occupant, group, piece.stop + last)]
                memory[self._slot(occupant, group, position)] = history
            occupant.ids.append(token)
            token = next_token(int(history), occupant.seed)
            found.append(token)
        if piece.drafted:
            self.accepted[piece.rid] = len(found)
        return found

    def _embeds(self, piece: Piece) -> bool:
        return isinstance(piece.occupant.request, EmbedRequest)

    def _last(self, piece: Piece) -> bool:
        return piece.stop == len(piece.occupant.request.input_ids)

    def _vector(self, piece: Piece) -> np.ndarray:
        return np.array([self._history(piece)])


def kv_groups(
    num_pages: int,
    page_size: int,
    windows: Sequence[tuple[int, int]] = (),
    states: int = 0,
    *,
    has_full: bool = True,
) -> tuple[KVGroup, ...]:
    """Return KV groups with padding pages; windows as (window, pages)."""
    full = KVGroup(name="full", kind="full", num_pages=num_pages, page_size=page_size)
    found = [full] if has_full else []
    found += [
        KVGroup(name=f"window-{w}", kind="window", num_pages=pages, page_size=page_size, window=w)
        for w, pages in windows
    ]
    if states:
        found.append(KVGroup(name="state", kind="state", num_pages=states))
    return tuple(found)


class Watcher(Capability):
    """Passes each batch to a test."""

    def __init__(self) -> None:
        self.watch: Callable[[Batch], None] = lambda batch: None

    def on_batch(self, batch: Batch) -> None:
        self.watch(batch)


class KVStore(Protocol):
    """The tiers below the device of a `World`."""

    def make_tier(self, groups: Sequence[KVGroup]) -> tuple[tuple[Tier, ...], TierPolicy]: ...

    def join(self, world: World) -> Capability: ...


class World:
    """A scheduler over checked memory, and the outputs that it emitted."""

    def __init__(
        self,
        *,
        pages: int = 100,
        page_size: int = 4,
        policy: str = "fcfs",
        eviction: str = "lru",
        prefix: bool = True,
        capabilities: tuple = (),
        pool_all: bool = False,
        states: int = 0,
        windows: Sequence[tuple[int, int]] = (),  # (window, pages)
        has_full: bool = True,
        tenant_weights: Mapping[str, float] | None = None,
        max_samples: int = 0,
        tiers: KVStore | None = None,
        **limits,
    ) -> None:
        kind = "radix" if prefix else "none"
        groups = kv_groups(pages + 1, page_size, windows, states, has_full=has_full)
        below = tiers.make_tier(groups) if tiers is not None else ((), None)
        self.cache = kv_cache(groups, kind, eviction, *below)
        self.allocator = self.cache._allocator
        self.tree, self.states = self.cache.tree, self.cache.states
        self.executor = CheckingExecutor(groups, max_samples=max_samples)
        self.clock = VirtualClock(100.0)
        self.tokens: dict[str, list[int]] = {}
        self.finish: dict[str, object] = {}
        self.outputs: dict[str, list] = {}
        standard = standard_capabilities(self.cache, makes_vectors=True, pools_all=pool_all)
        self.watcher = Watcher()
        if tiers is not None:
            capabilities = (*capabilities, tiers.join(self))
        parts = SchedulerDeps(
            cache=self.cache,
            executor=self.executor,
            policy=schedule_policy(policy),
            emit=self._emit,
            capabilities=(*standard, *capabilities, self.watcher),
            clock=self.clock,
            tenant_weights=tenant_weights or {},
        )
        limits = {"max_batch_tokens": 16, "chunk_tokens": 16, "max_running_reqs": 4} | limits
        self.scheduler = Scheduler(parts, SchedulerLimits(**limits))

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
        """Check that each page and state slot has exactly one owner, and the tree's invariants."""
        check_memory(self.scheduler, self.cache)

    def check_empty(self) -> None:
        """Check that no memory is held once all requests have ended."""
        self.check()
        free = self.allocator.free_pages + self.tree.evictable_pages
        assert free == self.allocator.num_pages
        for window in self.cache._windows:
            assert window.available_pages == window.allocator.num_pages
        assert self.scheduler.load().num_used_tokens == 0


def holders_in(scheduler: Scheduler) -> list[Req]:
    """Return requests that have memory, including ended ones."""
    return list(scheduler._requests.with_memory())


def check_memory(scheduler: Scheduler, cache: KVMemory) -> None:
    """Check that each page and state slot has exactly one owner, and the tree's invariants."""
    assert all(req.kv is not None for req in scheduler.running)
    check_cache(cache, [req.kv for req in holders_in(scheduler)])


def check_tree(tree: RadixCache, owners: np.ndarray | None = None) -> None:
    """Check the documented invariants of `RadixCache`."""
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
    """Check that each node is locked once for every request whose prefix ends at or below it."""
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


def depth(parents: Sequence[int], node: int) -> int:
    """Return the number of draft tokens on the path to one, including it."""
    return 0 if node < 0 else 1 + depth(parents, parents[node])


def space_at(request: GenerateRequest | EmbedRequest, position: int) -> str:
    """Return the namespace of a position: the adapter, and the salt except in a public prefix."""
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
