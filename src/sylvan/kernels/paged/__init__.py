"""Head norms, rotary positions, KV store and attention over pages."""

from __future__ import annotations

from sylvan.kernels.api import AttentionLayer, AttentionVariant, HeadNorm, Rope, TracedTensor


def attention(
    qkv: TracedTensor,
    layer: AttentionLayer,
    rope: Rope | None = None,
    q_norm: HeadNorm | None = None,
    k_norm: HeadNorm | None = None,
    variant: AttentionVariant | None = None,
) -> TracedTensor:
    """Attend over the step's pages. Shape: (T, (N + 2 K) H) to (T, N H).

    Rows hold N query heads, then K key heads, then K value heads. A layer that is not causal
    attends within the texts of the step instead, which must be complete. For tracing only: with
    tensors, an attention backend of the runtime does the same, with `paged.reference` for norms and
    rotation.
    """
    return qkv.tracer.attention(qkv, layer, rope, (q_norm, k_norm), variant)
