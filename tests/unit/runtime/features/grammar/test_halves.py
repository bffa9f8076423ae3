"""Data from the control half of grammars to the worker half."""

from __future__ import annotations

import numpy as np

from sylvan.protocol.messages import Finish
from sylvan.protocol.requests import GenerateRequest
from sylvan.protocol.sampling import SamplingParams
from sylvan.runtime.core.req import Batch, Req, Slice
from sylvan.runtime.core.step import StepPlan
from sylvan.runtime.core.wire import StepCodec
from sylvan.runtime.features.grammar.control import GrammarControl
from sylvan.runtime.features.grammar.limits import Limits
from sylvan.runtime.features.grammar.loaders import Loaders
from sylvan.runtime.features.grammar.matchers import Matchers
from sylvan.runtime.features.grammar.spec import GrammarSpec
from sylvan.runtime.features.grammar.work import GrammarData, GrammarWork, LoadedGrammar
from sylvan.runtime.features.grammar.worker import GrammarWorker
from sylvan.runtime.sched.capability import Verdict
from tests.support.grammar import END, TOKENS, accept, make_backend, vocabulary

BACKEND = make_backend("llguidance")


class Ticket:
    def __init__(self, spec: GrammarSpec) -> None:
        grammar = BACKEND.compile(spec)
        data = GrammarData(spec.digest, "llguidance", grammar.dump())
        self.grammar, self.done, self.error = LoadedGrammar(grammar, data), True, None


class Compiler:
    """Everything is compiled at once."""

    def __init__(self) -> None:
        self.forgotten = 0

    def request(self, spec: GrammarSpec) -> Ticket:
        return Ticket(spec)

    def forget(self, ticket: Ticket) -> None:
        self.forgotten += 1


def asked(rid: str, regex: str | None) -> Req:
    return Req(
        GenerateRequest(
            rid=rid,
            input_ids=np.array([1], np.int32),
            output_ids=np.array([], np.int32),
            sampling=SamplingParams(max_new_tokens=9, regex=regex),
            eos_ids=(END,),
        )
    )


def started(control: GrammarControl, *reqs: Req) -> GrammarWork | None:
    pieces = tuple(Slice(req, 0, 1, samples=True) for req in reqs)
    for piece in pieces:
        assert control.gate(piece.req) is Verdict.READY
        control.on_start(piece)
    return control.plan_work(Batch(pieces))


def ended(control: GrammarControl, req: Req) -> None:
    req.finish = Finish(type="stop")
    control.on_finish(req)


def worker(loaded=lambda digest: None) -> tuple[GrammarWorker, dict]:
    grammars: dict = {}
    matchers = Matchers(grammars, vocabulary, len(TOKENS), jumps=False)
    limits = Limits(timeout_s=10.0, max_states=50_000)
    return GrammarWorker(
        matchers, grammars, lambda: Loaders(vocabulary(), limits), loaded
    ), grammars


def test_a_grammar_is_sent_once_for_all_that_have_it():
    control = GrammarControl(Compiler())
    a, b, c, free = asked("a", "x+"), asked("b", "x+"), asked("c", "y"), asked("d", None)

    first = started(control, a, b, free)
    assert list(first.requests) == ["a", "b"]
    assert len(first.grammars) == 1
    assert started(control, free) is None
    ended(control, a)
    again = started(control, c)
    assert (again.ended, [g.digest for g in again.grammars]) == (("a",), [again.requests["c"]])
    preempted = control.on_start(Slice(b, 0, 1, samples=True))
    assert preempted is None
    assert control.plan_work(Batch(())) is None
    ended(control, b)
    ended(control, c)
    late = started(control, asked("e", "x+"))
    assert set(late.ended) == {"b", "c"}
    assert len(late.grammars) == 1, "nobody had it any more"


def test_a_rid_may_come_again_at_once():
    control = GrammarControl(Compiler())
    half, grammars = worker()
    half.prepare(started(control, first := asked("a", "x+")))
    ended(control, first)
    half.prepare(started(control, asked("a", "y+")))

    assert accept(grammars["a"].matcher(), b"yy")
    assert not accept(grammars["a"].matcher(), b"x")


def test_a_worker_in_another_process_loads_what_was_sent():
    control = GrammarControl(Compiler())
    codec = StepCodec({"grammar": GrammarWork}, {})
    half, grammars = worker()
    work = started(control, a := asked("a", "(ab)+"))
    empty = {"num_slices": 0, "num_tokens": 0, "num_samples": 0, "num_in_flight": 0}
    plan = StepPlan(**empty, numbers=np.zeros(0, np.int32), work={"grammar": work})
    half.prepare(codec.plan(codec.encode(plan)).work["grammar"])

    assert accept(grammars["a"].matcher(), b"abab")
    ended(control, a)
    half.prepare(control.plan_work(Batch(())))
    assert not grammars
    assert not half._known
    half.close()


def test_what_this_process_has_loaded_is_not_loaded_again():
    control = GrammarControl(Compiler())
    half, grammars = worker(control.loaded)
    work = started(control, asked("a", "x+"))
    half.prepare(work)

    assert grammars["a"] is control.loaded(work.requests["a"])


def test_data_that_cannot_be_loaded_fails_its_request_only():
    half, grammars = worker()
    bad = GrammarData("d", "llguidance", b"\xff\x00 no grammar")
    half.prepare(GrammarWork(grammars=(bad,), requests={"a": "d"}))
    request = asked("a", "x+").request
    half.constraints.join(0, request, np.zeros(0, np.int32))

    assert isinstance(grammars["a"], str)
    assert half.constraints.constrains(0)
