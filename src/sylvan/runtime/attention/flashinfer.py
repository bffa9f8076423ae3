"""Attention by FlashInfer (arXiv:2501.01005), an optional extra. Plans on the host in each step."""

from __future__ import annotations

import importlib
import importlib.util
from dataclasses import dataclass
from types import ModuleType
from typing import Any, ClassVar

import numpy as np
import torch

from sylvan.protocol.errors import ConfigError
from sylvan.runtime.attention.api import AttentionCaps, AttentionLayer, ForwardBatch

_WORKSPACE_BYTES = 256 << 20


@dataclass(frozen=True, slots=True)
class PagedIndex:
    """Page indices of requests for FlashInfer: CPU int32 tensors.

    Request r has rows q_starts[r] to q_starts[r + 1] and pages[starts[r]] to pages[starts[r + 1]],
    the last of which holds last_lens[r] tokens.
    """

    q_starts: torch.Tensor
    starts: torch.Tensor
    pages: torch.Tensor
    last_lens: torch.Tensor


def paged_index(batch: ForwardBatch, group: int = 0, window: int | None = None) -> PagedIndex:
    """Build the index from host arrays; a request's pages start at its window.

    Args:
        batch: The step.
        group: KV group whose page table is read.
        window: Window of the layers; None: full attention.
    """
    host, count, size = batch.host, batch.num_reqs, batch.kv.page_size
    lens = host.kv_lens[:count]
    first = np.zeros(count, np.int32)
    if window is not None:
        before = lens - np.diff(host.q_starts[: count + 1])
        first = np.maximum(before - window + 1, 0) // size
    numbers = -(-lens // size) - first
    starts = np.zeros(count + 1, np.int32)
    np.cumsum(numbers, out=starts[1:])
    rows = np.repeat(host.req_slots[:count], numbers)
    columns = np.arange(starts[-1], dtype=np.int32) - np.repeat(starts[:-1] - first, numbers)
    parts = (
        host.q_starts[: count + 1].copy(),
        starts,
        host.page_tables[group][rows, columns],
        lens - (first + numbers - 1) * size,
    )
    return PagedIndex(*(torch.from_numpy(x.astype(np.int32)) for x in parts))


class FlashInferAttention:
    """One FlashInfer wrapper per kind of layer (window, softcap, scale), reused in all steps."""

    caps: ClassVar = AttentionCaps(
        devices=frozenset({"cuda"}),
        kv_dtypes=frozenset({"model", "fp8_e4m3"}),
        dtypes=frozenset({"float16", "bfloat16"}),
        max_head_dim=256,
    )

    def __init__(self, library: ModuleType | None = None, device: str = "cuda") -> None:
        """`library`: replaces the installed package in tests.

        Raises:
            ConfigError: FlashInfer is not installed.
        """
        if library is None and importlib.util.find_spec("flashinfer") is None:
            raise ConfigError(
                "attention=flashinfer: flashinfer is not installed; pip install "
                "'sylvan[flashinfer]', or leave attention at auto"
            )
        self._library: Any = library or importlib.import_module("flashinfer")
        self._device = device
        self._wrappers: dict[tuple[object, ...], Any] = {}
        self._planned: set[tuple[object, ...]] = set()
        self._indices: dict[tuple[int, int | None], PagedIndex] = {}

    def plan(self, batch: ForwardBatch) -> None:
        """Drop the plans of the last step; each kind of layer plans when it first runs."""
        self._indices.clear()
        self._planned.clear()

    def run(
        self,
        spec: AttentionLayer,
        q_TNH: torch.Tensor,
        k_TKH: torch.Tensor,
        v_TKH: torch.Tensor,
        batch: ForwardBatch,
    ) -> torch.Tensor:
        if spec.sinks is not None:
            raise ConfigError("attention=flashinfer has no sinks; leave attention at auto")
        batch.kv.store(spec.index, batch.slots_of(spec.index), k_TKH, v_TKH)
        pages = batch.kv.layer(spec.index)
        key = (spec.num_heads, spec.num_kv_heads, spec.head_dim, spec.value_dim)
        group = batch.kv.layer_groups[spec.index]
        key = (*key, spec.scale, spec.window, spec.softcap, spec.causal, group)
        wrapper = self._wrapper(key)
        if key not in self._planned:
            self._plan(wrapper, spec, q_TNH, batch)
            self._planned.add(key)
        return wrapper.run(q_TNH, pages)

    def _wrapper(self, key: tuple[object, ...]) -> Any:
        if key not in self._wrappers:
            room = torch.empty(_WORKSPACE_BYTES, dtype=torch.uint8, device=self._device)
            make = self._library.BatchPrefillWithPagedKVCacheWrapper
            self._wrappers[key] = make(room, "NHD")
        return self._wrappers[key]

    def _plan(
        self, wrapper: Any, spec: AttentionLayer, q_TNH: torch.Tensor, batch: ForwardBatch
    ) -> None:
        which = batch.kv.layer_groups[spec.index], spec.window
        if which not in self._indices:
            self._indices[which] = paged_index(batch, *which)
        index = self._indices[which]
        wrapper.plan(
            index.q_starts,
            index.starts,
            index.pages,
            index.last_lens,
            spec.num_heads,
            spec.num_kv_heads,
            spec.head_dim,
            batch.kv.page_size,
            head_dim_vo=spec.value_dim,
            causal=spec.causal,
            sm_scale=spec.scale,
            window_left=-1 if spec.window is None else spec.window - 1,
            logits_soft_cap=spec.softcap,
            q_data_type=q_TNH.dtype,
            kv_data_type=batch.kv.layer(spec.index)[0].dtype,
        )


BACKEND = FlashInferAttention
