"""CLIP's text encoder: causal, pooled at the last token (arXiv:2103.00020).

The vector is projected into the space shared with images. The image encoder belongs to a capability
(`features.multimodal`).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

from torch.nn import functional as F

from sylvan.protocol.media import APART_TOKEN
from sylvan.runtime.models.config import ModelConfig, ModelMedia, common_fields, make_config
from sylvan.runtime.models.decoder import Decoder
from sylvan.runtime.models.gpt2 import Names
from sylvan.runtime.models.safetensors import Checkpoint
from sylvan.runtime.models.text_parts import text_part
from sylvan.runtime.models.token_heads import Transform

Raw = dict[str, Any]

_PROJECTION = "text_projection.weight"


def parse(raw: Raw) -> ModelConfig:
    """Read config.json of `CLIPModel`, `CLIPTextModel` or `CLIPTextModelWithProjection`."""
    text = text_part(raw)
    default = {
        "hidden_size": 512,
        "intermediate_size": 2048,
        "num_hidden_layers": 12,
        "num_attention_heads": 8,
        "max_position_embeddings": 77,
        "vocab_size": 49408,
        "hidden_act": "quick_gelu",
    }
    fields = common_fields(default | text)
    return make_config(
        fields
        | {
            "num_key_value_heads": fields["num_attention_heads"],
            "norm": "layer",
            "rms_norm_eps": text.get("layer_norm_eps", 1e-5),
            "gated_mlp": False,
            "qkv_bias": True,
            "o_bias": True,
            "mlp_bias": True,
            "learned_positions": True,
            "tie_word_embeddings": False,
            "head": "none",
            "media": _images(raw, fields["architecture"]),
        }
    )


def _images(raw: Raw, architecture: str) -> ModelMedia | None:
    """Return the image inputs; None if the checkpoint has the text encoder only."""
    if not raw.get("vision_config"):
        return None
    size = int(raw.get("projection_dim") or 512)
    return ModelMedia(
        architecture=architecture, token_ids={"image": APART_TOKEN}, dual_encoder=size
    )


def projection(model_dir: Path) -> Transform | None:
    """The projection after pooling; None: the checkpoint has none."""
    checkpoint = Checkpoint(model_dir)
    if _PROJECTION not in checkpoint.tensors:
        return None
    weight = checkpoint.tensor(_PROJECTION).float()
    return lambda x: F.linear(x, weight)


class ClipText(Decoder):
    """Maps tensor names; ignores those of the image encoder."""

    fused: ClassVar[Names] = {
        "embed_tokens": ("token_embedding",),
        "embed_positions": ("position_embedding",),
        "input_layernorm": ("layer_norm1",),
        "qkv_proj": ("q_proj", "k_proj", "v_proj"),
        "o_proj": ("out_proj",),
        "post_attention_layernorm": ("layer_norm2",),
        "up_proj": ("fc1",),
        "down_proj": ("fc2",),
        "norm": ("final_layer_norm",),
    }

    def rename(self, name: str) -> str:
        """Strip the prefixes of the text encoder's tensors."""
        for prefix in ("text_model.", "embeddings.", "encoder."):
            name = name.removeprefix(prefix)
        return name.replace("position_ids", "unused.position_ids")

    @property
    def unused(self) -> tuple[str, ...]:
        """Name prefixes of tensors that are read elsewhere, or not at all."""
        other = "vision_model.", "visual_projection.", "text_projection.", "logit_scale", "unused."
        return (*other, *self.absent)


MODEL = ClipText
