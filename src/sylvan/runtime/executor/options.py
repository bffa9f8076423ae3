"""How a model is to be served by an executor of this process."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from sylvan.runtime.models.files import LoadFormat
from sylvan.runtime.models.pooling import PoolingWish
from sylvan.runtime.sampling.constraints import Constraints
from sylvan.runtime.sampling.processors import LogitsProcessor

RunnerName = Literal["auto", "eager", "program", "graph"]


@dataclass(frozen=True, kw_only=True, slots=True)
class LocalOptions:
    """How to serve a model in this process.

    `num_pages` counts page 0, which takes the writes of padding rows. `context_len` None is what
    the model was made for. `load_format` "dummy" fills in seeded random weights. `num_states` are
    the slots of recurrent state, the empty slot 0 included, of models that have any; 0: enough for
    all running requests, and as many again for cached prefixes. `quantization` is the name of a
    format that matrices are rounded to while loading; None: as the checkpoint has them. With `fill`
    a device's KV cache gets as many pages as fit, up to `most_pages`, whatever `num_pages` says.
    `kv_dtype` as `cache.dtype` of the configuration. `grouped`: the scheduler keeps a page table
    for each KV group of the model; else one serves all layers. With `deterministic` a model is
    refused whose bits would depend on the batch.
    """

    page_size: int
    num_pages: int
    max_batch_tokens: int
    max_running_reqs: int
    context_len: int | None = None
    dtype: str = "auto"
    device: str = "cpu"
    kv_dtype: str = "model"
    grouped: bool = False
    fill: bool = False
    most_pages: int | None = None
    attention: str = "auto"
    runner: RunnerName = "auto"
    deterministic: bool = False
    load_format: LoadFormat | Literal["dummy"] = "auto"
    trusted: bool = False  # Python files of the checkpoint may be run
    quantization: str | None = None
    overlap: bool = False
    num_states: int = 0
    embed: PoolingWish | None = None  # set: vectors are made, also by a model that generates
    headless: bool = False  # the head of a model that generates is left out
    threads: int = 0  # of the step program; 0: as many as torch uses
    seed: int = 0


@dataclass(frozen=True, slots=True)
class SamplingParts:
    """What features add to sampling."""

    constraints: Constraints | None = None
    custom: Sequence[LogitsProcessor] = ()
