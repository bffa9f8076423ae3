"""Medusa: several heads that each predict one token further, all from the model's last vector.

Head k reads the vector at position p and drafts the token at p + 2 + k: residual blocks, then a
vocabulary matrix (arXiv:2401.10774). Two checkpoint layouts are supported: the authors'
(`medusa_lm_head.*`: `0.0.linear.weight`, `0.1.weight`) and vLLM's (`blocks.0.layers.0.weight`,
`lm_heads.0.weight`, with a `token_map` of the drafted ids).

Shapes: R rows, D hidden, V vocabulary, W tokens that can be drafted.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from sylvan.protocol.errors import ConfigError
from sylvan.runtime.models.config import ModelConfig, read_config
from sylvan.runtime.models.files import LoadFormat, open_weights
from sylvan.runtime.models.pickled import read_tensors

PICKLED = "medusa_lm_head.pt"
"""The authors' file, written by torch.save."""
MAX_HEADS, MAX_BLOCKS = 64, 16


class MedusaHead(nn.Module):
    """One head: x + silu(linear(x)) for each block, then logits."""

    def __init__(self, blocks: list[tuple[torch.Tensor, torch.Tensor | None]]) -> None:
        super().__init__()
        self._blocks = blocks

    def forward(self, hidden_RD: torch.Tensor) -> torch.Tensor:
        """Input of the vocabulary matrix. Shape: (R, D) -> (R, D)."""
        for weight_DD, bias_D in self._blocks:
            hidden_RD = hidden_RD + F.silu(F.linear(hidden_RD, weight_DD, bias_D))
        return hidden_RD


class MedusaHeads:
    """All heads of a checkpoint.

    Args:
        path: Directory of the heads.
        model: Config of the model that they draft for.
        dtype: Type to compute in.
        load_format: Load format of its files; the authors' pickle needs `pt`.

    Attributes:
        token_ids: Ids of the tokens that can be drafted, int64 (W,); None: all, in order.

    Raises:
        ConfigError: not a Medusa checkpoint, or for another model; names the file, field or tensor.
    """

    def __init__(
        self, path: Path, model: ModelConfig, dtype: torch.dtype, load_format: LoadFormat = "auto"
    ) -> None:
        self._path, self._model, self._dtype = path, model, dtype
        raw = read_config(path)
        self._tensors = _by_plain_name(path, load_format)
        count = self._number(raw, ("medusa_num_heads", "num_heads"), MAX_HEADS)
        depth = self._number(raw, ("medusa_num_layers", "num_hidden_layers"), MAX_BLOCKS)
        theirs = "0.0.linear.weight" in self._tensors
        if not theirs and "blocks.0.layers.0.weight" not in self._tensors:
            raise self._error("it has no Medusa heads ('0.0.linear.weight' is missing)")
        self.token_ids = self._token_ids()
        width = model.vocab_size if self.token_ids is None else len(self.token_ids)
        self._heads = [
            MedusaHead([self._block(i, j, theirs=theirs) for j in range(depth)])
            for i in range(count)
        ]
        self._words = [self._matrix(i, depth, width, theirs=theirs) for i in range(count)]

    def __len__(self) -> int:
        return len(self._heads)

    def logits(self, head: int, hidden_RD: torch.Tensor) -> torch.Tensor:
        """Logits of one head: float32 (R, W)."""
        inner_RD = self._heads[head](hidden_RD.to(self._dtype))
        return F.linear(inner_RD, self._words[head]).float()

    def _block(self, head: int, number: int, *, theirs: bool) -> tuple[torch.Tensor, Any]:
        stem = f"{head}.{number}.linear" if theirs else f"blocks.{head}.layers.{number}"
        dim = self._model.hidden_size
        bias = self._tensors.get(f"{stem}.bias")
        if bias is not None:
            bias = self._shaped(f"{stem}.bias", (dim,))
        return self._shaped(f"{stem}.weight", (dim, dim)), bias

    def _matrix(self, head: int, depth: int, width: int, *, theirs: bool) -> torch.Tensor:
        name = f"{head}.{depth}.weight" if theirs else f"lm_heads.{head}.weight"
        shared = next(
            (n for n in ("lm_head.weight", "lm_heads.0.weight") if n in self._tensors), ""
        )
        if name not in self._tensors and shared and not theirs:
            name = shared  # one for all (`original_lm_head`)
        dim, ids = self._model.hidden_size, self.token_ids
        given = self._tensors.get(name)
        if ids is not None and given is not None and len(given) == self._model.vocab_size:
            return self._shaped(name, (len(given), dim))[ids].contiguous()
        return self._shaped(name, (width, dim))

    def _token_ids(self) -> torch.Tensor | None:
        ids = self._tensors.get("token_map")
        if ids is None:
            return None
        ids = ids.long()
        if ids.dim() != 1 or ids.min() < 0 or ids.max() >= self._model.vocab_size:
            raise self._error(
                f"tensor 'token_map' has ids that are not in 0..{self._model.vocab_size - 1}"
            )
        return ids

    def _shaped(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        tensor = self._tensors.get(name)
        if tensor is None:
            raise self._error(f"tensor {name!r} is missing")
        if tuple(tensor.shape) != shape:
            raise self._error(
                f"tensor {name!r} has shape {list(tensor.shape)}; for this model it should have "
                f"{list(shape)}"
            )
        return tensor.to(self._dtype).contiguous()

    def _number(self, raw: Mapping[str, Any], names: tuple[str, ...], most: int) -> int:
        name = next((n for n in names if n in raw), names[0])
        found = raw.get(name)
        if not isinstance(found, int) or isinstance(found, bool) or not 1 <= found <= most:
            raise self._error(f"config.json: {name} must be in 1..{most}, it is {found!r}")
        return found

    def _error(self, why: str) -> ConfigError:
        return ConfigError(f"speculative.draft_model={self._path}: {why}")


def _by_plain_name(path: Path, load_format: LoadFormat) -> dict[str, torch.Tensor]:
    pickled = path / PICKLED
    if pickled.is_file() and not any(path.glob("*.safetensors")):
        if load_format != "pt":
            raise ConfigError(
                f"speculative.draft_model={path}: {PICKLED} is a pickle; --load-format pt reads "
                "it, tensors only and no code, or convert it to safetensors"
            )
        found = read_tensors(pickled)
    else:
        files = open_weights(path)
        found = {name: files.tensor(name) for name in files.tensors}
    return {
        name.removeprefix("medusa_heads.").removeprefix("medusa_head."): tensor
        for name, tensor in found.items()
    }
