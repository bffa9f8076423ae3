"""A compact Llama in plain torch, with the parameter names of transformers' LlamaForCausalLM.

It contains only what training needs: causal self-attention over right-padded rows, a language-model
head that is evaluated at selected positions, and greedy decoding for the periodic check.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True)
class ModelConfig:
    """The shape of the model; the defaults are sapling's."""

    vocab_size: int = 4096
    hidden_size: int = 256
    intermediate_size: int = 512
    num_layers: int = 5
    num_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 64
    rope_theta: float = 10000.0
    rms_norm_eps: float = 1e-5
    max_positions: int = 4096


Tables = tuple[Tensor, Tensor]


def rotary_tables(positions: Tensor, config: ModelConfig) -> Tables:
    """Cosine and sine tables of shape (..., head_dim) for integer positions."""
    device = positions.device
    half = torch.arange(0, config.head_dim, 2, dtype=torch.float32, device=device) / config.head_dim
    angles = positions[..., None].float() * (config.rope_theta**-half)
    doubled = torch.cat((angles, angles), dim=-1)
    return doubled.cos().bfloat16(), doubled.sin().bfloat16()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Apply rotary position embedding in the half-split layout that Llama uses."""
    low, high = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-high, low), dim=-1) * sin


def learnt_positions(targets: Tensor) -> tuple[Tensor, Tensor]:
    """Flat positions whose target is not -100, and those targets."""
    where = torch.nonzero(targets.flatten() >= 0).squeeze(1)
    wanted = targets.flatten()[where]
    spare = -len(where) % 128  # few distinct shapes: each new one costs the matrix library
    return F.pad(where, (0, spare)), F.pad(wanted, (0, spare), value=-100)


class Product(torch.autograd.Function):
    """`x @ weight.T` with a weight gradient that avoids transposed views.

    By default the matrix library multiplies by a transposed view there, at a third of the speed;
    this transposes the smaller of the two factors first.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        """The product, (rows, inputs) by (outputs, inputs)."""
        ctx.save_for_backward(x, weight)
        return x @ weight.t()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        """Gradients of `x` and of the weight."""
        x, weight = ctx.saved_tensors
        if x.shape[1] <= gradient.shape[1]:
            wanted = (x.t().contiguous() @ gradient).t()
        else:
            wanted = gradient.t().contiguous() @ x
        return gradient @ weight, wanted


def product(x: Tensor, weight: Tensor) -> Tensor:
    """A linear layer without bias, in bfloat16."""
    flat = Product.apply(x.flatten(0, -2), weight.to(x.dtype))
    return flat.unflatten(0, x.shape[:-1])


def together(x: Tensor, *layers: nn.Linear) -> tuple[Tensor, ...]:
    """Return the outputs of several layers with the same input, computed in one product."""
    whole = product(x, torch.cat([layer.weight for layer in layers]))
    return whole.split([layer.out_features for layer in layers], -1)


class Scores(torch.autograd.Function):
    """`query @ key.T` of a stack of matrices, with a key gradient in the layout of the keys.

    By default autograd computes the transposed gradient. Transposing it inside the kernel that
    inverts the rotary embedding makes torch 2.13's compiler read out of bounds, which yields NaN at
    random places of the keys' gradient.
    """

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor) -> Tensor:
        """The scores, (stack, queries, dim) by (stack, keys, dim)."""
        ctx.save_for_backward(query, key)
        return torch.bmm(query, key.transpose(1, 2))

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        """Gradients of queries and keys."""
        query, key = ctx.saved_tensors
        return torch.bmm(gradient, key), torch.bmm(gradient.transpose(1, 2), query)


def short_attention(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None = None
) -> Tensor:
    """Grouped-query attention from plain products, causal or with `mask` (rows, queries, keys).

    For short rows this is much faster than the fused kernel. The query heads of one key head are
    stacked as extra rows, so that keys and values need no copies.
    """
    if query.is_cuda:
        seen = None if mask is None else mask[:, None]
        return F.scaled_dot_product_attention(
            query, key, value, seen, is_causal=mask is None, enable_gqa=True
        )
    rows, heads, length, dim = query.shape
    groups = heads // key.shape[1]
    flat = (rows * key.shape[1], length, dim)
    stacked = query.reshape(flat[0], groups * length, dim)
    scores = Scores.apply(stacked, key.reshape(flat)).float() * dim**-0.5
    if mask is None:
        places = torch.arange(length)
        hidden = places[None, :] > places[:, None]
    else:
        hidden = ~mask.repeat_interleave(key.shape[1], 0)[:, None]
    scores = scores.view(-1, groups, length, length).masked_fill(hidden, float("-inf"))
    weights = scores.softmax(-1).to(value.dtype).view(flat[0], groups * length, length)
    return torch.bmm(weights, value.reshape(flat)).view(rows, heads, length, dim)


class RMSNorm(nn.Module):
    """Root-mean-square norm; inside the layers its scale stays one: the matrices absorb it."""

    def __init__(self, size: int, eps: float, *, learnt: bool = False) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size), requires_grad=learnt)
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """Normalise each row."""
        y = F.rms_norm(x.float(), (x.shape[-1],), eps=self.eps).to(x.dtype)
        return y * self.weight.to(x.dtype) if self.weight.requires_grad else y


