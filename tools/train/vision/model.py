"""Sapling with eyes: a small SigLIP tower whose patches become tokens of sapling.

The tensors have the names of llava-hf's checkpoints (`language_model`, `vision_tower`,
`multi_modal_projector`), which transformers loads as `LlavaForConditionalGeneration`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tools.train.model import (
    Attention,
    ModelConfig,
    Sapling,
    Scores,
    Tables,
    product,
    rotary_tables,
    rotate,
    short_attention,
    together,
)

IMAGE_TOKEN = 4096  # of the tokenizer: right after sapling's own
VOCAB_SIZE = 4112  # a multiple of 16, which kernels like


@dataclass(frozen=True)
class VisionConfig:
    """The shape of the tower."""

    image_size: int = 96
    patch_size: int = 12
    hidden_size: int = 192
    intermediate_size: int = 512
    num_layers: int = 4
    num_heads: int = 3
    layer_norm_eps: float = 1e-6

    @property
    def num_tokens(self) -> int:
        """Tokens of a picture."""
        return (self.image_size // self.patch_size) ** 2


def table_of_places(side: int, width: int) -> Tensor:
    """Sines and cosines of the rows and columns of a square of patches: (side * side, width)."""
    quarter = width // 4
    rates = torch.exp(-math.log(100.0) * torch.arange(quarter) / quarter) * math.pi / 2
    angles = torch.arange(side)[:, None] * rates
    waves = torch.cat((angles.sin(), angles.cos()), 1)  # (side, width / 2)
    rows, columns = waves[:, None].expand(-1, side, -1), waves[None].expand(side, -1, -1)
    return torch.cat((rows, columns), -1).reshape(side * side, width)


def affine(x: Tensor, layer: nn.Linear) -> Tensor:
    """A linear layer, in bfloat16, whose backward pass is fast on a CPU."""
    return product(x.to(torch.bfloat16), layer.weight) + layer.bias.to(torch.bfloat16)


def mixed_values(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Attention of all to all; on a CPU from plain products, faster for so few patches."""
    if query.is_cuda:
        return F.scaled_dot_product_attention(query, key, value)
    flat = [part.flatten(0, 1) for part in (query, key, value)]
    scores = torch.bmm(flat[0], flat[1].mT) * query.shape[-1] ** -0.5
    return torch.bmm(scores.softmax(-1), flat[2]).view_as(query)


class TowerAttention(nn.Module):
    """All patches attend to each other."""

    def __init__(self, config: VisionConfig) -> None:
        super().__init__()
        width = config.hidden_size
        self.num_heads = config.num_heads
        self.q_proj, self.k_proj, self.v_proj, self.out_proj = (
            nn.Linear(width, width) for _ in range(4)
        )

    def forward(self, x: Tensor) -> Tensor:
        """Attend."""
        layers = (self.q_proj, self.k_proj, self.v_proj)
        biases = torch.cat([layer.bias for layer in layers]).split(x.shape[-1])
        parts = (
            part + bias.to(part.dtype)
            for part, bias in zip(together(x.to(torch.bfloat16), *layers), biases, strict=True)
        )
        query, key, value = (
            part.unflatten(-1, (self.num_heads, -1)).transpose(1, 2) for part in parts
        )
        return affine(mixed_values(query, key, value).transpose(1, 2).flatten(2), self.out_proj)


class TowerMLP(nn.Module):
    """The feed-forward block."""

    def __init__(self, config: VisionConfig) -> None:
        super().__init__()
        self.fc1 = nn.Linear(config.hidden_size, config.intermediate_size)
        self.fc2 = nn.Linear(config.intermediate_size, config.hidden_size)

    def forward(self, x: Tensor) -> Tensor:
        """Project up and down."""
        return affine(F.gelu(affine(x, self.fc1), approximate="tanh"), self.fc2)


class TowerLayer(nn.Module):
    """One pre-norm layer."""

    def __init__(self, config: VisionConfig) -> None:
        super().__init__()
        self.layer_norm1 = nn.LayerNorm(config.hidden_size, config.layer_norm_eps)
        self.self_attn = TowerAttention(config)
        self.layer_norm2 = nn.LayerNorm(config.hidden_size, config.layer_norm_eps)
        self.mlp = TowerMLP(config)

    def forward(self, x: Tensor) -> Tensor:
        """Attention, then feed-forward."""
        x = x + self.self_attn(self.layer_norm1(x))
        return x + self.mlp(self.layer_norm2(x))


