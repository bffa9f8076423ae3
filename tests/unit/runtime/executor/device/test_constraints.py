"""Constrained outputs on a late device: the ids are looked at while the next pass is under way."""

from __future__ import annotations

import numpy as np
import pytest

from sylvan.runtime.executor.build import build_executor
from sylvan.runtime.executor.options import SamplingParts
from sylvan.runtime.sampling.constraints import Masks, Outcome
from tests.parity.serving import Serving
from tests.support.delayed import DelayedPlatform
from tests.support.random_model import VOCAB, write_random_model

PROMPTS = [[5, 9, 200, 31], [7] * 17, list(range(40, 60))]


class Rhymes:
    """Ids are to leave the remainder of their position when divided by 3.

    Of those, multiples of 5 are followed by two more that are certain, and a multiple of 7 is
    replaced by 8. Requests whose prompt is longer than 18 are free.
    """

    def __init__(self) -> None:
        self.next: dict[int, int] = {}
        self.rows: list[int] = []
        self.due: set[int] = set()
        self.kinds: set[str] = set()

    @property
    def idle(self) -> bool:
        return not self.next

    @property
    def ready(self) -> bool:
        return len(self.due) != 2  # both ways occur

    def join(self, slot, request, outputs) -> None:
        self.next.pop(slot, None)
        if len(request.input_ids) <= 18:
            self.next[slot] = len(request.input_ids) + len(outputs)

    def leave(self, slot) -> None:
        self.next.pop(slot, None)

    def bound(self, slot) -> bool:
        return slot in self.next

    def prepare(self, slots, positions) -> bool:
        pairs = zip(slots.tolist(), positions.tolist(), strict=True)
        self.due = {s for s, p in pairs if s in self.next and p >= self.next[s]}
        return bool(self.due)

    def masks(self, batch):
        rows = [r for r, s in enumerate(batch.slots.tolist()) if s in self.due]
        if not rows:
            return None
        ids = np.arange(-(-VOCAB // 32) * 32)
        allowed = ids[None] % 3 == batch.positions[rows][:, None] % 3
        bits = np.packbits(allowed, axis=1, bitorder="little").view(np.int32)
        return Masks(np.array(rows, np.int32), bits)

    def advance(self, batch, token_ids):
        outcomes = {}
        rows = zip(batch.slots.tolist(), batch.positions.tolist(), token_ids.tolist(), strict=True)
        for row, (slot, position, token) in enumerate(rows):
            if slot not in self.next:
                continue
            if position < self.next[slot]:
                outcomes[row] = Outcome()
                self.kinds.add("void")
                continue
            tokens = (token,)
            if token % 5 == 0:
                tokens = (token, 1, 2)
                self.kinds.add("certain")
            elif token % 7 == 0:
                tokens = (8,)
                self.kinds.add("replaced")
            if tokens != (token,):
                outcomes[row] = Outcome(tokens)
            self.next[slot] = position + len(tokens)
        return outcomes


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory):
    return write_random_model(tmp_path_factory.mktemp("model"), context_len=128)


def serve(model_dir, platform=None, *, overlap=False):
    rhymes = Rhymes()

    def build(path, options):
        return build_executor(path, options, sampling=SamplingParts(rhymes), platform=platform)

    options = {"attention": "dense", "runner": "graph"} if platform else {}
    return rhymes, Serving(model_dir, overlap=overlap, build=build, options=options)


@pytest.mark.parametrize("overlap", [False, True], ids=["in turn", "overlapped"])
def test_constraints_see_the_same_tokens_as_on_the_cpu(model_dir, overlap):
    _, plain = serve(model_dir)
    platform = DelayedPlatform()
    rhymes, serving = serve(model_dir, platform, overlap=overlap)
    seen = set()
    for way in ({}, {"temperature": 1.1}, {"frequency_penalty": 1.0, "temperature": 1.5}):
        asked = way | {"max_new_tokens": 30}
        found = serving.generate(PROMPTS, **asked)

        assert found == plain.generate(PROMPTS, **asked)
        seen |= rhymes.kinds

    assert platform.replayed > 20
    assert {"certain", "replaced"} <= seen
    assert ("void" in seen) == overlap