class Attention(nn.Module):
    """Grouped-query attention."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        hidden, dim = config.hidden_size, config.head_dim
        self.q_proj = nn.Linear(hidden, config.num_heads * dim, bias=False)
        self.k_proj = nn.Linear(hidden, config.num_kv_heads * dim, bias=False)
        self.v_proj = nn.Linear(hidden, config.num_kv_heads * dim, bias=False)
        self.o_proj = nn.Linear(config.num_heads * dim, hidden, bias=False)

    def forward(
        self, x: Tensor, cos: Tensor, sin: Tensor, mask: Tensor | None, past: list[Tensor] | None
    ) -> Tensor:
        """Attend; `past` holds earlier keys and values, and is extended."""
        rows, length, _ = x.shape
        shape = (rows, length, -1, self.config.head_dim)
        query, key, value = (
            part.view(shape).transpose(1, 2)
            for part in together(x, self.q_proj, self.k_proj, self.v_proj)
        )
        query, key = rotate(query, cos, sin), rotate(key, cos, sin)
        if past is not None:
            if past:
                key = torch.cat((past[0], key), dim=2)
                value = torch.cat((past[1], value), dim=2)
            past[:] = [key, value]
        if mask is None or mask.dim() == 3:
            mixed = short_attention(query, key, value, mask)
        else:
            mixed = F.scaled_dot_product_attention(
                query, key, value, attn_mask=mask, enable_gqa=True
            )
        return product(mixed.transpose(1, 2).reshape(rows, length, -1), self.o_proj.weight)


class MLP(nn.Module):
    """The gated feed-forward block."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Gate, multiply and project down."""
        gate, up = together(x, self.gate_proj, self.up_proj)
        return product(F.silu(gate) * up, self.down_proj.weight)


class Layer(nn.Module):
    """One pre-norm transformer layer."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.self_attn = Attention(config)
        self.mlp = MLP(config)
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(
        self,
        x: Tensor,
        cos: Tensor,
        sin: Tensor,
        mask: Tensor | None = None,
        past: list[Tensor] | None = None,
    ) -> Tensor:
        """Attention, then feed-forward, each added to its input."""
        x = x + self.self_attn(self.input_layernorm(x), cos, sin, mask, past)
        return x + self.mlp(self.post_attention_layernorm(x))


class Body(nn.Module):
    """Embedding, layers and final norm (transformers' `model.` prefix)."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(Layer(config) for _ in range(config.num_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps, learnt=True)

    def forward(
        self,
        tokens: Tensor,
        tables: Tables,
        mask: Tensor | None = None,
        past: list[list[Tensor]] | None = None,
    ) -> Tensor:
        """Final hidden states of a batch of rows."""
        x = self.embed_tokens(tokens).to(torch.bfloat16)
        cos, sin = (table[:, None] if table.dim() == 3 else table for table in tables)
        for index, layer in enumerate(self.layers):
            x = layer(x, cos, sin, mask, None if past is None else past[index])
        return self.norm(x)


class Sapling(nn.Module):
    """The causal language model; the head shares the embedding."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.model = Body(config)
        for name, parameter in self.named_parameters():
            if parameter.dim() == 2:
                deep = name.endswith(("o_proj.weight", "down_proj.weight"))
                spread = 1.0 if "embed" in name else parameter.shape[1] ** -0.5
                nn.init.normal_(parameter, std=0.0 if deep else spread)
        nn.init.constant_(self.model.norm.weight, config.hidden_size**-0.5)

    def head(self, hidden: Tensor) -> Tensor:
        """Logits in float32 for hidden states of any leading shape."""
        return product(hidden, self.model.embed_tokens.weight).float()

    def loss(self, tokens: Tensor, tables: Tables, where: Tensor, wanted: Tensor) -> Tensor:
        """Return the summed cross entropy of the tokens `wanted` after the flat positions `where`.

        `tables` are those of `rotary_tables`, passed in because the compiler would otherwise
        recompute every cosine at each use.
        """
        hidden = self.model(tokens, tables).flatten(0, 1)
        return F.cross_entropy(self.head(hidden[where]), wanted, reduction="sum")

    @torch.no_grad()
    def generate(self, prompts: Sequence[Sequence[int]], stop: int, limit: int) -> list[list[int]]:
        """Return greedy continuations of a batch of prompts, each without its stop token.

        A row that does not stop within `limit` tokens ends in -1, so that it does not count as
        right.
        """
        width = max(len(prompt) for prompt in prompts)
        tokens = torch.zeros(len(prompts), width, dtype=torch.long)
        real = torch.zeros(len(prompts), width, dtype=torch.bool)
        for row, prompt in enumerate(prompts):
            tokens[row, width - len(prompt) :] = torch.tensor(prompt)
            real[row, width - len(prompt) :] = True
        positions = (real.long().cumsum(1) - 1).clamp(min=0)
        causal = torch.ones(width, width, dtype=torch.bool).tril()
        mask = (causal & real[:, None, :] | torch.eye(width, dtype=torch.bool))[:, None]
        past: list[list[Tensor]] = [[] for _ in self.model.layers]
        written: list[list[int]] = [[] for _ in prompts]
        open_rows = set(range(len(prompts)))
        for _ in range(limit):
            tables = rotary_tables(positions, self.config)
            hidden = self.model(tokens, tables, mask, past)[:, -1]
            following = self.head(hidden).argmax(-1)
            for row in list(open_rows):
                token = int(following[row])
                if token == stop:
                    open_rows.discard(row)
                else:
                    written[row].append(token)
            if not open_rows:
                break
            tokens = following[:, None]
            positions = positions[:, -1:] + 1
            real = torch.cat((real, torch.ones(len(prompts), 1, dtype=torch.bool)), dim=1)
            mask = real[:, None, None, :]
        for row in open_rows:
            written[row].append(-1)
        return written
