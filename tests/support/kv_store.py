"""The real halves of KV tiers over checked memory, with scripted threads, copies and store."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from sylvan.protocol.tiers import AttachStore, TierCommand
from sylvan.runtime.cache.groups import KVGroup
from sylvan.runtime.cache.residency import TierPolicy
from sylvan.runtime.features.tiers.codec import PlainCodec
from sylvan.runtime.features.tiers.control import KVTiers
from sylvan.runtime.features.tiers.counts import TierCounts
from sylvan.runtime.features.tiers.host import HostTier
from sylvan.runtime.features.tiers.host_memory import HostLayout
from sylvan.runtime.features.tiers.prefetch import PrefetchPolicy
from sylvan.runtime.features.tiers.stores import Stores
from sylvan.runtime.features.tiers.tier import Layout, StorageTier, write_ahead_pages
from sylvan.runtime.features.tiers.work import StoreSpec
from sylvan.runtime.features.tiers.worker import KVTiersWorker
from sylvan.runtime.storage.api import StoreLimits
from sylvan.runtime.storage.backends.memory import MemoryStore, open_memory
from tests.support.kv import World
from tests.support.stores import manifest


class ScriptedThreads:
    """Calls wait until the test runs them, in any order."""

    def __init__(self) -> None:
        self.calls: list[Callable[[], None]] = []

    def submit(self, call: Callable[[], None]) -> None:
        self.calls.append(call)

    def close(self, timeout_s: float) -> bool:
        return True

    def run(self, which: int = 0) -> bool:
        if not self.calls:
            return False
        self.calls.pop(which % len(self.calls))()
        return True


class LateTransfer:
    """A copy that happens when its thread runs it, or when it is waited for."""

    checksums = None
    error: str | None = None

    def __init__(self, num_bytes: int, copy: Callable[[], None]) -> None:
        self.num_bytes, self._copy, self._done = num_bytes, copy, False

    def done(self) -> bool:
        return self._done

    def wait(self) -> None:
        if not self._done:
            self._copy()
            self._done = True


class LatePages:
    """Implements the required part of `PageMemory`; rows are pages as bytes."""

    def __init__(
        self,
        threads: ScriptedThreads,
        num_pages: int,
        page_bytes: int,
        get: Callable[[int], np.ndarray],
        put: Callable[[int, np.ndarray], None],
    ) -> None:
        self.num_pages, self.page_bytes, self.page_size = num_pages, page_bytes, 1
        self._threads, self._get, self._put = threads, get, put

    def host_buffer(self, num_pages: int) -> np.ndarray:
        return np.zeros(num_pages * self.page_bytes, np.uint8)

    def export(self, pages: np.ndarray, buffer: np.ndarray) -> LateTransfer:
        def copy() -> None:
            rows = buffer.reshape(len(pages), self.page_bytes)
            for row, page in zip(rows, pages.tolist(), strict=True):
                row[:] = self._get(page).view(np.uint8)

        return self._later(copy, buffer.nbytes)

    def import_(self, pages: np.ndarray, buffer: np.ndarray) -> LateTransfer:
        assert len(set(pages.tolist())) == len(pages)

        def copy() -> None:
            rows = buffer.reshape(len(pages), self.page_bytes)
            for row, page in zip(rows, pages.tolist(), strict=True):
                self._put(page, row.copy().view(np.int64))

        return self._later(copy, buffer.nbytes)

    def _later(self, copy: Callable[[], None], num_bytes: int) -> LateTransfer:
        transfer = LateTransfer(num_bytes, copy)
        self._threads.submit(transfer.wait)
        return transfer


class StoreBelow:
    """A store below the device of a `World`; see its `tiers`.

    `copies` are the copies between device and host, `calls` those of the store and of the host
    tier, which exists if it has pages.
    """

    def __init__(
        self,
        name: str,
        *,
        write_policy: Any = "write_through",
        prefetch: PrefetchPolicy | None = None,
        max_known: int = 1000,
        max_pending_bytes: int = 1 << 20,
        max_staged_bytes: int = 1 << 20,
        limits: StoreLimits | None = None,
        attached: bool = True,
        host_pages: int = 0,
    ) -> None:
        self.url = f"memory:{name}"
        self.write_policy, self.max_known = write_policy, max_known
        self.prefetch = prefetch or PrefetchPolicy(wait="wait_complete", min_tokens=1)
        self.max_pending_bytes, self.max_staged_bytes = max_pending_bytes, max_staged_bytes
        self.copies, self.calls = ScriptedThreads(), ScriptedThreads()
        self.store: MemoryStore = open_memory(self.url, limits or StoreLimits())
        self.attached, self.host_pages = attached, host_pages
        self.host: HostTier | None = None
        self.replies: list[Any] = []

    def make_tier(self, groups: Sequence[KVGroup]) -> Any:
        sizes = tuple(8 if g.kind == "state" else 8 * g.page_size for g in groups)
        layout, counts = Layout(groups=tuple(groups), page_bytes=sizes), TierCounts()
        self.tier = StorageTier(
            layout=layout,
            max_known=self.max_known,
            max_pending_bytes=self.max_pending_bytes,
            counts=counts,
        )
        ahead = write_ahead_pages(self.write_policy, groups[0].num_pages)
        policy = TierPolicy(write_ahead_pages=ahead, min_load_tokens=1)
        if not self.host_pages:
            return (self.tier,), policy
        self.host = HostTier(
            layout=layout,
            slots=(self.host_pages,) * len(groups),
            max_pending_bytes=self.max_pending_bytes,
            counts=counts,
        )
        return (self.host, self.tier), policy

    def join(self, world: World) -> KVTiers:
        executor, groups = world.executor, self.tier.layout.groups
        memory: list[Any] = []
        for number, group in enumerate(executor.groups):
            rows = executor.memory[number].reshape(-1, group.page_size)
            memory.append(self._pages(rows, 8 * group.page_size))
        if len(groups) > len(executor.groups):
            states = executor.states
            memory.append(
                LatePages(
                    self.copies,
                    groups[-1].num_pages,
                    8,
                    lambda slot: np.array([states.get(slot, -3)], np.int64),
                    lambda slot, row: states.__setitem__(slot, int(row[0])),
                )
            )
        worker = KVTiersWorker(
            lambda: (groups, memory),
            self.max_staged_bytes,
            lambda count, name: self.calls,
            report_s=0.0,
        )
        if self.host is not None:
            codecs = tuple(PlainCodec(size) for size in self.tier.layout.page_bytes)
            worker.host = HostLayout(self.host.slots, codecs)
        executor.workers[KVTiers.name] = worker
        spec = StoreSpec(
            url=self.url, manifest=manifest(page_size=self.tier.layout.page_size).encode()
        )
        self.stores = Stores(self.tier, spec)
        if self.attached:
            worker.open(spec)
            self.copies.run()  # threads and memory are made ready
            self.calls.run()
            self.stores.opened(spec)
        self.control = KVTiers(
            world.cache,
            self.stores,
            self.write_policy,
            self.prefetch,
            world.clock,
            self.host,
        )
        return self.control

    def _pages(self, rows: np.ndarray, page_bytes: int) -> LatePages:
        return LatePages(
            self.copies,
            len(rows),
            page_bytes,
            lambda page: rows[page].copy(),
            rows.__setitem__,
        )

    # ---- the script

    def work(self, rounds: int = 1) -> None:
        """Run all threads to completion."""
        for _ in range(rounds):
            while self.copies.run() or self.calls.run():
                pass

    def run(self, world: World, steps: int = 3000) -> None:
        """Step until nothing is left to do, running threads at once."""
        for _ in range(steps):
            world.clock.advance(0.01)
            progressed = world.scheduler.step()
            self.work()
            self.replies += self.stores.take_replies()
            if not progressed and world.scheduler.idle:
                return
        raise AssertionError(f"not done after {steps} steps")

    def command(self, world: World, command: TierCommand) -> Any:
        """Carry out a command; return its reply."""
        number = len(self.replies) + 1
        self.stores.add(number, command)
        self.replies += self.stores.take_replies()
        self.run(world)
        (reply,) = [reply for reply in self.replies if reply.id == number]
        return reply

    def attach(self, world: World, **fields: Any) -> Any:
        return self.command(world, AttachStore(**{"url": self.url} | fields))
