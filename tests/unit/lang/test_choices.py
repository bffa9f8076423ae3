from __future__ import annotations

import pytest

from sylvan import lang as sgl
from sylvan.lang.choices import mean_logprob


def decide(method, rows, alone=None):
    tokens = [[(lp, i, "t") for i, lp in enumerate(row)] for row in rows]
    return method(
        choices=[f"c{i}" for i in range(len(rows))],
        normalized_prompt_logprobs=[mean_logprob(row) for row in tokens],
        input_token_logprobs=tokens,
        output_token_logprobs=[[] for _ in rows],
        unconditional_token_logprobs=None
        if alone is None
        else [[(lp, i, None) for i, lp in enumerate(row)] for row in alone],
    )


def test_token_length_normalized_takes_the_best_mean():
    decision = decide(sgl.token_length_normalized, [[-1.0, -1.0, -1.0], [-2.0], [-0.5, -1.1]])
    assert decision.decision == "c2"
    assert decision.meta_info["normalized_prompt_logprobs"] == pytest.approx([-1, -2, -0.8])


def test_ties_go_to_the_first():
    for method in (sgl.token_length_normalized, sgl.greedy_token_selection):
        assert decide(method, [[-1.0], [-1.0]]).decision == "c0"


def test_greedy_eliminates_position_by_position():
    # The first choice has the better mean, but loses at its first token.
    rows = [[-1.0, -0.1, -0.1], [-0.9, -3.0, -3.0]]
    assert decide(sgl.token_length_normalized, rows).decision == "c0"
    assert decide(sgl.greedy_token_selection, rows).decision == "c1"


def test_greedy_continues_short_choices_with_their_mean():
    decision = decide(sgl.greedy_token_selection, [[-1.0], [-1.0, -0.5]])
    assert decision.meta_info["greedy_logprob_matrix"] == [[-1.0, -1.0], [-1.0, -0.5]]
    assert decision.decision == "c1"


def test_unconditional_prefers_what_the_prompt_made_likelier():
    rows = [[-1.0, -1.0], [-1.5, -1.5]]
    alone = [[None, -1.0], [None, -4.0]]

    decision = decide(sgl.unconditional_likelihood_normalized, rows, alone)

    assert decision.decision == "c1"
    scores = decision.meta_info["normalized_unconditional_prompt_logprobs"]
    assert scores == pytest.approx([-0.5, 0.5])


def test_unconditional_needs_the_unconditional_scores():
    assert sgl.unconditional_likelihood_normalized.requires_unconditional_logprobs
    with pytest.raises(ValueError, match="unconditional"):
        decide(sgl.unconditional_likelihood_normalized, [[-1.0]])


def test_mean_counts_certain_tokens_and_skips_missing_ones():
    assert mean_logprob([(None, 1, "a"), (0.0, 2, "b"), (-1.0, 3, "c")]) == -0.5
    assert mean_logprob([(None, 1, "a")]) == 0.0
