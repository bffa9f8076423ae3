"""A state machine over the cache manager alone, which checks the contents of memory at every read.

It stands for the scheduler, the executor and the tiers. Each token slot of each KV group holds a
digest of the tokens up to it, so that a misplaced page is noticed.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, precondition, rule

from sylvan.protocol.arrays import EMPTY_IDS
from sylvan.runtime.cache.build import kv_cache
from sylvan.runtime.cache.groups import KVGroup
from sylvan.runtime.cache.radix import RadixCache
from sylvan.runtime.cache.residency import TierPolicy
from sylvan.runtime.cache.types import CacheKey, KVHandle, MediaSpan, Place
from tests.support.cache_checks import check_cache
from tests.support.kv import digest
from tests.support.tiers import Device, ScriptedTier, run_load

STARTS = [[(5 * i + 11 * k) % 7 for i in range(60)] for k in range(2)]
CHUNK = 8


@dataclass(eq=False)
class Request:
    """A prompt that is computed in slices, and then grows one token at a time."""

    key: CacheKey
    tokens: list[int]
    kv: KVHandle
    computed: int
    born: int
    pieces: list[tuple[int, int]] = field(default_factory=list)

    def history(self, stop: int) -> list[int]:
        """Return the digests of prefixes; [i] is after i tokens."""
        found = [0]
        for position, token in enumerate(self.tokens[:stop]):
            inside = [s.digest for s in self.key.media if s.start <= position < s.stop]
            space = f"{self.key.namespace}{inside}"
            found.append(digest(found[-1], token, space))
        return found


class CacheMachine(RuleBasedStateMachine):
    """The state machine; call `start` from an `initialize` rule."""

    def start(self, setup: dict[str, Any]) -> None:
        size = setup["page_size"]
        groups = setup_groups(setup)
        self.groups = [group for group in groups if group.kind != "state"]
        shapes = [(group.num_pages, size) for group in self.groups]
        self.device = Device([np.full(shape, -1) for shape in shapes])
        self.device.states[0] = 0
        self.tiers: dict[Place, ScriptedTier] = {}
        above = None
        for place, room in zip((Place.HOST, Place.STORAGE), setup["tiers"], strict=False):
            above = self.tiers[place] = ScriptedTier(place, self.device, above, room)
        policy = TierPolicy(write_ahead_pages=setup["ahead"], min_load_tokens=setup["min_load"])
        self.cache = kv_cache(
            groups, setup["prefix"], setup["eviction"], tuple(self.tiers.values()), policy
        )
        self.page_size, self.lag = size, setup["lag"]
        self.step_number = 1
        self.running: list[Request] = []
        self.loading: dict[int, Request | None] = {}
        self.moved: set[int] = set()
        self.computed = {0}
        self.loaded_tokens = 0

    # ---- requests

    @rule(
        which=st.integers(0, 1),
        common=st.sampled_from([0, 5, 16, 20, 33, 47, 60]),
        own=st.lists(st.integers(0, 6), min_size=1, max_size=12),
        namespace=st.sampled_from(["", "", "", "x"]),
        apart=st.sampled_from([None] * 5 + [3, 18]),
        load=st.sampled_from([True, True, True, False]),
    )
    def submit(self, which, common, own, namespace, apart, load) -> None:
        tokens = [*STARTS[which][:common], *own]
        media = (MediaSpan(apart, apart + 4, b"m"),) if apart is not None else ()
        key = CacheKey(np.array(tokens, np.int32), namespace, media)
        limit = len(tokens) - 1
        peeked = self.cache.peek(key, limit)
        brought = self.cache.loads is not None and self.cache.loads.will_load(key, limit)
        most = len(tokens) if load else 0
        kv = self.cache.acquire(key, limit, step=self.step_number, load=most)
        req = Request(key, tokens, kv, kv.cached, self.step_number)
        assert kv.cached <= limit
        assert req.history(kv.cached)[-1] in self.computed, "a hit on what nobody computed"
        if load and not kv.loading and not brought:
            assert kv.cached <= max(peeked, 0)
        lacks_state = self.cache.states is not None and kv.state is None
        if lacks_state or not self.cache.extend(kv, kv.cached + 1, computed=kv.cached):
            self.cache.release(kv, 0, EMPTY_IDS, step=self.step_number)
        elif kv.loading is not None:
            self.loading[kv.loading.number] = req
            self.loaded_tokens += kv.cached
        else:
            self.running.append(req)
        self.copy_tails()
        self.check()

    @precondition(lambda self: self.running)
    @rule(which=st.sets(st.integers(0, 5), min_size=1), stall=st.booleans())
    def step(self, which: set[int], stall: bool) -> None:
        """Let some requests compute their next tokens; plans all of them before any runs."""
        self.step_number += 1
        chosen = [req for n, req in enumerate(self.running) if n in which][:4]
        planned = [(req, *piece) for req in chosen if (piece := self.plan(req)) is not None]
        states = [self.plan_states(req, start, stop) for req, start, stop in planned]
        if self.cache.states is not None:
            self.cache.states.launched()
        self.copy_tails()
        for (req, start, stop), saves in zip(planned, states, strict=True):
            self.compute_state(req, start, stop, saves)
        for req, start, stop in planned:
            self.store(req, start, stop)
        for req, start, stop in planned:
            self.read(req, start, stop)
        self.check()

    def copy_tails(self) -> None:
        for source, target, count, group in self.cache.take_copies():
            memory = self.device.groups[group]
            memory[target, :count] = memory[source, :count]

    def plan(self, req: Request) -> tuple[int, int] | None:
        kv, start = req.kv, req.computed
        if start == len(req.tokens):
            req.tokens.append((start * 3 + req.born) % 7)
        stop = min(start + CHUNK, len(req.tokens))
        only_one = stop == start + 1 and start == kv.num_pages * self.page_size
        if only_one and kv.tail is None and not kv.num_pages % 2:
            grown = self.cache.grow([kv]) is not None
        else:
            grown = self.cache.extend(kv, stop, computed=start)
        if not grown:
            return None
        req.computed = stop
        self.cache.publish(kv, stop, np.array(req.tokens, np.int32), step=self.step_number)
        return start, stop

    def plan_states(self, req: Request, start: int, stop: int) -> list[tuple[int, int]]:
        """Save the state at the last page boundary of the slice."""
        states = self.cache.states
        if states is None:
            return []
        req.kv.state.at = stop
        if start == req.kv.state.begun:
            source = req.kv.state.source
            self.device.states[req.kv.state.slot] = self.device.states[source]
        at = stop // self.page_size * self.page_size
        if at <= start:
            return []
        tokens = np.array(req.tokens[:at], np.int32)
        slot = states.save(CacheKey(tokens, req.key.namespace, req.key.media))
        return [(at, slot)] if slot else []

    def compute_state(self, req: Request, start: int, stop: int, saves) -> None:
        if req.kv.state is None:
            return
        history = req.history(stop)
        slot = req.kv.state.slot
        assert self.device.states[slot] == history[start], "a state of another history"
        self.device.states[slot] = history[stop]
        for at, kept in saves:
            self.device.states[kept] = history[at]

    def store(self, req: Request, start: int, stop: int) -> None:
        history = req.history(stop)
        self.computed.update(history)
        for memory, table in zip(self.device.groups, req.kv.tables, strict=True):
            for position in range(start, stop):
                page = int(table.pages[position // self.page_size])
                assert page, "a token has no page"
                memory[page, position % self.page_size] = history[position + 1]

    def read(self, req: Request, start: int, stop: int) -> None:
        """Check the attended positions: all, or the window before the first token and after it."""
        history = req.history(stop)
        for group, memory, table in zip(
            self.groups, self.device.groups, req.kv.tables, strict=True
        ):
            first = max(0, start - group.window + 1) if group.window else 0
            assert table.first * self.page_size <= first
            for position in range(first, stop):
                page = int(table.pages[position // self.page_size])
                found = memory[page, position % self.page_size]
                assert found == history[position + 1], "a slot holds other KV"

    @rule(which=st.integers(0, 1), common=st.sampled_from([20, 33, 60]), own=st.integers(0, 6))
    def serve(self, which: int, common: int, own: int) -> None:
        """Serve a whole request, from submission to end, if there is memory for it."""
        before = len(self.running)
        self.submit(which, common, [own, own], "", None, load=False)
        if len(self.running) == before:
            return
        req = self.running[-1]
        for _ in range(12):
            if req.computed < len(req.tokens):
                self.step({len(self.running) - 1}, stall=False)
        self.finish(len(self.running) - 1, 1.0)

    @rule(share=st.sampled_from([1.0, 1.0, 0.7, 0.3]))
    def displace(self, share: float) -> None:
        """Evict cached KV by a request that shares nothing."""
        key = CacheKey(np.array([7], np.int32))
        kv = self.cache.acquire(key, 0, step=self.step_number, load=0)
        room = int(self.cache.available_tokens * share)
        if self.cache.states is None or kv.state is not None:
            self.cache.extend(kv, room)
        self.cache.release(kv, 0, EMPTY_IDS, step=self.step_number)
        self.check()

    @precondition(lambda self: self.running)
    @rule(which=st.integers(0, 50), known=st.sampled_from([1.0, 1.0, 1.0, 0.5]))
    def finish(self, which: int, known: float) -> None:
        req = self.running.pop(which % len(self.running))
        count = max(int(req.computed * known), min(req.kv.cached, req.computed))
        if req.kv.state is not None and count != req.computed:
            count = req.computed
        tokens = np.array(req.tokens[:count], np.int32)
        self.cache.release(req.kv, count, tokens, step=self.step_number)
        self.check()

    @precondition(lambda self: self.running)
    @rule(which=st.integers(0, 50))
    def fail(self, which: int) -> None:
        """End a request whose KV cannot be trusted; it must not be shared."""
        req = self.running.pop(which % len(self.running))
        self.cache.release(req.kv, 0, EMPTY_IDS, step=self.step_number)
        self.check()

    @rule()
    def clear(self) -> None:
        self.cache.clear()
        self.check()

    # ---- tiers

    @precondition(lambda self: self.tiers)
    @rule(count=st.integers(1, 3))
    def poll(self, count: int) -> None:
        for _ in range(count):
            self.cache.loads.residency.poll(self.step_number - self.lag)
            self.check()

    @precondition(lambda self: self.tiers)
    @rule(rounds=st.integers(1, 3))
    def write(self, rounds: int) -> None:
        """Run the tiers to completion."""
        for _ in range(rounds):
            self.poll(1)
            for tier in self.tiers.values():
                while any(not transfer.done for transfer in tier.transfers):
                    tier.move(0)
                while tier.transfers:
                    tier.report(0, succeeded=True)
        self.poll(1)

    @precondition(lambda self: self.tiers)
    @rule(storage=st.booleans(), which=st.integers(0, 9), count=st.integers(1, 6))
    def move(self, storage: bool, which: int, count: int) -> None:
        for _ in range(count):
            self.tier(storage).move(which)

    @precondition(lambda self: self.tiers)
    @rule(
        storage=st.booleans(),
        which=st.integers(0, 9),
        succeeded=st.sampled_from([True, True, True, False]),
        count=st.integers(1, 6),
    )
    def report(self, storage: bool, which: int, succeeded: bool, count: int) -> None:
        for _ in range(count):
            self.tier(storage).report(which, succeeded=succeeded)

    @precondition(lambda self: self.tiers)
    @rule(storage=st.booleans(), refuses=st.booleans())
    def refuse(self, storage: bool, refuses: bool) -> None:
        self.tier(storage).refuses = refuses

    @precondition(lambda self: self.loading)
    @rule()
    def take_loads(self) -> None:
        assert all(load.number in self.loading for load in self.cache.loads.take())
        assert not self.cache.loads.take()

    @precondition(lambda self: self.tiers)
    @rule(
        which=st.integers(0, 1),
        common=st.sampled_from([20, 33, 60]),
        own=st.integers(0, 6),
        ends=st.sampled_from([True, True, False]),
    )
    def submit_and_load(self, which: int, common: int, own: int, ends: bool) -> None:
        """Submit a request, and complete its transfers at once."""
        self.submit(which, common, [own, own], "", None, load=True)
        self.take_loads()
        for index in range(len(self.loading)):
            self.move_load(index)
        if ends and self.loading:
            self.end_load(len(self.loading) - 1, succeeded=True)

    @precondition(lambda self: self.tiers)
    @rule(
        which=st.integers(0, 1),
        common=st.sampled_from([20, 33, 60]),
        own=st.integers(0, 6),
        quick=st.booleans(),
        share=st.sampled_from([1.0, 1.0, 0.5]),
    )
    def revisit(self, which: int, common: int, own: int, quick: bool, share: float) -> None:
        """Serve a prompt, write it to the tiers, evict it, and request it again."""
        self.serve(which, common, own)
        self.write(2)
        self.displace(share)
        self.submit(which, common, [own, own], "", None, load=True)
        if quick:
            self.take_loads()
            for index in range(len(self.loading)):
                self.move_load(index)

    @precondition(lambda self: self.loading)
    @rule(which=st.integers(0, 9))
    def move_load(self, which: int) -> None:
        loads = [load for load in self.cache.loads.running if load.taken]
        if loads:
            load = loads[which % len(loads)]
            run_load(load, self.tiers, self.device)
            self.moved.add(load.number)

    @precondition(lambda self: self.loading)
    @rule(which=st.integers(0, 9), succeeded=st.sampled_from([True, True, False]))
    def end_load(self, which: int, succeeded: bool) -> None:
        loads = self.cache.loads
        taken = [load.number for load in loads.running if load.taken]
        done = [number for number in taken if number in self.moved or not succeeded]
        if not done:
            return
        number = done[which % len(done)]
        req = self.loading.pop(number)
        kv = loads.succeed(number) if succeeded else loads.fail(number)
        assert kv is (req.kv if req is not None else None)
        if req is not None and succeeded:
            self.running.append(req)
        elif req is not None:
            self.cache.release(req.kv, req.kv.cached, req.key.tokens, step=self.step_number)
        self.check()

    @precondition(lambda self: any(self.loading.values()))
    @rule(which=st.integers(0, 9))
    def abort_load(self, which: int) -> None:
        """Abort a load, whether or not its transfer has begun."""
        alive = [number for number, req in self.loading.items() if req is not None]
        number = alive[which % len(alive)]
        req = self.loading[number]
        assert req is not None
        taken = req.kv.loading.taken
        self.cache.release(req.kv, req.kv.cached, req.key.tokens, step=self.step_number)
        if taken:
            self.loading[number] = None
        else:
            del self.loading[number]
        self.check()

    # ---- what must hold

    def tier(self, storage: bool) -> ScriptedTier:
        tiers = [*self.tiers.values()]
        return tiers[-1] if storage else tiers[0]

    def handles(self) -> list[KVHandle]:
        return [req.kv for req in (*self.running, *filter(None, self.loading.values()))]

    def check(self) -> None:
        check_cache(self.cache, self.handles())
        assert self.cache.audit(self.handles()).total == 0
        self.check_tiers()

    def check_tiers(self) -> None:
        """Check that the tree knows the location of each entry of a tier, exactly once."""
        known: dict[Place, list[int]] = {place: [] for place in self.tiers}
        tree = self.cache.tree
        if not self.tiers or not isinstance(tree, RadixCache):
            return
        stack = list(tree.roots().values())
        while stack:
            node = stack.pop()
            stack.extend(node.children.values())
            for place, at in node.parts.lower.items() if node.parts else ():
                known[place] += numbers(at)
        residency = self.cache.loads.residency
        for number, nodes in tree.nodes.writing.items():
            place = residency._writes[number].place
            for node in nodes:
                write = node.parts.writing[number]
                for at in (write.locator, *write.lost):
                    known[place] += numbers(at)
        for place, at in tree.nodes.dropped:  # until the next poll
            known[place] += numbers(at)
        for place, tier in self.tiers.items():
            assert sorted(known[place]) == sorted(tier.held), (
                "a tier's page is lost, or known twice"
            )

    def teardown(self) -> None:
        """End everything, and check that no memory is held."""
        if not hasattr(self, "cache"):
            return
        while self.running:
            self.finish(0, 1.0)
        while any(self.loading.values()):
            self.abort_load(0)
        for number in [*self.loading]:
            self.cache.loads.fail(number)
            del self.loading[number]
        self.end_writes()
        self.cache.clear()
        self.check()
        assert self.cache.available_tokens == self.cache.total_tokens
        for allocator in (self.cache._allocator, *(w.allocator for w in self.cache._windows)):
            assert allocator.free_pages == allocator.num_pages
        assert not any(tier.held for tier in self.tiers.values())

    def end_writes(self) -> None:
        for tier in self.tiers.values():
            tier.refuses = True
            while tier.transfers:
                tier.report(0, succeeded=False)
        if self.tiers:
            self.cache.loads.residency.poll(0)


def numbers(at) -> list[int]:
    every = [n for a in (at.pages, *at.windows) for n in a.tolist()] + [at.state]
    return [n for n in every if n >= 0]


def setup_groups(setup: dict[str, Any]) -> list[KVGroup]:
    """Return KV groups with little memory, but enough for one request."""
    size = setup["page_size"]
    groups = []
    if setup["full"]:
        pages = setup["room"] // size + 2
        groups.append(KVGroup(name="full", kind="full", num_pages=pages, page_size=size))
    for number, (window, share) in enumerate(setup["windows"]):
        group = KVGroup(
            name=f"window{number}", kind="window", num_pages=2, page_size=size, window=window
        )
        pages = max(group.min_pages(CHUNK), int(setup["room"] * share) // size)
        groups.append(
            KVGroup(name=group.name, kind="window", num_pages=pages, page_size=size, window=window)
        )
    if setup["states"]:
        groups.append(KVGroup(name="state", kind="state", num_pages=setup["states"]))
    return groups


def setups(**given) -> st.SearchStrategy[dict[str, Any]]:
    """Initial settings of a machine."""
    window = st.tuples(st.sampled_from([1, 2, 5, 8, 17, 40]), st.sampled_from([0.0, 0.3, 1.0]))
    drawn: dict[str, st.SearchStrategy] = {
        "page_size": st.sampled_from([1, 2, 4, 8]),
        "room": st.sampled_from([80, 160, 400]),
        "full": st.just(True),
        "windows": st.lists(window, max_size=2),
        "states": st.just(0),
        "eviction": st.sampled_from(["lru", "lru", "mru", "lfu", "fifo", "filo", "slru"]),
        "prefix": st.just("radix"),
        "tiers": st.just(()),
        "ahead": st.just(0),
        "min_load": st.just(1),
        "lag": st.integers(0, 2),
    }
    return st.fixed_dictionaries(drawn | given)
