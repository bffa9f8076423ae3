"""Every op a model may call. T rows of tokens; each takes torch tensors or symbolic values."""

from __future__ import annotations

from sylvan.kernels.cast import cast
from sylvan.kernels.collective import all_gather, all_reduce, all_to_all, reduce_scatter
from sylvan.kernels.compressed import compressed_attention, grouped_linear
from sylvan.kernels.embed import embedding
from sylvan.kernels.experts import experts
from sylvan.kernels.gating import activation, glu, xielu
from sylvan.kernels.latent import latent_attention, latent_heads, latent_output
from sylvan.kernels.lora import lora, lora_embedding
from sylvan.kernels.matmul import gated_linear, linear
from sylvan.kernels.norm import layer_norm, rms_norm
from sylvan.kernels.paged import attention
from sylvan.kernels.ragged import ragged_attention
from sylvan.kernels.rows import add, clamp, scale, scale_rows, softcap, take_rows
from sylvan.kernels.sparse import sparse_latent_attention
from sylvan.kernels.streams import collapse_streams, expand_streams, spread_streams, sum_streams

__all__ = [
    "activation",
    "add",
    "all_gather",
    "all_reduce",
    "all_to_all",
    "attention",
    "cast",
    "clamp",
    "collapse_streams",
    "compressed_attention",
    "embedding",
    "expand_streams",
    "experts",
    "gated_linear",
    "glu",
    "grouped_linear",
    "latent_attention",
    "latent_heads",
    "latent_output",
    "layer_norm",
    "linear",
    "lora",
    "lora_embedding",
    "ragged_attention",
    "reduce_scatter",
    "rms_norm",
    "scale",
    "scale_rows",
    "softcap",
    "sparse_latent_attention",
    "spread_streams",
    "sum_streams",
    "take_rows",
    "xielu",
]
