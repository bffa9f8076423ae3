"""Guesses in the step contract: several sampled rows a slice, verified along chains and trees.

Whatever is guessed, the tokens are those of plain decoding: a row draws by seed and position.
"""

from __future__ import annotations

import random

import pytest

from sylvan.runtime.core.req import Draft, Req
from sylvan.runtime.executor.verify import accepted_path
from sylvan.runtime.sched.capability import Capability
from tests.parity.serving import Serving
from tests.support.random_model import VOCAB, write_random_model

PROMPTS = [[5, 9, 200, 31], [7] * 17, list(range(40, 60)), [5, 9, 200, 31, 8]]
WAYS = {
    "greedy": {},
    "sampled": {"temperature": 0.9, "top_p": 0.9, "top_k": 40},
    "seeded": {"temperature": 1.3, "sampling_seed": 77},
}


class Guesser(Capability):
    """Knows what comes, and is right as often as the test wants.

    Args:
        answers: Prompt -> what plain decoding gives.
        right: Share of guesses that are what comes.
        tree: Whether wrong guesses stand beside right ones, in random order.
        count: Guesses a step.
    """

    def __init__(self, answers, *, right: float, tree: bool, count: int, seed: int) -> None:
        self._answers, self._right, self._tree, self._count = answers, right, tree, count
        self._rng = random.Random(seed)
        self.guessed = 0

    def draft(self, req: Req) -> Draft | None:
        answer = self._answers[tuple(req.request.input_ids.tolist())]
        coming = answer[req.num_outputs : req.num_outputs + self._count]
        draft = self._as_tree(coming) if self._tree else self._as_chain(coming)
        self.guessed += len(draft.tokens)
        return draft if draft.tokens else None

    def _as_chain(self, coming) -> Draft:
        tokens = tuple(self._maybe(token) for token in coming)
        return Draft(tokens, tuple(range(-1, len(tokens) - 1)))

    def _as_tree(self, coming) -> Draft:
        tokens: list[int] = []
        parents: list[int] = []
        trunk = -1
        for token in coming:
            level = [self._maybe(token), self._rng.randrange(VOCAB)]
            self._rng.shuffle(level)
            tokens += level
            parents += [trunk, trunk]
            trunk = len(tokens) - 2 + (level.index(token) if token in level else 0)
        return Draft(tuple(tokens), tuple(parents))

    def _maybe(self, token: int) -> int:
        return token if self._rng.random() < self._right else self._rng.randrange(VOCAB)


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory):
    return write_random_model(tmp_path_factory.mktemp("model"), context_len=128)


@pytest.fixture(scope="module")
def expected(model_dir):
    serving = Serving(model_dir, options={"attention": "reference"})
    return {way: serving.generate(PROMPTS, max_new_tokens=24, **ask) for way, ask in WAYS.items()}


def guessing(model_dir, answers, *, attention="reference", **options):
    shape = {"right": 1.0, "tree": False, "count": 4, "seed": 1} | options.pop("shape", {})
    by_prompt = {tuple(p): a for p, a in zip(PROMPTS, answers, strict=True)}
    guesser = Guesser(by_prompt, **shape)
    options = {"options": {"attention": attention}, "capabilities": (guesser,)} | options
    return Serving(model_dir, **options), guesser


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("tree", [False, True], ids=["chain", "tree"])
@pytest.mark.parametrize("right", [0.0, 0.6, 1.0])
def test_tokens_are_those_without_guesses(model_dir, expected, way, tree, right):
    shape = {"right": right, "tree": tree}
    serving, guesser = guessing(model_dir, expected[way], shape=shape)

    assert serving.generate(PROMPTS, max_new_tokens=24, **WAYS[way]) == expected[way]
    assert guesser.guessed > 50
    assert serving.scheduler.audit() == 0


def test_requests_with_penalties_are_served_without_guesses(model_dir, expected):
    asked = {"max_new_tokens": 24, "frequency_penalty": 0.7}
    plain = Serving(model_dir, options={"attention": "reference"})
    serving, guesser = guessing(model_dir, expected["greedy"])

    assert serving.generate(PROMPTS, **asked) == plain.generate(PROMPTS, **asked)
    assert guesser.guessed == 0


@pytest.mark.parametrize("tree", [False, True], ids=["chain", "tree"])
def test_right_guesses_save_steps(model_dir, expected, tree):
    serving, _ = guessing(model_dir, expected["greedy"], shape={"tree": tree})
    serving.generate(PROMPTS, max_new_tokens=24)

    assert serving.scheduler.load().steps <= 8  # 24 tokens each: a prompt, then 5 a step


@pytest.mark.parametrize("seed", range(4))
def test_guesses_go_with_chunks_retraction_and_a_warm_cache(model_dir, expected, seed):
    tree = seed % 2 == 0
    serving, _ = guessing(
        model_dir,
        expected["sampled"],
        shape={"right": 0.6, "tree": tree, "seed": seed, "count": 3},
        pages=14,
        page_size=8,
        chunk_tokens=8,
        max_batch_tokens=48,
        conservativeness=0.0,
    )
    for _ in range(2):
        found = serving.generate(PROMPTS, max_new_tokens=24, **WAYS["sampled"])
        assert found == expected["sampled"]

    load = serving.scheduler.load()
    assert load.retractions > 0
    assert load.cached_prompt_tokens > 0
    assert serving.scheduler.audit() == 0


def test_trees_that_a_backend_cannot_verify_cost_speed_only(model_dir, expected):
    serving, guesser = guessing(
        model_dir, expected["greedy"], attention="torch", shape={"tree": True}
    )

    assert serving.generate(PROMPTS, max_new_tokens=24) == expected["greedy"]
    assert guesser.guessed > 0
    assert serving.scheduler.load().steps == 24


def test_the_longest_right_path_is_accepted():
    parents, guesses = (-1, -1, 0, 1, 1, 4), (7, 8, 9, 9, 3, 5)

    assert accepted_path(parents, guesses, [8, 0, 3, 0, 0, 5, 0]) == [1, 4, 5]
    assert accepted_path(parents, guesses, [7, 9, 0, 0, 0, 0, 0]) == [0, 2]
    assert accepted_path(parents, guesses, [1, 9, 0, 0, 0, 0, 0]) == []
