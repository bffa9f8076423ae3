"""Runs a checkpoint here and in transformers, and says how far they are apart."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from transformers import PreTrainedModel

from sylvan.protocol.requests import LogprobOptions
from tests.parity.checkpoints import VOCAB
from tests.parity.rounding import Exact, logits_of
from tests.parity.serving import Serving

NEW = 64
LENGTHS = 40, 3, 17
EVERYTHING = LogprobOptions(token_ids=tuple(range(VOCAB)))


@dataclass(frozen=True)
class Difference:
    """`modes` are those whose tokens differ from transformers'; empty is right.

    `excess` is the largest error of a row of log probabilities, measured against float64, as a
    share of what float32 explains: above 1 something else is computed. `logprob` is the largest
    difference from transformers in float32, which no bound fits on every machine.
    """

    logprob: float
    excess: float
    modes: tuple[str, ...]
    runner: str
    kv_bytes: int


def compare(
    path: Path,
    model: PreTrainedModel,
    *,
    new: int = NEW,
    stepping: bool = False,
    serve: Callable[..., Serving] = Serving,
    start: Sequence[int] = (),
) -> Difference:
    """Greedy tokens in every mode, and log probabilities of all of them, against transformers.

    One pass of transformers over prompt and answer checks each token of the answer: it is greedy
    where it is the largest of its row, or as large as rounding can tell. One mode runs eagerly,
    whatever the others do. With `stepping` transformers takes the answer token by token, which few
    models do otherwise than they take a prompt. `serve` may put the model on another device. All
    prompts begin with `start`.
    """
    rng = np.random.default_rng(7)
    pages = int(0.75 * (sum(LENGTHS) + len(LENGTHS) * new) / 16)
    prompts = [[*start, *rng.integers(4, VOCAB, n).tolist()] for n in LENGTHS]
    whole = serve(path, runner="auto")
    rids = [whole.add(p, logprobs=EVERYTHING, max_new_tokens=new) for p in prompts]
    whole.run()
    chunked = serve(path, runner="eager", chunk_tokens=16, max_batch_tokens=19)
    found = {"batched": [whole.tokens[rid] for rid in rids]}
    found["cached"] = whole.generate(prompts, max_new_tokens=new)
    found["chunked"] = chunked.generate(prompts, max_new_tokens=new)
    tight = serve(path, runner="auto", pages=pages, conservativeness=0.1, preempt_every=23)
    found["preempted"] = tight.generate(prompts, max_new_tokens=new)
    alone = serve(path, runner="auto").generate(prompts[:1], max_new_tokens=new)
    found["alone"] = [*alone, *found["batched"][1:]]
    assert tight.scheduler.load().retractions > 0, "nothing was preempted"
    assert whole.scheduler.load().cached_prompt_tokens > 0, "the cache was not used"
    exact = Exact(model)
    wrong: set[str] = set()
    apart = excess = 0.0
    for index, (rid, prompt) in enumerate(zip(rids, prompts, strict=True)):
        ids, answer = prompt + whole.tokens[rid], slice(len(prompt) - 1, -1)
        at_once = len(prompt) if stepping else None
        rows, explained = (part[answer] for part in exact.rows(ids, at_once))
        mine = np.concatenate([out.logprobs.chosen_logprobs for out in whole.outputs[rid]])
        apart = max(apart, float(np.abs(mine - teacher(model, ids, at_once)[answer]).max()))
        excess = max(excess, float((np.abs(mine - rows).max(1) / explained).max()))
        wrong |= {
            mode
            for mode, tokens in found.items()
            if not greedy_up_to_rounding(tokens[index], whole.tokens[rid], rows, 2 * explained)
        }
    modes = tuple(mode for mode in found if mode in wrong)
    return Difference(apart, excess, modes, whole.facts.runner, whole.facts.kv_bytes_per_token)


def greedy_up_to_rounding(
    tokens: list[int], context: list[int], rows: np.ndarray, gap: np.ndarray
) -> bool:
    """Whether each token is the largest of its row, or less than `gap` below it.

    `rows` follow `context`: where `tokens` leave it they are compared no further.
    """
    for token, given, row, most in zip(tokens, context, rows, gap, strict=True):
        if row.max() - row[token] > most:
            return False
        if token != given:
            return True
    return True


def teacher(model: PreTrainedModel, ids: list[int], at_once: int | None = None) -> np.ndarray:
    """Log probabilities after each of `ids`, by transformers in float32. Shape: (len, V)."""
    with torch.inference_mode():
        return logits_of(model, ids, at_once).log_softmax(-1).numpy()
