"""Tiny multimodal checkpoints in their published layouts, and reference encoders.

Encoders follow the published code, and use modules of transformers where it does.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import nn
from torch.nn import functional as F
from transformers.models.idefics2.configuration_idefics2 import Idefics2VisionConfig
from transformers.models.idefics2.modeling_idefics2 import Idefics2VisionTransformer

from tests.support.media_families import IMAGE, LATENT, TEXT, Features, pixels, square_patches

See = Callable[[Features], torch.Tensor]
PATCH = 7


@dataclass(frozen=True)
class Published:
    """A tiny model: its text part, its encoder, and random images."""

    text: Any
    see: See
    draw: Callable[[np.random.Generator], Features]


def _drawn(module: nn.Module) -> nn.Module:
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.normal_(0, 0.15)
            if parameter.dim() == 1:
                parameter.add_(0.5)
    return module.eval().float()


def _text(kind: str, **more: Any) -> Any:
    config = getattr(transformers, f"{kind}Config")(**TEXT | more)
    return _drawn(getattr(transformers, f"{kind}ForCausalLM")(config))


def _write(
    folder: Path,
    config: dict[str, Any],
    text: Any,
    start: str,
    parts: Mapping[str, nn.Module | torch.Tensor],
) -> None:
    text.save_pretrained(folder / "text")  # in published names
    tensors = {
        start + name: x for name, x in load_file(folder / "text" / "model.safetensors").items()
    }
    for name, part in parts.items():
        if isinstance(part, torch.Tensor):
            tensors[name] = part
        else:
            tensors |= {name + key: x for key, x in part.state_dict().items()}
    tensors = {name: x.detach().clone().contiguous() for name, x in tensors.items()}
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config))


def phi3v(folder: Path) -> Published:
    text = _text("Phi3", hidden_size=64)
    eyes = transformers.CLIPVisionConfig(
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=3,
        num_attention_heads=1,
        image_size=28,
        patch_size=PATCH,
    )
    clip = _drawn(transformers.CLIPVisionModel(eyes))
    projection = _drawn(nn.Sequential(nn.Linear(256, 64), nn.GELU(), nn.Linear(64, 64)))
    ends = {
        name: 0.5 * torch.randn(shape)
        for name, shape in (("glb_GN", (1, 1, 256)), ("sub_GN", (1, 1, 1, 256)))
    }
    start = "model.vision_embed_tokens."
    config = (
        TEXT
        | text.config.to_dict()
        | {
            "architectures": ["Phi3VForCausalLM"],
            "model_type": "phi3_v",
            "image_token_id": IMAGE,
            "img_processor": {"name": "clip_vision_model", "image_dim_out": 64},
            "embd_layer": {"hd_transform_order": "sub_glb", "use_hd_transform": True},
        }
    )
    inner = {
        f"{start}img_processor.vision_model.{name.removeprefix('vision_model.')}": x
        for name, x in clip.state_dict().items()
    }
    named = {start + name: x for name, x in ends.items()}
    _write(folder, config, text, "", {**inner, f"{start}img_projection.": projection, **named})

    def merge(features, h_crop, w_crop):
        count, length, width = features.shape
        side = int(length**0.5)
        return (
            features.reshape(count, side, side, width)
            .reshape(count, side // 2, 2, side // 2, 2, width)
            .permute(0, 1, 3, 2, 4, 5)
            .reshape(count, -1, 4 * width)
            .reshape(1, h_crop, w_crop, side // 2, side // 2, -1)
            .permute(0, 1, 3, 2, 4, 5)
            .reshape(1, h_crop * side // 2, w_crop * side // 2, 4 * width)
        )

    def line(features):
        images, height, _, width = features.shape
        newline = ends["sub_GN"].expand(images, height, -1, -1)
        return torch.cat([features, newline], dim=2).reshape(images, -1, width)

    def see(features):
        seen = torch.from_numpy(features["pixel_values"]).flatten(0, 1)
        found = clip(seen, output_hidden_states=True).hidden_states[-2][:, 1:]
        h_crop, w_crop = (int(n) // 28 for n in features["image_sizes"][0])
        sub = line(merge(found[1 : 1 + h_crop * w_crop], h_crop, w_crop))
        whole = line(merge(found[:1], 1, 1))
        return projection(torch.cat([sub[0], ends["glb_GN"][0], whole[0]]))

    def draw(rng):
        rows, columns = (int(n) for n in rng.integers(1, 3, 2))
        return {
            "pixel_values": pixels(rng, 1, 1 + rows * columns, 3, 28, 28),
            "image_sizes": np.array([[28 * rows, 28 * columns]]),
        }

    return Published(text, see, draw)


class _MoonBlock(nn.Module):
    """A block of MoonViT, with its published names."""

    def __init__(self, dim: int, inner: int) -> None:
        super().__init__()
        self.norm0, self.norm1 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.wqkv, self.wo = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.mlp = nn.ModuleDict({"fc0": nn.Linear(dim, inner), "fc1": nn.Linear(inner, dim)})


def kimi_vl(folder: Path) -> Published:
    text = _text("DeepseekV3", **LATENT)
    dim, heads, layers = 32, 2, 2
    patch = _drawn(nn.Conv2d(3, dim, PATCH, PATCH))
    table = torch.randn(6, 6, dim)
    blocks = _drawn(nn.ModuleList(_MoonBlock(dim, 48) for _ in range(layers)))
    last, pre = (_drawn(nn.LayerNorm(dim)) for _ in range(2))
    one, two = _drawn(nn.Linear(4 * dim, 4 * dim)), _drawn(nn.Linear(4 * dim, 64))
    config = {
        "architectures": ["KimiVLForConditionalGeneration"],
        "model_type": "kimi_vl",
        "media_placeholder_token_id": IMAGE,
        "text_config": text.config.to_dict(),
        "vision_config": {
            "hidden_size": dim,
            "intermediate_size": 48,
            "num_attention_heads": heads,
            "num_hidden_layers": layers,
            "patch_size": PATCH,
        },
    }
    tower = "vision_tower."
    _write(
        folder,
        config,
        text,
        "language_model.",
        {
            f"{tower}patch_embed.proj.": patch,
            f"{tower}patch_embed.pos_emb.weight": table,
            f"{tower}encoder.blocks.": blocks,
            f"{tower}encoder.final_layernorm.": last,
            "multi_modal_projector.pre_norm.": pre,
            "multi_modal_projector.linear_1.": one,
            "multi_modal_projector.linear_2.": two,
        },
    )

    def cis(height, width):
        places = torch.arange(height * width).float()
        size = dim // heads
        freqs = 1.0 / (10000 ** (torch.arange(0, size, 4)[: size // 4].float() / size))
        x, y = (torch.outer(p, freqs) for p in (places % width, places // width))
        both = [torch.polar(torch.ones_like(a), a)[..., None] for a in (x, y)]
        return torch.cat(both, -1).reshape(height * width, -1)

    def turn(x, freqs):
        found = torch.view_as_complex(x.float().view(*x.shape[:-1], -1, 2))
        return torch.view_as_real(found * freqs[:, None]).flatten(-2)

    def see(features):
        height, width = (int(n) for n in features["image_grid_hws"][0])
        x = patch(torch.from_numpy(features["pixel_values"])).flatten(1)
        scaled = F.interpolate(table.permute(2, 0, 1)[None], size=(height, width), mode="bicubic")
        x = x + scaled[0].permute(1, 2, 0).flatten(0, 1)
        freqs = cis(height, width)
        for block in blocks:
            qkv = block.wqkv(block.norm0(x)).view(len(x), 3, heads, -1)
            q, k, v = turn(qkv[:, 0], freqs), turn(qkv[:, 1], freqs), qkv[:, 2]
            scores = torch.einsum("qhd,khd->hqk", q, k) / q.shape[-1] ** 0.5
            out = torch.einsum("hqk,khd->qhd", scores.softmax(-1), v).flatten(1)
            x = x + block.wo(out)
            inner = F.gelu(block.mlp["fc0"](block.norm1(x)), approximate="tanh")
            x = x + block.mlp["fc1"](inner)
        x = last(x).view(height // 2, 2, width // 2, 2, dim).permute(0, 2, 1, 3, 4)
        x = pre(x.reshape(-1, 4, dim)).view(-1, 4 * dim)
        return two(F.gelu(one(x)))

    def draw(rng):
        made = square_patches(rng)
        grid = made.pop("image_grid_thw")
        return made | {"image_grid_hws": grid[:, 1:]}

    return Published(text, see, draw)


def deepseek_vl2(folder: Path) -> Published:
    text = _text("DeepseekV2", **LATENT | {"rope_interleave": True})
    eyes = transformers.SiglipVisionConfig(
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=2,
        image_size=21,
        patch_size=PATCH,
        hidden_act="gelu",
        vision_use_head=False,
    )
    siglip = _drawn(transformers.SiglipVisionModel(eyes))
    layers = _drawn(nn.Sequential(nn.Linear(128, 64), nn.GELU(), nn.Linear(64, 64)))
    newline, separator = torch.randn(64), torch.randn(64)
    found = {name.removeprefix("vision_model."): x for name, x in siglip.state_dict().items()}
    named = {
        "vision.patch_embed.proj.weight": found["embeddings.patch_embedding.weight"],
        "vision.patch_embed.proj.bias": found["embeddings.patch_embedding.bias"],
        "vision.pos_embed": found["embeddings.position_embedding.weight"][None],
        "vision.norm.weight": found["post_layernorm.weight"],
        "vision.norm.bias": found["post_layernorm.bias"],
    }
    for number in range(2):
        old, new = f"encoder.layers.{number}.", f"vision.blocks.{number}."
        for kind in ("weight", "bias"):
            parts = [found[f"{old}self_attn.{name}_proj.{kind}"] for name in "qkv"]
            named[f"{new}attn.qkv.{kind}"] = torch.cat(parts)
            for theirs, timm in (
                ("self_attn.out_proj", "attn.proj"),
                ("layer_norm1", "norm1"),
                ("layer_norm2", "norm2"),
                ("mlp.fc1", "mlp.fc1"),
                ("mlp.fc2", "mlp.fc2"),
            ):
                named[f"{new}{timm}.{kind}"] = found[f"{old}{theirs}.{kind}"]
    config = {
        "architectures": ["DeepseekVLV2ForCausalLM"],
        "model_type": "deepseek_vl_v2",
        "image_token_id": IMAGE,
        "candidate_resolutions": [[21, 21], [21, 42], [42, 21]],
        "global_view_pos": "head",
        "tile_tag": "2D",
        "language_config": text.config.to_dict() | {"use_mla": True},
        "projector_config": {"projector_type": "downsample_mlp_gelu", "downsample_ratio": 2},
        "vision_config": {"heads": 2, "patch_size": PATCH},
    }
    also = {"projector.layers.": layers, "image_newline": newline, "view_seperator": separator}
    _write(folder, config, text, "language.", {**named, **also})

    def project(x):
        side = int(x.shape[1] ** 0.5)
        pad = 2 - side % 2 if side % 2 else 0
        x = F.pad(x.reshape(len(x), side, side, -1), (0, 0, 0, pad, 0, pad), "constant", 0)
        x = F.unfold(x.permute(0, 3, 1, 2), kernel_size=2, stride=2, padding=0)
        return layers(x.permute(0, 2, 1))

    def line(x):
        height, _, width = x.shape
        return torch.cat([x, newline[None, None].expand(height, 1, width)], dim=1).view(-1, width)

    def see(features):
        seen = torch.from_numpy(features["pixel_values"])
        vectors = project(siglip(seen).last_hidden_state)
        side = int(vectors.shape[1] ** 0.5)
        across, down = (int(n) for n in features["images_spatial_crop"][0])
        whole = vectors[0].view(side, side, -1)
        local = vectors[1:].view(down, across, side, side, -1).permute(0, 2, 1, 3, 4)
        local = local.reshape(down * side, across * side, -1)
        return torch.cat([line(whole), separator[None], line(local)])

    def draw(rng):
        across, down = (int(n) for n in rng.integers(1, 3, 2))
        return {
            "pixel_values": pixels(rng, 1 + across * down, 3, 21, 21),
            "images_spatial_crop": np.array([[across, down]]),
        }

    return Published(text, see, draw)


def minicpmv(folder: Path) -> Published:
    wide, queries = 128, 4
    text = _text("Qwen2", hidden_size=wide)
    eyes = Idefics2VisionConfig(
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=2,
        image_size=PATCH * 10,
        patch_size=PATCH,
    )
    vpm = _drawn(Idefics2VisionTransformer(eyes))
    query, proj = torch.randn(queries, wide), 0.1 * torch.randn(wide, wide)
    kv_proj = _drawn(nn.Linear(32, wide, bias=False))
    attn = _drawn(nn.MultiheadAttention(wide, 1))
    norms = {name: _drawn(nn.LayerNorm(wide, eps=1e-6)) for name in ("ln_q", "ln_kv", "ln_post")}
    config = (
        TEXT
        | text.config.to_dict()
        | {
            "architectures": ["MiniCPMV"],
            "model_type": "minicpmv",
            "version": 2.6,
            "image_token_id": IMAGE,
            "query_num": queries,
            "vision_config": eyes.to_dict(),
        }
    )
    named = {f"resampler.{name}.": norm for name, norm in norms.items()}
    named |= {"resampler.kv_proj.": kv_proj, "resampler.attn.": attn, "vpm.": vpm}
    named |= {"resampler.query": query, "resampler.proj": proj}
    _write(folder, config, text, "llm.", named)

    def waves(size, places):
        omega = np.arange(size // 2, dtype=np.float32)
        omega /= size / 2.0
        out = np.einsum("hw,d->hwd", places, 1.0 / 10000**omega)
        return np.concatenate([np.sin(out), np.cos(out)], axis=-1)

    def slice_(patches, height, width):
        image = patches.reshape(height, width, 3, PATCH, PATCH).permute(2, 0, 3, 1, 4)
        whole = image.reshape(1, 3, height * PATCH, width * PATCH)
        mask = torch.ones(1, height, width, dtype=torch.bool)
        x = vpm(pixel_values=whole, patch_attention_mask=mask).last_hidden_state
        grid = np.stack(
            np.meshgrid(np.arange(width, dtype=np.float32), np.arange(height, dtype=np.float32))
        )
        places = np.concatenate([waves(wide // 2, grid[0]), waves(wide // 2, grid[1])], axis=-1)
        keys = torch.from_numpy(places).float().reshape(height * width, 1, wide)
        x = norms["ln_kv"](kv_proj(x)).permute(1, 0, 2)
        out = attn(norms["ln_q"](query)[:, None], x + keys, x)[0]
        return norms["ln_post"](out.permute(1, 0, 2))[0] @ proj

    def see(features):
        patches = torch.from_numpy(features["pixel_values"])
        sizes = [(int(h), int(w)) for h, w in features["tgt_sizes"]]
        parts = patches.split([h * w for h, w in sizes])
        return torch.cat([slice_(x, *size) for x, size in zip(parts, sizes, strict=True)])

    def draw(rng):
        sizes = rng.integers(1, 7, (int(rng.integers(1, 4)), 2))
        count = int(sizes.prod(1).sum())
        return {"pixel_values": pixels(rng, count, 3, PATCH, PATCH), "tgt_sizes": sizes}

    return Published(text, see, draw)


_INTERN = (
    ("embeddings.cls_token", "embeddings.class_embedding"),
    ("embeddings.position_embeddings", "embeddings.position_embedding"),
    ("embeddings.patch_embeddings.projection.", "embeddings.patch_embedding."),
    ("encoder.layer.", "encoder.layers."),
    ("attention.projection_layer.", "attn.proj."),
    ("layernorm_before.", "norm1."),
    ("layernorm_after.", "norm2."),
    ("lambda_", "ls"),
)
"""Names of InternViT in transformers, and in its published layout."""


def internvl(folder: Path) -> Published:
    text = _text("Qwen2", hidden_size=64)
    config = transformers.InternVLConfig(
        text_config=text.config.to_dict(),
        vision_config={
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "image_size": [28, 28],
            "patch_size": [PATCH, PATCH],
            "attention_bias": True,
        },
        image_seq_length=4,
    )
    model = _drawn(transformers.InternVLModel(config))
    tower, projector = model.vision_tower, model.multi_modal_projector
    named: dict[str, torch.Tensor] = {}
    for key, tensor in tower.state_dict().items():
        name = key
        for theirs, published in _INTERN:
            name = name.replace(theirs, published)
        named[f"vision_model.{name}"] = tensor
    for layer in range(2):
        start = f"vision_model.encoder.layers.{layer}."
        for kind in ("weight", "bias"):
            parts = [named.pop(f"{start}attention.{name}_proj.{kind}") for name in "qkv"]
            named[f"{start}attn.qkv.{kind}"] = torch.cat(parts)
    for number, part in enumerate(
        (projector.layer_norm, projector.linear_1, None, projector.linear_2)
    ):
        if part is not None:
            named |= {f"mlp1.{number}.{key}": x for key, x in part.state_dict().items()}
    published = {
        "architectures": ["InternVLChatModel"],
        "model_type": "internvl_chat",
        "image_token_id": IMAGE,
        "downsample_ratio": 0.5,
        "ps_version": "v2",
        "select_layer": -1,
        "llm_config": text.config.to_dict() | {"architectures": ["Qwen2ForCausalLM"]},
        "vision_config": {
            "hidden_size": 32,
            "image_size": 28,
            "num_attention_heads": 2,
            "patch_size": PATCH,
            "qkv_bias": True,
            "norm_type": "layer_norm",
        },
    }
    _write(folder, published, text, "language_model.", named)

    def see(features):
        seen = torch.from_numpy(features["pixel_values"])
        return model.get_image_features(seen).pooler_output.flatten(0, 1)

    def draw(rng):
        return {"pixel_values": pixels(rng, int(rng.integers(1, 4)), 3, 28, 28)}

    return Published(text, see, draw)


PUBLISHED: Mapping[str, Callable[[Path], Published]] = MappingProxyType(
    {
        "deepseek-vl2": deepseek_vl2,
        "internvl": internvl,
        "kimi-vl": kimi_vl,
        "minicpm-v-2.6": minicpmv,
        "phi-3-vision": phi3v,
    }
)
