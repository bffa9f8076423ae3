"""Control half: fetches and loads KV for waiting requests; `cache.residency` decides on writes."""

from __future__ import annotations

import itertools
import logging
from dataclasses import replace
from typing import Any, ClassVar

from sylvan.protocol.requests import GenerateRequest
from sylvan.protocol.tiers import AttachStore, WritePolicy
from sylvan.runtime.cache.manager import KVCacheManager
from sylvan.runtime.cache.types import CacheKey, Load, Place
from sylvan.runtime.core.req import Batch, Req, Slice
from sylvan.runtime.features.tiers.breaker import Breaker
from sylvan.runtime.features.tiers.cost import LoadCost
from sylvan.runtime.features.tiers.counts import TierCounts
from sylvan.runtime.features.tiers.host import HostTier
from sylvan.runtime.features.tiers.prefetch import ArrivedPages, Prefetch, PrefetchPolicy
from sylvan.runtime.features.tiers.status import Status, describe, load_of
from sylvan.runtime.features.tiers.stores import Stores
from sylvan.runtime.features.tiers.tier import may_be_stored, write_ahead_pages
from sylvan.runtime.features.tiers.work import (
    Events,
    Exported,
    Fetch,
    Fetched,
    Loaded,
    LoadPages,
    Page,
    Persisted,
    Saved,
    TiersWork,
)
from sylvan.runtime.sched.capability import Capability, SchedulerPort, Verdict
from sylvan.utils.clock import Clock, monotonic

logger = logging.getLogger(__name__)

SOON_S = 1.0  # seconds after which a fetch or a load is polled less often
_MAX_IN_FLIGHT = 8