class Embeddings(nn.Module):
    """Patches to rows."""

    def __init__(self, config: VisionConfig) -> None:
        super().__init__()
        size, width = config.patch_size, config.hidden_size
        self.patch_embedding = nn.Conv2d(3, width, size, size)
        self.position_embedding = nn.Embedding(config.num_tokens, width)
        side = config.image_size // config.patch_size
        self.position_embedding.weight.data.copy_(table_of_places(side, width))

    def forward(self, pixels: Tensor) -> Tensor:
        """(N, 3, side, side) to (N, patches, width)."""
        rows = self.patch_embedding(pixels).flatten(2).transpose(1, 2)
        return rows + self.position_embedding.weight


class Tower(nn.Module):
    """SigLIP's encoder; its last norm is not used by LLaVA."""

    def __init__(self, config: VisionConfig) -> None:
        super().__init__()
        self.config = config
        self.embeddings = Embeddings(config)
        self.layers = [TowerLayer(config) for _ in range(config.num_layers)]
        self.encoder = nn.ModuleDict({"layers": nn.ModuleList(self.layers)})
        self.post_layernorm = nn.LayerNorm(config.hidden_size, config.layer_norm_eps)
        self.post_layernorm.requires_grad_(requires_grad=False)

    def forward(self, pixels: Tensor) -> Tensor:
        """Rows of the last layer."""
        x = self.embeddings(pixels)
        for layer in self.layers:
            x = layer(x)
        return x


