"""Write trained eyes and sapling as one ordinary Hugging Face directory.

python -m tools.train.vision.export build/vision/average.safetensors
"""

from __future__ import annotations

import argparse
import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from tools.train.evaluate import ASSETS
from tools.train.template import CHAT_TEMPLATE
from tools.train.tokenizer import write_json
from tools.train.vision.model import IMAGE_TOKEN, VOCAB_SIZE, VisionConfig
from tools.train.vision.questions import IMAGE
from tools.train.vision.tokens import load_tokenizer

_PLAIN = "{%- set content = message.content if message.content is string else '' %}"
_PARTS = """{%- set content = message.content if message.content is string else '' %}
    {%- if message.content is not string and message.content is iterable %}
        {%- set written = namespace(text='') %}
        {%- for part in message.content %}
            {%- if part.type == 'image' %}
                {%- set written.text = written.text + '<image>' %}
            {%- endif %}
        {%- endfor %}
        {%- for part in message.content %}
            {%- if part.type == 'text' %}
                {%- set written.text = written.text + part.text %}
            {%- endif %}
        {%- endfor %}
        {%- set content = written.text %}
    {%- endif %}"""
VISION_TEMPLATE = CHAT_TEMPLATE.replace(_PLAIN, _PARTS)
"""Images of a message come first, wherever the client puts them, as in training."""


def export(weights: Path, folder: Path) -> int:
    """Write weights, tokenizer and configurations; the number of parameters."""
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {
        name: tensor.to(torch.bfloat16).contiguous()
        for name, tensor in sorted(load_file(weights).items())
    }
    save_file(tensors, str(folder / "model.safetensors"), metadata={"format": "pt"})
    write_configs(folder)
    write_tokenizer(folder)
    return sum(tensor.numel() for tensor in tensors.values())


def write_configs(folder: Path) -> None:
    """Write what model and processor are made from."""
    vision = VisionConfig()
    text = json.loads((ASSETS / "config.json").read_text(encoding="utf-8"))
    text = {name: value for name, value in text.items() if name != "architectures"}
    write_json(
        folder / "config.json",
        {
            "architectures": ["LlavaForConditionalGeneration"],
            "dtype": "bfloat16",
            "eos_token_id": text["eos_token_id"],
            "image_seq_length": vision.num_tokens,
            "image_token_index": IMAGE_TOKEN,
            "model_type": "llava",
            "multimodal_projector_bias": True,
            "pad_token_id": text["pad_token_id"],
            "projector_hidden_act": "gelu",
            "text_config": text | {"vocab_size": VOCAB_SIZE},
            "tie_word_embeddings": True,
            "torch_dtype": "bfloat16",
            "vision_config": {
                "attention_dropout": 0.0,
                "hidden_act": "gelu_pytorch_tanh",
                "hidden_size": vision.hidden_size,
                "image_size": vision.image_size,
                "intermediate_size": vision.intermediate_size,
                "layer_norm_eps": vision.layer_norm_eps,
                "model_type": "siglip_vision_model",
                "num_attention_heads": vision.num_heads,
                "num_channels": 3,
                "num_hidden_layers": vision.num_layers,
                "patch_size": vision.patch_size,
                "vision_use_head": False,
            },
            "vision_feature_layer": -1,
            "vision_feature_select_strategy": "full",
        },
    )
    size = {"height": vision.image_size, "width": vision.image_size}
    write_json(
        folder / "preprocessor_config.json",
        {
            "do_convert_rgb": True,
            "do_normalize": True,
            "do_rescale": True,
            "do_resize": True,
            "image_mean": [0.5, 0.5, 0.5],
            "image_processor_type": "SiglipImageProcessor",
            "image_std": [0.5, 0.5, 0.5],
            "processor_class": "LlavaProcessor",
            "resample": 3,
            "rescale_factor": 1 / 255,
            "size": size,
        },
    )
    write_json(
        folder / "processor_config.json",
        {
            "image_token": IMAGE,
            "num_additional_image_tokens": 0,
            "patch_size": vision.patch_size,
            "processor_class": "LlavaProcessor",
            "vision_feature_select_strategy": "full",
        },
    )
    shutil.copyfile(ASSETS / "generation_config.json", folder / "generation_config.json")


def write_tokenizer(folder: Path) -> None:
    """Write sapling's tokenizer with the token of pictures, and the template."""
    load_tokenizer().save(str(folder / "tokenizer.json"))
    config = json.loads((ASSETS / "tokenizer_config.json").read_text(encoding="utf-8"))
    config["added_tokens_decoder"][str(IMAGE_TOKEN)] = {
        "content": IMAGE,
        "lstrip": False,
        "normalized": False,
        "rstrip": False,
        "single_word": False,
        "special": True,
    }
    config["additional_special_tokens"].append(IMAGE)
    config["chat_template"] = VISION_TEMPLATE
    config["processor_class"] = "LlavaProcessor"
    write_json(folder / "tokenizer_config.json", config)
    (folder / "chat_template.jinja").write_text(VISION_TEMPLATE + "\n", encoding="utf-8")
    special = json.loads((ASSETS / "special_tokens_map.json").read_text(encoding="utf-8"))
    special["additional_special_tokens"].append(IMAGE)
    write_json(folder / "special_tokens_map.json", special)


def main(arguments: list[str] | None = None) -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("weights", type=Path)
    usual = ASSETS.with_name("sapling-vision")
    parser.add_argument("--output", type=Path, default=usual, help="model directory")
    chosen = parser.parse_args(arguments)
    count = export(chosen.weights, chosen.output)
    print(f"exported {count} parameters to {chosen.output}")


if __name__ == "__main__":
    main()
