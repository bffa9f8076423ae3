"""Options and inputs of an executor in this process."""

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
from sylvan.runtime.executor.early.memory import InheritedMemory
from sylvan.runtime.executor.graphs.split import SplitPrompt
from sylvan.runtime.layers.build import Build
from sylvan.runtime.models.config import ModelConfig
from sylvan.runtime.models.files import LoadFormat
from sylvan.runtime.models.pooling import PoolingOverride, PoolingSpec
from sylvan.runtime.pool.mha import KVShape
from sylvan.runtime.sampling.processors import LogitsProcessor

RunnerName = Literal["auto", "eager", "program", "graph"]


@dataclass(frozen=True, kw_only=True, slots=True)
class LocalOptions:
    """How to serve a model in this process.

    `num_pages` includes page 0, which takes the writes of padding rows. `context_len` None is the
    model's maximum. `load_format` "dummy" fills in seeded random weights. `num_states` are the
    slots of recurrent state, including the empty slot 0; 0 is enough for all running requests and
    as many cached prefixes. `quantization` names a format that matrices are quantised to while
    loading; None keeps the checkpoint's. With `fp8_activations`, inputs of FP8 matrices are rounded
    to e4m3 as well. With `fill`, a device's KV cache gets as many pages as
    fit, up to `max_pages`, regardless of `num_pages`. `kv_dtype` is `cache.dtype` of the
    configuration. With `deterministic`, models whose results depend on the batch are rejected.
    `devices` is the number of devices that share the model, on platforms with a lowering; they form
    `data_groups` groups, each with the whole model and requests of its own.
    """

    page_size: int
    num_pages: int
    max_batch_tokens: int
    max_running_reqs: int
    context_len: int | None = None
    dtype: str = "auto"
    device: str = "cpu"
    devices: int = 1
    data_groups: int = 1
    kv_dtype: str = "model"
    fill: bool = False
    max_pages: int | None = None
    attention: str = "auto"
    runner: RunnerName = "auto"
    deterministic: bool = False
    load_format: LoadFormat | Literal["dummy"] = "auto"
    trusted: bool = False  # Python files of the checkpoint may run
    quantization: str | None = None
    fp8_activations: bool = False
    overlap: bool = False
    num_states: int = 0
    max_samples: int = 0  # sampled rows per step, with draft tokens; 0: one per request
    tree_paths: int = 0  # extra paths of draft trees per step, beyond the first of each
    tree_depth: int = 0  # maximum draft tokens per path
    embed: PoolingOverride | None = None  # if set, serve embeddings, even of a generative model
    headless: bool = False  # omit the head of a generative model
    threads: int = 0  # threads of the step program; 0: as many as torch uses
    seed: int = 0
    load_cache: Path | None = None  # stores packed weights for later starts
    load_cache_share: float = 1.0  # share of the disk that its files may use


class Draw(Protocol):
    """See `ModelContext.draw`."""

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
class ModelContext:
    """Parts of the model that the worker half of a capability can use.

    Attributes:
        vocab_size: Columns of logits.
        pooling: How embeddings are pooled; None: the model makes none.
        labels: Whether the model's head outputs class scores.
        has_states: Whether some layers have a recurrent state.
        head: Applies the model's head to vectors outside of steps.
        memory: Returns the KV groups, and access to their pages in the same order, then to the
          recurrent states. Call it after the executor is built.
        split: Builds a `SplitPrompt`, which computes prompts op by op; raises Unsupported without a
          step program. Call it after the executor is built.
        draw: Samples tokens from float32 logits (R, W), which are overwritten, for request slots
            and positions (R,), as the model's own logits would be; immediate backends only. Ids,
            int64 (W,), restrict the tokens; None allows all.
        model_dir: Model directory.
        config: The model's config.
        build: Build options of the model.
        limits: Limits of a step.
        kv_shape: Shape of the KV pages.
        load_format: See `LocalOptions`.
        skeleton: Builds the model without weights; None: it is not a native model.
        dtype: Type of the model's rows.
        device: Device that computes.
        max_tokens: Rows of the largest step.
        constant: Returns the tensor that steps read for a float32 constant of the model, such as a
          rotary table, because a step program has a copy. Call it after the executor is built.
        position_shifts: See `HostArrays`. Call it after the executor is built.
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
    """Optional parts of an executor.

    Attributes:
        workers: Factories of the worker halves of capabilities, which return None if not needed.
        custom: Logits processors.
        memory: Memory of an earlier executor with the same options, to continue with; None:
          allocate new memory.
    """

    workers: Sequence[Callable[[ModelContext], CapabilityWorker | None]] = ()
    custom: Sequence[LogitsProcessor] = ()
    memory: InheritedMemory | None = None
