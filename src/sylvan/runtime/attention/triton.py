"""Paged attention by Triton kernels: the default on GPUs. Nothing is planned on the host."""

from __future__ import annotations

from typing import ClassVar

import torch

from sylvan.kernels.api import HeadNorm, KVScales, Rope
from sylvan.kernels.gpu.choice import triton_installed
from sylvan.kernels.paged.pages import NIBBLES, Cache, LayerKV, Rotary
from sylvan.protocol.errors import ConfigError
from sylvan.runtime.attention.api import AttentionCaps, AttentionLayer, ForwardBatch


class TritonAttention:
    """Runs decoding steps by the split-KV kernel, and all others by the prefill kernel."""

    caps: ClassVar = AttentionCaps(
        devices=frozenset({"cuda", "rocm"}),
        row_ends=True,
        variants=True,
        graph_capture=True,
        runners=frozenset({"eager", "graph"}),
        kv_dtypes=frozenset({"model", "int8", "int4", "fp8_e4m3", "fp8_e5m2"}),
        max_head_dim=1024,
        from_projection=True,
        kv_scales=True,
    )

    def __init__(self) -> None:
        if not triton_installed():
            raise ConfigError(
                "attention=triton: triton is not installed; pip install 'sylvan[gpu]', or choose "
                "attention=torch"
            )
        # Imported here, because Triton is optional.
        from sylvan.kernels.paged import triton_attention, triton_heads, triton_scaled

        self._attention, self._heads = triton_attention, triton_heads
        self._rotate = triton_scaled.rotate_heads

    def plan(self, batch: ForwardBatch) -> None:
        """Do nothing: lengths and pages stay on the device."""

    def run(
        self,
        spec: AttentionLayer,
        q_TNH: torch.Tensor,
        k_TKH: torch.Tensor,
        v_TKH: torch.Tensor,
        batch: ForwardBatch,
    ) -> torch.Tensor:
        self._heads.store_kv(k_TKH, v_TKH, self._cache(spec, batch))
        return self._attend(spec, q_TNH, batch)

    def run_fused(
        self,
        spec: AttentionLayer,
        qkv: torch.Tensor,
        rope: Rope | None,
        norms: tuple[HeadNorm | None, HeadNorm | None],
        batch: ForwardBatch,
    ) -> torch.Tensor:
        """Run head norms, rotary positions and the KV store as one kernel, then attend."""
        rotary = Rotary(rope, *norms)
        cache = self._cache(spec, batch)
        q_TNH = self._heads.store_heads(qkv, spec, batch.positions_T, rotary, cache)
        return self._attend(spec, q_TNH, batch)

    def _cache(self, spec: AttentionLayer, batch: ForwardBatch) -> Cache:
        keys, values = batch.kv.layer(spec.index)
        slots_T, scales = batch.slots_of(spec.index), _scales(spec, keys)
        return Cache(keys=keys, values=values, slots_T=slots_T, scales=scales)

    def _attend(
        self, spec: AttentionLayer, q_TNH: torch.Tensor, batch: ForwardBatch
    ) -> torch.Tensor:
        keys, values = batch.kv.layer(spec.index)
        pages = LayerKV(
            keys=keys,
            values=values,
            table_SP=batch.table_of(spec.index),
            rows_R=batch.req_slots_R,
            lens_R=batch.kv_lens_R,
            scales=_scales(spec, keys),
        )
        rotated = keys.dtype == NIBBLES
        q_TNH = self._rotate(q_TNH) if rotated else q_TNH
        if batch.num_tokens == batch.num_reqs:  # one token per request
            out = self._attention.decode(q_TNH, pages, spec)
        else:
            ends_T = batch.ends(spec)
            out = self._attention.extend(q_TNH, pages, batch.q_starts_R, spec, ends_T=ends_T)
        return self._rotate(out) if rotated else out


def _scales(spec: AttentionLayer, side: torch.Tensor) -> KVScales | None:
    """Scales of keys or values from the checkpoint, if pages hold 8-bit floats."""
    return spec.kv_scales if side.dtype.is_floating_point and side.dtype.itemsize == 1 else None


BACKEND = TritonAttention
