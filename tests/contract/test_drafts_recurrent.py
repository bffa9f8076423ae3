"""Draft tokens with recurrent layers: the state goes back to where they were right, bit for bit."""

from __future__ import annotations

import numpy as np
import pytest

from sylvan.protocol.requests import LogprobOptions
from sylvan.runtime.features.speculation.control import Speculation
from sylvan.runtime.features.speculation.ngram import NgramDrafter
from tests.parity.checkpoints import VOCAB, write
from tests.parity.rare import RECURRENT
from tests.parity.serving import Serving
from tests.support.oracle_drafter import OracleDrafter

FAMILIES = ("lfm2", "jamba", "qwen3-next", "mamba2")
PROMPTS = [[5, 9, 100, 31], [7] * 17, list(range(40, 60)), [5, 9, 100, 31, 8]]
WAYS = {
    "greedy": {},
    "sampled": {"temperature": 0.9, "top_p": 0.9, "top_k": 40},
    "penalised": {"temperature": 0.8, "frequency_penalty": 0.7},
}


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """family -> its directory, and what plain decoding gives."""
    made = {}

    def get(family):
        if family not in made:
            path = tmp_path_factory.mktemp(family)
            write(RECURRENT[family](), len(family), path)
            plain = Serving(path, runner="auto")
            answers = {
                way: plain.generate(PROMPTS, max_new_tokens=20, **ask) for way, ask in WAYS.items()
            }
            made[family] = path, answers
        return made[family]

    return get


def drafting(path, answers, *, right, tree=False, count=4, **options):
    drafter = OracleDrafter(
        {tuple(p): a for p, a in zip(PROMPTS, answers, strict=True)},
        VOCAB,
        right=right,
        tree=tree,
        count=count,
    )
    return Serving(path, capabilities=(drafter,), **{"runner": "auto"} | options), drafter


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("right", [0.0, 0.6, 1.0])
def test_tokens_are_those_without_drafts(models, family, right):
    path, answers = models(family)
    for way, ask in WAYS.items():
        serving, drafter = drafting(path, answers[way], right=right)
        for _ in range(2):  # from the prefix cache, too
            assert serving.generate(PROMPTS, max_new_tokens=20, **ask) == answers[way]
        assert drafter.drafted > 50
        assert serving.scheduler.audit() == 0
    load = serving.scheduler.load()
    assert load.verified_drafts > 10
    assert (load.accept_rate == 1.0) == (right == 1.0)


def test_op_by_op_too(models):
    path, _ = models("qwen3-next")
    plain = Serving(path).generate(PROMPTS, max_new_tokens=12)
    serving, drafter = drafting(path, plain, right=0.6, runner="eager")

    assert serving.generate(PROMPTS, max_new_tokens=12) == plain
    assert drafter.drafted > 30


@pytest.mark.parametrize("share", [0.0, 0.7])
def test_log_probabilities_have_the_bits_of_plain_steps(models, share):
    path, answers = models("lfm2")
    everything = LogprobOptions(top=3, token_ids=tuple(range(0, VOCAB, 7)))
    plain = Serving(path, runner="auto")
    drafted, _ = drafting(path, answers["sampled"], right=share)
    for serving in (plain, drafted):
        for prompt in PROMPTS:
            serving.add(prompt, max_new_tokens=20, logprobs=everything, **WAYS["sampled"])
        serving.run()

    for rid, tokens in plain.tokens.items():
        assert drafted.tokens[rid] == tokens
        want, got = (
            np.concatenate([output.logprobs.chosen_logprobs for output in outputs])
            for outputs in (plain.outputs[rid], drafted.outputs[rid])
        )
        assert np.array_equal(want, got)


def test_what_a_request_had_seen_is_kept_where_its_drafts_were_wrong(models):
    """A follow-up continues from the state after the last accepted draft, not from a boundary."""
    path, answers = models("lfm2")
    serving, _ = drafting(path, answers["greedy"], right=0.0)
    first = serving.generate(PROMPTS[:1], max_new_tokens=10)[0]
    before = serving.scheduler.load().cached_prompt_tokens
    longer = [*PROMPTS[0], *first, 11]
    found = serving.generate([longer], max_new_tokens=6)

    assert serving.scheduler.load().cached_prompt_tokens - before == len(longer) - 2
    assert found == Serving(path, runner="auto").generate([longer], max_new_tokens=6)


@pytest.mark.parametrize("seed", range(2))
def test_drafts_go_with_chunks_and_retraction(models, seed):
    path, answers = models("qwen3-next")
    serving, _ = drafting(
        path,
        answers["sampled"],
        right=0.5 + 0.3 * seed,
        count=3,
        pages=9,
        chunk_tokens=8,
        max_batch_tokens=48,
        conservativeness=0.0,
        preempt_every=5,
    )
    for _ in range(2):
        found = serving.generate(PROMPTS, max_new_tokens=20, **WAYS["sampled"])
        assert found == answers["sampled"]
    assert serving.scheduler.audit() == 0


PATHS = {"tree_paths": 40, "tree_depth": 4}


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("right", [0.0, 0.6, 1.0])
def test_trees_branch_from_the_state_before_them(models, family, right):
    path, answers = models(family)
    for way, ask in WAYS.items():
        serving, drafter = drafting(path, answers[way], right=right, tree=True, options=PATHS)
        for _ in range(2):
            assert serving.generate(PROMPTS, max_new_tokens=20, **ask) == answers[way]
        assert drafter.drafted > 50
        assert serving.scheduler.load().verified_drafts > 10
        assert serving.scheduler.audit() == 0


def test_trees_without_room_for_paths_cost_speed_only(models):
    path, answers = models("lfm2")
    serving, drafter = drafting(path, answers["greedy"], right=1.0, tree=True)

    assert serving.generate(PROMPTS, max_new_tokens=20) == answers["greedy"]
    assert drafter.drafted > 0


def test_ngram_speculation_as_served(models):
    path, _ = models("lfm2")
    prompt = [[3, 4, 5, 6] * 6]
    plain = Serving(path, runner="auto").generate(prompt, max_new_tokens=40)
    speculation = Speculation(NgramDrafter(1, 8), 6, VOCAB, adaptive=False)
    serving = Serving(path, runner="auto", capabilities=(speculation,))

    assert serving.generate(prompt, max_new_tokens=40) == plain
    assert serving.scheduler.load().verified_drafts > 0
