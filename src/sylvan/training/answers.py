"""Lets a model answer prompts, and stores its hidden states for training.

Shapes: T tokens of a text, F features that a head reads at a position, D hidden.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from safetensors.torch import load_file, save_file

from sylvan.config import Config
from sylvan.config.fields import replaced
from sylvan.protocol.arrays import EMPTY_IDS, IntArray
from sylvan.protocol.messages import TokenOutput
from sylvan.protocol.requests import GenerateRequest
from sylvan.protocol.sampling import SamplingParams
from sylvan.runtime.core.req import Batch
from sylvan.runtime.core.step import Join
from sylvan.runtime.engine.build import ExtraCapabilities, build_scheduler, resolved
from sylvan.runtime.executor.capability import CapabilityWorker, StepContext
from sylvan.runtime.sched.capability import Capability

TEXTS_PER_FILE = 64
"""Number of prompts answered together, whose texts are stored in one file."""


@dataclass(frozen=True, slots=True)
class TrainingText:
    """A prompt with its answer, and the model's hidden states for all tokens except the last.

    Attributes:
        tokens: Token IDs of prompt and answer, int32 (T,).
        prompt_len: Number of prompt tokens.
        features: Layer outputs that a head reads (T - 1, F).
        final_hidden: Output of the final norm (T - 1, D).
    """

    tokens: IntArray
    prompt_len: int
    features: torch.Tensor
    final_hidden: torch.Tensor


class CollectHiddenStates(Capability):
    """Control half: asks the worker half to collect the hidden states of every row."""

    name: ClassVar = "vectors"
    work_type: ClassVar = bool

    def plan_work(self, batch: Batch) -> bool | None:
        return True if batch.slices else None


class HiddenStatesWorker(CapabilityWorker):
    """Worker half: collects the hidden states of each request until `take` returns them."""

    name: ClassVar = CollectHiddenStates.name
    reads_rows: ClassVar = True

    def __init__(self, layers: Sequence[int]) -> None:
        self.hidden_layers = tuple(layers)
        self._rids: dict[int, str] = {}
        self._collected: dict[str, list[tuple[int, torch.Tensor, torch.Tensor]]] = {}

    def join(self, join: Join) -> None:
        self._rids[join.slot] = join.request.rid
        self._collected[join.request.rid] = []

    def after_forward(self, step: StepContext, work: bool) -> None:
        plan = step.plan
        rows = np.arange(plan.num_tokens, dtype=np.int32)
        read = [step.layer_hidden(layer, rows).cpu() for layer in self.hidden_layers]
        final_TD = step.hidden(rows).cpu()
        features_TF = torch.cat(read, 1) if read else final_TD
        ends = plan.ends.tolist()
        for slot, start, stop, end in zip(
            plan.slots.tolist(), plan.starts.tolist(), plan.stops.tolist(), ends, strict=True
        ):
            some = slice(end - (stop - start), end)
            dtype = features_TF.dtype
            found = start, features_TF[some].clone(), final_TD[some].to(dtype)
            self._collected[self._rids[slot]].append(found)

    def take(self, rid: str, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return and drop the hidden states of the first `count` tokens of a request.

        Returns: Features (count, F), and output of the final norm (count, D).
        """
        parts = self._collected.pop(rid)
        _, first, other = parts[0]
        features_TF, final_TD = (x.new_empty(count, x.shape[1]) for x in (first, other))
        for start, features, final_hidden in parts:  # recomputed rows are identical
            size = min(len(features), count - start)
            features_TF[start : start + size] = features[:size]
            final_TD[start : start + size] = final_hidden[:size]
        return features_TF, final_TD


