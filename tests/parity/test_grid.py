"""The same bits in every mode of the engine at once: rows that cover all pairs of its axes.

Prompts are longer than the chunks that attention merges, and answers grow from one into the next.
"""

from __future__ import annotations

import itertools
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pytest
import transformers

from sylvan.kernels.native.library import describe, load
from sylvan.protocol.requests import LogprobOptions
from tests.parity.checkpoints import SHAPE, VOCAB, write
from tests.parity.serving import Serving
from tests.support.adapters import AdapterServing, write_random_adapter
from tests.support.oracle_drafter import OracleDrafter
from tests.support.pairs import covering_rows, pairs_of
from tests.support.serving_store import ServingStore

pytestmark = pytest.mark.skipif(describe().variant is None, reason="kernels are not compiled")

FORMATS = {
    "float32": {"dtype": "float32"},
    "bfloat16": {"dtype": "bfloat16"},
    "w8a8": {"dtype": "bfloat16", "quantization": "w8a8"},
    "w4a8": {"dtype": "bfloat16", "quantization": "w4a8"},
}
SIZES = {"intermediate_size": 128, "max_position_embeddings": 1024, "num_hidden_layers": 2}
"""Inputs of all matrices divide into groups."""
AXES = {
    "company": ("alone", "together", "crowd", "joining"),
    "chunk_tokens": (512, 96, 33),
    "prefix": ("none", "whole", "inside a page"),
    "preempted": (False, True),
    "overlap": (False, True),
    "page_size": (16, 64),
    "threads": (1, 2),
    "drafted": (0.0, 0.5, 1.0),  # share that is right; 0: none are made
    "store": (False, True),  # below the device, of a server that is gone
    "adapters": ("off", "some", "one slot"),  # of `ASKED`, in as many slots or one after another
}
ASKED = ("first", None, "second", "first")
"""Adapters of the prompts, where there are any."""
EVERYTHING = LogprobOptions(token_ids=tuple(range(0, VOCAB, 5)))
SAMPLING = {"max_new_tokens": 24, "temperature": 1.0, "top_p": 0.9, "sampling_seed": 3}
LENGTHS = (530, 250, 300, 37)
NOISE = (19, 90, 3)
ATTEMPTS = 3
"""Where draft tokens are right, all may have ended before an urgent request takes a place."""
URGENT = 600
"""Tokens of a request that goes before all others, where memory is short."""


@dataclass(frozen=True)
class Life:
    """A request's tokens, and log probabilities of every step."""

    tokens: list[int]
    logprobs: np.ndarray


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory):
    path = tmp_path_factory.mktemp("grid")
    write(transformers.LlamaConfig(**SHAPE | SIZES), 5, path)
    return path


@pytest.fixture(scope="module")
def windows_dir(tmp_path_factory):
    """One layer reads everything, the other a window, so there are two KV groups."""
    path = tmp_path_factory.mktemp("windows")
    window = {"use_sliding_window": True, "sliding_window": 70, "max_window_layers": 1}
    write(transformers.Qwen2Config(**SHAPE | SIZES | window), 5, path)
    return path


@pytest.fixture(scope="module")
def prompts():
    rng = np.random.default_rng(5)
    return [rng.integers(4, VOCAB, n).tolist() for n in LENGTHS]


@pytest.fixture(scope="module")
def adapters(model_dir, tmp_path_factory):
    """By the model's directory, those that `ASKED` names."""
    folder = tmp_path_factory.mktemp("adapters")
    ranks = {"first": 8, "second": 3}
    return {
        name: write_random_adapter(folder / name, model_dir, rank, r=rank)
        for name, rank in ranks.items()
    }


def serving_of(model_dir, options, row, adapters, answers=None, folder=None) -> Serving:
    """`answers` of prompts are what is drafted; `folder` is that of the store."""
    drafter = OracleDrafter(answers or {}, VOCAB, right=row["drafted"], count=5)
    tokens = max(LENGTHS) + 400 if row["preempted"] else 2 * sum((*LENGTHS, *NOISE))
    made = Serving
    if row["adapters"] != "off":
        slots = {"max_per_batch": 1 if row["adapters"] == "one slot" else 3}
        made = partial(AdapterServing, folders=adapters, settings=slots)
    return made(
        model_dir,
        runner="program",
        options=options | {"threads": row["threads"]},
        pages=tokens // row["page_size"],
        page_size=row["page_size"],
        chunk_tokens=row["chunk_tokens"],
        overlap=row["overlap"],
        capabilities=(drafter,) if row["drafted"] else (),
        store=ServingStore(folder) if folder is not None else None,
    )


def asked(serving) -> list[str | None]:
    """Ids of the adapters of the prompts."""
    ids = serving.ids if isinstance(serving, AdapterServing) else {}
    return [ids.get(name) for name in ASKED]


