"""Processes lost at random times: every stream is complete, in order, and without repetition."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from sylvan.protocol.errors import CapacityError
from sylvan.protocol.messages import (
    Abort,
    Finish,
    Submit,
    TextBatch,
    TextOutput,
    TokenOutput,
    ToScheduler,
)
from sylvan.protocol.requests import GenerateRequest
from sylvan.protocol.sampling import SamplingParams
from sylvan.runtime.tokenizer.live import MAX_LOSSES, LiveRequest, SampleState
from sylvan.runtime.tokenizer.router import ReplicaRouter
from sylvan.runtime.tokenizer.types import ServedModelInfo
from sylvan.utils.clock import VirtualClock

REPLICAS = 3
TOKENS = 6
FACTS = ServedModelInfo(model_path="m", served_name="m", context_len=64, vocab_size=100)
ABORT = Finish(type="abort", message="by name")

replicas = st.integers(0, REPLICAS - 1)
numbers = st.integers(0, 1 << 16)


class Processes:
    """Fakes the processes of a replica: token i of a sample is i."""

    def __init__(self) -> None:
        self.has_scheduler = True
        self.has_detokenizer = True
        self.given_up = False
        self.running: dict[str, int] = {}  # by name, the tokens that the sample has
        self.aborted: dict[str, Finish] = {}  # to be confirmed
        self.abandoned: dict[str, int] = {}  # of earlier epochs

    def receive(self, message: ToScheduler) -> None:
        if isinstance(message, Submit):
            assert isinstance(message.request, GenerateRequest)
            assert self.has_scheduler
            assert self.has_detokenizer
            assert message.request.rid not in self.running
            assert message.request.rid not in self.abandoned
            self.running[message.request.rid] = len(message.request.output_ids)
        elif isinstance(message, Abort) and message.rid in self.running:
            self.aborted[message.rid] = message.finish
            self.abandoned[message.rid] = self.running.pop(message.rid)

    def lose(self) -> None:
        """An epoch ends."""
        self.abandoned |= self.running
        self.running.clear()
        self.aborted.clear()


class Replicas(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.router = ReplicaRouter(REPLICAS, clock=VirtualClock())
        self.processes = [Processes() for _ in range(REPLICAS)]
        for client, processes in zip(self.router.clients, self.processes, strict=True):
            client.connect(processes.receive, FACTS)
        self.live: list[LiveRequest] = []
        self.ended: list[LiveRequest] = []
        self.aborted: set[LiveRequest] = set()

    @rule(samples=st.integers(1, 3))
    def open(self, samples: int) -> None:
        live = _request(f"r{len(self.live) + len(self.ended)}", samples)
        try:
            self.router.open(live)
        except CapacityError:
            assert all(processes.given_up for processes in self.processes)
            return
        self.live.append(live)

    @rule(replica=replicas, pick=numbers, count=st.integers(1, TOKENS))
    def emit(self, replica: int, pick: int, count: int) -> None:
        processes = self.processes[replica]
        if processes.running and processes.has_detokenizer:
            name = sorted(processes.running)[pick % len(processes.running)]
            self._emit(replica, name, count)

    @rule(replica=replicas)
    def confirm_aborts(self, replica: int) -> None:
        processes = self.processes[replica]
        if processes.has_detokenizer:
            while processes.aborted:
                name, finish = processes.aborted.popitem()
                self._say(replica, name, processes.abandoned[name], 0, finish)

    @rule(replica=replicas, pick=numbers)
    def emit_late(self, replica: int, pick: int) -> None:
        """Messages in flight when an epoch ended or a request was aborted may still arrive."""
        processes = self.processes[replica]
        late = sorted(processes.abandoned.keys() - processes.aborted.keys())
        if late:
            name = late[pick % len(late)]
            self._say(replica, name, processes.abandoned[name], 1, None)
            processes.abandoned[name] += 1

    @rule(replica=replicas)
    def lose_scheduler(self, replica: int) -> None:
        processes = self.processes[replica]
        if processes.has_scheduler:
            processes.lose()
            processes.has_scheduler = False
            self.router.clients[replica].disconnect()

    @rule(replica=replicas)
    def restart_scheduler(self, replica: int) -> None:
        processes = self.processes[replica]
        if not processes.has_scheduler and not processes.given_up:
            processes.has_scheduler = True
            self.router.clients[replica].connect(processes.receive, FACTS)

    @rule(replica=replicas)
    def lose_detokenizer(self, replica: int) -> None:
        processes = self.processes[replica]
        if processes.has_detokenizer:
            self.router.clients[replica].detokenizer_lost()
            assert not processes.running  # all were aborted
            processes.lose()
            processes.has_detokenizer = False

    @rule(replica=replicas)
    def restart_detokenizer(self, replica: int) -> None:
        processes = self.processes[replica]
        if not processes.has_detokenizer and not processes.given_up:
            processes.has_detokenizer = True
            self.router.clients[replica].detokenizer_ready()

    @precondition(lambda self: sum(not p.given_up for p in self.processes) > 1)
    @rule(replica=replicas)
    def give_up(self, replica: int) -> None:
        processes = self.processes[replica]
        if not processes.given_up and not (processes.has_scheduler and processes.has_detokenizer):
            processes.given_up = True
            self.router.clients[replica].give_up()

    @rule(pick=numbers)
    def abort(self, pick: int) -> None:
        if self.live:
            live = self.live[pick % len(self.live)]
            self.aborted.add(live)
            self.router.abort(live, ABORT)

    @rule(pick=numbers)
    def leave(self, pick: int) -> None:
        """A client closes its connection."""
        if self.live:
            live = self.live.pop(pick % len(self.live))
            self.router.close(live)
            self.ended.append(live)

    @invariant()
    def streams_are_in_order_and_said_once(self) -> None:
        for live in self.live:
            for sample in live.samples:
                assert sample.output_ids == list(range(len(sample.output_ids)))

    @invariant()
    def the_tables_agree(self) -> None:
        assert set(self.router.live) == set(self.live)
        held = sum(client.num_samples for client in self.router.clients)
        assert held == self.router.live.num_samples == sum(len(live.samples) for live in self.live)

    def teardown(self) -> None:
        """Once the processes are back, everything that was not aborted comes to its end."""
        for replica in range(REPLICAS):
            self.restart_detokenizer(replica)
            self.restart_scheduler(replica)
        while any(processes.running or processes.aborted for processes in self.processes):
            for replica, processes in enumerate(self.processes):
                self.confirm_aborts(replica)
                for name in sorted(processes.running):
                    self._emit(replica, name, TOKENS)
        for live in self.live:
            for sample in live.samples:
                assert sample.finish is not None
                if live in self.aborted and sample.finish == ABORT:
                    continue
                if sample.finish.status == 500:
                    assert sample.losses >= MAX_LOSSES
                else:
                    assert sample.finish.type == "length"
                    assert sample.output_ids == list(range(TOKENS))
            self.router.close(live)
        assert len(self.router.live) == 0
        assert [client.num_samples for client in self.router.clients] == [0] * REPLICAS

    def _emit(self, replica: int, name: str, count: int) -> None:
        processes = self.processes[replica]
        start = processes.running[name]
        count = min(count, TOKENS - start)
        done = start + count == TOKENS
        if done:
            del processes.running[name]
        else:
            processes.running[name] += count
        finish = Finish(type="length", length=TOKENS) if done else None
        self._say(replica, name, start, count, finish)

    def _say(self, replica: int, name: str, start: int, count: int, finish: Finish | None) -> None:
        output = TokenOutput(rid=name, token_ids=tuple(range(start, start + count)), finish=finish)
        batch = TextBatch(outputs=(TextOutput(rid=name, text="", output=output),))
        self.router.clients[replica].on_texts(batch)


def _request(rid: str, samples: int) -> LiveRequest:
    empty: Sequence[int] = ()
    requests = [
        GenerateRequest(
            rid=rid,
            input_ids=np.array([1, 2], np.int32),
            output_ids=np.array(empty, np.int32),
            sampling=SamplingParams(max_new_tokens=TOKENS),
            sample=index,
        )
        for index in range(samples)
    ]
    return LiveRequest(rid, [SampleState(request) for request in requests], 1, 0.0)


TestReplicas = Replicas.TestCase
