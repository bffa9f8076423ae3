"""Which requests with adapters may start beside which."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from sylvan.protocol.requests import GenerateRequest
from sylvan.protocol.sampling import SamplingParams
from sylvan.runtime.core.req import Batch, Req, Slice
from sylvan.runtime.features.lora.control import Lora, LoraLimits
from sylvan.runtime.features.lora.copies import AdapterEntry
from sylvan.runtime.features.lora.work import LoraReport
from sylvan.runtime.sched.capability import Verdict


def request(rid: str, lora: str | None) -> Req:
    ids = np.arange(3, dtype=np.int32)
    return Req(
        GenerateRequest(
            rid=rid, input_ids=ids, output_ids=ids[:0], sampling=SamplingParams(), lora=lora
        )
    )


def test_a_request_that_was_retracted_for_another_gives_up_its_slot():
    lora = Lora(LoraLimits(slots=2, copies=8, copy_bytes=8, max_overtakes=8))
    lora.poll()
    a, b, urgent, late = (request(name, name) for name in ("a", "b", "urgent", "late"))
    again = request("b2", "b")
    base = request("base", None)

    assert lora.admit(again, [a, b]) is Verdict.READY
    assert lora.admit(late, [a, b]) is Verdict.WAIT

    # within the same step, as many as before
    assert lora.admit(base, [a, b]) is Verdict.READY
    assert lora.admit(late, [a, base]) is Verdict.READY
    assert lora.admit(again, [a, urgent]) is Verdict.WAIT


@dataclass
class Loop:
    """The scheduler's part: requests in the order of arrival, each running for some steps."""

    lora: Lora
    reading: int  # steps that a copy takes
    waiting: list[tuple[Req, int]] = field(default_factory=list)
    running: list[tuple[Req, int]] = field(default_factory=list)
    loads: list[tuple[str, int]] = field(default_factory=list)

    def step(self) -> None:
        lora = self.lora
        for req, _ in [pair for pair in self.running if not pair[1]]:
            lora.on_finish(req)
        self.running = [(req, left - 1) for req, left in self.running if left]
        lora.poll()
        admitted = [req for req, _ in self.running]
        for req, steps in tuple(self.waiting):
            ready = lora.gate(req) is Verdict.READY
            if ready and lora.admit(req, admitted) is Verdict.READY:
                lora.on_start(Slice(req, 0, 3, samples=True))
                admitted.append(req)
                self.waiting.remove((req, steps))
                self.running.append((req, steps))
        slices = tuple(Slice(req, 0, 1, samples=False) for req in admitted)
        work = lora.plan_work(Batch(slices))
        if work is not None:
            self.loads += [(files.id, self.reading) for files in work.load]
            assert len(work.slots) <= lora.load.slots_total
        done = tuple(name for name, left in self.loads if not left)
        self.loads = [(name, left - 1) for name, left in self.loads if left]
        if done:
            lora.on_result(Batch(()), LoraReport(loaded=done))


def loop(slots: int, copies: int, names: str, reading: int = 0, most: int = 8) -> Loop:
    lora = Lora(LoraLimits(slots=slots, copies=copies, copy_bytes=99, max_overtakes=most))
    for number, name in enumerate(names):
        lora.add(AdapterEntry(name, name, 1), resident=number < copies)
    return Loop(lora, reading)


def test_one_whose_copy_went_while_it_waited_for_a_slot_does_not_hold_up_the_one_that_has_it():
    """Its copy comes when that of the other goes, and that goes when the other has run."""
    made = loop(1, 1, "abc")
    made.waiting = [(request(name, name), 0) for name in "cab"]

    for _ in range(40):
        made.step()

    assert not made.waiting
    assert not made.running


@given(
    asked=st.lists(
        st.tuples(st.sampled_from("abcdefghij"), st.integers(0, 6), st.integers(0, 3)), max_size=40
    ),
    slots=st.integers(1, 3),
    more=st.integers(0, 3),
    reading=st.integers(0, 3),
    most=st.sampled_from([0, 1, 8]),
)
def test_every_request_ends(asked, slots, more, reading, most):
    made = loop(slots, slots + more, "abcdefghij", reading, most)
    for number, (name, steps, later) in enumerate(asked):
        made.waiting.append((request(str(number), name), steps))
        for _ in range(later):
            made.step()

    for _ in range(40 * (len(asked) + 1)):
        made.step()

    assert not made.waiting
    assert not made.running
