"""How a model is to be served by an executor of this process."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol

import torch
from torch import nn

from sylvan.protocol.arrays import IntArray
from sylvan.runtime.cache.groups import KVGroup
from sylvan.runtime.core.forward import BatchLimits
from sylvan.runtime.core.memory import PageMemory
from sylvan.runtime.executor.capability import CapabilityWorker
from sylvan.runtime.executor.graphs.split import SplitPrompt
from sylvan.runtime.layers.build import Build
from sylvan.runtime.models.config import ModelConfig
from sylvan.runtime.models.files import LoadFormat
from sylvan.runtime.models.pooling import PoolingSpec, PoolingWish
from sylvan.runtime.pool.mha import KVShape
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
    `kv_dtype` as `cache.dtype` of the configuration. With `deterministic` a model is refused whose
    bits would depend on the batch. `devices` of a platform with a lowering share the model.
    """

    page_size: int
    num_pages: int
    max_batch_tokens: int
    max_running_reqs: int
    context_len: int | None = None
    dtype: str = "auto"
    device: str = "cpu"
    devices: int = 1
    kv_dtype: str = "model"
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
    max_samples: int = 0  # rows of a step that are sampled, guesses too; 0: one a request
    tree_paths: int = 0  # of trees of guesses in one step, beside the first of each
    tree_depth: int = 0  # guesses of a path at most
    embed: PoolingWish | None = None  # set: vectors are made, also by a model that generates
    headless: bool = False  # the head of a model that generates is left out
    threads: int = 0  # of the step program; 0: as many as torch uses
    seed: int = 0
    load_cache: Path | None = None  # where packed weights are kept for later starts


class Draw(Protocol):
    """See `ModelSite.draw`."""

    def __call__(
        self,
        logits_RW: torch.Tensor,
        slots: IntArray,
        positions: IntArray,
        ids: torch.Tensor | None = None,
    ) -> IntArray:
        """Tokens (R,)."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelSite:
    """What the worker half of a capability may be made from.

    Attributes:
        vocab_size: Columns of logits.
        pooling: How vectors are made; None: the model makes none.
        labels: Whether the model's head gives numbers of labels.
        has_states: Whether some layers keep a recurrent state.
        head: The model's head on vectors that are no rows of a step.
        memory: KV groups and the bytes of their pages, in this order, states last; to be asked once
            the executor is built.
        split: Makes a `SplitPrompt`, which computes prompts op by op; raises Unsupported where
            there is no step program. To be asked once the executor is built.
        draw: Tokens drawn from float32 logits (R, W), which are overwritten, for request slots and
            positions (R,): as the model's own logits there would be; of immediate backends only.
            With ids, int64 (W,), of the only tokens that are possible; None: all are.
        model_dir: Its directory.
        config: Of the model.
        build: What it is built with.
        limits: Of a step.
        kv_shape: Pages of its KV.
        load_format: See `LocalOptions`.
        skeleton: Makes the model without contents; None: it is not of layers of ours.
        dtype: Of its rows.
        device: Where it computes.
        max_tokens: Rows of the largest step.
        constant: Where steps read a float32 constant of the model, such as a rotary table: a step
            program has a copy; to be asked once the executor is built.
        position_shifts: See `HostArrays`; to be asked once the executor is built.
    """

    vocab_size: int
    pooling: PoolingSpec | None
    labels: bool
    has_states: bool
    head: Callable[[torch.Tensor], torch.Tensor]
    memory: Callable[[], tuple[Sequence[KVGroup], Sequence[PageMemory]]]
    split: Callable[[], SplitPrompt]
    draw: Draw
    model_dir: Path
    config: ModelConfig
    build: Build
    limits: BatchLimits
    kv_shape: KVShape
    load_format: LoadFormat | Literal["dummy"]
    skeleton: Callable[[], nn.Module] | None
    dtype: torch.dtype
    device: torch.device
    max_tokens: int
    constant: Callable[[torch.Tensor], torch.Tensor]
    position_shifts: Callable[[], IntArray]


@dataclass(frozen=True, slots=True)
class ExecutorParts:
    """What is added to an executor.

    Attributes:
        workers: Make the worker halves of capabilities; None: this model needs none.
        custom: Logits processors.
    """

    workers: Sequence[Callable[[ModelSite], CapabilityWorker | None]] = ()
    custom: Sequence[LogitsProcessor] = ()