class Projector(nn.Module):
    """From the width of the tower to that of the text."""

    def __init__(self, config: VisionConfig, width: int) -> None:
        super().__init__()
        self.linear_1 = nn.Linear(config.hidden_size, width)
        self.linear_2 = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Project."""
        return affine(F.gelu(affine(x, self.linear_1)), self.linear_2)


def begin_tower(module: nn.Module) -> None:
    """Initial weights of a tower or projector: heads first look at near patches.

    Queries and keys begin equal, and places that are near have codes that are alike.
    """
    for name, parameter in module.named_parameters():
        deep = name.endswith(("out_proj.weight", "fc2.weight"))
        if parameter.dim() == 2 and "position" not in name:
            nn.init.normal_(parameter, std=0.0 if deep else parameter.shape[1] ** -0.5)
        elif parameter.dim() == 4:
            nn.init.normal_(parameter, std=0.5 * parameter[0].numel() ** -0.5)
        elif name.endswith("bias"):
            nn.init.zeros_(parameter)
    for part in module.modules():
        if isinstance(part, TowerAttention):
            part.k_proj.weight.data.copy_(part.q_proj.weight.data)


class SaplingVision(nn.Module):
    """Tower, projector and sapling."""

    def __init__(self, config: VisionConfig | None = None) -> None:
        super().__init__()
        self.config = config or VisionConfig()
        text = ModelConfig(vocab_size=VOCAB_SIZE)
        self.vision_tower = nn.ModuleDict({"vision_model": Tower(self.config)})
        self.multi_modal_projector = Projector(self.config, text.hidden_size)
        begin_tower(self)
        self.language_model = Sapling(text)

    def read_sapling(self, tensors: dict[str, Tensor]) -> None:
        """Take over the text half; the rows of new tokens begin as the mean of the others."""
        wide = {name: tensor.float() for name, tensor in tensors.items()}
        rows = wide["model.embed_tokens.weight"]
        more = rows.mean(0, keepdim=True).expand(VOCAB_SIZE - len(rows), -1)
        wide["model.embed_tokens.weight"] = torch.cat((rows, more))
        self.language_model.load_state_dict(wide)

    @torch.no_grad()
    def vectors(self, pixels: Tensor) -> Tensor:
        """The tokens of pictures: uint8 (N, side, side, 3) to (N, tokens, width)."""
        scaled = pixels.permute(0, 3, 1, 2).float() / 127.5 - 1
        with torch.autocast(pixels.device.type, dtype=torch.bfloat16):
            return self.multi_modal_projector(self.vision_tower["vision_model"](scaled))

    def hidden(self, before: Tensor, vectors: Tensor, asked: Sequence[Tensor]) -> list[Tensor]:
        """Final states of questions about pictures, none of which sees another.

        Arguments:
            before: Tokens before the picture (B), the same for all.
            vectors: The tokens of a picture a row (N, tokens, width).
            asked: Groups of questions and their answers, right-padded (N, questions, length).
        """
        body = self.language_model.model
        embedded = [body.embed_tokens(one).to(torch.bfloat16) for one in (before, *asked)]
        first = embedded[0].expand(len(vectors), -1, -1)
        shared = torch.cat((first, vectors.to(first.dtype)), 1)[:, None]
        parts = [shared, *embedded[1:]]
        begins = [0] + [shared.shape[2]] * len(asked)
        tables = [
            rotary_tables(
                torch.arange(start, start + part.shape[2], device=part.device), body.config
            )
            for start, part in zip(begins, parts, strict=True)
        ]
        shapes = [part.shape[:3] for part in parts]
        x = torch.cat([part.flatten(0, 2) for part in parts])
        for layer in body.layers:
            x = x + attend(layer.self_attn, layer.input_layernorm(x), shapes, tables)
            x = x + layer.mlp(layer.post_attention_layernorm(x))
        rows = x.split([math.prod(shape) for shape in shapes])[1:]
        return [
            body.norm(row.view(*shape, -1)) for row, shape in zip(rows, shapes[1:], strict=True)
        ]


def attend(
    attention: Attention, x: Tensor, shapes: Sequence[torch.Size], tables: Sequence[Tables]
) -> Tensor:
    """Attention of flat rows; those of the first shape are shared by all others, the questions."""
    dim = attention.config.head_dim
    sizes = [math.prod(shape) for shape in shapes]
    projected = [
        part.split(sizes)
        for part in together(x, attention.q_proj, attention.k_proj, attention.v_proj)
    ]
    mixed: list[Tensor] = []
    shared: tuple[Tensor, Tensor] | None = None
    for shape, (cos, sin), *flat in zip(shapes, tables, *projected, strict=True):
        query, key, value = (part.view(*shape, -1, dim).transpose(2, 3) for part in flat)
        query, key = rotate(query, cos, sin), rotate(key, cos, sin)
        if shared is None:
            shared = key[:, 0], value[:, 0]
            out = short_attention(query[:, 0], key[:, 0], value[:, 0])[:, None]
        else:
            out = asked_attention((query, key, value), shared)
        mixed.append(out.transpose(2, 3).reshape(math.prod(shape), -1))
    return product(torch.cat(mixed), attention.o_proj.weight)


def asked_attention(asked: tuple[Tensor, Tensor, Tensor], shared: tuple[Tensor, Tensor]) -> Tensor:
    """Attention of questions to what they share and, causally, to themselves.

    Arguments:
        asked: Queries (N, questions, heads, length, dim), keys and values, of fewer heads.
        shared: Keys and values (N, key heads, length, dim).
    """
    query, key, value = asked
    rows, questions, heads, length, dim = query.shape
    few = key.shape[2]
    groups = heads // few
    stacked = query.unflatten(2, (few, groups)).permute(0, 2, 1, 3, 4, 5)
    own_key, own_value = (one.transpose(1, 2).reshape(-1, length, dim) for one in (key, value))
    there_key, there_value = (one.reshape(rows * few, -1, dim) for one in shared)
    width = there_key.shape[1]
    to_shared = Scores.apply(stacked.reshape(rows * few, -1, dim), there_key)
    to_own = Scores.apply(stacked.reshape(rows * few * questions, -1, dim), own_key)
    shape = rows, few, questions, groups, length
    places = torch.arange(length, device=query.device)
    hidden = places[None, :] > places[:, None]
    own = to_own.view(*shape, length).masked_fill(hidden, float("-inf"))
    scores = torch.cat((to_shared.view(*shape, width), own), -1).float() * dim**-0.5
    weights = scores.softmax(-1).to(value.dtype)
    there, here = weights.split((width, length), -1)
    out = torch.bmm(there.reshape(rows * few, -1, width), there_value).view(*shape, dim)
    out = out + torch.bmm(here.reshape(rows * few * questions, -1, length), own_value).view_as(out)
    return out.permute(0, 2, 1, 3, 4, 5).reshape(rows, questions, heads, length, dim)
