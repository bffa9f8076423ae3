from __future__ import annotations

import pytest

from sylvan.bench.load import Measured
from sylvan.bench.metrics import summary, token_moments
from sylvan.bench.outcome import RequestRecord, TokenTimer


def outcome(**fields):
    known = {"prompt_tokens": 10, "output_tokens": 3, "ttft_s": 1.0, "latency_s": 2.0}
    return RequestRecord(**{**known, "gaps_s": [0.25, 0.75], **fields})


def test_times_of_a_stream():
    found = RequestRecord(prompt_tokens=4)
    reception = TokenTimer(found, sent_s=10.0)
    reception.tokens(1, 10.5)
    reception.tokens(0, 10.6)
    reception.tokens(2, 11.5)
    reception.end(12.0)

    assert (found.ttft_s, found.latency_s, found.gaps_s) == (0.5, 2.0, [0.5, 0.5])


def test_an_answer_in_one_piece_has_no_first_token_of_its_own():
    found = RequestRecord(prompt_tokens=4)
    TokenTimer(found, sent_s=10.0).end(12.0)
    assert (found.ttft_s, found.latency_s) == (2.0, 2.0)


def test_figures_of_a_run():
    outcomes = [
        outcome(cached_tokens=4),
        outcome(sent_s=1.0, due_s=0.5, ttft_s=0.5, latency_s=1.5, accept_length=2.0),
        outcome(error="500: no", latency_s=0.0),
    ]

    found = summary(Measured(outcomes, 4.0, 2), {"ttft": 0.6, "e2e": 9.0})

    assert (found["completed"], found["failed"]) == (2, 1)
    assert (found["total_input_tokens"], found["total_output_tokens"]) == (20, 6)
    assert found["total_cached_tokens"] == 4
    assert found["request_throughput"] == 0.5
    assert found["output_throughput"] == 1.5
    assert found["concurrency"] == 3.5 / 4
    assert found["median_ttft_ms"] == 750
    assert found["mean_tpot_ms"] == 500
    assert found["median_itl_ms"] == 500
    assert found["max_itl_ms"] == 750
    assert found["p99_e2e_latency_ms"] == pytest.approx(1995)
    assert found["accept_length"] == 2.0
    assert found["goodput"] == 0.25
    assert found["goodput_share"] == pytest.approx(1 / 3)
    assert found["max_output_tokens_per_s"] == 4
    assert found["send_delay_p99_ms"] == pytest.approx(490)


def test_nothing_that_succeeds_gives_zeros():
    found = summary(Measured([outcome(error="x")], 1.0, 1), {})
    assert found["completed"] == 0
    assert found["median_ttft_ms"] == 0
    assert "goodput" not in found


def test_moments_of_tokens():
    assert token_moments(outcome(sent_s=1.0)) == [2.0, 2.25, 3.0]


def test_the_steady_state_lies_between_the_first_end_and_the_last_request():
    # answers of 3 tokens, at 1.0, 1.25 and 2.0 s after they were asked for
    outcomes = [outcome(sent_s=at) for at in (0.0, 0.5, 1.0, 4.0)]
    found = summary(Measured(outcomes, 9.0, 3), {})

    ended_s = min(each.sent_s + each.latency_s for each in outcomes)
    inside = [m for each in outcomes for m in token_moments(each) if ended_s <= m < 4.0]
    assert found["steady_output_throughput"] == pytest.approx(len(inside) / (4.0 - ended_s))
    assert 0 < len(inside) < 9
    assert summary(Measured(outcomes[:1], 9.0, 1), {})["steady_output_throughput"] is None
    assert summary(Measured([], 9.0, 1), {})["steady_output_throughput"] is None
