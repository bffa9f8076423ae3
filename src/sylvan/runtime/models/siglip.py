"""Text encoder of SigLIP and SigLIP 2: bidirectional, pooled at the last token.

A text is padded to the length that the model was trained on, and padding is attended to like text
(arXiv:2303.15343, arXiv:2502.14786). The image encoder belongs to a capability
(`features.multimodal`).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch.nn import functional as F

from sylvan.protocol.media import APART_TOKEN
from sylvan.runtime.models.clip import ClipText
from sylvan.runtime.models.config import ModelConfig, ModelMedia, common_fields, make_config
from sylvan.runtime.models.safetensors import Checkpoint
from sylvan.runtime.models.text_parts import text_part
from sylvan.runtime.models.token_heads import Transform

Raw = dict[str, Any]

_USUAL: Raw = {
    "hidden_size": 768,
    "intermediate_size": 3072,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "max_position_embeddings": 64,
    "vocab_size": 32000,
    "hidden_act": "gelu_pytorch_tanh",
}
_HEAD = "head"


def parse(raw: Raw) -> ModelConfig:
    """Read config.json of `SiglipModel` or `SiglipTextModel`, and of SigLIP 2."""
    text = text_part(raw)
    fields = common_fields(_USUAL | text)
    media = None
    if raw.get("vision_config"):
        size = text.get("projection_size") or fields["hidden_size"]
        media = ModelMedia(
            architecture=fields["architecture"],
            token_ids={"image": APART_TOKEN},
            dual_encoder=int(size),
        )
    return make_config(
        fields
        | {
            "num_key_value_heads": fields["num_attention_heads"],
            "norm": "layer",
            "rms_norm_eps": text.get("layer_norm_eps", 1e-6),
            "gated_mlp": False,
            "qkv_bias": True,
            "o_bias": True,
            "mlp_bias": True,
            "causal": False,
            "learned_positions": True,
            "tie_word_embeddings": False,
            "head": "none",
            "media": media,
        }
    )


def text_head(model_dir: Path) -> Transform:
    """The projection after pooling, into the space shared with images."""
    checkpoint = Checkpoint(model_dir)
    named = {
        name.removeprefix("text_model."): name
        for name in checkpoint.tensors
        if not name.startswith("vision_model.")
    }
    weight, bias = (
        checkpoint.tensor(named[f"{_HEAD}.{part}"]).float() for part in ("weight", "bias")
    )
    return lambda x: F.linear(x, weight, bias)


def padding_facts(model: ModelConfig) -> dict[str, int]:
    """Facts for the API process: the length to which texts are padded."""
    if not model.architecture.startswith("Siglip"):
        return {}
    return {"padded_len": model.max_position_embeddings}


class SiglipText(ClipText):
    """CLIP's tensor names, and a head."""

    @property
    def unused(self) -> tuple[str, ...]:
        """Name prefixes of tensors that are read elsewhere, or not at all."""
        return (*super().unused, f"{_HEAD}.", "logit_bias")


MODEL = SiglipText