def warm(serving, prompts, prefix) -> None:
    """Put prompts, or their prefixes, into the cache."""
    if prefix == "none":
        return
    for prompt, lora in reversed(list(zip(prompts, asked(serving), strict=True))):
        # the first is not to be forgotten
        part = prompt if prefix == "whole" else prompt[: len(prompt) * 2 // 3 | 1]
        serving.generate([part], max_new_tokens=1, lora=lora)


def noise(serving, count, **changes) -> str:
    """Another request, whose answer is ignored."""
    prompt = np.random.default_rng(count).integers(4, VOCAB, count).tolist()
    return serving.add(prompt, **SAMPLING | {"sampling_seed": count} | changes)


def run(serving, *, preempted) -> None:
    """To the end; an urgent request comes when others answer, until it took the place of one."""
    urgent = None
    for step in range(20_000):
        running = serving.scheduler.running
        answer = running and all(req.num_outputs > 1 for req in running)
        wanted = preempted and answer and not serving.scheduler.load().retractions
        if wanted and (urgent is None or urgent in serving.finish):
            urgent = noise(serving, URGENT + step % 200, priority=100)
        if serving.scheduler.step():
            continue
        if serving.scheduler.idle:
            return
        time.sleep(0.0002)  # threads move KV
    raise AssertionError("not done after 20,000 steps")


def lives(serving, prompts, company, *, preempted=False) -> list[Life]:
    """Results of the prompts in such a batch."""
    if company == "crowd":
        for count in NOISE:
            noise(serving, count)
    rids = []
    for prompt, lora in zip(prompts, asked(serving), strict=True):
        rids.append(serving.add(prompt, logprobs=EVERYTHING, lora=lora, **SAMPLING))
        if company == "alone":
            run(serving, preempted=preempted)
        for _ in range(2 * (company == "joining")):
            serving.scheduler.step()
    run(serving, preempted=preempted)
    return [
        Life(
            serving.tokens[rid],
            np.concatenate([o.logprobs.chosen_logprobs for o in serving.outputs[rid]]),
        )
        for rid in rids
    ]


@pytest.mark.slow
@pytest.mark.parametrize("form", FORMATS)
def test_rows_that_cover_all_pairs_give_the_same_bits(model_dir, prompts, adapters, form):
    compare_rows(model_dir, prompts, adapters, FORMATS[form], list(FORMATS).index(form))


@pytest.mark.slow
def test_window_layers_give_the_same_bits_in_all_pairs(windows_dir, prompts, adapters):
    compare_rows(windows_dir, prompts, adapters, FORMATS["bfloat16"], len(FORMATS))


def compare_rows(model_dir, prompts, adapters, options, seed):
    """Each row of a covering array against each prompt alone."""
    plain = dict(zip(AXES, (values[0] for values in AXES.values()), strict=True))
    lone = {
        kind: lives(
            serving_of(model_dir, options, plain | {"adapters": kind}, adapters), prompts, "alone"
        )
        for kind in AXES["adapters"][:2]
    }
    rows = covering_rows(AXES, seed)

    for base, life, name in zip(*lone.values(), ASKED, strict=True):
        assert np.array_equal(base.logprobs, life.logprobs) == (name is None)
    for row in rows:
        wanted = lone["off" if row["adapters"] == "off" else "some"]
        answers = {tuple(p): life.tokens for p, life in zip(prompts, wanted, strict=True)}
        assert all(len(life.logprobs) == len(life.tokens) == 24 for life in wanted)
        assert len({tuple(life.tokens) for life in wanted}) == len(prompts)
        with TemporaryDirectory() as made:
            compare_row(model_dir, prompts, adapters, options, (row, wanted, answers, Path(made)))


def served(model_dir, prompts, adapters, options, case):
    """Results of the prompts of a row, previously cached tokens, and the load afterwards.

    With a store it is after a restart that found the prefixes there.
    """
    row, _, answers, made = case
    folder = made if row["store"] else None
    serving = serving_of(model_dir, options, row, adapters, answers, folder)
    warm(serving, prompts, row["prefix"])
    if row["store"]:
        serving.close()
        serving = serving_of(model_dir, options, row, adapters, answers, folder)
    before = serving.scheduler.load().cached_prompt_tokens
    found = lives(serving, prompts, row["company"], preempted=row["preempted"])
    load = serving.scheduler.load()
    serving.close()
    return found, before, load


def compare_row(model_dir, prompts, adapters, options, case):
    """One row."""
    row, wanted, *_ = case
    for _ in range(ATTEMPTS):
        found, before, load = served(model_dir, prompts, adapters, options, case)
        if load.retractions or not row["preempted"]:
            break

    # prompts of adapters are not in a store, and for the other one there may be no room at once
    finds = row["prefix"] != "none" and not (row["store"] and row["adapters"] != "off")
    assert not finds or load.cached_prompt_tokens > before, row
    assert (load.retractions > 0) == row["preempted"], row
    assert not load.verified_drafts or row["drafted"], row
    # with overlap the newest token is known only where nothing is in flight
    assert load.verified_drafts or row["overlap"] or not row["drafted"], row
    for a, b in zip(wanted, found, strict=True):
        assert a.tokens == b.tokens, row
        assert np.array_equal(a.logprobs, b.logprobs), row


@pytest.mark.slow
def test_the_rows_cover_all_pairs_and_the_prompts_several_chunks():
    chunk = load().constants.kv_chunk
    assert max(LENGTHS) > 2 * chunk
    assert any(n < chunk < n + SAMPLING["max_new_tokens"] for n in LENGTHS), "grows into the next"
    grid = [dict(zip(AXES, v, strict=True)) for v in itertools.product(*AXES.values())]
    everything = set().union(*(pairs_of(row) for row in grid))
    for seed in range(len(FORMATS)):
        rows = covering_rows(AXES, seed)
        assert set().union(*map(pairs_of, rows)) == everything
        assert len(rows) < 20