class KVTiers(Capability):
    """Writes KV to lower tiers before its eviction, and loads it back.

    Args:
        cache: The cache, with the tiers below the device.
        stores: The store tier, and which store is attached.
        write_policy: `write_through`: everything that requests released; `write_back`: what is
            evicted next (also by `TierPolicy`); `write_through_selective`: what a second
            request used.
        prefetch: How long requests wait.
        host: The tier between the device and the store, if any.
    """

    name: ClassVar = "kv_tiers"
    work_type: ClassVar = TiersWork
    report_type: ClassVar = Events

    def __init__(
        self,
        cache: KVCacheManager,
        stores: Stores,
        write_policy: WritePolicy = "write_through",
        prefetch: PrefetchPolicy | None = None,
        clock: Clock = monotonic,
        host: HostTier | None = None,
    ) -> None:
        assert cache.loads is not None
        self._loads = cache.loads
        self._tier = tier = stores.tier
        self._stores, self._clock = stores, clock
        self._host = host
        self._near = Place.DEVICE if host is None else Place.DEVICE | Place.HOST
        self._write_policy: WritePolicy = write_policy
        self.prefetch = prefetch or PrefetchPolicy()
        self.counts: TierCounts = tier.counts
        self.breaker = Breaker(clock)
        layout = tier.layout
        per_page = sum(
            size
            for group, size in zip(layout.groups, layout.page_bytes, strict=True)
            if group.kind in ("full", "latent")
        )
        self.cost = LoadCost(per_page * layout.ranks / layout.page_size)
        self.host_cost = LoadCost(per_page * layout.ranks / layout.page_size)
        self._port: SchedulerPort | None = None
        self._numbers = itertools.count(1)
        self._prefetches: dict[str, Prefetch] = {}  # by request ID
        self._rids: dict[int, str] = {}  # by job of a fetch
        self._leaders: dict[str, str] = {}  # request ID that fetches, by the name of its first page
        self._fetching: set[int] = set()  # fetches whose last report is outstanding
        self._loading: dict[int, tuple[str, dict[Place, int]]] = {}  # request ID and tokens, by job
        self._soon_until_s = 0.0
        self._sent: dict[int, tuple[int, ...]] = {}  # fetches, by the batch that sent them
        self._outbox = _Outbox()
        self._launched_s: dict[int, float] = {}  # of batches in flight, by ID
        stores.configure = self.configure
        stores.describe = lambda: describe(stores.url, self._status, tier, host)
        stores.load = lambda: load_of(self._status, tier, host)

    # ---- steps

    def attach(self, port: SchedulerPort) -> None:
        self._port = port

    def poll(self) -> None:
        assert self._port is not None
        if self._stores.take_closing():
            self._loads.residency.forget(Place.STORAGE)
            self._tier.close()
            self.breaker.reset()
        self._loads.residency.poll(self._port.completed_step)

    def wants_step(self) -> bool:
        waits = self._fetching or self._loading or self._tier.writing or self._stores.waits
        if waits or self._outbox.full or self._tier.exports or self._tier.commits:
            return True
        if self._host is not None and (self._host.is_writing or self._host.saves):
            return True
        takes = self._tier.is_open or self._host is not None
        return takes and self._loads.residency.has_unwritten

    def wants_step_soon(self) -> bool:
        """Slow operations need not be polled to the millisecond."""
        waits = self._fetching or self._loading
        return bool(waits) and self._clock() < self._soon_until_s

    def plan_work(self, batch: Batch) -> TiersWork | None:
        """Return the work; never None while a report is outstanding."""
        if not self.wants_step():
            return None
        exports, self._tier.exports = tuple(self._tier.exports), []
        commits, self._tier.commits = tuple(self._tier.commits), []
        found: dict[str, Any] = {"exports": exports, "commits": commits, **self._stores.take()}
        found["urgent"] = self._tier.take_urgent(self._loads.residency.was_evicted)
        if self._host is not None:
            found["saves"], self._host.saves = tuple(self._host.saves), []
        work = self._outbox.take(**found)
        if work.fetches:
            self._sent[id(batch)] = tuple(fetch.job for fetch in work.fetches)
        return work

    def on_batch(self, batch: Batch) -> None:
        if batch.slices and not batch.decodes:
            if len(self._launched_s) > _MAX_IN_FLIGHT:  # of failed steps
                self._launched_s.clear()
                self._sent.clear()
            self._launched_s[id(batch)] = self._clock()

    def on_result(self, batch: Batch, report: Any) -> None:
        began = self._launched_s.pop(id(batch), None)
        if began is not None:
            for cost in (self.cost, self.host_cost):
                cost.computed(batch.num_tokens, self._clock() - began)
        for job in self._sent.pop(id(batch), ()):
            self._expect(job)
        for event in report or ():
            match event:
                case Saved():
                    self._on_saved(event)
                case Exported():
                    self._tier.exported(event.job, ok=event.ok)
                case Persisted():
                    self._on_persisted(event)
                case Fetched():
                    self._on_fetched(event)
                case Loaded():
                    self._on_loaded(event)
                case _:
                    self._stores.on_event(event)

    # ---- requests

    def on_arrival(self, req: Req) -> None:
        """Start fetching while the request is still queued."""
        self._begin(req)

    def gate(self, req: Req) -> Verdict:
        found = self._prefetches.get(req.rid) or self._begin(req)
        waits = not found.done or found.leader in self._prefetches
        in_time = self._clock() < min(found.until_s, found.late_s)
        if waits and in_time:
            return Verdict.WAIT
        if self._has_lost(req, found):
            found = self._begin(req, found.restarts + 1)
            return Verdict.READY if found.done else Verdict.WAIT
        if found.leader and in_time:  # this prompt diverges
            until_s = found.until_s
            found = self._begin(req, found.restarts)
            found.until_s = min(found.until_s, until_s)
            return Verdict.READY if found.done else Verdict.WAIT
        self._add_arrived(req, found)
        return Verdict.READY

    def load_limit(self, req: Req) -> int | None:
        """Return how much has arrived, or is in host memory."""
        found = self._prefetches.get(req.rid)
        arrived = found.learnt * self._tier.layout.page_size if found is not None else 0
        return max(arrived, self._limit_of_host(req)) if self._host is not None else arrived

    def on_start(self, piece: Slice) -> None:
        req = piece.req
        selective = self._write_policy == "write_through_selective"
        if selective and req.kv is not None and piece.start and self._port is not None:
            self._loads.residency.back_up(req.kv.node, self._port.completed_step)
        self._end(req.rid)

    def on_load(self, req: Req) -> None:
        if (found := self._prefetches.get(req.rid)) is not None:
            self._stop(found)
        self._soon_until_s = self._clock() + SOON_S
        for load in self._loads.take():
            self._outbox.loads.append(self._load_pages(load))
            tokens: dict[Place, int] = {Place.HOST: 0, Place.STORAGE: 0}
            for part in load.pages:
                if not part.group:
                    tokens[part.place] += len(part.entries) * self._tier.layout.page_size
            self._loading[load.number] = req.rid, tokens

    def stop_loading(self, req: Req) -> bool:
        """The worker half reports when nothing is written any more."""
        mine = [job for job, (rid, _) in self._loading.items() if rid == req.rid]
        self._outbox.cancels += mine
        return not mine

    def on_finish(self, req: Req) -> None:
        self._end(req.rid)

    # ---- operation

    def prefetch_again(self, req: Req, wait_s: float) -> None:
        """The store has more for a waiting request: look it up again, and wait for it."""
        found = self._begin(req)
        if not found.done:
            found.until_s = max(found.until_s, found.began_s + wait_s)

    def configure(self, command: AttachStore) -> None:
        """Apply the policies of a newly attached store."""
        if command.write_policy is not None:
            self._write_policy = command.write_policy
            pages = self._tier.layout.groups[0].num_pages
            self._loads.residency.write_ahead_pages = write_ahead_pages(self._write_policy, pages)
        given = {
            "wait": command.prefetch,
            "min_tokens": command.prefetch_min_tokens,
            "timeout_s": command.prefetch_timeout_s,
            "timeout_per_ki_token_s": command.prefetch_timeout_per_ki_token_s,
        }
        changes: dict[str, Any] = {k: value for k, value in given.items() if value is not None}
        self.prefetch = replace(self.prefetch, **changes)

    # ---- inside

    @property
    def _status(self) -> Status:
        return Status(
            self._write_policy,
            self.prefetch,
            self.breaker,
            self.cost,
            self.host_cost,
            len(self._prefetches),
        )

    def _begin(self, req: Req, restarts: int = 0) -> Prefetch:
        """Look up what the store has of a prompt, if that may pay off."""
        self._end(req.rid)
        now, size, key = self._clock(), self._tier.layout.page_size, req.key
        found = self._prefetches[req.rid] = Prefetch(now, now, restarts=restarts)
        if key is None or not self._may_fetch(req) or not may_be_stored(key.namespace):
            return found
        stop = (len(key.tokens) - 1) // size
        if not restarts:  # otherwise the device has evicted it and nothing is left
            found.known = self._local_tokens(key, stop * size) // size
        known = found.known
        num_tokens = (stop - known) * size
        if num_tokens < max(1, self.prefetch.min_tokens):
            return found
        if not self.cost.is_worth(num_tokens):
            self.counts.skipped_fetches += 1
            return found
        found.until_s = now + self.prefetch.budget_s(num_tokens)
        self._fetch(req, found, stop)
        return found

    def _expect(self, job: int) -> None:
        """Start expecting reports: the step that sent a fetch is over.

        If a store takes much longer than usual, the request stops waiting before the timeout:
        recomputing is faster.
        """
        found = self._prefetches.get(self._rids.get(job, ""))
        if found is None or found.job != job or self.prefetch.wait != "timeout":
            return
        size = self._tier.layout.page_size
        num_tokens = (found.first + len(found.names) - found.known) * size
        if late := self.cost.late_s(num_tokens):
            found.late_s = self._clock() + late

    def _fetch(self, req: Req, found: Prefetch, stop: int) -> None:
        """Fetch pages up to `stop`, unless another request fetches the same."""
        layout, known = self._tier.layout, found.known
        assert req.key is not None
        found.first = first = 0 if layout.windows or layout.state is not None else known
        found.names = names = tuple(self._tier.names(req.key, first, stop))
        if not found.restarts and (leader := self._leaders.get(names[0])) is not None:
            found.leader = leader
            return
        found.job = next(self._numbers)
        self._leaders[names[0]] = self._rids[found.job] = req.rid
        self._fetching.add(found.job)
        self._soon_until_s = self._clock() + SOON_S
        self._outbox.fetches.append(Fetch(found.job, first, known, names))
        self.counts.fetches += 1

    def _has_lost(self, req: Req, found: Prefetch) -> bool:
        """Whether device and host have evicted what they had when the fetch began."""
        if not found.known or not self._may_fetch(req):
            return False
        tokens = found.known * self._tier.layout.page_size
        return req.key is not None and self._local_tokens(req.key, tokens) < tokens

    def _local_tokens(self, key: CacheKey, limit: int) -> int:
        """Return the tokens of a prefix that the device or the host holds."""
        return self._loads.residency.cached_in(self._near, key, limit)

    def _limit_of_host(self, req: Req) -> int:
        """Return up to which token to load from the host; 0: recomputing is faster."""
        if req.key is None:
            return 0
        most = len(req.key.tokens)
        near = self._local_tokens(req.key, most)
        lacking = near - self._loads.residency.cached_in(Place.DEVICE, req.key, most)
        return near if lacking and self.host_cost.is_worth(lacking) else 0

    def _may_fetch(self, req: Req) -> bool:
        generates = isinstance(req.request, GenerateRequest)
        return generates and req.may_load and self._tier.is_open and not self.breaker.is_open

    def _add_arrived(self, req: Req, found: Prefetch) -> None:
        """Add the fetched pages that have arrived to the prefix tree."""
        progress = found.progress
        if progress is None or req.key is None or found.arrived <= max(found.learnt, found.known):
            return
        stored = ArrivedPages(self._tier, found, progress)
        if self._loads.residency.add_stored(req.key, Place.STORAGE, stored):
            found.learnt = found.arrived

    def _stop(self, found: Prefetch) -> None:
        """Stop a fetch."""
        if not found.done:
            self._outbox.stops.append(found.job)

    def _end(self, rid: str) -> None:
        """Release a request that runs or is over."""
        found = self._prefetches.pop(rid, None)
        if found is None or not found.job:
            return
        if self._leaders.get(found.names[0]) == rid:
            del self._leaders[found.names[0]]
        self._outbox.releases.append(found.job)
        until = min(found.until_s, found.late_s)
        if not found.done and self._clock() >= until > found.began_s:
            self.breaker.failed("the store took too long")
        if found.progress is not None:
            size = self._tier.layout.page_size
            left = max(found.progress.found - max(found.learnt, found.known), 0)
            self.counts.unfulfilled_tokens += left * size

    def _load_pages(self, load: Load) -> LoadPages:
        layout, name = self._tier.layout, self._tier.name
        pages: list[Page] = []
        for part in load.pages:
            if part.place is not Place.STORAGE:
                continue
            group = layout.windows[part.group - 1] if part.group else 0
            each = zip(part.targets.tolist(), part.sources.tolist(), strict=True)
            pages += [Page(group, target, name(source)) for target, source in each]
        state = load.state
        if state is not None and state.place is Place.STORAGE and layout.state is not None:
            pages.append(Page(layout.state, state.target, name(state.source)))
        saved = self._host.pages_of(load) if self._host is not None else ()
        return LoadPages(load.number, tuple(pages), saved)

    def _on_saved(self, event: Saved) -> None:
        assert self._host is not None
        counts = self.counts
        counts.host_saved_bytes += event.num_bytes
        counts.host_save_seconds += event.seconds
        self._host.saved(event.job, ok=event.ok)

    def _on_persisted(self, event: Persisted) -> None:
        counts = self.counts
        counts.stored_pages += event.num_pages
        counts.stored_bytes += event.num_bytes
        counts.store_seconds += event.seconds
        counts.lost_pages += len(event.lost)
        self._tier.persisted(event.job, event.lost)
        self._record_store_call(event.error)

    def _on_fetched(self, event: Fetched) -> None:
        rid = self._rids.get(event.job)
        found = self._prefetches.get(rid) if rid is not None else None
        if found is not None and found.job == event.job:
            found.progress = event
        if not event.done:
            return
        self._fetching.discard(event.job)
        self._rids.pop(event.job, None)
        counts, size = self.counts, self._tier.layout.page_size
        known = found.known if found is not None else event.found
        counts.found_tokens += max(event.found - known, 0) * size
        counts.fetched_tokens += max(event.arrived - known, 0) * size
        counts.fetched_bytes += event.num_bytes
        counts.fetch_seconds += event.seconds
        counts.on_faults(event.faults)
        self.cost.fetched(event.num_bytes, event.seconds)
        if event.error or not event.stopped:
            self._record_store_call(event.error)

    def _on_loaded(self, event: Loaded) -> None:
        assert self._port is not None
        rid, tokens = self._loading.pop(event.job)
        counts, stored = self.counts, tokens[Place.STORAGE]
        counts.on_faults(event.faults)
        if stored or event.error:
            self._record_store_call(event.error)
        if event.outcome == "ok":
            counts.loaded_tokens += stored
            counts.loaded_bytes += event.num_bytes - event.saved_bytes
            counts.load_seconds += event.seconds - event.saved_seconds
            counts.host_loaded_tokens += tokens[Place.HOST]
            counts.host_loaded_bytes += event.saved_bytes
            counts.host_load_seconds += event.saved_seconds
            if event.saved_bytes:
                self.host_cost.fetched(event.saved_bytes, event.saved_seconds)
            kv = self._loads.succeed(event.job)
            if kv is not None:
                saved = self.cost.compute_s(sum(tokens.values())) - self.cost.fetch_s(stored)
                counts.saved_seconds += max(saved - event.seconds, 0.0)
                self._port.loaded(rid, kv.cached)
            return
        counts.failed_loads += 1
        if self._loads.fail(event.job) is not None:
            self._end(rid)
            self._port.load_failed(rid)

    def _record_store_call(self, error: str) -> None:
        if not error:
            self.breaker.succeeded()
            return
        if error != self.breaker.last_error:
            logger.warning("the KV store failed, requests recompute instead: %s", error)
        self.counts.errors += 1
        self.breaker.failed(error)


class _Outbox:
    """Work to send with the next step."""

    def __init__(self) -> None:
        self.fetches: list[Fetch] = []
        self.loads: list[LoadPages] = []
        self.stops: list[int] = []
        self.cancels: list[int] = []
        self.releases: list[int] = []

    @property
    def full(self) -> bool:
        """Whether there is any work."""
        return any(self._lists())

    def take(self, **more: Any) -> TiersWork:
        """Take all work, with `more` fields."""
        work = TiersWork(
            fetches=tuple(self.fetches),
            loads=tuple(self.loads),
            stops=tuple(self.stops),
            cancels=tuple(self.cancels),
            releases=tuple(self.releases),
            **more,
        )
        for each in self._lists():
            each.clear()
        return work

    def _lists(self) -> tuple[list[Any], ...]:
        return self.fetches, self.loads, self.stops, self.cancels, self.releases
