"""Draft tokens beside LoRA adapters: each request answers as its adapter does without them."""

from __future__ import annotations

import pytest

from sylvan.kernels.native.library import describe
from sylvan.runtime.core.req import Req
from sylvan.runtime.features.speculation.api import Proposal
from sylvan.runtime.features.speculation.control import Speculation
from sylvan.runtime.features.speculation.head_control import HeadSpeculation
from sylvan.runtime.features.speculation.heads import head_worker
from sylvan.runtime.features.speculation.ngram import NgramDrafter
from tests.support.adapters import AdapterServing, write_random_adapter
from tests.support.draft_heads import write_head
from tests.support.random_model import VOCAB, write_random_model

NEW = 16
PROMPTS = [[5, 9, 200, 31] * 4, [7] * 17]


class Forking:
    """Implements `Drafter`: what came before, with another token beside each draft token."""

    def __init__(self) -> None:
        self._chains = NgramDrafter(1, 8)

    def propose(self, req: Req, limit: int) -> Proposal:
        tokens: list[int] = []
        parents: list[int] = []
        last = -1
        for token in self._chains.propose(req, limit // 2).tokens:
            tokens += [(token + 1) % VOCAB, token]
            parents += [last, last]
            last = len(tokens) - 1
        return Proposal(tuple(tokens), 0, tuple(parents))

    def forget(self, req: Req) -> None:
        self._chains.forget(req)


@pytest.mark.parametrize("kind", ["ngram", "eagle3", "trees"])
def test_tokens_are_those_of_each_adapter_without(tmp_path, kind):
    if describe().variant is None:
        pytest.skip("kernels are not compiled")
    model = write_random_model(tmp_path / "model", context_len=128)
    folders = {
        name: write_random_adapter(tmp_path / name, model, seed, r=4)
        for seed, name in enumerate(("a", "b"))
    }
    plain = AdapterServing(model, folders, runner="program")
    options = {}
    if kind == "ngram":
        speculation, workers = Speculation(NgramDrafter(1, 8), 4, VOCAB, adaptive=False), ()
    elif kind == "trees":
        speculation, workers = Speculation(Forking(), 4, VOCAB, adaptive=False), ()
        options = {"tree_paths": 16, "tree_depth": 4}
    else:
        head = write_head(tmp_path / "head", "eagle3")
        speculation = HeadSpeculation(4, VOCAB, adaptive=False)
        workers = (head_worker(head, "eagle3", 4),)
    drafted = AdapterServing(
        model,
        folders,
        runner="program",
        capabilities=(speculation,),
        workers=workers,
        options=options,
    )
    answers = []
    for serving in (plain, drafted):
        asked = [
            serving.ask(prompt, name, max_new_tokens=NEW, temperature=temperature)
            for prompt in PROMPTS
            for name in (None, "a", "b")
            for temperature in (0.0, 0.9)
        ]
        serving.run()
        answers.append([serving.tokens[rid] for rid in asked])

    assert answers[0] == answers[1]
    assert speculation.counts.failures == 0
    assert drafted.scheduler.load().verified_drafts > 5
    assert drafted.scheduler.audit() == 0
