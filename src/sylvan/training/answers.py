"""Has a model answer prompts, and keeps what it computed on the way.

Shapes: T tokens of a text, F columns that a head reads at a position, D hidden.
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

PART = 64
"""Texts of a file."""


@dataclass(frozen=True, slots=True)
class Text:
    """A prompt with its answer, and what the model computed for all of it but the last token.

    Attributes:
        tokens: int32 (T,).
        prompt_len: So many of them are the prompt.
        columns: What a head reads (T - 1, F).
        last: Vectors after the final norm (T - 1, D).
    """

    tokens: IntArray
    prompt_len: int
    columns: torch.Tensor
    last: torch.Tensor


class Vectors(Capability):
    """Asks the executor to keep the hidden vectors of every row."""

    name: ClassVar = "vectors"
    work_type: ClassVar = bool

    def plan_work(self, batch: Batch) -> bool | None:
        return True if batch.slices else None


class VectorsWorker(CapabilityWorker):
    """Keeps vectors of requests; `take` gives those of one, once."""

    name: ClassVar = Vectors.name
    reads_rows: ClassVar = True

    def __init__(self, layers: Sequence[int]) -> None:
        self.hidden_layers = tuple(layers)
        self._rids: dict[int, str] = {}
        self._kept: dict[str, list[tuple[int, torch.Tensor, torch.Tensor]]] = {}

    def join(self, join: Join) -> None:
        self._rids[join.slot] = join.request.rid
        self._kept[join.request.rid] = []

    def after_forward(self, step: StepContext, work: bool) -> None:
        plan = step.plan
        rows = np.arange(plan.num_tokens, dtype=np.int32)
        read = [step.layer_hidden(layer, rows).cpu() for layer in self.hidden_layers]
        last_TD = step.hidden(rows).cpu()
        columns_TF = torch.cat(read, 1) if read else last_TD
        ends = plan.ends.tolist()
        for slot, start, stop, end in zip(
            plan.slots.tolist(), plan.starts.tolist(), plan.stops.tolist(), ends, strict=True
        ):
            some = slice(end - (stop - start), end)
            dtype = columns_TF.dtype
            found = start, columns_TF[some].clone(), last_TD[some].to(dtype)
            self._kept[self._rids[slot]].append(found)

    def take(self, rid: str, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Outputs for the first `count` tokens of a request: (count, F), (count, D)."""
        parts = self._kept.pop(rid)
        _, first, other = parts[0]
        columns_TF, last_TD = (x.new_empty(count, x.shape[1]) for x in (first, other))
        for start, columns, last in parts:  # what was computed again is the same
            size = min(len(columns), count - start)
            columns_TF[start : start + size] = columns[:size]
            last_TD[start : start + size] = last[:size]
        return columns_TF, last_TD


def answer(
    config: Config,
    prompts: Sequence[IntArray],
    layers: Sequence[int] | None,
    max_tokens: int,
    keep: Callable[[int, Sequence[Text]], None],
) -> None:
    """Have a model answer greedily, `PART` prompts at once.

    Args:
        config: Of the model; its prefix cache is left out.
        prompts: Token ids.
        layers: Read by the head; empty: vectors after the final norm; None: no vectors are kept.
        max_tokens: Of an answer.
        keep: Called with each part: how many prompts there were before, and the texts.

    Raises:
        ConfigError: the model cannot be served.
    """
    config = resolved(replaced(config, {"cache.prefix": "none", "speculative": None}))
    worker = None if layers is None else VectorsWorker(layers)
    answers: dict[str, list[int]] = {}

    def emit(outputs: Sequence[TokenOutput]) -> None:
        for output in outputs:
            answers.setdefault(output.rid, []).extend(output.token_ids)

    also = (
        ExtraCapabilities()
        if worker is None
        else ExtraCapabilities((Vectors(),), (lambda context: worker,))
    )
    built = build_scheduler(config, emit, also=also)
    longest = int(built.facts["context_len"] or 0)
    ends = eos_ids(config)
    try:
        for first in range(0, len(prompts), PART):
            part = {str(first + i): ids for i, ids in enumerate(prompts[first : first + PART])}
            part = {rid: ids for rid, ids in part.items() if len(ids) + max_tokens < longest}
            for rid, ids in part.items():
                built.scheduler.add(request(rid, ids, max_tokens, ends))
            while not built.scheduler.idle:
                built.scheduler.step()
            texts = [_text(worker, rid, ids, answers.pop(rid, [])) for rid, ids in part.items()]
            keep(first, [text for text in texts if len(text.tokens) > text.prompt_len + 1])
    finally:
        built.close()


def save(file: Path, texts: Sequence[Text]) -> None:
    """Write texts, whole or not at all."""
    parts = dict[str, torch.Tensor]()
    if texts:
        parts = _joined(texts)
    unfinished = file.with_suffix(".unfinished")
    save_file(parts, unfinished)
    unfinished.replace(file)


def _joined(texts: Sequence[Text]) -> dict[str, torch.Tensor]:
    return {
        "tokens": torch.cat([torch.from_numpy(text.tokens) for text in texts]),
        "lengths": torch.tensor([len(text.tokens) for text in texts]),
        "prompts": torch.tensor([text.prompt_len for text in texts]),
        "columns": torch.cat([text.columns for text in texts]),
        "last": torch.cat([text.last for text in texts]),
    }


def load(file: Path) -> list[Text]:
    """Load a file of `save`."""
    parts = load_file(file)
    found: list[Text] = []
    if not parts:
        return found
    token = row = 0
    for length, prompt in zip(parts["lengths"].tolist(), parts["prompts"].tolist(), strict=True):
        tokens = parts["tokens"][token : token + length].numpy()
        rows = slice(row, row + length - 1)
        found.append(Text(tokens, prompt, parts["columns"][rows], parts["last"][rows]))
        token, row = token + length, row + length - 1
    return found


def _text(worker: VectorsWorker | None, rid: str, prompt: IntArray, found: list[int]) -> Text:
    tokens = np.concatenate([prompt, np.array(found, np.int32)])
    if worker is None:
        nothing = torch.empty(len(tokens) - 1, 0)
        return Text(tokens, len(prompt), nothing, nothing)
    return Text(tokens, len(prompt), *worker.take(rid, len(tokens) - 1))


def request(rid: str, ids: IntArray, most: int, eos_ids: tuple[int, ...]) -> GenerateRequest:
    """A request that continues `ids` greedily by up to `most` tokens."""
    sampling = SamplingParams(max_new_tokens=most, temperature=0.0, sampling_seed=0)
    return GenerateRequest(
        rid=rid, input_ids=ids, output_ids=EMPTY_IDS, sampling=sampling, eos_ids=eos_ids
    )


def eos_ids(config: Config) -> tuple[int, ...]:
    """Ids that end an answer of the model."""
    from sylvan.config.checkpoint import model_dir
    from sylvan.runtime.executor.facts import read_facts

    facts: Any = read_facts(
        model_dir(config.model),
        config.dtype,
        config.quantization,
        trusted=config.trust_remote_code,
    )
    return facts.eos_ids
