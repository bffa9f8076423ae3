"""Matchers beside the sampler, driven as the worker drives them."""

from __future__ import annotations

import numpy as np
import pytest

from sylvan.protocol.requests import GenerateRequest, LogprobOptions, ThinkingOptions
from sylvan.protocol.sampling import SamplingParams
from sylvan.runtime.features.grammar.backends import llguidance
from sylvan.runtime.features.grammar.forced import Jumper
from sylvan.runtime.features.grammar.matchers import Matchers
from sylvan.runtime.features.grammar.overlap import Overlap
from sylvan.runtime.features.grammar.spec import GrammarSpec
from sylvan.runtime.sampling.constraints import RowOutcome
from sylvan.runtime.sampling.params import SamplingBatch, SamplingSlots
from tests.support.grammar import END, TOKENS, make_backend, vocabulary

PROMPT = 4
BACKEND = make_backend("llguidance")
ALL_BUT_THE_END = set(range(-(-len(TOKENS) // 32) * 32)) - {END}


class Bench:
    """One request in slot 3; each `step` samples one row."""

    def __init__(self, *, jumps: bool = False, outputs: bytes = b"", **fields: object) -> None:
        sampling = SamplingParams(max_new_tokens=50, sampling_seed=0, **fields.pop("sampling"))
        self.request = GenerateRequest(
            rid="a",
            input_ids=np.zeros(PROMPT, np.int32),
            output_ids=np.zeros(0, np.int32),
            sampling=sampling,
            **{"eos_ids": (END,)} | fields,
        )
        spec = GrammarSpec(*sampling.grammar) if sampling.grammar else None
        grammars = {"a": BACKEND.compile(spec)} if spec else {}
        self.matchers = Matchers(grammars, vocabulary, len(TOKENS), jumps=jumps)
        self.params = SamplingSlots(8, len(TOKENS))
        self.matchers.join(3, self.request, np.frombuffer(outputs, np.uint8).astype(np.int32))
        self.position = PROMPT + len(outputs)

    def batch(self, position: int) -> SamplingBatch:
        return SamplingBatch(np.array([3], np.int32), np.array([position]), self.params)

    def mask(self, position: int | None = None) -> set[int] | None:
        batch = self.batch(self.position if position is None else position)
        self.matchers.prepare(batch.slots, batch.positions)
        found = self.matchers.masks(batch)
        if found is None:
            return None
        assert found.rows.tolist() == [0]
        bits = np.unpackbits(found.bits.view(np.uint8), bitorder="little")
        return set(np.flatnonzero(bits).tolist())

    def step(self, token: int, position: int | None = None) -> RowOutcome | None:
        position = self.position if position is None else position
        self.mask(position)
        found = self.matchers.advance(self.batch(position), np.array([token], np.int32))
        outcome = found.get(0)
        self.position += 1 if outcome is None else len(outcome.tokens)
        return outcome

    def write(self, text: bytes) -> None:
        for byte in text:
            assert self.step(byte) is None


@pytest.fixture(autouse=True)
def _close(request):
    benches = []
    made = Bench.__init__

    def note(self, **keywords):
        made(self, **keywords)
        benches.append(self)

    request.getfixturevalue("monkeypatch").setattr(Bench, "__init__", note)
    yield
    for bench in benches:
        bench.matchers.close()


def test_a_request_without_grammar_is_left_alone() -> None:
    bench = Bench(sampling={})

    assert bench.mask() is None
    assert bench.step(65) is None


def test_the_end_comes_where_the_grammar_accepts() -> None:
    bench = Bench(sampling={"regex": "ab*"})

    assert bench.mask() == {ord("a")}
    bench.write(b"a")
    assert bench.mask() == {ord("b"), END}
    assert bench.step(END) == RowOutcome((END,), ended=True)


def test_stop_tokens_may_end_it_too_and_none_may_with_ignore_eos() -> None:
    stops = Bench(sampling={"regex": "ab*", "stop_token_ids": (7,)}, outputs=b"a")
    never = Bench(sampling={"regex": "ab*"}, outputs=b"a", eos_ids=())

    assert stops.mask() == {ord("b"), END, 7}
    assert never.mask() == {ord("b")}


def test_an_output_that_cannot_continue_ends_at_once() -> None:
    bench = Bench(sampling={"regex": "ab"})
    bench.write(b"a")

    assert bench.step(ord("b")) == RowOutcome((ord("b"),), ended=True)


def test_a_grammar_of_the_empty_text_leaves_but_the_end() -> None:
    bench = Bench(sampling={"regex": "()"})

    assert bench.mask() == {END}
    assert bench.step(END) == RowOutcome((END,), ended=True)


def test_a_token_that_is_not_allowed_fails_the_request() -> None:
    bench = Bench(sampling={"regex": "ab"})

    outcome = bench.step(ord("z"))

    assert outcome is not None
    assert outcome.error


def test_a_grammar_that_gives_up_fails_the_request() -> None:
    bench = Bench(sampling={"regex": "((((a{0,999}){0,999}){0,999}){0,999}){0,999}"})
    errors = [o.error for _ in range(30) if (o := bench.step(ord("a"))) is not None]

    assert errors
    assert "too many" in errors[0]


def test_outputs_of_before_are_taken_in() -> None:
    bench = Bench(sampling={"regex": "abc?d"}, outputs=b"ab")

    assert bench.mask() == {ord("c"), ord("d")}


def test_thinking_is_free_and_the_grammar_starts_after_it() -> None:
    bench = Bench(sampling={"regex": "yes|no"}, thinking=ThinkingOptions(ends=((60, 61),)))

    for token in (1, 60, 60, 1, 60):
        assert bench.mask() == ALL_BUT_THE_END
        assert bench.step(token) is None
    assert bench.step(61) is None
    assert {TOKENS[i] for i in bench.mask()} == {b"y", b"ye", b"yes", b"n", b"no"}


def test_thinking_is_found_in_outputs_of_before() -> None:
    bench = Bench(
        sampling={"regex": "ab"},
        outputs=bytes([1, 60, 61, 97]),
        thinking=ThinkingOptions(ends=((60, 61),)),
    )

    assert bench.mask() == {ord("b")}


def test_what_is_certain_comes_with_the_token_before_it() -> None:
    bench = Bench(sampling={"regex": "(k|l)it=[0-9]!"}, jumps=True)

    assert bench.step(ord("k")) == RowOutcome(tuple(b"kit="))
    assert bench.mask(PROMPT + 1) is None  # launched before that was known
    assert bench.step(ord("z"), PROMPT + 1) == RowOutcome()
    assert bench.mask() == {ord(d) for d in "0123456789"}
    assert bench.step(ord("7")) == RowOutcome(tuple(b"7!"), ended=True)
    assert bench.matchers.certain_tokens == 4


def test_what_is_certain_at_the_start_replaces_the_first_token() -> None:
    bench = Bench(sampling={"regex": "kit(a|b)"}, jumps=True)

    assert bench.mask() is None
    assert bench.step(ord("z")) == RowOutcome(tuple(b"kit"))
    assert bench.mask() == {ord("a"), ord("b")}


def test_log_probabilities_are_those_of_a_pass_each() -> None:
    bench = Bench(sampling={"regex": "key"}, jumps=True, logprobs=LogprobOptions())

    assert bench.step(ord("k")) is None
    assert bench.step(ord("e")) is None
    assert bench.step(ord("y")) == RowOutcome((ord("y"),), ended=True)


def test_a_request_whose_grammar_is_gone_fails() -> None:
    bench = Bench(sampling={"regex": "a"})
    matchers = Matchers({}, vocabulary, len(TOKENS), jumps=False)
    matchers.join(3, bench.request, np.zeros(0, np.int32))

    assert matchers.advance(bench.batch(PROMPT), np.array([1], np.int32))[0].error


def test_a_slot_is_forgotten_when_its_request_leaves() -> None:
    bench = Bench(sampling={"regex": "ab"})
    bench.matchers.leave(3)

    assert bench.mask() is None
    assert bench.step(5) is None


def test_a_spent_budget_forces_the_end_of_thinking() -> None:
    bench = Bench(sampling={}, thinking=ThinkingOptions(ends=((60, 61),), budget=3))

    for token in (1, 60, 2):
        assert bench.mask() is None
        assert bench.step(token) is None
    assert bench.mask() == {60}
    assert bench.step(60) is None
    assert bench.mask() == {61}
    assert bench.step(61) is None
    assert bench.mask() is None


def test_thinking_that_ends_within_its_budget_is_left_alone() -> None:
    bench = Bench(sampling={}, thinking=ThinkingOptions(ends=((60, 61), (70,)), budget=3))

    for token in (1, 70, 2, 3, 4, 5):
        assert bench.mask() is None
        assert bench.step(token) is None


def test_budget_counts_from_the_marker_that_begins_thinking() -> None:
    thinking = ThinkingOptions(ends=((61,),), starts=((50, 51),), inside=False, budget=1)
    bench = Bench(sampling={}, thinking=thinking)

    for token in (50, 51, 7):
        assert bench.mask() is None
        assert bench.step(token) is None
    assert bench.mask() == {61}


def test_output_that_does_not_begin_with_thinking_has_no_budget() -> None:
    thinking = ThinkingOptions(ends=((61,),), starts=((50, 51),), inside=False, budget=0)
    bench = Bench(sampling={}, thinking=thinking)

    for token in (50, 52, 50, 51, 3):
        assert bench.mask() is None
        assert bench.step(token) is None


def test_budget_of_nothing_ends_thinking_at_once() -> None:
    bench = Bench(sampling={"regex": "ab"}, thinking=ThinkingOptions(ends=((60, 61),), budget=0))

    assert bench.mask() == {60}
    assert bench.step(60) is None
    assert bench.mask() == {61}
    assert bench.step(61) is None
    assert bench.mask() == {ord("a")}


def test_budget_continues_from_outputs_of_before() -> None:
    thinking = ThinkingOptions(ends=((60, 61),), budget=2)
    bench = Bench(sampling={}, outputs=bytes([1, 2, 60]), thinking=thinking)

    assert bench.mask() == {61}


def test_what_is_certain_is_the_only_id_where_nothing_jumps() -> None:
    bench = Bench(sampling={"regex": 'x"name"x(a|b)'})
    texts = []
    for _ in range(3):
        (only,) = bench.mask()
        texts.append(TOKENS[only])
        assert bench.step(only) is None

    assert texts == [b"x", b'"name"', b"x"]  # as the tokenizer writes it, not byte by byte
    assert bench.mask() == {ord("a"), ord("b")}


@pytest.mark.parametrize("count", range(9))
def test_outputs_of_before_may_be_split_in_another_way(count) -> None:
    text = b'x"name"x'
    bench = Bench(sampling={"regex": 'x"name"x(a|b)'}, outputs=text[:count])
    for byte in text[count:]:
        assert bench.step(byte) is None

    assert bench.mask() == {ord("a"), ord("b")}


def test_jumps_change_nothing_but_when_tokens_come() -> None:
    def written(*, jumps: bool) -> list[int]:
        bench = Bench(sampling={"regex": '("name":(yes|no) the){3}!'}, jumps=jumps)
        tokens: list[int] = []
        for _ in range(60):
            chance = np.random.default_rng(len(tokens))  # of the position, as the sampler's is
            mask = bench.mask()
            token = 0 if mask is None else int(chance.choice(sorted(mask)))
            outcome = bench.step(token)
            tokens += (token,) if outcome is None else outcome.tokens
            if outcome is not None and outcome.ended:
                return tokens
        raise AssertionError("it never ends")

    assert written(jumps=True) == written(jumps=False)


def test_the_grammar_is_looked_past_once_for_each_token_that_is_chosen(monkeypatch) -> None:
    looks = []
    look = Jumper.advance
    monkeypatch.setattr(Jumper, "advance", lambda self, m: looks.append(m) or look(self, m))
    bench = Bench(sampling={"regex": "(kit(a|b))+"})
    for text in (b"kit", b"a", b"kit", b"b"):
        bench.write(text)

    assert len(looks) == 4  # at the start, and after "a", "k" (it might end there) and "b"


def test_nothing_is_looked_for_where_the_output_ends(monkeypatch) -> None:
    looks = []
    look = Jumper.advance
    monkeypatch.setattr(Jumper, "advance", lambda self, m: looks.append(m) or look(self, m))
    bench = Bench(sampling={"regex": "[ab]*"}, outputs=b"a" * 47)
    del looks[:]
    bench.write(b"aaa")

    assert len(looks) == 2  # of 50 tokens at most, the last has nothing after it


def test_masks_are_filled_beside_the_forward_pass_where_that_is_wise(monkeypatch) -> None:
    monkeypatch.setattr(Overlap, "beside", lambda self, num_masks: num_masks == 1)
    bench = Bench(sampling={"regex": "(a|b|yes)+"})

    batch = bench.batch(bench.position)
    assert bench.matchers.prepare(batch.slots, batch.positions)
    assert bench.matchers._filling is not None
    assert {TOKENS[i] for i in bench.mask()} == {b"a", b"b", b"y", b"ye", b"yes"}
    assert bench.matchers.ready


def test_passes_and_masks_are_measured(monkeypatch) -> None:
    notes = []
    monkeypatch.setattr(Overlap, "filled", lambda self, count, seconds: notes.append(count))
    monkeypatch.setattr(Overlap, "passed", lambda self, seconds: notes.append("pass"))
    monkeypatch.setattr(Overlap, "beside", lambda self, num_masks: len(notes) == 2)
    bench = Bench(sampling={"regex": "[ab]+"})
    bench.write(b"aab")

    assert notes == [1, "pass", "pass", 1, "pass"]  # beside the second pass nothing is measured


def test_masks_of_some_rows_are_distinguished() -> None:
    one = Bench(sampling={"regex": "a|b"})
    matchers, params = one.matchers, one.params
    matchers.join(5, one.request, np.frombuffer(b"", np.uint8).astype(np.int32))
    slots = np.array([1, 3, 5], np.int32)
    positions = np.full(3, PROMPT)
    assert matchers.prepare(slots, positions)

    whole = matchers.masks(SamplingBatch(slots, positions, params))
    part = matchers.masks(SamplingBatch(slots[2:], positions[2:], params))

    assert whole.rows.tolist() == [1, 2]
    assert part.rows.tolist() == [0]
    assert part.bits.tolist() == whole.bits[1:].tolist()
    assert matchers.masks(SamplingBatch(slots[:1], positions[:1], params)) is None


@pytest.mark.parametrize("cores", [2, 4])
def test_masks_are_the_same_on_few_and_on_many_cores(monkeypatch, cores) -> None:
    monkeypatch.setattr(llguidance, "_cores", lambda: cores)
    one = Bench(sampling={"regex": "a(b|c)(d|e)(f|g)"})
    matchers, params = one.matchers, one.params
    texts = [b"a", b"ab", b"abd", b"ac", b"ace"]
    for slot, text in enumerate(texts):
        matchers.join(slot, one.request, np.frombuffer(text, np.uint8).astype(np.int32))
    slots = np.arange(len(texts), dtype=np.int32)
    positions = np.array([PROMPT + len(text) for text in texts])
    assert matchers.prepare(slots, positions)
    masks = matchers.masks(SamplingBatch(slots, positions, params))

    bits = np.unpackbits(masks.bits.view(np.uint8), axis=1, bitorder="little")
    found = [bytes(np.flatnonzero(row).tolist()) for row in bits]
    assert found == [b"bc", b"de", b"fg", b"de", b"fg"]


OPENS = ThinkingOptions(ends=((61,),), starts=((50, 51),), inside=False)
"""The model may write the marker "23" before its answer; "=" ends the thinking."""


@pytest.mark.parametrize("jumps", [False, True])
def test_an_output_may_open_its_thinking_before_the_grammar(jumps) -> None:
    bench = Bench(sampling={"regex": "[ab]c(d|e)"}, thinking=OPENS, jumps=jumps)

    assert bench.mask() == {ord("a"), ord("b"), 50}
    assert bench.step(50) is None
    assert bench.mask() == {51}  # the grammar has no 2: it has to become the marker
    assert bench.step(51) is None
    for token in (ord("z"), 50, 51):
        assert bench.mask() == ALL_BUT_THE_END
        assert bench.step(token) is None
    assert bench.step(61) is None
    assert bench.mask() == {ord("a"), ord("b")}  # no second time


def test_an_output_need_not_think() -> None:
    bench = Bench(sampling={"regex": "[ab]+"}, thinking=OPENS)

    assert bench.step(ord("a")) is None
    assert bench.mask() == {ord("a"), ord("b"), END}


def test_a_marker_that_the_grammar_allows_too_is_recognised_by_its_end() -> None:
    answer = Bench(sampling={"regex": "[0-9]+!"}, thinking=OPENS)
    thought = Bench(sampling={"regex": "[0-9]+!"}, thinking=OPENS)
    digits = {ord(d) for d in "0123456789"}

    assert answer.mask() == digits
    answer.write(b"29")
    assert answer.mask() == digits | {ord("!")}

    thought.write(b"23?!x=")
    assert thought.mask() == digits  # what was a marker is no part of the answer


def test_what_is_certain_waits_until_it_is_certain_that_nothing_is_thought() -> None:
    def begun() -> Bench:
        return Bench(sampling={"regex": "kit(a|b)"}, thinking=OPENS, jumps=True)

    answer, thought = begun(), begun()
    assert answer.mask() == {ord("k"), 50}
    assert answer.step(ord("k")) == RowOutcome(tuple(b"kit"))
    assert answer.mask() == {ord("a"), ord("b")}

    thought.write(b"23x")
    assert thought.step(ord("=")) == RowOutcome(tuple(b"=kit"))
    assert thought.mask() == {ord("a"), ord("b")}


def test_an_answer_that_is_certain_to_its_end_may_come_after_thinking_too() -> None:
    def begun(outputs: bytes = b"") -> Bench:
        sampling = {"regex": "kit"}
        return Bench(sampling=sampling, thinking=OPENS, jumps=True, outputs=outputs)

    assert begun().step(ord("k")) == RowOutcome(tuple(b"kit"), ended=True)
    assert begun(b"23x=").step(0) == RowOutcome(tuple(b"kit"), ended=True)


def test_the_end_may_come_at_once_where_the_answer_may_be_empty() -> None:
    bench = Bench(sampling={"regex": "[ab]*"}, thinking=OPENS)

    assert bench.mask() == {ord("a"), ord("b"), 50, END}
    assert bench.step(END) == RowOutcome((END,), ended=True)
    half = Bench(sampling={"regex": "[ab]*"}, thinking=OPENS, outputs=bytes([50]))
    assert half.mask() == {51}


@pytest.mark.parametrize("count", range(8))
def test_thinking_that_was_opened_is_found_in_outputs_of_before(count) -> None:
    text = b"23x2=key"
    bench = Bench(sampling={"regex": "key(a|b)"}, thinking=OPENS, outputs=text[:count])
    for byte in text[count:]:
        assert bench.step(byte) is None

    assert bench.mask() == {ord("a"), ord("b")}


def test_a_budget_bounds_thinking_that_the_output_opened() -> None:
    thinking = ThinkingOptions(ends=((60, 61),), starts=((50, 51),), inside=False, budget=1)
    bench = Bench(sampling={"regex": "[ab]"}, thinking=thinking)

    bench.write(b"23x")
    assert bench.mask() == {60}
    bench.write(b"<")
    assert bench.mask() == {61}
    bench.write(b"=")
    assert bench.mask() == {ord("a"), ord("b")}


def test_one_of_several_markers_may_be_longer_than_another() -> None:
    thinking = ThinkingOptions(ends=((61,),), starts=((50,), (10, 50)), inside=False)
    bench = Bench(sampling={"regex": "[ab]"}, thinking=thinking)

    assert bench.mask() == {ord("a"), ord("b"), 10, 50}
    assert bench.step(10) is None
    assert bench.mask() == {50}
    bench.write(b"2x=")
    assert bench.mask() == {ord("a"), ord("b")}


def test_a_header_may_stand_before_the_answer() -> None:
    thinking = ThinkingOptions(
        ends=((61,),), starts=((50, 51),), headers=((50, 52), (33, 50, 52), (33,)), inside=False
    )

    def begun(outputs: bytes) -> set[int] | None:
        return Bench(sampling={"regex": "[ab]+"}, thinking=thinking, outputs=outputs).mask()

    letters = {ord("a"), ord("b")}
    assert begun(b"") == letters | {50, 33}
    assert begun(b"2") == {51, 52}
    assert begun(b"24") == letters
    assert begun(b"!") == letters | {50}  # one header is the beginning of another
    assert begun(b"!2") == {52}
    assert begun(b"!24") == letters
    assert begun(b"23x=") == letters | {50, 33}
    assert begun(b"23x=2") == {52}  # it has thought
    assert begun(b"23x=!24") == letters
    assert begun(b"23x=!24a") == letters | {END}


def test_the_end_of_thinking_is_found_inside_other_tokens() -> None:
    name = TOKENS.index(b'"name"')
    quoted = ThinkingOptions(ends=(tuple(b'e"'),), inside=True)
    bench = Bench(sampling={"regex": "[ab]"}, thinking=quoted)
    assert bench.step(name) is None
    assert bench.mask() == {ord("a"), ord("b")}


@pytest.mark.parametrize(("regex", "wanted"), [('e"[ab]', {97, 98}), ("[ab]", None)])
def test_an_answer_may_begin_in_the_token_that_ends_thinking(regex, wanted) -> None:
    name = TOKENS.index(b'"name"')
    bench = Bench(sampling={"regex": regex}, thinking=ThinkingOptions(ends=(tuple(b"nam"),)))
    outcome = bench.step(name)

    if wanted is None:
        assert "same token" in outcome.error
    else:
        assert outcome is None
        assert bench.mask() == wanted


def test_masks_of_outputs_that_may_think_stand_beside_others() -> None:
    one = Bench(sampling={"regex": "kit(a|b)"}, thinking=OPENS)
    matchers, params = one.matchers, one.params
    free = Bench(sampling={"regex": "kit(a|b)"}).request
    for slot, (request, text) in enumerate(
        [(one.request, b""), (free, b""), (one.request, b"2"), (one.request, b"kit")]
    ):
        matchers.join(slot, request, np.frombuffer(text, np.uint8).astype(np.int32))
    slots, positions = np.arange(4, dtype=np.int32), np.array([4, 4, 5, 7])
    assert matchers.prepare(slots, positions)
    masks = matchers.masks(SamplingBatch(slots, positions, params))

    bits = np.unpackbits(masks.bits.view(np.uint8), axis=1, bitorder="little")
    assert [bytes(np.flatnonzero(row).tolist()) for row in bits] == [b"2k", b"k", b"3", b"ab"]


def test_thinking_may_end_the_output_only_where_no_answer_is_due() -> None:
    free = Bench(sampling={}, thinking=ThinkingOptions(ends=((61,),), budget=9))
    endless = Bench(sampling={"regex": "a"}, thinking=ThinkingOptions(ends=((61,),)), eos_ids=())

    assert free.mask() is None
    assert endless.mask() is None
