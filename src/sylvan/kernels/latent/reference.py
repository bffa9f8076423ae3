"""The definition of correct, in PyTorch."""

from __future__ import annotations

import torch

from sylvan.kernels.api import LatentParts
from sylvan.kernels.paged.reference import head_norm, rotate


def latent_heads(
    q: torch.Tensor, kv: torch.Tensor, parts: LatentParts, positions_T: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    shape = parts.shape
    nope, rope = q.unflatten(-1, (shape.num_heads, -1)).split((shape.nope, shape.rope_dim), -1)
    keys_up = _dense(parts).unflatten(0, (shape.num_heads, -1))[:, : shape.nope]
    absorbed = torch.einsum("tnh,nhc->tnc", nope, keys_up)
    rotated = _rotated(rope.float(), positions_T, parts).to(q.dtype)
    latent, key = kv.float()[:, None].split((shape.latent, shape.rope_dim), -1)
    key = torch.cat((head_norm(latent, parts.norm), _rotated(key, positions_T, parts)), -1)
    queries = torch.cat((absorbed, rotated), -1)
    if parts.query_scales is not None:
        scales = parts.query_scales[positions_T.long(), None, None]
        queries = (queries.float() * scales).to(q.dtype)
    return queries, key.to(kv.dtype)


def latent_output(out_TNC: torch.Tensor, parts: LatentParts) -> torch.Tensor:
    shape = parts.shape
    values_up = _dense(parts).unflatten(0, (shape.num_heads, -1))[:, shape.nope :]
    return torch.einsum("tnc,nvc->tnv", out_TNC, values_up).flatten(1)


def _rotated(x: torch.Tensor, positions_T: torch.Tensor, parts: LatentParts) -> torch.Tensor:
    return x if parts.rope is None else rotate(x, positions_T, parts.rope)


def _dense(parts: LatentParts) -> torch.Tensor:
    assert isinstance(parts.up, torch.Tensor)
    return parts.up
