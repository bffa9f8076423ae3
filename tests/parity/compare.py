"""Runs a checkpoint here and in transformers, and says how far they are apart."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from transformers import PreTrainedModel

from sylvan.protocol.requests import LogprobOptions
from tests.parity.checkpoints import VOCAB
from tests.parity.serving import Serving

NEW = 64
LENGTHS = 40, 3, 17
EVERYTHING = LogprobOptions(token_ids=tuple(range(VOCAB)))


@dataclass(frozen=True)
class Difference:
    """`modes` are those whose tokens differ from transformers'; empty is right."""

    logprob: float
    modes: tuple[str, ...]
    runner: str
    kv_bytes: int


def compare(path: Path, model: PreTrainedModel, *, new: int = NEW) -> Difference:
    """Greedy tokens in every mode, and log probabilities of all of them, against transformers.

    One pass of transformers over prompt and answer checks each token of the answer: it is greedy
    where it is the largest of its row. One mode runs eagerly, whatever the others do.
    """
    rng = np.random.default_rng(7)
    pages = int(0.75 * (sum(LENGTHS) + len(LENGTHS) * new) / 16)
    prompts = [rng.integers(4, VOCAB, n).tolist() for n in LENGTHS]
    whole = Serving(path, runner="auto")
    rids = [whole.add(p, logprobs=EVERYTHING, max_new_tokens=new) for p in prompts]
    whole.run()
    chunked = Serving(path, runner="eager", chunk_tokens=16, max_batch_tokens=19)
    found = {"batched": [whole.tokens[rid] for rid in rids]}
    found["cached"] = whole.generate(prompts, max_new_tokens=new)
    found["chunked"] = chunked.generate(prompts, max_new_tokens=new)
    tight = Serving(path, runner="auto", pages=pages, conservativeness=0.1)
    found["preempted"] = tight.generate(prompts, max_new_tokens=new)
    alone = Serving(path, runner="auto").generate(prompts[:1], max_new_tokens=new)
    found["alone"] = [*alone, *found["batched"][1:]]
    assert tight.scheduler.load().retractions > 0, "nothing was preempted"
    assert whole.scheduler.load().cached_prompt_tokens > 0, "the cache was not used"
    expected, apart = [], 0.0
    for rid, prompt in zip(rids, prompts, strict=True):
        rows = teacher(model, prompt + whole.tokens[rid])[len(prompt) - 1 : -1]
        expected.append(rows.argmax(-1).tolist())
        mine = np.concatenate([out.logprobs.chosen_logprobs for out in whole.outputs[rid]])
        apart = max(apart, float(np.abs(mine - rows).max()))
    modes = tuple(mode for mode, tokens in found.items() if tokens != expected)
    return Difference(apart, modes, whole.facts.runner, whole.facts.kv_bytes_per_token)


def teacher(model: PreTrainedModel, ids: list[int]) -> np.ndarray:
    """Log probabilities after each of `ids`, by transformers. Shape: (len, V)."""
    with torch.inference_mode():
        return model(torch.tensor([ids]), use_cache=False).logits[0].log_softmax(-1).numpy()
