"""Experts of two processes, whose rows DeepEP's functions dispatch. As a script: the second one."""

from __future__ import annotations

import sys
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from sylvan.kernels import ops
from sylvan.kernels.api import Communicator, ExpertRanks, Routing, RowDispatcher
from sylvan.kernels.collective.gloo import file_store, join_ranks, part_of_store
from sylvan.kernels.experts.deepep import DeepEPDispatcher, StoreGroup
from tests.support.native import random
from tests.support.rank_ops import EXPERTS, divided

LIBRARIES = Path(__file__).with_name("libraries")
"""Where the module `deep_ep` is that works without GPUs."""
COLS = 72
SOME_ROWS = (1, 2, 37)


@dataclass(frozen=True)
class Layer:
    """Rows and their experts. With `even`, a row's experts weigh the same, a power of two."""

    rows: int
    top_k: int
    even: bool = False
    scale_inputs: bool = False

    @property
    def rounds_once(self) -> bool:
        """Whether the sum of a row is rounded once, whichever ranks add it up."""
        return self.top_k == 1 or (self.even and self.top_k == 2)


LAYERS = (
    *(Layer(rows, 2, even=True) for rows in SOME_ROWS),
    *(Layer(rows, 1) for rows in SOME_ROWS),
    *(Layer(rows, 3) for rows in SOME_ROWS),
    Layer(37, 3, scale_inputs=True),
    Layer(37, 1, scale_inputs=True),
)


def run_layers(folder: Path, rank: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """The sums of each layer: with rows dispatched by DeepEP, and with outputs all-to-all."""
    store = file_store(str(folder / "meeting"), 2)
    ranks = join_ranks(part_of_store(store, "ranks"), rank, 2, 60.0, 60.0)
    dispatcher = DeepEPDispatcher(StoreGroup(part_of_store(store, "deepep"), rank, 2, 60.0))
    dispatcher.reserve(COLS - 8, EXPERTS, torch.bfloat16)
    dispatcher.reserve(COLS, EXPERTS, torch.bfloat16)  # a layer with longer rows
    found: list[tuple[torch.Tensor, torch.Tensor]] = []
    for layer in LAYERS:
        theirs, loads = zip(*(_sums(layer, ranks, way) for way in (dispatcher, None)), strict=True)
        assert torch.equal(*loads)
        found.append(theirs)
    return found


def _sums(
    layer: Layer, ranks: Communicator, dispatcher: RowDispatcher | None
) -> tuple[torch.Tensor, torch.Tensor]:
    logits = random(layer.rows, EXPERTS, dtype=torch.float32, seed=layer.rows)
    if layer.even:
        best = logits.topk(layer.top_k, -1).indices
        logits = torch.full_like(logits, -1e9).scatter(-1, best, 0.0)
    routing = Routing(
        top_k=layer.top_k,
        scores="softmax_chosen" if layer.even else "sigmoid",
        scale_inputs=layer.scale_inputs,
    )
    weights = divided(ranks, torch.bfloat16, by_share=dispatcher is None, cols=COLS)
    expert_ranks = weights.expert_ranks
    assert isinstance(expert_ranks, ExpertRanks)
    weights = replace(weights, expert_ranks=replace(expert_ranks, dispatcher=dispatcher))
    x = random(layer.rows, COLS, dtype=torch.bfloat16, seed=50)
    load = torch.zeros(EXPERTS, dtype=torch.int64)
    return ops.experts(x, logits, routing, weights, load), load


if __name__ == "__main__":
    sys.path.insert(0, str(LIBRARIES))
    run_layers(Path(sys.argv[1]), 1)