def generate_answers(
    config: Config,
    prompts: Sequence[IntArray],
    layers: Sequence[int] | None,
    max_tokens: int,
    on_texts: Callable[[int, Sequence[TrainingText]], None],
) -> None:
    """Let a model answer prompts greedily, `TEXTS_PER_FILE` at a time.

    Args:
        config: Configuration of the model; the prefix cache and speculation are turned off.
        prompts: Token IDs of each prompt.
        layers: Layers that the head reads; empty: the output of the final norm; None: hidden states
            are not stored.
        max_tokens: Maximum length of an answer.
        on_texts: Called after each group, with the number of prompts before it and its texts.

    Raises:
        ConfigError: The model cannot be served.
    """
    config = resolved(replaced(config, {"cache.prefix": "none", "speculative": None}))
    worker = None if layers is None else HiddenStatesWorker(layers)
    answers: dict[str, list[int]] = {}

    def emit(outputs: Sequence[TokenOutput]) -> None:
        for output in outputs:
            answers.setdefault(output.rid, []).extend(output.token_ids)

    extra = (
        ExtraCapabilities()
        if worker is None
        else ExtraCapabilities((CollectHiddenStates(),), (lambda context: worker,))
    )
    built = build_scheduler(config, emit, also=extra)
    longest = int(built.facts["context_len"] or 0)
    ends = eos_ids(config)
    try:
        for first in range(0, len(prompts), TEXTS_PER_FILE):
            part = {
                str(first + i): ids for i, ids in enumerate(prompts[first : first + TEXTS_PER_FILE])
            }
            part = {rid: ids for rid, ids in part.items() if len(ids) + max_tokens < longest}
            for rid, ids in part.items():
                built.scheduler.add(greedy_request(rid, ids, max_tokens, ends))
            while not built.scheduler.idle:
                built.scheduler.step()
            texts = [_text(worker, rid, ids, answers.pop(rid, [])) for rid, ids in part.items()]
            on_texts(first, [text for text in texts if len(text.tokens) > text.prompt_len + 1])
    finally:
        built.close()


def save(file: Path, texts: Sequence[TrainingText]) -> None:
    """Write texts to a file, atomically."""
    parts = dict[str, torch.Tensor]()
    if texts:
        parts = _as_tensors(texts)
    unfinished = file.with_suffix(".unfinished")
    save_file(parts, unfinished)
    unfinished.replace(file)


def _as_tensors(texts: Sequence[TrainingText]) -> dict[str, torch.Tensor]:
    return {
        "tokens": torch.cat([torch.from_numpy(text.tokens) for text in texts]),
        "lengths": torch.tensor([len(text.tokens) for text in texts]),
        "prompts": torch.tensor([text.prompt_len for text in texts]),
        "columns": torch.cat([text.features for text in texts]),
        "last": torch.cat([text.final_hidden for text in texts]),
    }


def load(file: Path) -> list[TrainingText]:
    """Load the texts that `save` wrote."""
    parts = load_file(file)
    found: list[TrainingText] = []
    if not parts:
        return found
    token = row = 0
    for length, prompt in zip(parts["lengths"].tolist(), parts["prompts"].tolist(), strict=True):
        tokens = parts["tokens"][token : token + length].numpy()
        rows = slice(row, row + length - 1)
        found.append(TrainingText(tokens, prompt, parts["columns"][rows], parts["last"][rows]))
        token, row = token + length, row + length - 1
    return found


def _text(
    worker: HiddenStatesWorker | None, rid: str, prompt: IntArray, found: list[int]
) -> TrainingText:
    tokens = np.concatenate([prompt, np.array(found, np.int32)])
    if worker is None:
        nothing = torch.empty(len(tokens) - 1, 0)
        return TrainingText(tokens, len(prompt), nothing, nothing)
    return TrainingText(tokens, len(prompt), *worker.take(rid, len(tokens) - 1))


def greedy_request(
    rid: str, ids: IntArray, limit: int, eos_ids: tuple[int, ...]
) -> GenerateRequest:
    """Return a request that continues `ids` greedily by up to `limit` tokens."""
    sampling = SamplingParams(max_new_tokens=limit, temperature=0.0, sampling_seed=0)
    return GenerateRequest(
        rid=rid, input_ids=ids, output_ids=EMPTY_IDS, sampling=sampling, eos_ids=eos_ids
    )


def eos_ids(config: Config) -> tuple[int, ...]:
    """Return the token IDs that end an answer of the model."""
    from sylvan.config.checkpoint import model_dir
    from sylvan.runtime.executor.facts import read_facts

    facts: Any = read_facts(
        model_dir(config.model),
        config.dtype,
        config.quantization,
        trusted=config.trust_remote_code,
    )
    return facts.eos_ids
