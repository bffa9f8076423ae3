"""Requests that end early on the host path: steps launched before that is known change nothing."""

from __future__ import annotations

import pytest

from tests.parity.serving import Serving
from tests.support.random_model import write_random_model

PROMPTS = [[5, 9, 200, 31], [7] * 37, list(range(40, 90)), [11, 12]]
NEW = 40
RANDOM = {"temperature": 1.0, "frequency_penalty": 0.3}


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory):
    return write_random_model(tmp_path_factory.mktemp("model"), context_len=128)


@pytest.fixture(scope="module", params=["eager", "program"])
def runner(request):
    return request.param


@pytest.fixture(scope="module")
def free(model_dir, runner):
    """The outputs of the prompts without stops."""
    return Serving(model_dir, runner=runner).generate(PROMPTS, max_new_tokens=NEW, **RANDOM)


@pytest.fixture(params=[False, True], ids=["in turn", "overlapped"])
def serving(request, model_dir, runner):
    made = Serving(model_dir, runner=runner, overlap=request.param)
    yield made
    made.close()


def ask_all(serving, asked) -> list[str]:
    """Submit the prompts, each with its own sampling, together."""
    pairs = zip(PROMPTS, asked, strict=True)
    return [
        serving.add(prompt, **{"max_new_tokens": NEW, **RANDOM, **own}) for prompt, own in pairs
    ]


def up_to(tokens, stops, least=0):
    """The rest of an answer that ends with one of these tokens, after a minimum of others."""
    at = next((i for i, token in enumerate(tokens) if i >= least and token in stops), NEW - 1)
    return tokens[: at + 1]


def test_answers_end_with_their_own_stop_id(serving, free):
    stops = [(tokens[place],) for tokens, place in zip(free, (3, 0, 17, 30), strict=True)]
    rids = ask_all(serving, [{"stop_token_ids": stop} for stop in stops])
    serving.run()

    for rid, tokens, stop in zip(rids, free, stops, strict=True):
        assert serving.tokens[rid] == up_to(tokens, stop)
        assert (serving.finish[rid].type, serving.finish[rid].matched) == ("stop", stop[0])


def test_a_step_in_flight_at_a_stop_costs_one_token(serving, free):
    stops = [(tokens[5],) for tokens in free]
    rids = ask_all(serving, [{"stop_token_ids": stop} for stop in stops])
    serving.run()

    needed = sum(map(len, PROMPTS)) + sum(len(serving.tokens[rid]) - 1 for rid in rids)
    later = len(rids) * (serving.limits.inflight - 1)
    assert needed <= serving.scheduler.load().computed_tokens <= needed + later


def test_stop_ids_are_forbidden_until_the_least_number_of_tokens(serving, free, model_dir, runner):
    least = [6, 1, 20, 40]
    asked = [
        {"stop_token_ids": tuple(tokens[:2]), "min_new_tokens": n}
        for tokens, n in zip(free, least, strict=True)
    ]
    rids = ask_all(serving, asked)
    serving.run()

    for rid, own, prompt in zip(rids, asked, PROMPTS, strict=True):
        stops, n = own["stop_token_ids"], own["min_new_tokens"]
        found = serving.tokens[rid]
        assert len(found) >= n
        assert not set(stops) & set(found[:n])
        alone = Serving(model_dir, runner=runner).generate(
            [prompt], **{"max_new_tokens": NEW, **RANDOM, **own}
        )
        assert [found] == alone
        # forbidding is what a bias does: the same tokens, up to the least number
        biased = {str(token): -1e9 for token in stops}
        (forbidden,) = Serving(model_dir, runner=runner).generate(
            [prompt], **{"max_new_tokens": n, **RANDOM, "logit_bias": biased}
        )
        assert found[:n] == forbidden


@pytest.mark.parametrize("least", [0, 9])
def test_the_end_of_the_text_is_a_stop_id_too(serving, free, least):
    rids = [
        serving.add(p, eos_ids=(t[4],), min_new_tokens=least, max_new_tokens=NEW, **RANDOM)
        for p, t in zip(PROMPTS, free, strict=True)
    ]
    serving.run()

    for rid, tokens in zip(rids, free, strict=True):
        found = serving.tokens[rid]
        assert tokens[4] not in found[: max(least, len(found) - 1)]
        assert found == up_to(found, (tokens[4],), least)
        if not least:
            assert found == up_to(tokens, (tokens[4],))


def test_stops_of_some_leave_others_as_they_are(serving, free):
    asked = [{"stop_token_ids": (free[0][2],)}, {}, {"stop_token_ids": (free[2][1],)}, {}]
    rids = ask_all(serving, asked)
    serving.run()

    assert [serving.tokens[rid] for rid in rids[1::2]] == free[1::2]
    assert [serving.finish[rid].type for rid in rids] == ["stop", "length", "stop", "length"]


def test_the_next_turn_finds_what_was_given_out_and_nothing_after(serving, free):
    (rid, *_) = ask_all(serving, [{"stop_token_ids": (free[0][9],)}, {}, {}, {}])
    serving.run()
    given = [*PROMPTS[0], *serving.tokens[rid]]

    turn = serving.add([*PROMPTS[0], *free[0]], max_new_tokens=1)
    serving.run()

    # the stop token itself got keys and values only if a step was in flight
    assert serving.outputs[turn][0].usage.cached_tokens in (len(given) - 1, len(given))
