"""A state machine over the whole scheduler: the actions of clients, detokenizer and operators.

Each action is a rule of hypothesis, so that a failure shrinks to the few actions that it needs.
"""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, multiple, precondition, rule

from sylvan.protocol.errors import CapacityError, RequestError
from sylvan.protocol.requests import EmbedRequest, GenerateRequest
from sylvan.protocol.sampling import SamplingParams
from sylvan.runtime.cache.radix import RadixCache
from sylvan.runtime.cache.types import below
from sylvan.runtime.core.req import Batch
from sylvan.runtime.sched.capability import Capability
from sylvan.runtime.tokenizer.isolation import CacheIsolation
from tests.support.kv import World, alone, digest, histories, request, space_at
from tests.support.scheduler_inputs import STARTS, ClientRequest, client_requests

STEP_S = 0.01
DRAIN_STEPS = 4000


class SchedulerMachine(RuleBasedStateMachine):
    """Runs any actions in any order; every request must end with the outputs of running alone."""

    requests = Bundle("requests")

    def start(self, setup: dict[str, Any], *drafters: Capability, max_drafted: int = 0) -> None:
        """Call this from an `initialize` rule. `max_drafted`: drafts per step."""
        setup = dict(setup)
        self.max_drafted = max_drafted
        room, size = setup.pop("room"), setup["page_size"]
        self.isolation = CacheIsolation(b"secret")
        if setup.pop("public"):
            self.isolation.share(np.array(STARTS[0], np.int32))
        self.lag = setup.pop("lag")
        windows, spare = setup.pop("windows", ()), setup.pop("window_pages", 0)
        setup["windows"] = [(w, -(-w // size) + spare) for w in windows]
        self.setup = setup
        weights = {"a": 2.0, "b": 0.5}
        self.world = World(
            pages=max(2, room // size), tenant_weights=weights, capabilities=drafters, **setup
        )
        self.world.watcher.watch = self.watch
        self.scheduler = self.world.scheduler
        self.asked: dict[str, GenerateRequest | EmbedRequest] = {}
        self.aborted: set[str] = set()
        self.cut: dict[str, tuple[int, int]] = {}  # outputs kept of those the client was sent
        self.confirmed: set[str] = set()
        self.reached: dict[tuple[str, int], int] = {}  # by request and its retractions
        self.found: dict[str, int] = {}  # tokens from the cache at its first start
        self.computed = 0
        self.paused = False
        self.sound = True
        self.given = {0}  # what slots may hold that the prefix cache keeps
        self.text_ends: dict[str, int] = {}
        self.lags: dict[str, int] = {}  # steps until the detokenizer tells
        self.trails: dict[str, list[int]] = {}
        self.retracted: set[str] = set()
        self.tells = 0

    # ---- clients

    @rule(target=requests, crowd=st.lists(client_requests, min_size=1, max_size=6))
    def submit(self, crowd: list[ClientRequest]) -> Any:
        rids = [self.add([*STARTS[each.start][: each.common], *each.own], each) for each in crowd]
        return multiple(*filter(None, rids))

    @rule(target=requests, before=requests, wanted=client_requests)
    def next_turn(self, before: str, wanted: ClientRequest) -> Any:
        said = [*self.asked[before].input_ids.tolist(), *self.world.tokens.get(before, [])]
        return self.add([*said, *wanted.own], wanted) or multiple()

    @rule(rid=requests)
    def submit_again(self, rid: str) -> None:
        if rid in self.living() or self.unconfirmed(rid):
            with pytest.raises(RequestError, match="in use"):
                self.scheduler.add(self.asked[rid])

    @rule(beyond=st.integers(1, 9))
    def submit_too_much(self, beyond: int) -> None:
        total = self.world.cache.total_tokens
        error = CapacityError if self.full(0) else RequestError
        with pytest.raises(error):
            self.scheduler.add(request("big", [1] * 3, new=total - 3 + beyond))

    @rule(rid=requests)
    def abort(self, rid: str) -> None:
        """In any state, including ended."""
        if rid in self.living():
            self.aborted.add(rid)
        self.scheduler.abort(rid)
        self.confirmed.add(rid)
        self.check()

    # ---- time and the operator

    @rule(count=st.sampled_from([4, 1, 2, 8, 16]))
    def step(self, count: int) -> None:
        for _ in range(count):
            self.run_step()

    @rule(seconds=st.sampled_from([0.05] * 4 + [0.3, 3.0]))
    def wait(self, seconds: float) -> None:
        self.world.clock.advance(seconds)

    @rule(mode=st.sampled_from(["in_place", "retract"] * 5 + ["abort"]), steps=st.integers(0, 2))
    def pause(self, mode: Any, steps: int) -> None:
        """Pause for a few steps, or until `resume`."""
        self.paused = True
        before = set(self.world.finish)
        count = self.scheduler.pause(mode)
        if mode == "abort":
            ended = set(self.world.finish) - before
            paused = {r for r in ended if "paused" in (self.world.finish[r].message or "")}
            self.aborted |= paused
            assert len(paused) == count
            self.confirmed |= set(filter(self.unconfirmed, self.asked))  # aborted, too
        assert len(self.living()) == (0 if mode == "abort" else count)
        assert not self.scheduler.running or mode == "in_place"
        self.check()
        for _ in range(steps):
            self.run_step()
        if steps:
            self.resume()

    @precondition(lambda self: self.paused)
    @rule()
    def resume(self) -> None:
        self.paused = False
        self.scheduler.resume()

    @rule()
    def flush_cache(self) -> None:
        busy = self.living() or any(map(self.unconfirmed, self.asked))
        assert self.scheduler.flush_cache() == (not busy)
        if not busy:
            assert self.world.allocator.free_pages == self.world.allocator.num_pages
        self.check()

    @rule()
    def forget_kv(self) -> None:
        """Invalidate all KV, as a weight update does."""
        self.scheduler.pause("in_place")
        self.scheduler.forget_kv()
        self.confirmed |= set(filter(self.unconfirmed, self.asked))  # closed, too
        self.world.executor.spoil()
        assert self.world.allocator.free_pages == self.world.allocator.num_pages
        if not self.paused:
            self.scheduler.resume()
        self.check()

    @rule()
    def tell(self) -> None:
        self.tells += 1
        self.scheduler.flush_outputs()
        for req in (*self.scheduler.running, *self.scheduler.waiting):
            asked = req.request
            if isinstance(asked, GenerateRequest) and asked.interval is None:
                told = self.replayed(asked) + self.world.tokens.get(req.rid, [])
                assert told == req.tokens.view(req.prompt_len, req.tokens.length).tolist()
        self.check()

    # ---- what must hold

    def check(self) -> None:
        """Check the invariants after each action."""
        self.world.check()
        assert self.scheduler.audit() == 0
        self.learn()
        if isinstance(self.world.tree, RadixCache):
            assert self.kept() <= self.given, "the cache keeps what nobody was given"

    def run_step(self) -> None:
        self.sound = False
        self.world.clock.advance(STEP_S)
        self.scheduler.step()
        self.check()
        self.read_texts()
        now, timeout = self.world.clock(), self.setup["queue_timeout_s"]
        for req in (*self.scheduler.running, *self.scheduler.waiting):
            limits = [req.request.deadline_s, None if req.started_s else timeout]
            assert all(limit is None or now - req.arrived_s < limit for limit in limits)
        self.sound = True

    def read_texts(self) -> None:
        """Let the detokenizer report stops, some steps after it received the tokens."""
        for rid in filter(self.has_text_stops, self.asked):
            told, kept = len(self.world.tokens.get(rid, [])), self.text_ends.get(rid, 10**6)
            ready = rid in self.living() and told >= kept
            if rid in self.confirmed or not (ready or self.unconfirmed(rid)):
                continue
            self.lags[rid] = lag = self.lags.get(rid, self.lag) - 1
            if lag >= 0:
                continue
            self.confirmed.add(rid)
            replayed = len(self.replayed(self.asked[rid]))
            if told >= kept:
                self.cut[rid] = (kept, told)
            self.scheduler.stop_at(rid, replayed + kept, "x" if told >= kept else None)
            self.check()

    def watch(self, batch: Batch) -> None:
        """Check a launched batch: its bounds, and that it continues where the last one ended."""
        assert not (self.paused and batch.slices)
        assert len({piece.req.rid for piece in batch.slices}) == len(batch.slices)
        assert len(self.scheduler.running) <= self.setup["max_running_reqs"]
        bounded = [p.stop - p.start for p in batch.slices if not p.whole]
        drafted = [len(p.draft.tokens) for p in batch.slices if p.draft]
        assert max(drafted, default=0) <= self.max_drafted
        assert sum(bounded) + sum(drafted) <= self.setup["max_batch_tokens"]
        assert sum(n for n in bounded if n > 1) <= self.setup["chunk_tokens"]
        for piece in batch.slices:
            req = piece.req
            assert req.kv is not None
            life = (req.rid, req.retractions)
            accepted = self.world.executor.accepted.pop(req.rid, 0)
            begun = self.reached[life] + accepted if life in self.reached else req.kv.cached
            assert piece.start == begun < piece.stop <= len(req.tokens) + req.pending
            self.reached[life] = piece.stop
            self.found.setdefault(req.rid, piece.start)
            self.computed += piece.stop - piece.start

    def teardown(self) -> None:
        """Let all remaining requests end, and compare them."""
        if not getattr(self, "sound", False):
            return
        self.resume()
        for _ in range(DRAIN_STEPS):
            if self.scheduler.idle and not any(map(self.unconfirmed, self.asked)):
                break
            self.run_step()
        else:
            raise AssertionError("some request never ends")
        for asked in self.asked.values():
            self.compare(asked)
        assert self.scheduler.load().computed_tokens == self.computed
        self.world.check_empty()
        self.world.cache.clear()
        for pages in (self.world.allocator, *(w.allocator for w in self.world.cache._windows)):
            assert pages.free_pages == pages.num_pages
        if self.world.states is not None:
            assert self.world.states.free_slots == self.world.states.num_slots

    def compare(self, asked: GenerateRequest | EmbedRequest) -> None:
        """Compare a request with the same request alone."""
        rid = asked.rid
        told, outputs = self.world.tokens.get(rid, []), self.world.outputs.get(rid, [])
        if isinstance(asked, EmbedRequest):
            want: list[int] = []
        else:
            self.compare_pieces(asked, [len(output.token_ids) for output in outputs])
            want = alone(asked)[len(self.replayed(asked)) :]
        if rid in self.cut:
            assert told == want[: self.cut[rid][1]]
            return
        finish = self.world.finish[rid]
        if finish.type == "abort":
            assert told == want[: len(told)]
            assert rid in self.aborted or self.is_late(asked, outputs[-1].timing)
            return
        assert told == want
        if isinstance(asked, EmbedRequest):
            assert outputs[-1].embedding.tolist() == [histories(asked)[-1]]
        self.compare_work(asked, whole=finish.type == "length" or isinstance(asked, EmbedRequest))

    def compare_pieces(self, asked: GenerateRequest, pieces: list[int]) -> None:
        """Check that first tokens, and tokens that may end, come at once."""
        later = pieces[1:-1]
        if self.max_drafted:  # several come at a time
            assert all(count > 0 for count in later) or self.tells
            return
        assert pieces[:1] in ([], [0], [1])
        if self.has_text_stops(asked.rid):
            assert all(count == 1 for count in later)
        elif asked.interval is None:
            assert len(later) <= self.tells
        else:
            assert all(count == asked.interval for count in later)
            assert pieces[-1] <= asked.interval

    def compare_work(self, asked: GenerateRequest | EmbedRequest, *, whole: bool) -> None:
        """Check that each token is computed once, except for prefix hits, retractions and overlap.

        `watch` checks that the slices of a request have no gaps and overlaps.
        """
        rid, usage = asked.rid, self.world.outputs[asked.rid][-1].usage
        told = 0 if isinstance(asked, EmbedRequest) else usage.completion_tokens
        needed = len(asked.input_ids) + max(0, told - 1)  # the last output needs no KV
        lives = {life: stop for (name, life), stop in self.reached.items() if name == rid}
        assert usage.prompt_tokens == len(asked.input_ids)
        assert max(lives) <= usage.retractions
        # a step that was launched before a stop was known computes one token more
        later = 0 if whole else self.setup["inflight"] - 1 + self.max_drafted
        reached = max(lives.values()) + self.world.executor.accepted.get(rid, 0)
        assert needed <= reached <= needed + later
        assert usage.cached_tokens == min(self.found[rid], usage.prompt_tokens)
        if not self.setup["prefix"]:
            assert usage.cached_tokens == 0

    # ---- helpers

    def add(self, prompt: list[int], wanted: ClientRequest) -> str | None:
        """Submit as much of a request as fits; return its name unless the queue was full."""
        room = self.world.cache.total_tokens
        if wanted.embed:
            room = self.world.cache.max_step_tokens if self.setup["whole_prompts"] else room
            return self.send(
                EmbedRequest(
                    rid=self.new_rid(),
                    input_ids=np.array(prompt[:room], np.int32),
                    tenant=wanted.tenant,
                    cache_salt=self.isolation.owner(wanted.tenant),
                    **wanted.limits,
                )
            )
        new = min(wanted.new, room - 1)
        ids = np.array(prompt[: room - new], np.int32)
        salt = self.isolation.salt(wanted.tenant, wanted.salt)
        asked = request(
            self.new_rid(),
            ids,
            sampling=SamplingParams(max_new_tokens=new, **wanted.sampling),
            eos_ids=() if wanted.sampling["ignore_eos"] else (7,),
            tenant=wanted.tenant,
            cache_salt=salt,
            shared_tokens=self.isolation.shared_tokens(ids) if salt else 0,
            interval=wanted.interval,
            **wanted.limits,
            **wanted.targets,
        )
        if wanted.replayed:  # a restart lost it; it continues after the client's tokens
            outputs = np.array(alone(asked)[:-1][: wanted.replayed], np.int32)
            asked = msgspec.structs.replace(asked, output_ids=outputs)
        if wanted.text_ends and wanted.sampling["stop"]:
            self.text_ends[asked.rid] = wanted.text_ends
        return self.send(asked)

    def send(self, asked: GenerateRequest | EmbedRequest) -> str | None:
        if self.full(asked.priority):
            with pytest.raises(CapacityError):
                self.scheduler.add(asked)
            return None
        waiting = {req.rid for req in self.scheduler.waiting}
        is_full = len(waiting) >= self.setup["max_waiting_reqs"]
        self.scheduler.add(asked)
        gone = waiting - {req.rid for req in self.scheduler.waiting}
        assert len(gone) == is_full
        self.aborted |= gone
        self.confirmed |= gone
        self.asked[asked.rid] = asked
        self.trails[asked.rid] = trail = histories(asked, self.replayed(asked))
        self.given.update(trail)
        return asked.rid

    def new_rid(self) -> str:
        return f"r{len(self.asked)}"

    def full(self, priority: int) -> bool:
        """Whether every waiting request has at least that priority, so that none makes room."""
        waiting = self.scheduler.waiting
        if len(waiting) < self.setup["max_waiting_reqs"]:
            return False
        return all(req.priority >= priority for req in waiting)

    def living(self) -> set[str]:
        return self.asked.keys() - self.world.finish.keys() - self.cut.keys() - self.aborted

    def unconfirmed(self, rid: str) -> bool:
        """Whether a request has ended, but the detokenizer has not confirmed the end yet."""
        finish = self.world.finish.get(rid)
        waits = finish is not None and finish.type != "abort" and rid not in self.confirmed
        return waits and self.has_text_stops(rid)

    def has_text_stops(self, rid: str) -> bool:
        asked = self.asked[rid]
        return isinstance(asked, GenerateRequest) and bool(asked.sampling.stop)

    def is_late(self, asked: GenerateRequest | EmbedRequest, timing: Any) -> bool:
        waited = timing.finished - timing.received
        limits = [asked.deadline_s, None if timing.started else self.setup["queue_timeout_s"]]
        return any(limit is not None and waited >= limit for limit in limits)

    def replayed(self, asked: GenerateRequest | EmbedRequest) -> list[int]:
        return [] if isinstance(asked, EmbedRequest) else asked.output_ids.tolist()

    def learn(self) -> None:
        """Record the tokens that clients have; text may be cut until confirmed."""
        alive = (*self.scheduler.running, *self.scheduler.waiting)
        self.retracted |= {req.rid for req in alive if req.retractions}
        kept_back = {r.rid: r.tokens.view(r.num_emitted, len(r.tokens)).tolist() for r in alive}
        for rid, tokens in self.world.tokens.items():
            told = [*tokens, *kept_back.get(rid, ())]
            ended = self.world.finish.get(rid)
            sure = rid in self.confirmed or rid in self.retracted or not self.has_text_stops(rid)
            if not told or not (sure or (ended and ended.type == "abort")):
                continue
            early = rid in self.cut and rid not in self.retracted
            stop = self.cut[rid][0] if early else len(told)
            asked, trail = self.asked[rid], self.trails[rid]
            before = len(asked.input_ids) + len(self.replayed(asked)) + 1
            for token in told[len(trail) - before : stop]:
                trail.append(digest(trail[-1], token, space_at(asked, len(trail) - 1)))
                self.given.add(trail[-1])

    def kept(self) -> set[int]:
        """Return the contents of the slots of the prefix cache, in all groups."""
        found: set[int] = set()
        cache, memories = self.world.cache, [*self.world.executor.memory]
        full = memories.pop(0) if cache._has_full else None
        for node in below(self.world.tree.roots().values()):
            at = np.arange(len(node.tokens))
            if full is not None and len(node.pages):
                found.update(full[slots_at(node.pages, at, cache.page_size)].tolist())
            for group, memory in enumerate(memories):
                pages = node.parts.windows[group]
                there = at[pages[at // cache.page_size] != 0]
                found.update(memory[slots_at(pages, there, cache.page_size)].tolist())
        return found


def slots_at(pages: np.ndarray, at: np.ndarray, page_size: int) -> np.ndarray:
    return pages[at // page_size] * page_size + at % page_size
