"""A trainable EAGLE-3 head, with the parameter names of the published format.

Shapes: B texts, T positions, D hidden, F features read from the model, N heads, K key/value heads,
H head dim, W draft vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from sylvan.runtime.models.config import ModelConfig
from sylvan.runtime.models.rope import rope_table


class _Norm(nn.Module):
    def __init__(self, dim: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))
        self._eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, self.weight.shape, self.weight, self._eps)


@dataclass(slots=True)
class PastKV:
    """Keys and values of the passes so far, (B, N, T, H) each; pass 0 read the model's features.

    Row i of pass j is position i + j: the draft after row i of pass j - 1.
    """

    keys: list[Tensor]
    values: list[Tensor]


class _Attention(nn.Module):
    """Attends to pass 0 causally, and in later passes to the drafts of its own row only."""

    def __init__(self, config: ModelConfig, length: int) -> None:
        super().__init__()
        inputs = 2 * config.hidden_size
        self.q_proj = nn.Linear(inputs, config.q_dim, bias=False)
        self.k_proj = nn.Linear(inputs, config.kv_dim, bias=False)
        self.v_proj = nn.Linear(inputs, config.kv_dim, bias=False)
        self.o_proj = nn.Linear(config.q_dim, config.hidden_size, bias=False)
        self._head_dim, self._scale = config.head_dim, config.head_dim**-0.5
        self._groups = config.num_attention_heads // config.num_key_value_heads
        table = rope_table(config.rope, config.head_dim, config.max_position_embeddings, length)
        self.register_buffer("_table", table, persistent=False)

    def forward(self, x_BTE: Tensor, past: PastKV) -> Tensor:
        shift = len(past.keys)
        q, k, v = (
            projection(x_BTE).unflatten(2, (-1, self._head_dim)).transpose(1, 2)
            for projection in (self.q_proj, self.k_proj, self.v_proj)
        )
        q, k = self._rotate(q, shift), self._rotate(k, shift)
        past.keys.append(k.repeat_interleave(self._groups, 1))
        past.values.append(v.repeat_interleave(self._groups, 1))
        length = x_BTE.shape[1]
        known = q @ past.keys[0].transpose(2, 3) * self._scale
        later = torch.ones(length, length, dtype=torch.bool, device=q.device).triu(1)
        scores = [known.masked_fill(later, -torch.inf)]
        scores += [(q * keys).sum(-1, keepdim=True) * self._scale for keys in past.keys[1:]]
        shares = torch.cat(scores, -1).softmax(-1)
        mixed = shares[..., :length] @ past.values[0]
        for number, values in enumerate(past.values[1:]):
            mixed = mixed + shares[..., length + number, None] * values
        return self.o_proj(mixed.transpose(1, 2).flatten(2))

    def _rotate(self, x_BNTH: Tensor, shift: int) -> Tensor:
        length = x_BNTH.shape[2]
        cos, sin = self.get_buffer("_table")[shift : shift + length].chunk(2, -1)
        half = cos.shape[1]
        a, b = x_BNTH[..., :half], x_BNTH[..., half : 2 * half]
        rotated = torch.cat([a * cos - b * sin, b * cos + a * sin], -1)
        return torch.cat([rotated, x_BNTH[..., 2 * half :]], -1)


class _MLP(nn.Module):
    def __init__(self, dim: int, inner: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(dim, inner, bias=False)
        self.up_proj = nn.Linear(dim, inner, bias=False)
        self.down_proj = nn.Linear(inner, dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class _Layer(nn.Module):
    def __init__(self, config: ModelConfig, length: int) -> None:
        super().__init__()
        dim, eps = config.hidden_size, config.rms_norm_eps
        self.hidden_norm = _Norm(dim, eps)
        self.input_layernorm = _Norm(dim, eps)
        self.self_attn = _Attention(config, length)
        self.post_attention_layernorm = _Norm(dim, eps)
        self.mlp = _MLP(dim, config.intermediate_size)

    def forward(self, embeds_BTD: Tensor, hidden_BTD: Tensor, past: PastKV) -> Tensor:
        both = torch.cat([self.input_layernorm(embeds_BTD), self.hidden_norm(hidden_BTD)], -1)
        x_BTD = hidden_BTD + self.self_attn(both, past)
        return x_BTD + self.mlp(self.post_attention_layernorm(x_BTD))


class TrainableHead(nn.Module):
    """The head; its state dict has the tensors of a checkpoint except the token maps `d2t`, `t2d`.

    Args:
        config: Configuration of its layer.
        num_features: F.
        draft_vocab: W.
        length: Maximum length of a text, including drafts.
    """

    def __init__(
        self, config: ModelConfig, num_features: int, draft_vocab: int, length: int
    ) -> None:
        super().__init__()
        dim = config.hidden_size
        self.fc = nn.Linear(num_features, dim, bias=False)
        self.midlayer = _Layer(config, length)
        self.norm = _Norm(dim, config.rms_norm_eps)
        self.lm_head = nn.Linear(dim, draft_vocab, bias=False)

    def init_from_model(self, norm_D: Tensor, head_WD: Tensor) -> None:
        """Start from the model: its last layer's output as features, its final norm and LM head."""
        dim = len(norm_D)
        with torch.no_grad():
            self.fc.weight.zero_()
            self.fc.weight[:, -dim:] = torch.eye(dim)
            self.norm.weight.copy_(norm_D)
            self.lm_head.weight.copy_(head_WD)

    def forward(self, embeds_BTD: Tensor, hidden_BTD: Tensor, past: PastKV) -> Tensor:
        """Return predicted hidden states of the model at the next positions. Shape: (B, T, D).

        Args:
            embeds_BTD: Embedding of the token after each position.
            hidden_BTD: In pass 0 the output of `fc` for the model's features; later the previous
                output of this method.
            past: Keys and values of earlier passes; those of this pass are appended.
        """
        return self.midlayer(embeds_BTD, hidden_BTD, past)

    def logits(self, hidden: Tensor) -> Tensor:
        """Return the logits of the draft vocabulary. Shape: (..., D) -> (..., W)."""
        return self.lm_head(self.norm(hidden))
